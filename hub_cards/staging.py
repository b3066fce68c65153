"""What is published, as a folder: found by name, staged in `dist/`, checked, and remembered as it was when it was checked.

Four kinds of repositories are known by what lies in the source folder: drafters (or recipes for one), answers, Spaces and kernels.
Nothing here writes to the Hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from hub_cards.cards import FIGURE, RESULTS, render
from hub_cards.hub_errors import hub_errors
from hub_cards.lint import CARD, front_matter, require_clean, split_card
from modeling_domino.atomic import write_text
from modeling_domino.benchmark.plots import draw_tasks
from modeling_domino.convert import written_at_once
from modeling_domino.default_pair import trained_drafter_folder
from modeling_domino.provenance import CHECKOUT
from modeling_domino.space import stage_space
from modeling_domino.stage import read_recipe, require_tag, source_folder, stage, staging_folder
from modeling_domino.training.regenerate import SETTINGS_FILE


KERNEL_CARD = "CARD.md"
# How a kernel's card names its own repository before that is chosen.
UNCHOSEN_KERNEL = "ORG/domino-kernels"
PREFIXES = {"model": "", "dataset": "datasets/", "space": "spaces/", "kernel": "kernels/"}


@dataclass(frozen=True)
class StagedFile:
    """A file as it was when it was checked: its size, and the two ids that the Hub knows a content by."""

    size: int
    sha256: str
    git: str


def read_files(folder: Path) -> dict[str, StagedFile]:
    """All files of a folder, by name."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        sha256, git = hashlib.sha256(), hashlib.sha1(f"blob {size}\0".encode())
        with path.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                sha256.update(chunk)
                git.update(chunk)
        files[path.relative_to(folder).as_posix()] = StagedFile(size, sha256.hexdigest(), git.hexdigest())
    return files


@dataclass
class Publication:
    """One folder on its way to one repository.

    Args:
        source: the folder that is published.
        kind: "model", "dataset", "space" or "kernel".
        repo_id, tag: where to; a kernel's tag is the name of its version's branch, such as "v1".
        folder: where it is staged.
        files: what was checked there, and may be sent.
    """

    source: Path
    kind: str
    repo_id: str
    tag: str
    folder: Path
    files: dict[str, StagedFile] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The page of the repository."""
        return f"{HfApi().endpoint}/{PREFIXES[self.kind]}{self.repo_id}"


def prepare(name: str, *, repo_id: str, tag: str, output: Path | None = None) -> Publication:
    """Stages and checks what `name` stands for: a folder of `hub_cards/`, `space_app`, `kernels`, or a path.

    Raises:
        ValueError: if there is no such folder, the id or tag is none, or the folder cannot be staged.
        LintError: if it must not be published.
    """
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"A repository is named ORG/NAME, got {repo_id}.")
    source = publishable_folder(name)
    kind = kind_of(source)
    if kind == "kernel":
        require_version(source, tag)
    else:
        require_tag(tag)
    publication = Publication(source, kind, repo_id, tag, output or staging_folder(repo_id))
    if output is not None:
        require_own(output)
    if links := sorted(path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_symlink()):
        raise ValueError(
            f"What is published lies in its folder, but {source} has links ({', '.join(links[:3])}); put copies in their place."
        )
    if kind == "model":
        stage_drafter(publication)
    elif kind == "space":
        # It shows the default drafter as the same organisation publishes it under the same tag.
        drafter = f"{repo_id.split('/')[0]}/{trained_drafter_folder().name}"
        stage_space(publication.folder, drafter=drafter, revision=tag)
    else:
        stage_files(publication)
    staging_mark(publication.folder).touch()
    # Before the check: what changes afterwards is not sent.
    publication.files = read_files(publication.folder)
    require_clean(publication.folder, kind, repo_id)
    return publication


def require_version(kernel: Path, tag: str) -> None:
    """Refuses a name that is not the one of the kernel's version.

    Raises:
        ValueError: with the name to give.
    """
    if not re.fullmatch(r"v[1-9][0-9]*", tag):
        raise ValueError(f"A kernel's version is a branch named v1, v2, ..., got {tag!r}.")
    version = tomllib.loads((kernel / "build.toml").read_text(encoding="utf-8")).get("general", {}).get("version")
    if version is not None and tag != f"v{version}":
        raise ValueError(f"The kernel's build.toml says version {version}, so its tag is v{version}, got {tag}.")


def require_own(output: Path) -> None:
    """Refuses to replace a folder that no staging wrote: it may be somebody's work.

    Raises:
        ValueError: if `output` holds something, and no mark of a staging lies beside it.
    """
    if output.exists() and not staging_mark(output).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"Staging replaces only what it wrote itself, and {output} is not that; name a new --output.")


def staging_mark(output: Path) -> Path:
    """The file beside a staged folder that says so."""
    return output.absolute().with_name(f".{output.absolute().name}.staged")


def publishable_folder(name: str) -> Path:
    """The folder behind a name, one of the checkout first."""
    for folder in (CHECKOUT / "hub_cards" / name, CHECKOUT / name, Path(name)):
        if folder.is_dir() and folder.resolve() != CHECKOUT:
            return folder.resolve()
    raise ValueError(f"There is no folder {name} in hub_cards/, in the checkout, or at that path.")


def kind_of(folder: Path) -> str:
    """The type of the repository that a folder becomes."""
    if (folder / SETTINGS_FILE).is_file():
        return "dataset"
    if (folder / "build.toml").is_file():
        return "kernel"
    if (folder / "app.py").is_file():
        return "space"
    # Refuses what is no drafter.
    source_folder(str(folder))
    return "model"


def stage_drafter(publication: Publication) -> None:
    """A drafter as `domino stage` lays it out, with a card for this repository."""
    recipe, source = read_recipe(publication.source), publication.source
    licence = source_licence(recipe) if recipe else None

    def card(work: Path) -> str:
        return render(work, repo_id=publication.repo_id, tag=publication.tag, facts=source, licence=licence)

    stage(
        str(source), repo_id=publication.repo_id, tag=publication.tag, output=publication.folder.absolute(), card=card
    )


def stage_files(publication: Publication) -> None:
    """The files of a folder: a kernel's with its build, answers with a card for this repository."""
    source, kind, folder = publication.source, publication.kind, publication.folder
    if folder.exists() and not (folder / CARD).is_file():
        raise ValueError(f"Staging replaces only a folder with a {CARD}, got {folder}; choose another --output.")
    with written_at_once(folder) as work:
        shutil.copytree(source, work, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", ".*", "build"))
        if kind == "dataset":
            text = render(work, repo_id=publication.repo_id, tag=publication.tag)
            (work / CARD).write_text(text, encoding="utf-8")
            return
        if kind == "kernel":
            run_python(source / "build.py", "--output", work / "build")
            text = (work / "build.toml").read_text(encoding="utf-8")
            text = re.sub(r"^repo-id = .*$", f'repo-id = "{publication.repo_id}"', text, flags=re.MULTILINE)
            (work / "build.toml").write_text(text, encoding="utf-8")
            if (work / KERNEL_CARD).is_file():
                text = (work / KERNEL_CARD).read_text(encoding="utf-8")
                (work / CARD).write_text(text.replace(UNCHOSEN_KERNEL, publication.repo_id), encoding="utf-8")
                (work / KERNEL_CARD).unlink()
        shutil.copyfile(CHECKOUT / "LICENSE", work / "LICENSE")


def run_python(*words: Path | str, folder: Path | None = None) -> None:
    """Runs a script of a checkout in a process of its own; its last line of complaint is the error."""
    environment = {**os.environ, "PYTHONPATH": str(folder)} if folder else None
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it gives no reason"])[-1]
        raise ValueError(f"{' '.join(map(str, words[:2]))} failed: {reason.removeprefix('Error: ')}")


def source_licence(recipe: dict[str, Any]) -> dict[str, str]:
    """The licence that the card of a recipe's source names at the pinned revision, with name and link where it is "other".

    Raises:
        ValueError: if it names none: then nobody may publish a copy.
    """
    source, revision = recipe["source"], recipe["revision"]
    with hub_errors(source):
        try:
            card = Path(HfApi().hf_hub_download(source, CARD, revision=revision)).read_text(encoding="utf-8")
        except EntryNotFoundError:
            card = ""
    head, _ = split_card(card)
    refused = f"a copy of {source} at {revision[:8]} must not be published; ask its authors"
    try:
        metadata = front_matter(head or "")
    except ValueError as error:
        raise ValueError(f"The source's card {error}, so {refused}.") from None
    licence = metadata.get("license")
    if not licence or licence == "unknown":
        raise ValueError(f"The source's card names no licence, so {refused}.")
    if not isinstance(licence, str):
        raise ValueError(f"The source's card must name one licence, it has {licence!r}, so {refused}.")
    if licence != "other":
        return {"license": licence}
    name, link = metadata.get("license_name"), metadata.get("license_link")
    if not (isinstance(name, str) and isinstance(link, str)):
        raise ValueError(
            f"The source's card names another licence without license_name and license_link, so {refused}."
        )
    if not link.startswith("https://"):
        link = f"https://huggingface.co/{source}/blob/{revision}/{link}"
    return {"license": licence, "license_name": name, "license_link": link}


def write_card(name: str, *, repo_id: str | None = None, tag: str | None = None) -> Path:
    """Writes the card of a folder into it, and the figure of its results; returns the card's path."""
    folder = publishable_folder(name)
    if (folder / RESULTS).is_file():
        draw_tasks(json.loads((folder / RESULTS).read_text(encoding="utf-8")), folder / FIGURE.parent)
    write_text(folder / CARD, render(folder, repo_id=repo_id, **({"tag": tag} if tag else {})))
    return folder / CARD
