"""Torch functions that have a kernel twin: the mathematics of the Domino head, and nothing about models.

This file is also copied into the kernel build, hence Python 3.9 syntax and no imports from its siblings.
Section 3.2 of https://huggingface.co/papers/2605.29707; the gate order (r, z, n) is that of `torch.nn.GRU`.

One order of logits holds for everything here and for the kernels: larger first, -0 equal to +0, equal ones by the smaller
id, NaN behind -inf. (`torch.argmax` and `torch.topk` put NaN first, and `topk` leaves the order of ties open.)
"""

from typing import Callable, NamedTuple, Optional

import torch
import torch.nn.functional as F


# Rows, a matrix and a bias or `None`: `F.linear`, or one that keeps the matrix in another layout.
Linear = Callable[[torch.Tensor, torch.Tensor, Optional[torch.Tensor]], torch.Tensor]


class HeadWeights(NamedTuple):
    """The parameters of a Domino head: `[3G, D]`, `[3G, G]`, `[R, D + G]`, `[V, R]`, and their biases or `None`."""

    weight_ih: torch.Tensor
    weight_hh: torch.Tensor
    weight_in: torch.Tensor
    weight_out: torch.Tensor
    bias_ih: Optional[torch.Tensor] = None
    bias_hh: Optional[torch.Tensor] = None
    bias_in: Optional[torch.Tensor] = None
    bias_out: Optional[torch.Tensor] = None


def by_columns(weight: torch.Tensor) -> torch.Tensor:
    """The same matrix, with its columns instead of its rows one after the other in memory.

    One row of input times a matrix is slow in the rows' order in some libraries on some CPUs; in this one it is up to four
    times as fast. Kernels need the rows' order.
    """
    return weight.t().contiguous().t()


# Ids whose maximum is taken first: small enough that few others come along, large enough that the maxima are few.
BUCKET = 64
# Numbers that stay in the caches of a CPU.
CACHED = 1 << 18


def gru_gates(
    inputs: torch.Tensor, weight_ih: torch.Tensor, bias_ih: Optional[torch.Tensor] = None, linear: Linear = F.linear
) -> torch.Tensor:
    """What the consumed token gives to the gates: `W_ih e`, `[..., 3G]` of embeddings `[..., D]`.

    It depends on the token alone, so it can be computed ahead for a whole vocabulary: a table `[V, 3G]`.
    """
    return linear(inputs, weight_ih, bias_ih)


def gru_update(
    gates: torch.Tensor,
    state: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_hh: Optional[torch.Tensor] = None,
    linear: Linear = F.linear,
) -> torch.Tensor:
    """The new state `[B, G]` from the gates `[B, 3G]` of the consumed token and the old state `[B, G]`."""
    return gru_combine(gates, linear(state, weight_hh, bias_hh), state)


def gru_combine(gates: torch.Tensor, recurrent: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The elementwise part of a step: gates of the token and `W_hh s`, `[B, 3G]` each, and the old state `[B, G]`."""
    input_r, input_z, input_n = gates.chunk(3, dim=-1)
    state_r, state_z, state_n = recurrent.chunk(3, dim=-1)
    reset = torch.sigmoid(input_r + state_r)
    update = torch.sigmoid(input_z + state_z)
    candidate = torch.tanh(input_n + reset * state_n)
    return candidate + update * (state - candidate)


def gru_step(
    inputs: torch.Tensor,
    state: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: Optional[torch.Tensor] = None,
    bias_hh: Optional[torch.Tensor] = None,
    linear: Linear = F.linear,
) -> torch.Tensor:
    """One step of a GRU.

    Args:
        inputs: embedding of the token that is consumed, `[B, D]`.
        state: `[B, G]`.
        weight_ih, weight_hh: `[3G, D]` and `[3G, G]`, gates in the order r, z, n.
        bias_ih, bias_hh: `[3G]`, or `None`.

    Returns:
        The new state, `[B, G]`.
    """
    return gru_update(gru_gates(inputs, weight_ih, bias_ih, linear), state, weight_hh, bias_hh, linear)


def low_rank_features(
    hidden: torch.Tensor, state: torch.Tensor, weight_in: torch.Tensor, bias_in: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """The narrow half of the correction: `silu(W_in [h ; s])`, `[..., R]`.

    Args:
        hidden: backbone output at the draft's slot, `[..., D]`.
        state: GRU state after the tokens before the draft, `[..., G]`.
        weight_in: `[R, D + G]`, its input in the order h, s.
        bias_in: `[R]`, or `None`.
    """
    return F.silu(F.linear(torch.cat([hidden, state], dim=-1), weight_in, bias_in))


def hidden_features(
    hidden: torch.Tensor, weight_in: torch.Tensor, bias_in: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """The share of the backbone in the narrow half, for all drafts of a block at once: `W_h h + b`, `[..., R]`.

    Together with [`step_features`] this is [`low_rank_features`], read as `silu(W_h h + W_s s)`; in bf16 the two forms
    round differently.
    """
    return F.linear(hidden, weight_in[:, : hidden.shape[-1]], bias_in)


def step_features(from_hidden: torch.Tensor, state: torch.Tensor, weight_in: torch.Tensor) -> torch.Tensor:
    """The narrow half of one draft: `silu(z + W_s s)`, `[..., R]`, with z from [`hidden_features`]."""
    return F.silu(from_hidden + F.linear(state, weight_in[:, -state.shape[-1] :]))


def low_rank_correction(
    features: torch.Tensor,
    weight_out: torch.Tensor,
    bias_out: Optional[torch.Tensor] = None,
    linear: Linear = F.linear,
) -> torch.Tensor:
    """The wide half of the correction: `W_out features`, over the vocabulary or over some of its rows.

    Args:
        features: `[..., R]`.
        weight_out: `[V, R]`, or the rows of the candidates `[M, R]`.
        bias_out: `[V]` or `[M]`, or `None`.

    Returns:
        What is added to the base logits, `[..., V]` or `[..., M]`.
    """
    return linear(features, weight_out, bias_out)


def order_keys(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the module's docstring, the best the largest: int64, shape of `logits` and `ids`.

    The upper half is the fp32 logit as a signed integer of the same order, the lower half counts ids downwards.
    """
    # Adding zero makes -0 a +0.
    bits = (logits.float() + 0.0).view(torch.int32)
    rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill(logits.isnan(), -(2**31))
    return (rank.long() << 32) | (0xFFFFFFFF - ids)


def key_ids(keys: torch.Tensor) -> torch.Tensor:
    """The ids in keys of [`order_keys`]."""
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)


def shortlist(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` best logits, best first: `[..., V]` to `[..., min(count, V)]`.

    Exact, by maxima of buckets: neighbouring ids share a bucket, so the `count` buckets of the best maxima hold the
    `count` best ids, ties included. Only where fewer than `count` logits lie above the lowest finite number may that
    number, -inf and NaN be taken for one another.
    """
    count = min(count, logits.shape[-1])
    maxima = bucket_maxima(logits)
    numbers = torch.arange(maxima.shape[-1], device=logits.device)
    best = key_ids(order_keys(maxima, numbers).topk(min(count, numbers.shape[0]), dim=-1).values)
    ids = (best[..., None] * BUCKET + torch.arange(BUCKET, device=logits.device)).flatten(-2)
    # Ids behind the vocabulary, in its last bucket, come behind everything.
    values = logits.gather(-1, ids.clamp(max=logits.shape[-1] - 1))
    keys = order_keys(values, ids).masked_fill(ids >= logits.shape[-1], -(2**63))
    return key_ids(keys.topk(count, dim=-1).values)


def bucket_maxima(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit of every `BUCKET` neighbouring ids, NaN behind -inf: `[..., V]` to `[..., ceil(V / BUCKET)]`."""
    size = logits.shape[-1]
    whole = size - size % BUCKET
    rows = logits.reshape(-1, size)
    # A copy of everything would leave the caches of a CPU; a device takes all rows in one launch.
    at_once = max(1, CACHED // size) if logits.device.type == "cpu" else rows.shape[0]
    maxima = []
    for part in rows.split(at_once):
        part = nan_last(part)
        buckets = [part[:, :whole].unflatten(-1, (-1, BUCKET)).amax(dim=-1)]
        if whole < size:
            buckets.append(part[:, whole:].amax(dim=-1, keepdim=True))
        maxima.append(torch.cat(buckets, dim=-1))
    return torch.cat(maxima).reshape(*logits.shape[:-1], -1)


def pick(logits: torch.Tensor) -> torch.Tensor:
    """Id of the best logit, `[..., V]` to `[...]`."""
    return nan_last(logits).argmax(dim=-1)


def nan_last(logits: torch.Tensor) -> torch.Tensor:
    """The same order for functions that put NaN first: NaN becomes -inf, and -inf the lowest finite number."""
    return logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=torch.finfo(logits.dtype).min)


def tile_shortlist(logits: torch.Tensor, tile: int = 1024, count: int = 4) -> torch.Tensor:
    """The `count` best ids of every `tile` neighbouring ids: `[..., V]` to `[..., ceil(V / tile) * count]`.

    What one pass on a device can give: every tile on its own. -1 where the last tile has fewer ids.
    """
    size = logits.shape[-1]
    ids = torch.arange(size, device=logits.device)
    keys = F.pad(order_keys(logits, ids), (0, -size % tile), value=-(2**63)).unflatten(-1, (-1, tile))
    keys = keys.sort(dim=-1, descending=True).values[..., :count].flatten(-2)
    return torch.where(keys == -(2**63), -1, key_ids(keys))


def gather_rows(weight_out: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of W_out `[V, R]` at `ids` `[...]`: `[..., R]`, zeros where an id is -1."""
    return weight_out[ids.clamp(min=0)].masked_fill((ids < 0)[..., None], 0)


def candidate_logits(
    base_logits: torch.Tensor, features: torch.Tensor, rows: torch.Tensor, biases: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """Corrected logits of candidates, each sequence with rows of its own.

    Args:
        base_logits: of the candidates, `[B, M]`.
        features: `[B, R]`.
        rows: gathered rows of W_out, `[B, M, R]`.
        biases: gathered, `[B, M]`, or `None`.
    """
    correction = torch.matmul(rows, features[..., None]).squeeze(-1)
    return base_logits + (correction if biases is None else correction + biases).to(base_logits.dtype)


def philox(seed: torch.Tensor, ids: torch.Tensor, step: int, rows: torch.Tensor) -> torch.Tensor:
    """The first word of Philox 4x32-10 at the counter (id, step, row, 0), as int64 in [0, 2^32).

    Random numbers that depend on nothing else: neither on the device nor on what else is drawn.

    Args:
        seed: the 64-bit key, int64 `[1]`.
        ids, rows: integers that broadcast against each other.
    """
    mask = 0xFFFFFFFF
    counter = [ids & mask, torch.full_like(ids, step), rows & mask, torch.zeros_like(ids)]
    key = [seed & mask, (seed >> 32) & mask]
    for _ in range(10):
        (high_a, low_a), (high_b, low_b) = _multiply(0xD2511F53, counter[0]), _multiply(0xCD9E8D57, counter[2])
        counter = [high_b ^ counter[1] ^ key[0], low_b, high_a ^ counter[3] ^ key[1], low_a]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter[0]


def _multiply(factor: int, values: torch.Tensor) -> "tuple[torch.Tensor, torch.Tensor]":
    """The upper and lower 32 bits of products of 32-bit numbers, without passing 2^63."""
    low = values * (factor & 0xFFFF)
    high = values * (factor >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def gumbel_noise(seed: torch.Tensor, ids: torch.Tensor, step: int, rows: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise in fp32; the best of `logits / temperature + noise` is a sample of their softmax.

    Args: see [`philox`].
    """
    # `-log(E)` with E exponential. Large noise is a small E, where log(1 - u) has lost its digits and a series has not.
    uniform = (philox(seed, ids, step, rows).float() + 0.5) * 2.0**-32
    series = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3.0)))
    far = -torch.log(1.0 - uniform.clamp(max=1.0 - 2.0**-24))
    return -torch.log(torch.where(uniform < 2.0**-8, series, far))


def sample(logits: torch.Tensor, seed: torch.Tensor, temperature: torch.Tensor, step: int) -> torch.Tensor:
    """A place of each row of `logits` `[B, V]`, drawn from their tempered softmax: `[B]`; `step` tells draws apart."""
    ids = torch.arange(logits.shape[-1], device=logits.device)[None]
    rows = torch.arange(logits.shape[0], device=logits.device)[:, None]
    return pick(logits.float() / temperature + gumbel_noise(seed, ids, step, rows))


def sample_candidates(
    logits: torch.Tensor, ids: torch.Tensor, seed: torch.Tensor, temperature: torch.Tensor, step: int
) -> torch.Tensor:
    """The same among candidates `[B, M]`: the noise is that of their ids, and equal scores go to the smaller id."""
    rows = torch.arange(logits.shape[0], device=logits.device)[:, None]
    return pick_candidates(logits.float() / temperature + gumbel_noise(seed, ids, step, rows), ids)


def pick_candidates(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The best of the candidates `ids` `[..., M]`: `[...]`; an id of -1 is none."""
    return key_ids(order_keys(logits, ids).masked_fill(ids < 0, -(2**63)).amax(dim=-1))


def chain_rollout(
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    gates_of: Callable[[torch.Tensor], torch.Tensor],
    weights: HeadWeights,
    prefix_len: int,
    candidates: Optional[torch.Tensor] = None,
    seed: Optional[torch.Tensor] = None,
    temperature: Optional[torch.Tensor] = None,
    vocabulary: Optional[torch.Tensor] = None,
    linear: Linear = F.linear,
) -> "tuple[torch.Tensor, torch.Tensor]":
    """A chain of drafts, each corrected with the ones before it.

    Args:
        base_logits: `[B, n, V]`.
        hidden: backbone output at the drafts' slots, `[B, n, D]`.
        anchors: the first tokens to consume, `[B]`.
        gates_of (`Callable`): the gates `[B, 3G]` of tokens `[B]`, see [`gru_gates`].
        prefix_len: drafts that keep their base logits (P).
        candidates (*optional*): ids that each draft may be, `[B, n, M]`, -1 for none; all by default.
        seed, temperature (*optional*): `[1]` each; the drafts are sampled, else they are the likeliest ones.
        vocabulary (*optional*): the tokens that the logits stand for, `[V]`, where they are not 0, 1, 2...; drafts,
            candidates and W_out count in places of it.
        linear (`Callable`): multiplies by W_hh and W_out, in the form of `F.linear`.

    Returns:
        The drafts `[B, n]`, and the features `[B, n, R]` from which any row of corrected logits can be had again.
    """
    state = hidden.new_zeros(hidden.shape[0], weights.weight_hh.shape[1])
    from_hidden = hidden_features(hidden, weights.weight_in, weights.bias_in)
    listed, rows, biases = None, None, None
    if candidates is not None:
        # By id, and NaN where there is none: then the best place is that of the best candidate.
        candidates = candidates.sort(dim=-1).values
        listed = base_logits.gather(-1, candidates.clamp(min=0)).masked_fill(candidates < 0, torch.nan)
        rows = gather_rows(weights.weight_out, candidates)
        biases = None if weights.bias_out is None else weights.bias_out[candidates.clamp(min=0)]
    tokens, drafts, features = anchors, [], []
    for i in range(base_logits.shape[1]):
        state = gru_update(gates_of(tokens), state, weights.weight_hh, weights.bias_hh, linear)
        features.append(step_features(from_hidden[:, i], state, weights.weight_in))
        logits = base_logits[:, i] if listed is None else listed[:, i]
        if i >= prefix_len and listed is None:
            correction = low_rank_correction(features[i], weights.weight_out, weights.bias_out, linear)
            logits = logits + correction.to(logits.dtype)
        elif i >= prefix_len:
            logits = candidate_logits(logits, features[i], rows[:, i], None if biases is None else biases[:, i])
        if listed is None:
            tokens = pick(logits) if seed is None else sample(logits, seed, temperature, i)
        elif seed is None:
            tokens = candidates[:, i].gather(-1, pick(logits)[:, None]).squeeze(-1)
        else:
            tokens = sample_candidates(logits, candidates[:, i], seed, temperature, i)
        drafts.append(tokens)
        tokens = tokens if vocabulary is None else vocabulary[tokens]
    return torch.stack(drafts, dim=1), torch.stack(features, dim=1)


def draft_log_probabilities(
    base_logits: torch.Tensor,
    features: torch.Tensor,
    tokens: torch.Tensor,
    weight_out: torch.Tensor,
    prefix_len: int,
    temperature: torch.Tensor,
    bias_out: Optional[torch.Tensor] = None,
) -> "tuple[torch.Tensor, torch.Tensor]":
    """The law of drafts that are sampled already: log-probability and log-normaliser of each, `[B, n]` in fp32.

    Args:
        base_logits: `[B, n, V]`.
        features, tokens: of [`chain_rollout`], `[B, n, R]` and `[B, n]`.
        temperature: `[1]`.
    """
    corrected = base_logits + low_rank_correction(features, weight_out, bias_out).to(base_logits.dtype)
    logits = torch.cat([base_logits[:, :prefix_len], corrected[:, prefix_len:]], dim=1).float() / temperature
    log_z = logits.logsumexp(dim=-1)
    return logits.gather(-1, tokens[..., None]).squeeze(-1) - log_z, log_z


def tree_step(
    gates: torch.Tensor,
    parents: torch.Tensor,
    state: torch.Tensor,
    recurrent: torch.Tensor,
    from_hidden: torch.Tensor,
    weights: HeadWeights,
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """Moves every lane of a tree by one token.

    Args:
        gates: of the consumed tokens, `[W, 3G]`.
        parents: the row of `state` that each lane continues, `[W]`.
        state, recurrent: of the lanes before, and their `W_hh s`, `[W', G]` and `[W', 3G]`.
        from_hidden: of the depth, `[R]`, see [`hidden_features`].

    Returns:
        The new states `[W, G]`, their `W_hh s` `[W, 3G]`, and the features `[W, R]`.
    """
    state = gru_combine(gates, recurrent[parents], state[parents])
    recurrent = F.linear(state, weights.weight_hh, weights.bias_hh)
    return state, recurrent, step_features(from_hidden, state, weights.weight_in)


def tree_expand(
    base_logits: torch.Tensor,
    features: Optional[torch.Tensor],
    rows: torch.Tensor,
    tail: torch.Tensor,
    lane_scores: torch.Tensor,
    temperature: torch.Tensor,
    children: int,
    biases: Optional[torch.Tensor] = None,
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """The best children of every lane of a tree at one depth.

    Args:
        base_logits: of the depth's candidates, the same for all lanes, `[M]` in fp32.
        features: of each lane, `[W, R]`; `None` where the base logits are not corrected.
        rows: gathered rows of W_out, `[M, R]`.
        tail: log of the tempered mass of all other tokens, `[1]`.
        lane_scores: log-probability of the path to each lane, `[W]`.
        temperature: `[1]`.
        children: how many are wanted (C).
        biases: gathered, `[M]`, or `None`.

    Returns:
        Places in the list of candidates, scores of the paths, and log-probabilities of the children alone, `[W, C]`
        each, the likeliest first; equal ones in the order of the list, NaN last.
    """
    logits = base_logits.expand(lane_scores.shape[0], -1)
    if features is not None:
        logits = logits + low_rank_correction(features, rows, biases).float()
    logits = logits / temperature
    log_z = torch.logaddexp(logits.logsumexp(dim=-1), tail)
    # A drafter that computes NaN ranks last: its tree must still be a tree.
    steps = nan_last(logits - log_z[:, None]).clamp(max=0.0)
    best, places = steps.sort(dim=-1, descending=True, stable=True)
    best = best[:, :children]
    return places[:, :children], lane_scores[:, None] + best, best
