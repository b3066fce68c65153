"""A staged Space with a tiny pair, for the tests of its engine and its page."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import tiny_drafter, tiny_target, tiny_tokenizer

from modeling_domino.space import stage_space
from modeling_domino.stage import stage


def tiny_space(folder: Path, **drafter_options) -> Path:
    """A Space in `folder` whose pair lies beside it: a target that writes until it is stopped, and a drafter for it."""
    target = tiny_target()
    target.save_pretrained(folder / "tiny-target")
    tiny_tokenizer().save_pretrained(folder / "tiny-target")
    tiny_drafter(target, **drafter_options).save_pretrained(folder / "raw")
    stage(str(folder / "raw"), output=folder / "tiny-drafter")
    return stage_space(folder / "space", drafter=str(folder / "tiny-drafter"), target=str(folder / "tiny-target"))


@contextmanager
def imports_from(space: Path) -> Iterator[None]:
    """Lets the Space's own names be imported as they are where it runs, and forgets them afterwards."""
    names = ("app", "engine", "render")

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] in names]:
            del sys.modules[name]

    forget()
    sys.path.insert(0, str(space))
    try:
        yield
    finally:
        sys.path.remove(str(space))
        forget()
