"""The Space in a real browser, on the default pair: what a visitor sees is the trace, at every width and in every theme.

With DOMINO_SCREENSHOTS=FOLDER the pictures of the README are taken on the way (`make screenshots`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from conftest import require_peer

from modeling_domino.default_pair import default_target_folder, trained_drafter_folder
from modeling_domino.provenance import provenance
from modeling_domino.space import stage_space
from modeling_domino.stage import stage


pytestmark = pytest.mark.browser
require_peer("playwright.sync_api")
require_peer("gradio")

from playwright.sync_api import expect, sync_playwright  # noqa: E402


CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
]
if not Path(CHROMIUM).exists() and os.environ.get("CI") != "true":
    pytest.skip("Chromium is not installed", allow_module_level=True)

# Patience for a machine that is busy with something else; nothing here measures time.
PATIENCE = 600_000
expect.set_options(timeout=PATIENCE)

HTML_PROMPT = "Complete the HTML: <p>This is <b>bold</b> and"
CAPITAL_PROMPT = "What is the capital of France?"
CHIPS = "#timeline .dm-row:not(.dm-prompt) .dm-on .dm-tok"


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    """A staged Space with the default pair."""
    folder = tmp_path_factory.mktemp("space")
    drafter = trained_drafter_folder()
    assert drafter is not None, "the Space shows the trained drafter of this checkout"
    drafter, _ = stage(str(drafter), output=folder / drafter.name)
    return stage_space(folder / "space", drafter=str(drafter), target=str(default_target_folder()))


@pytest.fixture(scope="module")
def url(space):
    """The address of that Space, started as anyone starts one."""
    folder = space.parent
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"GRADIO_SERVER_PORT": str(port), "GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_OFFLINE": "1"}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "app.py"], cwd=space, env={**os.environ, **environment}, stdout=log, stderr=log
        )
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(PATIENCE // 1000):
            assert server.poll() is None, (folder / "log").read_text()[-2000:]
            try:
                urllib.request.urlopen(address, timeout=20).close()
                break
            except OSError:
                time.sleep(1)
        else:
            pytest.fail("the Space did not answer")
        yield address
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@contextmanager
def visit(browser, address: str, *, width: int = 1280, scheme: str = "light"):
    """A page in a session of its own; whatever it complained about fails the test at the end."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    context.set_default_timeout(PATIENCE)
    page, complaints = context.new_page(), []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    page.wait_for_selector(".domino")
    yield page
    assert complaints == []
    context.close()


def ask(page, prompt: str, length: int, *, button: str = "#generate", tree: bool = False) -> None:
    page.locator("#prompt textarea").fill(prompt)
    page.get_by_label(re.compile("number input for Most new tokens", re.IGNORECASE)).fill(str(length))
    page.get_by_label("tree" if tree else "chain", exact=True).check()
    page.locator(button).click()


def generated(page) -> dict:
    """Waits for the end of a run, and returns its trace from the replay page that it offers."""
    page.wait_for_selector("#timeline .dm-charts")
    return trace_of(replay_page(page))


def replay_page(page) -> str:
    if not page.locator("#replay a").first.is_visible():
        page.get_by_text("The record of this run").click()
    address = page.locator("#replay a").first.get_attribute("href")
    return page.request.get(address).text()


def trace_of(html: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="trace">(.*?)</script>', html, re.DOTALL)[1])


def fits(page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def take_picture(page, name: str, height: int, *, top: str = "body") -> None:
    """A picture that begins with the element `top`, for the README."""
    if folder := os.environ.get("DOMINO_SCREENSHOTS"):
        page.mouse.move(0, 0)
        page.evaluate("document.activeElement && document.activeElement.blur()")
        page.set_viewport_size({"width": page.viewport_size["width"], "height": height})
        page.evaluate(f"document.querySelector({top!r}).scrollIntoView()")
        page.wait_for_timeout(300)
        page.screenshot(path=Path(folder) / name)


@pytest.mark.parametrize("width, scheme", [(1280, "light"), (390, "dark"), (1280, "dark"), (390, "light")])
def test_what_is_shown_is_the_trace(browser, url, width, scheme):
    with visit(browser, url, width=width, scheme=scheme) as page:
        assert page.evaluate("document.body.classList.contains('dark')") == (scheme == "dark")
        ask(page, "How many positive whole-number divisors does 196 have?", 32)
        trace = generated(page)
        rounds = trace["rounds"]
        assert page.locator("#timeline .dm-row:not(.dm-prompt)").count() == len(rounds) > 3
        assert page.locator(CHIPS).count() == sum(len(record["draft_ids"]) + 1 for record in rounds)
        kept = page.locator(f"{CHIPS}.dm-accepted, {CHIPS}.dm-head").count()
        assert kept == sum(record["accepted"] for record in rounds)
        assert page.locator(f"{CHIPS}.dm-own").count() == len(rounds)
        tau = sum(record["accepted"] + 1 for record in rounds) / len(rounds)
        assert page.locator("#timeline .dm-tau").inner_text() == f"τ = {tau:.2f}"
        assert page.locator("#text textarea").input_value().startswith("196 ")
        assert fits(page)
        if (width, scheme) in ((1280, "light"), (390, "dark")):
            top = "body" if width == 1280 else "#timeline"
            take_picture(page, f"rounds-{width}-{scheme}.png", 1000, top=top)


def test_trees_are_drawn_as_trees(browser, url):
    with visit(browser, url, width=390) as page:
        ask(page, CAPITAL_PROMPT, 12, tree=True)
        rounds = generated(page)["rounds"]
        assert page.locator(CHIPS).count() == sum(len(record["draft_ids"]) + 1 for record in rounds)
        # The kept path and the own token at its end are marked.
        marked = page.locator("#timeline .dm-kept").count()
        assert marked == sum(record["accepted"] + 1 for record in rounds)
        assert "Paris" in page.locator("#text textarea").input_value()
        assert fits(page)


def test_what_the_model_writes_is_text_and_never_markup(browser, url):
    with visit(browser, url) as page:
        ask(page, HTML_PROMPT, 20)
        generated(page)
        assert "<b>bold</b>" in page.locator("#text textarea").input_value()
        assert page.locator("#timeline .dm-tok i *, #timeline .dm-tok s *").count() == 0
        replay = replay_page(page)
    page = browser.new_page(viewport={"width": 390, "height": 900}, color_scheme="dark")
    complaints = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.set_content(replay)
    assert page.locator(".dm-row:not(.dm-prompt)").count() == len(trace_of(replay)["rounds"])
    assert "<b>bold</b>" in page.locator(".dm-text").last.inner_text()
    assert fits(page) and complaints == []
    page.close()


def test_everything_is_reached_by_the_keyboard(browser, url):
    with visit(browser, url) as page:
        page.locator("#prompt textarea").fill(CAPITAL_PROMPT)
        page.get_by_label(re.compile("number input for Most new tokens", re.IGNORECASE)).fill("24")
        for _ in range(12):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "generate":
                break
        page.keyboard.press("Enter")
        rounds = generated(page)["rounds"]
        # One stop of the Tab key for all chips: from the switch in front of them.
        page.locator("#timeline .dm-headoff").focus()
        page.keyboard.press("Tab")
        focused = "document.activeElement.getAttribute('aria-label')"
        assert page.evaluate(focused).startswith("The first token, ")
        page.keyboard.press("ArrowDown")
        assert page.evaluate(focused).startswith("Draft 1, ")
        page.keyboard.press("ArrowRight")
        second = page.evaluate(focused)
        assert page.locator(".dm-tip").inner_text() == second
        page.keyboard.press("Escape")
        assert page.locator(".dm-tip").count() == 0

        # Head off: the same rounds with the backbone's picks, never more of them kept.
        page.locator("#timeline .dm-headoff").focus()
        page.keyboard.press("Space")
        expect(page.locator(CHIPS).first).to_be_hidden()
        off = page.locator("#timeline .dm-off .dm-tok:visible").count()
        assert off >= sum(len(record["draft_ids"]) for record in rounds)
        # Chips are still one stop away, though the one that had the focus is hidden.
        page.keyboard.press("Tab")
        assert page.evaluate(focused).startswith(("The first token, ", "Draft 1, "))
        page.locator("#timeline .dm-headoff").focus()
        page.keyboard.press("Space")

        # A chip tells again at every tap.
        chip = page.locator(f"{CHIPS}.dm-own").first
        for _ in range(2):
            chip.click()
            page.mouse.move(0, 0)
            assert page.locator(".dm-tip").count() == 0
            chip.dispatch_event("click")
            assert page.locator(".dm-tip").count() == 1

        page.locator("#timeline .dm-scrub").focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#timeline .dm-where")).to_contain_text(f"{len(rounds) - 1} / {len(rounds)}")
        assert page.locator("#timeline .dm-later").count() == 1


def test_stop_keeps_what_is_there(browser, url):
    with visit(browser, url) as page:
        ask(page, "Tell me a long story about a lighthouse.", 256)
        page.wait_for_selector("#timeline .dm-row:not(.dm-prompt)")
        page.locator("#stop").click()
        expect(page.locator("#status")).to_contain_text("Stopped.")
        trace = generated(page)
        assert 0 < len(trace["rounds"]) == page.locator("#timeline .dm-row:not(.dm-prompt)").count()
        assert len(trace["output_ids"]) < 256


def test_a_race_replays_and_compares(browser, url):
    with visit(browser, url) as page:
        ask(page, CAPITAL_PROMPT, 16, button="#race-button")
        expect(page.locator("#race .dm-verdict")).to_contain_text("All 4 texts are identical")
        assert page.locator("#race .dm-lane").count() == 4
        total = page.locator("#race .dm-lane").first.get_attribute("data-total")
        # At the start of the clock nobody has anything, at its end everybody has everything.
        page.locator("#race .dm-time").focus()
        page.keyboard.press("Home")
        assert set(page.locator("#race .dm-count").all_inner_texts()) == {f"0/{total}"}
        page.keyboard.press("End")
        assert set(page.locator("#race .dm-count").all_inner_texts()) == {f"{total}/{total}"}
        page.locator("#race .dm-go").click()
        expect(page.locator("#race .dm-go")).to_contain_text("replay")
        # Paused, a race goes on from where it is.
        half = int(page.locator("#race .dm-time").get_attribute("max")) // 2
        page.locator("#race .dm-time").fill(str(half))
        page.locator("#race .dm-go").click()
        page.locator("#race .dm-go").click()
        assert int(page.locator("#race .dm-time").input_value()) >= half
        assert fits(page)
        take_picture(page, "race-1280-light.png", 800)


def test_two_visitors_at_once_get_their_own_texts(browser, url):
    with visit(browser, url) as first, visit(browser, url) as second:
        ask(first, CAPITAL_PROMPT, 16)
        ask(second, HTML_PROMPT, 16)
        generated(first)
        generated(second)
        assert "Paris" in first.locator("#text textarea").input_value()
        assert "<b>bold</b>" in second.locator("#text textarea").input_value()


def test_bad_input_is_a_message_in_the_page_and_the_page_goes_on(browser, url):
    with visit(browser, url, width=390) as page:
        ask(page, "", 16)
        expect(page.locator("#status [role=alert]")).to_have_text("The prompt is empty; ask something.")
        ask(page, "x" * 20_000, 16)
        expect(page.locator("#status [role=alert]")).to_contain_text("at most 4,000 characters")
        assert fits(page)
        ask(page, "Say hello: 🁫 مرحبا", 8)
        assert len(generated(page)["output_ids"]) <= 8
        assert fits(page)


def test_how_long_the_page_takes_is_recorded(browser, url, space, tmp_path):
    """With DOMINO_RECORD=FILE the numbers are kept (`make space-record`); whatever they are, the texts are the same."""
    out = os.environ.get("DOMINO_RECORD")
    repeats, length = (5, 64) if out else (1, 8)
    prompt = "How many positive whole-number divisors does 196 have?"
    with visit(browser, url) as page:
        first_seconds, with_page, texts = [], [], []
        for repeat in range(repeats + 1):
            page.reload()
            page.wait_for_selector("#prompt textarea")
            pressed = time.perf_counter()
            ask(page, prompt, length)
            page.wait_for_selector("#timeline .dm-prompt")
            first = time.perf_counter() - pressed
            trace = generated(page)
            texts.append(trace["output_ids"])
            # The first one warms up.
            if repeat > 0:
                first_seconds.append(first)
                with_page.append(trace["seconds"])
    script = f"""
import json, engine
pair = engine.engine_of_this_space()
runs = [list(pair.rounds({prompt!r}, {length}))[-1] for _ in range({repeats + 1})][1:]
print(json.dumps([[run["seconds"] for run in runs], [run["output_ids"] for run in runs], pair.facts()]))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=space, capture_output=True, text=True, check=True)
    without_page, alone, facts = json.loads(done.stdout.splitlines()[-1])
    assert all(text == texts[0] for text in [*texts, *alone])
    record = {
        "provenance": {**provenance(command=["make", "space-record"]), "engine": facts},
        "prompt": prompt,
        "new_tokens": len(texts[0]),
        "first_token_on_screen_seconds": spread(first_seconds),
        "engine_seconds_with_page": spread(with_page),
        "engine_seconds_without_page": spread(without_page),
    }
    written = Path(out) if out else tmp_path / "measured.json"
    written.write_text(json.dumps(record, indent=2) + "\n")
    assert str(tmp_path) not in written.read_text()


def spread(seconds: list[float]) -> dict[str, float | int]:
    return {
        "median": round(statistics.median(seconds), 3),
        "lowest": round(min(seconds), 3),
        "highest": round(max(seconds), 3),
        "runs": len(seconds),
    }
