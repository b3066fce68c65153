"""Trees of drafts: one step of all lanes, and their best children. The search itself is a few small torch functions."""

from typing import List, Optional, Tuple

import torch

from . import ops
from ._ops import add_op_namespace_prefix
from .chain import advance
from .launch import EXPAND, check, missing, on_its_device, pad, triton


if triton is not None:
    from .triton_tree import expand_kernel


@torch.library.custom_op(add_op_namespace_prefix("tree_step"), mutates_args=())
@on_its_device
def _tree_step(
    gates: torch.Tensor,
    parents: torch.Tensor,
    state: torch.Tensor,
    recurrent: torch.Tensor,
    from_hidden: torch.Tensor,
    weights: List[torch.Tensor],
    biases: List[Optional[torch.Tensor]],
    rounded: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    head = ops.HeadWeights(*weights, *biases)
    check(gates=gates, state=state, recurrent=recurrent, from_hidden=from_hidden, **head._asdict())
    if missing(gates.device):
        return ops.tree_step(gates, parents, state, recurrent, from_hidden, head)
    lanes, (width, rank) = gates.shape[0], (state.shape[1], from_hidden.shape[0])
    new_state, new_recurrent, mid = (
        torch.empty(lanes, size, dtype=torch.float32, device=gates.device) for size in (width, 3 * width, rank)
    )
    advance(
        None,
        parents.contiguous(),
        gates.contiguous(),
        recurrent.float().contiguous(),
        state.float().contiguous(),
        from_hidden.float().expand(lanes, -1),
        head.weight_in,
        head.weight_hh,
        head.bias_hh,
        new_state,
        mid,
        new_recurrent,
        rounded,
    )
    return new_state.to(state.dtype), new_recurrent.to(recurrent.dtype), mid.to(from_hidden.dtype)


@_tree_step.register_fake
def _(gates, parents, state, recurrent, from_hidden, weights, biases, rounded):
    lanes = gates.shape[0]
    return tuple(like.new_empty(lanes, like.shape[-1]) for like in (state, recurrent, from_hidden))


def tree_step(
    gates: torch.Tensor,
    parents: torch.Tensor,
    state: torch.Tensor,
    recurrent: torch.Tensor,
    from_hidden: torch.Tensor,
    weights: ops.HeadWeights,
    *,
    rounded: bool = False,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Moves every lane by one token: new states `[W, G]`, their `W_hh s` `[W, 3G]`, features `[W, R]`.

    Args:
        gates: `W_ih e + b` of the consumed tokens, `[W, 3G]`.
        parents: the row of `state` that each lane continues, int64 `[W]`.
        state, recurrent: of the lanes before, `[W', G]` and `[W', 3G]`.
        from_hidden: share of the backbone at this depth, `[R]`.
        weights ([`HeadWeights`]): of the head.
    """
    return _tree_step(gates, parents, state, recurrent, from_hidden, list(weights[:4]), list(weights[4:]), rounded)


@torch.library.custom_op(add_op_namespace_prefix("tree_expand"), mutates_args=())
@on_its_device
def _tree_expand(
    base_logits: torch.Tensor,
    features: Optional[torch.Tensor],
    rows: torch.Tensor,
    tail: torch.Tensor,
    lane_scores: torch.Tensor,
    temperature: torch.Tensor,
    children: int,
    biases: Optional[torch.Tensor],
    rounded: bool,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check(base_logits=base_logits, features=features, rows=rows, tail=tail, biases=biases)
    if missing(base_logits.device):
        return ops.tree_expand(base_logits, features, rows, tail, lane_scores, temperature, children, biases)
    lanes, (count, rank) = lane_scores.shape[0], rows.shape
    places = torch.empty(lanes, children, dtype=torch.int64, device=base_logits.device)
    scores, steps = (torch.empty(lanes, children, dtype=torch.float32, device=places.device) for _ in range(2))
    expand_kernel[(lanes,)](
        base_logits.float().contiguous(),
        None if features is None else features.float().contiguous(),
        rows.contiguous(),
        biases,
        tail.float(),
        lane_scores.float().contiguous(),
        temperature,
        places,
        scores,
        steps,
        count,
        R=rank,
        CHILDREN=children,
        CORRECT=features is not None,
        ROUND=rounded,
        PLACES=pad(count),
        **EXPAND,
    )
    return places, scores, steps


@_tree_expand.register_fake
def _(base_logits, features, rows, tail, lane_scores, temperature, children, biases, rounded):
    scores = lane_scores.new_empty(lane_scores.shape[0], children, dtype=torch.float32)
    return torch.empty_like(scores, dtype=torch.int64), scores, torch.empty_like(scores)


def tree_expand(
    base_logits: torch.Tensor,
    features: Optional[torch.Tensor],
    rows: torch.Tensor,
    tail: torch.Tensor,
    lane_scores: torch.Tensor,
    temperature: torch.Tensor,
    children: int,
    biases: Optional[torch.Tensor] = None,
    *,
    rounded: bool = False,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best children of every lane: places among the candidates, path scores, own log-probabilities, `[W, C]` each.

    Args:
        base_logits: of the depth's candidates, fp32 `[M]`.
        features: of each lane, `[W, R]`, or `None` to leave the base logits as they are.
        rows: gathered rows of W_out, `[M, R]`.
        tail: log of the tempered mass of all other tokens, `[1]`.
        lane_scores: `[W]`.
        temperature: fp32 `[1]` on the device.
        children: C.
        biases: gathered, `[M]`, or `None`.

    Raises:
        ValueError: if more children than candidates are asked for.
    """
    if not 0 < children <= rows.shape[0]:
        raise ValueError(
            f"`children` must be between 1 and the number of candidates, got {children} of {rows.shape[0]}; ask for fewer."
        )
    return _tree_expand(base_logits, features, rows, tail, lane_scores, temperature, children, biases, rounded)
