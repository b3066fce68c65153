"""The accept rules, enumerated exactly: every draft, every random outcome, and the law of the text that comes out."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import prompt, tiny_drafter, tiny_target
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from modeling_domino import verification_domino
from modeling_domino.cache_domino import DominoCache
from modeling_domino.drafting_domino import draft_chain
from modeling_domino.record_domino import StageClock
from modeling_domino.target_domino import TargetView
from modeling_domino.verification_domino import accept_block, accept_match, accept_speculative, sample_rows


SHAPES = [(2, 1), (3, 3), (4, 2), (5, 3), (8, 2), (8, 3)]
# Float64 sums over at most 8^4 sequences.
TOLERANCE = 1e-12

PROCESSORS = {
    "none": [],
    "temperature": [TemperatureLogitsWarper(0.6)],
    "top_k": [TopKLogitsWarper(2)],
    "top_p": [TopPLogitsWarper(0.7)],
    "penalty": [RepetitionPenaltyLogitsProcessor(1.7)],
    "several": [
        RepetitionPenaltyLogitsProcessor(1.3),
        NoRepeatNGramLogitsProcessor(2),
        TemperatureLogitsWarper(1.4),
        TopKLogitsWarper(3),
        TopPLogitsWarper(0.9),
    ],
}


def sequences(vocab_size: int, length: int) -> torch.Tensor:
    """All sequences `[V^length, length]`, in lexicographic order."""
    return torch.tensor(list(itertools.product(range(vocab_size), repeat=length)), dtype=torch.long).view(
        vocab_size**length, length
    )


def number(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Place of each sequence `[N, length]` in [`sequences`]."""
    weights = vocab_size ** torch.arange(ids.shape[1] - 1, -1, -1)
    return (ids * weights).sum(dim=1)


class Model:
    """Random conditional logits for every prefix, processed as `generate` would."""

    def __init__(self, vocab_size: int, length: int, *, seed: int, processors=()):
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size = vocab_size
        processors = LogitsProcessorList(processors)
        self.tables = []
        for depth in range(length):
            logits = 2 * torch.randn(vocab_size**depth, vocab_size, generator=generator, dtype=torch.float64)
            if processors:
                # The first token of the text, so that processors have something to read.
                prefixes = torch.cat(
                    [torch.zeros(len(logits), 1, dtype=torch.long), sequences(vocab_size, depth)], dim=1
                )
                logits = processors(prefixes, logits)
            self.tables.append(logits)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits before each token of `ids` `[N, n]` and behind the last, as far as the tables go."""
        rows = [
            self.tables[depth][number(ids[:, :depth], self.vocab_size)]
            for depth in range(min(ids.shape[1] + 1, len(self.tables)))
        ]
        return torch.stack(rows, dim=1)

    def law(self, ids: torch.Tensor) -> torch.Tensor:
        """Probability of each sequence of `ids` `[N, n]`."""
        probabilities = self.logits(ids)[:, : ids.shape[1]].softmax(dim=-1)
        return probabilities.gather(2, ids[..., None]).squeeze(2).prod(dim=1)


def completed_law(target: Model, length: int, outcomes) -> torch.Tensor:
    """Law over all texts of `length` tokens when each `(tokens, weight)` is continued by the target itself."""
    everything = sequences(target.vocab_size, length)
    law = torch.zeros(len(everything), dtype=torch.float64)
    whole = target.law(everything)
    for tokens, weight in outcomes:
        start = (everything[:, : tokens.shape[0]] == tokens).all(dim=1)
        own = target.law(tokens[None])
        if own > 0:
            law[start] += weight * whole[start] / own
        else:
            assert weight < TOLERANCE, f"the rule wrote {tokens.tolist()}, which the target never does"
    return law


def merge(tokens: list[list[int]], weights: list[float]):
    """Outcomes with equal tokens, added up."""
    total = {}
    for ids, weight in zip(tokens, weights):
        total[tuple(ids)] = total.get(tuple(ids), 0.0) + weight
    return [(torch.tensor(ids), weight) for ids, weight in total.items()]


def speculative_outcomes(monkeypatch, draft: Model, target: Model, num_drafts: int):
    """Every draft, every acceptance pattern and every own token, with its exact weight.

    The rule's uniform numbers are set to the middle of "accept" or of "refuse"; the law it draws its own token from is
    read from the call.
    """
    vocab_size = target.vocab_size
    ids = sequences(vocab_size, num_drafts)
    draft_law = draft.law(ids)
    ids, draft_law = ids[draft_law > 0], draft_law[draft_law > 0]
    p = target.logits(ids)
    q = draft.logits(ids)[:, :num_drafts]
    ratio = (p[:, :num_drafts].softmax(-1) / q.softmax(-1)).gather(2, ids[..., None]).squeeze(2).clamp(max=1)  # [N, n]
    tokens, weights = [], []
    for refused_at in range(num_drafts + 1):
        uniform = ratio / 2
        weight = draft_law.clone()
        for i in range(min(refused_at + 1, num_drafts)):
            if i == refused_at:
                uniform[:, i] = (1 + ratio[:, i]) / 2
                weight = weight * (1 - ratio[:, i])
            else:
                weight = weight * ratio[:, i]
        possible = weight > 0
        laws = []

        def remember(law, num_samples, generator=None, laws=laws):
            laws.append(law / law.sum(dim=-1, keepdim=True))
            return torch.zeros(law.shape[0], 1, dtype=torch.long)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "rand", lambda *args, u=uniform[possible], **kwargs: u)
            patch.setattr(torch, "multinomial", remember)
            accepted, _ = accept_speculative(ids[possible], q[possible], p[possible])
        assert (accepted == refused_at).all()
        for row, row_ids in enumerate(ids[possible].tolist()):
            for own in range(vocab_size):
                tokens.append([*row_ids[:refused_at], own])
                weights.append((weight[possible][row] * laws[0][row, own]).item())
    return merge(tokens, weights)


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("vocab_size, num_drafts", SHAPES)
def test_speculative_law(vocab_size, num_drafts, processors, monkeypatch):
    target = Model(vocab_size, num_drafts + 1, seed=1, processors=PROCESSORS[processors])
    for draft_processors in ((), PROCESSORS[processors]) if vocab_size < 8 else (PROCESSORS[processors],):
        draft = Model(vocab_size, num_drafts, seed=2, processors=draft_processors)
        outcomes = speculative_outcomes(monkeypatch, draft, target, num_drafts)
        assert sum(weight for _, weight in outcomes) == pytest.approx(1.0, abs=TOLERANCE)
        law = completed_law(target, num_drafts + 1, outcomes)
        assert (law - target.law(sequences(vocab_size, num_drafts + 1))).abs().max() < TOLERANCE


def block_thresholds(p: torch.Tensor, q: torch.Tensor, ids: list[int]) -> list[float]:
    """The rule's acceptance thresholds for one chain, straight from the paper's definition.

    `p` and `q` are the laws behind each prefix of `ids`, `[n + 1, V]` and `[n, V]`.
    """
    thresholds, weight = [], 1.0
    for i, token in enumerate(ids):
        weight = min(1.0, weight * (p[i, token] / q[i, token]).item())
        if i + 1 == len(ids):
            thresholds.append(weight)
        else:
            mass = sum(max(0.0, weight * a - b) for a, b in zip(p[i + 1].tolist(), q[i + 1].tolist()))
            thresholds.append(mass / (mass + 1 - weight) if mass + 1 - weight > 0 else 0.0)
    return thresholds


def block_outcomes(monkeypatch, draft: Model, target: Model, num_drafts: int):
    """Every draft, every pattern of the uniform numbers and every own token, with its exact weight."""
    ids = sequences(target.vocab_size, num_drafts)
    draft_law = draft.law(ids)
    ids, draft_law = ids[draft_law > 0], draft_law[draft_law > 0]
    p, q = target.logits(ids), draft.logits(ids)[:, :num_drafts]
    thresholds = torch.tensor(
        [block_thresholds(*rows, row_ids) for *rows, row_ids in zip(p.softmax(-1), q.softmax(-1), ids.tolist())],
        dtype=torch.float64,
    )
    tokens, weights = [], []
    for pattern in itertools.product([True, False], repeat=num_drafts):
        passed = torch.tensor(pattern)
        uniform = torch.where(passed, thresholds / 2, (1 + thresholds) / 2)
        weight = draft_law * torch.where(passed, thresholds, 1 - thresholds).prod(dim=1)
        laws = []

        def remember(law, num_samples, generator=None, laws=laws):
            laws.append(law / law.sum(dim=-1, keepdim=True))
            return torch.zeros(law.shape[0], 1, dtype=torch.long)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "rand", lambda *args, u=uniform, **kwargs: u)
            patch.setattr(torch, "multinomial", remember)
            accepted, _ = accept_block(ids, q, p)
        for row, (row_ids, kept) in enumerate(zip(ids.tolist(), accepted.tolist())):
            # Below it, a threshold of one or of nothing that is off by rounding.
            if weight[row] > TOLERANCE / 100:
                assert kept == max((i + 1 for i, keep in enumerate(pattern) if keep), default=0)
                for own in range(target.vocab_size):
                    tokens.append([*row_ids[:kept], own])
                    weights.append((weight[row] * laws[0][row, own]).item())
    return merge(tokens, weights)


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("vocab_size, num_drafts", SHAPES[:-1])
def test_block_law(vocab_size, num_drafts, processors, monkeypatch):
    target = Model(vocab_size, num_drafts + 1, seed=1, processors=PROCESSORS[processors])
    for draft_processors in ((), PROCESSORS[processors]):
        draft = Model(vocab_size, num_drafts, seed=2, processors=draft_processors)
        outcomes = block_outcomes(monkeypatch, draft, target, num_drafts)
        assert sum(weight for _, weight in outcomes) == pytest.approx(1.0, abs=TOLERANCE)
        law = completed_law(target, num_drafts + 1, outcomes)
        assert (law - target.law(sequences(vocab_size, num_drafts + 1))).abs().max() < TOLERANCE
        # The paper's theorem 2: no less is accepted than by the rule that looks at one token at a time.
        token_wise = speculative_outcomes(monkeypatch, draft, target, num_drafts)
        lengths = [sum(len(ids) * weight for ids, weight in law) for law in (outcomes, token_wise)]
        assert lengths[0] >= lengths[1] - TOLERANCE


def test_block_of_no_drafts_and_of_equal_laws():
    logits = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    ids = logits[:, :3].argmax(dim=-1)
    accepted, _ = accept_block(ids, logits[:, :3].clone(), logits)
    assert accepted.tolist() == [3, 3]
    accepted, own = accept_block(ids[:, :0], logits[:, :0], logits[:, :1])
    assert accepted.tolist() == [0, 0] and own.shape == (2,)


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("vocab_size, num_drafts", SHAPES)
def test_match_law(vocab_size, num_drafts, processors):
    """For every fixed draft, hence for every drafter: the picks are independent samples of the target."""
    target = Model(vocab_size, num_drafts + 1, seed=3, processors=PROCESSORS[processors])
    expected = target.law(sequences(vocab_size, num_drafts + 1))
    picks = sequences(vocab_size, num_drafts + 1)
    drafts = sequences(vocab_size, num_drafts)
    for draft_ids in drafts[:: max(1, len(drafts) // 12)]:
        rows = target.logits(draft_ids[None]).softmax(dim=-1).expand(len(picks), -1, -1)
        weights = rows.gather(2, picks[..., None]).squeeze(2).prod(dim=1)
        accepted, own = accept_match(draft_ids.expand(len(picks), -1), picks)
        tokens = [[*draft_ids[:n].tolist(), token] for n, token in zip(accepted.tolist(), own.tolist())]
        law = completed_law(target, num_drafts + 1, merge(tokens, weights.tolist()))
        assert (law - expected).abs().max() < TOLERANCE


def test_match_keeps_up_to_the_first_difference():
    own = torch.tensor([[5, 6, 7, 8]]).repeat(5, 1)
    drafts = torch.tensor([[5, 6, 7], [5, 6, 0], [5, 0, 7], [0, 6, 7], [0, 0, 0]])
    accepted, token = accept_match(drafts, own)
    assert accepted.tolist() == [3, 2, 1, 0, 0]
    assert token.tolist() == [8, 7, 6, 5, 5]
    accepted, token = accept_match(drafts[:, :0], own[:, :1])
    assert accepted.tolist() == [0] * 5 and token.tolist() == [5] * 5


def test_speculative_without_drafts_samples_the_target():
    logits = torch.full((1, 1, 4), -torch.inf)
    logits[..., 2] = 0.0
    accepted, own = accept_speculative(torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0, 4), logits)
    assert accepted.tolist() == [0] and own.tolist() == [2]


def test_speculative_residual_guard(monkeypatch):
    """Where p and q agree to rounding, a refusal draws from p instead of from noise or from nothing."""
    monkeypatch.setattr(torch, "rand", lambda shape, **kwargs: torch.full(shape, 1.0))
    logits = torch.tensor([[[1.0, 2.0, 3.0], [0.5, 0.1, 0.2]]])
    laws = []
    multinomial = torch.multinomial
    monkeypatch.setattr(
        torch, "multinomial", lambda law, n, **kwargs: laws.append(law) or multinomial(law, n, **kwargs)
    )
    accepted, own = accept_speculative(torch.tensor([[2]]), logits[:, :1].clone(), logits)
    assert accepted.tolist() == [0] and 0 <= own.item() < 3
    assert torch.equal(laws[0], logits[:, 0].softmax(dim=-1))


def test_speculative_never_writes_what_the_target_excludes():
    """Drafts outside the target's support go, and so does the support of q alone in the residual."""
    target_logits = torch.tensor([0.0, -torch.inf, 1.0, -torch.inf]).expand(400, 3, 4)
    draft_logits = torch.tensor([0.0, 3.0, -torch.inf, 2.0]).expand(400, 2, 4)
    generator = torch.Generator().manual_seed(0)
    drafts = sample_rows(draft_logits, generator=generator)
    accepted, own = accept_speculative(drafts, draft_logits, target_logits, generator=generator)
    kept = torch.arange(2) < accepted[:, None]
    assert (drafts[kept] == 0).all()
    assert set(own.tolist()) == {0, 2}


def test_rows_of_a_batch_are_independent():
    """A row's verdict is what it would be alone, whatever the others accept."""
    generator = torch.Generator().manual_seed(4)
    own = torch.randint(0, 2, (64, 5), generator=generator)
    drafts = torch.randint(0, 2, (64, 4), generator=generator)
    together = accept_match(drafts, own)
    alone = [accept_match(drafts[i : i + 1], own[i : i + 1]) for i in range(64)]
    for whole, parts in zip(together, zip(*alone)):
        assert torch.equal(whole, torch.cat(parts))
    assert len(set(together[0].tolist())) == 5

    # Speculative: rows of known verdicts (p and q agree, or p has nothing where q is), in every order.
    sure, never = torch.tensor([0.0, -torch.inf, -torch.inf]), torch.tensor([-torch.inf, 0.0, 0.0])
    for pattern in itertools.product([True, False], repeat=3):
        target_logits = torch.stack([torch.stack([sure if keep else never] * 2) for keep in pattern])
        draft_logits = torch.tensor([0.0, -torch.inf, -torch.inf]).expand(3, 1, 3)
        accepted, token = accept_speculative(torch.zeros(3, 1, dtype=torch.long), draft_logits, target_logits)
        assert accepted.tolist() == [int(keep) for keep in pattern]
        assert all(t in (1, 2) for t, keep in zip(token.tolist(), pattern) if not keep)


def test_sampled_rows_follow_their_logits():
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    samples = sample_rows(logits.expand(4000, 3, 5), generator=torch.Generator().manual_seed(1))
    for row in range(3):
        observed = torch.bincount(samples[:, row], minlength=5)
        expected = 4000 * logits[row].softmax(-1)
        # Chi-square with 4 degrees of freedom: 23.5 is passed once in ten thousand seeds; this seed is fixed.
        assert ((observed - expected) ** 2 / expected).sum() < 23.5


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("processors", PROCESSORS)
def test_drafted_law(processors, with_head, monkeypatch):
    """The logits a chain reports are those it sampled from: head, processors and the tokens before each draft included."""
    target = tiny_target()
    drafter = tiny_drafter(target, block_size=5, with_head=with_head)
    view = TargetView(target, drafter.config)
    sampled = []
    multinomial = torch.multinomial

    def spy(law, num_samples, **kwargs):
        sampled.append(law)
        return multinomial(law, num_samples, **kwargs)

    monkeypatch.setattr(torch, "multinomial", spy)
    prefix_ids = prompt(6)
    context = torch.randn(1, 5, 2 * 32, generator=torch.Generator().manual_seed(0))
    chosen = LogitsProcessorList(PROCESSORS[processors])
    num_drafts = drafter.config.num_draft_tokens
    with torch.no_grad():
        chain = draft_chain(
            drafter,
            view,
            DominoCache(),
            prefix_ids=prefix_ids,
            context_hidden_states=context,
            position_ids=torch.arange(10)[None],
            num_drafts=num_drafts,
            clock=StageClock(drafter.device),
            processors=chosen or None,
            do_sample=True,
            generator=torch.Generator().manual_seed(3),
        )
        assert chain.logits.shape == (1, num_drafts, 64) and chain.logits.dtype == torch.float32
        assert torch.equal(chain.logits.softmax(-1), torch.stack(sampled, dim=1))
        # The same from the teacher-forced head over the drafted tokens.
        masks = torch.full((1, 4), drafter.config.mask_token_id)
        noise = view.embed(torch.cat([prefix_ids[:, -1:], masks], dim=1), like=context)
        hidden = drafter(noise, context, torch.arange(10)[None]).last_hidden_state
        hidden = hidden[:, drafter.config.first_draft_slot :]
        logits = view.base_logits(hidden)
        if with_head:
            tokens = torch.cat([prefix_ids[:, -1:], chain.ids[:, :-1]], dim=1)
            logits = drafter.head.teacher_forced(logits, hidden, view.embed(tokens, like=context))
        for i in range(num_drafts):
            row = chosen(torch.cat([prefix_ids, chain.ids[:, :i]], dim=1), logits[:, i])
            # fp32 rounding of one GRU step against the whole-sequence kernel.
            torch.testing.assert_close(chain.logits[:, i], row, rtol=1e-4, atol=1e-5)


def test_no_rule_is_lossy():
    """What the module offers is what is enumerated above."""
    rules = {name for name in vars(verification_domino) if name.startswith("accept_")}
    assert rules == {"accept_match", "accept_speculative", "accept_block", "accept_tree"}
