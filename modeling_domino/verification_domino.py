"""Accept rules: how many drafts of a chain the target keeps, and its own token behind them.

Pure functions of ids and logits, without models, caches or randomness of their own. Each is lossless: the text follows
the target's law exactly, whatever the drafter proposes. Logits are the PROCESSED ones (temperature, top-k, penalties),
the target's and the drafter's alike.
"""

from __future__ import annotations

import torch


# Below this, p and q agree to rounding and the residual is noise: sampling p itself is exact to the same order.
RESIDUAL_FLOOR = 1e-8


def accept_match(draft_ids: torch.Tensor, own_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keeps drafts while they equal the token that the target picks at their position.

    Rule: d_i is kept while d_i == t_i, where t_i is the target's own pick (argmax, or a sample) given d_1..d_{i-1};
    the own token is the pick at the first difference. Greedy picks: https://huggingface.co/papers/1811.03115.

    Args:
        draft_ids: `[B, n]`.
        own_ids: the target's picks after the anchor and after each draft, `[B, n + 1]`.

    Returns:
        accepted `[B]` and own token `[B]`.
    """
    accepted = (draft_ids == own_ids[:, :-1]).cumprod(dim=1).sum(dim=1)
    return accepted, own_ids.gather(1, accepted[:, None]).squeeze(1)


def accept_speculative(
    draft_ids: torch.Tensor,
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    *,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling: keeps a sampled draft with probability min(1, p/q).

    Rule: d_i ~ q is kept if u < p(d_i)/q(d_i); at the first refusal the own token is drawn from the positive part of
    p - q, and from p behind a block that was kept whole. https://huggingface.co/papers/2211.17192, algorithm 1.

    Args:
        draft_ids: `[B, n]`, sampled from `draft_logits`.
        draft_logits: `[B, n, V]`, exactly those that were sampled from.
        target_logits: after the anchor and after each draft, `[B, n + 1, V]`.

    Returns:
        accepted `[B]` and own token `[B]`.
    """
    batch, num_drafts = draft_ids.shape
    p = target_logits.softmax(dim=-1)
    q = draft_logits.softmax(dim=-1)
    p_draft = p[:, :num_drafts].gather(2, draft_ids[..., None]).squeeze(2)
    q_draft = q.gather(2, draft_ids[..., None]).squeeze(2)
    uniform = torch.rand(p_draft.shape, device=p.device, dtype=p.dtype, generator=generator)
    # u * q < p instead of u < p / q: no division by a vanishing q.
    accepted = (uniform * q_draft < p_draft).cumprod(dim=1).sum(dim=1)
    rows = torch.arange(batch, device=p.device)
    p_next = p[rows, accepted]
    # Behind the last draft there is no q: a row of zeros makes the residual p itself.
    q_next = torch.cat([q, q.new_zeros(batch, 1, q.shape[-1])], dim=1)[rows, accepted]
    residual = (p_next - q_next).clamp(min=0)
    law = torch.where(residual.sum(dim=-1, keepdim=True) > RESIDUAL_FLOOR, residual, p_next)
    return accepted, torch.multinomial(law, 1, generator=generator).squeeze(1)


def accept_block(
    draft_ids: torch.Tensor,
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    *,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block verification: accepts a sampled chain as a whole, so that late luck makes up for an early shortfall.

    Rule: with w_i = min(1, w_{i-1} p(d_i)/q(d_i)) and m_i the mass of the positive part r_i of w_i p - q behind d_i,
    d_1..d_i is kept for the largest i with u_i < m_i / (m_i + 1 - w_i) (for the last, u < w_n); the own token is drawn
    from r_i, and from p behind the whole block. https://huggingface.co/papers/2403.10444, algorithm 2; it never accepts
    less in expectation than [`accept_speculative`], whose arguments and results it has.
    """
    num_drafts = draft_ids.shape[1]
    if num_drafts == 0:
        return accept_speculative(draft_ids, draft_logits, target_logits, generator=generator)
    p = target_logits.softmax(dim=-1)
    q = draft_logits.softmax(dim=-1)
    ratios = (p[:, :num_drafts] / q).gather(2, draft_ids[..., None]).squeeze(2)
    weights = [ratios.new_ones(ratios.shape[0])]
    for i in range(num_drafts):
        weights.append((weights[-1] * ratios[:, i]).clamp(max=1.0))
    weight = torch.stack(weights, dim=1)
    # Behind draft i, for i = 0..n-1; nothing was drafted behind the last one, so all of p is left there.
    residual = (weight[:, :num_drafts, None] * p[:, :num_drafts] - q).clamp(min=0)
    mass = residual.sum(dim=2)
    keep = mass[:, 1:] / (mass[:, 1:] + 1 - weight[:, 1:num_drafts]).clamp(min=RESIDUAL_FLOOR)
    keep = torch.cat([keep, weight[:, num_drafts:]], dim=1)
    uniform = torch.rand(keep.shape, device=p.device, dtype=p.dtype, generator=generator)
    places = torch.arange(1, num_drafts + 1, device=p.device)
    accepted = torch.where(uniform < keep, places, 0).amax(dim=1)
    rows = torch.arange(draft_ids.shape[0], device=p.device)
    p_next = p[rows, accepted]
    law = torch.cat([residual, p[:, num_drafts:]], dim=1)[rows, accepted]
    law = torch.where(law.sum(dim=-1, keepdim=True) > RESIDUAL_FLOOR, law, p_next)
    return accepted, torch.multinomial(law, 1, generator=generator).squeeze(1)


def accept_tree(
    tokens: torch.Tensor, parents: torch.Tensor, ancestors: torch.Tensor, own_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walks down a draft tree for as long as the target agrees.

    Rule: from the anchor, go to the child that equals the target's own pick at this row; where there is none, that pick
    is the own token. Lossless for any tree, and for a fixed tree no lossless rule keeps more.

    Args:
        tokens: `[B, N]`.
        parents: row of each node's parent, `[B, N]` (row 0 is the anchor).
        ancestors: `[B, N + 1, N + 1]`, see [`DraftTree.ancestors`].
        own_ids: the target's pick at each row, `[B, N + 1]`.

    Returns:
        accepted `[B]`, own token `[B]`, and the rows of the path, the anchor's first, `[B, N + 1]`, filled up with N + 1.
    """
    follows = tokens == own_ids.gather(1, parents)
    follows = torch.cat([follows.new_ones(follows.shape[0], 1), follows], dim=1)
    kept = (~ancestors | follows[:, None, :]).all(dim=2)
    depths = ancestors.sum(dim=2) - 1
    # Siblings differ, so at most one path is kept to each depth.
    leaf = torch.where(kept, depths, -1).argmax(dim=1, keepdim=True)
    accepted = depths.gather(1, leaf).squeeze(1)
    rows = torch.arange(ancestors.shape[1], device=tokens.device)
    on_path = ancestors.gather(1, leaf[..., None].expand(-1, 1, ancestors.shape[2])).squeeze(1)
    path = torch.where(on_path, rows, ancestors.shape[1]).sort(dim=1).values
    return accepted, own_ids.gather(1, leaf).squeeze(1), path


def sample_rows(logits: torch.Tensor, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """One sample per row of `logits` `[B, n, V]`: `[B, n]`."""
    flat = logits.softmax(dim=-1).flatten(0, 1)
    return torch.multinomial(flat, 1, generator=generator).view(logits.shape[:2])
