"""A trace as HTML: one row per forward of the target, the tokens as chips, trees as trees, and what they add up to.

The page is a list of fragments, so that a row that is drawn once never changes while a run is streamed. All text of a
model is escaped here. Looks and behaviour are `timeline.css` and `timeline.js`; without either, the text says it all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from .charts import draw_charts
from .marks import KEPT, Kind, Mark, classify_round, classify_without_head, draft_depths, printable


CSS = Path(__file__).with_name("timeline.css").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_name("timeline.js").read_text(encoding="utf-8")
ARCHITECTURE = Path(__file__).with_name("architecture.svg").read_text(encoding="utf-8")

MEANINGS: dict[Kind, str] = {
    "accepted": "accepted draft",
    "head": "accepted thanks to the Domino head (the backbone's own pick struck out above)",
    "missed": "first miss",
    "own": "the target's own token",
    "unused": "never used",
}
DID_NOT_RUN = "The drafter did not run: every token of this text is the target's own."
ENDED_FIRST = "Nothing was drafted: the text ended with its first token, which comes from reading the prompt."


def draw_timeline(trace: Mapping[str, Any], decode: Callable[[list[int]], str], *, finished: bool = True) -> list[str]:
    """The fragments of a run's page; joined, they are its HTML.

    Args:
        trace (`Mapping`): a trace, or so much of one as there is yet: `rounds` and `output_ids` at least.
        decode (`Callable`): from a list of ids to text.
        finished (`bool`): the run is over: controls and charts join the rows.
    """
    rounds = trace["rounds"]
    switch = finished and can_switch_head_off(trace)
    rows, position = [], len(trace["output_ids"]) - sum(record["accepted"] + 1 for record in rounds)
    summary = _summary(trace, finished, first=position == 1)
    if position == 1:
        rows.append(_prompt_row(trace["output_ids"][0], decode))
    for number, record in enumerate(rounds, start=1):
        rows.append(draw_row(number, record, decode, position=position, without_head=switch))
        position += record["accepted"] + 1
    return [
        f'<div class="dm-top">{summary}{_legend()}{_controls(len(rounds), switch) if finished else ""}</div>',
        '<div class="dm-rows" role="grid" aria-label="Rounds: one row per forward of the target">',
        *rows,
        f"</div>{draw_charts(rounds, switch) if finished and rounds else ''}",
    ]


def draw_row(
    number: int,
    record: Mapping[str, Any],
    decode: Callable[[list[int]], str],
    *,
    position: int,
    without_head: bool = False,
) -> str:
    """One round as a row.

    Args:
        number: of the round, from 1.
        record: its entry in the trace.
        position: how many tokens of the text lie before it.
        without_head: also draw how it would have gone with the head off, for the switch.
    """
    marks = classify_round(record)
    tree = record.get("parents") is not None
    chips = _chips(marks, record, decode, position)
    body = _tree(record, marks, chips) if tree else "".join(chips)
    given = record["accepted"] + 1
    most = max(draft_depths(record), default=0) + 1
    other = ""
    if without_head:
        off = classify_without_head(record)
        other = (
            f'<span class="dm-toks dm-off">{"".join(_chips(off, {}, decode, position))}</span>'
            f"{_given(sum(mark.kind in KEPT for mark in off), most, 'dm-off', open_end=_open_end(off))}"
        )
    milliseconds = round(1000 * sum(record.get("stage_seconds", {}).values()))
    return (
        f'<div class="dm-row" role="row" data-given="{given}" data-ms="{milliseconds}">'
        f'<span class="dm-num" role="rowheader"><span class="dm-word">round </span>{number}</span>'
        f'<span class="dm-toks dm-on{" dm-trunk" if tree else ""}">{body}</span>{_given(given, most, "dm-on")}{other}</div>'
    )


def can_switch_head_off(trace: Mapping[str, Any]) -> bool:
    """Whether the trace tells what the backbone alone would have done; of a tree it does not, it would be another tree."""
    rounds = trace["rounds"]
    return bool(rounds) and all(
        record.get("parents") is None and record.get("base_ids") is not None for record in rounds
    )


def drafter_ran(trace: Mapping[str, Any]) -> bool:
    """Whether any draft was verified."""
    return any(record["draft_ids"] for record in trace["rounds"])


def shown_token(text: str) -> str:
    """A token's text on one line, escaped, without the space it begins with; what would be invisible gets a sign."""
    text = printable(text).replace("\n", "↵").replace("\t", "⇥")
    if not text.strip():
        return "␣" * len(text) or "∅"
    return escape(text.removeprefix(" "))


def _summary(trace: Mapping[str, Any], finished: bool, *, first: bool) -> str:
    """What the rounds add up to; `first`: one token of the text came before them."""
    rounds = trace["rounds"]
    if not rounds:
        return f'<p class="dm-summary">{ENDED_FIRST if finished else "Reading the prompt …"}</p>'
    tokens = sum(record["accepted"] + 1 for record in rounds)
    rescued = sum(mark.kind == "head" for record in rounds for mark in classify_round(record))
    words = [
        f'<b class="dm-tau">τ = {tokens / len(rounds):.2f}</b> tokens per target forward',
        f"{_count(len(rounds), 'target forward')} for {_count(tokens, 'token')}{' after the first' if first else ''}",
    ]
    if any(record.get("base_ids") for record in rounds):
        words.append(f"the Domino head rescued <b>{_count(rescued, 'token')}</b>")
    alert = "" if drafter_ran(trace) else f'<p class="dm-alert" role="alert">{DID_NOT_RUN}</p>'
    return f'<p class="dm-summary">{" · ".join(words)}</p>{alert}'


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _legend() -> str:
    items = "".join(
        f'<li><span class="dm-tok dm-{kind}" aria-hidden="true">{"<s>it</s>" if kind == "head" else ""}<i>of</i></span>'
        f"{escape(meaning)}</li>"
        for kind, meaning in MEANINGS.items()
    )
    right = "<li><span><b>3</b> / 6</span>at the right: tokens the round gave, of the most it could</li>"
    return f'<ul class="dm-legend" aria-label="Legend">{items}{right}</ul>'


def _controls(count: int, switch: bool) -> str:
    if not count:
        return ""
    toggle = (
        '<label class="dm-switch"><input type="checkbox" class="dm-headoff">head off: the backbone\'s own picks</label>'
        if switch
        else ""
    )
    return (
        '<div class="dm-controls"><button type="button" class="dm-play">▶ replay</button>'
        f'<label class="dm-scrubber">round <input type="range" class="dm-scrub" min="0" max="{count}" value="{count}" '
        f'aria-label="Rounds shown"></label><output class="dm-where">{count} / {count}</output>{toggle}</div>'
    )


def _prompt_row(token_id: int, decode: Callable[[list[int]], str]) -> str:
    text = shown_token(decode([token_id]))
    label = f"The first token, “{text}”: the target's own, from reading the prompt. Nothing was drafted."
    return (
        '<div class="dm-row dm-prompt" role="row"><span class="dm-num" role="rowheader"><span class="dm-word">prompt</span></span>'
        f'<span class="dm-toks"><span class="dm-tok dm-own" role="gridcell" tabindex="0" aria-label="{label}">'
        f'<i dir="auto">{text}</i></span></span><span class="dm-given"></span></div>'
    )


def _given(given: int, most: int, side: str, *, open_end: bool = False) -> str:
    # The backbone was right even where the record of the round ends.
    least = ' title="At least so many: the record ends here"' if open_end else ""
    return f'<span class="dm-given {side}" role="gridcell"{least}>{"≥ " if open_end else ""}<b>{given}</b> / {most}</span>'


def _open_end(marks: list[Mark]) -> bool:
    return all(mark.kind != "own" for mark in marks)


def _chips(
    marks: list[Mark], record: Mapping[str, Any], decode: Callable[[list[int]], str], position: int
) -> list[str]:
    """The chips of a round; its own token follows the kept drafts in the text, though the miss stands between them."""
    kept = sum(mark.kind in ("accepted", "head") for mark in marks)
    return [_chip(mark, record, decode, position + min(i, kept)) for i, mark in enumerate(marks)]


def _chip(mark: Mark, record: Mapping[str, Any], decode: Callable[[list[int]], str], position: int) -> str:
    text = shown_token(decode([mark.token_id]))
    base = None if mark.base_id is None else shown_token(decode([mark.base_id]))
    label = _describe(mark, record, text, base, position)
    above = "" if base is None else f"<s>{base}</s>"
    return (
        f'<span class="dm-tok dm-{mark.kind}" role="gridcell" tabindex="-1" aria-label="{label}">{above}'
        f'<i dir="auto">{text}</i></span>'
    )


def _describe(mark: Mark, record: Mapping[str, Any], text: str, base: str | None, position: int) -> str:
    """What hovering over a chip says; `text` and `base` are escaped."""
    if mark.kind == "own":
        return f"“{text}”: the target's own token. Token {position + 1} of the text."
    what = {
        "accepted": "accepted",
        "head": "accepted thanks to the Domino head",
        "missed": "the first miss",
        "unused": "never used",
    }[mark.kind]
    words = [f"Draft {mark.slot + 1}, “{text}”: {what}."]
    if mark.kind in KEPT:
        words.append(f"Token {position + 1} of the text.")
    if record.get("probabilities") and record.get("base_probabilities"):
        corrected, alone = record["probabilities"][mark.slot], record["base_probabilities"][mark.slot]
        words.append(f"Probability {corrected:.2f} corrected, {alone:.2f} from the backbone alone.")
    if base is not None:
        right = mark.kind == "missed" and mark.base_id == record.get("own_id")
        words.append(f"The backbone alone would have picked “{base}”{', and been right' if right else ''}.")
    return " ".join(words)


def _tree(record: Mapping[str, Any], marks: list[Mark], chips: list[str]) -> str:
    """The chips of a tree round, nested; the target's own token hangs at the end of the accepted path."""
    parents, path = record["parents"], set(record["path"])
    chip_of = {mark.slot: chip for mark, chip in zip(marks, chips)}
    children: dict[int | None, list[int | None]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    end = record["path"][-1] if path else -1
    # `None` is the own token, as in its mark.
    children.setdefault(end, []).insert(0, None)

    def branch(parent: int) -> str:
        kids = sorted(children.get(parent, []), key=lambda node: node is not None and node not in path)
        drawn = "".join(
            f'<span class="dm-node{" dm-kept" if node is None or node in path else ""}">{chip_of[node]}'
            f"{'' if node is None else branch(node)}</span>"
            for node in kids
        )
        return f'<span class="dm-kids">{drawn}</span>' if drawn else ""

    return f'<span class="dm-root" aria-hidden="true"></span>{branch(-1)}'
