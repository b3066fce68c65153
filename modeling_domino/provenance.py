"""Where a number comes from: code, versions, machine, weights and command, as one dictionary beside every result.

The dictionary is published with cards and results, so it names models and file names, never a path of the machine.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "modeling-domino",
    "torch",
    "transformers",
    "huggingface-hub",
    "tokenizers",
    "safetensors",
    "triton",
    "kernels",
)


def provenance(
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    weights: Mapping[str, Path] | None = None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Collects the provenance of a result.

    Args:
        device: where the models ran.
        dtype (`torch.dtype`): of the target.
        weights (`Mapping[str, Path]`, *optional*): files or folders to hash, by role ("target", "drafter").
        command (`Sequence[str]`, *optional*): by default the command line of this process.

    Returns:
        `dict`: JSON-ready; `git_sha` is `None` outside a checkout.
    """
    sha, dirty = git_state(CHECKOUT)
    return {
        "git_sha": sha,
        "git_dirty": dirty,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **package_versions()},
        "hardware": hardware(device),
        "dtype": str(dtype).removeprefix("torch."),
        "command": shlex.join(_without_paths(sys.argv if command is None else command)),
        "weights_sha256": {role: sha256_of(path) for role, path in (weights or {}).items()},
    }


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Commit of the checkout at `folder`, and whether tracked files differ from it; two `None` if it is no checkout."""
    # An installed package may lie inside somebody else's repository: only our own root counts.
    if not (folder / ".git").exists():
        return None, None
    try:
        sha = _output("git", "-C", str(folder), "rev-parse", "HEAD")
        changes = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return sha, bool(changes)


def package_versions() -> dict[str, str]:
    """Versions of the installed packages that can change a result."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def hardware(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The machine that computes on `device`: processor, cores, threads, memory in GiB, and the accelerator if used."""
    facts = {
        "cpu": _cpu_name(),
        "cores": _usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "device": torch.device(device).type,
    }
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = properties.name
        facts["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
    return facts


def sha256_of(path: Path) -> str | None:
    """SHA-256 of a file, or over all safetensors of a folder in name order; `None` where there are none."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    files = [file for file in files if file.is_file()]
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def _without_paths(command: Sequence[str]) -> list[str]:
    """The command with absolute paths cut to their last name."""
    shown = []
    for word in command:
        name, equals, value = word.rpartition("=") if word.startswith("-") else ("", "", word)
        shown.append(f"{name}{equals}{Path(value).name if os.path.isabs(value) else value}")
    return shown


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _usable_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
