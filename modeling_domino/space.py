"""The Space as a folder: what lies in `space_app/`, the renderer beside it, and the pair it shows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from .convert import written_at_once
from .default_pair import HUB_ID
from .provenance import CHECKOUT


APP = CHECKOUT / "space_app"
APP_FILES = ("app.py", "engine.py", "requirements.txt")
RENDERER = Path(__file__).with_name("render")


def stage_space(
    destination: Path,
    *,
    drafter: str,
    revision: str | None = None,
    target: str = HUB_ID,
    target_revision: str | None = None,
) -> Path:
    """Writes the repository of the Space: complete or not at all; a staged Space is replaced.

    Args:
        destination (`Path`): the folder to write.
        drafter (`str`): Hub id of the drafter; for a try-out on this machine, a folder.
        revision (`str`, *optional*): tag or commit of the drafter, which brings code; needed for a Hub id.
        target, target_revision: the same of the target.

    Returns:
        `Path`: the folder.

    Raises:
        ValueError: outside a checkout, for a drafter of the Hub without a revision, or if `destination` is something else.
    """
    require_checkout()
    if revision is None and not Path(drafter).is_dir():
        raise ValueError(f"A Space pins its drafter, which brings code: {drafter} needs a revision, got none.")
    if destination.exists() and not (destination / "engine.py").is_file():
        raise ValueError(f"Staging replaces only a staged Space, got {destination}; choose another folder.")
    pair = {"target": target, "target_revision": target_revision, "drafter": drafter, "drafter_revision": revision}
    with written_at_once(destination) as work:
        for name in APP_FILES:
            shutil.copyfile(APP / name, work / name)
        card = (APP / "README.md").read_text(encoding="utf-8")
        for role in ("target", "drafter"):
            card = card.replace(f"{{{role}}}", pair[role])
        (work / "README.md").write_text(card, encoding="utf-8")
        # The terminal's part needs a package and stays home.
        shutil.copytree(RENDERER, work / "render", ignore=shutil.ignore_patterns("terminal.py", "__pycache__"))
        (work / "pair.json").write_text(json.dumps(pair, indent=2) + "\n")
    return destination


def require_checkout() -> None:
    """Raises a `ValueError` where the package is installed without the repository around it."""
    if not APP.is_dir():
        raise ValueError(
            "The Space lies in space_app/ of a checkout and this package is installed; clone the repository."
        )
