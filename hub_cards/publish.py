"""Publishing: a staged folder compared with its repository on the Hub, and what differs sent in one commit.

The plan that is shown is the one that is carried out: what changed on the Hub in between is not overwritten. Without a network
everything counts as new. A second push of the same files sends nothing, and finishes what a first one did not come to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile

from hub_cards.hub_errors import hub_errors
from hub_cards.staging import Publication, StagedFile
from modeling_domino.provenance import CHECKOUT, git_state


# What the Hub puts into a new repository itself.
HUBS_OWN = {".gitattributes"}
# Larger files are sent by their checksum, which the Hub verifies.
MOST_BYTES_IN_COMMIT = 10_000_000
SUMMARISED = ("added", "changed", "removed", "foreign", "kept", "size", "refused")


class VerificationError(ValueError):
    """A repository does not hold what it should."""


@dataclass
class Plan:
    """What a push would change.

    Args:
        head: the commit that was compared with; `None` where there is no repository yet.
        mark: the commit that the tag (of kernels: the version's branch) points to, if it exists.
        refused: why it cannot be carried out, if so.
        added, changed, kept, removed, foreign: names of files; foreign ones are only on the Hub and stay there.
        size: bytes of what would be sent.
        prune: whether nothing else may be there in the end.
    """

    head: str | None = None
    mark: str | None = None
    private: bool | None = None
    refused: str | None = None
    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    size: int = 0
    prune: bool = False

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
        if self.refused:
            yield f"! {self.refused}"

    def summary(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {name: getattr(self, name) for name in SUMMARISED}


def require_options(kind: str, *, public: bool, pull_request: bool, collection: str | None) -> None:
    """Refuses options that could not be followed, before any work.

    Raises:
        ValueError: with the option to leave out.
    """
    if pull_request and (public or collection is not None):
        option = "--public" if public else "--collection"
        raise ValueError(f"A pull request proposes files and changes nothing else; leave out {option}, or --pr.")
    if kind == "kernel" and collection is not None:
        raise ValueError(
            "The Hub's collections hold models, data sets and Spaces; push the kernel without --collection."
        )


def make_plan(publication: Publication, *, prune: bool = False, pull_request: bool = False) -> Plan:
    """Compares the staged folder with the tag if that exists, else with the branch that would be written.

    Raises:
        ValueError: if the Hub cannot be asked.
    """
    api, repo_id, kind, tag = HfApi(), publication.repo_id, publication.kind, publication.tag
    plan, remote = Plan(prune=prune), {}
    branches, tags = {}, {}
    with hub_errors(repo_id):
        try:
            info = api.repo_info(repo_id, repo_type=kind)
        except RepositoryNotFoundError:
            pass
        else:
            refs = api.list_repo_refs(repo_id, repo_type=kind)
            branches, tags = ({ref.name: ref.target_commit for ref in each} for each in (refs.branches, refs.tags))
            plan.head, plan.private = info.sha, info.private
            plan.mark = (branches if kind == "kernel" else tags).get(tag)
            if kind == "kernel" and plan.mark:
                plan.head = plan.mark
            remote = remote_files(api, publication, plan.mark or plan.head)
    for name, file in publication.files.items():
        if name in remote and is_same(file, remote[name]):
            plan.kept.append(name)
            continue
        (plan.changed if name in remote else plan.added).append(name)
        plan.size += file.size
    others = sorted(remote.keys() - publication.files.keys() - HUBS_OWN)
    plan.removed, plan.foreign = (others, []) if prune else ([], others)
    if kind != "kernel" and plan.mark and not plan.empty:
        plan.refused = f"The tag {tag} of {repo_id} is taken by other files; choose another --tag."
    elif tag in (tags if kind == "kernel" else branches):
        there = "tag" if kind == "kernel" else "branch"
        plan.refused = f"{repo_id} has a {there} named {tag}, so that name is ambiguous; choose another --tag."
    elif pull_request and plan.head is None:
        plan.refused = f"A pull request needs a repository, {repo_id} does not exist; push without --pr first."
    elif pull_request and kind == "kernel" and not plan.mark:
        plan.refused = (
            f"A pull request cannot make a version, {repo_id} has no branch {tag}; ask its owner to push it first."
        )
    return plan


def offline_plan(publication: Publication) -> Plan:
    """The plan where the Hub cannot be asked: all is new."""
    sizes = [file.size for file in publication.files.values()]
    return Plan(added=list(publication.files), size=sum(sizes))


def remote_files(api: HfApi, publication: Publication, revision: str) -> dict[str, RepoFile]:
    """The files of a revision, by name."""
    tree = api.list_repo_tree(publication.repo_id, repo_type=publication.kind, revision=revision, recursive=True)
    return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}


def is_same(file: StagedFile, remote: RepoFile) -> bool:
    """Whether a staged file has the content of one on the Hub."""
    return file.git == remote.blob_id if remote.lfs is None else file.sha256 == remote.lfs.sha256


def push(
    publication: Publication,
    plan: Plan,
    *,
    public: bool = False,
    pull_request: bool = False,
    collection: str | None = None,
) -> dict[str, Any]:
    """Carries out a plan: one commit on the commit that it was compared with, a tag, and a comparison of what arrived.

    Returns:
        What happened, JSON-ready.

    Raises:
        ValueError: if the plan cannot be carried out or the Hub refuses, with how far it came.
        VerificationError: if what arrived is not what was sent.
    """
    api, repo_id, kind, tag = HfApi(), publication.repo_id, publication.kind, publication.tag
    require_options(kind, public=public, pull_request=pull_request, collection=collection)
    if plan.refused:
        raise ValueError(plan.refused)
    done = {"repo_id": repo_id, "type": kind, "tag": tag, "url": publication.url, **plan.summary()}
    with hub_errors(repo_id):
        api.whoami()
        adds = additions(publication, plan)
        if pull_request:
            return done | propose(api, publication, plan, adds)
        if plan.head is None:
            sdk = {"space_sdk": "gradio"} if kind == "space" else {}
            # Refused by the Hub if somebody was faster.
            api.create_repo(repo_id, repo_type=kind, private=True, **sdk)
            plan.head, plan.private = api.repo_info(repo_id, repo_type=kind).sha, True
        commit = plan.mark or plan.head
        if not plan.empty:
            commit = send(api, publication, plan, adds).oid
    again = "what is missing follows when the command is run again"
    if plan.mark is None:
        with hub_errors(repo_id, f"The files are in {repo_id}, {tag} is not made ({again})"):
            if kind == "kernel":
                api.create_branch(repo_id, repo_type=kind, branch=tag, revision=commit)
            else:
                api.create_tag(repo_id, repo_type=kind, tag=tag, revision=commit)
    verify(publication, prune=plan.prune)
    # Opened last: what was private stays so if anything before fails.
    if public and plan.private:
        with hub_errors(repo_id, f"{repo_id} is there at {tag}, still private ({again})"):
            api.update_repo_settings(repo_id, repo_type=kind, private=False)
    if collection is not None:
        owner = repo_id.split("/")[0]
        state = f"{repo_id} is published at {tag}, but not in the collection {collection} ({again})"
        with hub_errors(f"a collection of {owner}", state):
            done["collection"] = link(api, publication, collection, public=public)
    return done | {"commit": commit, "sent": not plan.empty, "verified": True}


def additions(publication: Publication, plan: Plan) -> list[CommitOperationAdd]:
    """What a commit adds: the bytes that were checked, small files as bytes that nobody can change any more.

    Raises:
        ValueError: if a file is not what it was when it was checked.
    """
    adds = []
    for name in [*plan.added, *plan.changed]:
        path, checked = publication.folder / name, publication.files[name]
        add = CommitOperationAdd(name, path.read_bytes() if checked.size <= MOST_BYTES_IN_COMMIT else path)
        if add.upload_info.sha256.hex() != checked.sha256:
            raise ValueError(f"What is sent is what was checked, but {path} changed since; run the command again.")
        adds.append(add)
    return adds


def send(
    api: HfApi, publication: Publication, plan: Plan, adds: list[CommitOperationAdd], *, pull_request: bool = False
) -> CommitInfo:
    """One commit with what differs; stale parents are refused by the Hub."""
    sha, dirty = git_state(CHECKOUT)
    made_from = f" (from {sha[:8]}{' with changes' if dirty else ''})" if sha else ""
    return api.create_commit(
        publication.repo_id,
        [*adds, *(CommitOperationDelete(name) for name in plan.removed)],
        repo_type=publication.kind,
        revision=publication.tag if publication.kind == "kernel" and plan.mark else "main",
        parent_commit=plan.head,
        create_pr=pull_request,
        commit_message=f"{publication.tag}{made_from}",
    )


def propose(api: HfApi, publication: Publication, plan: Plan, adds: list[CommitOperationAdd]) -> dict[str, Any]:
    """Opens a pull request, unless there is nothing to change or an open one holds these files already."""
    if plan.empty:
        return {"sent": False, "commit": plan.mark or plan.head}
    refs = api.list_repo_refs(publication.repo_id, repo_type=publication.kind, include_pull_requests=True)
    for pull in refs.pull_requests or []:
        remote = remote_files(api, publication, pull.ref)
        if all(name in remote and is_same(file, remote[name]) for name, file in publication.files.items()):
            return {"sent": False, "commit": pull.target_commit, "pull_request": pull.ref}
    commit = send(api, publication, plan, adds, pull_request=True)
    return {"sent": True, "commit": commit.oid, "pull_request": commit.pr_revision, "pull_request_url": commit.pr_url}


def link(api: HfApi, publication: Publication, title: str, *, public: bool) -> str:
    """Puts the repository into a collection of its owner, which is made if need be; returns the collection's slug."""
    owner = publication.repo_id.split("/")[0]
    made = api.create_collection(title, namespace=owner, private=not public, exists_ok=True)
    if not any((item.item_id, item.item_type) == (publication.repo_id, publication.kind) for item in made.items):
        api.add_collection_item(made.slug, publication.repo_id, publication.kind, exists_ok=True)
    return made.slug


def verify(publication: Publication, *, prune: bool = False) -> None:
    """Compares the tag on the Hub with the files that were checked.

    Raises:
        VerificationError: if a file is missing there, differs, or (with `prune`) is only there.
    """
    repo_id, tag = publication.repo_id, publication.tag
    with hub_errors(repo_id, f"{repo_id} at {tag} is not verified"):
        try:
            remote = remote_files(HfApi(), publication, tag)
        except RevisionNotFoundError:
            raise VerificationError(f"{repo_id} has no {tag}.") from None
    files = publication.files
    wrong = [f"{name} differs" for name in files if name in remote and not is_same(files[name], remote[name])]
    wrong += [f"{name} is missing there" for name in files if name not in remote]
    if prune:
        wrong += [f"{name} is only there" for name in sorted(remote.keys() - files.keys() - HUBS_OWN)]
    if wrong:
        raise VerificationError(f"{repo_id} at {tag} is not what it should be: {'; '.join(wrong)}.")
