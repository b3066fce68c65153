"""The target and the drafter that a command names: found, loaded and introduced."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from modeling_domino import DominoDraftModel
from modeling_domino.default_pair import (
    default_target_folder,
    load_default_drafter,
    load_default_target,
    trained_drafter_folder,
)
from modeling_domino.record_domino import name_of


HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass
class Pair:
    """A target with its tokenizer, and a drafter.

    Args:
        trained: whether the drafter is trained; `None` where only its maker knows.
        weights: the folders that the weights were read from, by role.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: DominoDraftModel
    trained: bool | None
    weights: dict[str, Path]


def load_pair(
    target: str | None,
    drafter: str | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    from_hub: bool = False,
    trust_remote_code: bool = False,
) -> Pair:
    """Loads a pair; a part that is not named is the default one's."""
    if target is not None and drafter is None:
        raise ValueError(f"The target {target} needs a drafter that was trained for it: name one with --drafter.")
    require_sources(target, drafter)
    weights = {}
    if drafter is None:
        draft_model, trained, _ = load_default_drafter()
        draft_model = draft_model.to(device=device, dtype=dtype)
        if trained:
            weights["drafter"] = trained_drafter_folder()
    else:
        draft_model, trained = DominoDraftModel.from_pretrained(drafter, dtype=dtype).to(device).eval(), None
        weights["drafter"] = folder_of(drafter)
    if target is None:
        model, tokenizer = load_default_target(from_hub=from_hub, dtype=dtype, device=device)
        weights["target"] = default_target_folder(from_hub=from_hub)
    else:
        loading = {"trust_remote_code": trust_remote_code}
        model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, **loading).to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(target, **loading)
        weights["target"] = folder_of(target)
    return Pair(model, tokenizer, draft_model, trained, weights)


def folder_of(name: str) -> Path:
    """The folder behind a folder's name or a Hub id that has been loaded."""
    return Path(name) if Path(name).is_dir() else Path(cached_file(name, "config.json")).parent


def require_sources(*names: str | None) -> None:
    """Refuses what is neither a folder with a model nor of the form of a Hub id, before the Hub is asked for minutes."""
    for name in names:
        if name is None:
            continue
        if Path(name).is_dir():
            if not (Path(name) / "config.json").is_file():
                raise ValueError(f"The folder {name} has no config.json, so it holds no model.")
        elif name.startswith((".", "~", os.sep)) or not HUB_ID.fullmatch(name):
            here = f"; this checkout has hub_cards/{name}" if Path("hub_cards", name).is_dir() else ""
            raise ValueError(f"There is no folder {name}, and a Hub id has the form ORG/NAME{here}.")


def resolve_device(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """The device and dtype that "auto" stands for: fp32 on a CPU, where equality can be exact, else bf16."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    try:
        where = accelerator if device == "auto" else torch.device(device)
    except RuntimeError:
        raise ValueError(f"`--device` must be auto or name a device such as cpu or cuda, got {device}.") from None
    if where.type not in ("cpu", accelerator.type):
        raise ValueError(f"`--device` must be cpu or {accelerator.type} on this machine, got {device}.")
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"`--dtype` must be auto, float32 or bfloat16, got {dtype}.")
    if dtype == "auto":
        dtype = "float32" if where.type == "cpu" else "bfloat16"
    return where, getattr(torch, dtype)


def introduce(pair: Pair) -> None:
    """Says on standard error what runs, and plainly if the drafter is an untrained one."""
    drafter = f"{name_of(pair.drafter)} ({pair.drafter.describe()})"
    typer.echo(f"target {name_of(pair.target)}, drafter {drafter}", err=True)
    if pair.trained is False:
        typer.echo(
            "The drafter is UNTRAINED: its drafts are noise, so tau stays near 1 and it is slower than plain generation; "
            "the text is the target's all the same.",
            err=True,
        )
