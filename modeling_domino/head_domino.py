"""The Domino head: a causal correction of the block's base logits, by a small GRU and a low-rank projection.

The head counts in drafts, not in slots: draft i (0-based) has consumed the anchor and drafts 0..i-1, that is i + 1
tokens, whichever slot of the block predicts it. So one interface serves both label shifts, training (the whole block,
teacher forced) and decoding (step by step). It knows neither the backbone nor the target.

Section 3.2 of https://huggingface.co/papers/2605.29707.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from .ops_domino import gru_step, low_rank_correction, low_rank_features


class DominoHead:
    """Groups the mathematics over parameters that belong to the drafter's root; no `nn.Module` of its own.

    Args:
        prefix_gru (`nn.GRU`): one layer, `batch_first`, input D, state G.
        embed_proj (`nn.Sequential`): `Linear(D + G, R)`, `SiLU`, `Linear(R, V)`.
        prefix_len (`int`): drafts that keep their base logits (P).
        linear (`Callable`): multiplies by the large matrices, in the form of `F.linear`.
    """

    def __init__(self, prefix_gru: nn.GRU, embed_proj: nn.Sequential, prefix_len: int, linear: Callable = F.linear):
        self.prefix_gru = prefix_gru
        self.embed_proj = embed_proj
        self.prefix_len = prefix_len
        self.linear = linear

    def initial_state(self, batch_size: int) -> torch.Tensor:
        """The state before the anchor: zeros `[B, G]`."""
        weight = self.prefix_gru.weight_hh_l0
        return weight.new_zeros(batch_size, self.prefix_gru.hidden_size)

    def advance(self, state: torch.Tensor, token_embeds: torch.Tensor) -> torch.Tensor:
        """Consumes one token: its raw embedding `[B, D]` moves the state `[B, G]`."""
        gru = self.prefix_gru
        biases = (gru.bias_ih_l0, gru.bias_hh_l0) if gru.bias else (None, None)
        return gru_step(token_embeds, state, gru.weight_ih_l0, gru.weight_hh_l0, *biases, linear=self.linear)

    def correct(
        self,
        base_logits: torch.Tensor,
        hidden: torch.Tensor,
        state: torch.Tensor,
        candidate_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Adds the correction to base logits.

        Args:
            base_logits: `[..., V]`, or those of the candidates `[..., M]`.
            hidden: backbone output at the drafts' slots, `[..., D]`.
            state: GRU states, `[..., G]`.
            candidate_ids (*optional*): the tokens that `base_logits` covers, `[M]` for all rows or `[..., M]` for each;
                the whole vocabulary by default.
        """
        first, _, last = self.embed_proj
        weight, bias, linear = last.weight, last.bias, self.linear
        if candidate_ids is not None:
            linear = F.linear
            weight, bias = weight[candidate_ids], None if bias is None else bias[candidate_ids]
        features = low_rank_features(hidden, state, first.weight, first.bias)
        if weight.dim() > 2:
            # Rows of their own for each state: one small product each.
            correction = (weight @ features[..., None]).squeeze(-1)
            correction = correction if bias is None else correction + bias
        else:
            correction = low_rank_correction(features, weight, bias, linear)
        return base_logits + correction.to(base_logits.dtype)

    def restricted(self, rows_of: Callable) -> DominoHead:
        """The same head over some tokens of the vocabulary: `rows_of` gives the last layer with their rows alone."""
        first, activation, last = self.embed_proj
        return DominoHead(self.prefix_gru, (first, activation, rows_of(last)), self.prefix_len, self.linear)

    def teacher_forced(
        self, base_logits: torch.Tensor, hidden: torch.Tensor, token_embeds: torch.Tensor
    ) -> torch.Tensor:
        """Corrected logits of all drafts of a block, given the true tokens (equation of section 3.2 at once).

        Args:
            base_logits: `[B, n, V]`, in draft order.
            hidden: backbone output at the drafts' slots, `[B, n, D]`.
            token_embeds: raw embeddings of the anchor and of the tokens before each draft, `[B, n, D]`.

        Returns:
            `[B, n, V]`; the first P drafts are the base logits unchanged.
        """
        states, _ = self.prefix_gru(token_embeds)
        start = self.prefix_len
        corrected = self.correct(base_logits[:, start:], hidden[:, start:], states[:, start:])
        return torch.cat([base_logits[:, :start], corrected], dim=1)
