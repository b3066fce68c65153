"""`domino draft-vocab` and `calibrate`: what is measured on data once and then kept beside a drafter's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modeling_domino.cli.app import app, one_sentence_errors
from modeling_domino.cli.pair import load_pair, resolve_device
from modeling_domino.training.calibrate import calibrate, write_temperatures
from modeling_domino.training.data import read_samples, split_samples
from modeling_domino.training.ranking import rank, write_ranking


@app.command("draft-vocab")
def draft_vocab_command(
    drafter: Annotated[Path, typer.Argument(help="Folder of the drafter.")],
    data: Annotated[list[Path], typer.Option(help="File of training data, the target's answers; may be repeated.")],
    size: Annotated[int | None, typer.Option(min=1, help="Most tokens to write; by default all that occur.")] = None,
) -> None:
    """Rank the tokens that the target writes, beside a drafter's weights, for `--draft-vocab` in generation."""
    with one_sentence_errors(str(drafter)):
        ranking = rank(data)
        path = write_ranking(drafter, ranking, data, size=size)
    for line in ranking.lines():
        typer.echo(line)
    typer.echo(f"{len(ranking.ids[:size]):,} tokens are ranked in {path}.")


@app.command("calibrate")
def calibrate_command(
    drafter: Annotated[Path, typer.Argument(help="Folder of the drafter; its config gets the temperatures.")],
    data: Annotated[list[Path], typer.Option(help="File of training data, the target's answers; may be repeated.")],
    target: Annotated[
        str | None, typer.Option(help="Hub id or folder of the target; by default the default pair's.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Answers to look at; those that training holds out first.")] = 48,
    temperature: Annotated[float, typer.Option(help="Of the sampling that is calibrated for.")] = 1.0,
    max_length: Annotated[int, typer.Option(min=2, help="Longer sequences are cut at the end.")] = 1024,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto: float32 on a CPU.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, ..., or auto.")] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report only; leave the config as it is.")] = False,
) -> None:
    """Fit the temperatures of a drafter's drafts on held-out answers, for sampling, trees and auto sizes."""
    with one_sentence_errors(target, str(drafter)):
        pair = load_pair(target, str(drafter), *resolve_device(device, dtype))
        answers = read_samples(data, pair.tokenizer, max_length=max_length, vocab_size=pair.drafter.config.vocab_size)
        held_out = split_samples(answers, samples)[1] if samples < len(answers) else answers
        found = calibrate(pair.drafter, pair.target, held_out, temperature=temperature)
        if not dry_run:
            write_temperatures(drafter, found.temperatures)
    for line in found.lines():
        typer.echo(line)
    typer.echo(
        f"{found.blocks:,} blocks of {len(held_out)} answers; {'nothing' if dry_run else drafter / 'config.json'} written."
    )
