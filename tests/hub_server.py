"""A Hub in this process, for tests: repositories of all types with commits, tags, branches, pull requests and collections.

    with running_hub() as hub:
        hub.seed("acme/tiny-domino", folder, tag="v1")
        run_fresh(script, home, **hub.environment())

`hub.environment()` is what a process needs that is to talk to it, set before huggingface_hub is imported. `hub.on(...)` breaks
one request or runs something before it; `hub.writes` lists what changed; `hub.files(...)` is what a revision holds. There is one
user, `alice`, who may write to her own namespace and to the organisation `acme`. Not modelled: Xet, Link headers, quotas.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub
import pytest


needs_kernel_repositories = pytest.mark.skipif(
    int(huggingface_hub.__version__.split(".")[0]) < 2,
    reason="huggingface_hub before 2 knows no repositories of kernels",
)
TOKEN = "token-of-alice"
USER = "alice"
ORGANISATIONS = ("acme",)
GIT_ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n*.gz filter=lfs diff=lfs merge=lfs -text\n"
LFS_SUFFIXES = (".safetensors", ".gz")
NOW = "2026-01-01T00:00:00.000Z"


class Refusal(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, code: str = ""):
        self.status, self.message, self.code = status, message, code


@dataclass
class File:
    """One version of a file, with the two ids that the Hub knows it by."""

    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        """The git id: of the content, or of the pointer that stands for it."""
        stored = self.content
        if self.lfs:
            stored = (
                f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(stored)}\n".encode()
            )
        return hashlib.sha1(f"blob {len(stored)}\0".encode() + stored).hexdigest()

    def describe(self, path: str) -> dict[str, Any]:
        described = {"type": "file", "path": path, "size": len(self.content), "oid": self.oid}
        if self.lfs:
            described["lfs"] = {"oid": self.sha256, "size": len(self.content), "pointerSize": 134}
        return described


@dataclass
class Repo:
    """One repository; `commits` holds whole trees."""

    private: bool
    sdk: str | None = None
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    pulls: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, File], parent: str | None) -> str:
        listed = json.dumps([parent, len(self.commits), *((path, file.oid) for path, file in sorted(files.items()))])
        oid = hashlib.sha1(listed.encode()).hexdigest()
        self.commits[oid] = files
        return oid

    def resolve(self, revision: str) -> str:
        for refs in (self.branches, self.tags, self.pulls):
            if revision in refs:
                return refs[revision]
        if revision in self.commits:
            return revision
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")


class Hub:
    """The state of the server, and what a test does with it.

    Attributes:
        repos (`dict[tuple[str, str], Repo]`): by type ("model", "dataset", "space", "kernel") and id.
        collections (`dict[str, dict]`): by slug.
        writes (`list[str]`): every change so far, as "commit model acme/tiny".
        requests (`list[str]`): every request so far, as "GET /api/models/acme/tiny".
    """

    def __init__(self) -> None:
        self.url = ""
        self.repos: dict[tuple[str, str], Repo] = {}
        self.collections: dict[str, dict[str, Any]] = {}
        self.objects: dict[str, bytes] = {}
        self.writes: list[str] = []
        self.requests: list[str] = []
        self._rules: list[tuple[re.Pattern, int | Callable[[], None]]] = []
        self.lock = threading.RLock()

    def environment(self, token: str | None = TOKEN) -> dict[str, str]:
        """Environment of a process that is to use this Hub, with or without a token."""
        settings = {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        return {**settings, "HF_TOKEN": token or "", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "" if token else "1"}

    def on(self, pattern: str, action: int | Callable[[], None]) -> None:
        """The next request that matches `pattern` ("POST .*/commit/") gets this status, or runs `action` first."""
        self._rules.append((re.compile(pattern), action))

    def seed(
        self,
        repo_id: str,
        content: Path | dict[str, bytes],
        *,
        repo_type: str = "model",
        tag: str | None = None,
        private: bool = False,
        revision: str = "main",
        commit: str | None = None,
    ) -> str:
        """Replaces the files of a branch, creating the repository as needed; returns the commit, which `commit` may name."""
        if isinstance(content, Path):
            paths = [path for path in content.rglob("*") if path.is_file()]
            content = {path.relative_to(content).as_posix(): path.read_bytes() for path in paths}
        repo = self.repos.setdefault((repo_type, repo_id), Repo(private))
        files = {".gitattributes": File(GIT_ATTRIBUTES, False)}
        files |= {path: File(each, path.endswith(LFS_SUFFIXES)) for path, each in content.items()}
        oid = repo.commit(files, repo.branches.get(revision))
        if commit is not None:
            repo.commits[commit] = repo.commits.pop(oid)
            oid = commit
        repo.branches[revision] = oid
        if tag is not None:
            repo.tags[tag] = oid
        return oid

    def files(self, repo_id: str, revision: str = "main", *, repo_type: str = "model") -> dict[str, bytes]:
        """What a revision holds, without `.gitattributes`."""
        repo = self.repos[repo_type, repo_id]
        files = repo.commits[repo.resolve(revision)]
        return {path: file.content for path, file in sorted(files.items()) if path != ".gitattributes"}

    # ---- answers

    def answer(self, method: str, path: str, query: dict[str, str], body: bytes, token: str | None) -> Any:
        """The JSON answer to an API request."""
        words = path.strip("/").split("/")
        if words[0] == "lfs":
            return self._lfs_object(method, words[1], body)
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._lfs_batch(json.loads(body), token)
        if words[0] != "api" or len(words) < 2:
            raise Refusal(404, f"No such route: {path}")
        data = json.loads(body) if body.startswith(b"{") and words[-2:-1] != ["commit"] else {}
        if words[1:] == ["whoami-v2"]:
            self._require_user(token)
            return {"type": "user", "name": USER, "orgs": [{"name": name} for name in ORGANISATIONS]}
        if words[1:] == ["validate-yaml"]:
            return {"errors": [], "warnings": []}
        if words[1] == "organizations":
            return {"name": words[2], "fullname": words[2], "trustedKernelPublisher": False}
        if words[1] == "repos":
            return self._manage(words[2], data, token)
        if words[1] == "collections":
            return self._collections(method, words[2:], query, data, token)
        if words[1] not in ("models", "datasets", "spaces", "kernels") or len(words) < 4:
            raise Refusal(404, f"No such route: {path}")
        return self._repo(method, words[1][:-1], f"{words[2]}/{words[3]}", words[4:], query, body, data, token)

    def _repo(self, method, kind, repo_id, rest, query, body, data, token) -> Any:
        verb, revision = rest[0] if rest else "revision", unquote(rest[1]) if len(rest) > 1 else "main"
        repo = self._find(kind, repo_id, token)
        if method != "GET" and verb != "paths-info" and not (verb in ("preupload", "commit") and "create_pr" in query):
            self._require_owner(repo_id.split("/")[0], token)
        if verb == "revision":
            return self._info(kind, repo_id, repo, revision)
        if verb == "refs":
            return {
                "branches": _refs(repo.branches, "refs/heads/"),
                "tags": _refs(repo.tags, "refs/tags/"),
                "pullRequests": _refs(repo.pulls, ""),
                "converts": [],
            }
        if verb == "tree":
            return _listing(
                repo.commits[repo.resolve(revision)], unquote("/".join(rest[2:])), query.get("recursive", "")
            )
        if verb == "paths-info":
            files = repo.commits[repo.resolve(revision)]
            wanted = parse_qs(body.decode()).get("paths", [])
            return [files[path].describe(path) for path in wanted if path in files]
        if verb == "preupload":
            files = repo.commits[repo.resolve(revision)]
            return {"files": [self._upload_mode(each["path"], files) for each in data["files"]]}
        if verb == "commit":
            self._require_user(token)
            return self._commit(kind, repo_id, repo, revision, body, "create_pr" in query)
        if verb == "branch":
            if revision in repo.branches:
                raise Refusal(409, f"Reference already exists: {revision}")
            repo.branches[revision] = repo.resolve(data.get("startingPoint", "main"))
        elif verb == "tag" and method == "DELETE":
            del repo.tags[revision]
        elif verb == "tag":
            if data["tag"] in repo.tags:
                raise Refusal(409, f"Tag reference exists already: {data['tag']}")
            repo.tags[data["tag"]] = repo.resolve(revision)
        elif verb == "settings":
            repo.private = data.get("visibility") == "private"
        else:
            raise Refusal(404, f"No such route: {method} {verb}")
        self.writes.append(f"{verb} {kind} {repo_id}")
        return {}

    def _info(self, kind: str, repo_id: str, repo: Repo, revision: str) -> dict[str, Any]:
        oid = repo.resolve(revision)
        siblings = []
        for path, file in sorted(repo.commits[oid].items()):
            described = file.describe(path)
            sibling = {"rfilename": path, "size": described["size"], "blobId": described["oid"]}
            if "lfs" in described:
                sibling["lfs"] = {"sha256": file.sha256, "size": len(file.content), "pointerSize": 134}
            siblings.append(sibling)
        author, tags = repo_id.split("/")[0], []
        about = {"id": repo_id, "author": author, "sha": oid, "private": repo.private, "tags": tags, "downloads": 0}
        return {**about, "likes": 0, "siblings": siblings, "lastModified": NOW, "sdk": repo.sdk}

    def _upload_mode(self, path: str, files: dict[str, File]) -> dict[str, Any]:
        known = files.get(path)
        mode = "lfs" if path.endswith(LFS_SUFFIXES) else "regular"
        oid = None if known is None else known.sha256 if known.lfs else known.oid
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def _commit(self, kind: str, repo_id: str, repo: Repo, revision: str, body: bytes, pull: bool) -> dict[str, Any]:
        lines = [json.loads(line) for line in body.splitlines()]
        header, *operations = lines
        parent = repo.resolve(revision)
        wanted = header["value"].get("parentCommit")
        if wanted not in (None, parent):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repo.commits[parent])
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), False)
            elif operation["key"] == "lfsFile":
                if value["oid"] not in self.objects:
                    raise Refusal(400, f"LFS object {value['oid']} was never uploaded")
                files[value["path"]] = File(self.objects[value["oid"]], True)
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise Refusal(400, f"Unknown operation {operation['key']}")
        oid = repo.commit(files, parent)
        prefix = "" if kind == "model" else f"{kind}s/"
        answer = {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{prefix}{repo_id}/commit/{oid}"}
        if pull:
            number = len(repo.pulls) + 1
            repo.pulls[f"refs/pr/{number}"] = oid
            answer["pullRequestUrl"] = f"{self.url}/{prefix}{repo_id}/discussions/{number}"
        else:
            repo.branches[revision] = oid
        self.writes.append(f"{'pull' if pull else 'commit'} {kind} {repo_id}")
        return answer

    def _manage(self, verb: str, data: dict[str, Any], token: str | None) -> Any:
        kind, owner = data.get("type") or "model", data.get("organization") or USER
        self._require_owner(owner, token)
        repo_id = f"{owner}/{data['name']}"
        url = f"{self.url}/{'' if kind == 'model' else f'{kind}s/'}{repo_id}"
        if verb == "delete":
            del self.repos[kind, repo_id]
        elif (kind, repo_id) in self.repos:
            raise Refusal(409, "You already created this repo")
        else:
            repo = Repo(data.get("visibility") == "private", data.get("sdk"))
            repo.branches["main"] = repo.commit({".gitattributes": File(GIT_ATTRIBUTES, False)}, None)
            self.repos[kind, repo_id] = repo
        self.writes.append(f"{verb} {kind} {repo_id}")
        return {"url": url, "name": repo_id, "id": repo_id}

    def _collections(self, method, words, query, data, token) -> Any:
        if method == "GET" and not words:
            return [each for each in self.collections.values() if each["owner"]["name"] == query.get("owner")]
        if method == "GET":
            return self._known_collection("/".join(words))
        self._require_user(token)
        if not words:
            self._require_owner(data["namespace"], token)
            slug = f"{data['namespace']}/{re.sub(r'[^a-z0-9]+', '-', data['title'].lower())}-0123456789abcdef01234567"
            if slug in self.collections:
                raise Refusal(409, json.dumps({"slug": slug}))
            owner = {"name": data["namespace"], "type": "org"}
            about = {"slug": slug, "title": data["title"], "owner": owner, "private": data["private"], "items": []}
            self.collections[slug] = {**about, "lastUpdated": NOW, "position": 0, "theme": "blue", "upvotes": 0}
            self.writes.append(f"create collection {slug}")
            return self.collections[slug]
        collection, item = self._known_collection("/".join(words[:2])), data["item"]
        if any((each["id"], each["type"]) == (item["id"], item["type"]) for each in collection["items"]):
            raise Refusal(409, "Item already in collection")
        count = len(collection["items"])
        collection["items"].append({"_id": f"{count:024x}", **item, "position": count, "note": None})
        self.writes.append(f"add {item['type']} {item['id']}")
        return collection

    def _known_collection(self, slug: str) -> dict[str, Any]:
        if slug not in self.collections:
            raise Refusal(404, "Collection not found")
        return self.collections[slug]

    def _lfs_batch(self, data: dict[str, Any], token: str | None) -> dict[str, Any]:
        self._require_user(token)
        objects = []
        for each in data["objects"]:
            known = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.objects:
                where = f"{self.url}/lfs/{each['oid']}"
                known["actions"] = {"upload": {"href": where}, "verify": {"href": where}}
            objects.append(known)
        return {"transfer": "basic", "objects": objects}

    def _lfs_object(self, method: str, oid: str, body: bytes) -> dict[str, Any]:
        if method == "PUT":
            self.objects[hashlib.sha256(body).hexdigest()] = body
        if oid not in self.objects:
            raise Refusal(400, "The content does not have this checksum")
        return {}

    def resolve(self, kind: str, repo_id: str, revision: str, path: str, token: str | None) -> tuple[str, File]:
        """Commit and file of a download."""
        repo = self._find(kind, repo_id, token)
        oid = repo.resolve(revision)
        if path not in repo.commits[oid]:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        return oid, repo.commits[oid][path]

    def _find(self, kind: str, repo_id: str, token: str | None) -> Repo:
        repo = self.repos.get((kind, repo_id))
        if repo is None or (repo.private and token != TOKEN):
            # As the Hub does: who is not logged in does not learn whether a repository exists.
            raise Refusal(404 if token == TOKEN else 401, "Repository not found", "RepoNotFound")
        return repo

    def _require_user(self, token: str | None) -> None:
        if token != TOKEN:
            raise Refusal(401, "Invalid user token." if token else "Invalid credentials in Authorization header")

    def _require_owner(self, owner: str, token: str | None) -> None:
        self._require_user(token)
        if owner != USER and owner not in ORGANISATIONS:
            raise Refusal(403, f"You don't have the rights to write under the namespace {owner}")

    def broken(self, request: str) -> int | None:
        """The status that a rule wants for this request; each rule acts once."""
        for rule in self._rules:
            pattern, action = rule
            if pattern.search(request):
                self._rules.remove(rule)
                if not callable(action):
                    return action
                action()
        return None


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Starts an empty Hub on a free port."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            url = urlsplit(self.path)
            body = self.read_body()
            scheme, _, token = self.headers.get("Authorization", "").partition(" ")
            with hub.lock:
                request = f"{self.command} {self.path}"
                hub.requests.append(request)
                try:
                    status = hub.broken(request)
                    if status is not None:
                        raise Refusal(status, "The server is out of order")
                    resolved = re.fullmatch(
                        r"/(?:(?P<kind>datasets|spaces|kernels)/)?(?P<id>[^/]+/[^/]+)/resolve/(?P<rest>.+)", url.path
                    )
                    if resolved:
                        revision, _, path = resolved["rest"].partition("/")
                        kind = (resolved["kind"] or "models")[:-1]
                        oid, file = hub.resolve(kind, resolved["id"], unquote(revision), unquote(path), token)
                        etag = file.sha256 if file.lfs else file.oid
                        self.reply(200, file.content, {"ETag": f'"{etag}"', "X-Repo-Commit": oid})
                        return
                    query = {name: values[0] for name, values in parse_qs(url.query).items()}
                    answer = hub.answer(self.command, url.path, query, body, token)
                    self.reply(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})
                except Refusal as refusal:
                    message = (
                        refusal.message if refusal.message.startswith("{") else json.dumps({"error": refusal.message})
                    )
                    headers = {"Content-Type": "application/json", "X-Error-Message": refusal.message}
                    if refusal.code:
                        headers["X-Error-Code"] = refusal.code
                    self.reply(refusal.status, message.encode(), headers)

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

        def read_body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                chunks = []
                while size := int(self.rfile.readline(), 16):
                    chunks.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(chunks)
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def reply(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *args) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _listing(files: dict[str, File], within: str, recursive: str) -> list[dict[str, Any]]:
    """Files and folders below the folder `within`; unless `recursive` its direct children alone."""
    start = f"{within}/" if within else ""
    paths = sorted(path for path in files if path.startswith(start))
    above = {"/".join(path.split("/")[:i]) for path in paths for i in range(1, path.count("/") + 1)}
    folders = [
        {"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()}
        for path in sorted(above)
        if path.startswith(start)
    ]
    entries = [*folders, *(files[path].describe(path) for path in paths)]
    deep = recursive.lower() in ("true", "1")
    return [entry for entry in entries if deep or "/" not in entry["path"][len(start) :]]


def _refs(refs: dict[str, str], prefix: str) -> list[dict[str, str]]:
    return [{"name": name, "ref": f"{prefix}{name}", "targetCommit": oid} for name, oid in sorted(refs.items())]
