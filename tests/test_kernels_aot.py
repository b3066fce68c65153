"""Every kernel compiles for devices that are not here, within ceilings of registers and without spills.

Ceilings are what the compiler of triton 3.7.1 gives, rounded up to the next multiple of 8: a kernel that passes its own
got slower, or its tile too large.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import require_peer


pytestmark = pytest.mark.aot

SCRIPT = Path(__file__).parent.parent / "kernels" / "compile.py"
TARGETS = ["sm_80", "sm_90", "sm_100", "gfx942"]
# Registers a thread: the largest over sm_80, sm_90 and sm_100; gfx942.
CEILINGS = {
    "init": (40, 32),
    "input": (40, 32),
    "update": (24, 24),
    "state": (48, 80),
    "state, tree": (48, 80),
    "head": (80, 56),
    "head, base only": (24, 8),
    "head, sampled": (120, 56),
    "head, fp32": (128, 40),
    "head, dot": (96, 88),
    "head, dot, sampled": (112, 88),
    "short": (80, 56),
    "shortlist": (40, 16),
    "gather": (32, 24),
    "finalize": (96, 96),
    "expand": (56, 64),
}
# Kernels that stream weights: without loads of 16 bytes they would run at half the bandwidth.
STREAMING = ["init", "input", "state", "head", "head, sampled", "head, dot", "short", "finalize", "expand"]


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, str], dict]:
    require_peer("triton")
    # A process of its own: this one interprets.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    return {(record["kernel"], record["target"]): record for record in records}


def test_the_table_names_every_kernel(compiled):
    assert set(compiled) == {(name, target) for name in CEILINGS for target in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CEILINGS)
def test_registers_and_spills(compiled, name, target):
    record = compiled[name, target]
    assert record["spills"] == 0
    assert record["registers"] <= CEILINGS[name][target == "gfx942"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", STREAMING)
def test_weights_are_read_in_wide_loads(compiled, name, target):
    assert compiled[name, target]["wide_loads"] > 0


def test_interpreting_processes_are_refused():
    result = subprocess.run(
        [sys.executable, SCRIPT], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "compiling needs TRITON_INTERPRET unset, it is 1 here" in result.stderr
