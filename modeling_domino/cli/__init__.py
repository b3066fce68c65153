"""The `domino` command: see a drafter at work, train, measure, convert and publish one. One file per group of commands.

Reports go to standard output, notices and errors to standard error; with `--json`, the last line of standard output is
one JSON object. Exit codes: 0 ok (`check`: the pair fits), 1 it does not fit, 2 wrong usage or unreadable input,
3 a verification failed.
"""

from importlib import import_module

from modeling_domino.cli.app import app


# In the order of `domino --help`.
for group in ("decode", "show", "repositories", "publishing", "serving", "training", "tuning", "benchmarks"):
    import_module(f"{__name__}.{group}")

__all__ = ["app"]
