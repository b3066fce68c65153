"""Cards are what their folders hold: those that are committed equal what `domino card` renders, and they pass the check."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from modeling_domino.cli import app
from modeling_domino.cli.checkout import from_checkout


ROOT = Path(__file__).parent.parent
cards = from_checkout("hub_cards.cards", "card")
lint = from_checkout("hub_cards.lint", "card")
staging = from_checkout("hub_cards.staging", "card")
FOLDERS = sorted(path.parent for path in (ROOT / "hub_cards").glob("*/README.md") if path.parent.name != "templates")
DEFAULT = ROOT / "hub_cards" / "SmolLM2-135M-Instruct-Domino-b5"


def test_every_published_folder_has_a_card():
    named = {"SmolLM2-135M-Instruct-Domino-b5", "Qwen3-4B-Domino-b16", "Qwen3-8B-Domino-b16"}
    assert named <= {folder.name for folder in FOLDERS}
    made = {
        path.parent
        for name in ("card.json", "recipe.json", "regenerate.json")
        for path in (ROOT / "hub_cards").glob(f"*/{name}")
    }
    assert made == set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_committed_card_is_what_the_command_renders(folder):
    assert (folder / "README.md").read_text() == cards.render(folder), f"run `domino card {folder.name}`"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_committed_card_passes_the_check(folder):
    assert lint.card_problems(folder, staging.kind_of(folder), f"ORG/{folder.name}") == []


def test_the_readme_has_the_engine_table_of_the_cards():
    page = ROOT / "README.md"
    assert cards.engines_table() in page.read_text()
    assert cards.render_page(page) == page.read_text(), "run `domino card README.md`"


def test_untested_engines_say_so():
    rows = json.loads(cards.ENGINES.read_text())["rows"]
    for row in rows:
        # A claim has a version and a date.
        claims = row["loads"] == "yes" or row["head"] == "yes"
        assert bool(row["version"] and row["date"]) or not claims, row
        assert claims or "untested" in row["head"] or row["head"].startswith("no"), row


def test_recipes_cite_published_numbers_and_measure_none():
    for name, tau in (("Qwen3-4B-Domino-b16", "7.08 | 5.47"), ("Qwen3-8B-Domino-b16", "7.17 | 5.49")):
        card = (ROOT / "hub_cards" / name / "README.md").read_text()
        assert "Not measured by us" in card and f"| Domino chain | mean | {tau} |" in card
        assert "model-index" not in card and "enable_thinking=False" in card


def copy_of(folder: Path, destination: Path) -> Path:
    """A card folder without its weights."""
    return Path(shutil.copytree(folder, destination / folder.name, ignore=shutil.ignore_patterns("*.safetensors")))


def test_a_card_follows_its_result_file(tmp_path):
    folder = copy_of(DEFAULT, tmp_path)
    before = cards.render(folder)
    summary = json.loads((folder / "results" / "dev.json").read_text())
    summary["results"]["chain"]["average"].update(speedup=3.23, speedup_ci=[3.11, 3.34])
    summary["results"]["chain"]["gsm8k"]["tau"] = 3.21
    (folder / "results" / "dev.json").write_text(json.dumps(summary))
    after = cards.render(folder)
    assert "3.23x as fast as plain generation on this hardware: it pays." in after and "3.23x" not in before
    assert "| gsm8k |" in after and "3.21 / 6" in after and "value: 3.21" in after


def test_the_record_that_training_writes_is_enough(tmp_path):
    folder = copy_of(DEFAULT, tmp_path)
    record = json.loads((folder / "training.json").read_text())
    log = [
        {"step": 700, "loss": 2.5},
        {"step": 765, "eval_acceptance": 2.618, "eval_acceptance_base": 2.117},
        {"step": 777},
    ]
    record = {"provenance": record["provenance"], "processes": 1, "seconds": 4321.6, "seed": 7, "log_history": log}
    (folder / "training.json").write_text(json.dumps(record))
    (folder / "README.md").write_text(cards.render(folder))
    text = (folder / "README.md").read_text()
    assert f"777 steps in 4,322 seconds on {record['provenance']['hardware']['cpu']}; seed 7." in text
    assert "Held-out acceptance length at its end: 2.62, 2.12 without the correction." in text
    assert lint.card_problems(folder, "model") == []


def test_the_command_writes_card_and_figure(tmp_path):
    folder = copy_of(DEFAULT, tmp_path)
    (folder / "README.md").unlink()
    (folder / "results" / "tasks.svg").unlink()
    result = CliRunner().invoke(app, ["card", str(folder), "--repo-id", "acme/other", "--tag", "v7"])
    assert result.exit_code == 0, result.output
    card = (folder / "README.md").read_text()
    assert 'custom_generate="acme/other"' in card and 'revision="v7"' in card and card.count("# other") == 1
    assert "(results/tasks.svg)" in card and (folder / "results" / "tasks.svg").read_text().startswith("<?xml")
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in DEFAULT.iterdir() if path.suffix != ".safetensors"
    )


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("card.json", "needs card.json with its license and language, or recipe.json"),
        ("results/dev.json", "needs results/dev.json; `domino bench` measures it"),
        ("training.json", "needs training.json, the record that `domino train` writes"),
    ],
)
def test_a_card_is_not_rendered_without_its_files(missing, message, tmp_path):
    folder = copy_of(DEFAULT, tmp_path)
    (folder / missing).unlink()
    if missing == "training.json":
        (folder / "ablation.json").unlink()
        (folder / "card.json").write_text('{"license": "mit", "language": ["en"]}')
    result = CliRunner().invoke(app, ["card", str(folder)])
    assert result.exit_code == 2 and message in result.stderr
    assert not (folder / ".README.md").exists()


def test_answers_from_an_unknown_source_and_damaged_shards_are_refused(tmp_path):
    import gzip

    settings = {"target": "default", "max_new_tokens": 200, "temperature": 0.0}
    (tmp_path / "regenerate.json").write_text(json.dumps({"settings": settings, "provenance": {}}))
    with pytest.raises(ValueError, match="needs shards"):
        cards.render(tmp_path)
    row = {"id": "somewhere/1", "turns": ["a"], "response_ids": [1], "finish": "eos"}
    shard = tmp_path / "answers-00000.jsonl.gz"
    shard.write_bytes(gzip.compress(json.dumps(row).encode()))
    with pytest.raises(ValueError, match="Prompts of somewhere need a licence; add them to sources.json"):
        cards.render(tmp_path)
    whole = gzip.compress(json.dumps(row).encode())
    damaged = (whole[:-12], b"\x1f\x8b" + bytes(40), whole[:12] + b"\xff" * 20, gzip.compress(b"[1]"))
    for content in damaged:
        shard.write_bytes(content)
        with pytest.raises(ValueError, match="is no complete shard"):
            cards.render(tmp_path)


def test_without_a_checkout_the_commands_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr("modeling_domino.cli.checkout.CHECKOUT", tmp_path)
    for words in (["card", "x"], ["push", "x", "--repo-id", "acme/x", "--tag", "v1"]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        assert f"`domino {words[0]}` needs a checkout with hub_cards/" in result.stderr
