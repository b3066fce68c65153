"""Assembles the kernel repository's build: one folder a backend, each complete, with metadata and digest.

    python kernels/build.py [--output FOLDER]

Pure Triton compiles on the user's device, so all backends hold the same sources; `torch-cpu` is the torch functions alone
and imports without triton. `build.toml` is validated by the `kernels` library where that is installed. `ops.py` is
`modeling_domino/ops_domino.py` as it is: kernels and library share one reference.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path


HERE = Path(__file__).resolve().parent
SOURCES = HERE / "torch-ext" / "domino_kernels"
OPS = HERE.parent / "modeling_domino" / "ops_domino.py"
# The first release of the library that reads edition 5.
KERNELS_MINVER = "0.17.0"

OPS_NAMESPACE = '''\
"""The namespace of this build's operations, so that several builds can be loaded side by side."""

import torch


ops = torch.ops.{identity}


def add_op_namespace_prefix(name: str) -> str:
    return f"{identity}::{{name}}"
'''


def sources() -> dict[str, bytes]:
    """Every file of a variant but the generated ones, by name."""
    files = {path.name: path.read_bytes() for path in sorted(SOURCES.glob("*.py"))}
    files["ops.py"] = OPS.read_bytes()
    return files


def digest(files: dict[str, bytes]) -> dict[str, str]:
    """SHA-256 of each file in base64: what the library computes anew from an installed variant."""
    return {name: base64.b64encode(hashlib.sha256(data).digest()).decode() for name, data in sorted(files.items())}


def variant(backend: str, general: dict) -> dict[str, bytes]:
    """All files of one backend."""
    files = sources()
    content = hashlib.sha256(json.dumps(digest(files)).encode()).hexdigest()[:12]
    identity = f"_{general['name'].replace('-', '_')}_{backend}_{content}"
    files["_ops.py"] = OPS_NAMESPACE.format(identity=identity).encode()
    metadata = {
        "name": general["name"],
        "id": identity,
        "version": general["version"],
        "kernels-minver": KERNELS_MINVER,
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digest(files)},
    }
    return {**files, "metadata.json": (json.dumps(metadata, indent=2) + "\n").encode()}


def build(output: Path) -> list[Path]:
    """Writes `output/torch-BACKEND` for every backend of build.toml; an earlier build is replaced whole.

    Raises:
        ValueError: if the kernels library refuses build.toml.
    """
    try:
        from kernels._rust import Build
    except ImportError:
        pass
    else:
        Build.open(HERE)
    general = tomllib.loads((HERE / "build.toml").read_text())["general"]
    output.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place and renamed: there is never half a build.
    work = Path(tempfile.mkdtemp(prefix=".build-", dir=output.parent))
    try:
        for backend in general["backends"]:
            folder = work / f"torch-{backend}"
            folder.mkdir()
            for name, data in variant(backend, general).items():
                (folder / name).write_bytes(data)
        work.chmod(0o755)
        if output.exists():
            shutil.rmtree(output)
        work.rename(output)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return sorted(output.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "build", help="folder to write (default: kernels/build)")
    for folder in build(parser.parse_args().output):
        sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    main()
