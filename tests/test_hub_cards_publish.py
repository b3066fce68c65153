"""Publishing end to end on the Hub of the tests: what is sent, what is refused, and what users then load."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import prompt, tiny_drafter, tiny_target, tiny_tokenizer
from fresh_process import run_fresh
from hub_server import TOKEN, needs_kernel_repositories, running_hub
from huggingface_hub import constants
from typer.testing import CliRunner

from modeling_domino import DominoConfig, DominoDraftModel
from modeling_domino.benchmark.summary import METHODS, NOT_RUN
from modeling_domino.cli import app
from modeling_domino.cli.checkout import from_checkout
from modeling_domino.convert import convert
from modeling_domino.facts import drafter_facts
from modeling_domino.training.config import DominoTrainingArguments
from modeling_domino.training.trainer import DominoTrainer


ROOT = Path(__file__).parent.parent
REPO, TARGET = "acme/tiny-domino", "acme/tiny-target"
lint = from_checkout("hub_cards.lint", "push")
publish = from_checkout("hub_cards.publish", "push")
staging = from_checkout("hub_cards.staging", "push")
PROVENANCE = {
    "dtype": "float32",
    "command": "cli.py bench --out runs/tiny",
    "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
    "hardware": {"cpu": "a processor", "threads": 1, "device": "cpu"},
}
MODELS = {
    "drafter": "tiny",
    "target": TARGET,
    "dtype": "float32",
    "block_size": 4,
    "settings": {"max_new_tokens": 16, "batch_size": 1},
}


def cell(**values) -> dict:
    common = {"tau_ci": [1.1, 2.2], "tau_cap": 5, "speedup_ci": [0.8, 1.3], "samples": 6, "prompts": 6}
    return {**common, "tokens_per_second": 12.5, **values}


def write_drafter(folder: Path) -> Path:
    """A folder as those in hub_cards/: a tiny drafter with results, training record and facts."""
    tiny_drafter(tiny_target(), target_model=TARGET).save_pretrained(folder)
    for path in folder.glob("*.py"):
        path.unlink()
    methods = {"plain": cell(tau=1.0, speedup=1.0), "chain": cell(tau=1.75, speedup=1.06)}
    cells = {name: methods.get(name, NOT_RUN) for name in METHODS}
    summary = {
        "provenance": {**PROVENANCE, "models": MODELS},
        "results": {name: {"gsm8k": value, "average": value} for name, value in cells.items()},
        "temperature": 0.0,
        "results_at": {},
        "plain_is": {"0": "plain-loop"},
        "tokens": {"compared": 321, "differing": 0, "texts": 12, "texts_differing": 0},
    }
    (folder / "results").mkdir()
    (folder / "results" / "dev.json").write_text(json.dumps(summary))
    record = {"provenance": PROVENANCE, "processes": 1, "seconds": 77.0, "seed": 3, "steps": 40}
    (folder / "training.json").write_text(json.dumps(record))
    facts = {"license": "apache-2.0", "language": ["en"], "prompt_sources": ["gsm8k-train"]}
    (folder / "card.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return write_drafter(tmp_path_factory.mktemp("source") / "tiny-domino")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that this process talks to."""
    with running_hub() as hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@dataclass
class Done:
    """What one command came to."""

    returncode: int
    stdout: str
    stderr: str


def run(*words: str) -> Done:
    result = CliRunner().invoke(app, list(words))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def push(drafter, tmp_path):
    def push(*words: str, source: Path = drafter, repo_id: str = REPO) -> Done:
        return run(
            "push",
            str(source),
            "--repo-id",
            repo_id,
            "--tag",
            "v1",
            "--json",
            *words,
            "--output",
            str(tmp_path / "out"),
        )

    return push


def report_of(done: Done) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def error_of(done: Done, code: int = 2) -> str:
    assert done.returncode == code, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1 and "Traceback" not in done.stderr, done.stderr
    return errors[0]


# ---- in processes of their own: a checkout, then a user without it


DRIVER = """
import json, sys, urllib.error, urllib.request
from typer.testing import CliRunner
from modeling_domino.cli import app
done = []
for words in json.loads(sys.argv[1]):
    if words[0] == "visit":
        try:
            urllib.request.urlopen(words[1])
        except urllib.error.HTTPError:
            continue
    result = CliRunner().invoke(app, words)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    done.append([result.exit_code, result.stdout, result.stderr])
print(json.dumps(done))
"""


def make_checkout(folder: Path, drafter: Path) -> Path:
    """A git checkout of this project with one tiny drafter in hub_cards/, tagged v1."""
    shutil.copytree(ROOT / "modeling_domino", folder / "modeling_domino", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "hub_cards" / "templates", folder / "hub_cards" / "templates")
    for path in (ROOT / "hub_cards").iterdir():
        if path.is_file():
            shutil.copy(path, folder / "hub_cards")
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(drafter, folder / "hub_cards" / drafter.name)
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]
    for words in (["init"], ["add", "."], [*identity, "commit", "--message", "state"], ["tag", "v1"]):
        git = ["git", "-C", folder, "-c", "core.hooksPath="]
        subprocess.run([*git, *words], check=True, capture_output=True)
    return folder


def test_a_push_is_one_commit_a_second_one_sends_nothing_and_both_are_proven(drafter, tmp_path):
    checkout = make_checkout(tmp_path / "checkout", drafter)
    words = ["push", "tiny-domino", "--repo-id", REPO, "--tag", "v1", "--json"]
    execute = [*words, "--execute", "--collection", "Domino drafters"]
    with running_hub() as hub:
        # Between the commands somebody moves the tag to other files.
        moved = {"config.json": b"{}", "more.txt": b""}
        hub.on("GET /moved", lambda: hub.seed(REPO, {**hub.files(REPO), **moved}, tag="v1", private=True))
        commands = [words, execute, execute, [*words, "--verify"], ["visit", f"{hub.url}/moved"]]
        commands += [[*words, "--verify"], [*words, "--verify", "--git-tag", "v9"], [*words, "--execute"]]
        environment = {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", DRIVER, json.dumps(commands)],
            cwd=checkout,
            env={**os.environ, **hub.environment(), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    dry, first, second, verified, wrong, unknown, taken = (
        Done(*each) for each in json.loads(done.stdout.splitlines()[-1])
    )
    assert report_of(dry)["sent"] is False
    # Apart from a repository of the same name in another organisation.
    assert [path.name for path in (checkout / "dist").glob("[!.]*")] == ["acme--tiny-domino"]
    assert "Dry run: nothing was sent" in dry.stdout and "+ model.safetensors" in dry.stdout
    sent, again = report_of(first), report_of(second)
    assert hub.writes == [
        f"create model {REPO}",
        f"commit model {REPO}",
        f"tag model {REPO}",
        f"create collection {sent['collection']}",
        f"add model {REPO}",
    ]
    assert sent["verified"] is True and sent["sent"] is True
    assert again["sent"] is False and again["commit"] == sent["commit"]
    assert report_of(verified) == {"repo_id": REPO, "tag": "v1", "git_tag": "v1", "verified": True}
    assert sorted(hub.files(REPO, sent["commit"])) == sent["added"]
    assert f'DRAFTER_ID = "{REPO}"' in hub.files(REPO)["custom_generate/stamp.py"].decode()
    assert hub.repos["model", REPO].private
    assert "config.json differs; more.txt is only there" in error_of(wrong, code=3)
    assert "no git tag v9" in error_of(unknown)
    assert "The tag v1 of acme/tiny-domino is taken by other files" in error_of(taken)


def write_answers(folder: Path) -> Path:
    """A folder as `domino regenerate` writes it."""
    folder.mkdir()
    rows = [{"id": f"gsm8k-train/{i}", "turns": ["a"], "response_ids": [1, 2, 3], "finish": "eos"} for i in range(5)]
    with gzip.open(folder / "answers-00000.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    settings = {"target": "default", "max_new_tokens": 200, "temperature": 0.0}
    provenance = {**PROVENANCE, "command": "__main__.py regenerate"}
    (folder / "regenerate.json").write_text(json.dumps({"settings": settings, "provenance": provenance}))
    return folder


def test_users_load_what_was_published_and_its_cards_snippets_run(hub, push, tmp_path):
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    hub.seed(TARGET, tmp_path / "target")
    report_of(push("--execute", "--public"))
    answers = push("--execute", "--public", source=write_answers(tmp_path / "answers"), repo_id="acme/answers")
    assert report_of(answers)["type"] == "dataset"
    cards = [hub.files(REPO, "v1"), hub.files("acme/answers", "v1", repo_type="dataset")]
    drafter_card, dataset_card = (files["README.md"].decode() for files in cards)
    assert "5 answers of 15 tokens in one shard; 5 end by `eos`" in dataset_card and "license: mit" in dataset_card
    snippets = ["\n".join(lint.python_blocks(card)) for card in (drafter_card, dataset_card)]
    script = f"""
from transformers import AutoModel, AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained({TARGET!r}, dtype=torch.float32)
ids = torch.tensor([{prompt(5)[0].tolist()}])
options = dict(max_new_tokens=20, do_sample=False)
drafter = AutoModel.from_pretrained({REPO!r}, trust_remote_code=True, revision="v1", dtype=torch.float32)
RESULTS["assistant"] = target.generate(ids, assistant_model=drafter, **options)[0].tolist()
RESULTS["class"] = type(drafter).__module__.split(".")[0]
RESULTS["one line"] = target.generate(
    ids, custom_generate={REPO!r}, revision="v1", trust_remote_code=True, **options
)[0].tolist()
"""
    run_snippets = f"""
import contextlib, io
for name, code in zip(("drafter", "dataset"), {snippets!r}):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(code, {{}})
    RESULTS[name] = shown.getvalue()
"""
    plain = target.generate(prompt(5), max_new_tokens=20, do_sample=False)[0].tolist()
    home = tmp_path / "home"
    home.mkdir()
    online = run_fresh(script + run_snippets, home, **hub.environment(token=None))
    offline = run_fresh(script, home)
    for results in (online, offline):
        assert results["assistant"] == results["one line"] == plain and len(plain) == 25
        assert results["class"] == "transformers_modules"
    assert online["drafter"].splitlines()[-1].endswith("tokens per forward of the target")
    assert online["dataset"] == "5 ['a']\n"


# ---- in this process


def test_what_goes_wrong_on_the_hub_leaves_it_as_it_was(hub, push):
    hub.seed(REPO, {"README.md": b"old"})
    hub.on("PUT /lfs/", 400)
    assert "did not take a large file" in error_of(push("--execute"))
    hub.on("POST .*/commit/", 503)
    assert "the Hub answered with 503" in error_of(push("--execute"))
    assert hub.writes == [] and hub.files(REPO) == {"README.md": b"old"}
    hub.on("POST .*/commit/", lambda: hub.seed(REPO, {"README.md": b"newer"}))
    assert "changed while this ran" in error_of(push("--execute"))
    assert hub.writes == [] and hub.files(REPO) == {"README.md": b"newer"}
    # A commit that arrives, and a tag that does not: the next run only tags.
    hub.on("POST .*/tag/", 500)
    assert "The files are in acme/tiny-domino, v1 is not made" in error_of(push("--execute"))
    assert report_of(push("--execute"))["sent"] is False
    assert hub.writes == [f"commit model {REPO}", f"tag model {REPO}"]


def test_what_arrives_otherwise_than_sent_is_exit_code_3(hub, push, monkeypatch):
    verify = publish.verify

    def verify_later(publication, **options):
        # Between the tag and the comparison somebody replaces a file.
        hub.seed(REPO, {**hub.files(REPO), "config.json": b"{}"}, tag="v1")
        return verify(publication, **options)

    monkeypatch.setattr(publish, "verify", verify_later)
    assert "config.json differs" in error_of(push("--execute"), code=3)


def test_a_pull_request_is_opened_once(hub, push):
    theirs = "zeta/tiny-domino"
    hub.seed(theirs, {"README.md": b"theirs", "notes.txt": b"kept"})
    assert f"may not write to {theirs}" in error_of(push("--execute", repo_id=theirs))
    first, again = (report_of(push("--execute", "--pr", repo_id=theirs)) for _ in range(2))
    assert first["sent"] is True
    assert again["sent"] is False and again["pull_request"] == "refs/pr/1"
    assert hub.writes == [f"pull model {theirs}"]
    assert hub.files(theirs)["README.md"] == b"theirs"
    proposed = hub.files(theirs, "refs/pr/1")
    assert "model.safetensors" in proposed and proposed["notes.txt"] == b"kept"
    assert "does not exist" in error_of(push("--execute", "--pr", repo_id="zeta/nothing"))


def test_pruning_removes_what_is_only_on_the_hub(hub, push):
    hub.seed(REPO, {"dflash.py": b"an older format"})
    assert "? dflash.py" in push().stdout and "- dflash.py" in push("--prune").stdout
    assert report_of(push("--prune", "--execute"))["removed"] == ["dflash.py"]
    assert "dflash.py" not in hub.files(REPO, "v1")


def test_a_private_repository_is_opened_only_when_asked(hub, push):
    assert report_of(push("--execute"))["sent"] and hub.repos["model", REPO].private
    assert report_of(push("--execute", "--public"))["sent"] is False
    assert not hub.repos["model", REPO].private


def test_a_repository_stays_private_if_anything_before_its_opening_fails(hub, push, monkeypatch):
    assert report_of(push("--execute"))["sent"]

    def refuse(*args, **kwargs):
        raise publish.VerificationError("what arrived is not what was sent.")

    monkeypatch.setattr(publish, "verify", refuse)
    assert push("--execute", "--public").returncode == 3
    assert hub.repos["model", REPO].private


def test_a_folder_that_no_staging_wrote_is_never_replaced(push, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("my thesis")
    (tmp_path / "out" / "config.json").write_text("{}")
    done = push()
    assert done.returncode == 2 and "Staging replaces only what it wrote itself" in done.stderr
    assert (tmp_path / "out" / "README.md").read_text() == "my thesis"
    shutil.rmtree(tmp_path / "out")
    assert push().returncode == 0 and push().returncode == 0


def test_links_out_of_a_folder_are_refused(push, tmp_path, drafter):
    source = shutil.copytree(drafter, tmp_path / "linked")
    (tmp_path / "diary.txt").write_text("private")
    (source / "notes.json").symlink_to(tmp_path / "diary.txt")
    done = push(source=source)
    assert done.returncode == 2 and "has links (notes.json)" in done.stderr and not (tmp_path / "out").exists()


def test_only_what_was_checked_is_sent(hub, push, tmp_path):
    staged = tmp_path / "out"
    hub.on("GET /api/whoami-v2", lambda: (staged / "training.json").write_text('{"token": "private"}'))
    assert f"what was checked, but {staged / 'training.json'} changed since" in error_of(push("--execute"))
    assert hub.writes == []
    hub.on("GET /api/whoami-v2", lambda: (staged / "diary.txt").write_text("private"))
    assert report_of(push("--execute"))["verified"] and "diary.txt" not in hub.files(REPO)


@pytest.mark.parametrize(
    "tag",
    [*("", "main", "HEAD", "refs/tags/v1", "-v1", ".v1", "v 1", "v..1", "v1.lock", "v1/", "v1~2", "v@{1}"), "0a" * 20],
)
def test_a_name_that_is_no_tag_is_refused_before_any_work(tag, hub, push, tmp_path):
    for words in ((), ("--execute",), ("--verify",)):
        done = push(f"--tag={tag}", *words)
        assert f"A tag is a name that git accepts, and no branch, such as v1, got {tag!r}" in error_of(done)
    assert hub.requests == [] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [{"tag": "v1"}, {"revision": "v1"}])
def test_a_name_that_is_taken_is_told_in_the_plan(words, hub, push):
    hub.seed(REPO, {"README.md": b"other"})
    hub.seed(REPO, {"README.md": b"other"}, **words)
    told = report_of(push())["refused"]
    assert ("taken by other files" if "tag" in words else "has a branch named v1") in told
    assert error_of(push("--execute")) == f"Error: {told}" and hub.writes == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--verify", "--execute", "--pr"], "`--verify` sends nothing; leave out --execute, --pr, or --verify."),
        (["--verify"], "lies outside; verify one inside."),
        (["--git-tag", "v1"], "add --verify, or leave it out."),
        (["--pr", "--public"], "A pull request proposes files and changes nothing else; leave out --public, or --pr."),
        (["--pr", "--collection", "All"], "leave out --collection, or --pr."),
    ],
)
def test_options_that_could_not_be_followed_are_refused(words, message, hub, push, tmp_path):
    assert message in error_of(push(*words))
    assert hub.requests == [] and not (tmp_path / "out").exists()


def test_a_repository_that_somebody_else_made_meanwhile_is_not_taken_over(hub, push):
    hub.on("POST /api/repos/create", lambda: hub.seed(REPO, {"README.md": b"theirs"}))
    assert "changed while this ran; look at what changed" in error_of(push("--execute"))
    assert hub.writes == [] and hub.files(REPO) == {"README.md": b"theirs"}
    # The plan that was shown is carried out, or none.
    hub.on("GET /api/whoami-v2", lambda: hub.seed(REPO, {"README.md": b"newer"}))
    assert "changed while this ran; look at what changed" in error_of(push("--execute"))
    assert hub.writes == [] and hub.files(REPO) == {"README.md": b"newer"}


@pytest.mark.parametrize(
    ("request_", "state"),
    [
        (
            "POST /api/collections",
            "is published at v1, but not in the collection All (what is missing follows when the command is run "
            "again): this token may not write to a collection of acme; use one with write access to it.",
        ),
        ("PUT /api/models/.*/settings", "is there at v1, still private"),
        ("GET /api/models/.*/tree/v1", "at v1 is not verified"),
    ],
)
def test_what_fails_after_the_commit_says_how_far_it_came_and_follows_with_the_next_run(request_, state, hub, push):
    words = ("--execute", "--public", "--collection", "All")
    hub.on(request_, 403)
    assert f"Error: {REPO} {state}" in error_of(push(*words))
    done = report_of(push(*words))
    assert done["sent"] is False and done["collection"] and not hub.repos["model", REPO].private
    assert len(hub.writes) == len(set(hub.writes)) == 6


def write_kernel(folder: Path) -> Path:
    """A folder as kernels/."""
    folder.mkdir()
    (folder / "build.toml").write_text('[general]\nname = "tiny"\n')
    (folder / "CARD.md").write_text("---\nlicense: apache-2.0\n---\n\n# tiny kernel\n")
    script = "import pathlib, sys\nfolder = pathlib.Path(sys.argv[2], 'torch-cpu')\nfolder.mkdir(parents=True)\n"
    (folder / "build.py").write_text(script + "(folder / 'metadata.json').write_text('{}')\n")
    return folder


@needs_kernel_repositories
def test_a_kernels_pull_request_goes_to_its_version(hub, push, tmp_path):
    words = {"source": write_kernel(tmp_path / "kernel"), "repo_id": "acme/tiny-kernel"}
    assert "push the kernel without --collection" in error_of(push("--execute", "--collection", "All", **words))
    assert hub.requests == []
    assert report_of(push("--execute", **words))["sent"]
    (tmp_path / "kernel" / "CARD.md").write_text("---\nlicense: apache-2.0\n---\n\n# corrected\n")
    assert report_of(push("--execute", "--pr", **words))["pull_request"] == "refs/pr/1"
    assert b"corrected" in hub.files("acme/tiny-kernel", "refs/pr/1", repo_type="kernel")["README.md"]
    assert b"corrected" not in hub.files("acme/tiny-kernel", "v1", repo_type="kernel")["README.md"]
    assert "has no branch v2; ask its owner" in error_of(push("--execute", "--pr", "--tag", "v2", **words))


@pytest.mark.parametrize("name", ["space_app", pytest.param("kernels", marks=needs_kernel_repositories)])
def test_this_projects_own_space_and_kernels_are_published(name, hub, push):
    words = {"source": Path(name), "repo_id": f"acme/{name.replace('_', '-')}"}
    kind = report_of(push("--execute", **words))["type"]
    before = list(hub.writes)
    again = report_of(push("--execute", **words))
    assert again["verified"] and not again["sent"] and hub.writes == before
    files = hub.files(words["repo_id"], "v1", repo_type=kind)
    assert b"ORG/" not in files["README.md"] and b"acme/" in files["README.md"]
    expected = {"app.py", "pair.json"} if kind == "space" else {"build/torch-cuda/metadata.json", "LICENSE"}
    assert expected <= files.keys()
    if kind == "kernel":
        assert b'repo-id = "acme/kernels"' in files["build.toml"]
        assert "build.toml says version 1, so its tag is v1, got v2" in error_of(push("--tag", "v2", **words))


@needs_kernel_repositories
def test_a_kernel_goes_to_the_branch_of_its_version(hub, push, tmp_path):
    kernel = write_kernel(tmp_path / "kernel")
    words = {"source": kernel, "repo_id": "acme/tiny-kernel"}
    assert report_of(push("--execute", **words))["type"] == "kernel"
    files = hub.files("acme/tiny-kernel", "v1", repo_type="kernel")
    assert {"README.md", "LICENSE", "build/torch-cpu/metadata.json"} <= files.keys()
    assert hub.repos["kernel", "acme/tiny-kernel"].tags == {}
    assert report_of(push("--execute", **words))["sent"] is False
    # A change within a version goes to its branch.
    (kernel / "CARD.md").write_text("---\nlicense: apache-2.0\n---\n\n# tiny kernel, corrected\n")
    assert report_of(push("--execute", **words))["changed"] == ["README.md"]
    assert b"corrected" in hub.files("acme/tiny-kernel", "v1", repo_type="kernel")["README.md"]
    assert b"corrected" not in hub.files("acme/tiny-kernel", repo_type="kernel")["README.md"]
    (kernel / "build.py").write_text("import sys\nsys.exit('Error: no compiler')\n")
    assert "failed: no compiler" in error_of(push(**words))
    refused = push("--tag", "main", **words)
    assert "A kernel's version is a branch named v1, v2, ..., got 'main'" in error_of(refused)


@pytest.mark.parametrize(
    ("patched", "token", "message"),
    [
        ({}, "", "needs a token; log in with"),
        ({}, "token-of-nobody", "does not accept this token"),
        # A port that nobody listens on.
        ({"ENDPOINT": "http://127.0.0.1:9"}, TOKEN, "cannot be reached (ConnectError)"),
        ({"HF_HUB_OFFLINE": True}, TOKEN, "HF_HUB_OFFLINE is set"),
    ],
)
def test_who_cannot_send_is_told_in_one_sentence(patched, token, message, hub, push, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", token)
    for name, value in patched.items():
        monkeypatch.setattr(constants, name, value)
    done = push("--execute")
    assert message in error_of(done) and hub.writes == []
    assert "Retrying" not in done.stderr


def test_a_full_disk_while_staging_leaves_nothing(hub, push, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("modeling_domino.stage.shutil.copyfile", full)
    assert "No space left on device" in error_of(push("--execute"))
    assert hub.writes == [] and not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".out")]


def test_what_must_not_be_published_is_not(hub, push, drafter, tmp_path):
    shutil.copytree(drafter, tmp_path / "leaky")
    (tmp_path / "leaky" / "results" / "notes.json").write_text('{"token": "hf_' + "Ab3" * 12 + '"}')
    (tmp_path / "leaky" / "results" / "optimizer.pt").touch()
    done = push("--execute", source=tmp_path / "leaky")
    assert "it has 2 problems" in error_of(done)
    assert "- results/notes.json contains a Hugging Face token; remove and revoke it." in done.stderr
    assert hub.requests == []


def test_only_folders_with_something_to_publish_are_taken(hub, push, tmp_path):
    (tmp_path / "diary").mkdir()
    assert "must be a folder with a drafter" in error_of(push(source=tmp_path / "diary"))
    assert "There is no folder" in error_of(push(source=tmp_path / "nothing"))
    assert "A repository is named ORG/NAME, got tiny" in error_of(push(repo_id="tiny"))


def test_native_ways_of_publishing_refuse_and_name_the_command(drafter, tmp_path):
    loaded = DominoDraftModel.from_pretrained(drafter)
    for call in (lambda: loaded.push_to_hub(REPO), lambda: loaded.save_pretrained(tmp_path, push_to_hub=True)):
        with pytest.raises(ValueError, match="publish the folder with `domino push`"):
            call()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="publish with `domino push`"):
        DominoTrainingArguments(output_dir=str(tmp_path), push_to_hub=True)
    with pytest.raises(ValueError, match="with `domino push`"):
        DominoTrainer.push_to_hub(object())


# ---- recipes


RECIPES = sorted((ROOT / "hub_cards").glob("*/recipe.json"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_a_recipe_describes_the_published_drafter_in_full_size(path):
    recipe = json.loads(path.read_text())
    facts = drafter_facts(DominoConfig.from_dict(recipe["config"]))
    assert facts["stored_parameters"] == recipe["stored_parameters"]
    assert facts["drafts_per_round"] == recipe["config"]["block_size"] == 16
    assert constants.REGEX_COMMIT_OID.fullmatch(recipe["revision"])
    # The form in which the authors publish it is read as the same drafter.
    flat = {**recipe["config"], "model_type": "qwen3", "architectures": ["DFlashDraftModel"]}
    nested = ("mask_token_id", "projector_type", "shift_label", "pure_draft_prefix_len", "target_layer_ids")
    flat["dflash_config"] = {name: flat.pop(name) for name in (*nested, "gru_hidden_dim")} | {
        "emb_dim": flat["emb_dim"]
    }
    with torch.device("meta"):
        sizes = {
            name: tensor.shape for name, tensor in DominoDraftModel(DominoConfig.from_dict(flat)).state_dict().items()
        }
    assert len(sizes) == 62 and sum(shape.numel() for shape in sizes.values()) == recipe["stored_parameters"]


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("license: unknown", "names no licence"),
        ("license: other", "names another licence without license_name and license_link"),
        ("license: [mit]", "must name one licence, it has ['mit']"),
        ("license: 3", "must name one licence, it has 3"),
        ("- license", "must be keys with values, and is a list"),
        ("license: [", "has front matter that is no YAML"),
    ],
)
def test_a_source_without_a_usable_licence_is_not_copied(head, message, hub, push, tmp_path):
    commit = hub.seed("zeta/public-domino", {"README.md": f"---\n{head}\n---\n".encode()})
    recipe = {"source": "zeta/public-domino", "revision": commit}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    assert message in error_of(push(source=tmp_path, repo_id="acme/public-domino"))


def test_another_licence_keeps_its_name_and_its_link(hub):
    card = b"---\nlicense: other\nlicense_name: theirs\nlicense_link: LICENSE\n---\n"
    commit = hub.seed("zeta/public-domino", {"README.md": card})
    assert staging.source_licence({"source": "zeta/public-domino", "revision": commit}) == {
        "license": "other",
        "license_name": "theirs",
        "license_link": f"https://huggingface.co/zeta/public-domino/blob/{commit}/LICENSE",
    }


def test_a_recipe_is_converted_from_its_pinned_revision_with_its_sources_licence(hub, push, tmp_path):
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    hub.seed(TARGET, tmp_path / "target")
    drafter = tiny_drafter(target)
    drafter.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "flat", to="flat")
    files = {path.name: path.read_bytes() for path in (tmp_path / "flat").iterdir()}
    pinned = "0123456789abcdef0123456789abcdef01234567"
    config = {
        name: getattr(drafter.config, name) for name in ("hidden_size", "block_size", "target_layer_ids", "emb_dim")
    }
    recipe = {
        "source": "zeta/public-domino",
        "revision": pinned,
        "target": TARGET,
        "language": ["en"],
        "published_as": "Qwen3-4B",
        "stored_parameters": sum(tensor.numel() for tensor in drafter.state_dict().values()),
        "config": {**drafter.config.to_dict(), **config},
    }
    recipe["config"] = {name: recipe["config"][name] for name in ("vocab_size", *config)}
    folder = tmp_path / "public-domino"
    folder.mkdir()
    (folder / "recipe.json").write_text(json.dumps(recipe))
    words = {"source": folder, "repo_id": "acme/public-domino"}

    hub.seed("zeta/public-domino", files, commit=pinned)
    assert "names no licence, so a copy of zeta/public-domino at 01234567 must not be published" in error_of(
        push(**words)
    )
    hub.seed("zeta/public-domino", {**files, "README.md": b"---\nlicense: mit\n---\n"}, commit=pinned)
    # What came later does not matter.
    hub.seed("zeta/public-domino", {"README.md": b"---\nlicense: other\n---\n"})
    report_of(push("--execute", **words))
    card = hub.files("acme/public-domino", "v1")["README.md"].decode()
    assert "license: mit" in card and "[zeta/public-domino](https://huggingface.co/zeta/public-domino)" in card
    assert (
        f"at revision `{pinned}`" in card
        and "Not measured by us" in card
        and "| Domino chain | mean | 7.08 | 5.47 |" in card
    )
    (folder / "recipe.json").write_text(json.dumps({**recipe, "config": {**recipe["config"], "block_size": 5}}))
    assert "is not the drafter of the recipe (block_size differs)" in error_of(push(**words))
