"""Makes a drafter's ranking of tokens from training data: which ones the target writes, the most frequent first.

The ranking is what `draft_vocab=` draws on (see `vocabulary_domino.py`). Only answers are counted; tokens that the
target never wrote are not ranked, and so never drafted from a draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..atomic import write_text
from ..configuration_domino import DominoConfig
from ..provenance import sha256_of
from ..vocabulary_domino import DRAFT_VOCAB_FILE, check_ranking, ranking_text
from .data import count_tokens, read_rows


# At which sizes the report says how much of the text is covered.
SIZES = (1000, 2000, 4000, 8000, 12000, 16000, 32000)


@dataclass
class Ranking:
    """Tokens by falling frequency.

    Args:
        ids: token ids.
        counts: how often each was written.
    """

    ids: list[int]
    counts: list[int]

    def coverage(self, size: int) -> float:
        """Share of the counted text that the first `size` tokens are."""
        return sum(self.counts[:size]) / sum(self.counts)

    def lines(self) -> list[str]:
        """The report: coverage by size."""
        sizes = [*(size for size in SIZES if size < len(self.ids)), len(self.ids)]
        return [f"{size:>7,} tokens cover {self.coverage(size):.2%} of the answers" for size in sizes]


def rank(data: list[Path]) -> Ranking:
    """The ranking of the answers in `data`, files of training data.

    Raises:
        ValueError: if they hold no answer.
    """
    counts = count_tokens(row["response_ids"] for path in data for row in read_rows(path))
    if not counts:
        raise ValueError(f"A ranking needs answers of the target, {', '.join(map(str, data))} hold none.")
    return Ranking(*map(list, zip(*counts)))


def write_ranking(folder: Path, ranking: Ranking, data: list[Path], *, size: int | None = None) -> Path:
    """Writes the ranking beside the weights of the drafter in `folder`, the first `size` tokens of it.

    Raises:
        ValueError: if `folder` holds no drafter, or an id lies outside its vocabulary.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"A ranking lies beside a drafter's weights, {folder} has no config.json; name its folder.")
    ids = ranking.ids[:size]
    check_ranking(ids, DominoConfig.from_pretrained(folder).vocab_size, source="The ranking of these answers")
    about = {
        "coverage": round(ranking.coverage(len(ids)), 6),
        "tokens_counted": sum(ranking.counts),
        "data_sha256": {path.name: sha256_of(path) for path in data},
    }
    path = folder / DRAFT_VOCAB_FILE
    write_text(path, ranking_text(ids, **about))
    return path
