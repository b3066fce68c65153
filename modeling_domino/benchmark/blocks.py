"""Result blocks: what a README or a card shows of a benchmark's summary, made anew from the file that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .summary import NOT_RUN, by_temperature
from .tables import number, speedup_text, table, tau_text


def results_block(summary: dict[str, Any]) -> str:
    """The acceptance lengths of a summary, a table for each temperature."""
    provenance, tokens = summary["provenance"], summary["tokens"]
    models, hardware = provenance["models"], provenance["hardware"]
    parts = [
        f"tau of {models['drafter']}, {models['dtype']} on {hardware.get('gpu') or hardware['cpu']}, up to "
        f"{models['settings']['max_new_tokens']} new tokens, 95 % intervals."
    ]
    for temperature, results in by_temperature(summary).items():
        run = _methods_run(results)
        rows = [[task, *(tau_text(cells[task]) for cells in run.values())] for task in results["plain"]]
        parts += [f"Temperature {temperature}, {_answers(run)}:", table(["task", *run], rows)]
    parts.append(f"{tokens['compared']:,} tokens compared with plain generation, {tokens['differing']:,} differ.")
    return "\n\n".join(parts)


def speed_block(summary: dict[str, Any]) -> str:
    """The speeds of a summary, a table for each temperature, with the machine that they belong to."""
    hardware = summary["provenance"]["hardware"]
    threads = "1 thread" if hardware["threads"] == 1 else f"{hardware['threads']} threads"
    batch_size = summary["provenance"]["models"]["settings"]["batch_size"]
    parts = [
        f"Speed-up over plain generation, batch size {batch_size}, {threads} on {hardware.get('gpu') or hardware['cpu']}, 95 % "
        "intervals."
    ]
    for temperature, results in by_temperature(summary).items():
        run = _methods_run(results)
        rows = [
            [task, number(plain["tokens_per_second"], 1), *(speedup_text(cells[task]) for cells in run.values())]
            for task, plain in results["plain"].items()
            if plain != NOT_RUN
        ]
        parts += [
            f"Temperature {temperature}, plain is {summary['plain_is'][temperature]}, the faster form:",
            table(["task", "plain tokens/s", *run], rows),
        ]
    return "\n\n".join(parts)


def _methods_run(results: dict[str, Any]) -> dict[str, Any]:
    """The drafting methods with a number."""
    return {
        name: cells
        for name, cells in results.items()
        if not name.startswith("plain") and any(cell != NOT_RUN for cell in cells.values())
    }


def _answers(run: dict[str, Any]) -> str:
    """How many answers the largest number of a table rests on, all tasks together."""
    return f"{max(cells['average']['samples'] for cells in run.values() if cells['average'] != NOT_RUN)} answers"


def render_blocks(page: Path) -> str:
    """The text of a Markdown page with its result blocks made anew from the summaries that they name.

    A block stands between `<!-- results: FILE -->` and `<!-- /results -->`; FILE is relative to the page.
    """

    def block(match: re.Match) -> str:
        summary = json.loads((page.parent / match["file"]).read_text(encoding="utf-8"))
        return f"{match['start']}\n\n{results_block(summary)}\n\n{speed_block(summary)}\n\n{match['end']}"

    pattern = r"(?P<start><!-- results: (?P<file>\S+) -->)\n.*?(?P<end><!-- /results -->)"
    return re.sub(pattern, block, page.read_text(encoding="utf-8"), flags=re.DOTALL)
