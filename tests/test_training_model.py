"""Gates of the training module: indexing, masks, gradients, arms, and the objective against a second implementation."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import prompt, require_peer, tiny_drafter, tiny_target

from modeling_domino.cache_domino import DominoCache
from modeling_domino.drafting_domino import draft_chain
from modeling_domino.record_domino import StageClock
from modeling_domino.training.data import BlockDataset, Sample, collate_blocks, label_blocks
from modeling_domino.training.losses import Curriculum
from modeling_domino.training.model import (
    STATS,
    DominoTrainingModel,
    block_statistics,
    dense_block_mask,
    flex_block_mask,
)


def arguments(**changes) -> SimpleNamespace:
    """The objective's arguments without a `TrainingArguments` around them."""
    fields = {"trainable": "all", "objective": "ce", "soft_weight": 1.0, "score_negatives": 0, "ttt": False}
    fields["flex_attention"] = False
    return SimpleNamespace(**{**fields, **changes})


def batch_of(drafter, *lengths: int, prompt_length: int = 3, **dataset) -> dict[str, torch.Tensor]:
    """A padded batch of sequences with all their blocks."""
    samples = [Sample(str(i), prompt(n, offset=100 * i)[0], prompt_length) for i, n in enumerate(lengths)]
    blocks = BlockDataset(samples, num_drafts=drafter.config.num_draft_tokens, gamma=2.0, **dataset)
    return collate_blocks([blocks[i] for i in range(len(blocks))])


def module_of(target, drafter, scored=None, **changes) -> DominoTrainingModel:
    return DominoTrainingModel(drafter, target, arguments(**changes), scored)


@pytest.mark.parametrize("shift_label", [True, False])
def test_blocks_predict_what_decoding_drafts(shift_label):
    """Slots, positions, context and head of a training block are those of a decoding round at its anchor."""
    target = tiny_target()
    drafter = tiny_drafter(target, shift_label=shift_label)
    module = module_of(target, drafter).eval()
    batch = batch_of(drafter, 12)
    ids = batch["input_ids"]
    with torch.no_grad():
        taps, _ = module.read_target(ids, batch["attention_mask"])
        hidden = module.run_backbone(ids, taps, batch["anchors"], batch["anchor_mask"])[0]
        scored = module._select_scored(batch["labels"])
        base = module._base_logits(hidden, scored)
        final = module._final_logits(base, hidden, batch["prefix_ids"][0], scored)
        for block, anchor in enumerate(batch["anchors"][0].tolist()):
            chain = draft_chain(
                drafter,
                module.view,
                DominoCache(),
                prefix_ids=ids[:, : anchor + 1],
                context_hidden_states=taps[:, :anchor],
                position_ids=torch.arange(anchor + drafter.config.block_size)[None],
                num_drafts=drafter.config.num_draft_tokens,
                clock=StageClock(drafter.device),
                details=True,
            )
            assert base[block].argmax(-1).tolist() == chain.base_ids[0].tolist()
            # The head reads the true tokens here and its own there: they agree up to the first difference.
            picks = final[block].argmax(-1).tolist()
            truth = batch["labels"][0, block].tolist()
            for i, drafted in enumerate(chain.ids[0].tolist()):
                assert picks[i] == drafted
                if drafted != truth[i]:
                    break


@pytest.mark.parametrize("shift_label", [True, False])
def test_labels_and_weights(shift_label):
    """Draft i of the block at a is token a + 1 + i in both label shifts; behind the end nothing weighs."""
    ids = torch.arange(10, 20)
    n = 4 if shift_label else 3
    decay = torch.tensor([0.5**i for i in range(n)])
    blocks = label_blocks(ids, torch.tensor([3, 8]), decay)
    assert blocks["labels"][0].tolist() == list(range(14, 14 + n))
    assert blocks["prefix_ids"][0].tolist() == list(range(13, 13 + n))
    assert blocks["weights"][0].tolist() == decay.tolist()
    assert blocks["labels"][1, 0] == 19
    assert blocks["weights"][1].tolist() == [1.0] + [0.0] * (n - 1)


def test_block_sees_only_context_before_its_anchor_and_itself():
    target = tiny_target()
    drafter = tiny_drafter(target)
    module = module_of(target, drafter).eval()
    batch = batch_of(drafter, 14)
    ids, anchors, keep = batch["input_ids"], batch["anchors"], batch["anchor_mask"]
    with torch.no_grad():
        taps, _ = module.read_target(ids, batch["attention_mask"])
        before = module.run_backbone(ids, taps, anchors, keep)
        for position in range(ids.shape[1]):
            moved_ids, moved_taps = ids.clone(), taps.clone()
            moved_ids[0, position] = (ids[0, position] + 1) % 64
            moved_taps[0, position] += 1.0
            after = module.run_backbone(moved_ids, moved_taps, anchors, keep)
            changed = (after != before)[0].flatten(1).any(1)
            # The anchor's own token opens the block; its tap is not context.
            assert torch.equal(changed, anchors[0] >= position), position


def test_a_block_does_not_see_its_neighbours():
    """Blocks run one by one give what they give side by side, also beside padding."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    module = module_of(target, drafter).eval()
    batch = batch_of(drafter, 14, 9)
    with torch.no_grad():
        taps, _ = module.read_target(batch["input_ids"], batch["attention_mask"])
        together = module.run_backbone(batch["input_ids"], taps, batch["anchors"], batch["anchor_mask"])
        for row in range(2):
            for block in batch["anchor_mask"][row].nonzero().flatten().tolist():
                anchor = batch["anchors"][row : row + 1, block : block + 1]
                alone = module.run_backbone(
                    batch["input_ids"][row : row + 1], taps[row : row + 1], anchor, torch.ones_like(anchor).bool()
                )
                torch.testing.assert_close(together[row, block], alone[0, 0], rtol=1e-4, atol=1e-5)


def test_flex_and_dense_masks_are_one_rule():
    anchors = torch.tensor([[2, 5, 9], [1, 3, 0]])
    keep = torch.tensor([[True, True, True], [True, True, False]])
    dense = dense_block_mask(anchors, keep, 11, 4)
    flex = flex_block_mask(anchors, keep, 11, 4)
    rows = torch.arange(2)[:, None, None]
    queries, keys = torch.arange(12)[None, :, None], torch.arange(23)[None, None]
    assert torch.equal(flex.mask_mod(rows, 0, queries, keys), dense[:, 0])
    assert not dense[1, 0, 8:, :11].any()
    assert dense[1, 0, 8:].any(-1).all()


def test_flex_attention_gives_what_sdpa_gives():
    """Uncompiled, on a CPU: the kernel itself needs a GPU."""
    target = tiny_target()
    drafter = tiny_drafter(target, head_dim=16)
    batch = batch_of(drafter, 14, 9)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        dense = module_of(target, drafter).eval()(**batch)
        flex = module_of(target, drafter, flex_attention=True).eval()(**batch)
    assert drafter.config._attn_implementation == "flex_attention"
    torch.testing.assert_close(flex.loss_sum, dense.loss_sum, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_every_draft_and_every_parameter_has_a_gradient(shift_label, lam):
    target = tiny_target()
    drafter = tiny_drafter(target, shift_label=shift_label)
    module = module_of(target, drafter).train()
    module.lam = lam
    batch = batch_of(drafter, 14)
    for draft in range(drafter.config.num_draft_tokens):
        weights = torch.zeros_like(batch["weights"])
        weights[..., draft] = batch["weights"][..., draft]
        module.zero_grad()
        module(**{**batch, "weights": weights}).loss_sum.backward()
        for name, parameter in drafter.named_parameters():
            silent = draft < drafter.config.pure_draft_prefix_len and name.startswith(("prefix_gru", "embed_proj"))
            assert (parameter.grad is None or not parameter.grad.any()) == silent, (draft, name)
    assert all(parameter.grad is None for parameter in target.parameters())


def test_head_has_no_gradient_while_only_the_base_is_trained():
    target = tiny_target()
    drafter = tiny_drafter(target)
    module = module_of(target, drafter).train()
    module.lam = 1.0
    module(**batch_of(drafter, 14)).loss_sum.backward()
    # Present and zero, so that DDP finds every parameter used.
    assert not drafter.prefix_gru.weight_hh_l0.grad.any()
    assert drafter.fc.weight.grad.any()


def test_only_the_head_is_trained_on_a_frozen_backbone():
    target = tiny_target()
    drafter = tiny_drafter(target)
    module = module_of(target, drafter, trainable="head").train()
    module.lam = 0.0
    module(**batch_of(drafter, 14)).loss_sum.backward()
    trained = {name for name, parameter in drafter.named_parameters() if parameter.grad is not None}
    assert trained == {n for n, _ in drafter.named_parameters() if n.startswith(("prefix_gru", "embed_proj"))}
    with pytest.raises(ValueError, match="needs a drafter with a Domino head"):
        module_of(target, tiny_drafter(target, with_head=False), trainable="head")


def test_ttt_feeds_the_drafters_own_picks():
    """With other true tokens in the prefix teacher forcing changes its logits, the TTT arm does not."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    hidden = torch.randn(5, 4, 32, generator=torch.Generator().manual_seed(0))
    prefix = prompt(20).view(5, 4)
    other = prefix.clone()
    other[:, 1:] = (other[:, 1:] + 1) % 64
    for ttt in (False, True):
        module = module_of(target, drafter, ttt=ttt).eval()
        scored = module._select_scored(prefix)
        base = module._base_logits(hidden, scored)
        first, second = (module._final_logits(base, hidden, ids, scored) for ids in (prefix, other))
        assert torch.equal(first, second) == ttt
    # What it feeds: the same logits as teacher forcing on those picks.
    picks = torch.cat([prefix[:, :1], first.argmax(-1)[:, :-1]], dim=1)
    forced = module_of(target, drafter).eval()._final_logits(base, hidden, picks, scored)
    torch.testing.assert_close(first, forced, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("objective", ["ce", "kl", "tv"])
def test_scoring_all_tokens_by_list_equals_the_whole_vocabulary(objective):
    target = tiny_target()
    drafter = tiny_drafter(target)
    batch = batch_of(drafter, 14, 9)
    whole = module_of(target, drafter, objective=objective).train()(**batch)
    listed = module_of(target, drafter, list(range(64)), objective=objective).train()(**batch)
    torch.testing.assert_close(whole.loss_sum, listed.loss_sum, rtol=1e-5, atol=1e-5)


def test_scored_tokens_always_hold_the_labels():
    target = tiny_target()
    module = module_of(target, tiny_drafter(target), [1, 2], score_negatives=3).train()
    labels = torch.tensor([[60, 5], [2, 33]])
    scored = module._select_scored(labels)
    assert torch.equal(scored.ids[scored.index(labels)], labels)
    assert {1, 2, 5, 33, 60} <= set(scored.ids.tolist()) and len(scored.ids) <= 8


def test_distillation_reads_the_law_of_the_right_position():
    """A drafter whose logits are the target's own has KL equal to the law's entropy, and no total variation."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    module = module_of(target, drafter, objective="tv").train()
    batch = batch_of(drafter, 14)
    with torch.no_grad():
        logits = target(batch["input_ids"]).logits[0]
        _, last_hidden = module.read_target(batch["input_ids"], batch["attention_mask"])
        scored = module._select_scored(batch["labels"])
        law = module._target_logits(last_hidden, batch["anchors"], batch["anchor_mask"], 4, scored).softmax(-1)
    for block, anchor in enumerate(batch["anchors"][0].tolist()):
        for i in range(4):
            if anchor + i < 14:
                torch.testing.assert_close(law[block, i], logits[anchor + i].softmax(-1), rtol=1e-4, atol=1e-6)


def test_statistics_leave_cut_blocks_out_of_the_acceptance():
    weights = torch.tensor([[1.0, 0.5], [1.0, 0.0]])
    hits = torch.tensor([[True, True], [True, False]])
    stats = dict(zip(STATS, block_statistics(weights, hits, hits, weights, weights)))
    assert stats["count"].tolist() == [2, 1]
    assert stats["final_hits"].tolist() == [2, 1]
    assert stats["whole"].tolist() == [1, 1]
    assert stats["final_prefix"].tolist() == [1, 1]


def test_curriculum_schedules():
    assert [Curriculum.parse("linear").at(x) for x in (0.0, 0.25, 1.0)] == [1.0, 0.75, 0.0]
    assert [Curriculum.parse("linear:0.5").at(x) for x in (0.0, 0.25, 0.5, 1.0)] == [1.0, 0.5, 0.0, 0.0]
    assert Curriculum.parse("constant:0.3").at(0.9) == 0.3
    assert Curriculum.parse("cosine").at(0.5) == pytest.approx(0.5)
    for wrong in ("constant", "linear:0", "linear:2", "steps", "linear:x"):
        with pytest.raises(ValueError, match="lambda_schedule"):
            Curriculum.parse(wrong)


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_objective_equals_specforge(shift_label, lam):
    """Loss of one batch, against SpecForge's own training model (PyPI, `specforge`)."""
    require_peer("specforge")
    from specforge.algorithms.common.dflash_family_model import OnlineDominoModel
    from specforge.modeling.draft.domino import DominoDraftModel as SpecForgeDraftModel

    target = tiny_target()
    drafter = tiny_drafter(target, shift_label=shift_label)
    module = module_of(target, drafter).train()
    module.lam = lam
    samples = [Sample(str(i), prompt(n, offset=40 * i)[0], 3) for i, n in enumerate((14, 14))]
    data = BlockDataset(samples, num_drafts=drafter.config.num_draft_tokens, gamma=2.0)
    batch = collate_blocks([data[0], data[1]])
    ours = module(**batch).loss_sum / (batch["weights"].sum() + 1e-6)

    config = copy.deepcopy(drafter.config)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    theirs = SpecForgeDraftModel(config)
    theirs.load_state_dict(drafter.state_dict())
    reference = OnlineDominoModel(
        theirs,
        target.get_output_embeddings(),
        target.get_input_embeddings(),
        drafter.config.mask_token_id,
        block_size=drafter.config.block_size,
        attention_backend="sdpa",
        loss_decay_gamma=2.0,
        shift_label=shift_label,
    )
    taps, _ = module.read_target(batch["input_ids"], batch["attention_mask"])
    loss_mask = torch.zeros_like(batch["input_ids"])
    loss_mask[:, 3:] = 1
    loss, _, _ = reference(batch["input_ids"], taps, loss_mask, lambda_base=lam)
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-5)
