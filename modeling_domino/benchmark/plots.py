"""Plots of a benchmark: where a round's time goes, speed-up by task, acceptance by slot. Needs matplotlib, not torch.

SVG with a fixed salt and no date, so that a plot that is drawn again is the same file.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .summary import METHODS, NOT_RUN, STAGES, Record, conditional_acceptance, cost_model


# Okabe and Ito's colours, which colour-blind readers can tell apart; one for each stage and each method.
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#999999", "#000000")


def draw_plots(records: Sequence[Record], summary: dict[str, Any], folder: Path) -> list[str]:
    """Draws what the records allow, of the summary's first temperature; returns the files' names, none without matplotlib."""
    if not _has_matplotlib():
        return []
    chosen = [record for record in records if record["temperature"] == summary["temperature"]]
    by_method = {method: [r for r in chosen if r["method"] == method] for method in METHODS[1:]}
    by_method = {method: found for method, found in by_method.items() if found}
    baseline = summary["plain_is"][f"{summary['temperature']:g}"]
    plain = [record for record in chosen if record["method"] == baseline]
    figures = {
        "stages.svg": _stages(by_method, plain),
        "tasks.svg": _tasks(list(by_method), summary["results"]),
        "acceptance.svg": _acceptance(by_method),
    }
    return _save(figures, folder)


def draw_tasks(summary: dict[str, Any], folder: Path) -> list[str]:
    """Draws speed-up by task from a summary alone; the file's name, none without matplotlib."""
    if not _has_matplotlib():
        return []
    results = summary["results"]
    run = [method for method in METHODS[1:] if any(cell != NOT_RUN for cell in results.get(method, {}).values())]
    return _save({"tasks.svg": _tasks(run, results)}, folder)


def draw_throughput(summary: dict[str, Any], folder: Path) -> list[str]:
    """Tokens a second of each server by concurrency, at the lowest temperature; the file's name, none without matplotlib."""
    if not _has_matplotlib():
        return []
    arms = summary["server"]
    first = min((name for arm in arms.values() for name in arm["levels"]), key=float)
    figure, axes = _axes(5, f"Throughput by concurrency, T={first}")
    for (name, arm), colour in zip(arms.items(), COLOURS):
        levels = arm["levels"].get(first, {})
        speeds = [cell["tokens_per_second"] for cell in levels.values()]
        axes.plot([int(level) for level in levels], speeds, marker="o", color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests under way")
    axes.set_ylabel("tokens/s")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return _save({"throughput.svg": figure}, folder)


def _has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _save(figures: dict[str, Any], folder: Path) -> list[str]:
    """Saves the figures that could be drawn; returns their names."""
    import matplotlib

    drawn = []
    with matplotlib.rc_context({"svg.hashsalt": "domino", "svg.fonttype": "path"}):
        for name, figure in figures.items():
            if figure is not None:
                figure.savefig(
                    folder / name, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight"
                )
                drawn.append(name)
    return drawn


def _axes(width: float, title: str):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 3.2))
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _stages(by_method: dict[str, Sequence[Record]], plain: Sequence[Record]):
    """Stacked stages of a round with tau and measured speed-up above, as the paper's Figure 1."""
    costs = {method: cost_model(records, plain) for method, records in by_method.items()}
    costs = {method: cost for method, cost in costs.items() if cost is not None}
    if not costs:
        return None
    figure, axes = _axes(2 + 1.1 * len(costs), "Time of a round by stage")
    methods, bottom = list(costs), [0.0] * len(costs)
    for stage, colour in zip(STAGES, COLOURS):
        heights = [costs[method]["stages"][stage] for method in methods]
        axes.bar(methods, heights, bottom=bottom, color=colour, label=stage, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights)]
    for place, (method, top) in enumerate(zip(methods, bottom)):
        note = f"tau {costs[method]['tau']:.2f}\n{costs[method]['measured']:.2f}x"
        axes.annotate(note, (place, top), ha="center", va="bottom", xytext=(0, 2), textcoords="offset points")
    axes.set_ylabel("ms a round")
    axes.margins(y=0.2)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def _tasks(methods: Sequence[str], results: dict[str, Any]):
    """Bars of speed-up by task with intervals, as the paper's Figure 2."""
    tasks = list(results["plain"])
    if not methods:
        return None
    figure, axes = _axes(2 + 1.2 * len(tasks), "Speed-up over plain generation")
    width = 0.8 / len(methods)
    for number, (method, colour) in enumerate(zip(methods, COLOURS)):
        cells = [results[method][task] for task in tasks]
        found = [(i, cell) for i, cell in enumerate(cells) if cell != NOT_RUN and cell["speedup"] is not None]
        places = [i + (number - (len(methods) - 1) / 2) * width for i, _ in found]
        heights = [cell["speedup"] for _, cell in found]
        # A bar without an interval comes from a single prompt.
        reach = [_reach(cell) for _, cell in found]
        axes.bar(
            places,
            heights,
            width=width,
            color=colour,
            label=method,
            yerr=[[low for low, _ in reach], [high for _, high in reach]],
            error_kw={"elinewidth": 0.8},
        )
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylabel("x plain")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure


def _reach(cell: dict[str, Any]) -> tuple[float, float]:
    if cell["speedup_ci"] is None:
        return 0.0, 0.0
    low, high = cell["speedup_ci"]
    return max(0.0, cell["speedup"] - low), max(0.0, high - cell["speedup"])


def _acceptance(by_method: dict[str, Sequence[Record]]):
    """Acceptance of each slot, given the ones before it."""
    slots = {method: conditional_acceptance(records) for method, records in by_method.items()}
    slots = {method: shares for method, shares in slots.items() if shares}
    if not slots:
        return None
    figure, axes = _axes(5, "Acceptance by slot, given all before it")
    for (method, shares), colour in zip(slots.items(), COLOURS):
        axes.plot(range(1, len(shares) + 1), [share for _, share in shares], marker="o", color=colour, label=method)
    axes.set_ylim(0, 1)
    axes.set_xticks(range(1, max(len(shares) for shares in slots.values()) + 1))
    axes.set_xlabel("draft slot")
    axes.set_ylabel("share of rounds that reach it")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure
