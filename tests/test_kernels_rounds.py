"""The benchmark of whole rounds: on a tiny pair every form runs what it says, and the record is whole."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from test_kernels_benchmark import SCRIPT as OPERATIONS


SCRIPT = OPERATIONS.with_name("rounds.py")


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import rounds
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return rounds


@pytest.fixture
def tiny(benchmark, monkeypatch):
    size = benchmark.Size(32, 48, 6, 4, 2, 8, 130, block_size=4, drafter_layers=2, taps=3, G=8, R=4)
    monkeypatch.setitem(benchmark.SIZES, "tiny", size)
    return size


@pytest.mark.parametrize("kernels", [None, "torch"])
def test_a_record_of_every_form(benchmark, tiny, kernels):
    records = benchmark.measure("tiny", "cpu", torch.float32, context=9, rounds=4, kernels=kernels)
    assert len(records) == (4 if kernels is None else 7)
    for record in records:
        low, high = record["milliseconds"]["quartiles"]
        assert 0 < low <= record["milliseconds"]["median"] <= high
        assert ("static rounds uncaptured" in record["kernels"]) == ("static" in record["form"])
        assert ("chains by torch" in record["kernels"]) == ("round" in record["form"])
    assert min(record["of_plain"] for record in records if record["form"].startswith("plain")) == 1.0
    text = benchmark.render({"results": records, "provenance": {"dtype": "float32", "hardware": "a CPU"}})
    assert "behind 9 tokens, float32 on a CPU" in text and text.count("| tiny |") == len(records)


def test_rounds_are_timed_one_by_one(benchmark, tiny):
    """As many times as were asked for, of rounds that draft a whole block; the prompt and the first rounds are left out."""
    target, drafter = benchmark.pair(tiny, "cpu", torch.float32)
    taken = benchmark.times_of(target, drafter, context=5, rounds=6, candidates=0)
    assert len(taken) == 6 and min(taken) > 0
    run = drafter.last_run
    assert len(run.rounds) == 9 and {len(step.draft_ids) for step in run.rounds} == {4}


def test_a_static_round_that_is_no_graph_is_no_measurement(benchmark, tiny, monkeypatch):
    """On a device: what was to be captured and was not must not be recorded as if it were."""
    pair = benchmark.pair(tiny, "cpu", torch.float32)
    monkeypatch.setattr(benchmark, "pair", lambda *args: pair)
    with pytest.raises(
        RuntimeError, match="plain step, static of tiny was to be one CUDA graph, and none was captured"
    ):
        benchmark.measure("tiny", "cuda", torch.float32, context=5, rounds=3, kernels=None)


def test_the_published_sizes(benchmark):
    """Those of Qwen3-4B and 8B and of their public drafters, counted without making them."""
    counts = {}
    for name, size in benchmark.SIZES.items():
        target, drafter = benchmark.pair(dataclasses.replace(size), "meta", torch.bfloat16)
        counts[name] = sum(p.numel() for p in target.parameters()) / 1e9
        assert drafter.config.num_draft_tokens == 16 and drafter.embed_proj[2].weight.shape == (151936, 256)
    assert counts == pytest.approx({"Qwen3-4B": 4.41, "Qwen3-8B": 8.19}, abs=0.02)


def test_wrong_usage_is_one_sentence(tmp_path):
    result = subprocess.run(
        [sys.executable, SCRIPT, "--output", tmp_path / "x.json", "--rounds", "1"], capture_output=True, text=True
    )
    assert result.returncode == 2 and "--rounds must be at least 2 and --context at least 1, got 1" in result.stderr


def test_the_table_of_a_record(benchmark, tiny, tmp_path):
    record = {"provenance": {"dtype": "bfloat16", "hardware": "H200"}, "results": []}
    record["results"] = benchmark.measure("tiny", "cpu", torch.float32, context=5, rounds=2, kernels=None)
    (tmp_path / "r.json").write_text(json.dumps(record))
    result = subprocess.run([sys.executable, SCRIPT, "--render", tmp_path / "r.json"], capture_output=True, text=True)
    assert result.returncode == 0 and "bfloat16 on H200" in result.stdout
