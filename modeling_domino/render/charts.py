"""What the rounds of a trace add up to: tokens per round, and acceptance by position, with the head on and off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .marks import classify_without_head, draft_depths


def draw_charts(rounds: Sequence[Mapping[str, Any]], without_head: bool) -> str:
    """Both charts as HTML; every bar carries its number."""
    return f'<div class="dm-charts">{_histogram(rounds)}{_by_position(rounds, without_head)}</div>'


def tokens_per_round(rounds: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """How many rounds gave so many tokens, from 1 to the most any round could give."""
    given = Counter(record["accepted"] + 1 for record in rounds)
    most = max(_slots(record) for record in rounds) + 1
    return {tokens: given[tokens] for tokens in range(1, most + 1)}


def acceptance_by_position(rounds: Sequence[Mapping[str, Any]], *, without_head: bool = False) -> list[float]:
    """Of the rounds that drafted so far, the share in which the target kept the draft at each position.

    Args:
        rounds: of a trace.
        without_head: with the backbone's own picks instead, in the same rounds (chains only).
    """
    kept, drafted = [], []
    for record in rounds:
        drafted.append(_slots(record))
        kept.append(
            sum(mark.kind == "accepted" for mark in classify_without_head(record))
            if without_head
            else record["accepted"]
        )
    return [
        sum(count > position for count in kept) / sum(count > position for count in drafted)
        for position in range(max(drafted))
    ]


def _slots(record: Mapping[str, Any]) -> int:
    """How many drafts stood one after the other."""
    return max(draft_depths(record), default=0)


def _histogram(rounds: Sequence[Mapping[str, Any]]) -> str:
    counts = tokens_per_round(rounds)
    highest = max(counts.values())
    bars = "".join(
        f'<li><span class="dm-bars"><span class="dm-bar" style="height:{100 * count / highest:.0f}%">'
        f'<b>{count or ""}</b></span></span><span class="dm-tick">{tokens}</span></li>'
        for tokens, count in counts.items()
    )
    tau = sum(tokens * count for tokens, count in counts.items()) / len(rounds)
    return (
        f'<figure class="dm-chart"><figcaption>Tokens per round <small>rounds by tokens given; the mean is τ = {tau:.2f}'
        f'</small></figcaption><ol class="dm-plot">{bars}</ol></figure>'
    )


def _by_position(rounds: Sequence[Mapping[str, Any]], without_head: bool) -> str:
    on = acceptance_by_position(rounds)
    if not on:
        return ""
    off = acceptance_by_position(rounds, without_head=True) if without_head else []
    groups = []
    for position, share in enumerate(on):
        pair = [(share, "dm-bar")] + ([(off[position], "dm-bar dm-bar-off")] if off else [])
        bars = "".join(
            f'<span class="{name}" style="height:{100 * value:.0f}%"><b>{100 * value:.0f}</b></span>'
            for value, name in pair
        )
        groups.append(f'<li><span class="dm-bars">{bars}</span><span class="dm-tick">{position + 1}</span></li>')
    key = (
        ': <span class="dm-key"></span>head on <span class="dm-key dm-bar-off"></span>head off'
        if off
        else " that drafted so far"
    )
    return (
        f'<figure class="dm-chart"><figcaption>Drafts kept, by position <small>percent of the rounds{key}</small></figcaption>'
        f'<ol class="dm-plot">{"".join(groups)}</ol></figure>'
    )
