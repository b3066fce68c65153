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


def low_rank_correction(
    hidden: torch.Tensor,
    state: torch.Tensor,
    weight_in: torch.Tensor,
    weight_out: torch.Tensor,
    bias_in: Optional[torch.Tensor] = None,
    bias_out: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Correction of the base logits: `W_out silu(W_in [h ; s])`.

    Args:
        hidden: backbone output at the draft's slot, `[..., D]`.
        state: GRU state after the tokens before the draft, `[..., G]`.
        weight_in, weight_out: `[R, D + G]` and `[V, R]`.
        bias_in, bias_out: `[R]` and `[V]`, or `None`.

    Returns:
        What is added to the base logits, `[..., V]`.
    """
    features = torch.cat([hidden, state], dim=-1)
    return F.linear(F.silu(F.linear(features, weight_in, bias_in)), weight_out, bias_out)
