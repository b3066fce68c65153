"""The layout is law: what lies where, which files travel with the weights, and what those may import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "modeling_domino"
TOP_LEVEL = {
    ".ci",
    ".gitignore",
    "CONTRIBUTING.md",
    "EXPERIMENTS.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "hub_cards",
    "kernels",
    "modeling_domino",
    "pyproject.toml",
    "space_app",
    "tests",
}
REQUIRED = TOP_LEVEL - {"hub_cards", "kernels", "space_app"}
# What remote code may import without a guard: the Hub's loader refuses a repository that needs anything else.
REMOTE_CODE_PACKAGES = {"torch", "transformers", "huggingface_hub"}
# The loader looks for relative imports with this pattern, in docstrings too.
LOADER_PATTERN = re.compile(r"^\s*from\s+\.(\S+)\s+import", flags=re.MULTILINE)
TRAVELLING = sorted(path.name for path in PACKAGE.glob("*_domino.py"))


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in names.split("\0") if name and (ROOT / name).is_file()]


def text_of(path: Path) -> str:
    """The text of a tracked file, empty for weights and pictures."""
    try:
        return (ROOT / path).read_text()
    except UnicodeDecodeError:
        return ""


def test_the_top_level_is_the_agreed_one(tracked):
    present = {path.parts[0] for path in tracked}
    assert present <= TOP_LEVEL
    assert present >= REQUIRED


def test_the_kernels_folder_does_not_shadow_the_library_of_that_name():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_only_travelling_files_carry_the_suffix(tracked):
    named_so = {path for path in tracked if path.name.endswith("_domino.py")}
    assert {path.parent for path in named_so} == {Path("modeling_domino")}
    assert {path.name for path in named_so} == set(TRAVELLING)


def test_tests_are_flat(tracked):
    code = [path for path in tracked if path.parts[0] == "tests" and path.suffix == ".py"]
    assert [path for path in code if len(path.parts) != 2] == []


def test_everything_the_entry_file_needs_travels():
    found, todo = set(), ["modeling_domino.py"]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [f"{module}.py" for module in LOADER_PATTERN.findall((PACKAGE / name).read_text())]
    assert found == set(TRAVELLING)


@pytest.mark.parametrize("name", TRAVELLING)
def test_travelling_files_import_only_what_the_hub_allows(name):
    tree = ast.parse((PACKAGE / name).read_text())
    guarded = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and f"{node.module}.py" in TRAVELLING, f"line {node.lineno}"
            assert all(alias.name != "*" for alias in node.names), f"line {node.lineno}"
            continue
        if isinstance(node, ast.ImportFrom):
            packages = [node.module]
        elif isinstance(node, ast.Import):
            packages = [alias.name for alias in node.names]
        else:
            # The loader skips `if is_xxx_available():` only; under TYPE_CHECKING it would still demand the package.
            assert not (isinstance(node, ast.Name) and node.id == "TYPE_CHECKING")
            continue
        for package in packages:
            root = package.split(".")[0]
            assert root != "modeling_domino", f"line {node.lineno}: our package is absent where this file runs"
            allowed = root in REMOTE_CODE_PACKAGES or root in sys.stdlib_module_names
            assert allowed or id(node) in guarded, f"line {node.lineno}: {package} needs a try"


@pytest.mark.parametrize("name", TRAVELLING)
def test_no_prose_looks_like_an_import_to_the_loader(name):
    source = (PACKAGE / name).read_text()
    real = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.level}
    assert set(LOADER_PATTERN.findall(source)) == real


def test_imports_go_down_never_up():
    """Travelling files know nothing of those that stay home, and the library nothing of the Space and the cards."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            module = getattr(node, "module", None) if isinstance(node, ast.ImportFrom) else None
            assert (module or "").split(".")[0] not in ("hub_cards", "space_app", "tests"), path


def test_no_file_names_a_folder_of_a_machine_or_a_registry_host(tracked):
    machine_path = re.compile(r"(^|[^A-Za-z0-9_.])/(work|tmp|root|farm|home)/[A-Za-z0-9_]", flags=re.MULTILINE)
    registry = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|registry\.npmjs")
    for path in tracked:
        for pattern in (machine_path, registry):
            match = pattern.search(text_of(path))
            assert match is None, f"{path}: {match[0]!r}"


def test_large_files_are_weights_of_published_drafters(tracked):
    for path in tracked:
        if (ROOT / path).stat().st_size > 1 << 20:
            assert path.match("hub_cards/*/model.safetensors"), path


def test_the_wheel_ships_the_package_only(tracked):
    wheels = sorted((ROOT / "build" / "wheel").glob("modeling_domino-*.whl"))
    if not wheels:
        pytest.skip("no wheel is built (`make wheel` builds one and runs this test)")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (entry_points,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert shipped == {path.as_posix() for path in tracked if path.parts[0] == "modeling_domino"}
    assert "domino = modeling_domino.cli:app" in entry_points


def test_the_package_declares_what_it_imports():
    """A package that installs but lacks a dependency fails at the user's first command."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    declared = {re.match(r"[A-Za-z0-9-]+", name)[0].replace("-", "_") for name in listed}
    # tokenizers and numpy come with transformers, which pins them.
    declared |= {"modeling_domino", "tokenizers", "numpy"}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                roots = {node.module.split(".")[0]}
            elif isinstance(node, ast.Import):
                roots = {alias.name.split(".")[0] for alias in node.names}
            else:
                continue
            unknown = roots - declared - set(sys.stdlib_module_names)
            assert not unknown, f"{path.name}, line {node.lineno}: {unknown}"
