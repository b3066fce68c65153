"""What a benchmark measures: the set-up of the papers, our defaults, and how a run differs from the papers."""

from __future__ import annotations

from typing import Any

from .prompts import TASKS, tasks_of_folder


# The set-up of the papers; `deviations` says how a run differs from it.
PAPER = {
    "tasks": list(TASKS),
    "temperatures": [0.0, 1.0],
    "max_new_tokens": 2048,
    "prompts": "hub",
    "thinking": False,
    "raw": False,
    "verify_width": None,
    "rule": None,
    "max_samples": None,
}
DEFAULTS = {**PAPER, "temperatures": [0.0], "max_new_tokens": 256, "prompts": "dev"}


def benchmark_plan(
    preset: str | None = None, *, tasks: str | None = None, temperatures: str | None = None, **chosen
) -> dict[str, Any]:
    """What is measured, with the keys of `PAPER`: the options given, then the preset or the defaults.

    Args:
        preset: "paper" or `None`.
        tasks, temperatures: comma-separated; by default those of the preset, or every task of the prompts at T=0.
        chosen: other keys of `PAPER`; `None` leaves them to the preset.
    """
    if preset not in (None, "paper"):
        raise ValueError(f"There is no preset {preset}; known: paper.")
    plan: dict[str, Any] = dict(PAPER if preset else DEFAULTS)
    plan.update({name: value for name, value in chosen.items() if value not in (None, False)})
    if temperatures is not None:
        try:
            plan["temperatures"] = [float(word) for word in temperatures.split(",")]
        except ValueError:
            raise ValueError(f"`--temperatures` takes numbers separated by commas, got {temperatures}.") from None
    if tasks is not None:
        plan["tasks"] = tasks.split(",")
    elif not preset:
        plan["tasks"] = list(TASKS) if plan["prompts"] == "hub" else tasks_of_folder(plan["prompts"])
    return plan


def deviations(plan: dict[str, Any]) -> list[str]:
    """How a plan with the keys of `PAPER` differs from the papers' set-up, one line each."""
    lines = [f"{name}: {plan[name]} (papers: {value})" for name, value in PAPER.items() if plan[name] != value]
    lines.append("later turns of a conversation follow plain generation's answers (DFlash: the drafter's)")
    return lines
