"""What every launch needs to know: whether Triton may run here, what it accepts, and the sizes of tiles.

No autotuning: it would measure inside a graph capture. The sizes are those that do not spill (`tests/test_kernels_aot.py`
holds them to ceilings).
"""

import contextlib
import functools
from typing import Callable, Dict, Optional

import torch


try:
    import triton
except ImportError:  # no wheel on some systems; the torch functions do the same
    triton = None

DTYPES = (torch.float32, torch.bfloat16)
DEVICES = ("cuda", "xpu")

MATVEC = {"ROWS": 16, "COLS": 256, "num_warps": 8}
DOT = {"ROWS": 16, "IDS": 128, "INNER": 64, "num_warps": 4, "num_stages": 3}
SHORT = {"IDS": 32, "num_warps": 4}
SHORTLIST = {"num_warps": 4}
GATHER = {"ROWS": 16, "num_warps": 4}
EXPAND = {"INNER": 64, "num_warps": 4}
# From this many sequences on, W_out is read once for all of them, on tensor cores.
DOT_FROM = 4


def head_tile(rank: int) -> Dict[str, int]:
    """Ids and warps of `head_kernel`: its tile of W_out keeps its size whatever the rank."""
    return {"IDS": max(8, min(64, 64 * 256 // pad(rank))), "num_warps": 8}


def pad(size: int) -> int:
    """The power of two that holds `size`."""
    return 1 << (size - 1).bit_length()


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors."""
    return triton is not None and triton.knobs.runtime.interpret


def missing(device: torch.device) -> Optional[str]:
    """Why the Triton kernels cannot run on `device`; `None` if they can."""
    if triton is None:
        return "triton is not installed"
    if interpreted():
        return None if device.type == "cpu" else "Triton's interpreter is on, and runs on CPU tensors only"
    if device.type not in DEVICES:
        return f"Triton has no compiler for {device.type} tensors"
    return None


def on_its_device(operation: Callable) -> Callable:
    """Makes the device of an operation's first tensor the current one: Triton launches there, wherever tensors are."""

    @functools.wraps(operation)
    def run(*args, **kwargs):
        device = args[0].device
        guard = contextlib.nullcontext()
        if device.type in DEVICES:
            guard = getattr(torch, device.type).device(device)
        with guard:
            return operation(*args, **kwargs)

    return run


def check(**tensors: Optional[torch.Tensor]) -> None:
    """Refuses what the kernels would misread.

    Raises:
        TypeError: for a dtype other than fp32 and bf16.
        ValueError: for tensors on several devices, or weights that are not contiguous.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(given))
    for name, tensor in given.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"The kernels compute in float32 and bfloat16, `{name}` is {str(tensor.dtype)[6:]}; convert it with "
                "`.to(torch.bfloat16)`."
            )
        if tensor.device != given[first].device:
            raise ValueError(
                f"The kernels need all tensors on one device, `{first}` is on {given[first].device} and `{name}` on "
                f"{tensor.device}; move them together."
            )
        if name.startswith(("weight", "bias", "table")) and not tensor.is_contiguous():
            raise ValueError(
                f"The kernels read weights as they lie in memory, `{name}` has strides {tuple(tensor.stride())} for shape "
                f"{tuple(tensor.shape)}; pass `{name}.contiguous()`, once."
            )
