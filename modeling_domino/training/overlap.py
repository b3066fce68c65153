"""Whether evaluation prompts are in the training data: shared word n-grams, as in the usual contamination checks."""

from __future__ import annotations

import re
from typing import Any


def find_overlaps(
    dev: list[dict[str, Any]], train: list[dict[str, Any]], *, length: int = 13, ignore: tuple[str, ...] = ()
) -> list[tuple[str, str, str]]:
    """Pairs of a dev and a training prompt that share `length` words in a row.

    Args:
        dev, train: rows with `id` and `turns`.
        length (`int`): words of an n-gram; case and punctuation do not count.
        ignore: instructions that are removed from the turns first (both sets append the same ones).

    Returns:
        (dev id, train id, the shared words), the first n-gram of each pair.
    """
    owners: dict[tuple[str, ...], str] = {}
    for row in dev:
        for gram in _grams(row["turns"], length, ignore):
            owners.setdefault(gram, row["id"])
    found: dict[tuple[str, str], str] = {}
    for row in train:
        for gram in _grams(row["turns"], length, ignore):
            if gram in owners:
                found.setdefault((owners[gram], row["id"]), " ".join(gram))
    return [(dev_id, train_id, words) for (dev_id, train_id), words in found.items()]


def _grams(turns: list[str], length: int, ignore: tuple[str, ...]) -> list[tuple[str, ...]]:
    grams = []
    for turn in turns:
        for phrase in ignore:
            turn = turn.replace(phrase, " ")
        words = re.findall(r"\w+", turn.lower())
        grams += [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]
    return grams
