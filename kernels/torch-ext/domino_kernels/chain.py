"""Chains of drafts: each operation of the head on its own, and the whole rollout.

Every operation has a twin of the same meaning in `ops.py`, which runs where Triton cannot. `missing` says why.
"""

from typing import List, Optional, Tuple

import torch

from . import ops
from ._ops import add_op_namespace_prefix
from .launch import (
    DOT,
    DOT_FROM,
    GATHER,
    MATVEC,
    SHORT,
    SHORTLIST,
    check,
    head_tile,
    interpreted,
    missing,
    on_its_device,
    pad,
    triton,
)


if triton is not None:
    from .triton_chain import (
        finalize_kernel,
        gather_kernel,
        head_dot_kernel,
        head_kernel,
        init_kernel,
        input_kernel,
        short_kernel,
        shortlist_kernel,
        state_kernel,
        update_kernel,
    )


NO_KEY = -(2**63)


def tiles(size: int, tile: int) -> int:
    return (size + tile - 1) // tile


# ---- launches: they allocate, and start kernels


def matvec(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    output: torch.Tensor,
    rounded: bool,
    keys: Optional[torch.Tensor] = None,
    vocabulary: Optional[torch.Tensor] = None,
) -> None:
    rows, columns = weight.shape
    input_kernel[(tiles(rows, MATVEC["ROWS"]), output.shape[0])](
        keys,
        vocabulary,
        inputs,
        weight,
        bias,
        output,
        K=columns,
        N=rows,
        GATHER=keys is not None,
        ROUND=rounded,
        **MATVEC,
    )


def advance(
    keys: Optional[torch.Tensor],
    parents: Optional[torch.Tensor],
    gates: torch.Tensor,
    recurrent: torch.Tensor,
    state: torch.Tensor,
    from_hidden: torch.Tensor,
    weight_in: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_hh: Optional[torch.Tensor],
    new_state: torch.Tensor,
    mid: torch.Tensor,
    new_recurrent: torch.Tensor,
    rounded: bool,
    want_mid: bool = True,
    want_recurrent: bool = True,
    vocabulary: Optional[torch.Tensor] = None,
) -> None:
    """Launches `state_kernel`; `from_hidden` and `mid` are `[B, R]`, of which the first dimension may have any stride."""
    width, rank = weight_hh.shape[1], weight_in.shape[0]
    mid_tiles = tiles(rank, MATVEC["ROWS"])
    first = 0 if want_mid else mid_tiles
    last = mid_tiles + (tiles(3 * width, MATVEC["ROWS"]) if want_recurrent else 0)
    state_kernel[(last - first, new_state.shape[0])](
        keys,
        vocabulary,
        parents,
        gates,
        recurrent,
        state,
        from_hidden,
        from_hidden.stride(0),
        weight_in,
        weight_hh,
        bias_hh,
        new_state,
        mid,
        mid.stride(0),
        new_recurrent,
        first,
        D=weight_in.shape[1] - width,
        G=width,
        R=rank,
        TABLE=keys is not None,
        ROUND=rounded,
        **MATVEC,
    )


def choose(
    base: torch.Tensor,
    mid: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    keys: torch.Tensor,
    seed: Optional[torch.Tensor],
    temperature: Optional[torch.Tensor],
    step: int,
    correct: bool,
    rounded: bool,
) -> None:
    """Launches a head over the vocabulary; rows of `base` `[B, V]` and `mid` `[B, R]` may have any stride."""
    batch, size = base.shape
    rank = weight.shape[1]
    if correct and batch >= DOT_FROM:
        head_dot_kernel[(tiles(size, DOT["IDS"]), tiles(batch, DOT["ROWS"]))](
            mid,
            mid.stride(0),
            weight,
            bias,
            base,
            base.stride(0),
            seed,
            temperature,
            keys,
            step,
            batch,
            size,
            R=rank,
            SAMPLE=seed is not None,
            ROUND=rounded,
            INTERPRET=interpreted(),
            **DOT,
        )
        return
    tile = head_tile(rank)
    head_kernel[(tiles(size, tile["IDS"]), batch)](
        mid,
        mid.stride(0),
        weight,
        bias,
        base,
        base.stride(0),
        seed,
        temperature,
        keys,
        step,
        size,
        R=rank,
        R_PAD=pad(rank),
        CORRECT=correct,
        SAMPLE=seed is not None,
        ROUND=rounded,
        **tile,
    )


def choose_short(
    base: torch.Tensor,
    mid: torch.Tensor,
    rows: torch.Tensor,
    bias: Optional[torch.Tensor],
    ids: torch.Tensor,
    keys: torch.Tensor,
    seed: Optional[torch.Tensor],
    temperature: Optional[torch.Tensor],
    step: int,
    correct: bool,
    rounded: bool,
) -> None:
    """Launches a head over candidates `[B, M]`; base and ids have the same strides."""
    batch, count = ids.shape
    rank = mid.shape[-1]
    short_kernel[(tiles(count, SHORT["IDS"]), batch)](
        mid,
        mid.stride(0),
        rows,
        rows.stride(0),
        bias,
        base,
        ids,
        ids.stride(0),
        seed,
        temperature,
        keys,
        step,
        count,
        R=rank,
        R_PAD=pad(rank),
        CORRECT=correct,
        SAMPLE=seed is not None,
        ROUND=rounded,
        **SHORT,
    )


def no_keys(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.full(shape, NO_KEY, dtype=torch.int64, device=like.device)


# ---- operations


@torch.library.custom_op(add_op_namespace_prefix("gru_step"), mutates_args=())
@on_its_device
def _gru_step(
    inputs: torch.Tensor,
    state: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: Optional[torch.Tensor],
    bias_hh: Optional[torch.Tensor],
    rounded: bool,
) -> torch.Tensor:
    check(inputs=inputs, state=state, weight_ih=weight_ih, weight_hh=weight_hh, bias_ih=bias_ih, bias_hh=bias_hh)
    if missing(inputs.device):
        return ops.gru_step(inputs, state, weight_ih, weight_hh, bias_ih, bias_hh)
    batch, width = state.shape
    old = state.float().contiguous()
    gates, recurrent = (old.new_empty(batch, 3 * width) for _ in range(2))
    matvec(inputs.contiguous(), weight_ih, bias_ih, gates, rounded)
    matvec(old, weight_hh, bias_hh, recurrent, rounded)
    new_state = torch.empty_like(old)
    update_kernel[(tiles(width, MATVEC["COLS"]), batch)](
        gates, recurrent, old, new_state, G=width, ROUND=rounded, COLS=MATVEC["COLS"]
    )
    return new_state.to(state.dtype)


@_gru_step.register_fake
def _(inputs, state, weight_ih, weight_hh, bias_ih, bias_hh, rounded):
    return torch.empty_like(state, memory_format=torch.contiguous_format)


def gru_step(
    inputs: torch.Tensor,
    state: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: Optional[torch.Tensor] = None,
    bias_hh: Optional[torch.Tensor] = None,
    *,
    rounded: bool = False,
) -> torch.Tensor:
    """One step of a GRU: inputs `[B, D]` move the state `[B, G]`. With `rounded`, as eager bf16 rounds."""
    return _gru_step(inputs, state, weight_ih, weight_hh, bias_ih, bias_hh, rounded)


@torch.library.custom_op(add_op_namespace_prefix("correct_and_choose"), mutates_args=())
@on_its_device
def _correct_and_choose(
    base_logits: torch.Tensor,
    features: torch.Tensor,
    weight_out: torch.Tensor,
    bias_out: Optional[torch.Tensor],
    seed: Optional[torch.Tensor],
    temperature: Optional[torch.Tensor],
    step: int,
    rounded: bool,
) -> torch.Tensor:
    check(base_logits=base_logits, features=features, weight_out=weight_out, bias_out=bias_out)
    if missing(base_logits.device):
        correction = ops.low_rank_correction(features, weight_out, bias_out)
        logits = base_logits + correction.to(base_logits.dtype)
        return ops.pick(logits) if seed is None else ops.sample(logits, seed, temperature, step)
    keys = no_keys(base_logits, base_logits.shape[0])
    base, mid = base_logits.contiguous(), features.float().contiguous()
    choose(base, mid, weight_out, bias_out, keys, seed, temperature, step, True, rounded)
    return ops.key_ids(keys)


@_correct_and_choose.register_fake
def _(base_logits, features, weight_out, bias_out, seed, temperature, step, rounded):
    return base_logits.new_empty(base_logits.shape[0], dtype=torch.int64)


def correct_argmax(
    base_logits: torch.Tensor,
    features: torch.Tensor,
    weight_out: torch.Tensor,
    bias_out: Optional[torch.Tensor] = None,
    *,
    rounded: bool = False,
) -> torch.Tensor:
    """The likeliest token of `base + W_out features`: `[B, V]` and `[B, R]` to `[B]`."""
    return _correct_and_choose(base_logits, features, weight_out, bias_out, None, None, 0, rounded)


def correct_sample(
    base_logits: torch.Tensor,
    features: torch.Tensor,
    weight_out: torch.Tensor,
    seed: torch.Tensor,
    temperature: torch.Tensor,
    bias_out: Optional[torch.Tensor] = None,
    *,
    step: int = 0,
    rounded: bool = False,
) -> torch.Tensor:
    """A token drawn from the softmax of `(base + W_out features) / temperature`, `[B]`.

    `seed` (int64) and `temperature` (fp32) are `[1]` on the device, so a captured graph reads them anew.
    """
    return _correct_and_choose(base_logits, features, weight_out, bias_out, seed, temperature, step, rounded)


@torch.library.custom_op(add_op_namespace_prefix("shortlist"), mutates_args=())
@on_its_device
def _shortlist(logits: torch.Tensor, tile: int, count: int) -> torch.Tensor:
    check(logits=logits)
    if missing(logits.device):
        return ops.tile_shortlist(logits, tile, count)
    flat = logits.reshape(-1, logits.shape[-1]).contiguous()
    num_tiles = tiles(flat.shape[-1], tile)
    ids = torch.empty(flat.shape[0], num_tiles * count, dtype=torch.int64, device=logits.device)
    shortlist_kernel[(num_tiles, flat.shape[0])](flat, ids, flat.shape[-1], TILE=tile, COUNT=count, **SHORTLIST)
    return ids.reshape(*logits.shape[:-1], -1)


@_shortlist.register_fake
def _(logits, tile, count):
    shape = (*logits.shape[:-1], (logits.shape[-1] + tile - 1) // tile * count)
    return logits.new_empty(shape, dtype=torch.int64)


def shortlist(logits: torch.Tensor, *, tile: int = 1024, count: int = 4) -> torch.Tensor:
    """The `count` best ids of every `tile` neighbouring ids, exactly: `[..., V]` to `[..., ceil(V / tile) * count]`.

    Raises:
        ValueError: if `tile` is no power of two, or smaller than `count`.
    """
    if tile != pad(tile) or not 0 < count <= tile:
        raise ValueError(
            f"`tile` must be a power of two with room for `count` ids, got tile={tile}, count={count}; "
            "1024 and 4 are what the kernels are made for."
        )
    return _shortlist(logits, tile, count)


@torch.library.custom_op(add_op_namespace_prefix("gather_rows"), mutates_args=())
@on_its_device
def _gather_rows(weight_out: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    check(weight_out=weight_out)
    if missing(weight_out.device):
        return ops.gather_rows(weight_out, ids)
    rank = weight_out.shape[1]
    rows = weight_out.new_empty(*ids.shape, rank)
    gather_kernel[(tiles(ids.numel(), GATHER["ROWS"]),)](
        ids.contiguous(), weight_out, rows, ids.numel(), R=rank, R_PAD=pad(rank), **GATHER
    )
    return rows


@_gather_rows.register_fake
def _(weight_out, ids):
    return weight_out.new_empty(*ids.shape, weight_out.shape[1])


def gather_rows(weight_out: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of W_out `[V, R]` at ids `[...]`, zeros for -1: `[..., R]`."""
    return _gather_rows(weight_out, ids)


@torch.library.custom_op(add_op_namespace_prefix("choose_candidate"), mutates_args=())
@on_its_device
def _choose_candidate(
    base_logits: torch.Tensor,
    features: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    bias_out: Optional[torch.Tensor],
    seed: Optional[torch.Tensor],
    temperature: Optional[torch.Tensor],
    step: int,
    rounded: bool,
) -> torch.Tensor:
    check(base_logits=base_logits, features=features, rows=rows, bias_out=bias_out)
    if missing(base_logits.device):
        biases = None if bias_out is None else bias_out[ids.clamp(min=0)]
        logits = ops.candidate_logits(base_logits, features, rows, biases)
        if seed is None:
            return ops.pick_candidates(logits, ids)
        return ops.sample_candidates(logits, ids, seed, temperature, step)
    keys = no_keys(base_logits, base_logits.shape[0])
    base, mid, rows, ids = base_logits.contiguous(), features.float().contiguous(), rows.contiguous(), ids.contiguous()
    choose_short(base, mid, rows, bias_out, ids, keys, seed, temperature, step, True, rounded)
    return ops.key_ids(keys)


@_choose_candidate.register_fake
def _(base_logits, features, rows, ids, bias_out, seed, temperature, step, rounded):
    return ids.new_empty(ids.shape[0])


def choose_candidate(
    base_logits: torch.Tensor,
    features: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    bias_out: Optional[torch.Tensor] = None,
    seed: Optional[torch.Tensor] = None,
    temperature: Optional[torch.Tensor] = None,
    *,
    step: int = 0,
    rounded: bool = False,
) -> torch.Tensor:
    """The short head: the best of candidates (or a sample of them, with `seed` and `temperature`), as a token `[B]`.

    Args:
        base_logits, ids: of the candidates, `[B, M]`; an id of -1 is none.
        features: `[B, R]`.
        rows: of [`gather_rows`], `[B, M, R]`.
        bias_out: of the whole vocabulary, `[V]`, or `None`.
    """
    return _choose_candidate(base_logits, features, rows, ids, bias_out, seed, temperature, step, rounded)


@torch.library.custom_op(add_op_namespace_prefix("finalize"), mutates_args=())
@on_its_device
def _finalize(
    base_logits: torch.Tensor,
    features: torch.Tensor,
    tokens: torch.Tensor,
    weight_out: torch.Tensor,
    bias_out: Optional[torch.Tensor],
    prefix_len: int,
    temperature: torch.Tensor,
    rounded: bool,
) -> Tuple[torch.Tensor, torch.Tensor]:
    check(base_logits=base_logits, features=features, weight_out=weight_out, bias_out=bias_out)
    if missing(base_logits.device):
        return ops.draft_log_probabilities(
            base_logits, features, tokens, weight_out, prefix_len, temperature, bias_out
        )
    batch, steps, size = base_logits.shape
    rank, num_rows = weight_out.shape[1], batch * steps
    grid = (tiles(size, DOT["IDS"]), tiles(num_rows, DOT["ROWS"]))
    maxima, sums = (features.new_empty(num_rows, grid[0], dtype=torch.float32) for _ in range(2))
    chosen = maxima.new_empty(batch, steps)
    finalize_kernel[grid](
        features.float().contiguous(),
        weight_out,
        bias_out,
        base_logits.contiguous(),
        tokens.contiguous(),
        temperature,
        maxima,
        sums,
        chosen,
        steps,
        prefix_len,
        num_rows,
        size,
        R=rank,
        ROUND=rounded,
        INTERPRET=interpreted(),
        **DOT,
    )
    log_z = (maxima + sums.log()).logsumexp(dim=-1).reshape(batch, steps)
    return chosen - log_z, log_z


@_finalize.register_fake
def _(base_logits, features, tokens, weight_out, bias_out, prefix_len, temperature, rounded):
    output = base_logits.new_empty(base_logits.shape[:2], dtype=torch.float32)
    return output, torch.empty_like(output)


def finalize(
    base_logits: torch.Tensor,
    features: torch.Tensor,
    tokens: torch.Tensor,
    weight_out: torch.Tensor,
    prefix_len: int,
    temperature: torch.Tensor,
    bias_out: Optional[torch.Tensor] = None,
    *,
    rounded: bool = False,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """The law of drafts that are sampled already: log-probability and log-normaliser, `[B, n]` each, in one pass of W_out.

    Args: those of `chain_rollout` and what it returned.
    """
    return _finalize(base_logits, features, tokens, weight_out, bias_out, prefix_len, temperature, rounded)


@torch.library.custom_op(add_op_namespace_prefix("chain_rollout"), mutates_args=())
@on_its_device
def _chain_rollout(
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    table: torch.Tensor,
    weights: List[torch.Tensor],
    biases: List[Optional[torch.Tensor]],
    prefix_len: int,
    candidates: Optional[torch.Tensor],
    seed: Optional[torch.Tensor],
    temperature: Optional[torch.Tensor],
    vocabulary: Optional[torch.Tensor],
    is_gates: bool,
    rounded: bool,
) -> Tuple[torch.Tensor, torch.Tensor]:
    head = ops.HeadWeights(*weights, *biases)
    check(base_logits=base_logits, hidden=hidden, table=table, **head._asdict())
    if missing(base_logits.device):
        return ops.chain_rollout(
            base_logits,
            hidden,
            anchors,
            (lambda ids: table[ids])
            if is_gates
            else (lambda ids: ops.gru_gates(table[ids], head.weight_ih, head.bias_ih)),
            head,
            prefix_len,
            candidates,
            seed,
            temperature,
            vocabulary,
        )
    batch, steps, _ = base_logits.shape
    dim, width, rank = hidden.shape[-1], head.weight_hh.shape[1], head.weight_in.shape[0]
    base = base_logits.contiguous()

    def buffer(*shape):
        return torch.empty(shape, dtype=torch.float32, device=base.device)

    keys = torch.empty(steps, batch, dtype=torch.int64, device=base.device)
    from_hidden, mid = buffer(batch, steps, rank), buffer(batch, steps, rank)
    states, recurrents = (buffer(2, batch, width), buffer(2, batch, 3 * width))
    gates = None if is_gates else buffer(batch, 3 * width)
    init_kernel[(tiles(max(rank, 3 * width), MATVEC["ROWS"]), steps, batch)](
        hidden.contiguous(),
        head.weight_in,
        head.bias_in,
        head.bias_hh,
        from_hidden,
        states,
        recurrents,
        keys,
        steps,
        D=dim,
        G=width,
        R=rank,
        ROUND=rounded,
        **MATVEC,
    )
    rows = None
    if candidates is not None:
        candidates = candidates.contiguous()
        base = base.gather(-1, candidates.clamp(min=0))
        rows = _gather_rows(head.weight_out, candidates)
    # The anchors as keys of their own: only the id matters.
    tokens = 0xFFFFFFFF - anchors
    for i in range(steps):
        # The anchors are tokens, the drafts places in the vocabulary.
        known = None if i == 0 else vocabulary
        if gates is not None:
            matvec(table, head.weight_ih, head.bias_ih, gates, rounded, tokens, known)
        now, new = i % 2, 1 - i % 2
        advance(
            tokens if is_gates else None,
            None,
            table if is_gates else gates,
            recurrents[now],
            states[now],
            from_hidden[:, i],
            head.weight_in,
            head.weight_hh,
            head.bias_hh,
            states[new],
            mid[:, i],
            recurrents[new],
            rounded,
            want_recurrent=i + 1 < steps,
            vocabulary=known if is_gates else None,
        )
        correct = i >= prefix_len
        if rows is None:
            choose(
                base[:, i], mid[:, i], head.weight_out, head.bias_out, keys[i], seed, temperature, i, correct, rounded
            )
        else:
            choose_short(
                base[:, i],
                mid[:, i],
                rows[:, i],
                head.bias_out,
                candidates[:, i],
                keys[i],
                seed,
                temperature,
                i,
                correct,
                rounded,
            )
        tokens = keys[i]
    return ops.key_ids(keys).t().contiguous(), mid.to(hidden.dtype)


@_chain_rollout.register_fake
def _(
    base_logits,
    hidden,
    anchors,
    table,
    weights,
    biases,
    prefix_len,
    candidates,
    seed,
    temperature,
    vocabulary,
    is_gates,
    rounded,
):
    batch, steps, _ = base_logits.shape
    return anchors.new_empty(batch, steps), hidden.new_empty(batch, steps, weights[2].shape[0])


def chain_rollout(
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    weights: ops.HeadWeights,
    prefix_len: int,
    *,
    embeddings: Optional[torch.Tensor] = None,
    gates_table: Optional[torch.Tensor] = None,
    candidates: Optional[torch.Tensor] = None,
    seed: Optional[torch.Tensor] = None,
    temperature: Optional[torch.Tensor] = None,
    vocabulary: Optional[torch.Tensor] = None,
    rounded: bool = False,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """A chain of drafts, each corrected with the ones before it. Safe to capture in a CUDA graph.

    Args:
        base_logits: `[B, n, V]`.
        hidden: backbone output at the drafts' slots, `[B, n, D]`.
        anchors: the first tokens to consume, int64 `[B]`.
        weights ([`HeadWeights`]): of the head.
        prefix_len: drafts that keep their base logits (P).
        embeddings: the target's raw embeddings `[V, D]`; three launches a step.
        gates_table: or `W_ih e + b` of every token, `[V, 3G]`; two launches a step, and no read of W_ih.
        candidates (*optional*): ids that each draft may be, int64 `[B, n, M]`, -1 for none; all by default.
        seed, temperature (*optional*): int64 and fp32 `[1]` on the device; the drafts are sampled.
        vocabulary (*optional*): the tokens that the logits stand for, int64 `[V]`, where they are not 0, 1, 2...; drafts,
            candidates and W_out count in places of it.
        rounded: round as eager bf16 does, to compare with it.

    Returns:
        The drafts `[B, n]`, and the features `[B, n, R]` from which any row of corrected logits can be had again.

    Raises:
        ValueError: unless exactly one of embeddings and gates table is given, in its shape.
    """
    if (embeddings is None) == (gates_table is None):
        raise ValueError("`chain_rollout` needs `embeddings` or `gates_table`, got both or none; pass one of them.")
    table = embeddings if gates_table is None else gates_table
    columns = weights.weight_ih.shape[1 if gates_table is None else 0]
    if table.dim() != 2 or table.shape[1] != columns:
        raise ValueError(
            f"`{'embeddings' if gates_table is None else 'gates_table'}` must be [V, {columns}] for this head, got "
            f"{[*table.shape]}; gates are `weight_ih @ embedding` of every token."
        )
    return _chain_rollout(
        base_logits,
        hidden,
        anchors,
        table,
        list(weights[:4]),
        list(weights[4:]),
        prefix_len,
        candidates,
        seed,
        temperature,
        vocabulary,
        gates_table is not None,
        rounded,
    )
