"""The default drafter in the checkout is what its record and its results say it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from modeling_domino import DominoConfig, DominoDraftModel
from modeling_domino.provenance import sha256_of


FOLDERS = sorted((Path(__file__).parents[1] / "hub_cards").glob("SmolLM2-135M-Instruct-Domino-b*"))
MOST_BYTES = 32_000_000


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def folder(request) -> Path:
    return request.param


def test_its_configuration_is_the_published_kind(folder):
    config = DominoConfig.from_pretrained(folder)
    assert config.target_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert config.shift_label and config.pure_draft_prefix_len == 1
    assert config.block_size == int(folder.name.rsplit("-b", 1)[1])
    # The last layer's output exists in two forms, before and after the final norm.
    assert max(config.target_layer_ids) < config.num_target_layers - 1


def test_its_weights_are_small_whole_and_those_of_the_record(folder):
    assert (folder / "model.safetensors").stat().st_size <= MOST_BYTES
    drafter = DominoDraftModel.from_pretrained(folder)
    assert drafter.dtype == torch.bfloat16
    assert all(tensor.isfinite().all() for tensor in drafter.state_dict().values())
    weights = sha256_of(folder)
    training = json.loads((folder / "training.json").read_text())
    assert training["provenance"]["weights_sha256"]["drafter"] == weights
    results = json.loads((folder / "results" / "dev.json").read_text())
    assert results["provenance"]["weights_sha256"]["drafter"] == weights


def test_its_measured_acceptance(folder):
    """What the card promises, on recorded runs: thresholds hold for lower bounds, all texts are the target's."""
    summary = json.loads((folder / "results" / "dev.json").read_text())
    chain, off = summary["results"]["chain"], summary["results"]["head-off"]
    assert chain["gsm8k"]["tau_ci"][0] >= 2.0
    assert chain["average"]["tau_ci"][0] >= 1.7
    assert chain["gsm8k"]["speedup_ci"][0] >= 1.15 and chain["average"]["speedup_ci"][0] >= 1.15
    for results in (summary["results"], summary["results_at"]["1"]):
        trees = [cells["average"] for name, cells in results.items() if name.startswith("tree")]
        assert max(cell["beside"]["tau_ratio_ci"][0] for cell in trees if cell != "not run") >= 1.15
    assert all(chain[task]["tau"] > off[task]["tau"] for task in ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench"))
    assert summary["tokens"]["compared"] > 10_000 and summary["tokens"]["differing"] == 0


def test_its_head_beats_the_same_data_without_one(folder):
    arms = json.loads((folder / "ablation.json").read_text())["arms"]
    assert arms["full"]["tau"]["head_on"]["tau"] > arms["no-head"]["tau"]["head_on"]["tau"]
