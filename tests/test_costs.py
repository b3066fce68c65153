"""Measured costs: what they depend on, where they lie, and that a damaged file is measured anew."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import generate_loop, prompt, tiny_drafter, tiny_target
from test_generation import our_hooks

from modeling_domino import costs_domino
from modeling_domino.costs_domino import costs_folder, costs_of
from modeling_domino.drafting_domino import DraftOptions
from modeling_domino.sizing_domino import Costs
from modeling_domino.target_domino import TargetView
from modeling_domino.tree_domino import TreeShape
from modeling_domino.vocabulary_domino import DraftVocabulary


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(costs_domino, "_KNOWN", {})
    return tmp_path / "cache" / "costs"


@pytest.fixture
def pair():
    target = tiny_target()
    drafter = tiny_drafter(target)
    return TargetView(target, drafter.config), drafter


def test_measured_once_and_kept(folder, pair, monkeypatch, caplog):
    assert costs_folder() == folder
    first = costs_of(*pair, DraftOptions(), rows=5)
    assert sorted(first.verify) == [1, 2, 3, 4, 5] and min(first.verify.values()) > 0 and first.draft >= 0
    assert "Measuring what rounds" in caplog.text
    (file,) = folder.iterdir()
    content = json.loads(file.read_text())
    assert content["facts"]["threads"] == torch.get_num_threads() and content["verify_seconds"]["3"] > 0

    # Neither this process nor another measures again.
    monkeypatch.setattr(costs_domino, "measure_costs", None)
    assert costs_of(*pair, DraftOptions(), rows=3) is first
    costs_domino._KNOWN.clear()
    assert costs_of(*pair, DraftOptions(), rows=4) == first


def test_more_rows_and_damaged_files_are_measured_anew(folder, pair):
    small = costs_of(*pair, DraftOptions(), rows=2)
    assert max(small.verify) == 2
    assert max(costs_of(*pair, DraftOptions(), rows=7).verify) == 8
    (file,) = folder.iterdir()
    for damage in ("", "[]", '{"verify_seconds": {}}', '{"verify_seconds": {"1": "x"}, "draft_seconds": 1}'):
        file.write_text(damage)
        costs_domino._KNOWN.clear()
        assert isinstance(costs_of(*pair, DraftOptions(), rows=2), Costs)
        assert json.loads(file.read_text())["facts"]


def test_what_costs_depend_on(folder, pair):
    view, drafter = pair
    subset = DraftVocabulary(torch.arange(9))
    everything = [
        (DraftOptions(), None),
        (DraftOptions(candidates=8), None),
        (DraftOptions(vocabulary=subset), None),
        (DraftOptions(), TreeShape(nodes=4)),
    ]
    for options, tree in everything:
        costs_of(view, drafter, options, rows=2, tree=tree)
    drafter.use_head = False
    costs_of(view, drafter, DraftOptions(), rows=2)
    assert len(list(folder.iterdir())) == 5


def test_a_folder_that_cannot_be_written(pair, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(costs_domino, "_KNOWN", {})
    first = costs_of(*pair, DraftOptions(), rows=2)
    assert "could not be kept" in caplog.text
    assert costs_of(*pair, DraftOptions(), rows=2) is first


@pytest.mark.parametrize("options", [{"verify_width": "auto"}, {"tree": "auto"}, {"verify_width": "auto", "tree": 6}])
def test_auto_measures_by_itself(folder, pair, options):
    view, drafter = pair
    expected = view.target.generate(prompt(5), do_sample=False, max_new_tokens=10)
    assert torch.equal(generate_loop(view.target, drafter, prompt(5), max_new_tokens=10, **options), expected)
    assert len(list(folder.iterdir())) == 1
    # The hooks of the measurement are gone.
    assert not any(our_hooks(layer) for layer in view.layers)
