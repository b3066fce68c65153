"""The engine of the Space: the library's traces, one after the other, and nothing a visitor does stops the next one."""

from __future__ import annotations

import importlib
import json
import threading
from importlib.metadata import PackageNotFoundError, version

import pytest
import yaml
from conftest import require_peer
from fresh_process import run_fresh
from space_folder import imports_from, tiny_space

from modeling_domino.space import stage_space


PROMPT, LENGTH = "a b c d", 14


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    return tiny_space(tmp_path_factory.mktemp("space"))


@pytest.fixture(scope="module")
def module(space):
    with imports_from(space):
        yield importlib.import_module("engine")


@pytest.fixture(scope="module")
def engine(module):
    engine = module.engine_of_this_space()
    engine.load()
    return engine


def target_ids(engine, prompt: str = PROMPT, length: int = LENGTH) -> list[int]:
    inputs = engine._inputs(prompt)
    output = engine.target.generate(**inputs, max_new_tokens=length, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("tree", [False, True])
def test_the_rounds_are_the_librarys_own_trace(engine, tree):
    *live, last = engine.rounds(PROMPT, LENGTH, tree)
    assert last == engine.drafter.last_run.trace()
    assert last["output_ids"] == target_ids(engine)
    assert last["kind"] == ("tree" if tree else "chain") and len(last["rounds"]) > 2
    # One trace a forward of the target: the one that read the prompt, and the rounds.
    assert len(live) == len(last["rounds"]) + 1
    for number, trace in enumerate(live):
        assert trace["rounds"] == last["rounds"][:number]
        assert trace["output_ids"] == last["output_ids"][: len(trace["output_ids"])]
    assert all(len(record["probabilities"]) == len(record["draft_ids"]) for record in last["rounds"])


def test_traces_name_models_and_no_folder(engine, space):
    trace = list(engine.rounds(PROMPT, 4))[-1]
    assert (trace["target"], trace["drafter"]) == ("tiny-target", "tiny-drafter")
    assert str(space.parent) not in json.dumps([trace, engine.facts()])


def test_a_race_records_every_lane_and_what_they_are_compared_with(engine):
    states = list(engine.race(PROMPT, LENGTH))
    assert [state["next"] for state in states] == ["plain", "plain", "head-off", "chain", "tree", None]
    race = states[-1]
    assert [lane["method"] for lane in race["recorded"]] == ["plain", "head-off", "chain", "tree"]
    assert race["reference"] == target_ids(engine)
    for lane in race["recorded"]:
        assert lane["output_ids"] == race["reference"]
        seconds, tokens = zip(*lane["points"])
        assert list(seconds) == sorted(seconds) and tokens[-1] == LENGTH and lane["seconds"] == seconds[-1]
    assert engine.drafter.last_run.head == "domino"


def test_the_head_off_lane_runs_without_the_head(engine, monkeypatch):
    heads = {}
    lane = type(engine)._run_loop

    def noting(self, method, *args):
        result = lane(self, method, *args)
        heads[method] = self.drafter.last_run.head
        return result

    monkeypatch.setattr(type(engine), "_run_loop", noting)
    list(engine.race(PROMPT, 6))
    assert heads == {"plain": "domino", "head-off": "off", "chain": "domino", "tree": "domino"}


def test_a_drafter_without_a_head_has_no_lane_without_it(tmp_path):
    with imports_from(tiny_space(tmp_path, with_head=False)):
        engine = importlib.import_module("engine").engine_of_this_space()
        race = list(engine.race(PROMPT, 6))[-1]
        trace = list(engine.rounds(PROMPT, 6))[-1]
    assert [lane["method"] for lane in race["recorded"]] == ["plain", "chain", "tree"] and race["family"] == "DFlash"
    assert trace["head"] == "none"


@pytest.mark.parametrize(
    "prompt, length, sentence",
    [
        ("", 8, "The prompt is empty; ask something."),
        (" \n ", 8, "The prompt is empty; ask something."),
        ("x" * 20000, 8, "A prompt has at most 4,000 characters here, this one has 20,000; cut it."),
        ("a " * 1900, 8, "A prompt has at most 1,024 tokens here, this one has 1,903; cut it."),
        (PROMPT, 0, "From 1 to 256 new tokens are served here, asked were 0."),
        (PROMPT, 257, "From 1 to 256 new tokens are served here, asked were 257."),
    ],
)
def test_what_is_not_served_is_refused_in_a_sentence_and_the_engine_goes_on(engine, module, prompt, length, sentence):
    for ask in (engine.rounds, engine.race):
        with pytest.raises(module.Refused) as refusal:
            next(ask(prompt, length))
        assert str(refusal.value) == sentence
    assert list(engine.rounds(PROMPT, LENGTH))[-1]["output_ids"] == target_ids(engine)


def test_a_pair_that_cannot_be_loaded_is_named(module, space):
    engine = module.Engine(str(space.parent / "nowhere"), str(space.parent / "tiny-drafter"))
    with pytest.raises(module.Refused, match="nowhere and .* could not be loaded: ") as refusal:
        engine.load()
    # A visitor reads it: it names no folder of this machine.
    assert str(space.parent) not in str(refusal.value)
    engine.names["target"] = str(space.parent / "tiny-target")
    engine.load()
    assert list(engine.rounds(PROMPT, 2))[-1]["output_ids"] == target_ids(engine, length=2)


@pytest.mark.parametrize("error", [ValueError(""), RuntimeError("CUDA out of memory"), ValueError("another width")])
def test_a_pair_that_fails_at_its_first_run_is_a_sentence_too(module, space, monkeypatch, error):
    """It ended the Space at its start; an error without a message even hid itself."""

    def failing(*args):
        raise error
        yield

    engine = module.Engine(str(space.parent / "tiny-target"), str(space.parent / "tiny-drafter"))
    monkeypatch.setattr(engine, "_stream", failing)
    with pytest.raises(module.Refused, match=f"could not be loaded: {str(error) or 'ValueError'}"):
        engine.load()
    assert engine.drafter is None


def test_a_drafter_from_the_hub_must_be_pinned(module, space, monkeypatch):
    engine = module.Engine("acme/target", "acme/drafter")
    with pytest.raises(module.Refused, match="revision must be pinned, got none"):
        engine.load()
    # The revision of the pair that was staged is not that of another one.
    monkeypatch.setenv("DOMINO_DRAFTER", "acme/other")
    assert module.engine_of_this_space().revisions["drafter"] is None
    monkeypatch.setenv("DOMINO_DRAFTER_REVISION", "v2")
    engine = module.engine_of_this_space()
    assert (engine.names["drafter"], engine.revisions["drafter"]) == ("acme/other", "v2")
    assert engine.names["target"] == str(space.parent / "tiny-target")


def test_stop_ends_a_generation_after_its_round(engine):
    traces = engine.rounds(PROMPT, 200, visit="me")
    seen = next(traces)
    engine.stop("me")
    engine.stop("somebody else")
    rest = list(traces)
    # Nothing is generated any more; what comes is the whole trace.
    assert len(rest) == 1 and rest[0]["output_ids"] == seen["output_ids"] and rest[0]["seconds"] > 0
    engine.allow("me")
    assert len(list(engine.rounds(PROMPT, LENGTH, visit="me"))[-1]["output_ids"]) == LENGTH


def test_stop_ends_a_race(engine):
    states = engine.race(PROMPT, 200, visit="me")
    next(states)
    engine.stop("me")
    assert [state["recorded"] for state in states] == [[]]


def test_visitors_at_once_get_their_own_texts(engine):
    """Interleaved step by step in two threads, one of them with the head off."""
    prompts = ["a b c d", "p q r"]
    expected = [target_ids(engine, prompt, 40) for prompt in prompts]
    found = [[], []]
    barrier = threading.Barrier(2)

    def visit(number: int) -> None:
        barrier.wait()
        if number == 0:
            found[0] = list(engine.rounds(prompts[0], 40))[-1]
        else:
            inputs = engine._inputs(prompts[1])
            steps = engine._stream(engine.drafter, inputs, {"max_new_tokens": 40}, use_head=False)
            tokens = [token for step in steps for token in step.token_ids]
            found[1] = {"output_ids": tokens, "head": engine.drafter.last_run.head}

    threads = [threading.Thread(target=visit, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one["output_ids"] for one in found] == expected
    assert [one["head"] for one in found] == ["domino", "off"]


def test_a_generation_that_nobody_reads_any_more_holds_nothing(engine):
    abandoned = engine.rounds(PROMPT, 40)
    next(abandoned)
    assert list(engine.rounds(PROMPT, LENGTH))[-1]["output_ids"] == target_ids(engine)
    assert next(abandoned)["rounds"]


def test_the_engine_needs_nothing_of_our_package(space, tmp_path):
    script = f"""
import sys
sys.path.insert(0, {str(space)!r})
import engine
pair = engine.engine_of_this_space()
RESULTS["trace"] = list(pair.rounds({PROMPT!r}, {LENGTH}))[-1]
RESULTS["module"] = type(pair.drafter).__module__
RESULTS["ours"] = [name for name in sys.modules if name.split(".")[0] in ("modeling_domino", "gradio")]
"""
    results = run_fresh(script, tmp_path)
    assert results["module"].startswith("transformers_modules.")
    assert results["ours"] == []
    assert len(results["trace"]["output_ids"]) == LENGTH


def test_staging_is_whole_or_nothing(space, tmp_path):
    assert sorted(path.name for path in space.iterdir() if path.name != "__pycache__") == [
        "README.md",
        "app.py",
        "engine.py",
        "pair.json",
        "render",
        "requirements.txt",
    ]
    assert not (space / "render" / "terminal.py").exists()
    with pytest.raises(ValueError, match="acme/drafter needs a revision, got none"):
        stage_space(tmp_path / "out", drafter="acme/drafter")
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="replaces only a staged Space"):
        stage_space(tmp_path / "mine", drafter="acme/drafter", revision="v1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def test_the_staged_card_names_the_pair_and_a_whole_sdk_version(tmp_path):
    try:
        installed = version("gradio")
    except PackageNotFoundError:
        require_peer("gradio")
    for _ in range(2):
        # The second time replaces the first.
        folder = stage_space(tmp_path / "out", drafter="acme/drafter", revision="v1")
    _, front, _ = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    front = yaml.safe_load(front)
    assert front["models"] == ["HuggingFaceTB/SmolLM2-135M-Instruct", "acme/drafter"]
    assert front["sdk_version"] == installed and front["python_version"] == "3.12"
    assert front["app_file"] == "app.py" and len(front["short_description"]) <= 60
    assert json.loads((folder / "pair.json").read_text())["drafter_revision"] == "v1"
