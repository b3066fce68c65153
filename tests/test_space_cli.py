"""`domino trace` and `domino space`: what they write and start, and what they say when they cannot."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import tiny_drafter, tiny_target, tiny_tokenizer
from typer.testing import CliRunner

from modeling_domino import space
from modeling_domino.cli import app, show


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = tiny_target()
    target.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    tiny_drafter(target).save_pretrained(folder / "drafter")
    return ["--target", str(folder / "target"), "--drafter", str(folder / "drafter")]


def run(*arguments: str):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def body(html: str) -> str:
    return re.search(r"<h2>Rounds</h2>(.*)<h2>Text</h2>", html, re.DOTALL)[1]


@pytest.mark.parametrize("extra", [[], ["--tree", "6"]])
def test_a_trace_is_recorded_and_replayed_without_the_models(pair, tmp_path, extra):
    html, out, again = tmp_path / "one.html", tmp_path / "trace.json", tmp_path / "two.html"
    done = run("trace", "a b <b> c", "--max-new-tokens", 12, "--html", html, "--out", out, *pair, *extra)
    assert done.exit_code == 0, done.output
    trace = json.loads(out.read_text())
    assert len(trace["output_ids"]) == 12 and trace["kind"] == ("tree" if extra else "chain")
    assert body(html.read_text()).count('class="dm-row"') == len(trace["rounds"])
    assert "a b &lt;b&gt; c" in html.read_text()
    assert trace["environment"]["dtype"] == "float32" and trace["environment"]["hardware"] in html.read_text()
    done = run("trace", "--replay", out, "--html", again, *pair[:2])
    assert done.exit_code == 0, done.output
    assert body(again.read_text()) == body(html.read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.html", "trace.json", "two.html"]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["trace", "a"], "Nothing would be written; name a page with --html or a trace with --out."),
        (["trace", " ", "--out", "x"], "The prompt is empty; give it as an argument."),
        (
            ["trace", "--replay", "broken.json", "--html", "x"],
            "A trace is one JSON object, and broken.json is not JSON.",
        ),
        (
            ["trace", "--replay", "other.json", "--html", "x"],
            "A trace has version 1, rounds and output_ids, and other.json",
        ),
        (["trace", "--replay", "absent.json", "--html", "x"], "absent.json"),
        (["space", "--target", "acme/target"], "The target acme/target needs a drafter that was trained for it"),
        (["space", "--target", "a", "--drafter", "b"], "There is no folder a, and a Hub id has the form ORG/NAME."),
        (["space", "--drafter", "acme/drafter"], "acme/drafter needs a revision, got none."),
    ],
)
def test_wrong_usage_is_one_sentence(monkeypatch, tmp_path, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(show, "CHECKOUT", tmp_path)
    monkeypatch.setattr(show, "default_target_folder", lambda: tmp_path)
    monkeypatch.setattr(show.importlib.util, "find_spec", lambda name: name)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"version": 2}')
    done = run(*arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr and done.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.json", "other.json"]


@pytest.mark.parametrize(
    "damage",
    [
        {"rounds": 5},
        {"rounds": [{}]},
        {"rounds": [{"draft_ids": [1], "accepted": 9, "own_id": 1}]},
        {"rounds": [{"draft_ids": [1, 2], "accepted": 0, "own_id": 1, "base_ids": [1]}]},
        {"rounds": [{"draft_ids": [1, 2], "accepted": 1, "own_id": 1, "parents": [0, 0], "path": [1]}]},
        {"output_ids": "abc"},
        {"output_ids": [-1]},
        {"drafter": 5},
        {"seconds": "long"},
        {"prompt": 5},
        {"prompt": "\ud800"},
    ],
)
def test_a_damaged_trace_is_one_sentence_and_leaves_no_page(pair, tmp_path, damage):
    whole = {"version": 1, "target": "acme/target", "drafter": "acme/drafter", "kind": "chain", "block_size": 4}
    whole |= {"rule": "greedy", "temperature": 0.0, "rounds": [], "output_ids": [1], "seconds": 1.0}
    (tmp_path / "trace.json").write_text(json.dumps({**whole, **damage}))
    done = run("trace", "--replay", tmp_path / "trace.json", "--html", tmp_path / "page.html", *pair[:2])
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_trace_of_another_target_is_not_read_with_the_default_tokenizer(monkeypatch, tmp_path):
    """Its page showed other words than the target had written."""
    monkeypatch.setattr(show, "default_target_folder", lambda: tmp_path)
    trace = {"version": 1, "target": "acme/target", "rounds": [], "output_ids": [1]}
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    done = run("trace", "--replay", tmp_path / "trace.json", "--html", tmp_path / "page.html")
    assert done.exit_code == 2 and "the tokenizer of its target, acme/target; name" in done.stderr


def test_without_gradio_the_space_says_what_to_install(monkeypatch):
    monkeypatch.setattr(show.importlib.util, "find_spec", lambda name: None)
    done = run("space")
    assert done.exit_code == 2 and 'pip install "gradio' in done.stderr


def test_outside_a_checkout_the_space_says_so_and_writes_nothing(monkeypatch, tmp_path, pair):
    monkeypatch.setattr(show, "CHECKOUT", tmp_path)
    monkeypatch.setattr(space, "APP", tmp_path / "space_app")
    done = run("space", *pair)
    assert done.exit_code == 2 and "clone the repository" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_space_runs_from_a_staged_folder_with_the_pair_beside_it(monkeypatch, pair, tmp_path):
    started = []

    def start(command, *, cwd, env):
        started.append((command[1:], cwd, env))
        return SimpleNamespace(wait=lambda: 7)

    monkeypatch.setattr(show, "CHECKOUT", tmp_path)
    monkeypatch.setattr(show.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(subprocess, "Popen", start)
    assert run("space", "--port", 7999, *pair).exit_code == 7
    ((command, folder, environment),) = started
    assert (command, folder) == (["app.py"], tmp_path / "dist" / "space")
    assert environment["GRADIO_SERVER_PORT"] == "7999"
    named = json.loads((folder / "pair.json").read_text())
    assert named["target"] == pair[1]
    assert named["drafter"] == str(tmp_path / "dist" / "space-pair" / "drafter")
    assert (tmp_path / "dist" / "space-pair" / "drafter" / "modeling_domino.py").is_file()


ENDED = """
import sys
from pathlib import Path
from modeling_domino.cli import app, show
show.stage_space = lambda *args, **kwargs: Path(sys.argv[1])
show.stage = lambda drafter, output: (output, [])
app(["space", "--target", sys.argv[2], "--drafter", sys.argv[3]])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ending_the_command_ends_the_server(pair, tmp_path):
    started = tmp_path / "pid"
    (tmp_path / "app.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('pid.part').write_text(str(os.getpid()))\n"
        "os.rename('pid.part', 'pid')\ntime.sleep(300)\n"
    )
    command = subprocess.Popen([sys.executable, "-c", ENDED, str(tmp_path), pair[1], pair[3]])
    try:
        deadline = time.monotonic() + 60
        while not started.exists() and time.monotonic() < deadline and command.poll() is None:
            time.sleep(0.05)
        server = int(started.read_text())
        command.terminate()
        assert command.wait(timeout=30) != 0
    finally:
        command.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
