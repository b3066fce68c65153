"""Proof that a repository holds what a git tag makes: the tag is staged by its own code, and every file compared."""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from pathlib import Path

from hub_cards.publish import verify
from hub_cards.staging import Publication, kind_of, publishable_folder, read_files, run_python
from modeling_domino.provenance import CHECKOUT
from modeling_domino.stage import require_tag


def verify_against_git(name: str, *, repo_id: str, tag: str, git_tag: str, output: Path | None = None) -> None:
    """Stages a git tag of this checkout with that tag's own code, and compares every file with the Hub.

    Raises:
        ValueError: if there is no such tag, `name` is none of its folders, or the code of that time cannot stage it.
        VerificationError: if the repository holds anything else.
    """
    require_tag(tag)
    folder = publishable_folder(name)
    if not folder.is_relative_to(CHECKOUT):
        raise ValueError(f"A git tag makes folders of this checkout, and {folder} lies outside; verify one inside.")
    inside = folder.relative_to(CHECKOUT)
    with tempfile.TemporaryDirectory() as scratch:
        checkout, staged = Path(scratch, "checkout"), output.absolute() if output else Path(scratch, "staged")
        export_git_tag(git_tag, checkout)
        if not (checkout / inside).is_dir():
            raise ValueError(f"The git tag {git_tag} has no {inside}; commit the folder, and tag that.")
        words = ["push", inside, "--repo-id", repo_id, "--tag", tag, "--output", staged]
        run_python("-m", "modeling_domino.cli", *words, folder=checkout)
        publication = Publication(
            checkout / inside, kind_of(checkout / inside), repo_id, tag, staged, read_files(staged)
        )
        verify(publication, prune=True)


def export_git_tag(tag: str, folder: Path) -> None:
    """Writes the files of a git tag of this checkout into a new folder."""
    git, ref = ["git", "-C", CHECKOUT], f"refs/tags/{tag}"
    if subprocess.run([*git, "rev-parse", "--verify", "--quiet", ref], capture_output=True).returncode:
        raise ValueError(f"This checkout has no git tag {tag}; create it, or name another with --git-tag.")
    with tempfile.TemporaryFile() as archive:
        subprocess.run([*git, "archive", ref], stdout=archive, check=True)
        archive.seek(0)
        with tarfile.open(fileobj=archive) as files:
            files.extractall(folder, filter="data")
