"""Result blocks: what a README or a card shows of a benchmark's summary, made anew from the file that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .summary import METHODS, NOT_RUN, by_temperature
from .tables import number, ratio_text, speedup_text, table, tau_text


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


def variants_block(summary: dict[str, Any]) -> str:
    """The methods and variants of a summary beside the chain, on average over tasks."""
    parts = []
    for temperature, results in by_temperature(summary).items():
        rows = []
        for name, cells in results.items():
            cell = cells["average"]
            if cell != NOT_RUN and not name.startswith("plain"):
                ratios = [
                    ratio_text(cell, ratio) if cell.get("beside") else "" for ratio in ("tau_ratio", "speed_ratio")
                ]
                rows.append([name, tau_text(cell), speedup_text(cell), *ratios])
        header = ["method", "tau", "speed-up", "tau of the chain's", "speed of the chain's"]
        tasks = [task for task in results["plain"] if task != "average"]
        parts += [
            f"Temperature {temperature}, average over {', '.join(tasks)}, {_answers(results)}:",
            table(header, rows),
        ]
    return "\n\n".join(parts)


def contexts_block(summary: dict[str, Any]) -> str:
    """The cost of a round by task, which is a length of context: in tokens of plain generation at the same place."""
    results = summary["results"]
    run = _methods_run(results)
    tasks = [task for task in results["plain"] if task != "average"]
    # By length: fewer digits first.
    tasks.sort(key=lambda task: (len(task), task))

    def shown(cells: dict[str, Any], task: str, name: str, digits: int) -> str:
        return NOT_RUN if cells[task] == NOT_RUN else number(cells[task][name], digits)

    rows = [
        [
            task.removeprefix("context-"),
            shown(results["plain"], task, "tokens_per_second", 1),
            *(shown(cells, task, "tau", 2) for cells in run.values()),
            *(shown(cells, task, "round_cost", 2) for cells in run.values()),
            *(shown(cells, task, "peak_memory_mb", 0) for cells in (results["plain"], *run.values())),
        ]
        for task in tasks
    ]
    taus, costs = [f"tau, {name}" for name in run], [f"round cost, {name}" for name in run]
    memory = [f"memory MB, {name}" for name in ("plain", *run)]
    return table(["context", "plain tokens/s", *taus, *costs, *memory], rows)


BLOCKS = {
    "results": (results_block, speed_block),
    "variants": (variants_block,),
    "contexts": (contexts_block,),
}


def _methods_run(results: dict[str, Any]) -> dict[str, Any]:
    """The drafting methods with a number; variants have a block of their own."""
    return {
        name: cells
        for name, cells in results.items()
        if name in METHODS[1:] and any(cell != NOT_RUN for cell in cells.values())
    }


def _answers(run: dict[str, Any]) -> str:
    """How many answers the largest number of a table rests on, all tasks together."""
    return f"{max(cells['average']['samples'] for cells in run.values() if cells['average'] != NOT_RUN)} answers"


def render_blocks(page: Path) -> str:
    """The text of a Markdown page with its result blocks made anew from the summaries that they name.

    A block stands between `<!-- results: FILE -->` and `<!-- /results -->`, likewise the other `BLOCKS`; FILE is relative
    to the page.
    """

    def block(match: re.Match) -> str:
        summary = json.loads((page.parent / match["file"]).read_text(encoding="utf-8"))
        return "\n\n".join([match["start"], *(make(summary) for make in BLOCKS[match["kind"]]), match["end"]])

    pattern = rf"(?P<start><!-- (?P<kind>{'|'.join(BLOCKS)}): (?P<file>\S+) -->)\n.*?(?P<end><!-- /(?P=kind) -->)"
    return re.sub(pattern, block, page.read_text(encoding="utf-8"), flags=re.DOTALL)
