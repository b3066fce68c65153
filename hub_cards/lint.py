"""What a repository must satisfy before it is published, checked on its staged folder without a network.

The Hub runs remote code by rules of its own (see [`code_problems`]), a card can claim numbers that nobody measured, and a
folder can hold what nobody meant to publish. Every check returns sentences; [`require_clean`] refuses a folder that has any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import yaml

from hub_cards.files import file_problems
from hub_cards.numbers import unknown_numbers
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
# The parts of a snippet that take a repository: the argument that names it, its place, and whether its code is run.
LOADERS = {
    "from_pretrained": ("pretrained_model_name_or_path", 0, True),
    "pipeline": ("model", 1, True),
    "generate": ("custom_generate", None, True),
    "load_dataset": ("path", 0, False),
    "snapshot_download": ("repo_id", 0, False),
    "hf_hub_download": ("repo_id", 0, False),
    "get_kernel": ("repo_id", 0, True),
}


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
    try:
        text = (folder / CARD).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return [f"{CARD} is not UTF-8; `domino card` renders it."]
    head, body = split_card(text)
    if head is None:
        return [f"{CARD} has no front matter; `domino card` renders it."]
    problems = []
    try:
        metadata = front_matter(head)
    except ValueError as error:
        # It names no target, so what snippets load could not be told apart.
        problems.append(str(error))
    else:
        problems += _front_matter_problems(head, metadata, repo_type)
        problems += _licence_problems(metadata, unchosen=read_recipe(folder) is not None)
        problems += _snippet_problems(body, metadata, repo_id)
    problems += _link_problems(body, folder)
    bold = re.search(r"^\*\*[^*]*not a standalone model[^*]*\*\*", body, flags=re.MULTILINE)
    if repo_type == "model" and not bold:
        problems.append("must say in bold that this is a drafter, not a standalone model")
    if repo_type in ("model", "dataset"):
        problems += [f"states {number}, which no result file holds" for number in unknown_numbers(body, folder)]
    return [f"{CARD} {problem}." for problem in problems]


def split_card(text: str) -> tuple[str | None, str]:
    """Front matter and body of a card."""
    match = re.match(r"---\n(.*?)^---\n(.*)", text, flags=re.DOTALL | re.MULTILINE)
    return (match[1], match[2]) if match else (None, text)


def front_matter(head: str) -> dict[str, Any]:
    """The keys of a card's front matter.

    Raises:
        ValueError: if it is no YAML, or something else than keys.
    """
    try:
        metadata = yaml.safe_load(head)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"has front matter that is no YAML ({' '.join(str(error).split())})") from None
    if not isinstance(metadata, dict | None):
        raise ValueError(f"has front matter that must be keys with values, and is a {type(metadata).__name__}")
    return metadata or {}


def _front_matter_problems(head: str, metadata: dict[str, Any], repo_type: str) -> Iterator[str]:
    yield from (
        f"has the key {key} twice in its front matter"
        for key in _duplicates(yaml.compose(head, Loader=yaml.SafeLoader))
    )
    yield from (f"lacks {key} in its front matter" for key in REQUIRED_KEYS[repo_type] if not metadata.get(key))
    if repo_type == "model" and metadata.get("library_name") not in (None, "transformers"):
        yield f"names the library {metadata['library_name']}, it must be transformers"
    if repo_type == "space" and not re.fullmatch(r"\d+\.\d+\.\d+", str(metadata.get("sdk_version"))):
        yield f"needs a full sdk_version such as 6.31.0, has {metadata.get('sdk_version')}"


def _licence_problems(metadata: dict[str, Any], *, unchosen: bool) -> Iterator[str]:
    """With `unchosen` it is that of a recipe's source, which a push asks for."""
    licences = metadata.get("license") or []
    for licence in licences if isinstance(licences, list) else [licences]:
        if not isinstance(licence, str):
            yield f"names a licence that is no text, {licence!r}"
        elif licence not in LICENCES:
            yield f"names the licence {licence}, which the Hub does not know"
        elif licence == "unknown" and not unchosen:
            yield "names the licence unknown, under which nobody may use it"
        elif licence == "other" and not (metadata.get("license_name") and metadata.get("license_link")):
            yield "names the licence other without license_name and license_link"


def _duplicates(node: yaml.Node | None) -> Iterator[str]:
    if isinstance(node, yaml.MappingNode):
        keys = [str(key.value) for key, _ in node.value]
        yield from dict.fromkeys(key for key in keys if keys.count(key) > 1)
        for _, value in node.value:
            yield from _duplicates(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _duplicates(item)


def python_blocks(body: str) -> list[str]:
    """The Python snippets of a Markdown text."""
    fence = r"^ {0,3}(?P<fence>```+|~~~+)[ \t]*\{?\.?(?:python|py)\d?\b[^\n]*\n(?P<code>.*?)^ {0,3}(?P=fence)"
    found = re.finditer(fence, body, flags=re.MULTILINE | re.DOTALL | re.IGNORECASE)
    return [match["code"] for match in found]


def _snippet_problems(body: str, metadata: dict[str, Any], repo_id: str | None) -> Iterator[str]:
    targets = metadata.get("base_model") or []
    targets = targets if isinstance(targets, list) else [targets]
    # What earlier snippets called by a name, too.
    values: dict[str, ast.expr] = {}
    for number, block in enumerate(python_blocks(body), start=1):
        try:
            tree = ast.parse(block)
        except (SyntaxError, ValueError) as error:
            yield f"has a snippet that does not compile (snippet {number}: {getattr(error, 'msg', error)})"
            continue
        assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
        values |= {
            target.id: node.value for node in assigned for target in node.targets if isinstance(target, ast.Name)
        }
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            repo, runs_code = _loaded(call, values)
            # A target is loaded by transformers' own code.
            if repo is None or repo in targets:
                continue
            named = {keyword.arg: keyword.value for keyword in call.keywords}
            # A kernel's version is a branch, and its code is trusted by name.
            trusted = ast.unparse(named["trust_remote_code"]) if "trust_remote_code" in named else ""
            if runs_code and trusted not in ("True", repr([repo])):
                yield f"has a snippet that uses {repo} without trust_remote_code=True (snippet {number})"
            if not {"revision", "version"} & named.keys():
                yield f"has a snippet that uses {repo} without revision= (snippet {number})"
            if repo_id is not None and repo != repo_id and (runs_code or trusted):
                yield f"has a snippet that uses {repo}, but is the card of {repo_id} (snippet {number})"


def _loaded(call: ast.Call, values: dict[str, ast.expr]) -> tuple[str | None, bool]:
    """The repository that a call names, if it does, and whether the repository's code is run."""
    name = getattr(call.func, "attr", getattr(call.func, "id", None))
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    argument, place, runs_code = LOADERS.get(name, ("custom_generate", None, True))
    repo = named.get(argument)
    if repo is None and place is not None and len(call.args) > place:
        repo = call.args[place]
    if isinstance(repo, ast.Name):
        repo = values.get(repo.id)
    # What is computed cannot be told.
    return (repo.value if isinstance(repo, ast.Constant) and isinstance(repo.value, str) else None), runs_code


def _link_problems(body: str, folder: Path) -> Iterator[str]:
    body = re.sub(r"^(```+|~~~+).*?^\1|`[^`\n]*`", " ", body, flags=re.MULTILINE | re.DOTALL)
    links = r"\]\(<?([^)>\s]+)|^ {0,3}\[(?!\^)[^\]]+\]:\s*<?([^>\s]+)|\b(?:src|href)\s*=\s*[\"']([^\"']+)"
    for target in ("".join(found) for found in re.findall(links, body, flags=re.MULTILINE)):
        if target.startswith(("https://", "#", "mailto:")):
            continue
        path = PurePosixPath(unquote(target).split("#")[0].replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or re.match(r"[A-Za-z][\w+.-]*:", target):
            yield f"links to {target}, which is outside of the folder"
        elif not (folder / path).exists():
            yield f"links to {target}, which is not in the folder"
