"""Torch functions that have a kernel twin: the mathematics of the Domino head, and nothing about models.

This file is also copied into the kernel build, hence Python 3.9 syntax and no imports from its siblings.
Section 3.2 of https://huggingface.co/papers/2605.29707; the gate order (r, z, n) is that of `torch.nn.GRU`.
"""

from typing import Optional

import torch
import torch.nn.functional as F


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
    input_r, input_z, input_n = F.linear(inputs, weight_ih, bias_ih).chunk(3, dim=-1)
    state_r, state_z, state_n = F.linear(state, weight_hh, bias_hh).chunk(3, dim=-1)
    reset = torch.sigmoid(input_r + state_r)
    update = torch.sigmoid(input_z + state_z)
    candidate = torch.tanh(input_n + reset * state_n)
    return candidate + update * (state - candidate)


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
