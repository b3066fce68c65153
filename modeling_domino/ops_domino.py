"""Torch functions that have a kernel twin: the mathematics of the Domino head, and nothing about models.

This file is also copied into the kernel build, hence Python 3.9 syntax and no imports from its siblings.
Section 3.2 of https://huggingface.co/papers/2605.29707; the gate order (r, z, n) is that of `torch.nn.GRU`.

One order of logits holds for everything here and for the kernels: larger first, -0 equal to +0, equal ones by the smaller
id, NaN behind -inf. (`torch.argmax` and `torch.topk` put NaN first, and `topk` leaves the order of ties open.)
"""

from typing import Optional

import torch
import torch.nn.functional as F


# Ids whose maximum is taken first: small enough that few others come along, large enough that the maxima are few.
BUCKET = 64


def gru_gates(inputs: torch.Tensor, weight_ih: torch.Tensor, bias_ih: Optional[torch.Tensor] = None) -> torch.Tensor:
    """What the consumed token gives to the gates: `W_ih e`, `[..., 3G]` of embeddings `[..., D]`.

    It depends on the token alone, so it can be computed ahead for a whole vocabulary: a table `[V, 3G]`.
    """
    return F.linear(inputs, weight_ih, bias_ih)


def gru_update(
    gates: torch.Tensor, state: torch.Tensor, weight_hh: torch.Tensor, bias_hh: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """The new state `[B, G]` from the gates `[B, 3G]` of the consumed token and the old state `[B, G]`."""
    input_r, input_z, input_n = gates.chunk(3, dim=-1)
    state_r, state_z, state_n = F.linear(state, weight_hh, bias_hh).chunk(3, dim=-1)
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
    return gru_update(gru_gates(inputs, weight_ih, bias_ih), state, weight_hh, bias_hh)


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
    features: torch.Tensor, weight_out: torch.Tensor, bias_out: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """The wide half of the correction: `W_out features`, over the vocabulary or over some of its rows.

    Args:
        features: `[..., R]`.
        weight_out: `[V, R]`, or the rows of the candidates `[M, R]`.
        bias_out: `[V]` or `[M]`, or `None`.

    Returns:
        What is added to the base logits, `[..., V]` or `[..., M]`.
    """
    return F.linear(features, weight_out, bias_out)


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
    whole = logits.shape[-1] - logits.shape[-1] % BUCKET

    def reduce(values):
        maxima = values[..., :whole].unflatten(-1, (-1, BUCKET)).amax(dim=-1)
        rest = values[..., whole:]
        return torch.cat([maxima, rest.amax(dim=-1, keepdim=True)], dim=-1) if rest.shape[-1] else maxima

    if logits.device.type == "cpu":
        # Elsewhere the question would wait for the device.
        maxima = reduce(logits)
        if not maxima.isnan().any():
            return maxima
    return reduce(nan_last(logits))


def pick(logits: torch.Tensor) -> torch.Tensor:
    """Id of the best logit, `[..., V]` to `[...]`."""
    if logits.device.type == "cpu":
        ids = logits.argmax(dim=-1)
        if not logits.gather(-1, ids[..., None]).isnan().any():
            return ids
    return nan_last(logits).argmax(dim=-1)


def nan_last(logits: torch.Tensor) -> torch.Tensor:
    """The same order for functions that put NaN first: NaN becomes -inf, and -inf the lowest finite number."""
    return logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=torch.finfo(logits.dtype).min)
