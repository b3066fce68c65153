"""Kernels of a chain of drafts: two launches a step, and what surrounds the steps.

With e the embedding of the token consumed at step t, s the state and [r, z, n] the gates,

    gates[t] = W_ih e                                     a row of a table, or `input_kernel`
    s[t+1]   = GRU(gates[t], W_hh s[t], s[t])             elementwise, recomputed by every program of `state_kernel`
    mid[t]   = silu(W_h h[t] + W_s s[t+1])                `state_kernel`, first rows; W_h h by `init_kernel`
    next     = W_hh s[t+1]                                `state_kernel`, other rows
    token    = argmax(base[t] + W_out mid[t])             `head_kernel` (few sequences), `head_dot_kernel` (many), or
                                                          `short_kernel` over candidates

A step waits twice for the whole device: for the state and for the token. Everything between is fused; the corrected
logits `[B, V]` are never in memory. `mid` is kept, so that any row of logits can be had again.

Layouts: weights as torch stores them, W_s the last G columns of W_in `[R, D + G]`; state, W_hh s and mid in fp32;
tokens travel as keys (see `triton_order.py`), of places in a draft vocabulary where there is one.
"""

import triton
import triton.language as tl

from .triton_order import NO_KEY, gumbel_noise, key_ids, order_keys, round_bf16, silu, tanh


@triton.jit
def init_kernel(
    hidden_ptr,
    weight_in_ptr,
    bias_in_ptr,
    bias_hh_ptr,
    from_hidden_ptr,
    state_ptr,
    recurrent_ptr,
    keys_ptr,
    steps,
    D: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    ROUND: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """W_h h of every draft, an empty state, its W_hh s, and no token yet. Grid: (tiles of R and 3G, n, B)."""
    tile, step, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    rows = tile * ROWS + tl.arange(0, ROWS)
    if tile == 0:
        tl.store(keys_ptr + step * tl.num_programs(2) + sequence, NO_KEY)
    if tile * ROWS < R:
        source = hidden_ptr + (sequence * steps + step) * D
        total = tl.zeros([ROWS], tl.float32)
        for start in range(0, D, COLS):
            cols = start + tl.arange(0, COLS)
            weights = tl.load(
                weight_in_ptr + rows[:, None].to(tl.int64) * (D + G) + cols[None, :],
                mask=(rows < R)[:, None] & (cols < D)[None, :],
                other=0.0,
            ).to(tl.float32)
            total += tl.sum(weights * tl.load(source + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :], 1)
        if bias_in_ptr is not None:
            total += tl.load(bias_in_ptr + rows, mask=rows < R, other=0.0).to(tl.float32)
        tl.store(from_hidden_ptr + (sequence * steps + step) * R + rows, round_bf16(total, ROUND), mask=rows < R)
    if step == 0:
        tl.store(state_ptr + sequence * G + rows, tl.zeros([ROWS], tl.float32), mask=rows < G)
        bias = tl.zeros([ROWS], tl.float32)
        if bias_hh_ptr is not None:
            bias = tl.load(bias_hh_ptr + rows, mask=rows < 3 * G, other=0.0).to(tl.float32)
        tl.store(recurrent_ptr + sequence * 3 * G + rows, bias, mask=rows < 3 * G)


@triton.jit
def input_kernel(
    keys_ptr,
    vocabulary_ptr,
    inputs_ptr,
    weight_ptr,
    bias_ptr,
    output_ptr,
    K: tl.constexpr,
    N: tl.constexpr,
    GATHER: tl.constexpr,
    ROUND: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """`output[b] = W x + bias` `[B, N]`; x is row b of the inputs, or with `GATHER` the row of b's token. Grid: (N, B)."""
    sequence = tl.program_id(1).to(tl.int64)
    row = sequence
    if GATHER:
        row = key_ids(tl.load(keys_ptr + sequence))
        if vocabulary_ptr is not None:
            row = tl.load(vocabulary_ptr + row)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, K, COLS):
        cols = start + tl.arange(0, COLS)
        weights = tl.load(
            weight_ptr + rows[:, None].to(tl.int64) * K + cols[None, :],
            mask=(rows < N)[:, None] & (cols < K)[None, :],
            other=0.0,
            eviction_policy="evict_last",
        ).to(tl.float32)
        values = tl.load(inputs_ptr + row * K + cols, mask=cols < K, other=0.0).to(tl.float32)
        total += tl.sum(weights * values[None, :], 1)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(output_ptr + sequence * N + rows, round_bf16(total, ROUND), mask=rows < N)


@triton.jit
def _new_state(gates_ptr, recurrent_ptr, state_ptr, cols, G: tl.constexpr, ROUND: tl.constexpr):
    """The columns `cols` of the new state; the pointers are at the rows of one sequence."""
    mask = cols < G
    state = tl.load(state_ptr + cols, mask=mask, other=0.0)
    input_r = tl.load(gates_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    input_z = tl.load(gates_ptr + G + cols, mask=mask, other=0.0).to(tl.float32)
    input_n = tl.load(gates_ptr + 2 * G + cols, mask=mask, other=0.0).to(tl.float32)
    state_r = tl.load(recurrent_ptr + cols, mask=mask, other=0.0)
    state_z = tl.load(recurrent_ptr + G + cols, mask=mask, other=0.0)
    state_n = tl.load(recurrent_ptr + 2 * G + cols, mask=mask, other=0.0)
    reset = round_bf16(tl.sigmoid(round_bf16(input_r + state_r, ROUND)), ROUND)
    update = round_bf16(tl.sigmoid(round_bf16(input_z + state_z, ROUND)), ROUND)
    candidate = round_bf16(tanh(round_bf16(input_n + round_bf16(reset * state_n, ROUND), ROUND)), ROUND)
    return round_bf16(candidate + round_bf16(update * round_bf16(state - candidate, ROUND), ROUND), ROUND)


@triton.jit
def update_kernel(
    gates_ptr, recurrent_ptr, state_ptr, new_state_ptr, G: tl.constexpr, ROUND: tl.constexpr, COLS: tl.constexpr
):
    """The elementwise part of a step alone. Grid: (tiles of G, B)."""
    sequence = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    state = _new_state(
        gates_ptr + sequence * 3 * G, recurrent_ptr + sequence * 3 * G, state_ptr + sequence * G, cols, G, ROUND
    )
    tl.store(new_state_ptr + sequence * G + cols, state, mask=cols < G)


@triton.jit
def state_kernel(
    keys_ptr,
    vocabulary_ptr,
    parents_ptr,
    gates_ptr,
    recurrent_ptr,
    state_ptr,
    from_hidden_ptr,
    from_hidden_stride,
    weight_in_ptr,
    weight_hh_ptr,
    bias_hh_ptr,
    new_state_ptr,
    mid_ptr,
    mid_stride,
    new_recurrent_ptr,
    first_tile,
    D: tl.constexpr,
    G: tl.constexpr,
    R: tl.constexpr,
    TABLE: tl.constexpr,
    ROUND: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """One step of the GRU and what follows from its state. Grid: (tiles of R, then of 3G; sequences or lanes).

    With `TABLE`, `gates_ptr` is a table with a row a token, and the token is decoded here; else a row a sequence. A lane
    of a tree continues the state of its parent; `parents_ptr` is None for chains. `first_tile` skips the rows of mid.
    """
    sequence = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0) + first_tile
    parent = sequence
    if parents_ptr is not None:
        parent = tl.load(parents_ptr + sequence)
    gates_row = sequence
    if TABLE:
        gates_row = key_ids(tl.load(keys_ptr + sequence))
        if vocabulary_ptr is not None:
            gates_row = tl.load(vocabulary_ptr + gates_row)
    gates_ptr += gates_row * 3 * G
    recurrent_ptr += parent * 3 * G
    state_ptr += parent * G

    mid_tiles: tl.constexpr = (R + ROWS - 1) // ROWS
    is_mid = tile < mid_tiles
    rows = tile * ROWS + tl.arange(0, ROWS)
    count = R
    weight_ptr = weight_in_ptr + D
    stride = D + G
    if not is_mid:
        rows = (tile - mid_tiles) * ROWS + tl.arange(0, ROWS)
        count = 3 * G
        weight_ptr = weight_hh_ptr
        stride = G
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, G, COLS):
        cols = start + tl.arange(0, COLS)
        state = _new_state(gates_ptr, recurrent_ptr, state_ptr, cols, G, ROUND)
        if tl.program_id(0) == 0:
            tl.store(new_state_ptr + sequence * G + cols, state, mask=cols < G)
        weights = tl.load(
            weight_ptr + rows[:, None].to(tl.int64) * stride + cols[None, :],
            mask=(rows < count)[:, None] & (cols < G)[None, :],
            other=0.0,
            eviction_policy="evict_last",
        ).to(tl.float32)
        total += tl.sum(weights * tl.where(cols < G, state, 0.0)[None, :], 1)
    if is_mid:
        base = tl.load(from_hidden_ptr + sequence * from_hidden_stride + rows, mask=rows < R, other=0.0)
        mid = round_bf16(silu(round_bf16(base + round_bf16(total, ROUND), ROUND)), ROUND)
        tl.store(mid_ptr + sequence * mid_stride + rows, mid, mask=rows < R)
    else:
        if bias_hh_ptr is not None:
            total += tl.load(bias_hh_ptr + rows, mask=rows < count, other=0.0).to(tl.float32)
        tl.store(new_recurrent_ptr + sequence * 3 * G + rows, round_bf16(total, ROUND), mask=rows < count)


@triton.jit
def _choose(logits, ids, valid, seed_ptr, temperature_ptr, step, row, keys_ptr, SAMPLE: tl.constexpr):
    """Enters the best of a tile into the key of its sequence."""
    if SAMPLE:
        logits = logits / tl.load(temperature_ptr) + gumbel_noise(tl.load(seed_ptr), ids, step, row)
    keys = tl.where(valid, order_keys(logits, ids), NO_KEY)
    tl.atomic_max(keys_ptr, tl.max(keys, 0))


@triton.jit
def head_kernel(
    mid_ptr,
    mid_stride,
    weight_ptr,
    bias_ptr,
    base_ptr,
    base_stride,
    seed_ptr,
    temperature_ptr,
    keys_ptr,
    step,
    V,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    CORRECT: tl.constexpr,
    SAMPLE: tl.constexpr,
    ROUND: tl.constexpr,
    IDS: tl.constexpr,
):
    """The token of each sequence, from `base + W_out mid`, or from the base alone. Grid: (tiles of V, B)."""
    sequence = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    valid = ids < V
    logits = tl.load(base_ptr + sequence * base_stride + ids, mask=valid, other=0.0).to(tl.float32)
    if CORRECT:
        ranks = tl.arange(0, R_PAD)
        mid = tl.load(mid_ptr + sequence * mid_stride + ranks, mask=ranks < R, other=0.0)
        weights = tl.load(
            weight_ptr + ids[:, None] * R + ranks[None, :],
            mask=valid[:, None] & (ranks < R)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        delta = tl.sum(weights * mid[None, :], 1)
        if bias_ptr is not None:
            delta += tl.load(bias_ptr + ids, mask=valid, other=0.0).to(tl.float32)
        logits = round_bf16(logits + round_bf16(delta, ROUND), ROUND and base_ptr.dtype.element_ty == tl.bfloat16)
    _choose(logits, ids, valid, seed_ptr, temperature_ptr, step, sequence, keys_ptr + sequence, SAMPLE)


@triton.jit
def _corrections(
    mid_ptr,
    mid_stride,
    weight_ptr,
    rows,
    num_rows,
    ids,
    V,
    R: tl.constexpr,
    INNER: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """`W_out mid` of several rows of mid and a tile of ids on tensor cores, `[rows, ids]`; mid takes the weights' dtype."""
    total = tl.zeros([rows.shape[0], ids.shape[0]], tl.float32)
    for start in range(0, R, INNER):
        ranks = start + tl.arange(0, INNER)
        mid = tl.load(
            mid_ptr + rows[:, None].to(tl.int64) * mid_stride + ranks[None, :],
            mask=(rows < num_rows)[:, None] & (ranks < R)[None, :],
            other=0.0,
        )
        weights = tl.load(
            weight_ptr + ids[None, :] * R + ranks[:, None],
            mask=(ids < V)[None, :] & (ranks < R)[:, None],
            other=0.0,
            eviction_policy="evict_first",
        )
        if INTERPRET:
            # The interpreter multiplies the bits of bf16.
            mid = round_bf16(mid, weight_ptr.dtype.element_ty == tl.bfloat16)
            total += tl.dot(mid, weights.to(tl.float32))
        else:
            total += tl.dot(mid.to(weight_ptr.dtype.element_ty), weights, input_precision="ieee")
    return total


@triton.jit
def head_dot_kernel(
    mid_ptr,
    mid_stride,
    weight_ptr,
    bias_ptr,
    base_ptr,
    base_stride,
    seed_ptr,
    temperature_ptr,
    keys_ptr,
    step,
    num_rows,
    V,
    R: tl.constexpr,
    SAMPLE: tl.constexpr,
    ROUND: tl.constexpr,
    INTERPRET: tl.constexpr,
    ROWS: tl.constexpr,
    IDS: tl.constexpr,
    INNER: tl.constexpr,
):
    """[`head_kernel`] for many sequences: W_out is read once for `ROWS` of them. Grid: (tiles of V, tiles of B)."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    ids = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    delta = _corrections(mid_ptr, mid_stride, weight_ptr, rows, num_rows, ids, V, R, INNER, INTERPRET)
    if bias_ptr is not None:
        delta += tl.load(bias_ptr + ids, mask=ids < V, other=0.0).to(tl.float32)[None, :]
    valid = (rows < num_rows)[:, None] & (ids < V)[None, :]
    logits = tl.load(base_ptr + rows[:, None].to(tl.int64) * base_stride + ids[None, :], mask=valid, other=0.0)
    logits = logits.to(tl.float32) + round_bf16(delta, ROUND)
    logits = round_bf16(logits, ROUND and base_ptr.dtype.element_ty == tl.bfloat16)
    if SAMPLE:
        noise = gumbel_noise(tl.load(seed_ptr), ids[None, :] + rows[:, None] * 0, step, rows[:, None])
        logits = logits / tl.load(temperature_ptr) + noise
    keys = tl.where(valid, order_keys(logits, ids[None, :]), NO_KEY)
    tl.atomic_max(keys_ptr + rows, tl.max(keys, 1), mask=rows < num_rows)


@triton.jit
def short_kernel(
    mid_ptr,
    mid_stride,
    rows_ptr,
    rows_stride,
    biases_ptr,
    base_ptr,
    ids_ptr,
    list_stride,
    seed_ptr,
    temperature_ptr,
    keys_ptr,
    step,
    count,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    CORRECT: tl.constexpr,
    SAMPLE: tl.constexpr,
    ROUND: tl.constexpr,
    IDS: tl.constexpr,
):
    """[`head_kernel`] over each sequence's candidates, whose rows of W_out lie gathered. Grid: (tiles of M, B)."""
    sequence = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0) * IDS + tl.arange(0, IDS)
    ids = tl.load(ids_ptr + sequence * list_stride + places, mask=places < count, other=-1)
    valid = ids >= 0
    logits = tl.load(base_ptr + sequence * list_stride + places, mask=valid, other=0.0).to(tl.float32)
    if CORRECT:
        ranks = tl.arange(0, R_PAD)
        mid = tl.load(mid_ptr + sequence * mid_stride + ranks, mask=ranks < R, other=0.0)
        weights = tl.load(
            rows_ptr + sequence * rows_stride + places[:, None].to(tl.int64) * R + ranks[None, :],
            mask=valid[:, None] & (ranks < R)[None, :],
            other=0.0,
        ).to(tl.float32)
        delta = tl.sum(weights * mid[None, :], 1)
        if biases_ptr is not None:
            delta += tl.load(biases_ptr + ids, mask=valid, other=0.0).to(tl.float32)
        logits = round_bf16(logits + round_bf16(delta, ROUND), ROUND and base_ptr.dtype.element_ty == tl.bfloat16)
    _choose(logits, ids, valid, seed_ptr, temperature_ptr, step, sequence, keys_ptr + sequence, SAMPLE)


@triton.jit
def shortlist_kernel(logits_ptr, ids_ptr, V, TILE: tl.constexpr, COUNT: tl.constexpr):
    """The `COUNT` best ids of every `TILE` neighbouring ids, exactly; -1 where there are fewer. Grid: (tiles of V, rows)."""
    row = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=0.0).to(tl.float32)
    keys = tl.where(ids < V, order_keys(logits, ids), NO_KEY)
    output = ids_ptr + (row * tl.num_programs(0) + tl.program_id(0)) * COUNT
    for place in tl.static_range(COUNT):
        # Rounds of a maximum: a top-k of 64-bit keys aborts the compiler of some devices.
        best = tl.max(keys, 0)
        tl.store(output + place, tl.where(best == NO_KEY, -1, key_ids(best)))
        keys = tl.where(keys == best, NO_KEY, keys)


@triton.jit
def gather_kernel(ids_ptr, weight_ptr, rows_ptr, count, R: tl.constexpr, R_PAD: tl.constexpr, ROWS: tl.constexpr):
    """Copies rows of W_out; an id of -1 gives zeros. Grid: (tiles of the list)."""
    places = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ids = tl.load(ids_ptr + places, mask=places < count, other=-1)
    ranks = tl.arange(0, R_PAD)
    inside = (ranks < R)[None, :]
    values = tl.load(weight_ptr + ids[:, None] * R + ranks[None, :], mask=(ids >= 0)[:, None] & inside, other=0.0)
    tl.store(rows_ptr + places[:, None] * R + ranks[None, :], values, mask=(places < count)[:, None] & inside)


@triton.jit
def finalize_kernel(
    mid_ptr,
    weight_ptr,
    bias_ptr,
    base_ptr,
    tokens_ptr,
    temperature_ptr,
    maxima_ptr,
    sums_ptr,
    chosen_ptr,
    steps,
    prefix_len,
    num_rows,
    V,
    R: tl.constexpr,
    ROUND: tl.constexpr,
    INTERPRET: tl.constexpr,
    ROWS: tl.constexpr,
    IDS: tl.constexpr,
    INNER: tl.constexpr,
):
    """The law behind finished drafts, W_out read once for all steps: per row and tile of ids the maximum and the sum of
    exponentials of the tempered logits, and each draft's own logit. Grid: (tiles of V, tiles of B * n)."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    ids = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    delta = _corrections(mid_ptr, R, weight_ptr, rows, num_rows, ids, V, R, INNER, INTERPRET)
    if bias_ptr is not None:
        delta += tl.load(bias_ptr + ids, mask=ids < V, other=0.0).to(tl.float32)[None, :]
    # The first drafts keep their base logits.
    delta = tl.where((rows % steps >= prefix_len)[:, None], round_bf16(delta, ROUND), 0.0)
    valid = (rows < num_rows)[:, None] & (ids < V)[None, :]
    logits = tl.load(base_ptr + rows[:, None].to(tl.int64) * V + ids[None, :], mask=valid, other=0.0).to(tl.float32)
    logits = round_bf16(logits + delta, ROUND and base_ptr.dtype.element_ty == tl.bfloat16)
    logits = tl.where(valid, logits / tl.load(temperature_ptr), -float("inf"))
    maxima = tl.max(logits, 1)
    # A tile of -inf alone: its sum is zero, not NaN.
    shift = tl.where(maxima == -float("inf"), 0.0, maxima)
    output = rows.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(maxima_ptr + output, maxima, mask=rows < num_rows)
    tl.store(sums_ptr + output, tl.sum(tl.exp(logits - shift[:, None]), 1), mask=rows < num_rows)
    tokens = tl.load(tokens_ptr + rows, mask=rows < num_rows, other=-1)
    own = ids[None, :] == tokens[:, None]
    found = tl.sum(tl.where(own, 1, 0), 1) > 0
    tl.store(chosen_ptr + rows, tl.max(tl.where(own, logits, -float("inf")), 1), mask=(rows < num_rows) & found)
