"""A race as HTML: lanes that were recorded one after the other, shown on one clock, and whether their texts are equal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from .timeline import shown_token


def names_of(race: Mapping[str, Any]) -> dict[str, str]:
    """What the lanes are called."""
    family = race.get("family", "Domino")
    return {
        "plain": "plain (target alone)",
        "head-off": "parallel only (head off)",
        "chain": f"{family} chain",
        "tree": f"{family} tree",
    }


def draw_race(race: Mapping[str, Any], decode: Callable[[list[int]], str]) -> list[str]:
    """The fragments of a race, as it stands when its first lane arrives; the script replays it from the recorded points.

    Args:
        race (`Mapping`): `recorded` lanes with `method`, `points` (seconds and tokens), `output_ids`, `tau` and `seconds`;
            `next`, the method that is being recorded; `reference`, the ids that every text is compared with; `family` of
            the drafter, "Domino" by default.
        decode (`Callable`): from a list of ids to text.
    """
    lanes, waiting, names = race["recorded"], race.get("next"), names_of(race)
    note = f'<p class="dm-note">Recording {escape(names[waiting])} …</p>' if waiting else ""
    if not lanes:
        return [note]
    first = min(lanes, key=lambda lane: lane["seconds"])
    plain = next((lane["seconds"] for lane in lanes if lane["method"] == "plain"), None)
    end = max(lane["seconds"] for lane in lanes)
    drawn = "".join(_lane(lane, names[lane["method"]], at=first["seconds"], plain=plain) for lane in lanes)
    controls = (
        '<div class="dm-controls"><button type="button" class="dm-go">▶ replay the race</button>'
        '<label class="dm-scrubber">clock <input type="range" class="dm-time" min="0" '
        f'max="{math.ceil(1000 * end)}" value="{round(1000 * first["seconds"])}" aria-label="Milliseconds on the clock"></label>'
        f'<output class="dm-clock">{first["seconds"]:.2f} s of {end:.2f} s</output></div>'
        if waiting is None
        else ""
    )
    verdict = _verdict(lanes, names, race["reference"], decode) if waiting is None else ""
    return [f'<div class="dm-race">{drawn}</div>{note}{controls}{verdict}']


def first_difference(ids: list[int], others: list[int]) -> int | None:
    """Where two texts part; `None` if they are equal."""
    for position, (one, other) in enumerate(zip(ids, others)):
        if one != other:
            return position
    return None if len(ids) == len(others) else min(len(ids), len(others))


def _lane(lane: Mapping[str, Any], name: str, *, at: float, plain: float | None) -> str:
    total = len(lane["output_ids"])
    there = max((tokens for seconds, tokens in lane["points"] if seconds <= at), default=0)
    numbers = [f"<b>{total / lane['seconds']:.1f}</b> tok/s", f'<span class="dm-count">{there}/{total}</span>']
    numbers.append(f"τ {lane['tau']:.2f}")
    if plain is not None:
        numbers.append(f"<b>{plain / lane['seconds']:.2f}×</b>")
    return (
        f'<div class="dm-lane" data-method="{escape(lane["method"])}" data-total="{total}" '
        f'data-points="{escape(json.dumps(lane["points"]))}"><span>{escape(name)}</span>'
        f'<span class="dm-track"><span class="dm-fill" style="width:{100 * there / total:.1f}%"></span></span>'
        f'<span class="dm-numbers">{" · ".join(numbers)}</span></div>'
    )


def _verdict(
    lanes: list[Mapping[str, Any]], names: dict[str, str], reference: list[int], decode: Callable[[list[int]], str]
) -> str:
    differing = []
    for lane in lanes:
        position = first_difference(lane["output_ids"], reference)
        if position is not None:
            said, wanted = (
                f"“{shown_token(decode([ids[position]]))}”" if position < len(ids) else "the end"
                for ids in (lane["output_ids"], reference)
            )
            differing.append(
                f"{escape(names[lane['method']])} differs first at token {position + 1}: {said} instead of {wanted}"
            )
    if differing:
        return f'<p class="dm-verdict dm-differs" role="alert">Not identical: {"; ".join(differing)}.</p>'
    return (
        f'<p class="dm-verdict">✓ All {len(lanes)} texts are identical to the target\'s own greedy text: {len(reference)} '
        "tokens each, compared with <code>target.generate</code>.</p>"
    )
