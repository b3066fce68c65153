"""The benchmark of the kernels: its forms draft the same, its record is whole, and the README shows what it holds."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "kernels" / "benchmarks" / "benchmark.py"
RECORD = ROOT / "kernels" / "results" / "cpu.json"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("kernels_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def torch_only(domino_kernels, monkeypatch):
    """The kernels as on a machine without a device and an interpreter."""
    monkeypatch.setattr(domino_kernels.launch, "interpreted", lambda: False)
    return domino_kernels


def test_a_record_compares_forms_that_draft_the_same(benchmark, torch_only, monkeypatch):
    monkeypatch.setitem(benchmark.SIZES, "tiny", benchmark.Size(16, 8, 4, 300, n=4))
    records = benchmark.measure(torch_only, "tiny", "cpu", torch.float32, repeats=2, peak=1e9)
    assert [record["form"] for record in records] == [
        "published eager form",
        "exact",
        "exact, gates table",
        "shortlist of 64",
        "shortlist of 64, gates table",
        "exact, by columns",
        "exact, gates table, by columns",
        "shortlist of 64, by columns",
        "shortlist of 64, gates table, by columns",
    ]
    assert records[0]["of_eager"] == 1.0
    assert {record["implementation"] for record in records[1:]} == {"torch"}
    assert all(record["same_drafts"] for record in records if "exact" in record["form"])
    for record in records:
        low, high = record["milliseconds"]["quartiles"]
        assert 0 < low <= record["milliseconds"]["median"] <= high
    # 4 steps of [3G + R, G], W_h once, 4 of [3G + 1, D], the base logits, 3 of W_out.
    exact = 4 * (3 * 8 * 8 + 4 * 8) + 4 * 16 + 4 * (3 * 8 * 16 + 16) + 4 * 300 + 3 * 300 * 4
    assert records[1]["bytes"] == 4 * exact


def test_every_operation_of_the_librarys_benchmark_is_verified(benchmark, torch_only, monkeypatch):
    monkeypatch.setitem(benchmark.SIZES, "SmolLM2-135M, rank 64", benchmark.Size(16, 8, 4, 3000, n=3))
    case = benchmark.DominoKernelsBenchmark()
    case.kernel = torch_only
    names = [name.removeprefix("benchmark_") for name in dir(case) if name.startswith("benchmark_")]
    assert len(names) == 7
    for name in names:
        getattr(case, f"setup_{name}")()
        getattr(case, f"benchmark_{name}")()
        torch.testing.assert_close(case.out, getattr(case, f"verify_{name}")())


def test_wrong_usage_is_one_sentence():
    result = subprocess.run(
        [sys.executable, SCRIPT, "--output", "x.json", "--repeats", "1"], capture_output=True, text=True
    )
    assert result.returncode == 2 and "--repeats must be at least 2 for quartiles, got 1." in result.stderr


def test_the_record_was_taken_from_forms_that_draft_the_same():
    record = json.loads(RECORD.read_text())
    assert {"git_sha", "hardware", "threads", "dtype", "command", "versions"} <= record["provenance"].keys()
    assert all(each["same_drafts"] for each in record["results"] if "shortlist" not in each["form"])


def test_the_readme_shows_the_record(benchmark):
    (block,) = re.findall(
        r"<!-- kernels: (\S+) -->\n\n(.*?)\n\n<!-- /kernels -->", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert block[1] == benchmark.render(json.loads((ROOT / block[0]).read_text()))


def test_a_page_is_rendered_from_the_record_it_names(benchmark, tmp_path):
    (tmp_path / "one.json").write_text(RECORD.read_text())
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- kernels: one.json -->\nold\n<!-- /kernels -->\nafter\n")
    subprocess.run([sys.executable, SCRIPT, "--page", page], check=True, capture_output=True)
    table = benchmark.render(json.loads(RECORD.read_text()))
    assert page.read_text() == f"before\n<!-- kernels: one.json -->\n\n{table}\n\n<!-- /kernels -->\nafter\n"
