"""CUDA graphs: functions of tensors that are launched as a whole, and the rules under which that is right.

A graph repeats launches on fixed addresses. So it has buffers of its own for what changes, it refers to what it reads,
and it is made anew once weights are others; the functions wait for the device nowhere. Elsewhere than on a CUDA device
the same functions run as they are. What the functions compute is not known here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch


# Shapes whose graphs are kept: the widths of a text's last rounds, and those of batches that shrink.
MAX_GRAPHS = 8
# Runs of a function before it is captured.
WARM_UPS = 2


def versions_of(tensors: list[torch.Tensor]) -> tuple:
    """What changes when a tensor is trained, moved or converted; inference tensors cannot change."""
    return tuple(
        (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version, tensor.dtype) for tensor in tensors
    )


_PARTS = threading.local()


@contextlib.contextmanager
def one_function() -> Iterator[None]:
    """What would be a graph of its own is, in here, part of a larger function: it runs as it is."""
    outer, _PARTS.inside = getattr(_PARTS, "inside", False), True
    try:
        yield
    finally:
        _PARTS.inside = outer


class Graphs:
    """Runs functions of tensors as CUDA graphs, one for each set of shapes; elsewhere the same code runs uncaptured.

    A graph reads its inputs from buffers of its own and keeps everything it refers to. Other weights, or weights that
    were written to, make all graphs invalid.
    """

    def __init__(self):
        self._constants: tuple = ()
        self._entries: dict[tuple, tuple] = {}

    def __len__(self) -> int:
        return sum(graph is not None for _, _, graph, _ in self._entries.values())

    @torch.no_grad()
    def __call__(self, function: Callable, inputs: list[torch.Tensor], constants: list[torch.Tensor], *options):
        """The outputs of `function(*inputs)`.

        Args:
            inputs: tensors that change from call to call.
            constants: tensors that `function` reads from elsewhere.
            options: anything hashable that `function` depends on.
        """
        if getattr(_PARTS, "inside", False):
            return function(*inputs)
        key = (options, *((tensor.shape, tensor.dtype, tensor.device) for tensor in inputs))
        if self._is_new(key, constants):
            # Tensors of inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                buffers = [torch.empty_like(tensor) for tensor in inputs]
            for buffer, tensor in zip(buffers, inputs):
                buffer.copy_(tensor)
            self._entries[key] = self._capture(function, buffers, inputs[0].device)
        buffers, function, graph, outputs = self._entries[key]
        for buffer, tensor in zip(buffers, inputs):
            buffer.copy_(tensor)
        if graph is None:
            return function(*buffers)
        graph.replay()
        # The next replay writes into the same memory.
        return tuple(output.clone() for output in outputs)

    @torch.no_grad()
    def in_place(self, function: Callable[[], None], device: torch.device, constants: list[torch.Tensor], *options):
        """A function that only works on tensors it holds, ready to be called again and again.

        Where it is captured it has run by then, and left its tensors in any state.
        """
        if self._is_new(options, constants):
            self._entries[options] = self._capture(function, [], device)
        _, function, graph, _ = self._entries[options]
        return function if graph is None else graph.replay

    def forget(self) -> None:
        """Lets go of everything."""
        self._entries.clear()

    def _is_new(self, key: tuple, constants: list[torch.Tensor]) -> bool:
        """Whether nothing is held for `key`; drops what other constants made invalid, and the oldest if there is no room."""
        state = versions_of(constants)
        if state != self._constants:
            self._entries.clear()
            self._constants = state
        if key in self._entries:
            return False
        if len(self._entries) == MAX_GRAPHS:
            self._entries.pop(next(iter(self._entries)))
        return True

    @staticmethod
    def _capture(function: Callable, buffers: list[torch.Tensor], device: torch.device) -> tuple:
        """Buffers, the function with all it refers to, its graph and the graph's outputs (`None` off CUDA)."""
        if device.type != "cuda":
            return buffers, function, None, None
        # Kernels are compiled, and libraries set up, before anything is recorded.
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    function(*buffers)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = function(*buffers)
        return buffers, function, graph, outputs
