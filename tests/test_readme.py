"""The README tells the truth: its tree, its commands, its snippets and its links."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from modeling_domino.benchmark.blocks import render_blocks
from modeling_domino.cli import app


ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line for text in PAGES.values() for block in blocks(text, "bash") for line in block.splitlines()]
    inline = [word for text in PAGES.values() for word in re.findall(r"`((?:make|domino) [^`]+)`", text)]
    return [line.split("#")[0].strip() for line in [*lines, *inline] if line.split("#")[0].strip()]


def listed_paths() -> set[str]:
    (tree,) = blocks(README.split("## Files")[1], "")
    folder, paths = "", set()
    for line in tree.splitlines():
        name = line.split()[0]
        nested = line.startswith("  ")
        paths.add(f"{folder}{name}".rstrip("/") if nested else name.rstrip("/"))
        if not nested:
            folder = name if name.endswith("/") else ""
    return paths


def test_the_tree_lists_what_exists():
    missing = {path for path in listed_paths() if not (ROOT / path).exists()}
    assert missing == set()


def test_the_tree_leaves_nothing_out():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True).stdout
    wanted = set()
    for name in tracked.splitlines():
        parts = Path(name).parts
        if not (ROOT / name).exists():
            continue
        if parts[0] == "modeling_domino":
            wanted.add("/".join(parts[:2]))
        else:
            wanted.add(".ci/run" if parts[0] == ".ci" else parts[0])
    assert wanted - {".gitignore"} - listed_paths() == set()


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    used = {command.split()[1] for command in commands() if command.startswith("make ")}
    assert {"demo", "test", "ci"} <= used <= targets


def test_domino_commands_and_their_options_exist():
    known = typer.main.get_command(app).commands
    used = [re.sub(r'"[^"]*"', "TEXT", command).split()[1:] for command in commands() if command.startswith("domino ")]
    assert {words[0] for words in used} >= {"demo", "generate", "check", "info"}
    for words in used:
        options = {option for parameter in known[words[0]].params for option in parameter.opts}
        if not options:
            # The training commands read their arguments themselves.
            options = set(re.findall(r"--[\w-]+", CliRunner().invoke(app, [words[0], "--help"]).output))
        assert {word.split("=")[0] for word in words if word.startswith("--")} <= options, words


@pytest.mark.parametrize("number", range(len(blocks(README, "python"))))
def test_python_snippets_compile(number):
    compile(blocks(README, "python")[number], f"README.md snippet {number}", "exec")


def test_the_snippets_on_the_default_pair_run_as_written(capsys):
    first, _, loop, turns = blocks(README, "python")[:4]
    names = {}
    exec(compile(first, "README.md", "exec"), names)
    answer, statistics = capsys.readouterr().out.strip().splitlines()
    assert answer == "The capital of France is Paris."
    assert re.fullmatch(r"\S+, trained: (True|False), tau \d+\.\d\d", statistics)

    exec(compile(loop, "README.md", "exec"), names)
    streamed = capsys.readouterr().out.splitlines()
    assert "".join(line.split("kept: ")[1] for line in streamed).replace("<|im_end|>", "") == answer
    # The last call sampled one sequence.
    assert len(names["drafter"].last_runs) == 1 and names["drafter"].last_run.rule == "block"

    exec(compile(turns, "README.md", "exec"), names)
    assert "The capital of France is Paris." in (text := names["tokenizer"].decode(names["text"][0]))
    assert "And of Spain?" in text and "Madrid" in text
    assert names["cache"].get_seq_length() == names["text"].shape[1] - 1


def test_result_blocks_equal_their_files():
    """Numbers are never typed: each block is what its file renders to."""
    assert "<!-- results: " in README
    assert render_blocks(ROOT / "README.md") == README


def test_links_to_files_lead_somewhere():
    for name, text in PAGES.items():
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("https://") or (ROOT / target).exists(), f"{name}: {target}"


def test_snippets_that_trust_remote_code_pin_a_revision():
    for text in PAGES.values():
        for block in blocks(text, "python"):
            assert "trust_remote_code=True" not in block or "revision=" in block


def test_the_readme_is_honest_about_the_default_drafter():
    """As long as no trained drafter lies in the checkout, the README says so; afterwards it must not."""
    trained = any((ROOT / "hub_cards").glob("SmolLM2-135M-Instruct-Domino-b*/model.safetensors"))
    assert ("trained drafter in this repository yet" in README) is not trained
