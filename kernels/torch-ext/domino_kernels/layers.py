"""The rollout as a layer that `kernels.kernelize` can swap in: parameter-free, `forward` alone."""

from typing import Optional, Tuple

import torch
from torch import nn

from .chain import chain_rollout
from .ops import HeadWeights


class DominoRollout(nn.Module):
    """See [`chain_rollout`]; everything comes in as an argument."""

    can_torch_compile = True
    has_backward = False

    def forward(
        self,
        base_logits: torch.Tensor,
        hidden: torch.Tensor,
        anchors: torch.Tensor,
        weights: HeadWeights,
        prefix_len: int,
        embeddings: Optional[torch.Tensor] = None,
        gates_table: Optional[torch.Tensor] = None,
        candidates: Optional[torch.Tensor] = None,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        return chain_rollout(
            base_logits,
            hidden,
            anchors,
            weights,
            prefix_len,
            embeddings=embeddings,
            gates_table=gates_table,
            candidates=candidates,
        )


__all__ = ["DominoRollout"]
