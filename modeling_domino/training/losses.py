"""The objective: two losses over a block, blended by the base-anchored curriculum.

L = (1 - lambda) * loss(final) + lambda * loss(base), each a weighted SUM over draft positions; the trainer divides by the
sum of the weights over all ranks and accumulation steps. Section 3.3 of https://huggingface.co/papers/2605.29707.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Curriculum:
    """Lambda, the weight of the base loss, over a run.

    Args:
        shape (`str`): "linear" or "cosine" (from 1 to 0), or "constant".
        value (`float`): the fraction of the run after which lambda is 0, or the constant.
    """

    shape: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Curriculum:
        """Reads "linear", "linear:0.8", "cosine", "cosine:0.8" or "constant:0.3" ("constant:0" is no curriculum)."""
        shape, _, number = text.partition(":")
        try:
            value = float(number) if number else 1.0
        except ValueError:
            value = math.nan
        known = shape in ("linear", "cosine") or (shape == "constant" and number)
        if not known or not 0 <= value <= 1 or (shape != "constant" and value == 0):
            raise ValueError(
                "`lambda_schedule` must be linear, cosine (both optionally with :fraction of the run, above 0 and up to 1) "
                f"or constant:x with x in 0..1, got {text!r}."
            )
        return cls(shape, value)

    def at(self, progress: float) -> float:
        """Lambda after `progress` (0..1) of the run."""
        if self.shape == "constant":
            return self.value
        passed = min(max(progress / self.value, 0.0), 1.0)
        return 1.0 - passed if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * passed))


def cross_entropy(log_probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy `[M]` of `log_probs` `[M, V]` with the ids `labels` `[M]`."""
    return -log_probs.gather(-1, labels[:, None]).squeeze(-1)


def distillation(log_probs: torch.Tensor, target_probs: torch.Tensor, objective: str) -> torch.Tensor:
    """Distance `[M]` of the drafter's law to the target's `[M, V]`.

    "kl": cross entropy with the target's law, which is KL(p || q) up to the constant entropy of p; "tv": total variation,
    1 - the acceptance rate of speculative sampling (https://huggingface.co/papers/2310.08461).
    """
    if objective == "kl":
        return -(target_probs * log_probs).sum(-1)
    return 0.5 * (target_probs - log_probs.exp()).abs().sum(-1)


def position_losses(
    log_probs: torch.Tensor,
    labels: torch.Tensor,
    target_probs: torch.Tensor | None,
    *,
    objective: str,
    soft_weight: float,
) -> torch.Tensor:
    """The loss of every draft position, `[M]`: cross entropy, blended with a distillation term unless it is "ce"."""
    hard = cross_entropy(log_probs, labels)
    if objective == "ce":
        return hard
    soft = distillation(log_probs, target_probs, objective)
    return soft_weight * soft + (1 - soft_weight) * hard


def blend(final: torch.Tensor, base: torch.Tensor, weights: torch.Tensor, lam: float) -> torch.Tensor:
    """The weighted sum of the curriculum: scalar, from position losses and `weights`, all `[M]`."""
    return ((1 - lam) * (final * weights).sum()) + (lam * (base * weights).sum())
