"""The page: prompt, rounds, race, text. Everything it shows of a run is the trace that `engine.py` yields."""

from __future__ import annotations


try:
    # Before torch: on ZeroGPU the package stands in for CUDA outside the functions that get a GPU.
    import spaces
except ImportError:
    spaces = None

import logging
import tempfile
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path

import gradio as gr
import torch
from engine import MOST_NEW_TOKENS, Refused, engine_of_this_space
from render.page import draw_page
from render.race import draw_race
from render.timeline import ARCHITECTURE, CSS, DID_NOT_RUN, SCRIPT, drafter_ran, draw_timeline


logger = logging.getLogger(__name__)

# Seconds between two drawings: a tab that gets more of them than it can draw freezes.
PACE = 0.12
RACED = (
    "Every racer ran once, one after the other; shown on one clock. On a busy machine speeds differ from race to race."
)
EXAMPLES = [
    ["How many positive whole-number divisors does 196 have?"],
    ["Write a haiku about dominoes."],
    [
        "A baker makes 24 rolls and sells half of them in the morning and a third of the rest at noon. How many are left?"
    ],
    ["Complete the HTML: <p>This is <b>bold</b> and"],
]
PAGE_CSS = """
.gradio-container { max-width: 1120px !important; margin: 0 auto !important; }
.gradio-container > .main { max-width: 100vw; min-width: 0; }
.gradio-container footer { flex-wrap: wrap; }
.domino .dm-note { color: var(--dm-soft); }
.dm-head-line h1 { font-size: 1.7em; font-weight: 750; margin: 0; }
.dm-head-line p { color: var(--dm-soft); }
.dm-footer { color: var(--dm-soft); font-size: .87em; overflow-wrap: anywhere; }
.dm-footer p { margin: 0 0 .35em !important; }
.dm-architecture { overflow-x: auto; }
.dm-architecture svg { width: 100%; min-width: 560px; max-width: 860px; height: auto; }
#race:not(:has(.dm-lane, .dm-note)) { display: none; }
#text textarea { unicode-bidi: plaintext; }
"""

# A race that has just been recorded starts by itself, unless the visitor wants no motion.
ON_LOAD = """
const view = dominoView(element);
watch("value", () => {
  if (element.querySelector(".dm-time") && !matchMedia("(prefers-reduced-motion: reduce)").matches) view.race();
});
"""

ENGINE = engine_of_this_space()


def on_gpu(function):
    """On ZeroGPU a function gets a GPU for its duration; elsewhere it stays as it is."""
    return spaces.GPU(function) if spaces else function


class View(gr.HTML):
    """Fragments of HTML in one root; the script finds its way by their classes."""

    def __init__(self, **kwargs):
        super().__init__(
            html_template='<div class="domino">${(value || []).join("")}</div>',
            js_on_load=f"{SCRIPT}\n{ON_LOAD}",
            apply_default_css=False,
            **kwargs,
        )

    def postprocess(self, value: list[str] | None) -> list[str] | None:
        return value

    def api_info(self) -> dict:
        return {"type": "array", "items": {"type": "string"}, "description": "fragments of HTML, to be joined"}

    def example_value(self) -> list[str]:
        return ["<p>Round 1</p>"]


@on_gpu
def run_rounds(prompt: str, max_new_tokens: int, tree: bool, visit: str) -> Iterator[dict]:
    yield from ENGINE.rounds(prompt, max_new_tokens, tree, visit)


@on_gpu
def run_race(prompt: str, max_new_tokens: int, visit: str) -> Iterator[dict]:
    yield from ENGINE.race(prompt, max_new_tokens, visit)


def note(sentence: str, *, loud: bool = False) -> list[str]:
    """The status line; loud for what went wrong."""
    return [
        f'<p class="{"dm-alert" if loud else "dm-note"}" role="{"alert" if loud else "status"}">{escape(sentence)}</p>'
    ]


def sentence_of(error: Exception) -> str:
    """What the page says of a failure; what a visitor cannot change goes to the log in full."""
    if isinstance(error, Refused):
        return str(error)
    logger.error("A run failed.", exc_info=error)
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
        return "This machine ran out of memory; ask for fewer new tokens or a shorter prompt."
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"The run failed: {first_line}"


def generate(prompt: str, max_new_tokens: float, drafts: str, request: gr.Request) -> Iterator[tuple]:
    """Generates greedily and shows every round as it happens.

    Returns:
        Status, timeline (fragments of HTML), text, trace, and a replay page as a file.
    """
    visit = request.session_hash or ""
    # A run that fails midway leaves on the page what it has shown.
    shown: tuple[list[str], str] = ([], "")
    try:
        for trace, status in _rounds(prompt, int(max_new_tokens), drafts == "tree", visit):
            finished = "seconds" in trace
            shown = draw_timeline(trace, ENGINE.decode, finished=finished), ENGINE.text(trace["output_ids"])
            files = _replay_page(trace, prompt) if finished else None
            yield status, *shown, trace if finished else None, files
    except Exception as error:
        yield note(sentence_of(error), loud=True), *shown, None, None


def race(prompt: str, max_new_tokens: float, request: gr.Request) -> Iterator[tuple]:
    """Shows the rounds of a chain, records every racer on its own, and shows the race on one clock.

    Returns:
        Status, timeline (fragments of HTML), text, trace, replay page, and race (fragments of HTML).
    """
    visit = request.session_hash or ""
    shown: tuple[list[str], str, dict | None] = ([], "", None)
    try:
        for trace, status in _rounds(prompt, int(max_new_tokens), False, visit):
            finished = "seconds" in trace
            drawn = draw_timeline(trace, ENGINE.decode, finished=finished)
            shown = drawn, ENGINE.text(trace["output_ids"]), trace if finished else None
            yield status, *shown, None, []
        if ENGINE.is_stopped(visit):
            return
        for state in run_race(prompt, int(max_new_tokens), visit):
            drawn = draw_race(state, ENGINE.decode)
            if state["next"]:
                yield note("Recording the race, one racer at a time."), *shown, None, drawn
            else:
                yield note(RACED), *shown, _replay_page(trace, prompt, state), drawn
        if ENGINE.is_stopped(visit):
            yield note("Stopped."), *shown, None, []
    except Exception as error:
        yield note(sentence_of(error), loud=True), *shown, None, []


def stop(request: gr.Request) -> list[str]:
    """Stops what this visit is generating."""
    ENGINE.stop(request.session_hash or "")
    return note("Asked to stop: what runs for you ends with its round.")


def start(request: gr.Request) -> tuple[list[str], list[str]]:
    """Takes back an earlier stop before a visit waits for its turn, and clears an earlier race."""
    ENGINE.allow(request.session_hash or "")
    return note("Waiting for the models …" if ENGINE.drafter else "Loading the models, once …"), []


def footer() -> str:
    """What ran where, what is measured and what is replayed."""
    facts = " · ".join(f"{name} {escape(value)}" for name, value in ENGINE.facts().items())
    return (
        f'<div class="domino dm-footer"><p>{facts}</p><p>Measured: tokens, rounds and probabilities are the drafter\'s own '
        "record of this run; its seconds include the recording. Replayed: a race is recorded first, one racer after the "
        "other with nothing drawn meanwhile, and then shown on one clock; “plain” is the faster of "
        "<code>target.generate</code> and our loop without drafts. “Head off” in the rounds recolours the same record; the "
        "race runs it for real. Decoding is greedy.</p></div>"
    )


def _rounds(prompt: str, max_new_tokens: int, tree: bool, visit: str) -> Iterator[tuple[dict, list[str]]]:
    """The traces that are drawn, at a pace a browser can follow, each with its status line."""
    started = drawn = time.perf_counter()
    first = None
    for trace in run_rounds(prompt, max_new_tokens, tree, visit):
        now = time.perf_counter()
        if first is None:
            first = now - started
        if "seconds" in trace:
            count = len(trace["output_ids"])
            words = (
                f"{count} token{'' if count == 1 else 's'} in {trace['seconds']:.2f} s, drawing included; the first after "
                f"{first:.2f} s."
            )
            if ENGINE.is_stopped(visit):
                words = f"Stopped. {words}"
            # Without a round there was nothing to draft: a stop, or a text of one token.
            fine = drafter_ran(trace) or not trace["rounds"]
            yield trace, note(words) if fine else note(f"{DID_NOT_RUN} {words}", loud=True)
        elif len(trace["rounds"]) == 0 or now - drawn >= PACE:
            drawn = now
            yield trace, note("Generating …")


def _replay_page(trace: dict, prompt: str, state: dict | None = None) -> str:
    """One self-contained file that shows this run again, without a model."""
    folder = Path(tempfile.mkdtemp(prefix="domino-replay-"))
    page = folder / "domino-replay.html"
    facts = ENGINE.facts()
    trace = {**trace, "environment": {name: facts[name] for name in ("hardware", "dtype", "versions")}}
    page.write_text(draw_page(trace, ENGINE.decode, prompt=prompt, race=state), encoding="utf-8")
    return str(page)


with gr.Blocks(
    title="Domino: see the draft being accepted", analytics_enabled=False, delete_cache=(3600, 3600)
) as demo:
    gr.HTML(
        '<div class="domino dm-head-line"><h1>🁫 Domino: see the draft being accepted</h1><p>A small drafter guesses several '
        "tokens at once; the target, a larger model, checks them in one forward and keeps those it would have written itself. "
        "The text is always the target's own; drafts only make it cheaper.</p></div>",
        apply_default_css=False,
    )
    with gr.Row():
        prompt_box = gr.Textbox(label="Prompt", value=EXAMPLES[0][0], lines=2, max_lines=6, scale=5, elem_id="prompt")
        length_slider = gr.Slider(
            8, MOST_NEW_TOKENS, value=64, step=8, label="Most new tokens", scale=3, min_width=240
        )
        drafts_radio = gr.Radio(["chain", "tree"], value="chain", label="Drafts", scale=1, min_width=150)
    with gr.Row():
        generate_button = gr.Button("Generate", variant="primary", min_width=90, elem_id="generate")
        race_button = gr.Button("Race", min_width=90, elem_id="race-button")
        stop_button = gr.Button("Stop", variant="stop", min_width=90, elem_id="stop")
    status_view = View(label="Status", elem_id="status")
    race_view = View(label="Race (HTML)", elem_id="race")
    timeline_view = View(label="Timeline (HTML)", elem_id="timeline")
    text_box = gr.Textbox(label="Text", lines=4, max_lines=14, interactive=False, elem_id="text", buttons=["copy"])
    gr.Examples(EXAMPLES, prompt_box, label="Examples")
    with gr.Accordion("The record of this run", open=False):
        replay_file = gr.File(label="Replay page (one HTML file)", interactive=False, elem_id="replay")
        trace_view = gr.JSON(label="Trace", max_height=400)
    with gr.Accordion("How it works", open=False):
        gr.HTML(f'<div class="domino dm-architecture">{ARCHITECTURE}</div>', apply_default_css=False)
    footer_view = gr.HTML(footer(), apply_default_css=False)

    outputs = [status_view, timeline_view, text_box, trace_view, replay_file]
    # One run at a time: a visitor who has to wait sees the place in the queue.
    turn = {
        "concurrency_id": "models",
        "concurrency_limit": 1,
        "show_progress": "minimal",
        "show_progress_on": status_view,
    }
    alone = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    generate_button.click(start, None, [status_view, race_view], **alone).then(
        generate, [prompt_box, length_slider, drafts_radio], outputs, api_name="generate", **turn
    ).then(footer, None, footer_view, **alone)
    race_button.click(start, None, [status_view, race_view], **alone).then(
        race, [prompt_box, length_slider], [*outputs, race_view], api_name="race", **turn
    ).then(footer, None, footer_view, **alone)
    stop_button.click(stop, None, status_view, **alone)
    demo.load(footer, None, footer_view, **alone)


def launch(**kwargs) -> None:
    """Loads the pair if it can (the page says so if not), and serves."""
    try:
        ENGINE.load()
    except Refused as error:
        # The page names no folder; the log may.
        logger.error("%s", error, exc_info=error.__cause__)
    theme = gr.themes.Soft(primary_hue="violet", font=["system-ui", "DejaVu Sans", "sans-serif"])
    demo.queue(max_size=24).launch(theme=theme, css=CSS + PAGE_CSS, show_error=True, **kwargs)


if __name__ == "__main__":
    launch()
