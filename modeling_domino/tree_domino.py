"""Draft trees: several continuations of the anchor, verified in one forward of the target.

A tree is data: tokens, parents, depths. Row 0 stands for the anchor and row i + 1 for node i wherever rows are counted;
parents come before their children. Builders live in `drafting_domino.py`, the accept rule in `verification_domino.py`.

Trees on a Domino head: https://huggingface.co/papers/2607.08642 and https://huggingface.co/papers/2608.13524.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


# Rows that a mask has room for at first, behind a padded prompt.
FIRST_ROWS = 1024


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
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` of a draft tree must be an integer of at least 1, got {getattr(self, name)!r}."
                )


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

    def first(self, nodes: int) -> DraftTree:
        """The tree of the first nodes alone; parents come before their children, so it is one."""
        return DraftTree(**{name: None if value is None else value[:, :nodes] for name, value in vars(self).items()})

    def ancestors(self) -> torch.Tensor:
        """Which rows lie on the path to each row, itself included: bool `[B, N + 1, N + 1]`."""
        batch, nodes = self.tokens.shape
        reach = torch.eye(nodes + 1, device=self.tokens.device).expand(batch, -1, -1).clone()
        reach[:, 1:].scatter_(2, self.parents[..., None], 1.0)
        # Squaring the relation doubles the distance it covers; N bounds the depth without asking the device.
        for _ in range(nodes.bit_length()):
            reach = (reach @ reach).clamp(max=1.0)
        return reach.bool()


class TreeMask:
    """The additive mask under which the target reads a tree: every row sees the prefix and its own path.

    One buffer for the whole text; a round writes its tree behind the prefix and gets a view. It grows by doubling, up to
    `[1, 1, N + 1, size]`: a generous limit on the length costs nothing until the text is that long.

    Args:
        num_rows: N + 1.
        size: most rows of the whole text.
        like: a tensor with the target's dtype and device.
        padding (*optional*): 1 for real tokens of the prompt, `[1, S]`.
    """

    def __init__(self, num_rows: int, size: int, *, like: torch.Tensor, padding: torch.Tensor | None = None):
        self._hidden = torch.finfo(like.dtype).min
        self._size = size
        self._open = 0 if padding is None else padding.shape[1]
        self._mask = like.new_zeros(1, 1, num_rows, min(size, self._open + FIRST_ROWS))
        if padding is not None:
            self._mask[..., : self._open].masked_fill_(padding[:, None, None, :] == 0, self._hidden)

    def behind(self, first: int, ancestors: torch.Tensor) -> torch.Tensor:
        """The view `[1, 1, N + 1, first + N + 1]` for a tree whose anchor sits at row `first`."""
        num_rows = ancestors.shape[1]
        if first + num_rows > self._mask.shape[3]:
            grown = self._mask.new_zeros(*self._mask.shape[:3], min(self._size, 2 * (first + num_rows)))
            grown[..., : self._open] = self._mask[..., : self._open]
            self._mask = grown
        # What the last tree wrote is prefix now.
        self._mask[..., self._open : first] = 0
        tree = self._mask[:, :, :num_rows, first : first + num_rows]
        tree.zero_().masked_fill_(~ancestors[:, None].to(tree.device), self._hidden)
        self._open = max(self._open, first)
        return self._mask[:, :, :num_rows, : first + num_rows]
