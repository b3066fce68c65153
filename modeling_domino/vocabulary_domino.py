"""The draft vocabulary: the tokens that drafts are chosen from, where the output head is what costs.

A target writes most of its text with a small part of its vocabulary. Drafts taken from the frequent tokens alone need
only their rows of the target's output head and of the correction; the target still scores everything, so the text stays
its own, and a rare token comes as the target's own token of a round.

The ranking lies beside the weights in a file of its own (`draft_vocab.json`), made from training data by
`domino draft-vocab`; how many of its ids are used is decided at run time. Nothing here knows how drafts are made.
"""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils import cached_file


DRAFT_VOCAB_FILE = "draft_vocab.json"
VERSION = 1

# Rows of an output head or of a correction, gathered once: layer -> (what was gathered, rows, bias).
_ROWS: weakref.WeakKeyDictionary[nn.Module, tuple] = weakref.WeakKeyDictionary()


class DraftVocabulary:
    """The tokens that can be drafted, the most frequent first.

    Memory: its rows of the target's output head and of the correction, `len(ids)` x (D + R) elements, on the device of
    each, for as long as target and drafter live; 12,000 tokens at D 576 and R 128 in fp32 are 34 MB.

    Args:
        ids: token ids `[U]`, distinct.
    """

    def __init__(self, ids: torch.Tensor):
        self.ids = ids

    def __len__(self) -> int:
        return self.ids.shape[0]

    def base_logits(self, output_head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """The target's output head over `hidden` `[B, n, D]`, for these tokens: `[B, n, U]`.

        Raises:
            ValueError: if the head is no plain linear layer, whose rows cannot be taken out.
        """
        weight, bias = self.rows_of(output_head)
        return F.linear(hidden.to(device=weight.device, dtype=weight.dtype), weight, bias).to(hidden.device)

    def correction(self, last: nn.Linear) -> SimpleNamespace:
        """The last layer of a correction (R to V) with these tokens alone, as weight and bias."""
        weight, bias = self.rows_of(last)
        return SimpleNamespace(weight=weight, bias=bias)

    def rows_of(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of a layer with these tokens alone, gathered once."""
        if type(layer) is not nn.Linear or not layer.weight.is_floating_point() or layer.weight.is_meta:
            raise ValueError(
                "A draft vocabulary needs an output head that is a plain linear layer in memory, got "
                f"{type(layer).__name__}; leave `draft_vocab` out."
            )
        weight = layer.weight
        # Trained, moved or converted weights are gathered anew; inference tensors cannot change.
        version = 0 if weight.is_inference() else weight._version
        state = (self.ids, weight.data_ptr(), version, weight.dtype, weight.device)
        known = _ROWS.get(layer)
        if known is not None and known[0][0] is not self.ids and known[0][1:] == state[1:]:
            # Another tensor, perhaps of the same ids: compared once, since it waits for the device.
            same = torch.equal(known[0][0], self.ids)
            known = _ROWS[layer] = (state, *known[1:]) if same else None
        if known is None or known[0][1:] != state[1:]:
            with torch.no_grad():
                ids = self.ids.to(weight.device)
                bias = None if layer.bias is None else layer.bias[ids].clone()
                known = _ROWS[layer] = (state, weight[ids].clone(), bias)
        return known[1], known[2]


def check_ranking(ids: list[int], vocab_size: int, *, source: str) -> list[int]:
    """The ranking, if it is one of this vocabulary.

    Raises:
        ValueError: if it is empty, repeats an id, or has one outside the vocabulary.
    """
    integers = isinstance(ids, list) and all(type(token) is int for token in ids)
    if not integers or not ids or len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(
            f"{source} must list distinct token ids of the vocabulary of {vocab_size}, the most frequent first; make it "
            "again with `domino draft-vocab`."
        )
    return ids


def read_ranking(source: str | Path, vocab_size: int, **hub) -> list[int] | None:
    """The ranked ids beside a drafter's weights, or `None` if there are none.

    Args:
        source: the drafter's folder or Hub id.
        hub: `revision`, `token`, `cache_dir`, ... of the download.

    Raises:
        ValueError: if the file is not such a ranking.
    """
    path = cached_file(
        source,
        DRAFT_VOCAB_FILE,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
        **hub,
    )
    if path is None:
        return None
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        version, ids = content["version"], content["token_ids"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{DRAFT_VOCAB_FILE} of {source} must be a JSON object with `version` and `token_ids` ({error!r}); make it "
            "again with `domino draft-vocab`."
        ) from error
    if version != VERSION:
        raise ValueError(f"{DRAFT_VOCAB_FILE} of {source} must be of version {VERSION}, got {version!r}.")
    return check_ranking(ids, vocab_size, source=f"{DRAFT_VOCAB_FILE} of {source}")


def ranking_text(ids: list[int], **about) -> str:
    """The content of the file; `about` says where the ranking comes from."""
    return json.dumps({"version": VERSION, **about, "token_ids": ids}) + "\n"
