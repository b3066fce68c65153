"""Fits the temperatures of a drafter's drafts on held-out answers: `domino calibrate DRAFTER --data FILE`.

A drafter tends to be surer of its later drafts than they deserve, or less sure. For sampled drafts the expected acceptance
of one draft is the overlap of its law q with the target's p, the sum of min(p, q); dividing the draft's logits by a
temperature of its depth moves q, and the best temperature is found by trying. The most likely draft stays the same, so
greedy chains do not change, while trees and "auto" sizes weigh their drafts by better probabilities.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

from ..atomic import write_json
from .data import BlockDataset, Sample, collate_blocks
from .model import DominoTrainingModel


# From half to twice; the drafter's own law is among them.
GRID = tuple(2.0 ** (i / 12) for i in range(-12, 13))


@dataclass
class Calibration:
    """What was found.

    Args:
        temperatures: of each draft of a block.
        before, after: mean acceptance of each draft with the drafter's own law and with the calibrated one.
        blocks: how many blocks were looked at.
    """

    temperatures: list[float]
    before: list[float]
    after: list[float]
    blocks: int

    def lines(self) -> list[str]:
        """The report, one line a draft."""
        rows = zip(self.temperatures, self.before, self.after)
        return [
            f"draft {i}: temperature {temperature:.3f}, expected acceptance {before:.4f} -> {after:.4f}"
            for i, (temperature, before, after) in enumerate(rows, start=1)
        ]


@torch.no_grad()
def calibrate(
    drafter, target, samples: list[Sample], *, temperature: float = 1.0, max_anchors: int = 16
) -> Calibration:
    """The temperatures that accept most on `samples`.

    Args:
        drafter (`DominoDraftModel`), target (`PreTrainedModel`): the pair.
        samples (`list[Sample]`): held-out answers of the target.
        temperature (`float`): of the sampling that is calibrated for.
        max_anchors (`int`): most blocks of a sample.

    Raises:
        ValueError: without samples, or for a temperature that is not positive.
    """
    if not samples or not temperature > 0:
        raise ValueError(
            f"Calibration needs answers and a positive temperature, got {len(samples)} answers and {temperature}."
        )
    num_drafts = drafter.config.num_draft_tokens
    arguments = SimpleNamespace(trainable="all", flex_attention=False, ttt=False, objective="ce")
    model = DominoTrainingModel(drafter, target, arguments).eval()
    dataset = BlockDataset(samples, num_drafts=num_drafts, gamma=1.0, max_anchors=max_anchors)
    overlap = torch.zeros(len(GRID), num_drafts, dtype=torch.double)
    counts = torch.zeros(num_drafts, dtype=torch.double)
    for i in range(len(samples)):
        batch = {name: value.to(target.device) for name, value in collate_blocks([dataset[i]]).items()}
        inside = (batch["weights"] > 0)[batch["anchor_mask"]]  # [A, n]
        draft_logits, target_logits = model.both_logits(batch)
        p = (target_logits.float() / temperature).softmax(dim=-1)
        for number, scale in enumerate(GRID):
            q = (draft_logits.float() / (temperature * scale)).softmax(dim=-1)
            overlap[number] += (torch.minimum(p, q).sum(dim=-1) * inside).sum(dim=0).double().cpu()
        counts += inside.sum(dim=0).double().cpu()
    acceptance = overlap / counts.clamp(min=1)
    best = acceptance.argmax(dim=0)
    return Calibration(
        temperatures=[round(GRID[i], 4) for i in best.tolist()],
        before=acceptance[GRID.index(1.0)].tolist(),
        after=acceptance.gather(0, best[None])[0].tolist(),
        blocks=int(counts[0]),
    )


def write_temperatures(folder: Path, temperatures: list[float]) -> None:
    """Puts the temperatures into the config of the drafter in `folder`, and leaves the rest of it as it is."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["draft_temperatures"] = temperatures
    write_json(path, config)
