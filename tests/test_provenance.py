"""Provenance: true facts about code, machine and weights, and nothing of the machine's paths."""

from __future__ import annotations

import hashlib
import json
import subprocess

import pytest
import torch
import transformers

from modeling_domino import provenance


def git(folder, *words):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    return subprocess.run(["git", "-C", folder, *identity, *words], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def test_git_state_tells_commit_and_changes(repository):
    sha = git(repository, "rev-parse", "HEAD").strip()
    assert provenance.git_state(repository) == (sha, False)
    (repository / "untracked").write_text("x")
    assert provenance.git_state(repository) == (sha, False)
    (repository / "file").write_text("two")
    assert provenance.git_state(repository) == (sha, True)


def test_a_package_inside_a_foreign_repository_has_no_commit(repository):
    (repository / "site-packages").mkdir()
    assert provenance.git_state(repository / "site-packages") == (None, None)


def test_a_repository_without_commits_has_no_commit(tmp_path):
    git(tmp_path, "init", "-q")
    assert provenance.git_state(tmp_path) == (None, None)


def test_the_record_is_json_with_the_keys_of_the_schema(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    record = provenance.provenance(
        dtype=torch.bfloat16, weights={"target": weights, "drafter": tmp_path / "none"}, command=["domino", "demo"]
    )
    assert json.loads(json.dumps(record)) == record
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["transformers"] == transformers.__version__
    assert record["hardware"]["threads"] == torch.get_num_threads()
    assert record["hardware"]["cores"] >= 1
    assert record["hardware"]["device"] == "cpu"
    assert record["dtype"] == "bfloat16"
    assert record["command"] == "domino demo"
    assert record["weights_sha256"] == {"target": hashlib.sha256(b"weights").hexdigest(), "drafter": None}


def test_weights_in_several_files_are_hashed_in_name_order(tmp_path):
    for name, content in (("b.safetensors", b"two"), ("a.safetensors", b"one"), ("config.json", b"{}")):
        (tmp_path / name).write_bytes(content)
    assert provenance.sha256_of(tmp_path) == hashlib.sha256(b"onetwo").hexdigest()


def test_the_command_names_no_folder_of_the_machine(tmp_path):
    command = [
        str(tmp_path / "domino"),
        "generate",
        f"--target={tmp_path}/t",
        "--drafter",
        str(tmp_path / "d"),
        "a / b",
    ]
    record = provenance.provenance(command=command)
    assert record["command"] == "domino generate --target=t --drafter d 'a / b'"
