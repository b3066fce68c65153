"""How a terminal shows marks: every kind of token has a colour and a second cue, so that no meaning rests on colour."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import NamedTuple

from rich.text import Text

from .marks import KEPT, Kind, Mark, TextPieces, printable


class Look(NamedTuple):
    """How a terminal shows one kind of token: style, cue before, cue after, and its name in the legend."""

    style: str
    before: str
    after: str
    meaning: str


LOOKS: dict[Kind, Look] = {
    "accepted": Look("green underline", "[", "]", "accepted draft"),
    "head": Look("bold magenta underline", "{", "}", "accepted thanks to the head (≠ the backbone's own pick)"),
    "missed": Look("red strike", "~", "~", "first miss"),
    "own": Look("yellow", "<", ">", "the target's own token"),
    "unused": Look("dim", "(", ")", "never used"),
}


def draw_text(marks: Iterable[Mark], pieces: TextPieces, *, brackets: bool) -> Text:
    """The text a round adds, accepted drafts marked; what was not kept is left out.

    Args:
        marks: of one round, from [`classify_round`].
        pieces (`TextPieces`): of the whole text; advanced by this round.
        brackets (`bool`): mark with brackets, for output that shows no styles.
    """
    kept = [mark for mark in marks if mark.kind in KEPT]
    drawn = Text()
    for kind, run in groupby(kept, key=lambda mark: mark.kind):
        piece = printable("".join(pieces.push(mark.token_id) for mark in run))
        look = LOOKS[kind]
        if brackets and kind != "own" and piece:
            piece = f"{look.before}{piece}{look.after}"
        drawn.append(piece, look.style)
    return drawn


def draw_round(number: int, marks: list[Mark], decode: Callable[[list[int]], str]) -> Text:
    """One line per round: every token with its cue, and how many tokens the round gave out of those it could give."""
    # Not as the style of the whole line, which would dim every token.
    drawn = Text().append(f"{number:4d}  ", "dim")
    for mark in marks:
        look = LOOKS[mark.kind]
        drawn.append(look.before, "dim")
        drawn.append(_on_one_line(decode([mark.token_id])), look.style)
        if mark.kind == "head":
            drawn.append(f"≠{_on_one_line(decode([mark.base_id]))}", "dim strike")
        drawn.append(look.after, "dim")
    given = sum(mark.kind in KEPT for mark in marks)
    drawn.append(f"  {given} / {len(marks)}", "bold")
    return drawn


def draw_legend(*, rounds: bool, brackets: bool = True) -> Text:
    """One line that explains the marks of [`draw_round`] or, without `rounds`, of [`draw_text`]."""
    drawn = Text()
    for kind in LOOKS if rounds else KEPT:
        look = LOOKS[kind]
        drawn.append("   " if drawn else "")
        bracketed = rounds or (brackets and kind != "own")
        drawn.append(f"{look.before}{look.meaning}{look.after}" if bracketed else look.meaning, look.style)
    return drawn


def _on_one_line(text: str) -> str:
    return printable(text).replace("\n", "↵").replace("\t", "⇥")
