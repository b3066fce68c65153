"""The head: index tables with values worked out by hand, and the whole block against repeated steps."""

from __future__ import annotations

import math
import types

import pytest
import torch
import torch.nn.functional as F
from conftest import fill, pattern, tiny_drafter, tiny_target
from torch import nn

from modeling_domino import DominoConfig
from modeling_domino.cache_domino import DominoCache
from modeling_domino.drafting_domino import draft_chain
from modeling_domino.head_domino import DominoHead
from modeling_domino.ops_domino import gru_step, low_rank_correction, low_rank_features
from modeling_domino.record_domino import StageClock


BATCH, HIDDEN, WIDTH, RANK, VOCAB = 2, 6, 5, 4, 11
SHIFTS = pytest.mark.parametrize("shift_label", [True, False], ids=["shift", "noshift"])


def tiny_head(prefix_len: int = 1, *, bias: bool = False, correction_bias: bool = False) -> DominoHead:
    gru = nn.GRU(HIDDEN, WIDTH, batch_first=True, bias=bias)
    projection = nn.Sequential(
        nn.Linear(HIDDEN + WIDTH, RANK, bias=correction_bias), nn.SiLU(), nn.Linear(RANK, VOCAB, bias=correction_bias)
    )
    return DominoHead(fill(gru), fill(projection), prefix_len)


# ---- the index tables of the format, on a head whose state spells what it has consumed


class Spelling:
    """A drafter of scripted parts. Token 1 counts as a one, every other as a zero; the GRU halves its state and adds
    half of the token, so after tokens t1..tm the state is t_m/2 + t_{m-1}/4 + ...: it says which tokens were consumed,
    in which order. Slot k of the block proposes token `drafts[k]`; the correction adds silu(state) to token 9.
    """

    def __init__(self, *, shift_label: bool, prefix_len: int, drafts: list[int], block_size: int = 4):
        self.config = DominoConfig(
            vocab_size=10,
            hidden_size=10,
            num_hidden_layers=1,
            block_size=block_size,
            target_layer_ids=[0],
            mask_token_id=8,
            projector_type="domino",
            shift_label=shift_label,
            pure_draft_prefix_len=prefix_len,
            gru_hidden_dim=1,
            emb_dim=1,
        )
        gru = nn.GRU(10, 1, batch_first=True, bias=False)
        projection = nn.Sequential(nn.Linear(11, 1, bias=False), nn.SiLU(), nn.Linear(1, 10, bias=False))
        with torch.no_grad():
            for parameter in (*gru.parameters(), *projection.parameters()):
                parameter.zero_()
            # z = sigmoid(0) = 1/2 and n = tanh(20) = 1 for token 1, tanh(0) = 0 for the others.
            gru.weight_ih_l0[2, 1] = 20.0
            projection[0].weight[0, 10] = 1.0
            projection[2].weight[9, 0] = 1.0
        self.head = DominoHead(gru, projection, prefix_len)
        self.drafts = drafts
        self.seen: list[torch.Tensor] = []

    # The backbone: slot k carries a one-hot of the token it proposes.
    def append_context(self, *args):
        pass

    def __call__(self, noise_embeds, **kwargs):
        ids = noise_embeds.argmax(-1)[0].tolist()
        assert ids == [1] + [8] * (self.config.block_size - 1), "the block is the anchor, then masks"
        hidden = F.one_hot(torch.tensor([self.drafts]), 10).float()
        return types.SimpleNamespace(last_hidden_state=hidden)

    # The target: one-hot embeddings, and an output head that repeats its input.
    @staticmethod
    def embed(ids, *, like):
        return F.one_hot(ids, 10).float()

    @staticmethod
    def base_logits(hidden):
        return hidden

    def record(self, ids, logits):
        self.seen.append(logits[0].clone())
        return logits

    @torch.no_grad()
    def draft(self, num_drafts: int) -> list[int]:
        chain = draft_chain(
            self,
            self,
            DominoCache(),
            prefix_ids=torch.tensor([[5, 1]]),
            context_hidden_states=torch.zeros(1, 1, 10),
            position_ids=torch.arange(1 + self.config.block_size)[None],
            num_drafts=num_drafts,
            clock=StageClock(torch.device("cpu")),
            processors=self.record,
        )
        return chain.ids[0].tolist()

    def corrections(self) -> list[float]:
        """What was added to token 9 in each draft's logits."""
        return [float(logits[9]) for logits in self.seen]


def silu(state: float) -> float:
    return state / (1 + math.exp(-state))


# The anchor is token 1. Slots propose 1, 2, 1, 2: with the shift d1..d4 = 1, 2, 1, 2; without it slot 0 is unused and
# d1..d3 = 2, 1, 2. States in binary: after [1] 0.1 = 1/2; [1 1] 0.11 = 3/4; [1 1 2] 0.011 = 3/8;
# [1 1 2 1] 0.1011 = 11/16; without the shift [1 2] 0.01 = 1/4 and [1 2 1] 0.101 = 5/8.
SHIFTED = [1 / 2, 3 / 4, 3 / 8, 11 / 16]
UNSHIFTED = [1 / 2, 1 / 4, 5 / 8]


@pytest.mark.parametrize("prefix_len", [0, 1, 2, 4])
def test_table_with_shift(prefix_len):
    spelling = Spelling(shift_label=True, prefix_len=prefix_len, drafts=[1, 2, 1, 2])
    assert spelling.draft(4) == [1, 2, 1, 2]
    expected = [0.0] * prefix_len + [silu(state) for state in SHIFTED[prefix_len:]]
    assert spelling.corrections() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("prefix_len", [0, 1, 2, 3])
def test_table_without_shift(prefix_len):
    spelling = Spelling(shift_label=False, prefix_len=prefix_len, drafts=[1, 2, 1, 2])
    assert spelling.draft(3) == [2, 1, 2]
    expected = [0.0] * prefix_len + [silu(state) for state in UNSHIFTED[prefix_len:]]
    assert spelling.corrections() == pytest.approx(expected, abs=1e-6)


def test_a_correction_that_changes_a_draft_is_consumed_by_the_next():
    spelling = Spelling(shift_label=True, prefix_len=1, drafts=[1, 2, 1, 2])
    with torch.no_grad():
        # Three times silu(3/4) beats the base logit 1 of token 2, and token 9 counts as a one too.
        spelling.head.embed_proj[2].weight[9, 0] = 3.0
        spelling.head.prefix_gru.weight_ih_l0[2, 9] = 20.0
    assert spelling.draft(4) == [1, 9, 9, 9]
    # [1 1] 0.11 -> 9; [1 1 9] 0.111 -> 9; [1 1 9 9] 0.1111
    expected = [0.0, *(3 * silu(state) for state in (3 / 4, 7 / 8, 15 / 16))]
    assert spelling.corrections() == pytest.approx(expected, abs=1e-6)


def test_fewer_drafts_than_the_block_are_its_first_ones():
    spelling = Spelling(shift_label=True, prefix_len=1, drafts=[1, 2, 1, 2])
    assert spelling.draft(2) == [1, 2]
    assert spelling.corrections() == pytest.approx([0.0, silu(3 / 4)], abs=1e-6)


def test_teacher_forcing_reads_the_same_table():
    spelling = Spelling(shift_label=True, prefix_len=1, drafts=[1, 2, 1, 2])
    hidden = F.one_hot(torch.tensor([[1, 2, 1, 2]]), 10).float()
    consumed = F.one_hot(torch.tensor([[1, 1, 2, 1]]), 10).float()
    with torch.no_grad():
        logits = spelling.head.teacher_forced(hidden, hidden, consumed)
    assert logits[0, :, 9].tolist() == pytest.approx([0.0, *map(silu, SHIFTED[1:])], abs=1e-6)


# ---- whole block and repeated step


def by_steps(head: DominoHead, base, hidden, token_embeds):
    state = head.initial_state(base.shape[0])
    rows = []
    for i in range(base.shape[1]):
        state = head.advance(state, token_embeds[:, i])
        rows.append(base[:, i] if i < head.prefix_len else head.correct(base[:, i], hidden[:, i], state))
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_drafts", [1, 3, 4])
@pytest.mark.parametrize("prefix_len", [0, 1, 2, 4])
def test_whole_block_equals_repeated_steps(prefix_len, num_drafts, bias):
    head = tiny_head(min(prefix_len, num_drafts), bias=bias)
    base = pattern(BATCH, num_drafts, VOCAB)
    hidden, embeds = pattern(BATCH, num_drafts, HIDDEN, offset=7), pattern(BATCH, num_drafts, HIDDEN, offset=99)
    with torch.no_grad():
        whole = head.teacher_forced(base, hidden, embeds)
        torch.testing.assert_close(whole, by_steps(head, base, hidden, embeds))
    assert torch.equal(whole[:, : head.prefix_len], base[:, : head.prefix_len])
    if head.prefix_len < num_drafts:
        assert not torch.allclose(whole[:, head.prefix_len :], base[:, head.prefix_len :])


def test_both_forms_have_the_same_gradients():
    head = tiny_head(1)
    base, hidden = pattern(BATCH, 3, VOCAB), pattern(BATCH, 3, HIDDEN, offset=7)
    embeds, weights = pattern(BATCH, 3, HIDDEN, offset=99), pattern(BATCH, 3, VOCAB, offset=3)
    parameters = [*head.prefix_gru.parameters(), *head.embed_proj.parameters()]
    for form in (head.teacher_forced, lambda *args: by_steps(head, *args)):
        (form(base, hidden, embeds) * weights).sum().backward()
        gradients = [parameter.grad.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        if form == head.teacher_forced:
            expected = gradients
    for ours, theirs in zip(gradients, expected):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs)


@SHIFTS
@pytest.mark.parametrize("prefix_len", [0, 1, 2, 3])
def test_drafting_equals_teacher_forcing_on_its_own_drafts(shift_label, prefix_len):
    """The rollout of a real drafter, given back its own drafts as true tokens, picks them again."""
    target = tiny_target()
    drafter = tiny_drafter(target, block_size=5, shift_label=shift_label, prefix_len=prefix_len)
    config, embed = drafter.config, target.get_input_embeddings()
    ids, taps = torch.tensor([[3, 9, 27]]), pattern(1, 2, 64)

    class View:
        embed = staticmethod(lambda ids, *, like: embed(ids))
        base_logits = staticmethod(target.lm_head)

    with torch.no_grad():
        chain = draft_chain(
            drafter,
            View,
            DominoCache(),
            prefix_ids=ids,
            context_hidden_states=taps,
            position_ids=torch.arange(2 + 5)[None],
            num_drafts=config.num_draft_tokens,
            clock=StageClock(torch.device("cpu")),
        )
        block = torch.tensor([[27] + [config.mask_token_id] * 4])
        hidden = drafter(embed(block), taps).last_hidden_state[:, config.first_draft_slot :]
        consumed = embed(torch.cat([ids[:, -1:], chain.ids[:, :-1]], dim=1))
        logits = drafter.head.teacher_forced(target.lm_head(hidden), hidden, consumed)
    assert chain.ids.shape[1] == 5 - config.first_draft_slot
    assert torch.equal(logits.argmax(-1), chain.ids)


# ---- the operations


@pytest.mark.parametrize("bias", [False, True])
def test_gru_step_is_torchs_gru(bias):
    gru = fill(nn.GRU(HIDDEN, WIDTH, batch_first=True, bias=bias))
    inputs, state = pattern(3, HIDDEN), pattern(3, WIDTH, offset=50)
    biases = (gru.bias_ih_l0, gru.bias_hh_l0) if bias else (None, None)
    with torch.no_grad():
        _, expected = gru(inputs[:, None], state[None])
        torch.testing.assert_close(gru_step(inputs, state, gru.weight_ih_l0, gru.weight_hh_l0, *biases), expected[0])


@pytest.mark.parametrize("bias", [False, True])
def test_low_rank_correction_is_the_projection_over_both_inputs(bias):
    projection = tiny_head(correction_bias=bias).embed_proj
    hidden, state = pattern(BATCH, 3, HIDDEN), pattern(BATCH, 3, WIDTH, offset=40)
    first, _, last = projection
    with torch.no_grad():
        features = low_rank_features(hidden, state, first.weight, first.bias)
        delta = low_rank_correction(features, last.weight, last.bias)
        torch.testing.assert_close(delta, projection(torch.cat([hidden, state], dim=-1)))


@pytest.mark.parametrize("bias", [False, True])
def test_candidates_are_corrected_as_in_the_whole_vocabulary(bias):
    head = tiny_head(correction_bias=bias)
    base, hidden, state = pattern(BATCH, 3, VOCAB), pattern(BATCH, 3, HIDDEN), pattern(BATCH, 3, WIDTH, offset=40)
    candidates = torch.tensor([7, 0, 10])
    with torch.no_grad():
        whole = head.correct(base, hidden, state)
        some = head.correct(base[..., candidates], hidden, state, candidates)
    torch.testing.assert_close(some, whole[..., candidates])


def test_the_state_starts_at_zero_in_the_heads_dtype():
    head = tiny_head()
    head.prefix_gru.to(torch.bfloat16)
    state = head.initial_state(3)
    assert state.shape == (3, WIDTH) and state.dtype == torch.bfloat16 and not state.any()


def test_the_correction_keeps_the_dtype_of_the_base_logits():
    head = tiny_head(0)
    for module in (head.prefix_gru, head.embed_proj):
        module.to(torch.bfloat16)
    hidden, embeds = pattern(BATCH, 2, HIDDEN).bfloat16(), pattern(BATCH, 2, HIDDEN, offset=5).bfloat16()
    with torch.no_grad():
        assert head.teacher_forced(pattern(BATCH, 2, VOCAB), hidden, embeds).dtype == torch.float32


def test_the_head_owns_no_parameters():
    drafter = tiny_drafter(tiny_target())
    assert not isinstance(drafter.head, nn.Module)
    assert drafter.head.prefix_gru is drafter.prefix_gru and drafter.head.embed_proj is drafter.embed_proj
    assert [name for name in drafter.state_dict() if "head" in name] == []
