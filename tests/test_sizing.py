"""Sizes of rounds: what pays under given costs, from drafts or from the past, and when drafting is switched off."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import generate_loop, prompt, script_drafts, tiny_drafter, tiny_target
from test_verification import TOLERANCE, Model, block_outcomes, completed_law, sequences

from modeling_domino.generation_domino import stream
from modeling_domino.sizing_domino import AutoOff, Costs, PastWidth, may_shorten
from modeling_domino.tree_domino import TreeShape


FREE = Costs({1: 1.0, 100: 1.0}, draft=0.0)
# A row costs as much as a token by itself: nothing but a certain draft pays.
DEAR = Costs({1: 1.0, 2: 2.0, 100: 100.0}, draft=0.0)


def test_costs_between_and_beyond_what_was_measured():
    costs = Costs({1: 1.0, 3: 2.0, 4: 1.5, 8: 4.0}, draft=0.5)
    assert costs.verify_seconds(10) == pytest.approx([1.0, 1.5, 2.0, 2.0, 2.125, 2.75, 3.375, 4.0, 4.5, 5.0])
    assert Costs({2: 1.0}, draft=0.0).verify_seconds(4) == pytest.approx([1.0, 1.0, 1.5, 2.0])
    for verify, draft in (({}, 0.0), ({0: 1.0}, 0.0), ({1: -1.0}, 0.0), ({1: 1.0}, float("nan"))):
        with pytest.raises(ValueError, match="Costs must be seconds"):
            Costs(verify, draft)


def best_by_trying(probabilities: list[list[float]], costs: Costs) -> int:
    """The length with the most expected tokens per second, worked out one by one."""
    batch, most = len(probabilities), len(probabilities[0])
    seconds = costs.verify_seconds(batch * (most + 1))
    rates = []
    for length in range(most + 1):
        tokens = 0.0
        for row in probabilities:
            reach = list(itertools.accumulate(row[:length], lambda a, b: a * b))
            tokens += 1 + sum(reach)
        rates.append(tokens / (costs.draft + costs.per_draft * most + seconds[batch * (length + 1) - 1]))
    return rates.index(max(rates))


def test_best_length_and_nodes():
    generator = torch.Generator().manual_seed(0)
    found = set()
    for trial in range(60):
        verify = torch.rand(7, generator=generator).cumsum(0).tolist()
        costs = Costs(dict(enumerate(verify, start=1)), draft=verify[0], per_draft=0.1)
        probabilities = torch.rand(1 + trial % 3, 6, generator=generator) ** 0.3
        best = costs.best_length(probabilities)
        assert best == best_by_trying(probabilities.double().tolist(), costs)
        found.add(best)
        # A chain is a tree whose paths are those of its drafts.
        costs = Costs(costs.verify, draft=costs.draft + 0.6)
        scores = probabilities[:1].log().cumsum(dim=1)
        assert costs.best_nodes(scores) == best_by_trying(probabilities[:1].double().tolist(), costs)
    assert len(found) > 3
    assert FREE.best_length(torch.full((2, 5), 0.1)) == 5 and DEAR.best_length(torch.full((2, 5), 0.99)) == 0
    # A drafter that computes NaN is not worth a row.
    assert DEAR.best_length(torch.full((1, 3), float("nan"))) == 0


def test_probabilities_are_looked_at_only_where_shorter_blocks_can_gain(monkeypatch):
    """On packed weights six rows cost what one costs: looking took half a millisecond a round and found nothing."""
    assert not may_shorten(FREE, 5) and may_shorten(DEAR, 5)
    # At best 0.05 of 0.95 + 0.05 are saved, or 0.15 of 1.05.
    assert not may_shorten(Costs({1: 0.85, 6: 0.9}, draft=0.1), 5)
    assert may_shorten(Costs({1: 0.8, 6: 0.95}, draft=0.1), 5)
    # What counts is the cost of all sequences of a batch; one alone costs nothing more.
    batches = Costs({1: 1.0, 6: 1.0, 18: 3.0}, draft=0.0)
    assert not may_shorten(batches, 5) and may_shorten(batches, 5, batch=3)
    asked = []
    original = Costs.best_length
    monkeypatch.setattr(Costs, "best_length", lambda self, p: asked.append(self) or original(self, p))
    target = tiny_target()
    drafter = tiny_drafter(target, block_size=5)
    for costs in (FREE, DEAR):
        generate_loop(target, drafter, prompt(5), max_new_tokens=12, verify_width="auto", costs=costs)
    assert set(map(id, asked)) == {id(DEAR)}


def test_widths_follow_what_earlier_rounds_kept():
    costs = Costs({1: 1.0, 2: 1.2, 6: 2.0}, draft=0.3, per_draft=0.05)
    good, bad = PastWidth(costs, 5), PastWidth(costs, 5)
    assert good.width() == bad.width() > 1
    for _ in range(30):
        width = good.width()
        good.note(width, [width])
        bad.note(bad.width(), [0])
    assert good.width() == 5 and bad.width() == 1
    assert good.reach()[4] > 0.8 and bad.reach()[0] < 0.3
    # Depths that are not tried any more are trusted again, slowly.
    before = bad.reach()[0]
    for _ in range(200):
        bad.note(0, [0])
    assert bad.reach()[0] > before + 0.3


def test_reach_counts_each_depth_among_those_that_came_there():
    past = PastWidth(FREE, 3)
    past.FADING = 1.0
    past.WEIGHT = 1e-9
    for accepted in ([3, 0], [1, 2], [2, 2]):
        past.note(3, accepted)
    past.note(1, [1, 1])
    # Draft 1: kept 7 of 8; draft 2, of the five that came there with a second one: 4; draft 3: 1 of 4.
    assert past.reach() == pytest.approx([7 / 8, 7 / 8 * 4 / 5, 7 / 8 * 4 / 5 / 4])


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_switch(rounds: int, *, tokens: float, drafted: float, plain: float, switch=None, clock=None):
    """The decisions of `rounds` rounds, where drafted ones and plain ones take so long."""
    clock = Clock() if clock is None else clock
    switch = AutoOff(clock) if switch is None else switch
    decisions = []
    for _ in range(rounds):
        decisions.append(switch.begin())
        clock.now += drafted if decisions[-1] else plain
        switch.end(tokens if decisions[-1] else 1.0)
    return decisions, switch, clock


def test_drafting_goes_on_while_it_pays():
    decisions, *_ = run_switch(400, tokens=2.0, drafted=1.5, plain=1.0)
    # Plain steps are there to be measured: three after the first rounds, and three after every 64.
    assert decisions[: AutoOff.TRIAL] == [True] * 8 and decisions[8:11] == [False] * 3
    assert decisions.count(False) == 3 * (1 + (400 - 11) // 67)


def test_drafting_stops_when_it_does_not_pay_and_comes_back_when_it_does():
    decisions, switch, clock = run_switch(2000, tokens=1.2, drafted=1.5, plain=1.0)
    assert decisions[:11] == [True] * 8 + [False] * 3
    lengths = [len(list(group)) for drafting, group in itertools.groupby(decisions[8:]) if not drafting]
    # Longer and longer between the attempts, of four rounds each.
    assert lengths[:5] == [3 + 32, 64, 128, 256, 256]
    assert decisions.count(True) < 60
    # The text becomes easy: it is noticed within one rest.
    decisions, *_ = run_switch(600, tokens=3.0, drafted=1.5, plain=1.0, switch=switch, clock=clock)
    assert all(decisions[300:310]) and decisions.count(False) < 256 + 30


def row_costs(target, clock: Clock, seconds_of):
    """Lets the clock advance with every forward of the target."""

    def pay(module, args, kwargs):
        clock.now += seconds_of(kwargs["input_ids"].shape[1])

    return target.register_forward_pre_hook(pay, with_kwargs=True)


@pytest.mark.parametrize("tree", [None, 5])
def test_auto_off_writes_the_same_text_and_says_so(tree):
    target = tiny_target()
    drafter = tiny_drafter(target)
    expected = target.generate(prompt(5), do_sample=False, max_new_tokens=90)
    clock = Clock()
    handle = row_costs(target, clock, lambda rows: float(rows))
    try:
        options = {"max_new_tokens": 90, "tree": tree, "auto_off": AutoOff(clock)}
        assert torch.equal(generate_loop(target, drafter, prompt(5), **options), expected)
    finally:
        handle.remove()
    run = drafter.last_run
    plain = [step.is_plain for step in run.rounds]
    assert run.plain_steps == sum(plain) > 40 and plain[8:11] == [True] * 3
    assert all(step.draft_ids == [] and step.accepted == 0 for step in run.rounds if step.is_plain)
    trace = run.trace()
    assert trace["plain_steps"] == run.plain_steps
    assert sum(step.get("is_plain", False) for step in trace["rounds"]) == run.plain_steps
    # What was off is tried again, with all the context that has come since: the drafts are those of a run that never stopped.
    generate_loop(target, drafter, prompt(5), max_new_tokens=90, tree=tree)
    always = dict(placed(drafter.last_run))
    again = [(ends, step) for ends, step in placed(run)[12:] if not step.is_plain]
    assert len(again) >= 4
    assert any(always[ends].draft_ids == step.draft_ids != [] for ends, step in again if ends in always)
    for ends, step in again:
        if ends in always:
            assert always[ends].draft_ids == step.draft_ids


def placed(run):
    """The rounds with the length of the text behind each."""
    ends = itertools.accumulate(step.accepted + 1 for step in run.rounds)
    return list(zip(ends, run.rounds))


def test_auto_off_in_a_batch_and_where_drafting_pays(monkeypatch):
    target = tiny_target()
    drafter = tiny_drafter(target)
    ids = prompt(6, batch=3)
    options = {"max_new_tokens": 60, "attention_mask": torch.ones_like(ids)}
    expected = target.generate(ids, do_sample=False, pad_token_id=62, **options)
    for cost, off in ((lambda rows: float(rows), True), (lambda rows: 1.0 if rows > 1 else 5.0, False)):
        clock = Clock()
        handle = row_costs(target, clock, cost)
        try:
            output = drafter.spec_generate(target, ids, auto_off=AutoOff(clock), pad_token_id=62, **options)
        finally:
            handle.remove()
        assert torch.equal(output, expected)
        plain = drafter.last_run.plain_steps
        assert plain > 20 if off else plain <= 3


def test_sampled_text_with_auto_off():
    """Which rounds are drafted depends on the clock alone; the own tokens of plain steps are samples like any other."""
    target = tiny_target(vocab_size=12)
    drafter = tiny_drafter(target)
    clock = Clock()
    handle = row_costs(target, clock, lambda rows: float(rows))
    try:
        for rule in ("block", "speculative", "match"):
            options = {"temperature": 1.0, "rule": rule, "auto_off": AutoOff(clock)}
            torch.manual_seed(0)
            output = drafter.spec_generate(target, prompt(4, vocab_size=12), max_new_tokens=60, **options)
            assert output.shape == (1, 64) and drafter.last_run.plain_steps > 20
    finally:
        handle.remove()


@pytest.mark.parametrize("tree", [None, "auto", TreeShape(nodes=9, lanes=3)])
def test_sized_rounds_write_the_targets_text(tree):
    target = tiny_target()
    drafter = tiny_drafter(target, block_size=5)
    expected = target.generate(prompt(5), do_sample=False, max_new_tokens=24)
    sizes = {}
    middling = Costs({1: 1.0, 10: 1.6, 100: 20.0}, draft=0.1)
    for name, costs in (("free", FREE), ("middling", middling), ("dear", DEAR)):
        options = {"max_new_tokens": 24, "verify_width": "auto", "tree": tree, "costs": costs}
        assert torch.equal(generate_loop(target, drafter, prompt(5), **options), expected)
        sizes[name] = [len(step.draft_ids) for step in drafter.last_run.rounds]
    # The same curve, the same rounds.
    generate_loop(target, drafter, prompt(5), **options)
    assert [len(step.draft_ids) for step in drafter.last_run.rounds] == sizes["dear"]
    assert set(sizes["dear"]) == {0}
    most = 5 if tree is None else 64 if tree == "auto" else 9
    assert max(sizes["free"]) == most and len(set(sizes["middling"])) > 1


def test_sized_batches_and_details():
    target = tiny_target()
    drafter = tiny_drafter(target, block_size=5)
    drafter.record_details = True
    ids = prompt(6, batch=3)
    options = {"max_new_tokens": 15, "attention_mask": torch.ones_like(ids), "pad_token_id": 62}
    expected = target.generate(ids, do_sample=False, **options)
    costs = Costs({1: 1.0, 30: 1.8}, draft=0.2)
    assert torch.equal(drafter.spec_generate(target, ids, verify_width="auto", costs=costs, **options), expected)
    for run in drafter.last_runs:
        for step in run.trace()["rounds"]:
            assert len(step["draft_ids"]) == len(step["base_ids"]) == len(step["probabilities"])


def test_sampled_rounds_are_sized_by_the_past_alone(monkeypatch):
    """Their width is known before anything is drawn, and follows what was kept."""
    target = tiny_target(vocab_size=12)
    drafter = tiny_drafter(target, block_size=5)
    costs = Costs({1: 1.0, 6: 2.0}, draft=0.2, per_draft=0.05)
    for rule in ("speculative", "block"):
        torch.manual_seed(0)
        steps = stream(
            target,
            drafter,
            prompt(4, vocab_size=12),
            do_sample=True,
            top_k=0,
            rule=rule,
            verify_width="auto",
            costs=costs,
            max_new_tokens=60,
        )
        past = PastWidth(costs, 5)
        next(steps)
        written = 1
        for step in steps:
            assert len(step.draft_ids) == min(past.width(), 60 - written - 1)
            past.note(len(step.draft_ids), [step.accepted]) if step.draft_ids else None
            written += step.accepted + 1


def test_blocks_of_any_width_are_lossless(monkeypatch):
    """A width that is chosen beforehand leaves the law as it is: a round of each width, enumerated."""
    draft, target = Model(4, 3, seed=2), Model(4, 4, seed=1)
    for width in (1, 2, 3):
        outcomes = block_outcomes(monkeypatch, draft, target, width)
        error = completed_law(target, 4, outcomes) - target.law(sequences(4, 4))
        assert error.abs().max() < TOLERANCE


def test_a_width_that_ends_the_text(monkeypatch):
    """Stop tokens inside a sized block, and the last tokens of the budget."""
    target = tiny_target()
    drafter = tiny_drafter(target, block_size=5)
    text = target.generate(prompt(5), do_sample=False, max_new_tokens=40)[0].tolist()
    script_drafts(monkeypatch, lambda length, num_drafts: (text[length : length + num_drafts] + [0] * 5)[:num_drafts])
    for stop in (text[12], text[20]):
        expected = target.generate(prompt(5), do_sample=False, max_new_tokens=40, eos_token_id=stop, pad_token_id=0)
        options = {"max_new_tokens": 40, "eos_token_id": stop, "pad_token_id": 0, "verify_width": "auto"}
        assert torch.equal(generate_loop(target, drafter, prompt(5), costs=FREE, **options), expected)
