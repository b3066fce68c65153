"""`domino space` and `domino trace`: the rounds in a browser, live and as one recorded page."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from modeling_domino.cli.app import MaxNewTokens, app, one_sentence_errors
from modeling_domino.cli.decode import DEMO_PROMPT, encode
from modeling_domino.cli.pair import introduce, load_pair, require_sources, resolve_device
from modeling_domino.default_pair import HUB_ID, default_target_folder, trained_drafter_folder
from modeling_domino.generation_domino import stream
from modeling_domino.provenance import CHECKOUT, hardware, package_versions
from modeling_domino.render.page import draw_page
from modeling_domino.space import require_checkout, stage_space
from modeling_domino.stage import stage


@app.command()
def space(
    target: Annotated[
        str | None, typer.Option(help="Hub id or folder of the target; by default the default pair.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="Hub id or folder of the drafter.")] = None,
    revision: Annotated[str | None, typer.Option(help="Of a drafter on the Hub: the tag or commit to run.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="By default the first free one from 7860.")
    ] = None,
) -> None:
    """Run the Space on this machine: every round of a generation, as it happens, in a browser."""
    with one_sentence_errors(target, drafter):
        require_checkout()
        if importlib.util.find_spec("gradio") is None:
            raise ValueError('The Space needs gradio, which is not installed; run `pip install "gradio==6.31"`.')
        if target is not None and drafter is None:
            raise ValueError(f"The target {target} needs a drafter that was trained for it: name one with --drafter.")
        require_sources(target, drafter)
        target = target or str(default_target_folder())
        if drafter is None or Path(drafter).is_dir():
            drafter = drafter or _default_drafter()
            drafter, _ = stage(drafter, output=CHECKOUT / "dist" / "space-pair" / Path(drafter).resolve().name)
        folder = stage_space(CHECKOUT / "dist" / "space", drafter=str(drafter), revision=revision, target=target)
    environment = {} if port is None else {"GRADIO_SERVER_PORT": str(port)}
    server = subprocess.Popen([sys.executable, "app.py"], cwd=folder, env={**os.environ, **environment})
    # Whoever ends this process means the server, which would go on serving otherwise.
    before = signal.signal(signal.SIGTERM, lambda number, frame: server.terminate())
    try:
        code = server.wait()
    except KeyboardInterrupt:
        # The terminal has told both.
        server.wait()
        return
    finally:
        signal.signal(signal.SIGTERM, before)
    raise typer.Exit(code)


@app.command("trace")
def trace_command(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = DEMO_PROMPT,
    html: Annotated[Path | None, typer.Option(help="Replay page to write, one self-contained file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Trace to write, as JSON.")] = None,
    replay: Annotated[Path | None, typer.Option(help="Make the page from this recorded trace; runs no model.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Hub id or folder of the target; by default the default pair.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="Hub id or folder of the drafter.")] = None,
    max_new_tokens: MaxNewTokens = 96,
    tree: Annotated[int | None, typer.Option(min=1, help="Draft a tree of so many nodes, not a chain.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto: float32 on a CPU.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, ..., or auto.")] = "auto",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
) -> None:
    """Record one greedy generation round by round, as JSON and as a page that replays it."""
    with one_sentence_errors(target, drafter):
        if html is None and out is None:
            raise ValueError("Nothing would be written; name a page with --html or a trace with --out.")
        if replay is not None:
            trace = read_trace(replay)
            require_sources(target)
            if target is None and trace.get("target") not in (HUB_ID, default_target_folder().name):
                raise ValueError(
                    f"A trace is read with the tokenizer of its target, {trace.get('target')}; name its folder or Hub id with "
                    "--target."
                )
            tokenizer = AutoTokenizer.from_pretrained(target or default_target_folder())
        else:
            if not prompt.strip():
                raise ValueError("The prompt is empty; give it as an argument.")
            pair = load_pair(target, drafter, *resolve_device(device, dtype))
            introduce(pair)
            inputs = encode(pair.tokenizer, prompt, raw=raw).to(pair.target.device)
            pair.drafter.record_details = True
            steps = stream(
                pair.target, pair.drafter, **inputs, max_new_tokens=max_new_tokens, do_sample=False, tree=tree
            )
            for _ in steps:
                pass
            # The record has ids only; the page shows what was asked, also when it is made anew.
            record = {"prompt": prompt, "environment": _environment(pair.target)}
            trace, tokenizer = {**pair.drafter.last_run.trace(), **record}, pair.tokenizer
        # Drawn before anything is written: a damaged trace leaves no file.
        page = html and _page(trace, tokenizer, replay)
        if out is not None:
            write(out, json.dumps(trace) + "\n")
        if html is not None:
            write(html, page)


def read_trace(path: Path) -> dict[str, Any]:
    """A recorded trace.

    Raises:
        ValueError: if the file holds something else.
    """
    try:
        trace = json.loads(path.read_text())
    except (ValueError, RecursionError):
        raise ValueError(f"A trace is one JSON object, and {path} is not JSON.") from None
    if not isinstance(trace, dict) or trace.get("version") != 1 or not {"rounds", "output_ids"} <= set(trace):
        raise ValueError(f"A trace has version 1, rounds and output_ids, and {path} has not; record one with --out.")
    return trace


def write(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all, and says where."""
    # First, because text that UTF-8 cannot hold would leave the scratch file behind.
    data = text.encode("utf-8")
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_bytes(data)
    scratch.rename(path)
    typer.echo(path)


def _page(trace: dict[str, Any], tokenizer: PreTrainedTokenizerBase, replay: Path | None) -> str:
    try:
        return draw_page(trace, tokenizer.decode, prompt=trace.get("prompt"))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        if replay is None:
            raise
        raise ValueError(
            f"The trace {replay} is damaged, it cannot be drawn ({error!r}); record it again with --out."
        ) from error


def _environment(target: PreTrainedModel) -> dict[str, str]:
    """Where a run was made, as the page says it."""
    machine, versions = hardware(target.device), package_versions()
    return {
        "hardware": machine.get("gpu") or f"CPU {machine['cpu']}, threads {machine['threads']}",
        "dtype": str(target.dtype).removeprefix("torch."),
        "versions": f"torch {versions['torch']}, transformers {versions['transformers']}",
    }


def _default_drafter() -> str:
    folder = trained_drafter_folder()
    if folder is None:
        raise ValueError("There is no trained drafter in hub_cards/; name one with --drafter.")
    return str(folder)
