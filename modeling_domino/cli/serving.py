"""`domino serve`: the flat export and the launch of a server that executes the correction head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from modeling_domino import serve
from modeling_domino.cli.app import app, one_sentence_errors, warnings_as_notices
from modeling_domino.cli.pair import require_sources


@app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve_command(
    context: typer.Context,
    drafter: Annotated[str, typer.Option(help="Hub id or folder of the drafter.")],
    engine: Annotated[str, typer.Option(help=f"One of {', '.join(serve.ENGINES)}.")] = "sglang",
    target: Annotated[str | None, typer.Option(help="Hub id or folder; by default the drafter's own.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the flat export; by default DRAFTER-flat.")] = None,
    run: Annotated[bool, typer.Option("--run", help="Start the server; by default its command is printed.")] = False,
) -> None:
    """Export a drafter for SGLang and print or run the launch; arguments that are not known here are SGLang's."""
    with one_sentence_errors(drafter, target), warnings_as_notices():
        serve.require_engine(engine)
        require_sources(drafter, target)
        name = drafter.rstrip("/").split("/")[-1]
        flat = serve.export_flat(drafter, output or Path(f"{name}-flat"))
        command = serve.sglang_command(target, flat, context.args)
        typer.echo(serve.shown(command))
        if run:
            raise typer.Exit(serve.run(command))
