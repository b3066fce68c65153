"""`domino bench` and `report`: methods and servers measured, and their records shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoModelForCausalLM

from modeling_domino import DominoDraftModel
from modeling_domino.atomic import write_text
from modeling_domino.benchmark.blocks import render_blocks
from modeling_domino.benchmark.machine import comparable, machine_facts
from modeling_domino.benchmark.methods import Models, Settings
from modeling_domino.benchmark.plan import benchmark_plan, deviations
from modeling_domino.benchmark.prompts import Prompt, context_prompts, load_prompts
from modeling_domino.benchmark.report import compare as compare_folders
from modeling_domino.benchmark.report import write_report
from modeling_domino.benchmark.run import models_facts, require_methods, run_benchmark, shard_of_process, wait_for_all
from modeling_domino.benchmark.server import CONCURRENCIES, ServerSettings, parse_arms, run_servers
from modeling_domino.benchmark.summary import METHODS
from modeling_domino.benchmark.variants import size_of
from modeling_domino.cli.app import (
    AsJson,
    Candidates,
    DraftVocab,
    VerifyWidth,
    WithAutoOff,
    app,
    one_sentence_errors,
)
from modeling_domino.cli.pair import Pair, folder_of, introduce, load_pair, require_sources, resolve_device
from modeling_domino.provenance import provenance
from modeling_domino.tree_domino import TreeShape


@app.command()
def bench(
    out: Annotated[Path, typer.Option(help="Folder of the records; a run that was cut short goes on there.")],
    target: Annotated[
        str | None, typer.Option(help="Hub id or folder of the target; by default the default pair.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="Hub id or folder of the drafter.")] = None,
    prompts: Annotated[
        str | None, typer.Option(help="Folder with TASK.jsonl files, hub, or dev: small samples, the default.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks, comma-separated; by default all.")] = None,
    contexts: Annotated[
        str | None,
        typer.Option(help="Measure the cost of a round by context instead: lengths in tokens, comma-separated."),
    ] = None,
    max_samples: Annotated[int | None, typer.Option(min=1, help="Most prompts of a task.")] = None,
    methods: Annotated[
        str, typer.Option(help=f"Of {', '.join(METHODS)}, or variants like chain:verify-width=3; plain is always run.")
    ] = "plain,chain,tree",
    temperatures: Annotated[str | None, typer.Option(help="Comma-separated; by default 0.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens an answer; by default 256.")] = None,
    preset: Annotated[str | None, typer.Option(help="paper: the papers' set-up; deviations are printed.")] = None,
    assistant: Annotated[str | None, typer.Option(help="A small language model for the method assistant.")] = None,
    dflash: Annotated[str | None, typer.Option(help="A second drafter, for the method dflash.")] = None,
    rule: Annotated[str | None, typer.Option(help="Accept rule of sampled chains.")] = None,
    verify_width: VerifyWidth = None,
    candidates: Candidates = None,
    draft_vocab: DraftVocab = None,
    auto_off: WithAutoOff = False,
    tree_nodes: Annotated[str, typer.Option(help="Drafts of a tree, or auto: as many as pay.")] = str(TreeShape.nodes),
    tree_lanes: Annotated[int, typer.Option(min=1, help="Paths extended at each depth.")] = TreeShape.lanes,
    tree_candidates: Annotated[int, typer.Option(min=1, help="Tokens corrected per depth.")] = TreeShape.candidates,
    tree_children: Annotated[int, typer.Option(min=1, help="Continuations noted per path.")] = TreeShape.children,
    server: Annotated[
        list[str] | None, typer.Option(help="Measure OpenAI-compatible servers instead: NAME=URL; may be repeated.")
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests under way at a server, comma-separated.")] = ",".join(
        map(str, CONCURRENCIES)
    ),
    lookup_tokens: Annotated[int, typer.Option(min=1, help="Drafts of prompt-lookup.")] = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that are generated for at once.")] = 1,
    seed: Annotated[int, typer.Option(help="Of every generation, and of the choice among Hub prompts.")] = 0,
    thinking: Annotated[bool, typer.Option("--thinking", help="Chat template with thinking on.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts as they are, without a chat template.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto: float32 on a CPU.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, ..., or auto.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow the target's own code.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure methods on prompts and write raw records and a report; several processes by `accelerate launch`."""
    with one_sentence_errors():
        plan = benchmark_plan(
            preset,
            tasks=tasks,
            prompts=prompts,
            temperatures=temperatures,
            max_new_tokens=max_new_tokens,
            max_samples=max_samples,
            thinking=thinking,
            raw=raw,
            rule=rule,
            verify_width=size_of("--verify-width", verify_width),
        )
        differences = deviations(plan) if preset else []
        for line in differences:
            typer.echo(f"Deviation from the papers: {line}", err=True)
        lengths = numbers("--contexts", contexts) if contexts else []
        if lengths and (tasks or server):
            raise ValueError("`--contexts` makes tasks of its own, for a pair; leave out --tasks and --server.")
        if not server:
            require_methods(methods.split(","), {"dflash": dflash, "assistant": assistant})
        loaded = {}
        if not lengths:
            for task in plan["tasks"]:
                loaded[task] = load_prompts(task, plan["prompts"], max_samples=max_samples, seed=seed)
        if server:
            summary = benchmark_servers(server, loaded, concurrency, plan, seed, out)
            show_report(out)
            if as_json:
                typer.echo(json.dumps(summary))
            return
        nodes = size_of("--tree-nodes", tree_nodes)
        settings = Settings(
            **{name: plan[name] for name in ("max_new_tokens", "thinking", "raw", "rule", "verify_width")},
            seed=seed,
            tree="auto" if nodes == "auto" else TreeShape(nodes, tree_lanes, tree_candidates, tree_children),
            candidates=candidates,
            draft_vocab=draft_vocab,
            auto_off=auto_off or None,
            lookup_tokens=lookup_tokens,
            batch_size=batch_size,
        )
        shard = shard_of_process()
        pair = load_pair(target, drafter, *resolve_device(device, dtype), trust_remote_code=trust_remote_code)
        if shard[0] == 0:
            introduce(pair)
        if lengths:
            loaded = context_prompts(lengths, pair.tokenizer, plan["prompts"], count=max_samples or 1)
        summary = benchmark_pair(
            pair,
            loaded,
            methods.split(","),
            plan["temperatures"],
            settings,
            out,
            assistant=assistant,
            dflash=dflash,
            differences=differences,
            shard=shard,
        )
    if summary is not None:
        show_report(out)
        if as_json:
            typer.echo(json.dumps(summary))


@app.command("report")
def report_command(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folder of a benchmark's records; several are also compared.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Markdown page whose result blocks are made anew from the files they name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild a benchmark's tables, plots and summary from its records; runs no model."""
    with one_sentence_errors():
        if page is not None:
            write_text(page, render_blocks(page))
        if not folders:
            if page is None:
                raise ValueError("Name a folder with records, or a page with --page.")
            return
        summaries = [write_report(folder) for folder in folders]
        comparison = compare_folders(folders) if len(folders) > 1 else ""
    for folder in folders:
        show_report(folder)
    if comparison:
        typer.echo(comparison)
    if as_json:
        typer.echo(json.dumps(summaries[0] if len(summaries) == 1 else summaries))


def numbers(option: str, text: str) -> list[int]:
    """The whole numbers of a comma-separated option."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"`{option}` takes numbers separated by commas, got {text}.") from None


def show_report(folder: Path) -> None:
    """Prints what was measured; the file also has what others published."""
    measured = (folder / "report.md").read_text().partition("## Published numbers")[0]
    typer.echo(f"{measured.rstrip()}\n\nWith published numbers beside it: {folder / 'report.md'}")


def benchmark_servers(
    servers: list[str],
    tasks: dict[str, list[Prompt]],
    concurrency: str,
    plan: dict[str, Any],
    seed: int,
    out: Path,
) -> dict[str, Any]:
    """Measures servers and writes the report; loads no model."""
    run_servers(
        parse_arms(servers),
        tasks,
        numbers("--concurrency", concurrency),
        plan["temperatures"],
        ServerSettings(max_new_tokens=plan["max_new_tokens"], seed=seed, thinking=plan["thinking"]),
        out,
        session=provenance(),
        notify=lambda line: typer.echo(line, err=True),
    )
    return write_report(out)


def benchmark_pair(
    pair: Pair,
    tasks: dict[str, list[Prompt]],
    methods: list[str],
    temperatures: list[float],
    settings: Settings,
    out: Path,
    *,
    assistant: str | None,
    dflash: str | None,
    differences: list[str],
    shard: tuple[int, int],
) -> dict[str, Any] | None:
    """Measures a pair and writes the report; the summary, or `None` in a process that is not the first."""
    require_sources(assistant, dflash)
    device, dtype = pair.target.device, pair.target.dtype
    weights, models = dict(pair.weights), Models(pair.target, pair.tokenizer, pair.drafter)
    if assistant is not None:
        models.assistant = AutoModelForCausalLM.from_pretrained(assistant, dtype=dtype).to(device).eval()
        weights["assistant"] = folder_of(assistant)
    if dflash is not None:
        models.dflash = DominoDraftModel.from_pretrained(dflash, dtype=dtype).to(device).eval()
        weights["dflash"] = folder_of(dflash)
    session = provenance(device=device, dtype=dtype, weights=weights)
    session |= {"deviations": differences, **machine_facts(models)}
    about = {**models_facts(models), "trained": pair.trained, **comparable(session)}
    run_benchmark(
        models,
        tasks,
        methods,
        temperatures,
        settings,
        out,
        about=about,
        session=session,
        shard=shard,
        notify=lambda line: typer.echo(line, err=True),
    )
    wait_for_all(shard)
    return write_report(out) if shard[0] == 0 else None
