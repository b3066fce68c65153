"""`domino train`, `regenerate` and `ablate`, which hand their arguments on."""

from __future__ import annotations

import importlib

import typer

from modeling_domino.cli.app import app, one_sentence_errors


# Training reads its arguments itself: transformers' `TrainingArguments` and ours.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


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
