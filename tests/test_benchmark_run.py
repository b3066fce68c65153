"""Running a benchmark: what a record holds, resuming after a kill, what must not be mixed, and texts that differ."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_drafter, tiny_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from modeling_domino import cli, drafting_domino, generation_domino, loop_domino, plug_domino, record_domino
from modeling_domino.benchmark.machine import LINUX_PEAK, forget_peak_memory, peak_memory_mb, weight_bytes
from modeling_domino.benchmark.methods import Models, Settings, with_options
from modeling_domino.benchmark.plan import PAPER, benchmark_plan, deviations
from modeling_domino.benchmark.prompts import Prompt, tasks_of_folder
from modeling_domino.benchmark.records import RecordFile, key_of, read_provenance, read_records
from modeling_domino.benchmark.run import METHODS, count_differing, expand_methods, models_facts, run_benchmark
from modeling_domino.benchmark.summary import PLAIN, STAGES, decode_seconds
from modeling_domino.benchmark.variants import options_of
from modeling_domino.generation_domino import stream
from modeling_domino.tree_domino import TreeShape


TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if enable_thinking %}w9{% endif %}"
SETTINGS = Settings(max_new_tokens=8, tree=TreeShape(nodes=6, lanes=3, candidates=8, children=3))
TASKS = {
    "one": [Prompt("one/0", ("w3 w1 w4",)), Prompt("one/1", ("w1 w5 w9 w2",))],
    "two": [Prompt("two/0", ("w6 w5", "w3 w5"))],
}
TURNS = 4


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def pair() -> Models:
    target = tiny_target("llama", num_layers=4)
    # A stop token that is never drawn: prompt lookup of transformers 5.8 cannot do without one.
    target.generation_config.eos_token_id = target.config.vocab_size
    return Models(target, word_tokenizer(), tiny_drafter(target))


def run(pair: Models, out: Path, methods=("chain",), temperatures=(0.0,), settings=SETTINGS, tasks=TASKS, **options):
    run_benchmark(
        pair,
        tasks,
        list(methods),
        list(temperatures),
        settings,
        out,
        about=models_facts(pair),
        session={"command": "test"},
        **options,
    )
    return {key_of(record): record for record in read_records(out)}


@pytest.fixture(scope="module")
def everything(pair, tmp_path_factory):
    """Every method once, greedy."""
    target = pair.target
    whole = Models(
        target,
        pair.tokenizer,
        pair.drafter,
        dflash=tiny_drafter(target, with_head=False),
        assistant=tiny_target("llama", num_layers=2, salt=1),
    )
    return run(whole, tmp_path_factory.mktemp("all"), METHODS)


def test_a_record_for_every_prompt_turn_and_method(everything):
    assert len(everything) == TURNS * (len(METHODS) + 1)
    assert {key[3] for key in everything} == {*METHODS, *PLAIN} - {"plain"}


def test_every_method_gives_the_targets_text_and_counts_its_rounds(everything):
    for (*_, method, _), record in everything.items():
        assert record["new_tokens"] == len(record["output_ids"]) == 8, method
        assert record["identical"] is (None if method == "plain-generate" else True), method
        assert record["first_difference"] is None and record["tokens_differing"] == 0
        assert record["rounds"] == len(record["accepted"])
        # The forward that reads the prompt gives one token; prompt lookup and the assistant may draft there already.
        first = record["new_tokens"] - record["rounds"] - sum(record["accepted"])
        assert first == 1 if method not in ("prompt-lookup", "assistant") else first >= 1, method
        assert 0 < record["first_token_seconds"] < record["seconds"]
        assert record["peak_memory_mb"] > 0


def test_rounds_and_stages_come_from_our_records(everything):
    for (*_, method, _), record in everything.items():
        if method in ("plain-generate", "prompt-lookup", "assistant"):
            assert record["drafted"] is None and record["stage_seconds"] == {}
            continue
        assert set(record["stage_seconds"]) <= set(STAGES)
        rounds = record["seconds"] - record["first_token_seconds"]
        assert sum(record["stage_seconds"].values()) == pytest.approx(rounds, rel=0.3)
        assert all(a <= d for a, d in zip(record["accepted"], record["drafted"], strict=True)), method
        deepest = max(record["drafted"])
        assert deepest == {"plain-loop": 0}.get(method, 4) if method != "tree" else 1 <= deepest <= 4, method


def test_all_methods_read_the_same_conversation(everything, pair):
    second = [record for record in everything.values() if record["id"] == "two/0" and record["turn"] == 1]
    assert len({record["prompt_sha256"] for record in second}) == 1
    # Both user turns and the plain answer between them.
    assert second[0]["prompt_tokens"] == 2 + 8 + 2


def test_the_stage_names_are_those_of_the_loop():
    assert record_domino.STAGES == STAGES


def test_plain_decoding_by_our_loop(pair):
    ids = torch.tensor([[3, 1, 4]])
    steps = list(stream(pair.target, pair.drafter, ids, verify_width=0, do_sample=False, max_new_tokens=6))
    assert [len(step.token_ids) for step in steps] == [1] * 6 and all(step.draft_ids == [] for step in steps)
    expected = pair.target.generate(ids, do_sample=False, max_new_tokens=6)[0, 3:].tolist()
    assert [token for step in steps for token in step.token_ids] == expected
    assert pair.drafter.last_run.tau == 1.0
    with pytest.raises(ValueError, match="at least 0, .*got -1"):
        stream(pair.target, pair.drafter, ids, verify_width=-1, max_new_tokens=6)


# resuming


def test_a_finished_run_measures_nothing_again(pair, tmp_path):
    run(pair, tmp_path)
    before = (tmp_path / "records.jsonl").read_bytes()
    told = []
    run(pair, tmp_path, notify=told.append)
    assert told == [] and (tmp_path / "records.jsonl").read_bytes() == before
    assert len(read_provenance(tmp_path)["sessions"]) == 2


def test_more_methods_prompts_and_temperatures_join_a_folder(pair, tmp_path):
    run(pair, tmp_path, tasks={"one": TASKS["one"][:1]})
    before = (tmp_path / "records.jsonl").read_bytes()
    records = run(pair, tmp_path, ("chain", "tree"), (0.0, 1.0))
    assert (tmp_path / "records.jsonl").read_bytes().startswith(before)
    assert len(records) == TURNS * 4 * 2
    assert {record["identical"] for record in records.values() if record["temperature"] == 1.0} == {None}


def test_a_killed_run_goes_on_where_it_was(pair, tmp_path):
    told = []

    def notify(line: str) -> None:
        told.append(line)
        if len(told) == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            run(pair, tmp_path, notify=notify)
        finally:
            # Reached only if the kill did not come.
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    before = (tmp_path / "records.jsonl").read_bytes()
    assert before.count(b"\n") == 5
    # The power went while the next line was written.
    (tmp_path / "records.jsonl").write_bytes(before + b'{"task": "one", "id": "one/1", "tu')
    assert len(read_records(tmp_path)) == 5
    records = run(pair, tmp_path)
    assert (tmp_path / "records.jsonl").read_bytes().startswith(before)
    assert len(records) == TURNS * 3
    straight = run(pair, tmp_path / "straight")
    assert {k: r["output_sha256"] for k, r in records.items()} == {k: r["output_sha256"] for k, r in straight.items()}


def test_sampled_texts_depend_on_the_seed_alone(pair, tmp_path):
    task = {"one": TASKS["one"]}
    first = run(pair, tmp_path / "a", ("chain", "tree"), (1.0,), tasks=task)
    again = run(pair, tmp_path / "b", ("tree",), (1.0,), tasks={"one": TASKS["one"][1:]})
    assert all(record["output_sha256"] == first[key]["output_sha256"] for key, record in again.items())
    other = run(pair, tmp_path / "c", (), (1.0,), Settings(max_new_tokens=8, seed=1), tasks=task)
    assert any(record["output_sha256"] != first[key]["output_sha256"] for key, record in other.items())


def test_processes_share_the_prompts(pair, tmp_path):
    for rank in (1, 0):
        run(pair, tmp_path, shard=(rank, 2))
    assert {path.name for path in tmp_path.glob("*.jsonl")} == {"records-0.jsonl", "records-1.jsonl"}
    ids = [{json.loads(line)["id"] for line in path.open()} for path in sorted(tmp_path.glob("*.jsonl"))]
    assert ids == [{"one/0", "two/0"}, {"one/1"}]


SHARD = "from modeling_domino.benchmark.run import *; s = shard_of_process(); wait_for_all(s); print(*s)"


@pytest.mark.slow
def test_processes_know_their_share():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SHARD],
            cwd=Path(__file__).parent.parent,
            env={**shared, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    assert [process.communicate(timeout=300)[0].split() for process in started] == [["0", "2"], ["1", "2"]]


# what is refused


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_new_tokens": 11}, "settings.max_new_tokens = 8, this run has 11"),
        ({"seed": 3}, "settings.seed = 0, this run has 3"),
        ({"verify_width": 2}, "settings.verify_width = None, this run has 2"),
        ({"tree": TreeShape(nodes=7)}, "settings.tree.candidates = 8, this run has 64"),
    ],
)
def test_changed_settings_do_not_mix(pair, tmp_path, changed, message):
    task = {"one": TASKS["one"][:1]}
    run(pair, tmp_path, (), tasks=task)
    before = (tmp_path / "records.jsonl").read_bytes()
    fields = {"max_new_tokens": 8, "tree": SETTINGS.tree, **changed}
    with pytest.raises(ValueError, match=message):
        run(pair, tmp_path, tasks=task, settings=Settings(**fields))
    assert (tmp_path / "records.jsonl").read_bytes() == before


def test_another_drafter_or_prompt_does_not_mix(pair, tmp_path):
    run(pair, tmp_path, (), tasks={"one": TASKS["one"][:1]})
    other = Models(pair.target, pair.tokenizer, tiny_drafter(pair.target, block_size=3))
    with pytest.raises(ValueError, match="block_size = 4, this run has 3"):
        run(other, tmp_path)
    with pytest.raises(ValueError, match="one/0, turn 0, plain-generate was made with another prompt text"):
        run(pair, tmp_path, tasks={"one": [Prompt("one/0", ("w8 w8",))]})


def test_prompts_that_do_not_fit(tmp_path):
    target = tiny_target("llama", max_position_embeddings=11)
    small = Models(target, word_tokenizer(), tiny_drafter(target))
    long = {"one": [*TASKS["one"], Prompt("one/long", (" ".join(["w1"] * 11),))]}
    with pytest.raises(ValueError, match="prompt one/long of one, turn 0, has 11 tokens, the target reads at most 11"):
        run(small, tmp_path, tasks=long)
    assert not list(tmp_path.iterdir())
    # Near the end of the context an answer is cut.
    records = run(small, tmp_path, tasks={"one": TASKS["one"]})
    assert [r["prompt_tokens"] + r["new_tokens"] for r in records.values()] == [11] * 6


def test_methods_are_checked(pair):
    assert expand_methods(["tree", "chain"], pair) == [*PLAIN, "chain", "tree"]
    with pytest.raises(ValueError, match="no method medusa; known: plain, prompt-lookup"):
        expand_methods(["chain", "medusa"], pair)
    with pytest.raises(ValueError, match="name one with --dflash"):
        expand_methods(["dflash"], pair)
    headless = Models(pair.target, pair.tokenizer, tiny_drafter(pair.target, with_head=False))
    with pytest.raises(ValueError, match="head-off needs a drafter with a Domino head"):
        expand_methods(["head-off"], headless)


def test_variants_are_measured_beside_their_method(pair, tmp_path):
    names = ["chain:verify-width=2", "chain", "tree:tree-nodes=3:tree-lanes=1", "chain:candidates=5:auto-off=on"]
    records = run(pair, tmp_path, names, tasks={"one": TASKS["one"]})
    assert {key[3] for key in records} == {*PLAIN, *names}
    assert all(record["identical"] for record in records.values() if record["method"] in names)
    drafted = {name: [d for r in records.values() if r["method"] == name for d in r["drafted"]] for name in names}
    assert max(drafted["chain:verify-width=2"]) == 2 < max(drafted["chain"])
    # One lane of three nodes is a path at most, and noted as its depth.
    assert max(drafted["tree:tree-nodes=3:tree-lanes=1"]) <= 3
    sampled = run(pair, tmp_path, ["chain:rule=match"], temperatures=(1.0,), tasks={"one": TASKS["one"]})
    assert ("one", "one/0", 0, "chain:rule=match", 1.0) in sampled


def test_the_options_of_a_variant_are_its_settings():
    changed = with_options(SETTINGS, options_of("tree:tree-nodes=4:draft-vocab=9:auto-off=off"))
    assert changed.tree == dataclasses.replace(SETTINGS.tree, nodes=4)
    assert (changed.draft_vocab, changed.auto_off, changed.max_new_tokens) == (9, False, SETTINGS.max_new_tokens)
    assert with_options(changed, options_of("tree:tree-nodes=auto")).tree == "auto"
    assert with_options(SETTINGS, options_of("prompt-lookup:lookup-tokens=3")).lookup_tokens == 3
    assert with_options(SETTINGS, options_of("chain")) == SETTINGS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chain:lanes=3", "each option once, got chain:lanes=3; options of chain: rule, verify-width"),
        ("chain:rule=match:rule=block", "each option once"),
        ("plain:rule=match", "options of plain: none"),
        ("chain:verify-width=0", "`verify-width` must be a number of at least 1, or auto, got chain:verify-width=0"),
        ("chain:candidates=all", "`candidates` must be a number of at least 0, got"),
        ("chain:rule=greedy", "`rule` is match or speculative or block, got"),
        ("medusa:verify-width=1", "no method medusa"),
    ],
)
def test_variants_are_checked(pair, name, message):
    with pytest.raises(ValueError, match=message):
        expand_methods(["chain", name], pair)


def test_greedy_decoding_has_no_rules_to_compare(pair, tmp_path):
    with pytest.raises(ValueError, match="one rule, got chain:rule=match at temperature 0"):
        run(pair, tmp_path, ["chain:rule=match"])
    assert not list(tmp_path.iterdir())


def test_a_template_is_asked_for_or_left_out(pair, tmp_path):
    bare = word_tokenizer()
    bare.chat_template = None
    without = Models(pair.target, bare, pair.drafter)
    with pytest.raises(ValueError, match="no chat template; pass --raw"):
        run(without, tmp_path)
    (raw, *_) = run(without, tmp_path / "raw", (), settings=Settings(max_new_tokens=4, raw=True)).values()
    (thinking, *_) = run(pair, tmp_path / "thinking", (), settings=Settings(max_new_tokens=4, thinking=True)).values()
    assert (raw["prompt_tokens"], thinking["prompt_tokens"]) == (3, 4)


# losslessness is measured, not assumed


def test_texts_that_differ_are_found(pair, tmp_path, monkeypatch):
    def accept_everything(draft_ids, own_ids):
        return torch.tensor([draft_ids.shape[1]]), own_ids[:, -1]

    monkeypatch.setattr(loop_domino, "accept_match", accept_everything)
    records = run(pair, tmp_path, tasks={"one": TASKS["one"]})
    for prompt in ("one/0", "one/1"):
        plain, broken = (records["one", prompt, 0, method, 0.0] for method in ("plain-generate", "chain"))
        assert broken["identical"] is False and plain["identical"] is None
        place = broken["first_difference"]["position"]
        assert plain["output_ids"][:place] == broken["output_ids"][:place]
        assert plain["output_ids"][place] != broken["output_ids"][place]
        assert broken["first_difference"]["logit_gap"] > 0
        assert 1 <= broken["tokens_differing"] <= broken["tokens_compared"] == 8


def test_tokens_that_differ_are_counted():
    assert count_differing([1, 2, 3], [1, 2, 3]) == 0
    assert count_differing([1, 2, 3], [1, 4, 3, 5]) == 2


def test_batches_are_recorded_prompt_by_prompt(pair, tmp_path):
    tasks = {"two": [*TASKS["two"], *TASKS["one"], Prompt("two/3", ("w8 w1", "w2 w2 w7 w1"))]}
    methods = ["chain", "head-off"]
    alone = run(pair, tmp_path / "alone", methods, tasks=tasks)
    batched = dataclasses.replace(SETTINGS, batch_size=3)
    together = run(pair, tmp_path / "together", methods, settings=batched, tasks=tasks)
    assert together.keys() == alone.keys()
    for key, record in together.items():
        # Four prompts make a batch of three and one of one; of the first, one has a second turn.
        assert record["batch"] == (1 if key[1] == "two/3" or key[2] == 1 else 3)
        for name in ("output_ids", "new_tokens", "prompt_sha256", "identical"):
            assert record[name] == alone[key][name], (key, name)
        assert 0 < record["first_token_seconds"] < record["seconds"]
    before = read_records(tmp_path / "together")
    run(pair, tmp_path / "together", methods, settings=batched, tasks=tasks)
    assert read_records(tmp_path / "together") == before, "nothing is left to measure"


def test_a_batchs_seconds_are_shared_by_its_prompts():
    records = [{"seconds": 9.0, "first_token_seconds": 1.0, "batch": batch} for batch in (1, 4)]
    assert [decode_seconds(record) for record in records] == [8.0, 2.0]


def test_methods_for_single_prompts_are_refused_in_batches(pair, tmp_path):
    with pytest.raises(
        ValueError, match="In batches run .*, got tree, chain-stock with a batch size of 2; leave them out"
    ):
        run(pair, tmp_path, ["tree", "chain-stock"], settings=dataclasses.replace(SETTINGS, batch_size=2))
    assert not list(tmp_path.iterdir())


# the command


def test_the_command_prints_the_summary_last(pair, tmp_path):
    for part, name in ((pair.target, "target"), (pair.tokenizer, "target"), (pair.drafter, "drafter")):
        part.save_pretrained(tmp_path / name)
    (tmp_path / "one.jsonl").write_text('{"id": "one/0", "turns": ["w3 w1"]}\n{"id": "one/1", "turns": ["w5"]}\n')
    words = ["bench", "--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]
    words += ["--prompts", str(tmp_path), "--out", str(tmp_path / "out"), "--methods", "plain,chain,tree"]
    result = CliRunner().invoke(cli.app, [*words, "--max-new-tokens", "8", "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())
    cell = summary["results"]["tree"]["one"]
    assert cell["identical"] == cell["samples"] == 2 and cell["tau_cap"] == 5
    assert cell["tau_ci"][0] <= cell["tau"] <= cell["tau_ci"][1] and cell["speedup"] > 0
    assert summary["results"]["dflash"]["one"] == "not run"
    assert summary["tokens"] == {"compared": 48, "differing": 0, "texts": 6, "texts_differing": 0}
    assert set(summary["provenance"]["weights_sha256"]) == {"target", "drafter"}
    assert str(tmp_path) not in json.dumps(summary), "results name no folder of a machine"

    def refused(*more: str) -> str:
        again = CliRunner().invoke(cli.app, [*words, *more])
        assert again.exit_code == 2, again.output
        return again.stderr.strip().splitlines()[-1]

    assert "max_new_tokens = 8, this run has 256" in refused()
    assert "There is no task three" in refused("--tasks", "one,three")
    assert "There is no preset best" in refused("--preset", "best")
    assert "takes numbers separated by commas" in refused("--temperatures", "0,warm")
    assert "`--contexts` takes numbers separated by commas, got 10,long" in refused("--contexts", "10,long")
    assert "leave out --tasks and --server" in refused("--contexts", "10", "--tasks", "one")
    assert "sampled chains: match, speculative, block, got typical" in refused("--rule", "typical")
    assert "Methods not run: prompt-lookup" in CliRunner().invoke(cli.app, ["report", str(tmp_path / "out")]).stdout


def test_the_cost_of_a_round_is_measured_by_context(pair, tmp_path):
    for part, name in ((pair.target, "target"), (pair.tokenizer, "target"), (pair.drafter, "drafter")):
        part.save_pretrained(tmp_path / name)
    (tmp_path / "one.jsonl").write_text('{"id": "one/0", "turns": ["w3 w1 w5 w7"]}\n')
    words = ["bench", "--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--raw", "--json"]
    words += [
        "--prompts",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
        "--methods",
        "chain",
        "--max-new-tokens",
        "8",
    ]
    result = CliRunner().invoke(cli.app, [*words, "--contexts", "5,50"])
    assert result.exit_code == 0, result.output
    cells = json.loads(result.stdout.splitlines()[-1])["results"]["chain"]
    assert list(cells) == ["context-5", "context-50", "average"]
    assert all(cell["round_cost"] > 0 for cell in cells.values())
    assert {record["prompt_tokens"] for record in read_records(tmp_path / "out")} == {5, 50}


@pytest.mark.skipif(not LINUX_PEAK.exists(), reason="the peak of a process is reset on Linux only")
def test_the_peak_of_memory_is_that_of_one_generation():
    cpu = torch.device("cpu")
    forget_peak_memory(cpu)
    before = peak_memory_mb(cpu)
    del_me = torch.ones(64 << 20, dtype=torch.uint8)
    assert peak_memory_mb(cpu) >= before + 60
    del del_me
    forget_peak_memory(cpu)
    assert peak_memory_mb(cpu) < before + 40


def test_the_papers_set_up_and_deviations_from_it():
    plan = benchmark_plan("paper", max_new_tokens=None, prompts=None, thinking=False)
    assert plan == PAPER and len(plan["tasks"]) == 8 and plan["max_new_tokens"] == 2048
    assert len(deviations(plan)) == 1
    own = benchmark_plan("paper", prompts="dev", tasks="gsm8k,mbpp", temperatures="0.5", thinking=True)
    assert (own["prompts"], own["tasks"], own["temperatures"]) == ("dev", ["gsm8k", "mbpp"], [0.5])
    assert len(deviations(own)) == 5
    usual = benchmark_plan()
    assert usual["tasks"] == tasks_of_folder("dev") and usual["temperatures"] == [0.0]
    assert usual["max_new_tokens"] == 256 and benchmark_plan(prompts="hub")["tasks"] == PAPER["tasks"]
    lines = deviations({**plan, "max_new_tokens": 64, "tasks": ["gsm8k"]})
    assert "max_new_tokens: 64 (papers: 2048)" in lines and len(lines) == 3


def test_weights_that_a_token_reads():
    tied, untied = (tiny_target("llama", tied=tied) for tied in (True, False))
    count = sum(parameter.numel() for parameter in tied.parameters())
    assert weight_bytes(tied) == weight_bytes(untied) == 4 * count


def test_a_record_is_one_write(tmp_path):
    file = RecordFile(tmp_path / "records.jsonl")
    for i in range(3):
        file.append({"task": "t", "id": f"t/{9 + i}", "turn": 0, "method": "chain", "temperature": 0.0})
    file.close()
    assert [record["id"] for record in read_records(tmp_path)] == ["t/9", "t/10", "t/11"]
    (tmp_path / "records.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"records.jsonl, line 1: not a benchmark record"):
        read_records(tmp_path)


def test_sizes_candidates_and_vocabularies_reach_the_drafter(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "cache"))
    pair.drafter.draft_ranking = list(range(9))
    settings = dataclasses.replace(
        SETTINGS, verify_width="auto", tree="auto", candidates=5, draft_vocab=6, auto_off=True
    )
    asked = []
    for module in (drafting_domino, plug_domino):
        resolve = module.resolve_options
        monkeypatch.setattr(
            module, "resolve_options", lambda *a, r=resolve, **k: asked.append(r(*a, **k)) or asked[-1]
        )
    monkeypatch.setattr(generation_domino, "resolve_options", drafting_domino.resolve_options)
    try:
        records = run(
            pair,
            tmp_path / "out",
            ("chain", "tree", "chain-stock"),
            settings=settings,
            tasks={"one": TASKS["one"][:1]},
        )
    finally:
        pair.drafter.draft_ranking = None
    assert all(record["identical"] in (None, True) for record in records.values())
    assert {(o.candidates, len(o.vocabulary)) for o in asked if o.vocabulary is not None} == {(5, 6)}
    assert len([options for options in asked if options.vocabulary is not None]) >= 3
    assert pair.drafter.config.draft_candidates is None and pair.drafter.config.draft_vocab is None
    settings = read_provenance(tmp_path / "out")["settings"]["settings"]
    assert settings["verify_width"] == settings["tree"] == "auto" and settings["auto_off"] is True
