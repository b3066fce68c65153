"""Kernel of a tree of drafts: all lanes of a depth in one launch.

    logits[w, m] = (base[m] + W_out[ids[m]] mid[w]) / temperature
    log Z[w]     = log(sum_m exp(logits[w, m]) + exp(tail))
    children     = the C best of logits[w] - log Z[w]; their paths score that plus the lane's own score

The lanes' mid comes from `state_kernel`, where a lane continues the state of its parent. Logits `[W, M]` and the sorted
list are never in memory.
"""

import triton
import triton.language as tl

from .triton_order import NO_KEY, key_ids, order_keys, round_bf16


@triton.jit
def expand_kernel(
    base_ptr,
    mid_ptr,
    rows_ptr,
    biases_ptr,
    tail_ptr,
    lane_scores_ptr,
    temperature_ptr,
    places_ptr,
    scores_ptr,
    steps_ptr,
    count,
    R: tl.constexpr,
    CHILDREN: tl.constexpr,
    CORRECT: tl.constexpr,
    ROUND: tl.constexpr,
    PLACES: tl.constexpr,
    INNER: tl.constexpr,
):
    """The children of one lane. Grid: (lanes)."""
    lane = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PLACES).to(tl.int64)
    valid = places < count
    logits = tl.load(base_ptr + places, mask=valid, other=0.0)
    if CORRECT:
        delta = tl.zeros([PLACES], tl.float32)
        for start in range(0, R, INNER):
            ranks = start + tl.arange(0, INNER)
            mid = tl.load(mid_ptr + lane * R + ranks, mask=ranks < R, other=0.0)
            weights = tl.load(
                rows_ptr + places[:, None] * R + ranks[None, :], mask=valid[:, None] & (ranks < R)[None, :], other=0.0
            ).to(tl.float32)
            delta += tl.sum(weights * mid[None, :], 1)
        if biases_ptr is not None:
            delta += tl.load(biases_ptr + places, mask=valid, other=0.0).to(tl.float32)
        logits += round_bf16(delta, ROUND)
    logits = logits / tl.load(temperature_ptr)
    listed = tl.where(valid, logits, -float("inf"))
    # Triton's maximum drops NaN, the sum keeps it: a lane of NaN has a log Z of NaN.
    tail = tl.load(tail_ptr)
    shift = tl.maximum(tl.max(listed, 0), tail)
    shift = tl.where(shift == -float("inf"), 0.0, shift)
    log_z = shift + tl.log(tl.sum(tl.exp(listed - shift), 0) + tl.exp(tail - shift))
    steps = tl.minimum(logits - log_z, 0.0)
    steps = tl.where(logits - log_z == logits - log_z, tl.maximum(steps, -3.4028234663852886e38), -float("inf"))
    keys = tl.where(valid, order_keys(steps, places), NO_KEY)
    lane_score = tl.load(lane_scores_ptr + lane)
    for child in tl.static_range(CHILDREN):
        best = tl.max(keys, 0)
        step = tl.sum(tl.where(keys == best, steps, 0.0), 0)
        output = lane * CHILDREN + child
        tl.store(places_ptr + output, key_ids(best))
        tl.store(steps_ptr + output, step)
        tl.store(scores_ptr + output, lane_score + step)
        keys = tl.where(keys == best, NO_KEY, keys)
