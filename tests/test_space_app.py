"""The page of the Space without a browser: its import, its endpoints, and what it says when something goes wrong."""

from __future__ import annotations

import importlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import require_peer
from fresh_process import run_fresh
from space_folder import imports_from, tiny_space


require_peer("gradio")
require_peer("gradio_client")

VISITOR = SimpleNamespace(session_hash="visitor")


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    return tiny_space(tmp_path_factory.mktemp("space"))


@pytest.fixture(scope="module")
def app(space):
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    with imports_from(space):
        yield importlib.import_module("app")


def joined(fragments: list[str]) -> str:
    return "".join(fragments)


def said(fragments: list[str]) -> str:
    """A message as it is read."""
    return unescape("".join(fragments))


def test_the_page_is_imported_without_a_network_and_loads_nothing(space, tmp_path):
    script = f"""
import socket, sys
def refuse(*args):
    raise AssertionError("a connection was opened")
socket.socket.connect = socket.create_connection = refuse
sys.path.insert(0, {str(space)!r})
import app
RESULTS["demo"] = type(app.demo).__name__
RESULTS["loaded"] = app.ENGINE.drafter is not None
RESULTS["ours"] = [name for name in sys.modules if name.split(".")[0] == "modeling_domino"]
"""
    results = run_fresh(script, tmp_path, GRADIO_ANALYTICS_ENABLED="False")
    assert (results["demo"], results["loaded"], results["ours"]) == ("Blocks", False, [])


def test_endpoints_are_named_and_every_output_is_labelled(app):
    endpoints = app.demo.get_api_info()
    assert endpoints["unnamed_endpoints"] == {}
    named = endpoints["named_endpoints"]
    assert set(named) == {"/generate", "/race"}
    labels = {name: [one["label"] for one in named[name]["returns"]] for name in named}
    common = ["Status", "Timeline (HTML)", "Text", "Trace", "Replay page (one HTML file)"]
    assert labels == {"/generate": common, "/race": [*common, "Race (HTML)"]}
    assert [one["label"] for one in named["/generate"]["parameters"]] == ["Prompt", "Most new tokens", "Drafts"]


def test_a_run_is_drawn_from_its_trace(app):
    *_, (status, timeline, text, trace, replay) = app.generate("a b c", 12, "chain", VISITOR)
    html = joined(timeline)
    assert html.count('class="dm-row"') == len(trace["rounds"])
    assert text == app.ENGINE.text(trace["output_ids"])
    assert "12 tokens in" in joined(status)
    page = Path(replay).read_text(encoding="utf-8")
    assert html in page and page.startswith("<!doctype html>")
    facts = app.ENGINE.facts()
    assert f"hardware {facts['hardware']} · dtype float32 · versions {facts['versions']}" in unescape(page)


def test_while_it_streams_the_rows_that_are_there_do_not_change(app, monkeypatch):
    monkeypatch.setattr(app, "PACE", 0)
    drawn = [timeline for _, timeline, *_ in app.generate("a b c", 12, "chain", VISITOR)]
    assert len(drawn) > 4
    for before, after in zip(drawn[:-2], drawn[1:-1]):
        assert after[: len(before) - 1][2:] == before[2:-1]


def test_a_run_without_drafts_says_so_loudly(app, monkeypatch):
    *_, whole = app.ENGINE.rounds("a b c", 3)
    plain = {"draft_ids": [], "accepted": 0, "own_id": 1}
    monkeypatch.setattr(app, "run_rounds", lambda *args: iter([{**whole, "rounds": [plain, plain]}]))
    *_, (status, timeline, *_) = app.generate("a b c", 3, "chain", VISITOR)
    assert 'role="alert"' in joined(status) and app.DID_NOT_RUN in said(status)
    assert app.DID_NOT_RUN in said(timeline)


def test_a_stop_before_the_first_round_is_no_alarm(app):
    app.stop(VISITOR)
    *_, (status, timeline, *_) = app.generate("a b c", 40, "chain", VISITOR)
    app.start(VISITOR)
    assert "Stopped. 1 token in" in joined(status) and "alert" not in joined([*status, *timeline])


@pytest.mark.parametrize(
    "error, sentence",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "This machine ran out of memory; "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "This machine ran out of memory; "),
        (RuntimeError("<b>odd</b>\nmore"), "The run failed: &lt;b&gt;odd&lt;/b&gt;<"),
    ],
)
def test_a_failure_is_a_message_in_the_page_and_the_app_goes_on(app, monkeypatch, error, sentence):
    def failing(*args):
        raise error
        yield

    def last_status(run) -> str:
        *_, (status, *_) = run
        return joined(status)

    with monkeypatch.context() as patch:
        patch.setattr(app, "run_race", failing)
        statuses = [last_status(app.race("a b c", 8, VISITOR))]
        patch.setattr(app, "run_rounds", failing)
        statuses += [
            last_status(app.generate("a b c", 8, "chain", VISITOR)),
            last_status(app.race("a b c", 8, VISITOR)),
        ]
    for status in statuses:
        assert sentence in status and 'role="alert"' in status
    *_, (_, _, _, trace, _) = app.generate("a b c", 8, "chain", VISITOR)
    assert len(trace["output_ids"]) == 8


def test_a_run_that_fails_midway_keeps_what_it_has_shown(app, monkeypatch):
    original = app.run_rounds

    def failing(*args):
        for number, state in enumerate(original(*args)):
            if number == 4:
                raise RuntimeError("midway")
            yield state

    def failing_race(*args):
        raise RuntimeError("at the start")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(app, "PACE", 0)
        patch.setattr(app, "run_rounds", failing)
        *_, before, last = app.generate("a b c", 24, "chain", VISITOR)
        assert "midway" in joined(last[0]) and last[1:3] == before[1:3] and last[2]
    monkeypatch.setattr(app, "run_race", failing_race)
    *_, before, last = app.race("a b c", 8, VISITOR)
    assert "at the start" in joined(last[0]) and last[1:4] == before[1:4] and last[2] and last[3]


@pytest.mark.parametrize("prompt", ["a 🁫 👩‍👩‍👧 z", "مرحبا بالعالم", "\u202e a b", "a\x00b"])
def test_any_script_is_served(app, prompt):
    *_, (_, timeline, _, trace, _) = app.generate(prompt, 6, "tree", VISITOR)
    assert len(trace["output_ids"]) == 6 and joined(timeline).count('class="dm-row"') == len(trace["rounds"])


def test_an_unknown_pair_is_a_message_and_the_next_visit_tries_again(app, space, monkeypatch):
    broken = type(app.ENGINE)(str(space.parent / "nowhere"), app.ENGINE.names["drafter"])
    monkeypatch.setattr(app, "ENGINE", broken)
    *_, (status, *_) = app.generate("a b", 4, "chain", VISITOR)
    assert "could not be loaded" in joined(status) and 'role="alert"' in joined(status)
    broken.names["target"] = str(space.parent / "tiny-target")
    *_, (_, _, _, trace, _) = app.generate("a b", 4, "chain", VISITOR)
    assert len(trace["output_ids"]) == 4


def test_stop_is_for_the_visit_that_asked(app):
    app.start(VISITOR)
    run = app.generate("a b c", 200, "chain", VISITOR)
    next(run)
    app.stop(SimpleNamespace(session_hash="another"))
    app.stop(VISITOR)
    *_, (status, _, _, trace, _) = run
    assert "Stopped." in joined(status) and len(trace["output_ids"]) < 200
    # A stop while waiting for the turn holds when the turn comes; the next press takes it back.
    *_, (status, _, _, trace, _) = app.generate("a b c", 40, "chain", VISITOR)
    assert "Stopped." in joined(status) and len(trace["output_ids"]) < 40
    app.start(VISITOR)
    *_, (_, _, _, trace, _) = app.generate("a b c", 20, "chain", VISITOR)
    assert len(trace["output_ids"]) == 20


def test_clients_call_the_endpoints_by_name_and_get_their_own_texts(app):
    from gradio_client import Client

    app.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    try:
        clients = [Client(app.demo.local_url, verbose=False, httpx_kwargs={"timeout": 120}) for _ in range(2)]
        prompts = ["a b c", "x y"]
        with ThreadPoolExecutor(2) as pool:
            calls = [
                pool.submit(client.predict, prompt, 24, "chain", api_name="/generate")
                for client, prompt in zip(clients, prompts)
            ]
            results = [call.result() for call in calls]
        for prompt, (_, timeline, text, trace, _) in zip(prompts, results):
            assert text == app.ENGINE.text(list(app.ENGINE.rounds(prompt, 24))[-1]["output_ids"])
            assert joined(timeline).count('class="dm-row"') == len(trace["rounds"])
        *_, race = clients[0].predict("a b c", 16, api_name="/race")
        assert "All 4 texts are identical" in joined(race)
        # What is not a number is named; it was a sentence about an unknown error.
        with pytest.raises(Exception, match="Expected a `float`"):
            clients[0].predict("a b c", "many", "chain", api_name="/generate")
        assert json.dumps(results[0][3]).count("draft_ids") == len(results[0][3]["rounds"])
    finally:
        app.demo.close()
