"""What a repository must satisfy before it is published, checked on its staged folder without a network.

The Hub runs remote code by rules of its own (see [`code_problems`]), a card can claim numbers that nobody measured, and a
folder can hold what nobody meant to publish. Every check returns sentences; [`require_clean`] refuses a folder that has any.
"""

from __future__ import annotations

import ast
import fnmatch
import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from hub_cards.answers import answer_facts
from hub_cards.cards import training_end
from modeling_domino import DominoConfig
from modeling_domino.benchmark.tables import PUBLISHED
from modeling_domino.facts import drafter_facts
from modeling_domino.stage import read_recipe


CARD = "README.md"
REQUIRED_KEYS = {
    "model": ("license", "library_name", "pipeline_tag", "base_model", "base_model_relation", "tags"),
    "dataset": ("license", "task_categories", "configs"),
    "space": ("title", "sdk", "sdk_version", "python_version", "app_file", "short_description", "license"),
    "kernel": ("license",),
}
# Names that the Hub accepts, from its documentation of repository licences.
LICENCES = frozenset((Path(__file__).parent / "licences.txt").read_text(encoding="utf-8").split())
# What remote code may import without a guard, beside the standard library and its siblings.
REMOTE_CODE_PACKAGES = {"torch", "transformers", "huggingface_hub"}
# transformers finds relative imports with this pattern, in docstrings too.
LOADER_PATTERN = re.compile(r"^\s*from\s+\.(\S+)\s+import", flags=re.MULTILINE)

DENIED_FILES = (
    *("*.pt", "*.pth", "*.bin", "*.ckpt", "*.pkl", "*.pickle", "*.pyc", "*.pem", "*.key", "*.incomplete", "*.lock"),
    *(".env*", ".netrc", ".DS_Store", "optimizer*", "scheduler.*", "rng_state*", "trainer_state.json"),
)
DENIED_FOLDERS = {"__pycache__", ".cache", ".git", ".ipynb_checkpoints", ".pytest_cache", ".ruff_cache", "wandb"}
# The Hub's advice for a single file.
MOST_BYTES = 20 << 30
SECRETS = {
    "a Hugging Face token": r"hf_[A-Za-z0-9]{30,}",
    "a token of an organisation on the Hub": r"api_org_[A-Za-z0-9]{30,}",
    "a GitHub token": r"ghp_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{22,}",
    "an API key": r"sk-[A-Za-z0-9_-]{20,}",
    "an AWS key": r"AKIA[0-9A-Z]{16}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
}
# Not within a longer word; the last letter of an escape (\n in JSON, %3D in an address, ESC[31m) is no word.
SECRET_BEGINS = rb"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2})|(?<=[0-9]m))"
SECRET_PATTERNS = {
    what: re.compile(SECRET_BEGINS + rb"(?:" + pattern.encode() + rb")") for what, pattern in SECRETS.items()
}
# Not followed by a letter: a speed-up's x is, "4B" is a name.
NUMBER = re.compile(r"(?<![\w.,/-])\d+(?:[.,]\d+)*(?=x?(?![\w]))")
# Records behind a result are thousands of numbers, among which any claim would be found.
LONG_KEYS = {"log_history", "curve"}


class LintError(ValueError):
    """A folder that must not be published.

    Attributes:
        problems (`list[str]`): one sentence each.
    """

    def __init__(self, folder: Path, problems: list[str]):
        self.problems = problems
        count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{folder.name} cannot be published, it has {count}: {problems[0]}")


def require_clean(folder: Path, repo_type: str, repo_id: str | None = None) -> None:
    """Refuses a staged folder with any problem.

    Raises:
        LintError: with all of them.
    """
    problems = [*file_problems(folder), *card_problems(folder, repo_type, repo_id)]
    if repo_type == "model":
        problems += code_problems(folder)
    if problems:
        raise LintError(folder, problems)


# ---- files


def file_problems(folder: Path) -> list[str]:
    """Files that have no business in a repository, and secrets in those that have."""
    problems = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink()):
        name = path.relative_to(folder)
        if path.is_symlink():
            problems.append(f"{name} is a link; publish the file itself.")
        elif DENIED_FOLDERS & set(name.parts[:-1]) or any(fnmatch.fnmatch(name.name, deny) for deny in DENIED_FILES):
            problems.append(f"{name} is not for publishing (training state, cache, pickle or secret); remove it.")
        elif path.stat().st_size > MOST_BYTES:
            problems.append(f"{name} has {path.stat().st_size:,} bytes; split it below {MOST_BYTES:,}.")
        elif path.suffix != ".safetensors":
            problems += [f"{name} contains {what}; remove and revoke it." for what in secrets_in(path)]
    return problems


def secrets_in(path: Path) -> Iterator[str]:
    """What kinds of secrets a file contains, compressed or not."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    for what, pattern in SECRET_PATTERNS.items():
        if pattern.search(content):
            yield what


# ---- remote code


def code_problems(folder: Path) -> list[str]:
    """Python that transformers would fail to load from the Hub, also where a local folder still loads."""
    problems = []
    for path in sorted([*folder.glob("*.py"), *folder.glob("custom_generate/*.py")]):
        try:
            found = list(_import_problems(path))
        except SyntaxError as error:
            found = [f"does not compile ({error.msg}, line {error.lineno})"]
        problems += [f"{path.relative_to(folder)} {problem}." for problem in found]
    return problems


def _import_problems(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    guarded = {id(inner) for node in ast.walk(tree) for inner in _guarded_by(node)}
    relative = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            where = f"line {node.lineno}"
            if node.level > 1:
                yield f"imports from a folder above, {where}: what is above is not downloaded"
            elif node.module is None:
                yield f"has `from . import`, {where}, which the loader does not see: write `from .module import name`"
            elif "." in node.module:
                yield f"imports from a sub-folder, {where}: keep remote code in one flat folder"
            elif not path.with_name(f"{node.module}.py").is_file():
                yield f"imports .{node.module}, {where}, which is not there"
            relative.add(node.module)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for root in {name.split(".")[0] for name in _absolute_names(node)}:
                if root == "modeling_domino":
                    yield f"imports our own package, line {node.lineno}, which its users do not have"
                elif root not in REMOTE_CODE_PACKAGES | sys.stdlib_module_names and id(node) not in guarded:
                    yield f"needs {root}, line {node.lineno}, outside of try/except ImportError: the Hub's check demands it"
        elif getattr(node, "id", getattr(node, "attr", None)) == "TYPE_CHECKING":
            yield f"has TYPE_CHECKING, line {node.lineno}: the loader demands what stands under it all the same"
        elif isinstance(node, ast.Name) and node.id == "__file__":
            yield f"reads beside `__file__`, line {node.lineno}: data files are not copied with remote code"
    for module in sorted(set(LOADER_PATTERN.findall(source)) - {name for name in relative if name}):
        if not module.startswith("."):
            yield f"has prose that looks like an import of .{module} to the loader: do not begin a line with it"


def _guarded_by(node: ast.AST) -> list[ast.AST]:
    """The nodes that the loader leaves out because of `node`: bodies of `try`, and of `if is_..._available():`."""
    if isinstance(node, ast.Try):
        body = node.body
    elif isinstance(node, ast.If) and isinstance(node.test, ast.Call):
        name = getattr(node.test.func, "id", getattr(node.test.func, "attr", ""))
        body = node.body if re.fullmatch(r"is_\w+_available", name) else []
    else:
        return []
    return [inner for statement in body for inner in ast.walk(statement)]


def _absolute_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]


# ---- cards


def card_problems(folder: Path, repo_type: str, repo_id: str | None = None) -> list[str]:
    """What is wrong with the card of a folder: front matter, snippets, links, and numbers that no result file holds."""
    if not (folder / CARD).is_file():
        return [f"{CARD} is missing; `domino card` renders it."]
    text = (folder / CARD).read_text(encoding="utf-8")
    head, body = split_card(text)
    if head is None:
        return [f"{CARD} has no front matter; `domino card` renders it."]
    problems = list(_front_matter_problems(head, repo_type))
    # Broken YAML names no target, so what snippets load could not be told apart.
    if not any("no YAML" in problem for problem in problems):
        problems += _snippet_problems(body, yaml.safe_load(head) or {}, repo_id)
    problems += _link_problems(body, folder)
    bold = re.search(r"^\*\*[^*]*not a standalone model[^*]*\*\*", body, flags=re.MULTILINE)
    if repo_type == "model" and not bold:
        problems.append("must say in bold that this is a drafter, not a standalone model")
    if repo_type in ("model", "dataset"):
        known, texts = known_numbers(folder)
        unknown = [number for number in numbers_in(body) if not _is_known(number, known, texts)]
        problems += [f"states {number}, which no result file holds" for number in dict.fromkeys(unknown)]
    return [f"{CARD} {problem}." for problem in problems]


def split_card(text: str) -> tuple[str | None, str]:
    """Front matter and body of a card."""
    match = re.match(r"---\n(.*?)^---\n(.*)", text, flags=re.DOTALL | re.MULTILINE)
    return (match[1], match[2]) if match else (None, text)


def _front_matter_problems(head: str, repo_type: str) -> Iterator[str]:
    try:
        node = yaml.compose(head, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        yield f"has front matter that is no YAML ({' '.join(str(error).split())})"
        return
    yield from (f"has the key {key} twice in its front matter" for key in _duplicates(node))
    metadata = yaml.safe_load(head) or {}
    yield from (f"lacks {key} in its front matter" for key in REQUIRED_KEYS[repo_type] if not metadata.get(key))
    licences = metadata.get("license") or []
    for licence in [licences] if isinstance(licences, str) else licences:
        if licence not in LICENCES:
            yield f"names the licence {licence}, which the Hub does not know"
    if repo_type == "model" and metadata.get("library_name") not in (None, "transformers"):
        yield f"names the library {metadata['library_name']}, it must be transformers"
    if repo_type == "space" and not re.fullmatch(r"\d+\.\d+\.\d+", str(metadata.get("sdk_version"))):
        yield f"needs a full sdk_version such as 6.31.0, has {metadata.get('sdk_version')}"


def _duplicates(node: yaml.Node | None) -> Iterator[str]:
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        yield from dict.fromkeys(key for key in keys if keys.count(key) > 1)
        for _, value in node.value:
            yield from _duplicates(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _duplicates(item)


def python_blocks(body: str) -> list[str]:
    """The Python snippets of a Markdown text."""
    return re.findall(r"^```python\n(.*?)^```", body, flags=re.MULTILINE | re.DOTALL)


def _snippet_problems(body: str, metadata: dict[str, Any], repo_id: str | None) -> Iterator[str]:
    targets = metadata.get("base_model") or []
    targets = {targets} if isinstance(targets, str) else set(targets)
    for number, block in enumerate(python_blocks(body), start=1):
        try:
            tree = ast.parse(block)
        except SyntaxError as error:
            yield f"has a snippet that does not compile (snippet {number}: {error.msg})"
            continue
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            named = {keyword.arg: keyword.value for keyword in call.keywords}
            loads = getattr(call.func, "attr", None) == "from_pretrained" and call.args
            repo = named.get("custom_generate") or (call.args[0] if loads else None)
            # What a variable holds cannot be told; a target is loaded by transformers' own code.
            if not isinstance(repo, ast.Constant) or repo.value in targets:
                continue
            if getattr(named.get("trust_remote_code"), "value", None) is not True:
                yield f"has a snippet that uses {repo.value} without trust_remote_code=True (snippet {number})"
            if "revision" not in named:
                yield f"has a snippet that uses {repo.value} without revision= (snippet {number})"
            if repo_id is not None and repo.value != repo_id:
                yield f"has a snippet that uses {repo.value}, but is the card of {repo_id} (snippet {number})"


def _link_problems(body: str, folder: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)", body):
        if not target.startswith(("https://", "#", "mailto:")) and not (folder / target.split("#")[0]).exists():
            yield f"links to {target}, which is not in the folder"


# ---- numbers


def numbers_in(body: str) -> list[str]:
    """The numbers that a Markdown text states, outside of code, links and comments."""
    for pattern in (r"^```.*?^```", r"`[^`\n]*`", r"<!--.*?-->", r"\]\([^)]*\)", r"https?://\S+"):
        body = re.sub(pattern, " ", body, flags=re.MULTILINE | re.DOTALL)
    return NUMBER.findall(body)


def known_numbers(folder: Path) -> tuple[set[float], str]:
    """What the JSON files of a folder hold, and this project's data behind all cards: numbers, and the texts with more."""
    values: list[Any] = [json.loads(path.read_text(encoding="utf-8")) for path in _sources(folder)]
    if recipe := read_recipe(folder):
        values.append(drafter_facts(DominoConfig.from_dict(recipe["config"])))
    elif (folder / "config.json").is_file():
        values.append(drafter_facts(DominoConfig.from_pretrained(folder)))
    if (folder / "regenerate.json").is_file():
        values.append(answer_facts(folder))
    if (folder / "training.json").is_file():
        values.append(training_end(json.loads((folder / "training.json").read_text(encoding="utf-8"))))
    # What the templates state is not about one drafter.
    templates = (Path(__file__).parent / "templates").glob("*.md")
    numbers, texts = set(), [" ".join(numbers_in(path.read_text(encoding="utf-8"))) for path in templates]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += [inner for key, inner in value.items() if key not in LONG_KEYS]
        elif isinstance(value, list):
            values += value
            # Counts of what is listed.
            numbers.add(float(len(value)))
        elif isinstance(value, str):
            texts.append(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers.add(float(value))
    return numbers, "\n".join(texts)


def _sources(folder: Path) -> list[Path]:
    own = [
        folder / name for name in ("config.json", "recipe.json", "training.json", "ablation.json", "regenerate.json")
    ]
    shared = sorted(Path(__file__).parent.glob("*.json"))
    files = [path for path in own if path.is_file()] + sorted(folder.glob("results/*.json"))
    return [*files, *shared, PUBLISHED]


def _is_known(number: str, known: set[float], texts: str) -> bool:
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", number)
    if plain.count(".") > 1 or "," in plain:
        return number in texts
    digits = len(plain.partition(".")[2])
    value = float(plain)
    if re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.])", texts):
        return True
    return any(round(each * scale, digits) == value for each in known for scale in (1, 100))
