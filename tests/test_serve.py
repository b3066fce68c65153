"""`domino serve`: the export and the launch of a server, and a plain no for engines that would serve something else."""

from __future__ import annotations

import json

import pytest
from conftest import tiny_drafter, tiny_target
from typer.testing import CliRunner

from modeling_domino import serve
from modeling_domino.cli import app


def run(*words: str):
    return CliRunner().invoke(app, ["serve", *words])


@pytest.fixture
def drafter(tmp_path):
    tiny_drafter(tiny_target(), target_model="acme/target").save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_the_flat_export_is_written_and_the_launch_printed(drafter, tmp_path):
    flat = tmp_path / "flat"
    result = run("--drafter", str(drafter), "--output", str(flat), "--tp-size", "2")
    assert result.exit_code == 0, result.output
    assert json.loads((flat / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]
    assert result.stdout == (
        "python -m sglang.launch_server --model-path acme/target --dtype bfloat16 --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {flat} --tp-size 2\n"
    )
    # What is flat already is served as it is; what was written before is replaced.
    again = run("--drafter", str(flat), "--target", "acme/other")
    assert (
        f"--model-path acme/other --dtype bfloat16 --speculative-algorithm DFLASH --speculative-draft-model-path {flat}"
        in again.stdout
    )
    assert run("--drafter", str(drafter), "--output", str(flat)).exit_code == 0
    # What is somebody's own is not.
    (flat / "notes.md").write_text("mine")
    refused = run("--drafter", str(drafter), "--output", str(flat))
    assert refused.exit_code == 2 and "replaces only an earlier export of its own" in refused.stderr
    assert (flat / "notes.md").read_text() == "mine"


@pytest.mark.parametrize(("engine", "name"), [("vllm", "vLLM"), ("tensorrt-llm", "TensorRT-LLM")])
def test_engines_without_the_head_are_refused(engine, name, drafter):
    result = run("--engine", engine, "--drafter", str(drafter))
    assert result.exit_code == 2
    assert f"Error: No merged runtime of {name} executes the correction head" in result.stderr


def test_unknown_engines_and_targets_are_refused(drafter, tmp_path):
    assert "must be one of sglang, vllm, tensorrt-llm, got tgi" in run("--engine", "tgi", "--drafter", "a/b").stderr
    tiny_drafter(tiny_target()).save_pretrained(tmp_path / "nameless")
    result = run("--drafter", str(tmp_path / "nameless"), "--output", str(tmp_path / "flat"))
    assert result.exit_code == 2 and "does not name its target; name it with --target" in result.stderr


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "has dflash_config or block_size, that in "),
        ([], "must hold a JSON object, got list; copy or save it again."),
    ],
)
def test_what_is_no_drafter_is_not_served(config, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("--drafter", str(tmp_path), "--target", "acme/target")
    assert result.exit_code == 2 and message in result.stderr and not result.stdout


def test_running_needs_the_server(drafter, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    result = run("--drafter", str(drafter), "--output", str(tmp_path / "flat"), "--run")
    assert result.exit_code == 2 and "SGLang is not installed here" in result.stderr
    ran = []
    monkeypatch.setattr(serve, "find_spec", lambda name: name)
    monkeypatch.setattr(
        serve.subprocess, "run", lambda command: ran.append(command) or type("Done", (), {"returncode": 7})
    )
    assert run("--drafter", str(drafter), "--output", str(tmp_path / "flat"), "--run").exit_code == 7
    assert ran[0][1:3] == ["-m", "sglang.launch_server"]
