"""What a benchmark says of the machine: peaks of memory, the bandwidth that bounds decoding, what must not differ."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ..record_domino import synchronize
from .methods import Models


BANDWIDTH_BYTES = 1 << 28
LINUX_PEAK = Path("/proc/self/status")


def forget_peak_memory(device: torch.device) -> None:
    """Starts a new measurement of [`peak_memory_mb`], where that is possible."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif LINUX_PEAK.exists():
        # Not every container lets a process reset its own mark; the peak is then that of the process so far.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mb(device: torch.device) -> float | None:
    """Most memory since [`forget_peak_memory`]: on CUDA of tensors, on Linux of the process, elsewhere of the process so
    far; `None` where nobody counts.
    """
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    if LINUX_PEAK.exists():
        peak = re.search(r"^VmHWM:\s+(\d+) kB", LINUX_PEAK.read_text(), flags=re.MULTILINE)
        if peak is not None:
            return round(int(peak[1]) / 2**10, 1)
    try:
        import resource
    except ImportError:
        return None
    # macOS counts bytes, the others KiB.
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 1)


def memory_bandwidth(device: torch.device) -> float:
    """GB/s of reading memory, the best of five passes over 256 MiB."""
    data = torch.ones(BANDWIDTH_BYTES // 4, device=device)
    best = float("inf")
    for _ in range(5):
        synchronize(device)
        started = time.perf_counter()
        data.sum()
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return round(BANDWIDTH_BYTES / best / 1e9, 2)


def weight_bytes(model) -> int:
    """Bytes of weights that one token reads: all of them but the rows of an embedding that is not the output head too."""
    embedding = model.get_input_embeddings().weight
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    output_head = model.get_output_embeddings()
    tied = output_head is not None and output_head.weight is embedding
    return total if tied else total - embedding.numel() * embedding.element_size()


def machine_facts(models: Models) -> dict[str, Any]:
    """What the bandwidth bound is computed from."""
    return {
        "memory_bandwidth_gb_per_second": memory_bandwidth(models.target.device),
        "target_weight_bytes": weight_bytes(models.target),
    }


def comparable(session: dict[str, Any]) -> dict[str, Any]:
    """The part of a session's provenance that all sessions of a folder must share for their timings to compare."""
    hardware = {name: session["hardware"].get(name) for name in ("cpu", "cores", "threads", "device", "gpu")}
    versions = {name: session["versions"].get(name) for name in ("torch", "transformers")}
    return {
        "dtype": session["dtype"],
        "hardware": hardware,
        "versions": versions,
        "weights_sha256": session["weights_sha256"],
    }
