"""What is refused before anything is published: code the Hub cannot load, secrets, stray files, and cards that claim too much."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

import modeling_domino
from modeling_domino.cli.checkout import from_checkout


lint = from_checkout("hub_cards.lint", "push")
PACKAGE = Path(modeling_domino.__file__).parent
CARD = """---
language: en
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
base_model: acme/target
base_model_relation: finetune
tags:
- domino
---

# tiny

**A drafter for acme/target, not a standalone model.**

```python
target = AutoModelForCausalLM.from_pretrained("acme/target")
drafter = AutoModel.from_pretrained("acme/tiny", revision="v1", trust_remote_code=True)
output = target.generate(**inputs, custom_generate="acme/tiny", revision="v1", trust_remote_code=True)
```

Acceptance 2.47 of 6, 98.4 % of 1,234 rounds, with torch 2.13.0 and [a licence](LICENSE).
"""
RESULTS = {
    "tau": 2.4708,
    "cap": 6,
    "share": 0.984,
    "rounds": 1234,
    "versions": {"torch": "2.13.0+cpu"},
    "sha": "ab77777c",
}


@pytest.fixture
def folder(tmp_path):
    """A small folder without a problem."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "dev.json").write_text(json.dumps(RESULTS))
    (tmp_path / "README.md").write_text(CARD)
    (tmp_path / "LICENSE").write_text("free\n")
    return tmp_path


def card_with(folder: Path, old: str, new: str) -> list[str]:
    assert old in CARD
    (folder / "README.md").write_text(CARD.replace(old, new, 1))
    return lint.card_problems(folder, "model", "acme/tiny")


def test_a_sound_folder_passes(folder):
    lint.require_clean(folder, "model", "acme/tiny")


def test_every_problem_is_listed(folder):
    (folder / "optimizer.pt").touch()
    (folder / "code_domino.py").write_text("from . import other\n")
    (folder / "README.md").write_text(CARD.replace("license: apache-2.0\n", ""))
    with pytest.raises(lint.LintError, match="cannot be published, it has 3 problems: ") as refused:
        lint.require_clean(folder, "model")
    assert len(refused.value.problems) == 3


# ---- cards


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("license: apache-2.0\n", "", "lacks license in its front matter"),
        ("license: apache-2.0", "license: my-own", "names the licence my-own, which the Hub does not know"),
        ("library_name: transformers", "library_name: domino", "names the library domino"),
        ("language: en\n", "language: en\nlicense: mit\n", "has the key license twice"),
        ("- domino\n", "- a: 1\n  a: 2\n", "has the key a twice"),
        ("tags:\n", "tags: [\n", "has front matter that is no YAML"),
        ("base_model_relation: finetune\n", "", "lacks base_model_relation"),
        (
            ', revision="v1", trust_remote_code=True)\noutput',
            ', revision="v1")\noutput',
            "without trust_remote_code=True",
        ),
        ('"acme/tiny", revision="v1", trust', '"acme/tiny", trust', "uses acme/tiny without revision="),
        ('custom_generate="acme/tiny", revision="v1", ', 'custom_generate="acme/tiny", ', "without revision="),
        (
            'custom_generate="acme/tiny"',
            'custom_generate="acme/other"',
            "uses acme/other, but is the card of acme/tiny",
        ),
        ("output = target", "output := target", "has a snippet that does not compile (snippet 1"),
        ("2.47 of 6", "2.48 of 6", "states 2.48, which no result file holds"),
        ("1,234 rounds", "1,235 rounds", "states 1,235, which no result file holds"),
        ("98.4 %", "98.5 %", "states 98.5"),
        ("torch 2.13.0", "torch 2.14.0", "states 2.14.0"),
        ("2.47 of 6", "3.7x of 6", "states 3.7"),
        ("2.47 of 6", "1e9 of 6", "states 1e9"),
        ("2.47 of 6", ".97 of 6", "states .97"),
        ("2.47 of 6", "-2.47 of 6", "states -2.47"),
        ("2.47 of 6", "98.4 of 6", "states 98.4, which"),
        ("2.47 of 6", "0.98 % of 6", "states 0.98 %"),
        ("2.47 of 6", "6,77777 of 6", "states 6,77777"),
        ("2.47 of 6", "77777 of 6", "states 77777,"),
        ("2.47 of 6", "13.0 of 6", "states 13.0"),
        ("(LICENSE)", "(MISSING)", "links to MISSING, which is not in the folder"),
        ("(LICENSE)", "(results/../../x)", "links to results/../../x, which is outside of the folder"),
        ("(LICENSE)", "(%2E%2E/x)", "which is outside of the folder"),
        ("(LICENSE)", "(/etc/hosts)", "links to /etc/hosts, which is outside of the folder"),
        ("(LICENSE)", "(file:///etc/hosts)", "which is outside of the folder"),
        ("(LICENSE)", '(LICENSE) <img src="../x.png">', "links to ../x.png, which is outside of the folder"),
        ("license: apache-2.0", "license: unknown", "names the licence unknown, under which nobody may use it"),
        ("license: apache-2.0", "license: other", "names the licence other without license_name and license_link"),
        ("license: apache-2.0", "license: 2.0", "names a licence that is no text, 2.0"),
        ("license: apache-2.0", "license: {name: mit}", "names a licence that is no text"),
        ("**A drafter", "A drafter", "must say in bold"),
    ],
)
def test_the_card_is_refused(old, new, problem, folder):
    (found,) = card_with(folder, old, new)
    assert problem in found and found.startswith("README.md ")


def test_front_matter_that_is_a_list_is_one_problem(folder):
    (folder / "README.md").write_text("---\n- license\n---\n" + CARD.split("---\n")[2])
    (found,) = lint.card_problems(folder, "model", "acme/tiny")
    assert found == "README.md has front matter that must be keys with values, and is a list."


@pytest.mark.parametrize(
    "fence", ["```py", "```Python", "```python3", "``` python title=x", "~~~python", "````python"]
)
@pytest.mark.parametrize(
    ("call", "missing"),
    [
        ('pipeline("text-generation", model="acme/tiny")', {"trust_remote_code=True", "revision="}),
        ('pipeline("text-generation", "acme/tiny", revision="v1")', {"trust_remote_code=True"}),
        ('from_pretrained(pretrained_model_name_or_path="acme/tiny", revision="v1")', {"trust_remote_code=True"}),
        ('load_dataset("acme/tiny", trust_remote_code=True)', {"revision="}),
        ('load_dataset("acme/tiny")', {"revision="}),
        ('snapshot_download("acme/tiny")', {"revision="}),
        ('name = "acme/tiny"\nAutoModel.from_pretrained(name)', {"trust_remote_code=True", "revision="}),
        ('kernels.get_kernel("acme/tiny", version=1)', {"trust_remote_code=True"}),
        ('kernels.get_kernel("acme/tiny", version=1, trust_remote_code=["acme/tiny"])', set()),
        ('pipeline("text-generation", "acme/target")', set()),
    ],
)
def test_every_way_to_load_a_repository_is_pinned_and_says_that_its_code_runs(call, missing, fence, folder):
    end = re.match("[`~]+", fence)[0]
    problems = card_with(folder, "Acceptance 2.47", f"{fence}\nx = {call}\n{end}\n\nAcceptance 2.47")
    expected = {f"README.md has a snippet that uses acme/tiny without {each} (snippet 2)." for each in missing}
    assert set(problems) == expected


def test_a_card_without_front_matter_and_none_at_all(folder):
    assert "has no front matter" in card_with(folder, "---\nlanguage", "language")[0]
    (folder / "README.md").unlink()
    assert lint.card_problems(folder, "model") == ["README.md is missing; `domino card` renders it."]


def test_names_versions_and_code_are_no_claims(folder):
    harmless = (
        "Qwen3-4B in bf16, block-16, GPT2, `7 of 9`, <!-- 77 -->, [x](https://huggingface.co/papers/2605.29707), v7"
    )
    assert card_with(folder, "Acceptance", f"{harmless} Acceptance") == []


def test_a_space_needs_a_full_sdk_version(folder):
    head = {"title": "t", "sdk": "gradio", "sdk_version": "6.31", "python_version": "3.12", "app_file": "app.py"}
    head |= {"short_description": "s", "license": "apache-2.0"}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(head)}---\n\n# Space\n")
    assert "needs a full sdk_version such as 6.31.0, has 6.31" in lint.card_problems(folder, "space")[0]


# ---- files


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.pt",
        "model.bin",
        ".env",
        "trainer_state.json",
        "__pycache__/a.txt",
        ".cache/huggingface/b",
        "rng_state_0.pth",
        "Optimizer.PT",
        "WANDB/run.txt",
        *("id_rsa", "id_ed25519.pub", "id_ecdsa", "store.p12", "store.PFX", "Server.pem", "tls.KEY"),
        *(".git-credentials", ".netrc", ".npmrc", ".pypirc", ".ENV.local"),
    ],
)
def test_files_that_are_not_for_publishing(name, folder):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("x")
    (problem,) = lint.file_problems(folder)
    assert problem.startswith(f"{name} is not for publishing")


# Put together here, so that no file of this project holds anything that looks like one.
@pytest.mark.parametrize(
    ("secret", "what"),
    [
        ("hf_" + "Ab3" * 12, "a Hugging Face token"),
        ("api_org_" + "Ab3" * 12, "a token of an organisation on the Hub"),
        ("hf_oauth_" + "eyJ.Ab-3" * 9, "a Hugging Face token"),
        *((f"gh{kind}_" + "Ab34" * 9, "a GitHub token") for kind in "pousr"),
        ("github_pat_" + "Ab3_" * 9, "a GitHub token"),
        ("sk-" + "Ab3-" * 9, "an API key"),
        ("AKIA" + "ABCD" * 4, "an AWS key"),
        ("ASIA" + "ABCD" * 4, "an AWS key"),
        ("AIza" + "Ab3_-" * 7, "a Google key"),
        ("https:/" + "/bot:hunter2@example.com/x", "a password in an address"),
        ("postgresql+psycopg:/" + "/bot:s3cr:t@10.0.0.1/db", "a password in an address"),
        ("-----BEGIN RSA " + "PRIVATE KEY-----", "a private key"),
    ],
)
def test_secrets_are_found_in_text_and_in_shards(secret, what, folder):
    (folder / "notes.json").write_text(json.dumps({"command": f"TOKEN={secret} domino train"}))
    assert lint.file_problems(folder) == [f"notes.json contains {what}; remove and revoke it."]
    (folder / "notes.json").unlink()
    # An escape before it is no part of a word.
    for before in ("\\n", "\\t", "%3D", "\x1b[31m"):
        (folder / "notes.txt").write_text(f"my key is{before}{secret}")
        assert lint.file_problems(folder) == [f"notes.txt contains {what}; remove and revoke it."], before
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        (folder / "notes.txt").write_text(f"my key is {secret}", encoding=encoding)
        assert lint.file_problems(folder) == [f"notes.txt contains {what}; remove and revoke it."], encoding
    (folder / "notes.txt").unlink()
    (folder / "answers.jsonl.gz").write_bytes(gzip.compress(f'{{"text": "{secret}"}}'.encode()))
    assert lint.file_problems(folder) == [f"answers.jsonl.gz contains {what}; remove and revoke it."]


def test_words_that_only_resemble_secrets_pass(folder):
    addresses = " https://huggingface.co/a/b:c https://host:8080/a@b mailto:a@b.c https://me@example.com"
    words = "task-" + "a" * 30 + " hf_hub_download AKIA ASIAN AIza sk-learn ask-" + "b" * 30
    (folder / "notes.txt").write_text(words + addresses)
    assert lint.file_problems(folder) == []


# The same bytes in every process: a time in them once gave the workers of a run different tests.
@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"a" * 99, mtime=0)[:-6], b"\x1f\x8b\x08" + b"\xff" * 40],
    ids=["no gzip", "cut", "damaged"],
)
def test_a_damaged_archive_is_a_problem_of_its_own(content, folder):
    (folder / "answers.jsonl.gz").write_bytes(content)
    (problem,) = lint.file_problems(folder)
    assert problem.startswith("answers.jsonl.gz is no whole gzip file (") and problem.endswith("or remove it.")


def test_links_are_refused(folder):
    (folder / "more.json").symlink_to(folder / "LICENSE")
    assert lint.file_problems(folder) == ["more.json is a link; publish the file itself."]


# ---- remote code


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("from . import other_domino\n", "has `from . import`"),
        ("from .sub.module import name\n", "imports from a sub-folder"),
        ("from ..other_domino import name\n", "imports from a folder above"),
        ("from .missing_domino import name\n", "imports .missing_domino, line 1, which is not there"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n", "has TYPE_CHECKING"),
        ("import typing\nif typing.TYPE_CHECKING:\n    import torch\n", "has TYPE_CHECKING"),
        ("from importlib.util import find_spec\nif find_spec('triton'):\n    import triton\n", "needs triton"),
        ("def work():\n    import kernels\n", "needs kernels"),
        ('"""Use it so:\n\n    from .other_domino import name\n"""\n', "looks like an import of .other_domino"),
        ("from pathlib import Path\nTABLE = Path(__file__).with_name('table.json')\n", "reads beside `__file__`"),
        ("import modeling_domino\n", "imports our own package"),
        ("from modeling_domino.stage import stage\n", "imports our own package"),
        ("try:\n    pass\nexcept ImportError:\n    import triton\n", "needs triton"),
        ("def broken(:\n", "does not compile"),
    ],
)
def test_code_that_the_hub_cannot_load(source, problem, folder):
    (folder / "entry_domino.py").write_text(source)
    (found,) = lint.code_problems(folder)
    assert problem in found and found.startswith("entry_domino.py ")


@pytest.mark.parametrize(
    "source",
    [
        "from .other_domino import (\n    first,\n    second,\n)\n",
        "try:\n    import triton\nexcept ImportError:\n    triton = None\n",
        "from transformers.utils import is_triton_available\nif is_triton_available():\n    import triton\n",
        "import json\nimport torch\nfrom transformers.utils import logging\n",
    ],
)
def test_code_that_the_hub_loads(source, folder):
    (folder / "other_domino.py").write_text("first = second = None\n")
    (folder / "entry_domino.py").write_text(source)
    assert lint.code_problems(folder) == []


def test_the_code_that_travels_passes(tmp_path):
    for path in PACKAGE.glob("*_domino.py"):
        shutil.copy(path, tmp_path)
    shutil.copytree(PACKAGE / "custom_generate", tmp_path / "custom_generate")
    assert lint.code_problems(tmp_path) == []


def test_every_rule_is_one_of_the_loader(tmp_path):
    """What the check of the Hub demands of a file, asked of transformers itself."""
    from transformers.dynamic_module_utils import get_imports, get_relative_imports

    path = tmp_path / "entry_domino.py"
    path.write_text("def work():\n    import kernels\nif find_spec('triton'):\n    import triton\n")
    assert set(get_imports(path)) == {"kernels", "triton"}
    path.write_text('"""Prose.\n    from .other_domino import name\n"""\nfrom . import third\n')
    assert get_relative_imports(path) == ["other_domino"]
