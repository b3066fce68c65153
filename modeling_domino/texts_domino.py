"""The texts of a generation: a buffer of token ids, how long each sequence is, what its target's law is, and where it ends.

Logits processors and stopping criteria see texts, so they are asked here. Models and caches are not known.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from .drafting_domino import SCORE_ONLY_PROCESSORS
from .record_domino import Step
from .verification_domino import sample_rows


# Columns that a text has room for at first, behind its prompt.
FIRST_COLUMNS = 2048


class Texts:
    """One row of `ids` a sequence, in a buffer that doubles when it is full: a limit of any size costs nothing ahead.

    Args:
        input_ids: the prompts, `[B, S]`.
        processors, criteria: of transformers, `None` or a list.
        generation_config: prepared by `generate`.
        spare (`int`): columns behind the longest text, for drafts that do not count yet.

    Attributes:
        lengths (`list[int]`): of each sequence, prompt included.
        rows (`list[int]`): the open sequences; those that ended keep their row.
    """

    def __init__(self, input_ids: torch.Tensor, *, processors, criteria, generation_config, spare: int):
        self.processors = processors
        self.do_sample = generation_config.do_sample
        self.max_length = generation_config.max_length
        eos = getattr(generation_config, "_eos_token_tensor", None)
        self.stop_ids = set() if eos is None else set(eos.flatten().tolist())
        pad = getattr(generation_config, "_pad_token_tensor", None)
        self.pad_id = 0 if pad is None else int(pad)
        # Stop tokens and length are counted here.
        self.criteria = StoppingCriteriaList(
            c for c in criteria if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria))
        )
        batch, prompt = input_ids.shape
        self.rows = list(range(batch))
        self.lengths = [prompt] * batch
        self.spare = spare
        # Pads where nothing is written yet: what processors see of a sequence that ended early.
        columns = min(self.most_columns, prompt + FIRST_COLUMNS + spare)
        self.ids = input_ids.new_full((batch, columns), self.pad_id)
        self.ids[:, :prompt] = input_ids

    @property
    def most_columns(self) -> int:
        """Columns of a text of the greatest length, and of drafts behind it."""
        return max(self.max_length, max(self.lengths)) + self.spare

    @property
    def device(self) -> torch.device:
        """Where the ids are, the target's."""
        return self.ids.device

    @property
    def room(self) -> int:
        """Most drafts that the shortest open text can take, before the target's own token."""
        return self.max_length - min(self.lengths[row] for row in self.rows) - 1

    @property
    def longest(self) -> int:
        """Length of the longest open text."""
        return max(self.lengths[row] for row in self.rows)

    def pick(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's own token at each row, `[B, n]`."""
        return sample_rows(logits) if self.do_sample else logits.argmax(dim=-1)

    def write(self, tokens: torch.Tensor, ahead: int) -> None:
        """Puts drafts `[B, n]` into the texts, behind the committed tokens and `ahead` others; they do not count yet."""
        for i, row in enumerate(self.rows):
            start = self.lengths[row] + ahead
            self.ids[row, start : start + tokens.shape[1]] = tokens[i]

    def law(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's law at the anchors and behind each draft, `[B, n + 1, V]`."""
        if not self.processors and not self.do_sample:
            return logits
        logits = logits.float()
        if not self.processors:
            return logits
        return torch.stack([self._law_at(logits[:, i], ahead=i) for i in range(logits.shape[1])], dim=1)

    def draft_law(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The processors as the drafter calls them, with the anchors and the drafts picked so far, `[B, 1 + i]`."""
        ahead = ids.shape[1] - 1
        if ahead > 0:
            self.write(ids[:, -1:].to(self.ids.device), ahead=ahead - 1)
        return self._law_at(logits, ahead=ahead)

    def _law_at(self, logits: torch.Tensor, *, ahead: int) -> torch.Tensor:
        """Processors see, for each sequence, its text and `ahead` drafts; `logits` and result are `[B, V]`.

        They are always called with the whole batch, since some tell sequences by their place in it; texts of different
        lengths go one length at a time.
        """
        batch = self.ids.shape[0]
        lengths = sorted({self.lengths[row] for row in self.rows})
        everything = logits
        if len(self.rows) < batch:
            everything = logits.new_zeros(batch, logits.shape[1])
            everything[self.rows] = logits
        processed = {
            length: self.processors(
                self.ids[:, : length + ahead].to(logits.device),
                everything if len(lengths) == 1 else everything.clone(),
            )
            for length in lengths
        }
        if len(lengths) == 1:
            return processed[lengths[0]][self.rows] if len(self.rows) < batch else processed[lengths[0]]
        return torch.stack([processed[self.lengths[row]][row] for row in self.rows])

    def tree_law(self, logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """The target's law at every row of a tree; processors see the tokens on the row's own path."""
        if not self.do_sample and not self.processors:
            return logits
        logits = logits.float()
        if not self.processors:
            return logits
        prefix = self.ids[:, : self.lengths[0]]
        if all(type(processor) in SCORE_ONLY_PROCESSORS for processor in self.processors):
            return self.processors(prefix, logits[0])[None]
        # Others read the text, which differs from row to row: the tree's shape is needed on the host. A node that its
        # parent's law rules out is left as it is: it cannot be reached, and some processors refuse such a text.
        token_ids, parent_rows = tokens[0].tolist(), parents[0].tolist()
        rows, paths = [self.processors(prefix, logits[:, 0])], {0: []}
        for i, (token, parent) in enumerate(zip(token_ids, parent_rows), start=1):
            row = logits[:, i]
            if parent in paths and rows[parent][0, token] > -torch.inf:
                paths[i] = [*paths[parent], token]
                row = self.processors(torch.cat([prefix, prefix.new_tensor([paths[i]])], dim=1), row)
            rows.append(row)
        return torch.stack(rows, dim=1)

    def end_at_stop(self, row: int, step: Step) -> None:
        """Ends a text at the first token that stops it: that token becomes the own token of a shorter round.

        The drafts of a chain behind it count as never made, as on the stock path, which cuts them before the
        verification; of a tree only the kept path is asked, and the tree stays as it was.
        """
        room = self.max_length - self.lengths[row]
        tokens = step.draft_ids if step.path is None else step.accepted_ids
        for i, token in enumerate(tokens):
            if i + 1 == room or token in self.stop_ids or self._criteria_stop(row, self.lengths[row] + i + 1):
                if i < step.accepted:
                    step.accepted, step.own_id = i, token
                if step.path is None:
                    step.keep_drafts(i)
                else:
                    step.path = step.path[:i]
                return

    def _criteria_stop(self, row: int, length: int) -> bool:
        return len(self.criteria) > 0 and bool(self.criteria(self.ids[:, :length], None)[row])

    def commit(self, steps: dict[int, Step]) -> list[int]:
        """Takes the tokens of a round into the texts; which of the open sequences, by their place, stay open.

        The drafts have been written; `rows` lists the sequences that stay.
        """
        still_open = []
        for i, (row, step) in enumerate(steps.items()):
            end = self.lengths[row] + step.accepted + 1
            self.ids[row, end - 1] = step.own_id
            self.lengths[row] = end
            if step.own_id not in self.stop_ids and end < self.max_length and not self._criteria_stop(row, end):
                still_open.append(i)
            else:
                self.ids[row, end:] = self.pad_id
        self.rows = [self.rows[i] for i in still_open]
        needed = max(self.lengths) + self.spare
        if needed > self.ids.shape[1]:
            more = min(self.most_columns, 2 * needed) - self.ids.shape[1]
            self.ids = F.pad(self.ids, (0, more), value=self.pad_id)
        return still_open

    def sequences(self) -> torch.Tensor:
        """Prompts and texts, filled up with the pad token to the longest, `[B, S]`."""
        lengths = torch.tensor(self.lengths, device=self.ids.device)[:, None]
        longest = max(self.lengths)
        behind = torch.arange(longest, device=self.ids.device) >= lengths
        return self.ids[:, :longest].masked_fill(behind, self.pad_id)
