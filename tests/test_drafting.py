"""What drafts are chosen from: shortlists, draft vocabularies and temperatures, and that no choice changes the text's law."""

from __future__ import annotations

import pytest
import torch
from conftest import generate_loop, generate_stock, prompt, tiny_drafter, tiny_target
from test_verification import TOLERANCE, Model, block_outcomes, completed_law, sequences, speculative_outcomes
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from modeling_domino import drafting_domino
from modeling_domino.cache_domino import DominoCache
from modeling_domino.drafting_domino import CPU_CANDIDATES, DraftOptions, draft_chain, resolve_options
from modeling_domino.record_domino import StageClock
from modeling_domino.target_domino import TargetView
from modeling_domino.tree_domino import TreeShape
from modeling_domino.vocabulary_domino import DraftVocabulary


VOCAB = 5
SUBSET = torch.tensor([3, 0, 4])
OPTIONS = {
    "shortlist": DraftOptions(candidates=2),
    "one": DraftOptions(candidates=1),
    "vocabulary": DraftOptions(vocabulary=DraftVocabulary(SUBSET)),
    "both": DraftOptions(candidates=2, vocabulary=DraftVocabulary(SUBSET)),
    "temperatures": DraftOptions(temperatures=(0.6, 1.7)),
    "everything": DraftOptions(2, DraftVocabulary(SUBSET), (1.4, 0.5)),
}
PROCESSORS = {
    "none": None,
    "several": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5), TemperatureLogitsWarper(0.8)]),
}


def small_pair(**config):
    target = tiny_target(vocab_size=VOCAB, num_layers=2, hidden_size=16)
    config = {"block_size": 2, "target_layer_ids": [0], "num_hidden_layers": 1, **config}
    return target, tiny_drafter(target, **config)


@torch.no_grad()
def draft(target, drafter, *, num_drafts: int = 2, **options):
    """A chain behind a fixed context of four tokens."""
    context = torch.randn(1, 3, len(drafter.config.target_layer_ids) * target.config.hidden_size, generator=seeded(0))
    return draft_chain(
        drafter,
        TargetView(target, drafter.config),
        DominoCache(),
        prefix_ids=prompt(4, vocab_size=target.config.vocab_size),
        context_hidden_states=context,
        position_ids=torch.arange(3 + drafter.config.block_size)[None],
        num_drafts=num_drafts,
        clock=StageClock(drafter.device),
        **options,
    )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class DrafterLaw(Model):
    """The conditional logits that a drafter samples from, for every prefix, read from its chains."""

    def __init__(self, monkeypatch, length: int, **options):
        target, drafter = small_pair()
        self.vocab_size, self.tables = VOCAB, []
        for depth in range(length):
            rows = []
            for drafts in sequences(VOCAB, depth).tolist():
                wanted = iter([*drafts, 0])
                with monkeypatch.context() as patch:
                    patch.setattr(
                        drafting_domino, "draw", lambda logits, generator, w=wanted: torch.tensor([[next(w)]])
                    )
                    chain = draft(target, drafter, num_drafts=depth + 1, do_sample=True, **options)
                rows.append(chain.logits[0, depth].double())
            self.tables.append(torch.stack(rows))


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("name", OPTIONS)
def test_sampled_drafts_are_lossless(name, processors, monkeypatch):
    """Exact enumeration over all drafts of a real drafter: the text follows the target's law under both rules."""
    law = DrafterLaw(monkeypatch, 2, options=OPTIONS[name], processors=PROCESSORS[processors])
    target = Model(VOCAB, 3, seed=1)
    for outcomes_of in (speculative_outcomes, block_outcomes):
        outcomes = outcomes_of(monkeypatch, law, target, 2)
        assert sum(weight for _, weight in outcomes) == pytest.approx(1.0, abs=TOLERANCE)
        error = completed_law(target, 3, outcomes) - target.law(sequences(VOCAB, 3))
        assert error.abs().max() < TOLERANCE
    # And the law is that of the options: so many tokens, all of them of the vocabulary.
    options = OPTIONS[name]
    support = torch.cat([table > -torch.inf for table in law.tables])
    assert (support.sum(dim=1) == (options.candidates or (3 if options.vocabulary else VOCAB))).all()
    if options.vocabulary is not None:
        assert not support[:, [1, 2]].any()


def test_a_shortlist_renormalises_the_law_of_the_whole_vocabulary(monkeypatch):
    whole, some = DrafterLaw(monkeypatch, 2), DrafterLaw(monkeypatch, 2, options=DraftOptions(candidates=3))
    vocabulary = DraftOptions(vocabulary=DraftVocabulary(SUBSET))
    for few in (some, DrafterLaw(monkeypatch, 2, options=vocabulary)):
        for expected, table in zip(whole.tables, few.tables):
            kept = table > -torch.inf
            expected = expected.masked_fill(~kept, -torch.inf)
            # fp32 sums in another order.
            torch.testing.assert_close(table.softmax(-1), expected.softmax(-1), rtol=1e-5, atol=1e-6)


def test_temperatures_divide_the_logits_of_their_draft(monkeypatch):
    whole = DrafterLaw(monkeypatch, 2)
    scaled = DrafterLaw(monkeypatch, 2, options=DraftOptions(temperatures=(0.5, 4.0)))
    for expected, table, temperature in zip(whole.tables, scaled.tables, (0.5, 4.0)):
        torch.testing.assert_close(table, expected / temperature)


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_shortlist_of_almost_everything_drafts_the_same(batch, with_head):
    """All tokens but one as candidates, or all in another order: the greedy chain, its probabilities and those of the backbone stay as they were."""
    target = tiny_target()
    drafter = tiny_drafter(target, block_size=5, with_head=with_head)
    view, runs = TargetView(target, drafter.config), []
    for options in (DraftOptions(), DraftOptions(candidates=63), DraftOptions(vocabulary=DraftVocabulary(order(64)))):
        with torch.no_grad():
            runs.append(
                draft_chain(
                    drafter,
                    view,
                    DominoCache(),
                    prefix_ids=prompt(4, batch=batch),
                    context_hidden_states=torch.randn(batch, 3, 64, generator=seeded(0)),
                    position_ids=torch.arange(8).expand(batch, -1),
                    num_drafts=drafter.config.num_draft_tokens,
                    clock=StageClock(drafter.device),
                    details=True,
                    options=options,
                )
            )
    for chain in runs[1:]:
        assert torch.equal(chain.ids, runs[0].ids) and torch.equal(chain.base_ids, runs[0].base_ids)
        torch.testing.assert_close(chain.base_probabilities, runs[0].base_probabilities)
        # The token that the shortlist of 63 leaves out counts without its correction.
        torch.testing.assert_close(chain.probabilities, runs[0].probabilities, rtol=1e-2, atol=1e-3)


def order(size: int) -> torch.Tensor:
    """All ids, in no obvious order."""
    return torch.arange(size).mul(29).remainder(size)


@pytest.mark.parametrize("options", [{"candidates": 1}, {"candidates": 7}, {"candidates": 0}, {"draft_vocab": 9}])
@pytest.mark.parametrize("tree", [None, TreeShape(nodes=7)])
def test_greedy_text_is_the_targets(tree, options):
    target = tiny_target()
    for with_head in (True, False):
        drafter = tiny_drafter(target, block_size=4, with_head=with_head)
        drafter.draft_ranking = order(64).tolist()
        expected = target.generate(prompt(5), do_sample=False, max_new_tokens=30)
        assert torch.equal(
            generate_loop(target, drafter, prompt(5), max_new_tokens=30, tree=tree, **options), expected
        )
        drafted = {token for step in drafter.last_run.rounds for token in step.draft_ids}
        if "draft_vocab" in options:
            assert drafted <= set(order(64)[:9].tolist())
    drafter.config.draft_candidates, drafter.config.draft_vocab = options.get("candidates"), options.get("draft_vocab")
    assert torch.equal(generate_stock(target, drafter, prompt(5), max_new_tokens=30), expected)


def test_batches_draft_from_their_own_shortlists():
    target = tiny_target()
    drafter = tiny_drafter(target)
    ids = prompt(6, batch=4)
    mask = torch.ones_like(ids)
    alone = [drafter.spec_generate(target, row[None], max_new_tokens=12, candidates=3)[0] for row in ids]
    drafts = []
    for row in ids:
        drafter.spec_generate(target, row[None], max_new_tokens=12, candidates=3)
        drafts.append([step.draft_ids for step in drafter.last_run.rounds])
    together = drafter.spec_generate(target, ids, attention_mask=mask, max_new_tokens=12, candidates=3)
    assert torch.equal(together, torch.stack(alone))
    # Rounds have one width in a batch, so drafts at the end of a text differ.
    for run, rounds in zip(drafter.last_runs, drafts):
        assert [step.draft_ids for step in run.rounds][:3] == rounds[:3]


def test_what_a_run_drafts_from_by_default():
    _, drafter = small_pair()
    assert resolve_options(drafter) == DraftOptions(candidates=CPU_CANDIDATES)
    score_only = [TemperatureLogitsWarper(0.5)]
    assert resolve_options(drafter, processors=score_only).candidates == CPU_CANDIDATES
    # These may rule out a whole shortlist.
    assert resolve_options(drafter, processors=[RepetitionPenaltyLogitsProcessor(1.2)]).candidates == 0
    drafter.config.draft_candidates, drafter.config.draft_temperatures = 3, [0.5, 2.0]
    assert resolve_options(drafter) == DraftOptions(candidates=3, temperatures=(0.5, 2.0))
    assert resolve_options(drafter, candidates=0).candidates == 0
    drafter.draft_ranking, drafter.config.draft_vocab = [4, 2, 0], 2
    assert resolve_options(drafter).vocabulary.ids.tolist() == [4, 2]
    assert resolve_options(drafter, draft_vocab=3).vocabulary.ids.tolist() == [4, 2, 0]
    # All of the vocabulary is no draft vocabulary.
    assert resolve_options(drafter, draft_vocab=0).vocabulary is None
    assert resolve_options(drafter, draft_vocab=VOCAB).vocabulary is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": -1}, "`candidates` must be a number of tokens, 0 for the whole vocabulary, got -1"),
        ({"candidates": 2.5}, "`candidates` must be a number of tokens.*got 2.5"),
        ({"draft_vocab": True}, "`draft_vocab` must be a number of tokens.*got True"),
        ({"draft_vocab": 3}, "`draft_vocab` needs the drafter's ranking.*domino draft-vocab"),
    ],
)
def test_options_that_cannot_be(options, message):
    target, drafter = small_pair()
    with pytest.raises(ValueError, match=message):
        drafter.spec_generate(target, prompt(3, vocab_size=VOCAB), max_new_tokens=3, **options)


def test_processors_that_rule_out_the_whole_shortlist():
    """Drafts are then anything, and the text is what the target writes under the processors."""
    target, drafter = small_pair()
    options = {"do_sample": True, "top_k": 0, "prefix_allowed_tokens_fn": lambda batch_id, text: [len(text) % 2]}
    output = generate_loop(target, drafter, prompt(3, vocab_size=VOCAB), max_new_tokens=12, candidates=1, **options)
    assert output[0, 3:].tolist() == [1, 0] * 6


def test_a_drafter_that_computes_nan():
    """Greedy drafts of it are refused like any others; a law of NaN cannot be sampled from, and that is said."""
    target, drafter = small_pair()
    with torch.no_grad():
        drafter.norm.weight.fill_(float("nan"))
    ids = prompt(3, vocab_size=VOCAB)
    expected = target.generate(ids, do_sample=False, max_new_tokens=10)
    for candidates in (0, 2):
        options = {"max_new_tokens": 10, "candidates": candidates}
        assert torch.equal(generate_loop(target, drafter, ids, **options), expected)
        with pytest.raises(ValueError, match="must be numbers to sample drafts from, got NaN"):
            drafter.spec_generate(target, ids, temperature=1.0, **options)
        torch.manual_seed(0)
        assert drafter.spec_generate(target, ids, temperature=1.0, rule="match", **options).shape == (1, 13)
