"""Serving: the flat export that SGLang reads, and the command that starts its server with it.

SGLang executes the correction head under the algorithm DFLASH. vLLM and TensorRT-LLM have no merged runtime that does, so a drafter
served there would be another one; they are refused.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .configuration_domino import DominoConfig
from .convert import convert


ENGINES = ("sglang", "vllm", "tensorrt-llm")
WITHOUT_HEAD = {"vllm": "vLLM", "tensorrt-llm": "TensorRT-LLM"}

# What a flat export consists of, and what tells its config from a target's.
FLAT_KEYS = ("dflash_config", "block_size")
EXPORTED = {"config.json", "model.safetensors", "draft_vocab.json"}


def require_engine(engine: str) -> None:
    """Refuses an engine that does not execute the correction head.

    Raises:
        ValueError: with what serves a drafter instead.
    """
    if engine in WITHOUT_HEAD:
        raise ValueError(
            f"No merged runtime of {WITHOUT_HEAD[engine]} executes the correction head of a Domino drafter; serve it with --engine "
            "sglang, or generate with transformers."
        )
    if engine not in ENGINES:
        raise ValueError(f"`--engine` must be one of {', '.join(ENGINES)}, got {engine}.")


def export_flat(drafter: str, folder: Path) -> Path:
    """The flat export of a drafter: the folder of one that is flat already, else `folder`, which is written or replaced.

    Raises:
        ValueError: if it is no drafter, or one that cannot be exported.
    """
    if (Path(drafter) / "config.json").is_file():
        config = _read_config(Path(drafter))
        if config.get("model_type") == "qwen3":
            if not _is_drafter(config):
                raise ValueError(
                    f"The config of a flat Domino or DFlash drafter has {' or '.join(FLAT_KEYS)}, that in {drafter} has neither "
                    "(a plain Qwen3 model?); name the drafter's folder, and the target with --target."
                )
            return Path(drafter)
    if folder.exists() and any(folder.iterdir()) and not _is_export(folder):
        raise ValueError(
            f"`--output` replaces only an earlier export of its own, and {folder} is not that; name a new folder."
        )
    convert(drafter, folder, to="flat", force=_is_export(folder))
    return folder


def _is_export(folder: Path) -> bool:
    """Whether a folder holds what `export_flat` writes, and nothing else."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not {"config.json"} <= names <= EXPORTED:
        return False
    return _is_drafter(_read_config(folder))


def _is_drafter(config: dict[str, Any]) -> bool:
    return any(key in config for key in FLAT_KEYS)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON ({error}); copy or save it again.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(config).__name__}; copy or save it again.")
    return config


def sglang_command(target: str | None, flat: Path, extra: Sequence[str] = ()) -> list[str]:
    """The words that start SGLang's server for a target with the drafter in `flat`.

    Args:
        target (`str`, *optional*): Hub id or folder; by default the one that the drafter's config names.
        extra: further arguments of SGLang.

    Raises:
        ValueError: if no target is known.
    """
    target = target or DominoConfig.from_pretrained(flat).target_model
    if target is None:
        raise ValueError(f"The drafter in {flat} does not name its target; name it with --target.")
    return [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", target, "--dtype", "bfloat16"),
        *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(flat), *extra),
    ]


def shown(command: Sequence[str]) -> str:
    """A command as a user types it."""
    return shlex.join(["python", *command[1:]])


def run(command: Sequence[str]) -> int:
    """Runs the server until it ends; returns its exit status.

    Raises:
        ValueError: if SGLang is not installed.
    """
    if find_spec("sglang") is None:
        raise ValueError(
            "SGLang is not installed here; install it as its guide says, or run the printed command where it is."
        )
    return subprocess.run(command).returncode
