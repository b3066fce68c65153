"""Drafting: from the anchor and the committed context to a block of proposals.

One bidirectional pass of the backbone over [anchor, MASK, ...] gives base logits for the whole block; the Domino head
then corrects them causally, token by token (section 3.2 of https://huggingface.co/papers/2605.29707). Nothing here
waits for the device: the ids stay on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .tree_domino import DraftTree, TreeShape


@dataclass
class DraftChain:
    """A chain of n drafts.

    Args:
        ids: `[B, n]`.
        logits: the processed logits the ids were sampled from, `[B, n, V]` in fp32; `None` for greedy drafts.
        base_ids, probabilities, base_probabilities: `[B, n]`, only when details are asked for.
    """

    ids: torch.Tensor
    logits: torch.Tensor | None = None
    base_ids: torch.Tensor | None = None
    probabilities: torch.Tensor | None = None
    base_probabilities: torch.Tensor | None = None


def draft_chain(
    drafter,
    view,
    cache,
    *,
    prefix_ids: torch.Tensor,
    context_hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    num_drafts: int,
    clock,
    attention_mask: torch.Tensor | None = None,
    processors=None,
    do_sample: bool = False,
    generator: torch.Generator | None = None,
    details: bool = False,
) -> DraftChain:
    """Drafts the next `num_drafts` tokens.

    Args:
        drafter (`DominoDraftModel`): backbone and head.
        view (`TargetView`): embeddings and output head of the target.
        cache (`DominoCache`): the drafter's context store; the new context is committed to it.
        prefix_ids: tokens in front of the drafts, the anchor last, `[B, m]`; the processors read them.
        context_hidden_states: taps of the tokens committed since the last draft, `[B, S', L * D]`.
        position_ids: their positions and those of the block, `[B, S' + K]`.
        num_drafts (`int`): how many drafts to return (the block always has its trained size).
        clock (`StageClock`): books the stages.
        attention_mask: 1 for real tokens of context and block, `[B, S + K]`; `None` without padding.
        processors (`Callable`, *optional*): applied to each draft's logits `[B, V]`, with `prefix_ids` and the drafts
            before it.
        do_sample (`bool`): sample the drafts instead of taking the most likely ones.
        details (`bool`): also what the backbone alone would have picked, and the probabilities.

    Returns:
        [`DraftChain`].
    """
    hidden, anchor_embeds, base_logits = _read_block(
        drafter, view, cache, prefix_ids, context_hidden_states, position_ids, num_drafts, clock, attention_mask
    )
    chain = _roll_out(
        drafter.head, view, hidden, base_logits, anchor_embeds, prefix_ids, processors, do_sample, generator, details
    )
    clock.mark("domino_head")
    return chain


def draft_tree(
    drafter,
    view,
    cache,
    *,
    prefix_ids: torch.Tensor,
    context_hidden_states: torch.Tensor,
    position_ids: torch.Tensor,
    shape: TreeShape,
    max_depth: int,
    clock,
    attention_mask: torch.Tensor | None = None,
    temperature: float = 1.0,
    details: bool = False,
) -> DraftTree:
    """Drafts a tree whose nodes are the likeliest continuations by path probability.

    Args (beside those of [`draft_chain`]):
        shape (`TreeShape`): budget and width of the tree.
        max_depth (`int`): longest path.
        temperature (`float`): of the target's sampling; nodes are ranked by the tempered probabilities.

    Returns:
        [`DraftTree`] of one sequence.
    """
    hidden, anchor_embeds, base_logits = _read_block(
        drafter, view, cache, prefix_ids, context_hidden_states, position_ids, max_depth, clock, attention_mask
    )
    tree = _grow(drafter.head, view, hidden, base_logits, anchor_embeds, shape, temperature, details)
    clock.mark("domino_head")
    return tree


def _read_block(
    drafter, view, cache, prefix_ids, context_hidden_states, position_ids, num_drafts, clock, attention_mask
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One pass of the backbone: hidden states `[B, n, D]`, the anchor's embedding `[B, D]`, base logits `[B, n, V]`."""
    config = drafter.config
    anchor = prefix_ids[:, -1:]
    num_new = context_hidden_states.shape[1]
    drafter.append_context(context_hidden_states, position_ids[:, :num_new], cache)
    clock.mark("context")

    masks = anchor.new_full((anchor.shape[0], config.block_size - 1), config.mask_token_id)
    noise_embeds = view.embed(torch.cat([anchor, masks], dim=1), like=context_hidden_states)
    hidden = drafter(
        noise_embeds, position_ids=position_ids[:, num_new:], attention_mask=attention_mask, cache=cache
    ).last_hidden_state
    hidden = hidden[:, config.first_draft_slot : config.first_draft_slot + num_drafts]
    clock.mark("backbone")

    base_logits = view.base_logits(hidden)
    clock.mark("base_head")
    return hidden, noise_embeds[:, 0], base_logits


def _roll_out(
    head, view, hidden, base_logits, anchor_embeds, prefix_ids, processors, do_sample, generator, details
) -> DraftChain:
    """Picks the drafts one after the other, each from base logits corrected with the tokens picked before it."""
    ids = prefix_ids
    prefix_length = prefix_ids.shape[1]
    state = head.initial_state(ids.shape[0]) if head is not None else None
    token_embeds = anchor_embeds
    picked, processed, probabilities = [], [], []
    for i in range(base_logits.shape[1]):
        logits = base_logits[:, i]
        if head is not None:
            state = head.advance(state, token_embeds)
            if i >= head.prefix_len:
                logits = head.correct(logits, hidden[:, i], state)
        if processors or do_sample:
            logits = logits.float()
        if processors:
            # A processor may write into what it is given, and the base logits are still needed.
            logits = processors(ids, logits.clone())
        if do_sample:
            token = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
            processed.append(logits)
        else:
            token = logits.argmax(dim=-1, keepdim=True)
        if details:
            probabilities.append(logits.float().softmax(dim=-1).gather(1, token))
        picked.append(token)
        if processors:
            ids = torch.cat([ids, token.to(ids.device)], dim=1)
        if head is not None and i + 1 < base_logits.shape[1]:
            token_embeds = view.embed(token, like=hidden).squeeze(1)
    draft_ids = torch.cat(picked, dim=1) if picked else ids[:, prefix_length:]
    chain = DraftChain(ids=draft_ids, logits=torch.stack(processed, dim=1) if processed else None)
    if details and picked:
        chain.base_ids = base_logits.argmax(dim=-1)
        chain.probabilities = torch.cat(probabilities, dim=1)
        chain.base_probabilities = base_logits.float().softmax(-1).gather(2, draft_ids[..., None]).squeeze(2)
    return chain


def _grow(head, view, hidden, base_logits, anchor_embeds, shape: TreeShape, temperature, details) -> DraftTree:
    """Frontier search: every lane of a depth at once, then one sort over all that was seen.

    A child never scores above its parent, so the best N entries of the ledger are closed under "parent" and, sorted
    stably, in topological order. With as many lanes as nodes this is best-first search.
    """
    base = base_logits[0].float() / temperature
    base_log_z = base.logsumexp(dim=-1)
    # The likeliest candidates get a correction; the others keep their base logits and count in the normaliser only.
    logits, ids = base.topk(min(shape.candidates, base.shape[-1]), dim=-1)
    tail = base_log_z + torch.log1p(-(logits.logsumexp(dim=-1) - base_log_z).exp().clamp(max=1.0))
    children = min(shape.children, ids.shape[1])

    state = head.initial_state(1) if head is not None else None
    embeds, lane_scores, lane_rows = anchor_embeds, base.new_zeros(1), ids.new_zeros(1)
    ledger, rows_before = [], 1
    for depth in range(base.shape[0]):
        corrected = logits[depth].expand(lane_scores.shape[0], -1)
        if head is not None:
            state = head.advance(state, embeds)
            if depth >= head.prefix_len:
                slot = hidden[0, depth].expand(state.shape[0], -1)
                corrected = head.correct(corrected * temperature, slot, state, ids[depth]) / temperature
        log_z = torch.logaddexp(corrected.logsumexp(dim=-1), tail[depth])
        # A drafter that computes NaN ranks last: its tree must still be a tree.
        steps = (corrected - log_z[:, None]).nan_to_num(nan=-torch.inf).clamp(max=0.0)
        best, order = (value[:, :children] for value in steps.sort(dim=-1, descending=True, stable=True))
        tokens = ids[depth][order]
        scores = (lane_scores[:, None] + best).flatten()
        entry = {"tokens": tokens, "parents": lane_rows[:, None].expand_as(tokens), "scores": scores}
        entry["depths"] = torch.full_like(tokens, depth + 1)
        if details:
            entry["base_ids"] = ids[depth, 0].expand_as(tokens)
            entry["probabilities"] = best.exp()
            entry["base_probabilities"] = (logits[depth][order] - base_log_z[depth]).exp()
        ledger.append({name: value.flatten() for name, value in entry.items()})
        kept = scores.argsort(descending=True, stable=True)[: shape.lanes]
        lane_scores, lane_rows = scores[kept], rows_before + kept
        rows_before += scores.shape[0]
        if head is not None and depth + 1 < base.shape[0]:
            state = state[kept // children]
            embeds = view.embed(tokens.flatten()[kept][None], like=hidden)[0]
    return _best_nodes(ledger, shape.nodes)


def _best_nodes(ledger: list[dict[str, torch.Tensor]], num_nodes: int) -> DraftTree:
    """The `num_nodes` best entries of the ledger as a tree; parents are renumbered to rows of the tree."""
    entries = {name: torch.cat([entry[name] for entry in ledger]) for name in ledger[0]}
    order = entries["scores"].argsort(descending=True, stable=True)[:num_nodes]
    row_of = order.new_zeros(entries["scores"].shape[0] + 1)
    row_of[order + 1] = torch.arange(1, order.shape[0] + 1, device=order.device)
    chosen = {name: value[order][None] for name, value in entries.items()}
    chosen["parents"] = row_of[chosen["parents"]]
    return DraftTree(**chosen)
