"""What every `domino` command shares: the application, options that recur, and errors in one sentence."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError
from transformers.utils import logging


app = typer.Typer(
    name="domino",
    help="Lossless speculative decoding with Domino drafters.",
    no_args_is_help=True,
    add_completion=False,
    # Locals can hold a token.
    pretty_exceptions_show_locals=False,
)

MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON line last.")]
Rounds = Annotated[
    bool, typer.Option("--rounds", help="Show every round: drafts, first miss, the target's own token.")
]


# What drafts are chosen from, and how many of them are verified.
VerifyWidth = Annotated[str | None, typer.Option(help="Most drafts to verify per round, or auto: as many as pay.")]
Candidates = Annotated[
    int | None, typer.Option(min=0, help="Tokens per draft that are corrected and chosen from; 0 for all.")
]
DraftVocab = Annotated[
    int | None, typer.Option(min=0, help="Draft from so many of the most frequent tokens; 0 for all.")
]
WithAutoOff = Annotated[bool, typer.Option("--auto-off", help="Stop drafting where plain steps are faster.")]


@contextmanager
def one_sentence_errors(*sources: str | None) -> Iterator[None]:
    """Turns what a user can get wrong into one sentence and exit code 2; a failure to read `sources` names them."""
    logging.disable_progress_bar()
    if "HF_HUB_VERBOSITY" not in os.environ:
        # Its client tells of every attempt that failed before the last one does.
        hub_logging.set_verbosity_error()
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
