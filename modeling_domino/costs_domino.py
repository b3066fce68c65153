"""The cost of a round by its size, measured once for a machine and a pair, and kept.

A forward of a few rows costs a GPU next to nothing more than one of a single row, and a CPU up to their number times as
much, so the size of a draft that pays is a fact of the machine. The measurement takes some seconds; its result lies as a
JSON file in a folder of the Hugging Face cache (`HF_HOME/modeling_domino/costs`, or the folder named by `DOMINO_CACHE`)
and holds until models, options, threads or torch change. Delete the file to have it measured again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import DynamicCache

from .cache_domino import DominoCache, cache_keyword, drop_last, start_recording
from .drafting_domino import DraftOptions, draft_chain, draft_tree
from .grouped_domino import grouped_heads
from .packed_domino import packed_pair
from .record_domino import StageClock, name_of, synchronize
from .sizing_domino import Costs
from .taps_domino import TargetTaps
from .target_domino import TargetView
from .tree_domino import TreeShape


logger = logging.getLogger(__name__)

VERSION = 2
# Sizes of a verification that are measured, as far as a run needs them.
SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 65, 96, 128, 256)
# Context behind which is measured: a middling one, since the file serves all.
CONTEXT = 256
REPEATS = 3

# Of this process, for folders that cannot be written.
_KNOWN: dict[str, Costs] = {}


def costs_of(view: TargetView, drafter, options: DraftOptions, *, rows: int, tree: TreeShape | None = None) -> Costs:
    """The costs of rounds of this pair on this machine, measured if they are not known.

    Args:
        view (`TargetView`), drafter (`DominoDraftModel`): the pair.
        options ([`DraftOptions`]): of the drafts.
        rows (`int`): most rows of a verification.
        tree ([`TreeShape`], *optional*): of the drafts; chains otherwise.

    Returns:
        [`Costs`].
    """
    facts = facts_of(view, drafter, options, tree)
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    path = costs_folder() / f"{key}.json"
    known = _KNOWN.get(key) or _read(path)
    if known is None or max(known.verify) < min(rows, SIZES[-1]):
        logger.warning("Measuring what rounds of %s and %s cost here, once.", facts["target"], facts["drafter"])
        known = measure_costs(view, drafter, options, rows=rows, tree=tree)
        _write(path, known, facts)
    _KNOWN[key] = known
    return known


def costs_folder() -> Path:
    """Where the measurements lie."""
    root = os.environ.get("DOMINO_CACHE")
    # Unlike `Path.expanduser`, this leaves a user that nobody knows as it is.
    return Path(os.path.expanduser(root or Path(constants.HF_HOME, "modeling_domino")), "costs")


def facts_of(view: TargetView, drafter, options: DraftOptions, tree: TreeShape | None) -> dict[str, Any]:
    """What the costs depend on."""
    target, device = view.target, view.target.device
    return {
        "version": VERSION,
        "target": name_of(target),
        "target_class": type(target).__name__,
        "target_parameters": sum(parameter.numel() for parameter in target.parameters()),
        "dtype": str(target.dtype),
        "attention": target.config.get_text_config()._attn_implementation,
        "drafter": name_of(drafter),
        "drafter_dtype": str(drafter.dtype),
        "block_size": drafter.config.block_size,
        "drafter_parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        "head": drafter.head_state,
        "candidates": options.candidates,
        "draft_vocab": None if options.vocabulary is None else len(options.vocabulary),
        "tree": None if tree is None else [tree.nodes, tree.lanes, tree.candidates, tree.children],
        "prepack": drafter.prepack,
        "machine": _machine(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{platform.node()} {device.type}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model} x {os.cpu_count()}"


@torch.no_grad()
def measure_costs(
    view: TargetView, drafter, options: DraftOptions, *, rows: int, tree: TreeShape | None = None
) -> Costs:
    """The same as [`costs_of`], always measured: the fastest of some calls, which other work disturbs least."""
    target, device = view.target, view.target.device
    ids = torch.full((1, CONTEXT), drafter.config.mask_token_id, device=device)
    keyword, cache = cache_keyword(target), DynamicCache(config=target.config.get_text_config())
    taps = TargetTaps(view.layers, drafter.config.target_layer_ids)

    def forward(size: int, start: int, num_logits: int):
        kwargs = {keyword: cache, **taps.forward_kwargs, **view.logits_of_last(num_logits)}
        positions = torch.arange(start, start + size, device=device)[None]
        taps.listen()
        return target(input_ids=ids[:, :size], position_ids=positions, use_cache=True, **kwargs)

    def verify(size: int):
        forward(size, CONTEXT, size)
        drop_last(cache, size)

    # Up to the first size that covers all rows.
    sizes = [size for i, size in enumerate(SIZES) if i == 0 or SIZES[i - 1] < rows]
    with taps, packed_pair(target, drafter, prepack=drafter.prepack), grouped_heads(target):
        start_recording(cache)
        outputs = forward(CONTEXT, 0, 1)
        context = taps.read(outputs, device=drafter.device).to(drafter.dtype)
        drop_last(cache, 0)
        seconds = {size: _fastest(lambda size=size: verify(size), device) for size in sizes}
        draft = _drafting(view, drafter, options, context, tree)
        if tree is not None:
            return Costs(seconds, _fastest(lambda: draft(drafter.config.num_draft_tokens), device))
        most = drafter.config.num_draft_tokens
        one, all_of_them = (_fastest(lambda number=number: draft(number), device) for number in (1, most))
    per_draft = max(0.0, all_of_them - one) / max(1, most - 1)
    return Costs(seconds, max(0.0, one - per_draft), per_draft)


def _drafting(view, drafter, options, context: torch.Tensor, tree: TreeShape | None) -> Callable[[int], Any]:
    """A function that drafts so many tokens behind `context`, as in the middle of a text."""
    device, store, clock = drafter.device, DominoCache(), StageClock(drafter.device)
    drafter.append_context(context, torch.arange(CONTEXT, device=device)[None], store)
    anchor = torch.full((1, 1), drafter.config.mask_token_id, device=view.target.device)

    def draft(number: int):
        past = store.get_seq_length()
        inputs = {
            "prefix_ids": anchor,
            "context_hidden_states": context[:, :2],
            "position_ids": torch.arange(past, past + 2 + drafter.config.block_size, device=device)[None],
            "clock": clock,
            "options": options,
        }
        if tree is None:
            return draft_chain(drafter, view, store, num_drafts=number, **inputs)
        return draft_tree(drafter, view, store, shape=tree, max_depth=number, **inputs)

    return draft


def _fastest(work: Callable[[], Any], device: torch.device) -> float:
    best = float("inf")
    # The first call warms up.
    for attempt in range(REPEATS + 1):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        if attempt > 0:
            best = min(best, time.perf_counter() - started)
    return best


def _read(path: Path) -> Costs | None:
    """The costs in a file; `None` if there is none or it cannot be used, which a new measurement mends."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        verify = {int(rows): float(seconds) for rows, seconds in content["verify_seconds"].items()}
        return Costs(verify, float(content["draft_seconds"]), float(content["seconds_per_draft"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None


def _write(path: Path, costs: Costs, facts: dict[str, Any]) -> None:
    content = {
        "verify_seconds": {str(rows): seconds for rows, seconds in costs.verify.items()},
        "draft_seconds": costs.draft,
        "seconds_per_draft": costs.per_draft,
        "facts": facts,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        scratch.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(scratch, path)
    except OSError as error:
        logger.warning("The measured costs could not be kept in %s (%s): they hold for this process.", path, error)
