"""Training data: the target's own answers, and the blocks to train on in each of them.

A file holds one JSON object a line, plain or gzipped: `id`, `turns` (user, assistant, ..., user texts), `response_ids`
(the target's answer as token ids) and `finish` ("eos" or "length"). The prompt is rendered by the target's chat template
as in generation. Nothing here knows a model.

Anchors and loss weights: https://huggingface.co/papers/2605.29707, section 3.3.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


logger = logging.getLogger(__name__)


@dataclass
class Sample:
    """One sequence: `ids` of prompt and answer; the answer starts at `prompt_length` (the loss mask is 1 from there)."""

    id: str
    ids: torch.Tensor
    prompt_length: int

    @property
    def num_anchors(self) -> int:
        """Positions i with tokens i and i + 1 both in the answer."""
        return len(self.ids) - self.prompt_length - 1


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of one data file.

    Raises:
        ValueError: with the line number, if the file is cut off or a line is not a row of training data.
    """
    path = Path(path)
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse_row(line, path, number)
    except (EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} must be a complete file of JSON lines, it breaks off after line {number} ({error}); make that shard "
            "again with `domino regenerate`."
        ) from error


def _parse_row(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {number}: a row must be one JSON object, got {line[:40]!r}... ({error}); make that shard again "
            "with `domino regenerate`."
        ) from error
    missing = [key for key in ("id", "turns", "response_ids") if key not in row] if isinstance(row, dict) else ["id"]
    if missing:
        raise ValueError(
            f"{path}, line {number}: a row must have id, turns and response_ids, {', '.join(missing)} is missing; files "
            "of prompts are answered first with `domino regenerate`."
        )
    return row


def render_prompt(tokenizer, turns: list[str], **template_kwargs) -> list[int]:
    """Token ids of a conversation that waits for its answer: `turns` are user, assistant, ..., user."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **template_kwargs)[
        "input_ids"
    ]


def read_samples(
    paths: list[str | Path], tokenizer, *, max_length: int, vocab_size: int, **template_kwargs
) -> list[Sample]:
    """Reads data files into samples; those without a single anchor are left out and counted in a warning.

    Args:
        paths: JSONL files, plain or gzipped.
        tokenizer: the target's, with a chat template.
        max_length (`int`): longer sequences are cut at the end.
        vocab_size (`int`): ids of the target, checked.
        template_kwargs: for the chat template, such as `enable_thinking`.

    Raises:
        ValueError: for a broken file, an id outside the vocabulary, or when nothing is left to train on.
    """
    samples, skipped = [], 0
    for path in paths:
        for row in read_rows(path):
            answer = row["response_ids"]
            if answer and not 0 <= min(answer) <= max(answer) < vocab_size:
                raise ValueError(
                    f"{path}, sample {row['id']}: ids must lie in the target's vocabulary of {vocab_size} tokens, got "
                    f"{min(answer)}..{max(answer)}; the answers must come from the target itself."
                )
            prompt = render_prompt(tokenizer, row["turns"], **template_kwargs)
            ids = torch.tensor((prompt + answer)[:max_length])
            sample = Sample(row["id"], ids, min(len(prompt), max_length))
            if sample.num_anchors < 1:
                skipped += 1
            else:
                samples.append(sample)
    if skipped:
        logger.warning(
            "%d of %d samples have no two answer tokens within %d tokens, so no block starts in them: left out.",
            skipped,
            skipped + len(samples),
            max_length,
        )
    if not samples:
        raise ValueError(
            f"Training needs at least one sample with two answer tokens, got none in {', '.join(map(str, paths))}; "
            f"check the files, and that `max_length` ({max_length}) is longer than the prompts."
        )
    return samples


def split_samples(samples: list[Sample], num_eval: int) -> tuple[list[Sample], list[Sample]]:
    """Training and evaluation samples; which is which depends on the ids alone, so all runs agree."""
    if not 0 <= num_eval < len(samples):
        raise ValueError(
            f"The evaluation samples must be fewer than all {len(samples)} samples, got {num_eval}; ask for fewer."
        )
    ranked = sorted(samples, key=lambda sample: _seed_of("split", sample.id))
    held_out = {sample.id for sample in ranked[:num_eval]}
    return [s for s in samples if s.id not in held_out], [s for s in samples if s.id in held_out]


def limit_sources(samples: list[Sample], most: int) -> list[Sample]:
    """At most `most` samples of each source, the part of an id before the slash; which ones depends on the ids alone."""
    taken: Counter[str] = Counter()
    kept = set()
    for sample in sorted(samples, key=lambda sample: _seed_of("source", sample.id)):
        source = sample.id.split("/")[0]
        taken[source] += 1
        if taken[source] <= most:
            kept.add(sample.id)
    return [sample for sample in samples if sample.id in kept]


def count_tokens(answers: Iterable[list[int]]) -> list[tuple[int, int]]:
    """Token ids with their counts, by falling frequency."""
    counts: Counter[int] = Counter()
    for ids in answers:
        counts.update(ids)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def rank_tokens(samples: list[Sample]) -> list[int]:
    """Token ids by falling frequency in the answers."""
    return [token for token, _ in count_tokens(sample.ids[sample.prompt_length :].tolist() for sample in samples)]


class BlockDataset(torch.utils.data.Dataset):
    """Samples with the blocks to train on, drawn anew in each epoch.

    The draw depends on (seed, epoch, id) only: not on the order of samples, the number of processes or workers.

    Args:
        samples (`list[Sample]`): the sequences.
        num_drafts (`int`): drafts of one block (n).
        gamma (`float`): decay of the loss weights.
        max_anchors (`int`, *optional*): most blocks per sample; `None` for all.
        seed (`int`): of the draw.
    """

    def __init__(
        self, samples: list[Sample], *, num_drafts: int, gamma: float, max_anchors: int | None = None, seed: int = 0
    ):
        self.samples = samples
        self.num_drafts = num_drafts
        self.decay = torch.exp(-torch.arange(num_drafts) / gamma)
        self.max_anchors = max_anchors
        self.seed = seed

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        """A sample by its index (in epoch 0), or by (epoch, index) as [`EpochSampler`] gives them."""
        epoch, index = key if isinstance(key, tuple) else (0, key)
        sample = self.samples[index]
        anchors = self._draw(sample, epoch)
        return {"input_ids": sample.ids, **label_blocks(sample.ids, anchors, self.decay)}

    def _draw(self, sample: Sample, epoch: int) -> torch.Tensor:
        first = sample.prompt_length
        if self.max_anchors is None or sample.num_anchors <= self.max_anchors:
            return torch.arange(first, first + sample.num_anchors)
        generator = torch.Generator().manual_seed(_seed_of(self.seed, epoch, sample.id))
        picked = torch.randperm(sample.num_anchors, generator=generator)[: self.max_anchors]
        return first + picked.sort().values


class EpochSampler(torch.utils.data.Sampler):
    """The order of an epoch, a function of (seed, epoch), as keys (epoch, index) of a [`BlockDataset`].

    The epoch travels in the key, so a resumed run and a worker of the data loader cannot hold a stale one.

    Attributes:
        epoch (`int`): set by the trainer before it iterates.
    """

    def __init__(self, size: int, seed: int):
        self.size = size
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        generator = torch.Generator().manual_seed(_seed_of("order", self.seed, self.epoch))
        for index in torch.randperm(self.size, generator=generator).tolist():
            yield self.epoch, index


def label_blocks(ids: torch.Tensor, anchors: torch.Tensor, decay: torch.Tensor) -> dict[str, torch.Tensor]:
    """Labels and weights of the blocks at `anchors` `[A]` of a sequence `ids` `[S]`.

    Counted in drafts, both label shifts are one: draft i of the block at a is the token at a + 1 + i, and the GRU that
    corrects it has consumed the tokens at a..a + i. Drafts behind the end of the sequence weigh nothing.

    Args:
        decay: weight of each draft, `[n]`.

    Returns:
        `anchors` `[A]`, `prefix_ids` `[A, n]` (what the GRU consumes), `labels` `[A, n]`, `weights` `[A, n]`.
    """
    offsets = torch.arange(len(decay))
    positions = anchors[:, None] + 1 + offsets
    inside = positions < len(ids)
    labels = ids[positions.clamp(max=len(ids) - 1)]
    prefix_ids = ids[(positions - 1).clamp(max=len(ids) - 1)]
    return {"anchors": anchors, "prefix_ids": prefix_ids, "labels": labels, "weights": inside * decay}


def collate_blocks(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads sequences on the right, and blocks with blocks of weight 0.

    Returns:
        `input_ids`, `attention_mask` `[B, S]`; `anchors`, `anchor_mask` `[B, A]`; `prefix_ids`, `labels`, `weights`
        `[B, A, n]`.
    """
    pad = torch.nn.utils.rnn.pad_sequence
    batch = {key: pad([item[key] for item in items], batch_first=True) for key in items[0]}
    batch["attention_mask"] = pad([torch.ones_like(item["input_ids"]) for item in items], batch_first=True)
    batch["anchor_mask"] = pad(
        [torch.ones_like(item["anchors"], dtype=torch.bool) for item in items], batch_first=True
    )
    return batch


def _seed_of(*parts: Any) -> int:
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
