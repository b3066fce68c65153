"""The decode loop: draft, verify, commit, round after round.

A round costs one forward of the target and waits for the device once, to read how many drafts were kept. Chains and
trees are two kinds of round over one state. Section 2 of https://huggingface.co/papers/2605.29707 describes the round.

Sequences of a batch keep different numbers of drafts, but share the columns of the caches: a round adds as many columns
as its best sequence kept, the mask hides them from the others, and once too many are hidden the caches are compacted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F
from transformers import StoppingCriteriaList

from .cache_domino import DominoCache, compact, drop_last, keep_context, keep_rows, start_recording
from .drafting_domino import DraftChain, DraftOptions, draft_chain, draft_tree
from .grouped_domino import grouped_heads
from .packed_domino import PackedPair, packed_pair
from .record_domino import Run, StageClock, Step, details_of, name_of, set_last_runs
from .sizing_domino import AutoOff, Costs, PastWidth
from .taps_domino import TargetTaps
from .target_domino import TargetView
from .texts_domino import Texts
from .tree_domino import TreeMask, TreeShape
from .verification_domino import accept_block, accept_match, accept_speculative, accept_tree


# The rules that weigh a draft's law against the target's, and so need drafts that were sampled.
SAMPLED_DRAFTS = {"speculative": accept_speculative, "block": accept_block}

# Compaction copies both caches, so a batch first collects as many hidden columns as half its longest text.
HIDDEN_SHARE = 1.5
HIDDEN_SLACK = 64


class DecodeLoop:
    """State of one generation: the texts, the two caches, and the context that the drafter has not read yet.

    The texts keep the sequences that ended; everything on the models' side is kept for the open ones alone.
    """

    # What the runs call this loop.
    path = "loop"

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
        options: DraftOptions,
        tree: TreeShape | None = None,
        store: DominoCache | None = None,
        costs: Costs | None = None,
        auto_off: AutoOff | None = None,
    ):
        self.view, self.drafter, self.options = view, drafter, options
        self.cache, self.keyword = cache, keyword
        self.rule, self.width, self.tree = rule, width, tree
        self.costs, self.auto_off = costs, auto_off
        # Drafts that were sampled must not decide how many of them there are.
        by_past = costs is not None and tree is None and rule in SAMPLED_DRAFTS
        self.past = PastWidth(costs, width) if by_past else None
        self.texts = Texts(
            input_ids,
            processors=processors,
            criteria=criteria,
            generation_config=generation_config,
            spare=drafter.config.block_size + 1,
        )
        self.draft_cache = DominoCache(drafter.context_window) if store is None else store
        self.taps = TargetTaps(view.layers, drafter.config.target_layer_ids)
        self.clock = StageClock(drafter.device, synchronize=drafter.record_details)

        batch, prompt = input_ids.shape
        # Columns of the target's cache: those the caller filled, which the drafter does not have, then prompt and text.
        # A static cache counts in a tensor of its own, which moves on.
        self.columns = int(cache.get_seq_length())
        # A store of an earlier turn holds the same rows: the prompt begins with them, and is read from there on.
        self.offset, self.known = (self.columns, 0) if store is None else (0, self.columns)
        self.prompt_positions = position_ids[..., -prompt:].expand(*position_ids.shape[:-2], batch, prompt)
        self.anchor = self.anchor_positions = self.context = self.context_positions = None
        self._make_masks(attention_mask)
        self.runs = [self._new_run(prompt, generation_config) for _ in range(batch)]

    def _make_masks(self, attention_mask: torch.Tensor | None) -> None:
        batch, config = self.texts.ids.shape[0], self.drafter.config
        size = self.offset + self.texts.ids.shape[1]
        self.mask = None
        if batch > 1 or (attention_mask is not None and not bool(attention_mask.all())):
            room = int(HIDDEN_SHARE * size) + HIDDEN_SLACK + 2 * config.block_size
            self.mask = torch.ones(batch, room, dtype=torch.long, device=self.texts.device)
            if attention_mask is not None:
                self.mask[:, : attention_mask.shape[1]] = attention_mask
        if self.tree is not None:
            known = None if self.mask is None else self.mask[:, : self.offset + self.texts.lengths[0]]
            like = self.view.target.get_input_embeddings().weight
            most = self.offset + self.texts.most_columns + self.tree.nodes
            self.tree_mask = TreeMask(self.tree.nodes + 1, most, like=like, padding=known)

    def _new_run(self, prompt: int, generation_config) -> Run:
        drafter = self.drafter
        return Run(
            target=name_of(self.view.target),
            drafter=name_of(drafter),
            head=drafter.head_state,
            path=self.path,
            block_size=drafter.config.block_size,
            prompt_tokens=prompt,
            temperature=float(generation_config.temperature or 1.0) if self.texts.do_sample else 0.0,
            rule=self.rule,
            kind="chain" if self.tree is None else "tree",
        )

    @torch.no_grad()
    def steps(self, streamer=None) -> Iterator[dict[int, Step]]:
        """Runs the rounds, and yields the step of each sequence that was open in it.

        Hooks are removed and the runs are recorded even if the consumer stops early.
        """
        started = time.perf_counter()
        try:
            with self.taps:
                packed = self._packed()
                start_recording(self.cache)
                if streamer is not None:
                    streamer.put(self.texts.ids[:, : self.texts.lengths[0]].cpu())
                with packed:
                    steps = self._prefill()
                while steps:
                    for row, step in steps.items():
                        self.runs[row].steps.append(step)
                        self.runs[row].seconds = time.perf_counter() - started
                        if streamer is not None:
                            streamer.put(torch.tensor(step.token_ids))
                    for run in self.runs:
                        # Some copies are made when they are first used.
                        run.packed_bytes = packed.num_bytes
                    # Between the rounds the models belong to the consumer.
                    yield steps
                    with packed:
                        steps = self._round() if self.texts.rows else None
            self._keep_context()
        finally:
            set_last_runs(self.drafter, self.runs)
            if streamer is not None:
                streamer.end()

    def _keep_context(self) -> None:
        """Leaves the drafter's context for the next turn, if the caller comes back with the target's cache."""
        rows = self.draft_cache.get_seq_length() + self.context.shape[1]
        if len(self.runs) == 1 and self.mask is None and rows == self.columns == int(self.cache.get_seq_length()):
            positions = self.context_positions if self.context_positions.dim() == 2 else self.context_positions[0]
            self.drafter.append_context(
                self.context.to(self.drafter.dtype), positions.to(self.drafter.device), self.draft_cache
            )
            keep_context(
                self.cache, self.view.target, self.drafter, self.draft_cache, self.texts.ids[:, : self.columns]
            )

    def _packed(self) -> PackedPair:
        return packed_pair(self.view.target, self.drafter, prepack=self.drafter.prepack)

    def _prefill(self) -> dict[int, Step]:
        """Reads the prompts and picks the first tokens, the first anchors."""
        prompt = self.texts.lengths[0]
        positions = self.prompt_positions[..., self.known :]
        outputs = self._forward(self.texts.ids[:, self.known : prompt], positions, num_logits=1)
        own = self.texts.pick(self.texts.law(outputs.logits[:, -1:]))
        self.clock.mark("verify")
        steps = {row: Step([], 0, token, is_prefill=True) for row, (token,) in enumerate(own.tolist())}
        # As if the anchor of the prefill were the last token of the prompt, with the rest of it in front.
        self.anchor_positions = self.prompt_positions[..., -1:]
        self.columns += prompt - self.known - 1
        self._collect_context(self.taps.read(outputs, device=self.drafter.device), positions)
        return self._commit(steps, own.new_zeros(own.shape[0]), own, kept=0)

    def _round(self) -> dict[int, Step]:
        """One round, drafted unless that does not pay."""
        num_drafts = min(self.width, self.texts.room)
        if self.mask is not None and self.columns + 2 * self.drafter.config.block_size > self.mask.shape[1]:
            self.mask = F.pad(self.mask, (0, self.mask.shape[1]), value=1)
        if self.past is not None and num_drafts > 0:
            num_drafts = min(num_drafts, self.past.width(len(self.texts.rows)))
        if self.auto_off is None or num_drafts == 0:
            return self._round_of(num_drafts)
        drafted = self.auto_off.begin()
        steps = self._round_of(num_drafts if drafted else 0)
        self.auto_off.end(sum(step.accepted + 1 for step in steps.values()) / len(steps))
        for step in steps.values():
            step.is_plain = not drafted
        return steps

    def _round_of(self, num_drafts: int) -> dict[int, Step]:
        """Draft, verify, accept, commit."""
        if self.tree is not None and num_drafts > 0:
            return self._tree_round(num_drafts)
        return self._chain_round(num_drafts)

    def _chain_round(self, num_drafts: int) -> dict[int, Step]:
        """Drafts chains and verifies them. The only wait for the device is the `tolist` below."""
        chain = DraftChain(ids=self.anchor[:, :0])
        if num_drafts > 0:
            chain = draft_chain(
                **self._draft_inputs(),
                num_drafts=num_drafts,
                processors=self.texts.draft_law if self.texts.processors else None,
                # Under "match" the likeliest draft is the best one at every temperature.
                do_sample=self.rule in SAMPLED_DRAFTS,
            )
            num_drafts = chain.ids.shape[1]
            if self.texts.ids.shape[0] > 1:
                self._compact_if_worthwhile()
        draft_ids = chain.ids.to(self.texts.device)
        self.texts.write(draft_ids, ahead=0)
        positions = self.anchor_positions + torch.arange(num_drafts + 1, device=self.texts.device)
        outputs = self._forward(torch.cat([self.anchor, draft_ids], dim=1), positions, num_logits=num_drafts + 1)
        logits = self.texts.law(outputs.logits[:, -num_drafts - 1 :])
        if self.rule in SAMPLED_DRAFTS and num_drafts > 0:
            accept = SAMPLED_DRAFTS[self.rule]
            accepted, own = accept(draft_ids, chain.logits.to(logits.device), logits)
        else:
            accepted, own = accept_match(draft_ids, self.texts.pick(logits).to(draft_ids.device))
        read = torch.cat([accepted[:, None], own[:, None], draft_ids], dim=1).tolist()
        self.clock.mark("verify")
        steps = {
            row: Step(drafts, kept, token, **details_of(chain, i))
            for i, (row, (kept, token, *drafts)) in enumerate(zip(self.texts.rows, read))
        }
        if self.past is not None and num_drafts > 0:
            self.past.note(num_drafts, [step.accepted for step in steps.values()])
        for row, step in steps.items():
            self.texts.end_at_stop(row, step)
        # Columns for the longest continuation that is still needed; the mask hides them where less was kept.
        kept = max(step.accepted for step in steps.values())
        drop_last(self.cache, num_drafts - kept)
        self._collect_context(
            self.taps.read(outputs, kept + 1, device=self.drafter.device), positions[..., : kept + 1]
        )
        return self._commit(steps, accepted, own[:, None], kept=kept)

    def _tree_round(self, max_depth: int) -> dict[int, Step]:
        """Drafts a tree and verifies it. The only wait for the device is the `tolist` below."""
        temperature = self.runs[0].temperature or 1.0
        tree = draft_tree(**self._draft_inputs(), shape=self.tree, max_depth=max_depth, temperature=temperature)
        device = self.texts.device
        tokens, parents, depths = (value.to(device) for value in (tree.tokens, tree.parents, tree.depths))
        ancestors = tree.ancestors().to(device)
        num_rows = tokens.shape[1] + 1
        positions = self.anchor_positions + F.pad(depths, (1, 0))
        outputs = self._forward(
            torch.cat([self.anchor, tokens], dim=1),
            positions,
            num_logits=num_rows,
            mask=self.tree_mask.behind(self.columns, ancestors),
        )
        logits = self.texts.tree_law(outputs.logits[:, -num_rows:], tokens, parents)
        accepted, own, path = accept_tree(tokens, parents, ancestors, self.texts.pick(logits).to(device))
        read = torch.cat([accepted, own, path[0], tokens[0], parents[0]]).tolist()
        self.clock.mark("verify")
        kept, token, path, nodes = read[0], read[1], read[2 : 2 + num_rows], read[2 + num_rows :]
        step = Step(
            draft_ids=nodes[: num_rows - 1],
            parents=[row - 1 for row in nodes[num_rows - 1 :]],
            path=[row - 1 for row in path[1 : kept + 1]],
            accepted=kept,
            own_id=token,
            **details_of(tree),
        )
        self.texts.write(self.texts.ids.new_tensor([step.accepted_ids]), ahead=0)
        self.texts.end_at_stop(0, step)
        rows = torch.tensor([0, *(node + 1 for node in step.path)], device=device)
        keep_rows(self.cache, num_rows, rows)
        self._collect_context(self.taps.read(outputs, rows, device=self.drafter.device), positions[..., rows])
        return self._commit({0: step}, accepted, own[:, None], kept=step.accepted)

    def _collect_context(self, taps: torch.Tensor, positions: torch.Tensor) -> None:
        """Takes what the target says of committed rows, `[B, m, L * D]`; the next draft reads all that has come since the last."""
        if self.context is None or self.width == 0:
            # Without drafting nobody reads it.
            self.context, self.context_positions = taps, positions
        else:
            self.context = torch.cat([self.context, taps], dim=1)
            self.context_positions = torch.cat([self.context_positions, positions], dim=-1)

    def _draft_inputs(self) -> dict[str, Any]:
        """What every way of drafting needs; the context counts as read."""
        context, self.context = self.context, None
        device, block_size = self.drafter.device, self.drafter.config.block_size
        block = self.anchor_positions + torch.arange(block_size, device=self.texts.device)
        positions = torch.cat([self.context_positions, block], dim=-1)
        if positions.dim() == 3:
            # A vision-language target has one row of positions per axis; for text they agree.
            positions = positions[0]
        mask = None if self.mask is None else self.mask[:, self.offset : self.columns + block_size].to(device)
        return {
            "drafter": self.drafter,
            "view": self.view,
            "cache": self.draft_cache,
            "prefix_ids": self.anchor,
            "context_hidden_states": context.to(self.drafter.dtype),
            "position_ids": positions.to(device),
            "clock": self.clock,
            "attention_mask": mask,
            "details": self.drafter.record_details,
            "options": self.options,
            "costs": self.costs,
        }

    def _forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, *, num_logits: int, mask: torch.Tensor | None = None
    ):
        """The target over `input_ids`, behind the columns of its cache; without `mask` they see all that is not hidden."""
        kwargs = {self.keyword: self.cache, **self.taps.forward_kwargs, **self.view.logits_of_last(num_logits)}
        if mask is None and self.mask is not None:
            mask = self.mask[:, : self.columns + input_ids.shape[1]]
        self.taps.listen()
        with grouped_heads(self.view.target):
            return self.view.target(
                input_ids=input_ids, attention_mask=mask, position_ids=positions, use_cache=True, **kwargs
            )

    def _commit(
        self, steps: dict[int, Step], accepted: torch.Tensor, own: torch.Tensor, *, kept: int
    ) -> dict[int, Step]:
        """Takes the tokens of a round into the texts, and lets go of the sequences that end.

        Args:
            steps: of the open sequences; returned.
            accepted: drafts kept, `[B]`, on the device.
            own: the next anchors, `[B, 1]`.
            kept: columns behind the anchor's that the round leaves in the caches.
        """
        if self.mask is not None and kept > 0:
            behind = torch.arange(kept + 1, device=self.texts.device)
            self.mask[:, self.columns : self.columns + kept + 1] = behind <= accepted[:, None]
        self.columns += kept + 1
        self.anchor = own
        self.anchor_positions = self.anchor_positions + accepted[:, None] + 1
        num_open = len(self.texts.rows)
        still_open = self.texts.commit(steps)
        if 0 < len(still_open) < num_open:
            self._keep_sequences(torch.tensor(still_open, device=self.texts.device))
        self.clock.mark("commit")
        seconds = self.clock.take()
        for step in steps.values():
            step.stage_seconds = seconds
        return steps

    def _keep_sequences(self, kept: torch.Tensor) -> None:
        """Drops the ended sequences from everything the models work on; they cost nothing from here on."""
        self.cache.batch_select_indices(kept)
        self.draft_cache.select_sequences(kept)
        self.anchor, self.mask = self.anchor[kept], self.mask[kept]
        self.anchor_positions = self.anchor_positions[..., kept, :]
        self.context = self.context[kept.to(self.context.device)]
        self.context_positions = self.context_positions[..., kept, :]

    def _compact_if_worthwhile(self) -> None:
        """Moves the visible columns of both caches together, once too many are hidden.

        Called right after drafting, when the drafter's store has caught up with the target's cache.
        """
        longest = self.texts.longest - 1
        if self.columns <= HIDDEN_SHARE * longest + HIDDEN_SLACK:
            return
        # Stable, so the visible columns keep their order; where a sequence is shorter, hidden ones stay in front.
        order = self.mask[:, : self.columns].argsort(dim=1, stable=True)[:, -longest:]
        compact(self.cache, order)
        self.draft_cache.gather(order)
        visible = self.mask.gather(1, order)
        self.mask.fill_(1)
        self.mask[:, :longest] = visible
        self.columns = longest
