"""Marks: what each token of a round is, as pure data, for every way of showing it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


Kind = Literal["accepted", "head", "missed", "own", "unused"]


@dataclass(frozen=True)
class Mark:
    """One token of a round.

    Args:
        kind: "accepted" draft; accepted thanks to the "head" (the backbone alone would have picked another); first
            "missed" draft; the target's "own" token; "unused" draft behind the miss.
        token_id: the token.
        base_id: what the backbone alone would have picked, where that is another token and was recorded.
        slot: its index among the drafts of the round; `None` for the target's own token.
    """

    kind: Kind
    token_id: int
    base_id: int | None = None
    slot: int | None = None


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
        return Mark(kind, drafts[i], None if base_ids[i] == drafts[i] else base_ids[i], i)

    accepted = [mark("accepted" if base_ids[i] == drafts[i] else "head", i) for i in path]
    missed = [mark("missed", miss)] if miss < len(drafts) else []
    unused = [mark("unused", i) for i in range(len(drafts)) if i not in path and i != miss]
    return [*accepted, *missed, Mark("own", record["own_id"]), *unused]


def classify_without_head(record: Mapping[str, Any]) -> list[Mark]:
    """The same round of a chain as it would have gone with the backbone's own picks: the head off, everything else equal.

    What the target would have said is known up to its own token of the recorded round. Should the backbone have been
    right even there, the round ends with that draft, and what would have followed stays unknown: no own token is marked.

    Args:
        record (`Mapping`): one entry of `rounds` in the trace of a chain, with its `base_ids`.
    """
    base_ids, kept = record["base_ids"], record["accepted"]
    spoken = [*record["draft_ids"][:kept], record["own_id"]]
    right = 0
    while right < min(len(base_ids), len(spoken)) and base_ids[right] == spoken[right]:
        right += 1
    accepted = [Mark("accepted", base_ids[i], slot=i) for i in range(right)]
    missed = [Mark("missed", base_ids[right], slot=right)] if right < min(len(base_ids), len(spoken)) else []
    own = [Mark("own", spoken[right])] if right < len(spoken) else []
    behind = range(right + len(missed), len(base_ids))
    return [*accepted, *missed, *own, *(Mark("unused", base_ids[i], slot=i) for i in behind)]


def draft_depths(record: Mapping[str, Any]) -> list[int]:
    """At which place behind the anchor each draft of a round stands, from 1; those of a tree share places."""
    parents = record.get("parents")
    if parents is None:
        return list(range(1, len(record["draft_ids"]) + 1))
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


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
