"""Draft trees: several continuations of the anchor, verified in one forward of the target.

A tree is data: tokens, parents, depths. Row 0 stands for the anchor and row i + 1 for node i wherever rows are counted;
parents come before their children. Builders live in `drafting_domino.py`, the accept rule in `verification_domino.py`.

Trees on a Domino head: https://huggingface.co/papers/2607.08642 and https://huggingface.co/papers/2608.13524.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TreeShape:
    """How a tree is grown.

    Args:
        nodes: drafts that are verified (N).
        lanes: paths that are extended at each depth (W).
        candidates: tokens considered per depth, the likeliest of the base logits (M).
        children: continuations noted per path.
    """

    nodes: int = 16
    lanes: int = 8
    candidates: int = 64
    children: int = 8

    def __post_init__(self):
        for name in ("nodes", "lanes", "candidates", "children"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` of a draft tree must be at least 1, got {getattr(self, name)}.")


@dataclass
class DraftTree:
    """N drafts that share prefixes.

    Args:
        tokens: `[B, N]`.
        parents: row of each node's parent (0 is the anchor), `[B, N]`.
        depths: 1 for a child of the anchor, `[B, N]`.
        scores: log-probability of the path down to each node, `[B, N]`, not increasing.
        base_ids, probabilities, base_probabilities: `[B, N]`, only when details are asked for.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    scores: torch.Tensor
    base_ids: torch.Tensor | None = None
    probabilities: torch.Tensor | None = None
    base_probabilities: torch.Tensor | None = None

    def ancestors(self) -> torch.Tensor:
        """Which rows lie on the path to each row, itself included: bool `[B, N + 1, N + 1]`."""
        batch, nodes = self.tokens.shape
        reach = torch.eye(nodes + 1, device=self.tokens.device).expand(batch, -1, -1).clone()
        reach[:, 1:].scatter_(2, self.parents[..., None], 1.0)
        # Squaring the relation doubles the distance it covers; N bounds the depth without asking the device.
        for _ in range(nodes.bit_length()):
            reach = (reach @ reach).clamp(max=1.0)
        return reach.bool()


def attention_mask(ancestors: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
    """Additive mask of a tree behind its prefix.

    Args:
        ancestors: `[B, N + 1, N + 1]`.
        prefix: 0 where the prefix may be seen and the dtype's minimum on padding, `[B, S]`; also gives the dtype.

    Returns:
        `[B, 1, N + 1, S + N + 1]`: every row sees the prefix and its own path.
    """
    hidden = torch.finfo(prefix.dtype).min
    inside = torch.zeros(ancestors.shape, dtype=prefix.dtype, device=prefix.device).masked_fill_(~ancestors, hidden)
    before = prefix[:, None, :].expand(-1, ancestors.shape[1], -1)
    return torch.cat([before, inside], dim=2)[:, None]
