"""Five recorded pairs load unchanged, and every recorded tensor comes out again, to fp32 rounding."""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import GOLDEN_NAMES, golden_pair

from modeling_domino.cache_domino import DominoCache
from modeling_domino.drafting_domino import draft_chain
from modeling_domino.record_domino import StageClock
from modeling_domino.taps_domino import SELECTS_BY_INDEX, TargetTaps
from modeling_domino.target_domino import TargetView


# fp32 sums in another order; values are of order 1 to 30.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
PAIRS = pytest.mark.parametrize("name", GOLDEN_NAMES)
load = functools.cache(golden_pair)


@torch.no_grad()
def read_context(target, drafter, expected, use_hooks=None):
    with TargetTaps(target.get_decoder().layers, drafter.config.target_layer_ids, use_hooks=use_hooks) as taps:
        outputs = target(expected["input_ids"], **taps.forward_kwargs)
        return taps.read(outputs, device=torch.device("cpu"))


def block_of(drafter, expected):
    """Anchor and masks `[1, K]`."""
    masks = expected["anchor"].new_full((1, drafter.config.block_size - 1), drafter.config.mask_token_id)
    return torch.cat([expected["anchor"][None], masks], dim=1)


def test_all_five_pairs_are_here():
    assert len(GOLDEN_NAMES) == 5


@PAIRS
@pytest.mark.parametrize(
    "use_hooks",
    [True, pytest.param(False, marks=pytest.mark.skipif(not SELECTS_BY_INDEX, reason="no native selection"))],
    ids=["hooks", "native"],
)
def test_context_hidden_states(name, use_hooks):
    target, drafter, expected = load(name)
    context = read_context(target, drafter, expected, use_hooks)
    torch.testing.assert_close(context, expected["context_hidden_states"], **TOLERANCE)


@PAIRS
@torch.no_grad()
def test_block_hidden_and_base_logits(name):
    target, drafter, expected = load(name)
    view = TargetView(target, drafter.config)
    embeds = view.embed(block_of(drafter, expected), like=expected["block_hidden"])
    hidden = drafter(embeds, expected["context_hidden_states"]).last_hidden_state
    torch.testing.assert_close(hidden, expected["block_hidden"], **TOLERANCE)
    torch.testing.assert_close(view.base_logits(hidden), expected["base_logits"], **TOLERANCE)


@PAIRS
@torch.no_grad()
def test_final_logits_of_the_teacher_forced_block(name):
    target, drafter, expected = load(name)
    first = drafter.config.first_draft_slot
    base, hidden = expected["base_logits"], expected["block_hidden"]
    consumed = TargetView(target, drafter.config).embed(expected["prev_ids"], like=hidden)
    # Draft i has consumed i + 1 tokens, whichever slot predicts it.
    corrected = drafter.head.teacher_forced(base[:, first:], hidden[:, first:], consumed[:, : base.shape[1] - first])
    torch.testing.assert_close(torch.cat([base[:, :first], corrected], dim=1), expected["final_logits"], **TOLERANCE)


@PAIRS
@torch.no_grad()
def test_greedy_draft(name):
    target, drafter, expected = load(name)
    context = read_context(target, drafter, expected)
    chain = draft_chain(
        drafter,
        TargetView(target, drafter.config),
        DominoCache(),
        prefix_ids=torch.cat([expected["input_ids"], expected["anchor"][None]], dim=1),
        context_hidden_states=context,
        position_ids=torch.arange(context.shape[1] + drafter.config.block_size)[None],
        num_drafts=drafter.config.num_draft_tokens,
        clock=StageClock(torch.device("cpu")),
    )
    assert torch.equal(chain.ids, expected["draft_ids"])


@PAIRS
def test_target_greedy_also_through_both_paths(name):
    target, drafter, expected = load(name)
    ids, greedy = expected["input_ids"], expected["target_greedy"]
    settings = {"max_new_tokens": greedy.shape[1], "do_sample": False}
    assert torch.equal(target.generate(ids, **settings)[:, ids.shape[1] :], greedy)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **settings)[:, ids.shape[1] :], greedy)
    assert torch.equal(drafter.spec_generate(target, ids, greedy.shape[1])[:, ids.shape[1] :], greedy)
