"""The draft vocabulary: its file beside the weights, and the rows that are gathered for it."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from conftest import generate_loop, prompt, tiny_drafter, tiny_target
from torch import nn

from modeling_domino import DominoDraftModel
from modeling_domino.vocabulary_domino import DRAFT_VOCAB_FILE, DraftVocabulary, read_ranking


def test_a_ranking_travels_with_the_weights(tmp_path):
    drafter = tiny_drafter(tiny_target())
    drafter.save_pretrained(tmp_path / "without")
    assert not (tmp_path / "without" / DRAFT_VOCAB_FILE).exists()
    assert DominoDraftModel.from_pretrained(tmp_path / "without").draft_ranking is None

    drafter.draft_ranking, drafter.config.draft_vocab = [5, 63, 0, 7], 3
    drafter.save_pretrained(tmp_path / "with")
    loaded = DominoDraftModel.from_pretrained(tmp_path / "with")
    assert loaded.draft_ranking == [5, 63, 0, 7] and loaded.config.draft_vocab == 3
    assert pickle.loads(pickle.dumps(loaded)).draft_ranking == [5, 63, 0, 7]
    assert {path.name for path in (tmp_path / "with").iterdir()} - {
        path.name for path in (tmp_path / "without").iterdir()
    } == {DRAFT_VOCAB_FILE}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be a JSON object with `version` and `token_ids`"),
        ("[1, 2]", "must be a JSON object"),
        ('{"version": 1}', "token_ids"),
        ('{"version": 2, "token_ids": [1]}', "must be of version 1, got 2"),
        ('{"version": 1, "token_ids": []}', "distinct token ids of the vocabulary of 64"),
        ('{"version": 1, "token_ids": [1, 2, 1]}', "distinct token ids"),
        ('{"version": 1, "token_ids": [64]}', "distinct token ids"),
        ('{"version": 1, "token_ids": [-1]}', "distinct token ids"),
        ('{"version": 1, "token_ids": [1.0]}', "distinct token ids"),
    ],
)
def test_a_file_that_is_no_ranking(tmp_path, content, message):
    tiny_drafter(tiny_target()).save_pretrained(tmp_path)
    (tmp_path / DRAFT_VOCAB_FILE).write_text(content)
    with pytest.raises(ValueError, match=message):
        DominoDraftModel.from_pretrained(tmp_path)


def test_no_file_is_no_ranking(tmp_path):
    assert read_ranking(tmp_path, 64) is None
    (tmp_path / DRAFT_VOCAB_FILE).write_text(json.dumps({"version": 1, "token_ids": [1, 0]}))
    assert read_ranking(tmp_path, 64) == [1, 0]


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_rows_are_those_of_the_layer_and_gathered_once(bias):
    layer, ids = nn.Linear(6, 20, bias=bias), torch.tensor([7, 0, 19])
    vocabulary, hidden = DraftVocabulary(ids), torch.randn(2, 3, 6)
    torch.testing.assert_close(vocabulary.base_logits(layer, hidden), layer(hidden)[..., ids])
    rows = vocabulary.correction(layer)
    # The same tokens in another object are the same rows.
    assert DraftVocabulary(ids.clone()).correction(layer).weight is rows.weight
    layer.weight.mul_(2)
    torch.testing.assert_close(vocabulary.base_logits(layer, hidden), layer(hidden)[..., ids])
    layer.to(torch.bfloat16)
    assert vocabulary.base_logits(layer, hidden).dtype == torch.bfloat16
    other = DraftVocabulary(torch.tensor([1, 2]))
    torch.testing.assert_close(other.base_logits(layer, hidden), layer(hidden.bfloat16())[..., other.ids])


@pytest.mark.parametrize("ids", [[], [1, 1], [64], [-1], [1.0], "12"])
def test_a_ranking_that_is_set_is_checked(ids):
    drafter = tiny_drafter(tiny_target())
    with pytest.raises(ValueError, match="`draft_ranking` must list distinct token ids of the vocabulary of 64"):
        drafter.draft_ranking = ids
    assert drafter.draft_ranking is None


def test_an_output_head_whose_rows_cannot_be_taken_out():
    class Quantised(nn.Linear):
        """Stands for a layer that stores its weights in a form of its own."""

    target = tiny_target()
    head = Quantised(32, 64, bias=False)
    head.weight = target.lm_head.weight
    target.lm_head = head
    drafter = tiny_drafter(target)
    drafter.draft_ranking = [1, 2, 3]
    with pytest.raises(ValueError, match="a plain linear layer in memory, got Quantised; leave `draft_vocab` out"):
        drafter.spec_generate(target, prompt(4), max_new_tokens=4, draft_vocab=2)


def test_a_vocabulary_of_one_token_and_tied_targets():
    for tied in (False, True):
        target = tiny_target(tied=tied)
        drafter = tiny_drafter(target)
        expected = target.generate(prompt(5), do_sample=False, max_new_tokens=15)
        # The likeliest token of the text itself, so that some drafts are kept.
        drafter.draft_ranking = [expected[0, 5:].mode().values.item()]
        for tree in (None, 4):
            output = generate_loop(target, drafter, prompt(5), max_new_tokens=15, draft_vocab=1, tree=tree)
            assert torch.equal(output, expected)
