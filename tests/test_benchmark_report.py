"""The report: known numbers come out of known records, intervals are sane, a rebuild is the same bytes, torch is not needed."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import require_peer

from modeling_domino.atomic import write_json
from modeling_domino.benchmark.blocks import contexts_block, render_blocks
from modeling_domino.benchmark.records import read_records
from modeling_domino.benchmark.report import (
    compare,
    main,
    model_index,
    render,
    write_report,
)
from modeling_domino.benchmark.summary import (
    STAGES,
    baseline_of,
    bootstrap,
    cap_of,
    conditional_acceptance,
    cost_model,
    histogram,
    percentile,
    speedup_of,
    summarise,
    tau_of,
)
from modeling_domino.benchmark.tables import PUBLISHED, published_tables


ROOT = Path(__file__).parent.parent
PROVENANCE = {
    "settings": {
        "target": "org/target",
        "drafter": "org/drafter",
        "kind": "Domino",
        "block_size": 4,
        "drafts_per_round": {"drafter": 4, "dflash": None},
        "dtype": "float32",
        "trained": False,
        "settings": {
            "max_new_tokens": 64,
            "seed": 0,
            "raw": False,
            "thinking": False,
            "verify_width": None,
            "lookup_tokens": 10,
            "batch_size": 1,
        },
    },
    "sessions": [
        {
            "git_sha": "abc",
            "git_dirty": False,
            "date": "2026-01-01T00:00:00+00:00",
            "versions": {"torch": "2", "transformers": "5"},
            "hardware": {"cpu": "a processor", "threads": 1, "device": "cpu"},
            "deviations": ["tasks: ['gsm8k'] (papers: all)"],
            "memory_bandwidth_gb_per_second": 10.0,
            "target_weight_bytes": 500_000_000,
        }
    ],
}


def record(method: str, id: str, *, accepted: list[int], round_seconds: float, temperature: float = 0.0, **changes):
    """One record whose rounds all take `round_seconds`, half of it in "verify"; the prompt takes 1 s."""
    rounds = len(accepted)
    fields = {
        "task": id.split("/")[0],
        "id": id,
        "turn": 0,
        "method": method,
        "temperature": temperature,
        "batch": 1,
        "new_tokens": rounds + sum(accepted) + 1,
        "rounds": rounds,
        "accepted": accepted,
        "drafted": [4] * rounds,
        "seconds": 1.0 + rounds * round_seconds,
        "first_token_seconds": 1.0,
        "stage_seconds": {
            "verify": 0.5 * rounds * round_seconds,
            "backbone": 0.3 * rounds * round_seconds,
            "domino_head": 0.15 * rounds * round_seconds,
            "commit": 0.05 * rounds * round_seconds,
        },
        "peak_memory_mb": 100.0,
        "identical": None if method == "plain-generate" or temperature else True,
        "first_difference": None,
        "tokens_compared": 0 if method == "plain-generate" or temperature else 13,
        "tokens_differing": 0,
    }
    if method in ("plain-generate", "prompt-lookup"):
        fields.update(drafted=None, stage_seconds={})
    return {**fields, **changes}


def sample_records() -> list[dict]:
    """Two tasks of three prompts; a token takes plain 0.1 s, and a round of the chain 0.15 s for three tokens."""
    records = []
    for task in ("mt-bench", "gsm8k"):
        for i in range(3):
            slow = 1 + i
            records += [
                record("plain-generate", f"{task}/{i}", accepted=[0] * 12, round_seconds=0.11 * slow),
                record("plain-loop", f"{task}/{i}", accepted=[0] * 12, round_seconds=0.1 * slow),
                record("chain", f"{task}/{i}", accepted=[2, 4, 0, 2], round_seconds=0.15 * slow),
            ]
    records += [
        record("plain-generate", "gsm8k/0", accepted=[0] * 12, round_seconds=0.1, temperature=1.0),
        record("chain", "gsm8k/0", accepted=[1] * 6, round_seconds=0.2, temperature=1.0),
    ]
    return records


def folder_of(records, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "records.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    write_json(folder / "provenance.json", PROVENANCE)
    return folder


def test_known_records_give_known_numbers():
    summary = summarise(sample_records(), PROVENANCE, resamples=50)
    assert summary["plain_is"] == {"0": "plain-loop", "1": "plain-generate"}
    cell = summary["results"]["chain"]["gsm8k"]
    assert cell["tau"] == 3.0 and cell["tau_cap"] == 5 and cell["samples"] == cell["prompts"] == 3
    # Prompts differ, the ratio does not: paired resampling sees no spread.
    assert cell["speedup"] == cell["mean"] == cell["median"] == 2.0 and cell["sd"] == 0.0
    assert cell["speedup_ci"] == [2.0, 2.0] and cell["tau_ci"] == [3.0, 3.0]
    # A round of 0.15 s against a token of 0.1 s.
    assert cell["round_cost"] == 1.5 and summary["results"]["plain"]["gsm8k"]["round_cost"] == 1.0
    # 12 tokens in 4 rounds of 0.15, 0.3 and 0.45 s, and a first one after 1 s.
    assert cell["tokens_per_second"] == pytest.approx(36 / 3.6, abs=1e-4)
    assert cell["speedup_total"] == pytest.approx((3 + 7.2) / (3 + 3.6), abs=1e-4)
    assert cell["latency_p50"] == pytest.approx(2.2) and cell["identical"] == 3
    assert list(summary["results"]["chain"]) == ["gsm8k", "mt-bench", "average"]
    assert summary["results"]["plain"]["gsm8k"]["speedup"] == 1.0
    assert summary["results"]["plain-generate"]["gsm8k"]["speedup"] == pytest.approx(0.1 / 0.11, abs=1e-4)
    assert summary["results"]["tree"] == {"gsm8k": "not run", "mt-bench": "not run", "average": "not run"}
    sampled = summary["results_at"]["1"]["chain"]["gsm8k"]
    assert sampled["speedup"] == 1.0 and sampled["speedup_ci"] is None and sampled["identical"] is None
    assert summary["tokens"] == {"compared": 13 * 12, "differing": 0, "texts": 12, "texts_differing": 0}


def test_the_average_gives_tasks_the_same_weight():
    records = [record("plain-loop", f"a/{i}", accepted=[0] * 4, round_seconds=0.1) for i in range(4)]
    records += [record("chain", f"a/{i}", accepted=[1, 1], round_seconds=0.1) for i in range(4)]
    records += [record("plain-loop", "b/0", accepted=[0] * 4, round_seconds=0.1)]
    records += [record("chain", "b/0", accepted=[3], round_seconds=0.1)]
    average = summarise(records, PROVENANCE, resamples=10)["results"]["chain"]["average"]
    assert average["tau"] == 3.0 and average["speedup"] == 3.0 and average["prompts"] == 5
    # One prompt says nothing about spread.
    assert average["tau_ci"] is None


def test_caps():
    settings = json.loads(json.dumps(PROVENANCE["settings"]))
    assert [cap_of(m, settings) for m in ("plain-loop", "prompt-lookup", "chain", "assistant", "dflash")] == [
        1,
        11,
        5,
        None,
        None,
    ]
    settings["settings"]["verify_width"] = 2
    assert cap_of("tree", settings) == 3


def test_intervals_cover_the_truth():
    """Rounds accept 0 to 4 drafts evenly, so tau is 3: about 95 of 100 intervals of 30 prompts must hold it."""
    generator = random.Random(1)
    covered, widths = 0, []
    for _ in range(100):
        units = []
        for _ in range(30):
            tokens = [1 + generator.randrange(5) for _ in range(8)]
            units.append((sum(tokens), len(tokens), 1.0, 1.0, 1.0, 1.0))
        low, high = bootstrap([units], tau_of, resamples=150)
        covered += low <= 3.0 <= high
        widths.append(high - low)
    assert 85 <= covered <= 100
    # 1.96 standard errors on either side: 2 * 1.96 * sqrt(2 / 240).
    assert sum(widths) / 100 == pytest.approx(0.36, rel=0.15)


def test_intervals_are_paired_and_repeatable():
    generator = random.Random(2)
    plain = [generator.uniform(1, 100) for _ in range(20)]
    units = [(1.0, 1.0, seconds / 2, 10.0, seconds, 10.0) for seconds in plain]
    assert bootstrap([units], speedup_of) == pytest.approx([2.0, 2.0])
    noisy = [(1.0, 1.0, seconds / generator.uniform(1, 3), 10.0, seconds, 10.0) for seconds in plain]
    assert bootstrap([noisy], speedup_of) == bootstrap([noisy], speedup_of)
    assert percentile([0.0, 1.0, 2.0], 75) == 1.5


def test_acceptance():
    records = [record("chain", "a/0", accepted=[2, 4, 0, 1], round_seconds=0.1, drafted=[4, 4, 4, 1])]
    assert histogram(records) == [1, 1, 1, 0, 1]
    # The last round had one draft: its second slot was never tried.
    assert conditional_acceptance(records) == [(4, 3 / 4), (2, 1.0), (2, 1 / 2), (1, 1.0)]


def test_the_cost_model_adds_up():
    records = sample_records()
    chain = [each for each in records if each["method"] == "chain" and each["temperature"] == 0]
    plain = [each for each in records if each["method"] == "plain-loop"]
    cost = cost_model(chain, plain)
    assert sum(cost["stages"].values()) == pytest.approx(cost["round"]) and list(cost["stages"]) == list(STAGES)
    assert cost["round"] == pytest.approx(300) and cost["target"] == pytest.approx(200) and cost["tau"] == 3.0
    assert cost["measured"] == pytest.approx(2.0) and cost["predicted"] == pytest.approx(3 * 200 / 285)
    assert cost["rest"] == pytest.approx(0.05) and not cost["flagged"]
    assert cost["head_of_round"] == pytest.approx(0.15)
    for each in chain:
        each["stage_seconds"]["other"] = 0.1 * each["rounds"]
    assert cost_model(chain, plain)["flagged"]
    for each in chain:
        each["stage_seconds"] = {}
    assert cost_model(chain, plain) is None


def test_there_must_be_something_to_compare_with():
    with pytest.raises(ValueError, match="no record of plain generation"):
        baseline_of([record("chain", "a/0", accepted=[1], round_seconds=0.1)])
    with pytest.raises(ValueError, match="no records"):
        summarise([], PROVENANCE)


def test_a_rebuild_is_the_same_bytes_whatever_the_order(tmp_path):
    require_peer("matplotlib")
    records = sample_records()
    one = folder_of(records, tmp_path / "one")
    random.Random(0).shuffle(records)
    two = folder_of(records, tmp_path / "two")
    assert read_records(one) == read_records(two)
    for folder in (one, two):
        write_report(folder)
    written = {path.name: path.read_bytes() for path in one.iterdir() if path.name != "records.jsonl"}
    assert set(written) >= {
        "report.md",
        "summary.json",
        "model-index.yaml",
        "stages.svg",
        "tasks.svg",
        "acceptance.svg",
    }
    assert written == {name: (two / name).read_bytes() for name in written}
    write_report(one)
    assert written == {name: (one / name).read_bytes() for name in written}


WITHOUT_TORCH = """
import runpy, sys
for name in ("torch", "transformers", "matplotlib"):
    sys.modules[name] = None
sys.argv = ["report", sys.argv[1]]
runpy.run_module("modeling_domino.benchmark.report", run_name="__main__")
"""


def test_the_report_needs_no_torch(tmp_path):
    folder = folder_of(sample_records(), tmp_path / "run")
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((folder / "summary.json").read_text())
    assert "Not drawn: matplotlib is not installed." in (folder / "report.md").read_text()
    tables = (folder / "report.md").read_text().split("## Plots")[0]
    write_report(folder)
    assert (folder / "report.md").read_text().split("## Plots")[0] == tables


def test_what_the_report_says(tmp_path):
    records = sample_records()
    difference = {"position": 3, "logit_gap": 0.0021}
    records[2].update(identical=False, first_difference=difference, tokens_differing=4)
    text = render(records, summarise(records, PROVENANCE, resamples=20))
    assert "2 of 8 tasks: gsm8k, mt-bench; not run: math500, aime25, humaneval, mbpp, livecodebench, alpaca" in text
    assert "plain is plain-loop, the faster form here. Methods not run: prompt-lookup, assistant, dflash" in text
    assert "| chain | 3.00 / 5 [3.00, 3.00] | 3.00 / 5 [3.00, 3.00] | 3.00 / 5 [3.00, 3.00] |" in text
    assert "| chain | 2.00 [2.00, 2.00] | 2.00 [2.00, 2.00] | 2.00 [2.00, 2.00] |" in text
    assert "**The drafter is untrained" in text and "deviation from the papers: tasks" in text
    assert "156 tokens of 12 greedy texts compared with plain generation: 4 differ, in 1 texts." in text
    assert "| mt-bench/0 | 0 | chain | 3 | 0.0021 |" in text
    assert "## Temperature 1" in text and "of the bandwidth bound: 10.0 GB/s" in text
    assert not any(line.count("|") == 2 for line in text.splitlines()), "a table without columns"


def test_ablations_are_compared_by_what_differs(tmp_path):
    one, two = (folder_of(sample_records(), tmp_path / name) for name in ("full", "narrow"))
    narrow = json.loads(json.dumps(PROVENANCE))
    narrow["settings"]["settings"]["verify_width"] = 2
    write_json(two / "provenance.json", narrow)
    text = compare([one, two])
    assert "| folder | verify_width | T | method | tau | speed-up | head of round |" in text
    assert "| full | None | 0 | chain | 3.00 / 5 [3.00, 3.00] | 2.00 [2.00, 2.00] | 15.0 % |" in text
    assert "| narrow | 2 | 0 | chain | 3.00 / 3 [3.00, 3.00] |" in text


def test_methods_and_variants_are_compared_with_the_chain(tmp_path):
    records = [each for each in sample_records() if each["temperature"] == 0]
    for i in range(3):
        # Two tokens a round in half the time of the chain's three: two thirds of tau, four thirds of the speed.
        seconds = 0.075 * (1 + i)
        records += [
            record(name, f"gsm8k/{i}", accepted=[1] * 6, round_seconds=seconds)
            for name in ("tree", "chain:verify-width=2")
        ]
    folder = folder_of(records, tmp_path / "run")
    summary = write_report(folder)
    assert [name for name in summary["results"] if name.startswith("chain")] == [
        "chain",
        "chain:verify-width=2",
        "chain-stock",
    ]
    expected = {
        "tau_ratio": 0.6667,
        "tau_ratio_ci": [0.6667, 0.6667],
        "speed_ratio": 1.3333,
        "speed_ratio_ci": [1.3333, 1.3333],
    }
    for method in ("tree", "chain:verify-width=2"):
        cells = summary["results"][method]
        assert cells["gsm8k"]["beside"] == cells["average"]["beside"] == expected and cells["mt-bench"] == "not run"
    assert "beside" not in summary["results"]["chain"]["average"]
    assert summary["results"]["chain:verify-width=2"]["gsm8k"]["tau_cap"] == 3
    report = (folder / "report.md").read_text()
    assert "| tree | 0.67 [0.67, 0.67] | not run | 0.67 [0.67, 0.67] |" in report
    page = tmp_path / "page.md"
    page.write_text("<!-- variants: run/summary.json -->\n<!-- /variants -->\n")
    page.write_text(page.read_text() + "<!-- contexts: run/summary.json -->\n<!-- /contexts -->\n")
    # A round of the chain takes 1.5 tokens of plain generation, and so does one of the tree on half of it: 0.75.
    assert "| gsm8k | 5.0 | 3.00 | 2.00 | 1.50 | 0.75 | 100 | 100 | 100 |" in render_blocks(page)
    row = (
        "| chain:verify-width=2 | 2.00 / 3 [2.00, 2.00] | 2.67 [2.67, 2.67] | 0.67 [0.67, 0.67] | 1.33 [1.33, 1.33] |"
    )
    assert row in render_blocks(page)


def test_contexts_are_shown_by_length():
    cells = {"tokens_per_second": 2.0, "peak_memory_mb": 9.0, "tau": 1.5, "round_cost": 1.2}
    tasks = {f"context-{length}": cells for length in (1024, 128, 4096, 512)}
    text = contexts_block({"results": {"plain": {**tasks, "average": cells}, "chain": {**tasks, "average": cells}}})
    assert re.findall(r"^\| (\d+) \|", text, re.MULTILINE) == ["128", "512", "1024", "4096"]


def test_the_result_blocks_of_a_page_come_from_the_files_they_name(tmp_path):
    write_report(folder_of(sample_records(), tmp_path / "run"))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: run/summary.json -->\nold numbers\n<!-- /results -->\nafter\n")
    text = render_blocks(page)
    assert text.startswith("before\n<!-- results: run/summary.json -->\n\ntau of ") and text.endswith(
        "/results -->\nafter\n"
    )
    assert "| task | chain |" in text and "| gsm8k | 3.00 / 5 [3.00, 3.00] |" in text
    assert "Temperature 0, 6 answers:" in text and "Temperature 1, 1 answers:" in text
    assert "Temperature 0, plain is plain-loop, the faster form:" in text
    assert "| gsm8k | 5.0 | 2.00 [2.00, 2.00] |" in text and "| gsm8k | 10.0 | 1.00 |" in text
    assert "156 tokens compared with plain generation, 0 differ." in text and "old numbers" not in text
    page.write_text(text)
    assert render_blocks(page) == text


def test_a_folder_without_records_is_said(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2 and main([]) == 2
    assert "holds no benchmark records; make some with `domino bench" in capsys.readouterr().err


def test_the_model_index_names_task_and_method():
    (model,) = model_index(summarise(sample_records(), PROVENANCE, resamples=10))["model-index"]
    assert model["name"] == "org/drafter"
    first = model["results"][0]
    assert first["dataset"] == {"type": "openai/gsm8k", "name": "gsm8k"}
    where = "gsm8k, chain, T=0, float32 on a processor, batch 1, block 4, 3 prompts"
    tau = {"type": "acceptance_length", "name": f"acceptance length ({where})", "value": 3.0}
    assert first["metrics"][0] == tau and len(model["results"]) == 3
    assert [metric["type"] for metric in first["metrics"]] == ["acceptance_length", "speedup", "tokens_per_second"]


def test_published_numbers_carry_source_set_up_and_baseline():
    published = json.loads(PUBLISHED.read_text())
    setups = published["setups"]
    assert len({entry["id"] for entry in setups}) == len(setups)
    for entry in setups:
        assert entry["source"] and entry["setup"] and entry["baseline"], entry["id"]
        assert all(row["method"] for row in entry["rows"])
    text = published_tables()
    # One table a set-up: numbers of different set-ups never stand in one.
    assert text.count("\n### ") == len(setups)
    assert "| Domino chain | Qwen3-8B | gsm8k | 10.03 | 7.92 |" in text
