"""Calibration: the temperatures that accept most, against a reference that tries them one by one, and where they go."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import prompt, tiny_drafter, tiny_target
from typer.testing import CliRunner

from modeling_domino import DominoDraftModel
from modeling_domino.cli import app, tuning
from modeling_domino.cli.pair import Pair
from modeling_domino.taps_domino import TargetTaps
from modeling_domino.target_domino import TargetView
from modeling_domino.training.calibrate import GRID, calibrate
from modeling_domino.training.data import Sample


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=12)


def answers(target, number: int) -> list[Sample]:
    samples = []
    for i in range(number):
        ids = target.generate(prompt(4, vocab_size=12, offset=i), do_sample=False, max_new_tokens=8)[0]
        samples.append(Sample(f"a/{i}", ids, 4))
    return samples


@torch.no_grad()
def overlaps_one_by_one(target, drafter, samples, temperature: float) -> torch.Tensor:
    """Mean of sum min(p, q) by temperature of the draft and by draft, from single blocks of the drafter."""
    view, n = TargetView(target, drafter.config), drafter.config.num_draft_tokens
    total, count = torch.zeros(len(GRID), n), torch.zeros(n)
    for sample in samples:
        ids = sample.ids[None]
        with TargetTaps(view.layers, drafter.config.target_layer_ids, use_hooks=True) as taps:
            outputs = target(ids)
            context = taps.read(outputs, device=ids.device)
        for anchor in range(sample.prompt_length, ids.shape[1] - 1):
            masks = torch.full((1, drafter.config.block_size - 1), drafter.config.mask_token_id)
            noise = view.embed(torch.cat([ids[:, anchor : anchor + 1], masks], dim=1), like=context)
            positions = torch.arange(anchor + drafter.config.block_size)[None]
            hidden = drafter(noise, context[:, :anchor], positions).last_hidden_state[:, :n]
            drafts = min(n, ids.shape[1] - 1 - anchor)
            hidden = hidden[:, :drafts]
            embeds = view.embed(ids[:, anchor : anchor + drafts], like=context)
            logits = drafter.head.teacher_forced(view.base_logits(hidden), hidden, embeds)[0]
            p = (outputs.logits[0, anchor : anchor + drafts] / temperature).softmax(-1)
            for i, scale in enumerate(GRID):
                q = (logits / (temperature * scale)).softmax(-1)
                total[i, :drafts] += torch.minimum(p, q).sum(-1)
            count[:drafts] += 1
    return total / count


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_best_temperatures_are_found(target, temperature):
    drafter = tiny_drafter(target, block_size=3)
    samples = answers(target, 2)
    found = calibrate(drafter, target, samples, temperature=temperature, max_anchors=99)
    expected = overlaps_one_by_one(target, drafter, samples, temperature)
    assert found.blocks == sum(sample.num_anchors for sample in samples)
    assert found.before == pytest.approx(expected[GRID.index(1.0)].tolist(), abs=1e-5)
    assert found.after == pytest.approx(expected.max(dim=0).values.tolist(), abs=1e-5)
    assert found.temperatures == pytest.approx([GRID[i] for i in expected.argmax(dim=0).tolist()], abs=1e-4)
    assert all(after >= before for before, after in zip(found.before, found.after))
    with pytest.raises(ValueError, match="needs answers and a positive temperature, got 0 answers"):
        calibrate(drafter, target, [])


def test_the_command_writes_the_config_and_nothing_else(target, tmp_path, monkeypatch):
    tiny_drafter(target, block_size=3).save_pretrained(tmp_path / "drafter")
    before = json.loads((tmp_path / "drafter" / "config.json").read_text())
    samples = answers(target, 3)
    drafter = DominoDraftModel.from_pretrained(tmp_path / "drafter")
    monkeypatch.setattr(tuning, "load_pair", lambda *args, **kwargs: Pair(target, None, drafter, None, {}))
    monkeypatch.setattr(tuning, "read_samples", lambda *args, **kwargs: samples)
    words = ["calibrate", str(tmp_path / "drafter"), "--data", "answers.jsonl", "--samples", "2"]

    result = CliRunner().invoke(app, [*words, "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "draft 1: temperature" in result.stdout and "nothing written" in result.stdout
    assert json.loads((tmp_path / "drafter" / "config.json").read_text()) == before

    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    after = json.loads((tmp_path / "drafter" / "config.json").read_text())
    temperatures = after.pop("draft_temperatures")
    assert after == before and len(temperatures) == 3
    assert DominoDraftModel.from_pretrained(tmp_path / "drafter").config.draft_temperatures == temperatures

    result = CliRunner().invoke(app, [*words, "--temperature", "0"])
    assert result.exit_code == 2 and "a positive temperature" in result.stderr
