"""The one renderer of traces: first what each token of a round is (pure data), then how a terminal shows it.

`classify_round` knows nothing of terminals, and the drawing functions know nothing of models: they take marks and a
function from token ids to text. Every kind of token has a colour and a second cue, so that no meaning rests on colour.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

from rich.text import Text


Kind = Literal["accepted", "head", "missed", "own", "unused"]


@dataclass(frozen=True)
class Mark:
    """One token of a round.

    Args:
        kind: "accepted" draft; accepted thanks to the "head" (the backbone alone would have picked another); first
            "missed" draft; the target's "own" token; "unused" draft behind the miss.
        token_id: the token.
        base_id: what the backbone alone would have picked, where that is another token and was recorded.
    """

    kind: Kind
    token_id: int
    base_id: int | None = None


def classify_round(record: Mapping[str, Any]) -> list[Mark]:
    """What each token of a round is, in the order of the text: drafts up to the miss, own token, unused drafts.

    In a tree the accepted drafts are those of the accepted path, and the miss is the first child of its end.

    Args:
        record (`Mapping`): one entry of `rounds` in a trace; `base_ids` may be absent or `None`.
    """
    drafts = record["draft_ids"]
    base_ids = record.get("base_ids") or drafts
    parents = record.get("parents")
    if parents is None:
        path, miss = range(record["accepted"]), record["accepted"]
    else:
        path = record["path"]
        end = path[-1] if path else -1
        miss = parents.index(end) if end in parents else len(drafts)

    def mark(kind: Kind, i: int) -> Mark:
        return Mark(kind, drafts[i], None if base_ids[i] == drafts[i] else base_ids[i])

    accepted = [mark("accepted" if base_ids[i] == drafts[i] else "head", i) for i in path]
    missed = [mark("missed", miss)] if miss < len(drafts) else []
    unused = [mark("unused", i) for i in range(len(drafts)) if i not in path and i != miss]
    return [*accepted, *missed, Mark("own", record["own_id"]), *unused]


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

# What stays in the text.
KEPT: tuple[Kind, ...] = ("accepted", "head", "own")


class TextPieces:
    """Turns a stream of ids into text, piece by piece; a character of several tokens comes out with its last one.

    Args:
        decode (`Callable`): from a list of ids to text.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._ids: list[int] = []
        # Text up to `_read` is out. Decoding restarts at `_start`: some tokenizers look at the token before.
        self._start = self._read = 0

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty inside a character."""
        self._ids.append(token_id)
        piece = self._pending()
        if piece.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return piece

    def flush(self) -> str:
        """What is left when the text ends inside a character."""
        piece = self._pending()
        self._start = self._read = len(self._ids)
        return piece

    def _pending(self) -> str:
        out = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(out) :]


def printable(text: str) -> str:
    """`text` without control characters: what a model writes must not steer the terminal."""
    return "".join(
        character if character in "\n\t" or unicodedata.category(character) != "Cc" else _visible(character)
        for character in text
    )


def _visible(control: str) -> str:
    code = ord(control)
    return (
        chr(0x2400 + code) if code < 0x20 else "\N{SYMBOL FOR DELETE}" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"
    )


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
