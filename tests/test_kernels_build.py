"""The kernel repository: a build that the `kernels` library takes, offline and only as asked."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hub_server import running_hub


library = pytest.importorskip("kernels", reason="the kernels library is not installed (`make test` installs it)")


KERNELS = Path(__file__).parent.parent / "kernels"
BACKENDS = ["cpu", "cuda", "rocm", "xpu"]
REPO_ID = "domino-drafters/domino-kernels"


def test_the_build_file_is_valid():
    assert [str(backend).lower() for backend in library._rust.Build.open(KERNELS).general.backends] == BACKENDS


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_has_a_variant_whose_digest_holds(kernel_repo, backend):
    variant = kernel_repo / "build" / f"torch-{backend}"
    metadata = library._rust.Metadata.read_from_file(variant / "metadata.json")
    assert (str(metadata.name), metadata.version, metadata.license) == ("domino-kernels", 1, "Apache-2.0")
    assert str(metadata.backend.backend_type).lower() == backend
    assert metadata.python_depends == [] and metadata.kernel_depends == []
    metadata.digest.validate(library._rust.Digest.hash_variant(metadata.digest.algorithm, variant))
    assert (variant / "ops.py").read_bytes() == (KERNELS.parent / "modeling_domino" / "ops_domino.py").read_bytes()


def test_each_variant_has_operations_of_its_own(kernel_repo):
    identities = {json.loads(path.read_text())["id"] for path in kernel_repo.glob("build/*/metadata.json")}
    assert len(identities) == len(BACKENDS)


def test_building_again_gives_the_same_bytes(kernel_repo, tmp_path):
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "left over").touch()
    subprocess.run(
        [sys.executable, KERNELS / "build.py", "--output", tmp_path / "build"], check=True, capture_output=True
    )

    def content(folder):
        return {
            path.relative_to(folder): path.read_bytes()
            for path in folder.rglob("*")
            if path.suffix in (".py", ".json")
        }

    assert content(tmp_path) == content(kernel_repo)
    assert [path.name for path in tmp_path.iterdir()] == ["build"]
    assert not (tmp_path / "build" / "left over").exists()


def test_sources_are_python_39_and_import_only_what_kernels_may(kernel_repo):
    for path in (kernel_repo / "build" / "torch-cuda").glob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1, path.name
                continue
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                root = name.split(".")[0]
                assert root in {"torch", "triton"} or root in sys.stdlib_module_names, f"{path.name}: {name}"
        for node in ast.walk(tree):
            # `X | None` in an annotation is evaluated, and fails before Python 3.10.
            for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                assert not isinstance(annotation, ast.BinOp), f"{path.name}, line {node.lineno}"


def small_rollout(module):
    """A rollout of ones and zeros on the CPU; every draft is the last token."""
    weights = module.HeadWeights(torch.zeros(6, 3), torch.zeros(6, 2), torch.ones(2, 5), torch.ones(4, 2))
    base = torch.arange(4.0).expand(1, 3, 4)
    return base, torch.ones(1, 3, 3), torch.tensor([0]), weights, 1, torch.ones(4, 3)


def test_the_library_loads_the_local_build(kernel_repo):
    kernel = library.get_local_kernel(kernel_repo)
    *args, embeddings = small_rollout(kernel)
    # In the interpreter if it is on for this process, else by the torch functions.
    ids, features = kernel.chain_rollout(*args, embeddings=embeddings)
    assert ids.tolist() == [[3, 3, 3]] and features.shape == (1, 3, 2)


def test_a_layer_is_swapped_for_the_kernels(kernel_repo):
    @library.use_kernel_forward_from_hub("DominoRollout")
    class Rollout(torch.nn.Module):
        def forward(
            self, base_logits, hidden, anchors, weights, prefix_len, embeddings=None, gates_table=None, candidates=None
        ):
            raise AssertionError("not swapped")

    layer = library.LocalLayerRepository(repo_path=kernel_repo, layer_name="DominoRollout")
    with library.use_kernel_mapping({"DominoRollout": {"cpu": layer}}, inherit_mapping=False):
        model = library.kernelize(Rollout(), mode=library.Mode.INFERENCE, device="cpu")
    assert not list(model.parameters())
    ids, _ = model(*small_rollout(library.get_local_kernel(kernel_repo)))
    assert ids.tolist() == [[3, 3, 3]]


def fresh(code: str, **env: str) -> str:
    """Standard output of `code` in a process that can import neither triton nor, unless it is asked for, anything ours."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={"HF_HUB_OFFLINE": "1", "PATH": "", "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_cpu_variant_works_without_triton_and_says_so(kernel_repo):
    output = fresh(
        f"""
        import sys
        sys.modules["triton"] = None
        import importlib.util, torch
        spec = importlib.util.spec_from_file_location("k", {str(kernel_repo / "build" / "torch-cpu" / "__init__.py")!r})
        sys.modules["k"] = k = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(k)
        print(k.missing(torch.device("cpu")))
        print(k.correct_argmax(torch.arange(4.0)[None], torch.zeros(1, 2), torch.ones(4, 2)).item())
        """
    )
    assert output.splitlines() == ["triton is not installed", "3"]


def test_local_kernels_stand_in_for_the_hub(kernel_repo):
    """The library's own variable: what would be fetched from the Hub comes from the folder, without a request."""
    output = fresh(
        f"""
        from kernels import get_kernel
        kernel = get_kernel({REPO_ID!r}, version=1, trust_remote_code=[{REPO_ID!r}])
        print(kernel.__file__)
        """,
        LOCAL_KERNELS=f"{REPO_ID}={kernel_repo}",
        TRITON_INTERPRET="0",
    )
    assert Path(output) == kernel_repo / "build" / "torch-cpu" / "__init__.py"


def test_published_kernels_come_back_from_the_hub(tmp_path):
    """Pushed as anybody would, and loaded in a fresh process by a drafter that was told to."""
    with running_hub() as hub:
        environment = {**os.environ, **hub.environment(), "HF_HOME": str(tmp_path / "home"), "TRITON_INTERPRET": "0"}
        environment.pop("HF_HUB_OFFLINE", None)
        words = [
            "push",
            "kernels",
            "--repo-id",
            "acme/domino-kernels",
            "--tag",
            "v1",
            "--output",
            str(tmp_path / "staged"),
        ]
        pushed = subprocess.run(
            [sys.executable, "-m", "modeling_domino.cli", *words, "--execute"],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert pushed.returncode == 0, pushed.stderr
        files = hub.files("acme/domino-kernels", "v1", repo_type="kernel")
        assert {"README.md", "LICENSE", "build.toml", "build/torch-cuda/metadata.json"} <= files.keys()
        loaded = subprocess.run(
            [
                sys.executable,
                "-c",
                "from modeling_domino import kernels_domino\n"
                "module, source, reason = kernels_domino._find('acme/domino-kernels')\n"
                "print(source, reason, module.__file__)",
            ],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert loaded.returncode == 0, loaded.stderr
        assert loaded.stdout.startswith("acme/domino-kernels, version 1 None ")
        assert str(tmp_path / "home") in loaded.stdout
