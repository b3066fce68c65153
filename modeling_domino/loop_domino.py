"""The decode loop: draft, verify, commit, round after round.

A round costs one forward of the target and waits for the device once, to read how many drafts were kept. Chains and
trees are two kinds of round over one state. Section 2 of https://huggingface.co/papers/2605.29707 describes the round.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F
from transformers import (
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from .cache_domino import DominoCache, drop_last, keep_rows, start_recording
from .drafting_domino import DraftChain, draft_chain, draft_tree
from .record_domino import Run, StageClock, Step, set_last_run
from .taps_domino import TargetTaps
from .target_domino import TargetView
from .tree_domino import TreeMask, TreeShape
from .verification_domino import accept_block, accept_match, accept_speculative, accept_tree, sample_rows


# The rules that weigh a draft's law against the target's, and so need drafts that were sampled.
SAMPLED_DRAFTS = {"speculative": accept_speculative, "block": accept_block}

# Processors that look at the scores alone, so that all rows of a tree go through them at once.
SCORE_ONLY_PROCESSORS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    SuppressTokensLogitsProcessor,
)


class DecodeLoop:
    """State of one generation: committed ids, the two caches, and the context that the drafter has not read yet."""

    def __init__(
        self,
        view: TargetView,
        drafter,
        input_ids: torch.Tensor,
        cache: Any,
        keyword: str,
        *,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        processors,
        criteria: StoppingCriteriaList,
        generation_config,
        rule: str,
        width: int,
        tree: TreeShape | None = None,
    ):
        self.view, self.drafter = view, drafter
        self.cache, self.keyword = cache, keyword
        self.processors, self.rule, self.width, self.tree = processors, rule, width, tree
        self.do_sample = generation_config.do_sample
        self.max_length = generation_config.max_length
        eos = getattr(generation_config, "_eos_token_tensor", None)
        self.stop_ids = set() if eos is None else set(eos.flatten().tolist())
        self.criteria = StoppingCriteriaList(
            c for c in criteria if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria))
        )
        self.draft_cache = DominoCache()
        self.taps = TargetTaps(view.layers, drafter.config.target_layer_ids)
        self.clock = StageClock(drafter.device, synchronize=drafter.record_details)

        # Ids, mask and positions live in buffers of the final size: nothing is concatenated as the text grows. Rows
        # that the caller's cache already holds come before the ids and are counted by `offset`.
        prompt = input_ids.shape[1]
        # A static cache counts in a tensor of its own, which moves on.
        self.offset = int(cache.get_seq_length())
        size = max(self.max_length, prompt) + drafter.config.block_size + 1
        if tree is not None:
            size += tree.nodes
        self.ids = input_ids.new_zeros(1, size)
        self.ids[:, :prompt] = input_ids
        self.length = prompt
        known = self.offset + prompt
        self.positions = position_ids.new_empty(*position_ids.shape[:-1], self.offset + size)
        self.positions[..., :known] = position_ids[..., -known:]
        self.positions[..., known:] = position_ids[..., -1:] + torch.arange(
            1, size - prompt + 1, device=input_ids.device
        )
        self.mask = None
        if attention_mask is not None and not bool(attention_mask.all()):
            self.mask = attention_mask.new_ones(1, self.offset + size)
            self.mask[:, :known] = attention_mask
        if tree is not None:
            known_mask = None if self.mask is None else self.mask[:, :known]
            like = view.target.get_input_embeddings().weight
            self.tree_mask = TreeMask(tree.nodes + 1, self.offset + size, like=like, padding=known_mask)
        self.context = None
        self.run = Run(
            target=view.target.config._name_or_path or type(view.target).__name__,
            drafter=drafter.config._name_or_path or type(drafter).__name__,
            head=drafter.head_state,
            path="loop",
            block_size=drafter.config.block_size,
            prompt_tokens=prompt,
            temperature=float(generation_config.temperature or 1.0) if self.do_sample else 0.0,
            rule=rule,
            kind="chain" if tree is None else "tree",
        )

    @torch.no_grad()
    def steps(self, streamer=None) -> Iterator[Step]:
        """Runs the rounds; hooks are removed and the run is recorded even if the consumer stops early."""
        started = time.perf_counter()
        try:
            with self.taps:
                start_recording(self.cache)
                if streamer is not None:
                    streamer.put(self.ids[:, : self.length].cpu())
                finished = False
                while not finished:
                    step, finished = self._round() if self.run.steps else self._prefill()
                    self.run.steps.append(step)
                    self.run.seconds = time.perf_counter() - started
                    if streamer is not None:
                        streamer.put(torch.tensor(step.token_ids))
                    yield step
        finally:
            set_last_run(self.drafter, self.run)
            if streamer is not None:
                streamer.end()

    def _prefill(self) -> tuple[Step, bool]:
        """Reads the prompt and picks the first token, the first anchor."""
        outputs = self._forward(self.ids[:, : self.length], 0, num_logits=1)
        logits = self._process(outputs.logits[:, -1:], self.ids[:, : self.length])
        own = self._pick(logits)
        self.context = self.taps.read(outputs, device=self.drafter.device)
        self.clock.mark("verify")
        step = Step(draft_ids=[], accepted=0, own_id=own.item(), is_prefill=True)
        return self._commit(step)

    def _round(self) -> tuple[Step, bool]:
        """One round: draft, verify, accept, commit."""
        num_drafts = min(self.width, self.max_length - self.length - 1)
        if self.tree is not None and num_drafts > 0:
            return self._tree_round(num_drafts)
        return self._chain_round(num_drafts)

    def _chain_round(self, num_drafts: int) -> tuple[Step, bool]:
        """Drafts a chain and verifies it. The only wait for the device is the `tolist` below."""
        chain = DraftChain(ids=self.ids[:, :0])
        if num_drafts > 0:
            chain = draft_chain(
                **self._draft_inputs(),
                num_drafts=num_drafts,
                processors=self.processors,
                # Under "match" the likeliest draft is the best one at every temperature.
                do_sample=self.rule in SAMPLED_DRAFTS,
            )
        start = self.length - 1
        self.ids[:, self.length : self.length + num_drafts] = chain.ids
        verify_ids = self.ids[:, start : self.length + num_drafts]
        outputs = self._forward(verify_ids, start, num_logits=num_drafts + 1)
        logits = self._process(outputs.logits[:, -num_drafts - 1 :], self.ids[:, : self.length + num_drafts])
        draft_ids = verify_ids[:, 1:]
        if self.rule in SAMPLED_DRAFTS and num_drafts > 0:
            accept = SAMPLED_DRAFTS[self.rule]
            accepted, own = accept(draft_ids, chain.logits.to(logits.device), logits)
        else:
            accepted, own = accept_match(draft_ids, self._pick(logits).to(draft_ids.device))
        accepted, own, *drafts = torch.cat([accepted, own, draft_ids[0]]).tolist()
        self.clock.mark("verify")
        step = Step(draft_ids=drafts, accepted=accepted, own_id=own, **chain.details())
        self._end_at_stop(step)
        drop_last(self.cache, num_drafts - step.accepted)
        self.context = self.taps.read(outputs, step.accepted + 1, device=self.drafter.device)
        return self._commit(step)

    def _tree_round(self, max_depth: int) -> tuple[Step, bool]:
        """Drafts a tree and verifies it. The only wait for the device is the `tolist` below."""
        temperature = self.run.temperature or 1.0
        tree = draft_tree(**self._draft_inputs(), shape=self.tree, max_depth=max_depth, temperature=temperature)
        device = self.ids.device
        tokens, parents, depths = (value.to(device) for value in (tree.tokens, tree.parents, tree.depths))
        ancestors = tree.ancestors().to(device)
        anchor_row = self.offset + self.length - 1
        num_rows = tokens.shape[1] + 1
        outputs = self._forward(
            torch.cat([self.ids[:, self.length - 1 : self.length], tokens], dim=1),
            self.length - 1,
            num_logits=num_rows,
            positions=self.positions[..., anchor_row : anchor_row + 1] + F.pad(depths, (1, 0)),
            mask=self.tree_mask.behind(anchor_row, ancestors),
        )
        logits = self._process_tree(outputs.logits[:, -num_rows:], tokens, parents)
        accepted, own, path = accept_tree(tokens, parents, ancestors, self._pick(logits).to(device))
        read = torch.cat([accepted, own, path[0], tokens[0], parents[0]]).tolist()
        self.clock.mark("verify")
        accepted, own, path, nodes = read[0], read[1], read[2 : 2 + num_rows], read[2 + num_rows :]
        step = Step(
            draft_ids=nodes[: num_rows - 1],
            parents=[row - 1 for row in nodes[num_rows - 1 :]],
            path=[row - 1 for row in path[1 : accepted + 1]],
            accepted=accepted,
            own_id=own,
            **tree.details(),
        )
        self.ids[:, self.length : self.length + accepted] = self.ids.new_tensor(step.accepted_ids)
        self._end_at_stop(step)
        rows = torch.tensor([0, *(node + 1 for node in step.path)])
        keep_rows(self.cache, num_rows, rows)
        self.context = self.taps.read(outputs, rows, device=self.drafter.device)
        return self._commit(step)

    def _pick(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's own token at each row, `[B, n]`."""
        return sample_rows(logits) if self.do_sample else logits.argmax(dim=-1)

    def _draft_inputs(self) -> dict[str, Any]:
        """What every way of drafting needs."""
        device = self.drafter.device
        anchor_row = self.offset + self.length - 1
        block_end = anchor_row + self.drafter.config.block_size
        # A vision-language target has one row of positions per axis; for text they agree.
        positions = self.positions if self.positions.dim() == 2 else self.positions[0]
        return {
            "drafter": self.drafter,
            "view": self.view,
            "cache": self.draft_cache,
            "prefix_ids": self.ids[:, : self.length],
            "context_hidden_states": self.context.to(self.drafter.dtype),
            "position_ids": positions[:, anchor_row - self.context.shape[1] : block_end].to(device),
            "clock": self.clock,
            "attention_mask": None if self.mask is None else self.mask[:, self.offset : block_end].to(device),
            "details": self.drafter.record_details,
        }

    def _forward(
        self,
        input_ids: torch.Tensor,
        start: int,
        *,
        num_logits: int,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ):
        """The target over `input_ids`, which sit at `start`.. of the id buffer unless positions and mask say otherwise."""
        first = self.offset + start
        end = first + input_ids.shape[1]
        kwargs = {self.keyword: self.cache, **self.taps.forward_kwargs}
        if self.view.target._supports_logits_to_keep():
            kwargs["logits_to_keep"] = num_logits
        if mask is None and self.mask is not None:
            mask = self.mask[:, :end]
        self.taps.listen()
        return self.view.target(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=self.positions[..., first:end] if positions is None else positions,
            use_cache=True,
            **kwargs,
        )

    def _process(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The target's law: processors see, for each row, just the tokens before it."""
        if not self.processors and not self.do_sample:
            return logits
        logits = logits.float()
        if not self.processors:
            return logits
        first = ids.shape[1] - logits.shape[1] + 1
        rows = [self.processors(ids[:, : first + i], logits[:, i]) for i in range(logits.shape[1])]
        return torch.stack(rows, dim=1)

    def _process_tree(self, logits: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        """The target's law at every row of a tree; processors see the tokens on the row's own path."""
        if not self.do_sample and not self.processors:
            return logits
        logits = logits.float()
        if not self.processors:
            return logits
        prefix = self.ids[:, : self.length]
        if all(isinstance(processor, SCORE_ONLY_PROCESSORS) for processor in self.processors):
            return self.processors(prefix, logits[0])[None]
        # These read the text, which differs from row to row: the tree's shape is needed on the host.
        paths = [[]]
        for token, parent in zip(tokens[0].tolist(), parents[0].tolist()):
            paths.append([*paths[parent], token])
        rows = [
            self.processors(torch.cat([prefix, prefix.new_tensor([path], dtype=prefix.dtype)], dim=1), logits[:, i])
            for i, path in enumerate(paths)
        ]
        return torch.stack(rows, dim=1)

    def _end_at_stop(self, step: Step) -> None:
        """Ends the text at the first token that stops it: that token becomes the own token of a shorter round.

        The drafts of a chain behind it count as never made, as on the stock path, which cuts them before the
        verification; of a tree only the kept path is asked, and the tree stays as it was.
        """
        tokens = step.draft_ids if step.path is None else step.accepted_ids
        for i, token in enumerate(tokens):
            if token in self.stop_ids or (len(self.criteria) > 0 and self._criteria_stop(self.length + i + 1)):
                if i < step.accepted:
                    step.accepted, step.own_id = i, token
                if step.path is None:
                    step.keep_drafts(i)
                else:
                    step.path = step.path[:i]
                return

    def _criteria_stop(self, length: int) -> bool:
        return bool(self.criteria(self.ids[:, :length], None).all())

    def _commit(self, step: Step) -> tuple[Step, bool]:
        """Takes the step's tokens into the text and says whether it ends here."""
        end = self.length + step.accepted + 1
        self.ids[:, end - 1] = step.own_id
        self.length = end
        finished = (
            step.own_id in self.stop_ids
            or self.length >= self.max_length
            or (len(self.criteria) > 0 and self._criteria_stop(self.length))
        )
        self.clock.mark("commit")
        step.stage_seconds = self.clock.take()
        return step, finished
