"""The Hub of the tests answers huggingface_hub's own client as the real one does, as far as publishing needs it."""

from __future__ import annotations

import pytest
from hub_server import TOKEN, needs_kernel_repositories, running_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError


WEIGHTS = bytes(range(256)) * 8


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)
    with running_hub() as hub:
        yield hub


@pytest.fixture
def api(hub):
    return HfApi(endpoint=hub.url, token=TOKEN)


def add(path: str, content: bytes) -> CommitOperationAdd:
    return CommitOperationAdd(path, content)


@pytest.mark.parametrize(
    "kind", ["model", "dataset", "space", pytest.param("kernel", marks=needs_kernel_repositories)]
)
def test_a_commit_holds_small_and_large_files(kind, hub, api, tmp_path):
    sdk = {"space_sdk": "gradio"} if kind == "space" else {}
    api.create_repo("acme/tiny", repo_type=kind, private=True, **sdk)
    files = {"README.md": b"# Card\n", "model.safetensors": WEIGHTS, "sub/more.json": b"{}"}
    info = api.create_commit(
        "acme/tiny", [add(*item) for item in files.items()], commit_message="first", repo_type=kind
    )
    assert hub.files("acme/tiny", repo_type=kind) == files
    api.create_tag("acme/tiny", tag="v1", repo_type=kind)
    refs = api.list_repo_refs("acme/tiny", repo_type=kind)
    assert [(tag.name, tag.target_commit) for tag in refs.tags] == [("v1", info.oid)]
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    checked = api.verify_repo_checksums("acme/tiny", repo_type=kind, revision="v1", local_dir=tmp_path)
    assert (checked.checked_count, checked.mismatches, checked.extra_paths) == (3, [], [])
    loaded = api.snapshot_download("acme/tiny", repo_type=kind, revision="v1", cache_dir=tmp_path / "cache")
    assert (tmp_path / "cache" / loaded / "model.safetensors").read_bytes() == WEIGHTS


def test_what_is_there_already_is_not_sent_again(hub, api):
    api.create_repo("acme/tiny")
    for _ in range(2):
        api.create_commit("acme/tiny", [add("model.safetensors", WEIGHTS), add("a", b"a")], commit_message="same")
    assert hub.writes == ["create model acme/tiny", "commit model acme/tiny"]


def test_a_stale_parent_is_refused(hub, api):
    api.create_repo("acme/tiny")
    parent = api.model_info("acme/tiny").sha
    api.create_commit("acme/tiny", [add("a", b"a")], commit_message="one", parent_commit=parent)
    with pytest.raises(HfHubHTTPError) as refused:
        api.create_commit("acme/tiny", [add("b", b"b")], commit_message="two", parent_commit=parent)
    assert refused.value.response.status_code == 412
    assert set(hub.files("acme/tiny")) == {"a"}


def test_a_pull_request_leaves_main_alone(hub, api):
    api.create_repo("acme/tiny")
    info = api.create_commit("acme/tiny", [add("a", b"a")], commit_message="one", create_pr=True)
    assert info.pr_num == 1
    assert hub.files("acme/tiny") == {}
    assert hub.files("acme/tiny", "refs/pr/1") == {"a": b"a"}


@needs_kernel_repositories
def test_files_are_deleted_and_branches_made(hub, api):
    hub.seed("acme/tiny", {"a": b"a", "b": b"b"}, repo_type="kernel")
    api.create_branch("acme/tiny", branch="v1", repo_type="kernel")
    operations = [CommitOperationDelete("a")]
    api.create_commit("acme/tiny", operations, commit_message="drop", repo_type="kernel", revision="v1")
    assert set(hub.files("acme/tiny", repo_type="kernel")) == {"a", "b"}
    assert set(hub.files("acme/tiny", "v1", repo_type="kernel")) == {"b"}


def test_strangers_see_nothing_private_and_write_nothing(hub, api):
    hub.seed("acme/tiny", {"a": b"a"}, private=True)
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.url, token=False).model_info("acme/tiny")
    hub.seed("zeta/tiny", {"a": b"a"})
    for call in (
        lambda: api.create_repo("zeta/other"),
        lambda: api.create_commit("zeta/tiny", [add("b", b"b")], commit_message="mine now"),
    ):
        with pytest.raises(HfHubHTTPError) as refused:
            call()
        assert refused.value.response.status_code == 403
    assert hub.writes == []


def test_one_request_can_be_broken(hub, api):
    hub.seed("acme/tiny", {"a": b"a"})
    hub.on("GET /api/models/acme/tiny$", 500)
    with pytest.raises(HfHubHTTPError):
        api.model_info("acme/tiny")
    assert api.model_info("acme/tiny").sha == hub.repos["model", "acme/tiny"].branches["main"]


def test_a_collection_takes_each_item_once(hub, api):
    for _ in range(2):
        collection = api.create_collection("Domino drafters", namespace="acme", exists_ok=True)
        api.add_collection_item(collection.slug, "acme/tiny", "model", exists_ok=True)
    (made,) = hub.collections.values()
    assert [item["id"] for item in made["items"]] == ["acme/tiny"]
