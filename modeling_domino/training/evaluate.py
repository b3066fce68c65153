"""Evaluation of a drafter: per-draft accuracy and expected acceptance length on answers, and real tau in generation.

On the target's own greedy answers the teacher-forced prefix statistics are what a greedy round would accept from that
anchor; tau is measured by generating. Both count the target's own token.
"""

from __future__ import annotations

from typing import Any

import torch

from .data import Sample
from .model import STATS


def summarise(stats: torch.Tensor) -> dict[str, float]:
    """Readable metrics from summed block statistics `[len(STATS), n]`.

    Returns:
        `acceptance` and `acceptance_base` (expected acceptance length, with and without the correction), `accuracy_i`
        and `accuracy_base_i` of draft i (1-based, marginal), `given_prefix_i` (accuracy of draft i where all before it
        were right), `final_ce` and `base_ce` (unweighted means), `blocks`, and `cut_blocks`: those that the end of
        their sequence cuts, which the acceptance length leaves out.
    """
    rows = dict(zip(STATS, stats.double().cpu(), strict=True))
    count, whole = rows["count"].clamp(min=1), rows["whole"].clamp(min=1)
    metrics = {
        "acceptance": 1 + (rows["final_prefix"] / whole).sum().item(),
        "acceptance_base": 1 + (rows["base_prefix"] / whole).sum().item(),
        "final_ce": (rows["final_ce"].sum() / count.sum()).item(),
        "base_ce": (rows["base_ce"].sum() / count.sum()).item(),
        "blocks": int(rows["count"][0]),
        "cut_blocks": int(rows["count"][0] - rows["whole"][0]),
    }
    reached = torch.cat([rows["whole"][:1], rows["final_prefix"][:-1]]).clamp(min=1)
    for i in range(len(count)):
        metrics[f"accuracy_{i + 1}"] = (rows["final_hits"][i] / count[i]).item()
        metrics[f"accuracy_base_{i + 1}"] = (rows["base_hits"][i] / count[i]).item()
        metrics[f"given_prefix_{i + 1}"] = (rows["final_prefix"][i] / reached[i]).item()
    return metrics


@torch.no_grad()
def measure_tau(drafter, target, prompts: list[torch.Tensor], *, max_new_tokens: int, use_head: bool = True) -> dict:
    """Acceptance length of greedy generation over `prompts` (each `[1, S]`).

    Args:
        use_head (`bool`): `False` bypasses the correction ("head off").

    Returns:
        `tau`, `rounds`, and `accepted`: how many rounds kept 0, 1, ... drafts.
    """
    was_training, had_head = drafter.training, drafter.use_head
    drafter.eval()
    drafter.use_head = use_head
    histogram = [0] * (drafter.config.num_draft_tokens + 1)
    try:
        for prompt in prompts:
            drafter.spec_generate(target, prompt, max_new_tokens=max_new_tokens)
            for accepted in drafter.last_run.accepted:
                histogram[accepted] += 1
    finally:
        drafter.train(was_training)
        drafter.use_head = had_head
    rounds = sum(histogram)
    kept = sum(number * times for number, times in enumerate(histogram))
    return {"tau": (kept + rounds) / max(rounds, 1), "rounds": rounds, "accepted": histogram}


def prompts_of(samples: list[Sample], number: int, device: Any = "cpu") -> list[torch.Tensor]:
    """The prompts of the first `number` samples, each `[1, S]`."""
    return [sample.ids[None, : sample.prompt_length].to(device) for sample in samples[:number]]
