"""Linear layers on prepacked weights: what makes a forward of a few rows cheap on a CPU.

A forward of one token reads every weight once. With plain linear layers one of five rows costs twice as much, because
the multiplication lays the weights out anew each time; with weights laid out once, ahead, it costs little more than one
row. With several threads a single row gains too: measured layer by layer, so plain steps are as fast as they can be. The
packed copies stand beside the model's own weights (so its memory doubles) and are used inside `with` blocks only: the
model's modules, parameters and hooks stay as they are, and prompts take the usual way. Each generation looks whether the
weights have changed, which costs about as much as a token.

This is oneDNN's blocked layout, through the operators that torch's compiler emits for frozen weights. Matrices that are no
linear layers (a GRU's, or those of the head in a rollout) go through [`PackedMatrices`] instead. The file knows nothing of
drafters; results agree with the usual layers to rounding.
"""

from __future__ import annotations

import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .ops_domino import by_columns


# Without a word from the user, targets up to this size are packed: a second copy of a large model would surprise.
AUTOMATIC_BYTES = 2 << 30
# Below this many weights a layer costs what calling it costs.
LEAST_WEIGHTS = 1 << 16
# Above, both ways are bound by arithmetic, and the usual one needs no second reader of the weights.
MOST_ROWS = 64
# Packed must be this much faster in the measurement, or the second copy of the weights is not worth its memory.
WORTH = 0.9
REPEATS = 7
# Of the measurement, whatever run comes first: what it finds holds for all later ones.
MEASURED_ROWS = 4
DTYPES = (torch.float32, torch.bfloat16)
# A head has three, and one more for each draft vocabulary.
MOST_MATRICES = 8

_PACKED: weakref.WeakKeyDictionary[nn.Module, PackedLinears] = weakref.WeakKeyDictionary()
_MATRICES: weakref.WeakKeyDictionary[nn.Module, PackedMatrices] = weakref.WeakKeyDictionary()
# The fastest layouts for one row and for a few, by shape, dtype and threads.
_FASTEST: dict[tuple, tuple[str, str]] = {}


def packed_pair(target: nn.Module, drafter: nn.Module, *, prepack: bool | None) -> PackedPair:
    """Target and drafter on packed weights, for forwards inside `with` blocks; `num_bytes` of the copies, 0 without any.

    The copies are made at the first call and live as long as their model.

    Args:
        target, drafter (`nn.Module`): what does not lie on a CPU, in fp32 or bf16, is left alone.
        prepack (`bool`, *optional*): by default targets of up to 2 GiB are packed.

    Raises:
        ValueError: if packing is asked for and nothing here can be packed.
    """
    if prepack not in (True, False, None):
        raise ValueError(f"`prepack` must be True, False, or None for small targets only, got {prepack!r}.")
    sizes = [layer.weight.numel() * layer.weight.element_size() for layer in _linears(target)]
    if prepack and not sizes:
        raise ValueError(
            f"`prepack=True` needs a target with plain linear layers in fp32 or bf16 on a CPU, and oneDNN in torch; "
            f"{type(target).__name__} on {target.device} has none to pack: leave it out."
        )
    if prepack is False or not sizes or (prepack is None and sum(sizes) > AUTOMATIC_BYTES):
        return NOTHING_PACKED
    # The layers of the head are reached by their matrices.
    head = getattr(drafter, "embed_proj", None)
    linears = [
        _PACKED.setdefault(target, PackedLinears(target)),
        _PACKED.setdefault(drafter, PackedLinears(drafter, head)),
    ]
    return PackedPair([*linears, packed_matrices(drafter)])


class PackedPair:
    """The packed weights of several models, brought up to date once; in force inside each `with` block.

    Args:
        packed (`list`): [`PackedLinears`] and [`PackedMatrices`].
    """

    def __init__(self, packed: list[PackedLinears | PackedMatrices]):
        self._packed = packed
        for each in packed:
            each.refresh()

    @property
    def num_bytes(self) -> int:
        """Memory of the packed copies, in bytes; those of matrices are made when they are first used."""
        return sum(each.num_bytes for each in self._packed)

    def __enter__(self) -> PackedPair:
        for each in self._packed:
            each.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        for each in self._packed:
            each.__exit__()


NOTHING_PACKED = PackedPair([])


class PackedLinears:
    """Packed copies of the linear layers of a model, in force between `__enter__` and `__exit__`.

    Every shape of layer is measured once, packed against usual, with one row and with a few; what does not gain is left
    alone. `refresh` packs anew what has changed. Blocks may be nested, also from several threads.

    Args:
        model (`nn.Module`): on the CPU; a weak reference is kept.
        besides (`nn.Module`, *optional*): a part of it that is left alone.
    """

    def __init__(self, model: nn.Module, besides: nn.Module | None = None):
        self._model = weakref.ref(model)
        self._besides = None if besides is None else weakref.ref(besides)
        self._layers: dict[nn.Linear, _PackedLayer] = {}
        # Where they go, every round: setting attributes of hundreds of modules the usual way takes a fifth of a millisecond.
        self._places: list[tuple[dict[str, Any], _PackedLayer]] = []
        # For one row and for a few.
        self._worthwhile: dict[Any, tuple[bool, bool]] = {}
        self._depth = 0
        self._lock = threading.Lock()
        # Memory of the packed copies.
        self.num_bytes = 0

    def __enter__(self) -> PackedLinears:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._put_on()
        return self

    def __exit__(self, *exception) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._take_off()

    def _put_on(self) -> None:
        for attributes, layer in self._places:
            # On the instance, in front of the class's method: `_take_off` leaves no trace.
            attributes["forward"] = layer

    def _take_off(self) -> None:
        for attributes, _ in self._places:
            attributes.pop("forward", None)

    @torch.no_grad()
    def refresh(self) -> PackedLinears:
        """Packs what is new or has changed, and lets go of layers that are gone; costs one reading of the weights."""
        with self._lock:
            layers = {}
            besides = self._besides and self._besides()
            left_alone = set() if besides is None else set(besides.modules())
            for linear in _linears(self._model()):
                if linear in left_alone:
                    continue
                layer = self._layers.get(linear)
                if layer is None or not layer.is_current():
                    layer = self._pack(linear)
                if layer is not None:
                    layers[linear] = layer
            if self._depth > 0:
                self._take_off()
            self._layers = layers
            self.num_bytes = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers.values())
            self._places = [(linear.__dict__, layer) for linear, layer in layers.items()]
            if self._depth > 0:
                self._put_on()
        return self

    def _pack(self, linear: nn.Linear) -> _PackedLayer | None:
        kind = (tuple(linear.weight.shape), linear.weight.dtype, linear.bias is not None)
        if self._worthwhile.get(kind) == (False, False):
            return None
        layer = _PackedLayer(linear)
        if kind not in self._worthwhile:
            gains = []
            for count in (1, MEASURED_ROWS):
                rows = torch.zeros(1, count, linear.in_features, dtype=linear.weight.dtype)
                packed, usual = _fastest_of([layer.packed, layer.usual], rows)
                gains.append(packed < WORTH * usual)
            self._worthwhile[kind] = tuple(gains)
        layer.one, layer.few = self._worthwhile[kind]
        return layer if layer.one or layer.few else None


def packed_matrices(model: nn.Module) -> PackedMatrices:
    """What multiplies by matrices of `model` that are reached past its layers; `F.linear` outside of [`packed_pair`]'s blocks."""
    return _MATRICES.setdefault(model, PackedMatrices())


class PackedMatrices:
    """`F.linear` by the fastest layout of each matrix: by rows as it is, by columns, or in oneDNN's blocks.

    In force between `__enter__` and `__exit__`, in the thread that is there. Every shape is measured once, with one row
    and with a few; a copy is made where it gains, when the matrix is first used. `refresh` lets go of those whose matrix
    has changed.
    """

    def __init__(self):
        self._known: dict[int, _PackedMatrix] = {}
        self._here = threading.local()

    def __enter__(self) -> PackedMatrices:
        self._here.blocks = getattr(self._here, "blocks", 0) + 1
        return self

    def __exit__(self, *exception) -> None:
        self._here.blocks -= 1

    @property
    def num_bytes(self) -> int:
        """Memory of the copies, in bytes."""
        return sum(matrix.num_bytes for matrix in list(self._known.values()))

    @torch.no_grad()
    def refresh(self) -> PackedMatrices:
        """Lets go of what has changed; costs one reading of the matrices."""
        self._known = {key: matrix for key, matrix in list(self._known.items()) if matrix.is_current()}
        return self

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        count = rows.numel() // weight.shape[1]
        usable = weight.device.type == "cpu" and weight.dtype == rows.dtype and weight.dtype in DTYPES
        usable = usable and weight.numel() >= LEAST_WEIGHTS and 0 < count <= MOST_ROWS
        if not usable or torch.is_grad_enabled() or not getattr(self._here, "blocks", 0):
            return F.linear(rows, weight, bias)
        known = self._known.get(id(weight))
        if known is None:
            if len(self._known) >= MOST_MATRICES:
                # Of draft vocabularies that are not in use any more.
                self._known = {}
            known = self._known[id(weight)] = _PackedMatrix(weight)
        return (known.one if count == 1 else known.few)(rows, bias)


class _PackedMatrix:
    """One matrix, and the products with one row and with a few in their fastest layouts."""

    def __init__(self, weight: torch.Tensor):
        # The matrix itself, so that no other can take its place in memory.
        self._weight, self._seen = weight, _look_of(weight)
        self.one, self.few, copies = _fastest_layouts(weight)
        self.num_bytes = copies * weight.numel() * weight.element_size()

    def is_current(self) -> bool:
        return _look_of(self._weight) == self._seen


def _fastest_layouts(weight: torch.Tensor) -> tuple[Callable, Callable, int]:
    """The products of one row and of a few rows with `weight`, each in its fastest layout, and how many copies these are."""
    layouts = {"rows": lambda: weight, "columns": lambda: by_columns(weight.detach())}
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        layouts["blocks"] = lambda: torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
    products: dict[str, Callable] = {}

    def product(name: str) -> Callable:
        if name not in products:
            matrix = layouts[name]()
            products[name] = (
                (lambda rows, bias=None: torch.ops.mkldnn._linear_pointwise(rows, matrix, bias, "none", [], ""))
                if name == "blocks"
                else (lambda rows, bias=None: F.linear(rows, matrix, bias))
            )
        return products[name]

    kind = (tuple(weight.shape), weight.dtype, torch.get_num_threads())
    if kind not in _FASTEST:
        _FASTEST[kind] = tuple(
            _fastest_name({name: product(name) for name in layouts}, weight, count) for count in (1, MEASURED_ROWS)
        )
    one, few = _FASTEST[kind]
    return product(one), product(few), len({one, few} - {"rows"})


def _fastest_name(products: dict[str, Callable], weight: torch.Tensor, count: int) -> str:
    rows = torch.zeros(count, weight.shape[1], dtype=weight.dtype)
    seconds = dict(zip(products, _fastest_of(list(products.values()), rows)))
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < WORTH * seconds["rows"] else "rows"


class _PackedLayer:
    """The forward of one linear layer: packed for one row or a few, where that gains, usual otherwise."""

    def __init__(self, linear: nn.Linear):
        self.one = self.few = True
        self.weight, self.bias = linear.weight, linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), None)
        self._seen = _look_of(linear.weight)
        self._linear = weakref.ref(linear)

    def is_current(self) -> bool:
        """Whether the layer still has the weights that were packed."""
        linear = self._linear()
        same = linear is not None and linear.weight is self.weight and linear.bias is self.bias
        return same and _look_of(linear.weight) == self._seen

    def __deepcopy__(self, memo: dict[int, Any]):
        # A copy of the model runs on its own weights; the packed ones cannot be copied.
        return types.MethodType(nn.Linear.forward, memo[id(self._linear())])

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        count = rows.numel() // self.weight.shape[1]
        gains = self.one if count == 1 else self.few and count <= MOST_ROWS
        if gains and rows.dtype == self.weight.dtype and not torch.is_grad_enabled():
            return self.packed(rows)
        return self.usual(rows)

    def packed(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")

    def usual(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias)


def _look_of(weight: torch.Tensor) -> tuple:
    """What tells changed weights: place, version and type, and sums of the rows weighed by where they lie.

    Changes through `.data` and by fused optimisers leave no version; a plain sum misses rows that have changed places.
    """
    version = 0 if weight.is_inference() else weight._version
    places = torch.linspace(1.0, 2.0, weight.shape[0], dtype=torch.float64)
    return (
        weight.data_ptr(),
        version,
        weight.dtype,
        weight.shape,
        (weight.detach().sum(dim=1).double() @ places).item(),
    )


def _linears(model: nn.Module):
    """Linear layers that nobody else has taken over: not quantised, not adapted, not offloaded, on the CPU."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return
    for module in model.modules():
        if type(module) is not nn.Linear or not isinstance(module.__dict__.get("forward"), (type(None), _PackedLayer)):
            continue
        weight = module.weight
        if weight.device.type == "cpu" and weight.dtype in DTYPES and weight.numel() >= LEAST_WEIGHTS:
            yield module


def _fastest_of(ways: list[Callable], rows: torch.Tensor) -> list[float]:
    """Seconds of functions of `rows`, taken in turns; the fastest of some calls, which other processes disturb least."""
    best = [float("inf")] * len(ways)
    for _ in range(REPEATS):
        for i, way in enumerate(ways):
            start = time.perf_counter()
            way(rows)
            best[i] = min(best[i], time.perf_counter() - start)
    return best
