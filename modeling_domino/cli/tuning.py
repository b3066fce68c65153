"""`domino draft-vocab`: what is measured on data once and then kept beside a drafter's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modeling_domino.cli.app import app, one_sentence_errors
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
