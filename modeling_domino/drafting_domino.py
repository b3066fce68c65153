"""Drafting: from the anchor and the committed context to a block of proposals.

One bidirectional pass of the backbone over [anchor, MASK, ...] gives base logits for the whole block; the Domino head
then corrects them causally, token by token (section 3.2 of https://huggingface.co/papers/2605.29707). Nothing here
waits for the device: the ids stay on it.

A draft is chosen from all tokens, from those of a draft vocabulary, or from a shortlist: only the likeliest of the base
logits are corrected then. A sampled draft's law is the softmax over what it is chosen from, and zero elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from .head_domino import DominoHead
from .kernels_domino import head_weights, roll_out, tree_functions
from .ops_domino import gather_rows, gru_gates, hidden_features, pick, shortlist, tree_expand, tree_step
from .sizing_domino import may_shorten
from .tree_domino import DraftTree, TreeShape
from .vocabulary_domino import DraftVocabulary


# Processors that look at the scores alone.
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

# On a CPU, correcting the whole vocabulary costs as much as the backbone, and so many candidates lose nothing measurable.
CPU_CANDIDATES = 64


@dataclass(frozen=True)
class DraftOptions:
    """How drafts are chosen, whatever the drafter's weights.

    Args:
        candidates: tokens per draft that are corrected and chosen from (M), 0 for all. Trees have their own in
            [`TreeShape`].
        vocabulary (`DraftVocabulary`, *optional*): the tokens that can be drafted; by default all.
        temperatures: what the logits of each draft are divided by.
    """

    candidates: int = 0
    vocabulary: DraftVocabulary | None = None
    temperatures: tuple[float, ...] | None = None

    def scales(self, num_drafts: int, temperature: float = 1.0) -> list[float]:
        """What the logits of each draft are divided by, the target's temperature included."""
        return [temperature * own for own in (self.temperatures or (1.0,) * num_drafts)[:num_drafts]]


def resolve_options(drafter, *, candidates: int | None = None, draft_vocab: int | None = None, processors=None):
    """The options of a run: what was asked for, or else the drafter's config, or else what suits its device.

    Args:
        candidates (`int`, *optional*): 0 for the whole vocabulary. By default 64 on a CPU, unless processors read the
            text: what those rule out may be the whole shortlist.
        draft_vocab (`int`, *optional*): how many of the drafter's ranked tokens to draft from; 0 for the whole vocabulary.
        processors (*optional*): the processors of the run.

    Returns:
        [`DraftOptions`].

    Raises:
        ValueError: for numbers that cannot be, or a draft vocabulary of a drafter that has no ranking.
    """
    config = drafter.config
    for name, value in (("candidates", candidates), ("draft_vocab", draft_vocab)):
        if value is not None and (type(value) is not int or value < 0):
            raise ValueError(f"`{name}` must be a number of tokens, 0 for the whole vocabulary, got {value!r}.")
    if candidates is None:
        candidates = config.draft_candidates
    if candidates is None:
        plain = all(type(processor) in SCORE_ONLY_PROCESSORS for processor in processors or [])
        candidates = CPU_CANDIDATES if drafter.device.type == "cpu" and plain else 0
    if draft_vocab is None:
        draft_vocab = config.draft_vocab
    vocabulary = None
    if draft_vocab:
        if drafter.draft_ranking is None:
            raise ValueError(
                f"`draft_vocab` needs the drafter's ranking of tokens, {config._name_or_path or 'this drafter'} has none: "
                "make one with `domino draft-vocab`, or leave it out."
            )
        if draft_vocab < config.vocab_size:
            ids = torch.tensor(drafter.draft_ranking[:draft_vocab], device=drafter.device)
            vocabulary = DraftVocabulary(ids)
    temperatures = None if config.draft_temperatures is None else tuple(config.draft_temperatures)
    return DraftOptions(candidates, vocabulary, temperatures)


@dataclass
class DraftChain:
    """A chain of n drafts.

    Args:
        ids: `[B, n]`.
        logits: the processed logits the ids were sampled from, `[B, n, V]` in fp32; `None` for greedy drafts.
        probabilities: of each draft given those before it, `[B, n]`; only when details or sizes are asked for.
        base_ids, base_probabilities: `[B, n]`, only when details are asked for.
    """

    ids: torch.Tensor
    logits: torch.Tensor | None = None
    base_ids: torch.Tensor | None = None
    probabilities: torch.Tensor | None = None
    base_probabilities: torch.Tensor | None = None

    def first(self, num_drafts: int) -> DraftChain:
        """The chain of the first drafts alone."""
        return DraftChain(**{k: None if v is None else v[:, :num_drafts] for k, v in vars(self).items()})


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
    options: DraftOptions = DraftOptions(),
    costs=None,
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
        options ([`DraftOptions`]): what drafts are chosen from.
        costs (`Costs`, *optional*): leave out the last drafts where verifying them does not pay; not for sampled drafts,
            whose number must not depend on what was drawn.

    Returns:
        [`DraftChain`].
    """
    block = _read_block(
        drafter,
        view,
        cache,
        prefix_ids,
        context_hidden_states,
        position_ids,
        num_drafts,
        clock,
        attention_mask,
        options,
    )
    sized = costs is not None and not do_sample and may_shorten(costs, num_drafts, prefix_ids.shape[0])
    drafts = None
    if not (processors or do_sample or details):
        drafts = roll_out(
            drafter,
            view,
            block.head,
            base_logits=block.logits,
            hidden=block.hidden,
            anchors=prefix_ids[:, -1],
            candidates=options.candidates,
            vocabulary=block.ids,
            want_probabilities=sized,
            calibrated=options.temperatures is not None,
        )
    if drafts is not None:
        chain = DraftChain(ids=drafts[0], probabilities=drafts[1])
    else:
        chain = _roll_out(
            block, view, prefix_ids, processors, do_sample, generator, details, options, details or sized
        )
    if sized:
        chain = chain.first(costs.best_length(chain.probabilities))
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
    options: DraftOptions = DraftOptions(),
    costs=None,
) -> DraftTree:
    """Drafts a tree whose nodes are the likeliest continuations by path probability.

    Args (beside those of [`draft_chain`]):
        shape (`TreeShape`): budget and width of the tree.
        max_depth (`int`): longest path.
        temperature (`float`): of the target's sampling; nodes are ranked by the tempered probabilities.
        costs (`Costs`, *optional*): take only as many nodes of the budget as pay.

    Returns:
        [`DraftTree`] of one sequence.
    """
    block = _read_block(
        drafter,
        view,
        cache,
        prefix_ids,
        context_hidden_states,
        position_ids,
        max_depth,
        clock,
        attention_mask,
        options,
    )
    scales = options.scales(block.logits.shape[1], temperature)
    functions = tree_functions(drafter, block.head, block.logits)
    tree = _best_nodes(_grow(block, view, shape, scales, details, functions), shape.nodes)
    if costs is not None:
        tree = tree.first(costs.best_nodes(tree.scores))
    clock.mark("domino_head")
    return tree


@dataclass
class Block:
    """What the backbone makes of a block, and what turns it into drafts.

    Args:
        hidden: at the drafts' slots, `[B, n, D]`.
        anchor_embeds: `[B, D]`.
        logits: base logits `[B, n, U]`.
        head: corrects them; `None` for none.
        vocab_size: of the target (V).
        ids: the tokens that the U logits stand for, `[U]`; `None` for the whole vocabulary.
    """

    hidden: torch.Tensor
    anchor_embeds: torch.Tensor
    logits: torch.Tensor
    head: DominoHead | None
    vocab_size: int
    ids: torch.Tensor | None = None

    def tokens(self, places: torch.Tensor) -> torch.Tensor:
        """The tokens at `places` among the U."""
        return places if self.ids is None else self.ids[places]


def _read_block(
    drafter, view, cache, prefix_ids, context_hidden_states, position_ids, num_drafts, clock, attention_mask, options
) -> Block:
    """One pass of the backbone, and the base logits of the first `num_drafts` drafts."""
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

    head, vocabulary = drafter.head, options.vocabulary
    if vocabulary is None:
        block = Block(hidden, noise_embeds[:, 0], view.base_logits(hidden), head, config.vocab_size)
    else:
        logits = vocabulary.base_logits(view.target.get_output_embeddings(), hidden)
        head = None if head is None else head.restricted(vocabulary.correction)
        block = Block(hidden, noise_embeds[:, 0], logits, head, config.vocab_size, vocabulary.ids.to(hidden.device))
    clock.mark("base_head")
    return block


def _roll_out(
    block: Block, view, prefix_ids, processors, do_sample, generator, details, options, want_probabilities
) -> DraftChain:
    """Picks the drafts one after the other, each from base logits corrected with the tokens picked before it."""
    hidden, base_logits, head = block.hidden, block.logits, block.head
    num_drafts, size = base_logits.shape[1:]
    ids = prefix_ids
    prefix_length = prefix_ids.shape[1]
    state = head.initial_state(ids.shape[0]) if head is not None else None
    token_embeds = block.anchor_embeds
    scales = options.scales(num_drafts)
    places, logits = None, base_logits
    if 0 < options.candidates < size:
        # By id, so that equal logits go to the smaller one.
        places = shortlist(base_logits, options.candidates).sort(dim=-1).values  # [B, n, M]
        logits = base_logits.gather(2, places)
    # The mass of what the shortlist leaves out, for probabilities that are those of the whole vocabulary.
    tail = None
    if want_probabilities and places is not None and not do_sample:
        tail = _log_tail(base_logits.float(), logits.float(), scales)
    picked, processed, probabilities = [], [], []
    for i in range(num_drafts):
        row = logits[:, i]
        if head is not None:
            state = head.advance(state, token_embeds)
            if i >= head.prefix_len:
                row = head.correct(row, hidden[:, i], state, None if places is None else places[:, i])
        if scales[i] != 1.0:
            row = row / scales[i]
        tokens = block.ids if places is None else block.tokens(places[:, i])
        if processors or do_sample:
            # A processor may write into what it is given, and the base logits are still needed.
            row = spread(row.float(), tokens, block.vocab_size) if tokens is not None else row.float().clone()
            row = processors(ids, row) if processors else row
        if do_sample:
            if tokens is not None and processors:
                # Where the processors rule out every candidate, any draft will do: the target refuses it.
                row = row.where(row.amax(dim=-1, keepdim=True) > -torch.inf, 0.0)
            token = draw(row, generator=generator)
            processed.append(row)
        else:
            token = pick(row)[:, None]
        if want_probabilities:
            log_z = row.float().logsumexp(dim=-1, keepdim=True)
            if tail is not None and not processors:
                log_z = torch.logaddexp(log_z, tail[:, i, None])
            probabilities.append((row.float().gather(1, token) - log_z).exp())
        if tokens is not None and not (processors or do_sample):
            token = tokens.expand(row.shape).gather(1, token)
        picked.append(token)
        if processors:
            ids = torch.cat([ids, token.to(ids.device)], dim=1)
        if head is not None and i + 1 < num_drafts:
            token_embeds = view.embed(token, like=hidden).squeeze(1)
    draft_ids = torch.cat(picked, dim=1) if picked else ids[:, prefix_length:]
    chain = DraftChain(ids=draft_ids, logits=torch.stack(processed, dim=1) if processed else None)
    if want_probabilities and picked:
        chain.probabilities = torch.cat(probabilities, dim=1)
    if details and picked:
        chain.base_ids = block.tokens(base_logits.argmax(dim=-1))
        whole = base_logits if block.ids is None else spread(base_logits, block.ids, block.vocab_size)
        chain.base_probabilities = whole.float().softmax(-1).gather(2, draft_ids[..., None]).squeeze(2)
    return chain


def _log_tail(base: torch.Tensor, kept: torch.Tensor, scales: list[float]) -> torch.Tensor:
    """Log of the unnormalised mass of the base logits `[B, n, U]` that is not in `kept` `[B, n, M]`: `[B, n]`."""
    if any(scale != 1.0 for scale in scales):
        base = torch.stack([base[:, i] / scale for i, scale in enumerate(scales)], dim=1)
        kept = torch.stack([kept[:, i] / scale for i, scale in enumerate(scales)], dim=1)
    log_z = base.logsumexp(dim=-1)
    return log_z + torch.log1p(-(kept.logsumexp(dim=-1) - log_z).exp().clamp(max=1.0))


def spread(logits: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits of some tokens over the whole vocabulary, -inf elsewhere: `[..., C]` and `[..., C]` or `[C]` to `[..., V]`."""
    full = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return full.scatter_(-1, ids.expand(logits.shape), logits)


def draw(logits: torch.Tensor, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """One token from the softmax of each row of `logits` `[B, V]`: `[B, 1]`.

    Raises:
        ValueError: if a row is no law because the drafter computed NaN.
    """
    law = logits.softmax(dim=-1)
    try:
        return torch.multinomial(law, 1, generator=generator)
    except RuntimeError as error:
        if not law.isnan().any():
            raise
        raise ValueError(
            "The drafter's logits must be numbers to sample drafts from, got NaN: its weights are damaged or overflow in "
            f"{logits.dtype}; load them anew in bfloat16 or float32, or draft greedily with `rule='match'`."
        ) from error


def _grow(
    block: Block, view, shape: TreeShape, scales: list[float], details: bool, functions=(tree_step, tree_expand)
) -> list[dict[str, torch.Tensor]]:
    """Frontier search: every lane of a depth at once, and a ledger of all that was seen, for [`_best_nodes`].

    A child never scores above its parent, so the best N entries of the ledger are closed under "parent" and, sorted
    stably, in topological order. With as many lanes as nodes this is best-first search. `functions` move the lanes and
    give their children.
    """
    head, hidden = block.head, block.hidden
    base = block.logits[0].float()
    # The likeliest candidates get a correction; the others keep their base logits and count in the normaliser only.
    places = shortlist(base, min(shape.candidates, base.shape[-1]))  # [n, M]
    logits = base.gather(1, places)
    tail = _log_tail(base[None], logits[None], scales)[0]
    base_log_z = torch.logaddexp(tail, torch.stack([row / s for row, s in zip(logits, scales)]).logsumexp(-1))
    ids = block.tokens(places)
    children = min(shape.children, ids.shape[1])

    step, expand = functions
    if head is not None:
        weights = head_weights(head)
        state = head.initial_state(1)
        recurrent = state.new_zeros(1, 3 * state.shape[1]) if weights.bias_hh is None else weights.bias_hh[None]
        from_hidden = hidden_features(hidden[0], weights.weight_in, weights.bias_in)  # [n, R]
    embeds, lane_scores, lane_rows = block.anchor_embeds, base.new_zeros(1), ids.new_zeros(1)
    lanes = ids.new_zeros(1)
    ledger, rows_before = [], 1
    for depth, scale in enumerate(scales):
        features, rows, biases = None, base.new_zeros(ids.shape[1], 1), None
        if head is not None:
            gates = gru_gates(embeds, weights.weight_ih, weights.bias_ih)
            state, recurrent, features = step(gates, lanes, state, recurrent, from_hidden[depth], weights)
            if depth < head.prefix_len:
                features = None
            else:
                rows = gather_rows(weights.weight_out, places[depth])
                biases = None if weights.bias_out is None else weights.bias_out[places[depth]]
        order, scores, best = expand(
            logits[depth], features, rows, tail[depth, None], lane_scores, tail.new_full((1,), scale), children, biases
        )
        scores = scores.flatten()
        tokens = ids[depth][order]
        entry = {"tokens": tokens, "parents": lane_rows[:, None].expand_as(tokens), "scores": scores}
        entry["depths"] = torch.full_like(tokens, depth + 1)
        if details:
            entry["base_ids"] = ids[depth, 0].expand_as(tokens)
            entry["probabilities"] = best.exp()
            entry["base_probabilities"] = (logits[depth][order] / scale - base_log_z[depth]).exp()
        ledger.append({name: value.flatten() for name, value in entry.items()})
        kept = scores.argsort(descending=True, stable=True)[: shape.lanes]
        lane_scores, lane_rows = scores[kept], rows_before + kept
        rows_before += scores.shape[0]
        if head is not None and depth + 1 < base.shape[0]:
            lanes = kept // children
            embeds = view.embed(tokens.flatten()[kept][None], like=hidden)[0]
    return ledger


def _best_nodes(ledger: list[dict[str, torch.Tensor]], num_nodes: int) -> DraftTree:
    """The `num_nodes` best entries of the ledger as a tree; parents are renumbered to rows of the tree."""
    entries = {name: torch.cat([entry[name] for entry in ledger]) for name in ledger[0]}
    order = entries["scores"].argsort(descending=True, stable=True)[:num_nodes]
    row_of = order.new_zeros(entries["scores"].shape[0] + 1)
    row_of[order + 1] = torch.arange(1, order.shape[0] + 1, device=order.device)
    chosen = {name: value[order][None] for name, value in entries.items()}
    chosen["parents"] = row_of[chosen["parents"]]
    return DraftTree(**chosen)
