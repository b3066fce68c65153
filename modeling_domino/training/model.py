"""The module that is trained: drafter and head behind one forward, so that DDP and FSDP see every parameter used.

It runs the frozen target for its taps, the backbone over all blocks of a sequence side by side, the head teacher forced
(or on its own picks), and sums the objective. Sections 3.1 to 3.3 of https://huggingface.co/papers/2605.29707; notation
as in modeling_domino.py, with A blocks of a sequence and M draft positions that are scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from ..taps_domino import TargetTaps
from ..target_domino import TargetView
from .losses import blend, cross_entropy, position_losses


# Rows of the statistics: sums over blocks, for each draft of the block.
STATS = ("count", "weight", "final_hits", "base_hits", "final_ce", "base_ce", "whole", "final_prefix", "base_prefix")


@dataclass
class BlockOutput:
    """What one forward gives.

    Args:
        loss_sum: the weighted sum of the objective over the batch, scalar.
        stats: sums over blocks, `[len(STATS), n]`, without gradient.
    """

    loss_sum: torch.Tensor
    stats: torch.Tensor


def block_mask_rule(anchors: torch.Tensor, anchor_mask: torch.Tensor, num_context: int, block_size: int):
    """Who sees whom, as a function (batch, head, query, key) -> bool for FlexAttention or a dense grid.

    A query sees the context strictly before its anchor, by position, and its own block both ways (section 3.1).
    """
    last = anchors.shape[1] - 1

    def sees(batch, head, query, key):
        # FlexAttention asks beyond the end as well, to fill its last tile.
        block = (query // block_size).clamp(max=last)
        in_context = (key < num_context) & (key < anchors[batch, block])
        in_block = (key >= num_context) & ((key - num_context) // block_size == query // block_size)
        # Blocks of padding see themselves only, so that no softmax is empty.
        return in_block | (in_context & anchor_mask[batch, block])

    return sees


def dense_block_mask(anchors: torch.Tensor, anchor_mask: torch.Tensor, num_context: int, block_size: int):
    """The rule as a boolean mask `[B, 1, A * K, S + A * K]` for SDPA."""
    batch, num_blocks = anchors.shape
    length = num_blocks * block_size
    grid = torch.arange(num_context + length, device=anchors.device)
    sees = block_mask_rule(anchors, anchor_mask, num_context, block_size)
    rows = torch.arange(batch, device=anchors.device)[:, None, None]
    return sees(rows, 0, grid[None, :length, None], grid[None, None, :])[:, None]


def flex_block_mask(anchors: torch.Tensor, anchor_mask: torch.Tensor, num_context: int, block_size: int):
    """The rule as a `BlockMask` for FlexAttention, which skips the tiles that nobody sees."""
    from torch.nn.attention.flex_attention import create_block_mask

    sees = block_mask_rule(anchors, anchor_mask, num_context, block_size)
    length = anchors.shape[1] * block_size
    return create_block_mask(sees, len(anchors), None, length, num_context + length, device=anchors.device)


class DominoTrainingModel(nn.Module):
    """Drafter and objective; the frozen target is used, not owned (it is neither saved nor sharded nor trained).

    Args:
        drafter (`DominoDraftModel`): trained, with its head.
        target (`PreTrainedModel`): frozen, in evaluation mode.
        args (`DominoTrainingArguments`): objective, scoring vocabulary, arms.
        scored_ids (`list[int]`, *optional*): tokens the loss scores in training, beside the labels; `None` for all.

    Attributes:
        lam (`float`): the curriculum's weight of the base loss, set by the trainer before a step.
    """

    def __init__(self, drafter: nn.Module, target: nn.Module, args, scored_ids: list[int] | None = None):
        super().__init__()
        target.requires_grad_(False)
        self.drafter = drafter
        self.view = TargetView(target, drafter.config)
        self.args = args
        self.lam = 1.0
        self._scored_ids = None if scored_ids is None else torch.tensor(sorted(scored_ids), device=drafter.device)
        # Set on the running model only: a saved drafter is loaded with SDPA.
        drafter.config._attn_implementation = "flex_attention" if args.flex_attention else "sdpa"
        self.freeze()

    def freeze(self) -> None:
        """Sets which parameters are trained (`trainable`)."""
        if self.args.trainable == "head" and not self.drafter.config.has_head:
            raise ValueError(
                '`trainable="head"` needs a drafter with a Domino head, this one is a DFlash drafter without; start from '
                "it with `--init-from` and a head (`--gru-hidden-dim`, `--emb-dim`)."
            )
        for name, parameter in self.drafter.named_parameters():
            in_head = name.startswith(("prefix_gru.", "embed_proj."))
            parameter.requires_grad_(in_head or self.args.trainable == "all")

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        anchors: torch.Tensor,
        anchor_mask: torch.Tensor,
        prefix_ids: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
    ) -> BlockOutput:
        """The objective of a batch of blocks, see `collate_blocks` for the shapes."""
        taps, last_hidden = self.read_target(input_ids, attention_mask)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.args.trainable == "all"):
            hidden = self.run_backbone(input_ids, taps, anchors, anchor_mask)
        # Blocks of padding leave here; the vocabulary is what costs.
        hidden, labels, prefix_ids, weights = (x[anchor_mask] for x in (hidden, labels, prefix_ids, weights))
        scored = self._select_scored(labels)
        base = self._base_logits(hidden, scored)
        final = self._final_logits(base, hidden, prefix_ids, scored)
        target_probs = None
        if self.args.objective != "ce" and self.training:
            logits = self._target_logits(last_hidden, anchors, anchor_mask, labels.shape[1], scored)
            target_probs = logits.float().softmax(-1)
        return self._objective(base, final, scored.index(labels), weights, target_probs)

    @torch.no_grad()
    def both_logits(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafter's and the target's logits of every draft over the whole vocabulary, `[N, n, V]`; see `forward`."""
        taps, last_hidden = self.read_target(batch["input_ids"], batch["attention_mask"])
        anchors, anchor_mask = batch["anchors"], batch["anchor_mask"]
        hidden = self.run_backbone(batch["input_ids"], taps, anchors, anchor_mask)[anchor_mask]
        everything = ScoredVocabulary(None, self.drafter.config.vocab_size)
        base = self._base_logits(hidden, everything)
        final = self._final_logits(base, hidden, batch["prefix_ids"][anchor_mask], everything)
        return final, self._target_logits(last_hidden, anchors, anchor_mask, hidden.shape[1], everything)

    @torch.no_grad()
    def read_target(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Taps `[B, S, L * D]` in the drafter's dtype, and the target's last hidden states `[B, S, D]`."""
        drafter = self.drafter
        # Hooks on every layer: the decoder is called without its output head, whose logits nobody needs.
        with TargetTaps(self.view.layers, drafter.config.target_layer_ids, use_hooks=True) as taps:
            outputs = self.view.target.get_decoder()(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False
            )
            states = taps.read(outputs, device=drafter.device)
        return states.to(drafter.dtype), outputs.last_hidden_state

    def run_backbone(
        self, input_ids: torch.Tensor, taps: torch.Tensor, anchors: torch.Tensor, anchor_mask: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states of all drafts of all blocks, in draft order: `[B, A, n, D]`."""
        config = self.drafter.config
        batch, num_blocks = anchors.shape
        num_context, block_size = input_ids.shape[1], config.block_size
        noise_ids = input_ids.new_full((batch, num_blocks, block_size), config.mask_token_id)
        noise_ids[:, :, 0] = input_ids.gather(1, anchors)
        offsets = torch.arange(block_size, device=anchors.device)
        positions = torch.cat(
            [
                torch.arange(num_context, device=anchors.device).expand(batch, -1),
                (anchors[..., None] + offsets).flatten(1),
            ],
            dim=1,
        )
        make_mask = flex_block_mask if self.args.flex_attention else dense_block_mask
        hidden = self.drafter(
            self.view.embed(noise_ids.flatten(1), like=taps),
            context_hidden_states=taps,
            position_ids=positions,
            attention_mask=make_mask(anchors, anchor_mask, num_context, block_size),
        ).last_hidden_state
        first = config.first_draft_slot
        return hidden.view(batch, num_blocks, block_size, -1)[:, :, first : first + config.num_draft_tokens]

    def _select_scored(self, labels: torch.Tensor) -> ScoredVocabulary:
        """All tokens in evaluation; in training the frequent ones, some random others, and always the labels."""
        if self._scored_ids is None or not self.training:
            return ScoredVocabulary(None, self.drafter.config.vocab_size)
        vocab_size = self.drafter.config.vocab_size
        chosen = torch.zeros(vocab_size, dtype=torch.bool, device=labels.device)
        chosen[self._scored_ids.to(labels.device)] = True
        if self.args.score_negatives:
            chosen[torch.randint(vocab_size, (self.args.score_negatives,), device=labels.device)] = True
        chosen[labels.flatten()] = True
        return ScoredVocabulary(chosen.nonzero().squeeze(1), vocab_size)

    def _base_logits(self, hidden: torch.Tensor, scored: ScoredVocabulary) -> torch.Tensor:
        """The target's output head over the drafts' hidden states `[N, n, D]`: `[N, n, V']`."""
        if scored.ids is None:
            return self.view.base_logits(hidden)
        rows = self.view.target.get_output_embeddings().weight[scored.ids]
        return F.linear(hidden.to(rows.dtype), rows)

    def _final_logits(
        self, base: torch.Tensor, hidden: torch.Tensor, prefix_ids: torch.Tensor, scored: ScoredVocabulary
    ) -> torch.Tensor:
        """Base logits corrected by the head, from the true tokens or (TTT) from its own picks."""
        head = self.drafter.head
        if head is None:
            return base
        if scored.ids is not None:
            head = head.restricted(scored.rows_of)
        if not self.args.ttt:
            return head.teacher_forced(base, hidden, self.view.embed(prefix_ids, like=self.drafter.fc.weight))
        return self._self_fed_logits(head, base, hidden, prefix_ids[:, :1], scored)

    def _self_fed_logits(self, head, base, hidden, picked: torch.Tensor, scored: ScoredVocabulary) -> torch.Tensor:
        """The TTT arm: each step consumes the argmax of the corrected logits before it (section 4 of the paper)."""
        state = head.initial_state(len(base))
        corrected = []
        for i in range(base.shape[1]):
            state = head.advance(state, self.view.embed(picked, like=self.drafter.fc.weight).squeeze(1))
            logits = base[:, i]
            if i >= head.prefix_len:
                logits = head.correct(logits, hidden[:, i], state)
            corrected.append(logits)
            picked = scored.ids_of(logits.detach().argmax(dim=-1, keepdim=True))
        return torch.stack(corrected, dim=1)

    @torch.no_grad()
    def _target_logits(self, last_hidden, anchors, anchor_mask, num_drafts: int, scored) -> torch.Tensor:
        """The target's logits of every draft over the scored tokens, `[N, n, V']`."""
        logits = self._base_logits(last_hidden, scored)
        offsets = torch.arange(num_drafts, device=anchors.device)
        # The law of the token at a + 1 + i stands at position a + i; behind the end the weights are 0.
        positions = (anchors[..., None] + offsets).clamp(max=last_hidden.shape[1] - 1)
        rows = torch.arange(len(anchors), device=anchors.device)[:, None, None].expand_as(positions)
        return logits[rows[anchor_mask], positions[anchor_mask]]

    def _objective(self, base, final, labels, weights, target_probs) -> BlockOutput:
        """Sums of loss and statistics over blocks; `base` and `final` `[N, n, V']`, the others `[N, n, ...]`."""
        shape = labels.shape
        flat_labels, flat_weights = labels.flatten(), weights.flatten().float()
        final_log_probs = final.float().log_softmax(-1).flatten(0, 1)
        # Without gradient where the curriculum gives the base loss no weight: it is then only reported.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.lam > 0):
            base_log_probs = final_log_probs if base is final else base.float().log_softmax(-1).flatten(0, 1)
        kind = {
            "objective": self.args.objective if target_probs is not None else "ce",
            "soft_weight": self.args.soft_weight,
        }
        soft = None if target_probs is None else target_probs.flatten(0, 1)
        final_loss = position_losses(final_log_probs, flat_labels, soft, **kind)
        base_loss = position_losses(base_log_probs, flat_labels, soft, **kind)
        loss_sum = blend(final_loss, base_loss, flat_weights, self.lam)
        with torch.no_grad():
            stats = block_statistics(
                weights.float(),
                final_log_probs.argmax(-1).view(shape) == labels,
                base_log_probs.argmax(-1).view(shape) == labels,
                cross_entropy(final_log_probs, flat_labels).view(shape),
                cross_entropy(base_log_probs, flat_labels).view(shape),
            )
        return BlockOutput(loss_sum, stats)


@dataclass
class ScoredVocabulary:
    """The tokens that the loss scores: `ids` `[V']` in rising order, or `None` for the whole vocabulary."""

    ids: torch.Tensor | None
    vocab_size: int

    def index(self, tokens: torch.Tensor) -> torch.Tensor:
        """Where `tokens` stand among the scored ones."""
        if self.ids is None:
            return tokens
        return torch.searchsorted(self.ids, tokens.contiguous())

    def rows_of(self, last: nn.Linear) -> SimpleNamespace:
        """The last layer of a correction with the scored tokens alone, as weight and bias that carry gradients."""
        return SimpleNamespace(weight=last.weight[self.ids], bias=None if last.bias is None else last.bias[self.ids])

    def ids_of(self, indices: torch.Tensor) -> torch.Tensor:
        """The tokens at `indices` of the scored ones."""
        return indices if self.ids is None else self.ids[indices]


def block_statistics(weights, final_hits, base_hits, final_ce, base_ce) -> torch.Tensor:
    """Sums over N blocks of what is reported, by draft; all arguments `[N, n]`, result `[len(STATS), n]`.

    Blocks that the end of the sequence cuts count in the accuracy of the drafts they have, and not in the acceptance
    length ("whole", "..._prefix"), where they would pass for rejected drafts.
    """
    inside = weights > 0
    whole = inside[:, -1:].expand_as(inside)
    rows = {
        "count": inside,
        "weight": weights,
        "final_hits": final_hits & inside,
        "base_hits": base_hits & inside,
        "final_ce": final_ce * inside,
        "base_ce": base_ce * inside,
        "whole": whole,
        "final_prefix": final_hits.cumprod(1) * whole,
        "base_prefix": base_hits.cumprod(1) * whole,
    }
    return torch.stack([rows[name].float().sum(0) for name in STATS])
