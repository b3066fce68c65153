"""A saved drafter is its own code: it loads where nothing of ours is installed, from a folder and from the Hub's cache."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import prompt, tiny_drafter, tiny_target
from fresh_process import REPO_ID, put_in_hub_cache, run_fresh
from safetensors.torch import load_file
from transformers.dynamic_module_utils import get_imports, get_relative_imports

import modeling_domino


PACKAGE = Path(modeling_domino.__file__).parent
TRAVELLING = sorted(path.name for path in PACKAGE.glob("*_domino.py"))
# What a user of the remote code has anyway.
ALLOWED = {"torch", "transformers", "huggingface_hub"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A folder with a saved target and a saved drafter, and the target's own text after a prompt."""
    folder = tmp_path_factory.mktemp("pair")
    target = tiny_target()
    drafter = tiny_drafter(target)
    target.save_pretrained(folder / "target")
    drafter.save_pretrained(folder / "drafter")
    text = target.generate(prompt(5), max_new_tokens=20, do_sample=False)[0].tolist()
    return folder, text


GENERATE = """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained(TARGET)
ids = torch.tensor([PROMPT])
def text(**kwargs):
    return target.generate(ids, max_new_tokens=20, do_sample=False, **kwargs)[0].tolist()
"""


def script(folder: Path, body: str) -> str:
    return (
        GENERATE.replace("TARGET", repr(str(folder / "target"))).replace("PROMPT", repr(prompt(5)[0].tolist())) + body
    )


@pytest.fixture(scope="module")
def from_folder(pair, tmp_path_factory):
    folder, _ = pair
    return run_fresh(
        script(
            folder,
            f"""
folder = {str(folder / "drafter")!r}
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
RESULTS["config"] = [type(config).__name__, config.dflash_config["target_layer_ids"]]
drafter = AutoModel.from_pretrained(folder, trust_remote_code=True)
RESULTS["class"] = [type(drafter).__name__, type(drafter).__module__.split(".")[0]]
RESULTS["text"] = text(assistant_model=drafter)
RESULTS["run"] = [drafter.last_run.path, drafter.last_run.new_tokens, len(drafter.last_run.rounds)]
loop = drafter.spec_generate(target, ids, max_new_tokens=20)
RESULTS["loop"] = loop[0].tolist()
RESULTS["taken for installed"] = sorted(HIDDEN & set(sys.modules))
for how, call in {{
    "config": lambda: AutoConfig.from_pretrained(folder),
    "model": lambda: AutoModel.from_pretrained(folder),
}}.items():
    RESULTS[f"without trust, {{how}}"] = error_of(call)

chat = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
RESULTS["chat"] = error_of(chat.generate, ids)
RESULTS["chat as assistant"] = text(assistant_model=chat)
from transformers import pipeline
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
words = Tokenizer(models.WordLevel({{f"t{{i}}": i for i in range(64)}}, unk_token="t0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
RESULTS["pipeline"] = error_of(lambda: pipeline("text-generation", model=folder, trust_remote_code=True))
def written():
    return pipeline("text-generation", model=folder, tokenizer=tokenizer, trust_remote_code=True)("t1 t2")
RESULTS["pipeline with tokenizer"] = error_of(written)
RESULTS["pipeline of a loaded one"] = error_of(lambda: pipeline("text-generation", model=chat, tokenizer=tokenizer)("t1"))
helped = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
RESULTS["helped"] = helped("t1 t2", max_new_tokens=6, do_sample=False)[0]["generated_text"]
plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
RESULTS["plain"] = plain("t1 t2", max_new_tokens=6, do_sample=False)[0]["generated_text"]
""",
        ),
        tmp_path_factory.mktemp("home"),
    )


@pytest.fixture(scope="module")
def from_hub_cache(pair, tmp_path_factory):
    folder, _ = pair
    home = tmp_path_factory.mktemp("home")
    put_in_hub_cache(folder / "drafter", home)
    results = run_fresh(
        script(
            folder,
            f"""
RESULTS["without trust"] = error_of(AutoModel.from_pretrained, {REPO_ID!r})
drafter = AutoModel.from_pretrained({REPO_ID!r}, trust_remote_code=True)
RESULTS["text"] = text(assistant_model=drafter)
RESULTS["pinned"] = type(AutoModel.from_pretrained({REPO_ID!r}, revision="v1", trust_remote_code=True)).__name__
drafter.save_pretrained("again")
again = AutoModel.from_pretrained("again", trust_remote_code=True)
RESULTS["text again"] = text(assistant_model=again)
""",
        ),
        home,
    )
    return results, home


def saved_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.py"))


def test_saved_code_is_exactly_the_travelling_files(pair):
    assert saved_files(pair[0] / "drafter") == TRAVELLING
    for name in TRAVELLING:
        assert (pair[0] / "drafter" / name).read_bytes() == (PACKAGE / name).read_bytes()


def test_subfolders_do_not_travel(pair):
    assert not [path for path in (pair[0] / "drafter").iterdir() if path.is_dir()]


@pytest.mark.parametrize("name", TRAVELLING)
def test_the_hub_accepts_the_imports_of(name):
    path = PACKAGE / name
    source = path.read_text()
    packages = set(get_imports(path)) - set(sys.stdlib_module_names)
    assert packages <= ALLOWED
    relative = get_relative_imports(path)
    assert all(re.fullmatch(r"\w+_domino", module) and (PACKAGE / f"{module}.py").is_file() for module in relative)
    # The loader's pattern matches text, so every real relative import must be of the form that it sees.
    nodes = list(ast.walk(ast.parse(source)))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
    assert all(node.level == 1 and node.module for node in imports)
    assert {node.module for node in imports} == set(relative)
    assert "TYPE_CHECKING" not in source
    # Data files do not travel.
    assert "__file__" not in source


def test_the_entry_file_imports_every_sibling_itself():
    # From a local folder transformers 5.8 copies just these, and then misses what a sibling imports.
    named = {f"{module}.py" for module in get_relative_imports(PACKAGE / "modeling_domino.py")}
    assert sorted(named | {"modeling_domino.py"}) == TRAVELLING


def test_auto_map_names_the_entry_files(pair):
    config = json.loads((pair[0] / "drafter" / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "configuration_domino.DominoConfig",
        "AutoModel": "modeling_domino.DominoDraftModel",
        "AutoModelForCausalLM": "modeling_domino.DominoForCausalLM",
    }


def test_folder_loads_without_our_package(from_folder):
    assert from_folder["taken for installed"] == []
    assert from_folder["config"] == ["DominoConfig", [1, 4]]
    assert from_folder["class"] == ["DominoDraftModel", "transformers_modules"]


def test_folder_generates_the_targets_text(from_folder, pair):
    assert from_folder["text"] == from_folder["loop"] == pair[1]
    path, new_tokens, rounds = from_folder["run"]
    assert path == "stock"
    assert new_tokens == 20
    assert rounds > 0


@pytest.mark.parametrize("how", ["config", "model"])
def test_without_trust_the_error_names_the_flag(how, from_folder):
    error = from_folder[f"without trust, {how}"]
    assert error.startswith("ValueError")
    assert "trust_remote_code=True" in error
    assert len(error) < 500


HELP = "This is a drafter, not a language model"


@pytest.mark.parametrize("case", ["chat", "pipeline", "pipeline with tokenizer", "pipeline of a loaded one"])
def test_a_drafter_used_as_a_chat_model_says_what_to_do(case, from_folder):
    error = from_folder[case]
    assert HELP in error
    assert "assistant_model=drafter" in error
    assert len(error) < 400


def test_the_causal_lm_entry_still_drafts(from_folder, pair):
    assert from_folder["chat as assistant"] == pair[1]


def test_pipeline_takes_a_remote_drafter_as_assistant(from_folder):
    assert from_folder["helped"] == from_folder["plain"]


def test_hub_cache_offline(from_hub_cache, pair):
    results, _ = from_hub_cache
    assert results["text"] == pair[1]
    assert results["pinned"] == "DominoDraftModel"
    assert "trust_remote_code=True" in results["without trust"]


def test_saving_after_a_load_from_the_hub_keeps_code_and_weights(from_hub_cache, pair):
    results, home = from_hub_cache
    assert results["text again"] == pair[1]
    assert sorted(path.name for path in (home / "again").iterdir()) == sorted(
        ["config.json", "model.safetensors", *TRAVELLING]
    )
    config = json.loads((home / "again" / "config.json").read_text())
    # A reference to the repository of origin would load other code than the one saved beside it.
    assert not any("--" in reference for reference in config["auto_map"].values())
    assert config == json.loads((pair[0] / "drafter" / "config.json").read_text())
    first, again = (load_file(folder / "model.safetensors") for folder in (pair[0] / "drafter", home / "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
