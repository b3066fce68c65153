"""Staging lays out a complete Hub repository and stamps it; the commands around it and around conversion."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, golden_pair, tiny_drafter, tiny_target
from fresh_process import put_in_hub_cache
from safetensors.torch import load_file
from typer.testing import CliRunner

import modeling_domino
from modeling_domino import cli
from modeling_domino.stage import read_stamp, source_folder, stage, verify_stamp


PACKAGE = Path(modeling_domino.__file__).parent
TRAVELLING = sorted(path.name for path in PACKAGE.glob("*_domino.py"))
SHIM = ["custom_generate/generate.py", "custom_generate/requirements.txt", "custom_generate/stamp.py"]
STAMPED = {"repo_id": "acme/tiny-domino", "tag": "v1"}


@pytest.fixture
def source(tmp_path):
    tiny_drafter(tiny_target()).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def run(*words: str):
    return CliRunner().invoke(cli.app, list(words))


def test_a_staged_folder_is_complete_and_holds_nothing_else(source, tmp_path):
    (source / "README.md").write_text("# Card\n")
    (source / "optimizer.pt").write_bytes(b"state")
    folder, report = stage(str(source), **STAMPED, output=tmp_path / "staged")
    assert files(folder) == sorted(["README.md", "config.json", "model.safetensors", *SHIM, *TRAVELLING])
    assert report.left == ["optimizer.pt"] + [name for name in TRAVELLING if name not in files(folder)]
    for name in TRAVELLING:
        assert (folder / name).read_bytes() == (PACKAGE / name).read_bytes()
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "domino"
    assert sorted(config["auto_map"]) == ["AutoConfig", "AutoModel", "AutoModelForCausalLM"]


def test_stale_code_in_the_source_is_replaced(source, tmp_path):
    (source / "head_domino.py").write_text("old")
    (source / "gone_domino.py").write_text("of an earlier version")
    folder, _ = stage(str(source), output=tmp_path / "staged")
    assert [name for name in files(folder) if name.endswith("_domino.py")] == TRAVELLING
    assert (folder / "head_domino.py").read_bytes() == (PACKAGE / "head_domino.py").read_bytes()


def test_any_published_format_can_be_staged(tmp_path):
    folder, report = stage(str(GOLDEN / "shift_p1_b4"), output=tmp_path / "staged")
    assert (
        load_file(folder / "model.safetensors").keys()
        == load_file(GOLDEN / "shift_p1_b4" / "model.safetensors").keys()
    )
    assert 'changed  model_type = "qwen3" -> "domino"' in report.config


def test_staging_twice_gives_the_same_bytes(source, tmp_path):
    first, _ = stage(str(source), **STAMPED, output=tmp_path / "staged")
    before = {name: (first / name).read_bytes() for name in files(first)}
    # A staged folder can be staged itself, and what an older one held goes away.
    (first / "extra.bin").write_bytes(b"old")
    stage(str(source), **STAMPED, output=first)
    again, _ = stage(str(first), **STAMPED, output=tmp_path / "again")
    for folder in (first, again):
        assert {name: (folder / name).read_bytes() for name in files(folder)} == before


def test_the_stamp_names_repository_and_tag(source, tmp_path):
    folder, _ = stage(str(source), **STAMPED, output=tmp_path / "staged")
    stamp = read_stamp(folder)
    assert stamp["DRAFTER_ID"] == "acme/tiny-domino"
    assert stamp["DRAFTER_REVISION"] == "v1"
    assert len(stamp["FILES_SHA256"]) == 64
    assert verify_stamp(folder) == stamp
    # The name of the folder is not part of it.
    folder.rename(tmp_path / "elsewhere")
    assert verify_stamp(tmp_path / "elsewhere") == stamp


@pytest.mark.parametrize("damage", ["code", "weights", "new file", "missing file", "id", "tag"])
def test_a_change_after_the_stamp_shows(damage, source, tmp_path):
    folder, _ = stage(str(source), **STAMPED, output=tmp_path / "staged")
    stamp = folder / "custom_generate" / "stamp.py"
    if damage == "code":
        (folder / "head_domino.py").open("a").write("\n")
    elif damage == "weights":
        (folder / "model.safetensors").open("ab").write(b" ")
    elif damage == "new file":
        (folder / "more_domino.py").touch()
    elif damage == "missing file":
        (folder / "config.json").unlink()
    elif damage == "id":
        stamp.write_text(stamp.read_text() + "import os\n")
    else:
        stamp.write_text(stamp.read_text().replace('FILES_SHA256 = "', 'FILES_SHA256 = "0'))
    result = run("stage", str(folder), "--verify")
    assert result.exit_code == 3
    assert "changed after it was stamped" in result.stderr


def test_unstamped_folders_do_not_verify(source, tmp_path):
    folder, _ = stage(str(source), output=tmp_path / "staged")
    for path, message in ((folder, "is not stamped; stage it with --repo-id"), (source, "must be a staged folder")):
        result = run("stage", str(path), "--verify", "--output", str(path))
        assert result.exit_code == 3
        assert message in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repo-id", "acme/tiny"], "stamped with its id and its tag"),
        (["--tag", "v1"], "stamped with its id and its tag"),
        (["--repo-id", "not/an/id", "--tag", "v1"], "not/an/id"),
        (["--repo-id", "acme/tiny", "--tag", ""], "A tag is a name that git accepts"),
    ],
)
def test_half_a_stamp_is_refused(words, message, source, tmp_path):
    result = run("stage", str(source), "--output", str(tmp_path / "staged"), *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert files(tmp_path) == [f"source/{name}" for name in files(source)]


def test_only_folders_of_drafters_are_staged_and_replaced(source, tmp_path):
    result = run("stage", "no-such-drafter")
    assert result.exit_code == 2
    assert "must be a folder with a drafter, or the name of one in hub_cards/" in result.stderr
    (tmp_path / "diary").mkdir()
    result = run("stage", str(source), "--output", str(tmp_path / "diary"))
    assert result.exit_code == 2
    assert "replaces only a folder with a config.json" in result.stderr


def test_a_name_means_a_folder_of_hub_cards(source, tmp_path, monkeypatch):
    monkeypatch.setattr("modeling_domino.stage.CHECKOUT", tmp_path)
    (tmp_path / "hub_cards").mkdir()
    source.rename(tmp_path / "hub_cards" / "tiny-domino")
    assert source_folder("tiny-domino") == (tmp_path / "hub_cards" / "tiny-domino").resolve()
    result = run("stage", "tiny-domino")
    assert result.exit_code == 2
    assert "of a checkout and this package is installed; pass --output" in result.stderr
    (tmp_path / "pyproject.toml").touch()
    assert run("stage", "tiny-domino", "--repo-id", "acme/tiny-domino", "--tag", "v1").exit_code == 0
    assert (tmp_path / "dist" / "acme--tiny-domino" / "config.json").is_file()
    result = run("stage", "tiny-domino", "--repo-id", "acme/tiny-domino", "--verify")
    assert result.exit_code == 0
    assert "is acme/tiny-domino at v1" in result.stdout


def test_stage_command_lists_the_files(source, tmp_path):
    result = run("stage", str(source), "--output", str(tmp_path / "staged"))
    assert result.exit_code == 0
    for name in [*SHIM, "model.safetensors"]:
        assert name in result.stdout
    assert "Not stamped" in result.stderr


def test_convert_reads_hub_ids_from_the_cache(tmp_path):
    target, _, _ = golden_pair("shift_p1_b4")
    target.save_pretrained(tmp_path / "target")
    home = tmp_path / "home"
    public = tmp_path / "public"
    public.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / "shift_p1_b4" / name, public / name)
    put_in_hub_cache(public, home, repo_id="acme/tiny-domino")
    put_in_hub_cache(tmp_path / "target", home, repo_id="acme/target")
    words = ["acme/tiny-domino", str(tmp_path / "out"), "--to", "speculators", "--target", "acme/target"]
    done = subprocess.run(
        [sys.executable, "-m", "modeling_domino.cli", "convert", *words, "--revision", "v1"],
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "acme/target"
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], target.get_output_embeddings().weight)


def test_convert_command_prints_changes_and_warnings(tmp_path):
    config = json.loads((GOLDEN / "shift_p1_b4" / "config.json").read_text())
    del config["dflash_config"]["shift_label"]
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    (source / "model.safetensors").write_bytes((GOLDEN / "shift_p1_b4" / "model.safetensors").read_bytes())
    result = run("convert", str(source), str(tmp_path / "out"), "--to", "specforge")
    assert result.exit_code == 0
    assert "config  added    dflash_config.shift_label = false" in result.stdout
    assert result.stderr.startswith("Warning: The drafter's config does not give `shift_label`")
    assert len(result.stderr.splitlines()) == 1
    result = run("convert", str(source), str(tmp_path / "out"))
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert "--force" in result.stderr
    result = run("convert", str(tmp_path / "nowhere"), str(tmp_path / "new"))
    assert result.exit_code == 2
    assert "There is no folder" in result.stderr
