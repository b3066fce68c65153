"""Publishing: a folder staged, checked, compared with its repository on the Hub, and sent in one commit.

Without `execute` nothing is sent, and without a network everything counts as new. A second push of the same files sends nothing. Four
kinds of repositories are known by what lies in the source folder: drafters (or recipes for one), answers, Spaces and kernels.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id
from huggingface_hub.utils.sha import git_hash, sha_fileobj

from hub_cards.cards import FIGURE, RESULTS, render
from hub_cards.lint import CARD, require_clean, split_card
from modeling_domino.benchmark.plots import draw_tasks
from modeling_domino.convert import written_at_once
from modeling_domino.default_pair import trained_drafter_folder
from modeling_domino.provenance import CHECKOUT, git_state
from modeling_domino.space import stage_space
from modeling_domino.stage import read_recipe, source_folder, stage
from modeling_domino.training.regenerate import SETTINGS_FILE


# What the Hub puts into a new repository itself.
HUBS_OWN = {".gitattributes"}
KERNEL_CARD = "CARD.md"
PREFIXES = {"model": "", "dataset": "datasets/", "space": "spaces/", "kernel": "kernels/"}


class VerificationError(ValueError):
    """A repository does not hold what it should."""


@dataclass
class Plan:
    """What a push would change.

    Args:
        head: the commit that was compared with; `None` where there is no repository yet.
        mark: the commit that the tag (of kernels: the version's branch) points to, if it exists.
        added, changed, kept, removed, foreign: names of files; foreign ones are only on the Hub and stay there.
        size: bytes of what would be sent.
    """

    head: str | None = None
    mark: str | None = None
    private: bool | None = None
    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    size: int = 0

    @property
    def empty(self) -> bool:
        """Whether the repository holds all of it already."""
        return not (self.added or self.changed or self.removed)

    def lines(self) -> Iterator[str]:
        """The plan as text, one file a line."""
        for sign, names in (("+", self.added), ("~", self.changed), ("-", self.removed), ("?", self.foreign)):
            yield from (f"{sign} {name}" for name in names)
        foreign = f", {len(self.foreign)} only on the Hub (?; --prune removes them)" if self.foreign else ""
        yield (
            f"{len(self.added)} new, {len(self.changed)} changed, {len(self.removed)} removed, {len(self.kept)} unchanged"
            f"{foreign}; {self.size:,} bytes to send"
        )


@dataclass
class Publication:
    """One folder on its way to one repository.

    Args:
        source: the folder that is published.
        kind: "model", "dataset", "space" or "kernel".
        repo_id, tag: where to; a kernel's tag is the name of its version's branch, such as "v1".
        folder: the staged files.
    """

    source: Path
    kind: str
    repo_id: str
    tag: str
    folder: Path

    @property
    def url(self) -> str:
        """The page of the repository."""
        return f"{HfApi().endpoint}/{PREFIXES[self.kind]}{self.repo_id}"

    @property
    def names(self) -> list[str]:
        """The staged files."""
        return sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())


# ---- the folder


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
    if kind == "kernel" and not (tag.startswith("v") and tag[1:].isdigit()):
        raise ValueError(f"A kernel's version is a branch named v1, v2, ..., got {tag}.")
    publication = Publication(source, kind, repo_id, tag, output or CHECKOUT / "dist" / repo_id.split("/")[-1])
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
    require_clean(publication.folder, kind, repo_id)
    return publication


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
    licence = source_licence(recipe) if recipe else ""

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
            _run_python(source / "build.py", "--output", work / "build")
            if (work / KERNEL_CARD).is_file():
                (work / KERNEL_CARD).rename(work / CARD)
        shutil.copyfile(CHECKOUT / "LICENSE", work / "LICENSE")


def _run_python(*words: Path | str, folder: Path | None = None) -> None:
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


def source_licence(recipe: dict[str, Any]) -> str:
    """The licence that the card of a recipe's source names at the pinned revision.

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
    licence = (yaml.safe_load(head) or {}).get("license") if head else None
    if not licence:
        raise ValueError(
            f"The card of {source} names no licence at {revision[:8]}, so a copy must not be published; ask its authors."
        )
    return licence


def write_card(name: str, *, repo_id: str | None = None, tag: str | None = None) -> Path:
    """Writes the card of a folder into it, and the figure of its results; returns the card's path."""
    folder = publishable_folder(name)
    if (folder / RESULTS).is_file():
        draw_tasks(json.loads((folder / RESULTS).read_text(encoding="utf-8")), folder / FIGURE.parent)
    text = render(folder, repo_id=repo_id, **({"tag": tag} if tag else {}))
    scratch = folder / f".{CARD}"
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(folder / CARD)
    return folder / CARD


# ---- the Hub


@contextmanager
def hub_errors(repo_id: str) -> Iterator[None]:
    """Says in one sentence what the Hub refused."""
    # The class that huggingface_hub's own errors have, whatever HTTP library it uses.
    http_error = HfHubHTTPError.__mro__[1]
    try:
        yield
    except LocalTokenNotFoundError:
        raise ValueError("Publishing needs a token; log in with `hf auth login`, or set HF_TOKEN.") from None
    except OfflineModeIsEnabled:
        raise ValueError(f"{repo_id} cannot be reached, HF_HUB_OFFLINE is set; unset it.") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        reasons = {
            401: f"the Hub does not accept this token for {repo_id}; log in with `hf auth login`, or set HF_TOKEN",
            403: f"this token may not write to {repo_id}; use one with write access to it, or --pr",
            404: f"the Hub has no {repo_id} that this token can see",
            412: f"{repo_id} changed while this ran; look at what changed, then run the command again",
        }
        reason = reasons.get(status, f"the Hub answered with {status} for {repo_id}; run the command again later")
        raise ValueError(f"Nothing more was sent: {reason}.") from None
    except RuntimeError as error:
        # How huggingface_hub tells that a large file did not arrive.
        cause = type(error.__cause__ or error).__name__
        raise ValueError(
            f"Nothing was committed: {repo_id} did not take a large file ({cause}); run the command again."
        ) from None
    except http_error as error:
        raise ValueError(
            f"{repo_id} cannot be reached ({type(error).__name__}); check the network, then run the command again."
        ) from None


def make_plan(api: HfApi, publication: Publication, *, prune: bool) -> Plan:
    """Compares the staged folder with the tag if that exists, else with the branch that would be written."""
    repo_id, kind = publication.repo_id, publication.kind
    plan = Plan()
    remote: dict[str, RepoFile] = {}
    try:
        info = api.repo_info(repo_id, repo_type=kind)
    except RepositoryNotFoundError:
        pass
    else:
        plan.head, plan.private = info.sha, info.private
        refs = api.list_repo_refs(repo_id, repo_type=kind)
        marks = refs.branches if kind == "kernel" else refs.tags
        plan.mark = next((mark.target_commit for mark in marks if mark.name == publication.tag), None)
        if kind == "kernel" and plan.mark:
            plan.head = plan.mark
        remote = remote_files(api, publication, plan.mark or plan.head)
    for name in publication.names:
        path = publication.folder / name
        if name in remote and is_same(path, remote[name]):
            plan.kept.append(name)
            continue
        (plan.changed if name in remote else plan.added).append(name)
        plan.size += path.stat().st_size
    others = sorted(remote.keys() - set(publication.names) - HUBS_OWN)
    plan.removed, plan.foreign = (others, []) if prune else ([], others)
    return plan


def remote_files(api: HfApi, publication: Publication, revision: str) -> dict[str, RepoFile]:
    """The files of a revision, by name."""
    tree = api.list_repo_tree(publication.repo_id, repo_type=publication.kind, revision=revision, recursive=True)
    return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}


def is_same(path: Path, remote: RepoFile) -> bool:
    """Whether a local file has the content of one on the Hub."""
    if remote.lfs is None:
        return git_hash(path.read_bytes()) == remote.blob_id
    with path.open("rb") as file:
        return sha_fileobj(file).hex() == remote.lfs.sha256


def dry_run(publication: Publication, *, prune: bool = False) -> tuple[Plan, str | None]:
    """The plan, and why it could not be compared with the Hub if it could not."""
    try:
        with hub_errors(publication.repo_id):
            return make_plan(HfApi(), publication, prune=prune), None
    except ValueError as error:
        sizes = [(publication.folder / name).stat().st_size for name in publication.names]
        return Plan(added=publication.names, size=sum(sizes)), str(error)


def push(
    publication: Publication,
    *,
    public: bool = False,
    prune: bool = False,
    pull_request: bool = False,
    collection: str | None = None,
) -> dict[str, Any]:
    """Sends a staged folder: one commit on the commit that it was compared with, a tag, and a comparison of what arrived.

    Returns:
        What happened, JSON-ready.

    Raises:
        ValueError: if the Hub refuses, or the tag holds something else; the repository is as it was.
        VerificationError: if what arrived is not what was sent.
    """
    api, repo_id, kind = HfApi(), publication.repo_id, publication.kind
    with hub_errors(repo_id):
        api.whoami()
        plan = make_plan(api, publication, prune=prune)
        if plan.mark and kind != "kernel" and not plan.empty:
            raise ValueError(f"The tag {publication.tag} of {repo_id} is taken by other files; choose another --tag.")
        done = {"repo_id": repo_id, "type": kind, "tag": publication.tag, "url": publication.url, **summary(plan)}
        if pull_request:
            return done | propose(api, publication, plan)
        if plan.head is None:
            sdk = {"space_sdk": "gradio"} if kind == "space" else {}
            api.create_repo(repo_id, repo_type=kind, private=not public, exist_ok=True, **sdk)
            plan.head = api.repo_info(repo_id, repo_type=kind).sha
        commit = plan.mark or plan.head
        if not plan.empty:
            branch = publication.tag if kind == "kernel" and plan.mark else "main"
            commit = send(api, publication, plan, revision=branch).oid
        if plan.mark is None and kind == "kernel":
            api.create_branch(repo_id, repo_type=kind, branch=publication.tag, revision=commit)
        elif plan.mark is None:
            api.create_tag(repo_id, repo_type=kind, tag=publication.tag, revision=commit)
        done["verified"] = verify(publication, prune=prune)
        # Opened last: what was private stays so if anything before fails.
        if public and plan.private:
            api.update_repo_settings(repo_id, repo_type=kind, private=False)
        if collection is not None:
            done["collection"] = link(api, publication, collection, public=public)
    return done | {"commit": commit, "sent": not plan.empty}


def summary(plan: Plan) -> dict[str, Any]:
    """A plan as JSON."""
    return {name: getattr(plan, name) for name in ("added", "changed", "removed", "foreign", "kept", "size")}


def send(api: HfApi, publication: Publication, plan: Plan, *, revision: str, pull_request: bool = False):
    """One commit with what differs; stale parents are refused by the Hub."""
    adds = [CommitOperationAdd(name, publication.folder / name) for name in [*plan.added, *plan.changed]]
    sha, dirty = git_state(CHECKOUT)
    made_from = f" (from {sha[:8]}{' with changes' if dirty else ''})" if sha else ""
    return api.create_commit(
        publication.repo_id,
        [*adds, *(CommitOperationDelete(name) for name in plan.removed)],
        repo_type=publication.kind,
        revision=revision,
        parent_commit=plan.head,
        create_pr=pull_request,
        commit_message=f"{publication.tag}{made_from}",
    )


def propose(api: HfApi, publication: Publication, plan: Plan) -> dict[str, Any]:
    """Opens a pull request, unless there is nothing to change or an open one holds these files already."""
    if plan.head is None:
        raise ValueError(
            f"A pull request needs a repository, {publication.repo_id} does not exist; push without --pr first."
        )
    if plan.empty:
        return {"sent": False, "commit": plan.mark or plan.head}
    refs = api.list_repo_refs(publication.repo_id, repo_type=publication.kind, include_pull_requests=True)
    for pull in refs.pull_requests or []:
        remote = remote_files(api, publication, pull.ref)
        if all(name in remote and is_same(publication.folder / name, remote[name]) for name in publication.names):
            return {"sent": False, "commit": pull.target_commit, "pull_request": pull.ref}
    commit = send(api, publication, plan, revision="main", pull_request=True)
    return {"sent": True, "commit": commit.oid, "pull_request": commit.pr_revision, "pull_request_url": commit.pr_url}


def link(api: HfApi, publication: Publication, title: str, *, public: bool) -> str:
    """Puts the repository into a collection of its owner, which is made if need be; returns the collection's slug."""
    if publication.kind == "kernel":
        raise ValueError(
            "The Hub's collections hold models, data sets and Spaces; push the kernel without --collection."
        )
    owner = publication.repo_id.split("/")[0]
    made = api.create_collection(title, namespace=owner, private=not public, exists_ok=True)
    if not any((item.item_id, item.item_type) == (publication.repo_id, publication.kind) for item in made.items):
        api.add_collection_item(made.slug, publication.repo_id, publication.kind, exists_ok=True)
    return made.slug


def verify(publication: Publication, *, prune: bool = False) -> bool:
    """Compares the checksums of the tag on the Hub with the staged folder.

    Raises:
        VerificationError: if a file is missing there, differs, or (with `prune`) is only there.
    """
    with hub_errors(publication.repo_id):
        try:
            found = HfApi().verify_repo_checksums(
                publication.repo_id,
                repo_type=publication.kind,
                revision=publication.tag,
                local_dir=publication.folder,
            )
        except RevisionNotFoundError:
            raise VerificationError(f"{publication.repo_id} has no {publication.tag}.") from None
    wrong = [f"{each['path']} differs" for each in found.mismatches]
    wrong += [f"{path} is missing there" for path in found.extra_paths]
    if prune:
        wrong += [f"{path} is only there" for path in sorted(set(found.missing_paths) - HUBS_OWN)]
    if wrong:
        raise VerificationError(
            f"{publication.repo_id} at {publication.tag} is not what it should be: {'; '.join(wrong)}."
        )
    return True


def verify_against_git(name: str, *, repo_id: str, tag: str, git_tag: str, output: Path) -> bool:
    """Stages a git tag of this checkout with that tag's own code, and compares every file with the Hub.

    Raises:
        ValueError: if there is no such tag, or the code of that time cannot stage it.
        VerificationError: if the repository holds anything else.
    """
    with tempfile.TemporaryDirectory() as scratch:
        export_git_tag(git_tag, Path(scratch, "checkout"))
        words = ["push", name, "--repo-id", repo_id, "--tag", tag, "--output", output.absolute()]
        _run_python("-m", "modeling_domino.cli", *words, folder=Path(scratch, "checkout"))
        kind = kind_of(publishable_folder(name))
    return verify(Publication(output, kind, repo_id, tag, output), prune=True)


def export_git_tag(tag: str, folder: Path) -> None:
    """Writes the files of a git tag of this checkout into a new folder."""
    known = subprocess.run(
        ["git", "-C", CHECKOUT, "rev-parse", "--verify", "--quiet", f"refs/tags/{tag}"], capture_output=True
    )
    if known.returncode:
        raise ValueError(f"This checkout has no git tag {tag}; create it, or name another with --git-tag.")
    with tempfile.TemporaryFile() as archive:
        subprocess.run(["git", "-C", CHECKOUT, "archive", tag], stdout=archive, check=True)
        archive.seek(0)
        with tarfile.open(fileobj=archive) as files:
            files.extractall(folder, filter="data")
