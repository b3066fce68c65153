"""`domino convert` and `stage`: drafters between formats, and laid out as Hub repositories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modeling_domino.cli.app import app, one_sentence_errors, warnings_as_notices
from modeling_domino.cli.pair import require_sources
from modeling_domino.convert import FORMATS, convert
from modeling_domino.stage import StampError, stage, staged_folder, verify_stamp


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
    output: Annotated[
        Path | None, typer.Option(help="Folder to write; by default dist/ORG--NAME, or dist/NAME without --repo-id.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Write nothing; recompute the stamp of the staged folder.")
    ] = False,
) -> None:
    """Lay out a complete Hub repository of a drafter; exit code 3: the stamp of one does not hold."""
    with one_sentence_errors(source), warnings_as_notices():
        if verify:
            folder = output or staged_folder(source, repo_id)
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
