"""Pieces of Markdown that reports, cards and the README share: tables, numbers with intervals, published numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .summary import NOT_RUN


PUBLISHED = Path(__file__).parent / "published.json"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tau_text(cell: Any) -> str:
    """Acceptance length, cap and interval of a summary's cell."""
    if cell == NOT_RUN:
        return NOT_RUN
    cap = "" if cell["tau_cap"] is None else f" / {cell['tau_cap']}"
    return f"{number(cell['tau'])}{cap}{interval(cell['tau_ci'])}"


def speedup_text(cell: Any) -> str:
    """Speed-up and interval of a summary's cell."""
    return NOT_RUN if cell == NOT_RUN else f"{number(cell['speedup'])}{interval(cell['speedup_ci'])}"


def ratio_text(cell: Any, name: str) -> str:
    """A ratio to the chain, "tau_ratio" or "speed_ratio", and its interval."""
    beside = None if cell == NOT_RUN else cell.get("beside")
    return NOT_RUN if beside is None else f"{number(beside[name])}{interval(beside[f'{name}_ci'])}"


def published_tables() -> str:
    """Published numbers, one table a set-up with its source and baseline."""
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    sections = [f"## Published numbers\n\n{published['note']}"]
    columns = ("model", "task", "tau", "speedup", "tokens_per_second")
    for entry in published["setups"]:
        text = f"### {entry['source']}\n\n{entry['setup']}. Baseline: {entry['baseline']}."
        used = [column for column in columns if any(column in row for row in entry["rows"])]
        if entry["rows"]:
            shown = [
                {**row, **{name: number(row[name]) for name in used if _is_number(row.get(name))}}
                for row in entry["rows"]
            ]
            text += "\n\n" + table(
                ["method", *(column.replace("_", " ") for column in used)],
                [[row["method"], *(row.get(column, "not stated") for column in used)] for row in shown],
            )
        sections.append(text)
    return "\n\n".join(sections)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def number(value: float | None, digits: int = 2) -> str:
    """A number with so many decimals, or a dash."""
    return "-" if value is None else f"{value:,.{digits}f}"


def interval(bounds: Sequence[float] | None) -> str:
    """The two bounds in brackets, behind a blank; nothing for `None`."""
    return "" if bounds is None else f" [{bounds[0]:.2f}, {bounds[1]:.2f}]"
