"""The ranking of tokens: counted in answers, written beside a drafter's weights, and carried where the drafter goes."""

from __future__ import annotations

import gzip
import json

import pytest
from conftest import tiny_drafter, tiny_target
from typer.testing import CliRunner

from modeling_domino import DominoDraftModel
from modeling_domino.cli import app
from modeling_domino.convert import convert
from modeling_domino.stage import stage
from modeling_domino.training.ranking import rank
from modeling_domino.vocabulary_domino import DRAFT_VOCAB_FILE


ANSWERS = [[7, 7, 2], [7, 5, 2], [5, 63]]


@pytest.fixture
def data(tmp_path):
    """Two files of answers, one of them gzipped."""
    rows = [json.dumps({"id": str(i), "turns": ["x"], "response_ids": ids}) for i, ids in enumerate(ANSWERS)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows[:2]) + "\n")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(rows[2] + "\n")
    return [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]


@pytest.fixture
def drafter(tmp_path):
    tiny_drafter(tiny_target()).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_the_most_frequent_come_first_and_the_smaller_of_equals(data):
    ranking = rank(data)
    assert ranking.ids == [7, 2, 5, 63] and ranking.counts == [3, 2, 2, 1]
    assert [ranking.coverage(size) for size in (1, 2, 3, 4)] == [3 / 8, 5 / 8, 7 / 8, 1.0]


def test_the_command_and_where_the_file_goes(data, drafter, tmp_path):
    sources = [word for path in data for word in ("--data", str(path))]
    result = CliRunner().invoke(app, ["draft-vocab", str(drafter), *sources, "--size", "3"])
    assert result.exit_code == 0, result.output
    assert "4 tokens cover 100.00% of the answers" in result.stdout and "3 tokens are ranked in" in result.stdout
    content = json.loads((drafter / DRAFT_VOCAB_FILE).read_text())
    assert content["token_ids"] == [7, 2, 5] and content["coverage"] == 0.875 and content["tokens_counted"] == 8
    assert set(content["data_sha256"]) == {"a.jsonl", "b.jsonl.gz"}
    assert DominoDraftModel.from_pretrained(drafter).draft_ranking == [7, 2, 5]

    report = convert(drafter, tmp_path / "ours")
    assert (tmp_path / "ours" / DRAFT_VOCAB_FILE).read_bytes() == (drafter / DRAFT_VOCAB_FILE).read_bytes()
    assert DRAFT_VOCAB_FILE not in report.left
    # Other programs would take it for nothing they know.
    report = convert(drafter, tmp_path / "flat", to="flat")
    assert not (tmp_path / "flat" / DRAFT_VOCAB_FILE).exists() and DRAFT_VOCAB_FILE in report.left
    staged, _ = stage(str(drafter), output=tmp_path / "staged")
    assert DominoDraftModel.from_pretrained(staged).draft_ranking == [7, 2, 5]


def test_what_cannot_be_ranked(data, drafter, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    for arguments, message in (
        ([str(drafter), "--data", str(tmp_path / "empty.jsonl")], "needs answers of the target"),
        ([str(tmp_path), "--data", str(data[0])], "has no config.json"),
    ):
        result = CliRunner().invoke(app, ["draft-vocab", *arguments])
        assert result.exit_code == 2 and message in result.stderr, result.output
    with open(data[0], "a") as file:
        file.write(json.dumps({"id": "far", "turns": ["x"], "response_ids": [64]}) + "\n")
    result = CliRunner().invoke(app, ["draft-vocab", str(drafter), "--data", str(data[0])])
    assert result.exit_code == 2 and "distinct token ids of the vocabulary of 64" in result.stderr
    assert not (drafter / DRAFT_VOCAB_FILE).exists()
