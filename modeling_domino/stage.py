"""Staging: a complete Hub repository in `dist/ORG--NAME`, from a drafter in any format.

What `domino stage` writes is what a push uploads: weights, config, exactly the `_domino.py` files, `custom_generate/`
and the card. `custom_generate` is not told which repository it came from and a repository cannot know its own commit, so
staging stamps the id and the TAG about to be created, with a digest of the other files.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.utils import validate_repo_id

from .configuration_domino import DominoConfig
from .convert import Report, convert, written_at_once
from .facts import drafter_facts
from .provenance import CHECKOUT, sha256_of


SHIM = Path(__file__).with_name("custom_generate")
SHIM_FILES = ("generate.py", "requirements.txt", "stamp.py")
STAMP = Path("custom_generate", "stamp.py")
# What travels from the source folder beside the weights; `results` with all it holds.
CARD_FILES = ("README.md", "LICENSE", "NOTICE", "training.json", "ablation.json")
RESULTS = "results"
# A folder with a recipe holds no weights: it names a published drafter, the revision to take, and what must be there.
RECIPE = "recipe.json"
# What `git check-ref-format` refuses, and names that mean something else: options, branches, other refs, commits.
UNFIT_TAG = re.compile(
    r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|(^|/)\.|\.lock(/|$)|[/.]$|^[-/]|^@?$"
    r"|^(main|master|head)$|^refs(/|$)|^[0-9a-f]{40}$",
    flags=re.IGNORECASE,
)


class StampError(ValueError):
    """A staged folder is not what its stamp says."""


def stage(
    source: str,
    *,
    repo_id: str | None = None,
    tag: str | None = None,
    output: Path | None = None,
    card: Callable[[Path], str] | None = None,
) -> tuple[Path, Report]:
    """Stages a drafter as a Hub repository.

    Args:
        source (`str`): the name of a folder in `hub_cards/`, or any folder with a drafter or a recipe for one.
        repo_id (`str`, *optional*): id of the repository to be; without it `custom_generate` needs `assistant_model=`.
        tag (`str`, *optional*): the tag about to be created there.
        output (`Path`, *optional*): the folder to write, by default `dist/ORG--NAME` (or `dist/NAME`) in the checkout; it is replaced.
        card (`Callable`, *optional*): makes the card of the folder that is being written; by default the source's is taken.

    Returns:
        The staged folder, and what changed in config and tensors.

    Raises:
        ValueError: if there is no such drafter, it cannot be read completely, or is not what its recipe says; nothing is
            written.
    """
    folder = source_folder(source)
    recipe = read_recipe(folder)
    if (repo_id is None) != (tag is None):
        raise ValueError(f"A repository is stamped with its id and its tag, got --repo-id {repo_id} and --tag {tag}.")
    if repo_id is not None:
        validate_repo_id(repo_id)
        require_tag(tag)
    if output is None:
        output = staging_folder(repo_id or folder.name)
    if output.exists() and not (output / "config.json").is_file():
        raise ValueError(f"Staging replaces only a folder with a config.json, got {output}; choose another --output.")
    with written_at_once(output) as work:
        # `convert` wants to create its destination itself.
        work.rmdir()
        if recipe is None:
            report = convert(folder, work, to="ours")
        else:
            report = convert(recipe["source"], work, revision=recipe["revision"], target=recipe["target"])
            _require_recipe(recipe, work)
        report.destination = str(output)
        for name in CARD_FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, work / name)
        if (folder / RESULTS).is_dir():
            shutil.copytree(folder / RESULTS, work / RESULTS)
        if card is not None:
            (work / "README.md").write_text(card(work), encoding="utf-8")
        report.left = [name for name in report.left if not (work / name).exists()]
        (work / "custom_generate").mkdir()
        for name in SHIM_FILES:
            shutil.copyfile(SHIM / name, work / "custom_generate" / name)
        if repo_id is not None:
            (work / STAMP).write_text(stamp_text(work, repo_id, tag))
    return output, report


def require_tag(tag: str) -> None:
    """Refuses a name that cannot be a tag, or would be taken for something else.

    Raises:
        ValueError: with what a tag is.
    """
    if UNFIT_TAG.search(tag):
        raise ValueError(
            f"A tag is a name that git accepts, and no branch, such as v1, got {tag!r}; choose another --tag."
        )


def source_folder(source: str) -> Path:
    """The folder of a drafter, named by its path or by its name in `hub_cards/`."""
    for folder in (CHECKOUT / "hub_cards" / source, Path(source)):
        if (folder / "config.json").is_file() or (folder / RECIPE).is_file():
            return folder.resolve()
    raise ValueError(
        f"{source} must be a folder with a drafter, or the name of one in hub_cards/; neither has a config.json."
    )


def read_recipe(folder: Path) -> dict[str, Any] | None:
    """The recipe of a folder, or `None` where the drafter itself lies."""
    if (folder / "config.json").is_file() or not (folder / RECIPE).is_file():
        return None
    return json.loads((folder / RECIPE).read_text(encoding="utf-8"))


def _require_recipe(recipe: dict[str, Any], folder: Path) -> None:
    """Refuses a drafter that is not the one its recipe was written for."""
    config = DominoConfig.from_pretrained(folder)
    differing = [name for name, value in recipe["config"].items() if getattr(config, name) != value]
    if differing or drafter_facts(config)["stored_parameters"] != recipe["stored_parameters"]:
        raise ValueError(
            f"{recipe['source']} at {recipe['revision'][:8]} is not the drafter of the recipe ({', '.join(differing) or 'size'} "
            "differs); correct the recipe, or its revision."
        )


def staged_folder(source: str, repo_id: str | None = None) -> Path:
    """The folder that staging `source` wrote: `source` itself if it is one, or the one in dist/."""
    return Path(source) if (Path(source) / STAMP).is_file() else staging_folder(repo_id or Path(source).name)


def stamp_text(folder: Path, repo_id: str, tag: str) -> str:
    """The stamp of a staged folder."""
    unstamped = ast.get_docstring(ast.parse((SHIM / "stamp.py").read_text()))
    values = {"DRAFTER_ID": repo_id, "DRAFTER_REVISION": tag, "FILES_SHA256": files_sha256(folder)}
    return f'"""{unstamped}"""\n\n' + "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


def read_stamp(folder: Path) -> dict[str, str | None]:
    """The values of a staged folder's stamp, read without running it."""
    tree = ast.parse((folder / STAMP).read_text())
    return {
        statement.targets[0].id: ast.literal_eval(statement.value)
        for statement in tree.body
        if isinstance(statement, ast.Assign)
    }


def verify_stamp(folder: Path) -> dict[str, str | None]:
    """Recomputes the stamp of a staged folder.

    Returns:
        `dict`: the stamp's values.

    Raises:
        StampError: if the folder is not stamped, or a file changed since.
    """
    if not (folder / STAMP).is_file():
        raise StampError(f"{folder} must be a staged folder, it has no {STAMP.as_posix()}; run `domino stage` first.")
    stamp = read_stamp(folder)
    if stamp["DRAFTER_ID"] is None:
        raise StampError(f"{folder} is not stamped; stage it with --repo-id ORG/NAME --tag TAG.")
    if (folder / STAMP).read_text() != stamp_text(folder, stamp["DRAFTER_ID"], stamp["DRAFTER_REVISION"]):
        raise StampError(f"Files of {folder} changed after it was stamped; stage it again.")
    return stamp


def files_sha256(folder: Path) -> str:
    """One digest over names and contents of all files but the stamp."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix()):
        name = path.relative_to(folder)
        if path.is_file() and name != STAMP:
            digest.update(f"{sha256_of(path)}  {name.as_posix()}\n".encode())
    return digest.hexdigest()


def staging_folder(name: str) -> Path:
    """Where a repository is staged, apart from one of the same name in another organisation.

    Raises:
        ValueError: where the package is installed without the repository around it.
    """
    if not (CHECKOUT / "pyproject.toml").is_file():
        raise ValueError("`domino stage` works on dist/ of a checkout and this package is installed; pass --output.")
    return CHECKOUT / "dist" / name.replace("/", "--")
