"""The methods of a benchmark: each generates from the ids of one or more prompts and says what `records.py` stores of each.

Methods know nothing of tasks, files and comparisons. Seconds are of the whole generation, of all its prompts together;
rounds are the forwards of the target behind the one that reads the prompts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from ..generation_domino import RULES, open_loop
from ..record_domino import Run, Step, synchronize
from ..tree_domino import TreeShape
from .variants import method_of, options_of


# Greedy decoding and trees have one rule each.
SAMPLED_RULES = RULES[1:]
# The methods that can generate for several prompts at once.
BATCHED = ("plain", "plain-generate", "plain-loop", "dflash", "head-off", "chain")


@dataclass(frozen=True)
class Settings:
    """What all records of a folder share, beside the models.

    Args:
        seed: of every generation.
        thinking: the `enable_thinking` flag of the chat template.
        raw: no chat template.
        rule, verify_width, tree, candidates, draft_vocab, auto_off: see [`stream`]; widths, candidates and vocabulary also
            hold for transformers' loop, where a width of "auto" is the whole block.
        lookup_tokens: drafts of prompt lookup.
        batch_size: prompts that are generated for at once.
    """

    max_new_tokens: int = 256
    seed: int = 0
    thinking: bool = False
    raw: bool = False
    rule: str | None = None
    verify_width: int | str | None = None
    tree: TreeShape | str = field(default_factory=TreeShape)
    candidates: int | None = None
    draft_vocab: int | None = None
    auto_off: bool | None = None
    lookup_tokens: int = 10
    batch_size: int = 1

    def __post_init__(self):
        for name in ("max_new_tokens", "lookup_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.rule not in (None, *SAMPLED_RULES):
            raise ValueError(f"`rule` is that of sampled chains: {', '.join(SAMPLED_RULES)}, got {self.rule}.")


def with_options(settings: Settings, options: dict[str, str | int]) -> Settings:
    """The settings of a variant."""
    changed = {name.replace("-", "_"): value for name, value in options.items() if not name.startswith("tree-")}
    if "auto_off" in changed:
        changed["auto_off"] = changed["auto_off"] == "on"
    shape = {name.removeprefix("tree-"): value for name, value in options.items() if name.startswith("tree-")}
    if shape.get("nodes") == "auto":
        changed["tree"] = "auto"
    elif shape:
        changed["tree"] = replace(TreeShape() if settings.tree == "auto" else settings.tree, **shape)
    return replace(settings, **changed)


@dataclass
class Models:
    """The models of a run; `dflash` and `assistant` are optional."""

    target: Any
    tokenizer: Any
    drafter: Any
    dflash: Any = None
    assistant: Any = None


@dataclass
class Measured:
    """What one prompt got from a generation.

    Args:
        accepted: accepted drafts of each round.
        drafted: drafts that stood one after the other in each round (of a tree its depth); `None` if unknown.
        stage_seconds: of all rounds, by stage; without the reading of the prompt.
    """

    output_ids: list[int]
    accepted: list[int]
    seconds: float
    first_token_seconds: float
    drafted: list[int] | None = None
    stage_seconds: dict[str, float] = field(default_factory=dict)


def generation_options(temperature: float, max_new_tokens: int) -> dict[str, Any]:
    """Options that hold for every method; the target's own sampling defaults are overridden."""
    if temperature < 0:
        raise ValueError(f"The temperature must be 0 (greedy) or positive, got {temperature}.")
    if temperature == 0:
        return {"max_new_tokens": max_new_tokens, "do_sample": False}
    return {
        "max_new_tokens": max_new_tokens,
        "do_sample": True,
        "temperature": temperature,
        "top_k": 0,
        "top_p": 1.0,
    }


def generate(models: Models, method: str, inputs, options: dict[str, Any], settings: Settings) -> list[Measured]:
    """One generation with one method or variant; `inputs` are padded on the left if they hold several prompts."""
    settings = with_options(settings, options_of(method))
    rule = settings.rule if options["do_sample"] else None
    common = {name: getattr(settings, name) for name in ("verify_width", "candidates", "draft_vocab", "auto_off")}
    chain = {"rule": rule, **common}
    match method_of(method):
        case "plain-generate":
            return by_generate(models, inputs, options)
        case "plain-loop":
            return by_stream(models, models.drafter, inputs, options, verify_width=0)
        case "prompt-lookup":
            return by_generate(models, inputs, options, prompt_lookup_num_tokens=settings.lookup_tokens)
        case "assistant":
            return by_generate(models, inputs, options, assistant_model=models.assistant)
        case "dflash":
            return by_stream(models, models.dflash, inputs, options, **chain)
        case "head-off":
            models.drafter.use_head = False
            try:
                return by_stream(models, models.drafter, inputs, options, **chain)
            finally:
                models.drafter.use_head = True
        case "chain":
            return by_stream(models, models.drafter, inputs, options, **chain)
        case "tree":
            return by_stream(models, models.drafter, inputs, options, tree=settings.tree, **common)
        case "chain-stock":
            return by_assistant(models, inputs, options, settings)
    raise ValueError(f"There is no method {method}.")


def by_generate(models: Models, inputs, options: dict[str, Any], **extras) -> list[Measured]:
    """A generation by `target.generate`; its rounds are what it hands to a streamer, which serves one prompt only."""
    batch, prompt = inputs["input_ids"].shape
    clock = _TokenClock() if batch == 1 else _StepClock()
    watch = {"streamer": clock} if batch == 1 else {"stopping_criteria": StoppingCriteriaList([clock])}
    started = time.perf_counter()
    output = models.target.generate(**inputs, **options, **extras, **watch)
    synchronize(models.target.device)
    seconds = time.perf_counter() - started
    stops = models.target.generation_config.eos_token_id
    stops = set(stops if isinstance(stops, list) else [stops])
    texts = [_until_stop(row, stops) for row in output[:, prompt:].tolist()]
    counts = [clock.counts] if batch == 1 else [[1] * len(text) for text in texts]
    return [
        Measured(
            output_ids=text,
            accepted=[count - 1 for count in counted[1:]],
            seconds=seconds,
            first_token_seconds=clock.first - started,
        )
        for text, counted in zip(texts, counts)
    ]


def by_assistant(models: Models, inputs, options: dict[str, Any], settings: Settings) -> list[Measured]:
    """A generation by transformers' loop with our drafter, which takes its options from its config."""
    config = models.drafter.config
    before = config.draft_candidates, config.draft_vocab
    for name, value in (("draft_candidates", settings.candidates), ("draft_vocab", settings.draft_vocab)):
        if value is not None:
            setattr(config, name, value)
    width = {"num_assistant_tokens": settings.verify_width} if type(settings.verify_width) is int else {}
    try:
        (measured,) = by_generate(models, inputs, options, assistant_model=models.drafter, **width)
    finally:
        config.draft_candidates, config.draft_vocab = before
    return [_with_run(measured, models.drafter.last_run)]


def by_stream(models: Models, drafter, inputs, options: dict[str, Any], **extras) -> list[Measured]:
    """A generation by our loop."""
    started = time.perf_counter()
    first = None
    for _ in open_loop(models.target, drafter, **inputs, **options, **extras).steps():
        if first is None:
            first = time.perf_counter() - started
    synchronize(models.target.device)
    seconds = time.perf_counter() - started
    return [_with_run(Measured(run.output_ids, [], seconds, first), run) for run in drafter.last_runs]


def _with_run(measured: Measured, run: Run) -> Measured:
    """Takes rounds and stages from the drafter's own record; stages and "other" add up to the rounds."""
    measured.accepted = run.accepted
    measured.drafted = [_depth(step) for step in run.rounds]
    stages: dict[str, float] = {}
    for step in run.rounds:
        for stage, seconds in step.stage_seconds.items():
            stages[stage] = stages.get(stage, 0.0) + seconds
    if stages:
        stages["other"] = max(0.0, measured.seconds - measured.first_token_seconds - sum(stages.values()))
    measured.stage_seconds = stages
    return measured


def _until_stop(ids: list[int], stops: set[int]) -> list[int]:
    """A text up to its first stop token; what follows in a batch is padding."""
    end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
    return ids[:end]


def _depth(step: Step) -> int:
    if step.parents is None:
        return len(step.draft_ids)
    depths: list[int] = []
    for parent in step.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


class _TokenClock:
    """A streamer that notes when the first token came and how many came at once; the first call brings the prompt."""

    def __init__(self):
        self.counts: list[int] = []
        self.first = 0.0
        self._prompt_seen = False

    def put(self, ids: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        if not self.counts:
            self.first = time.perf_counter()
        self.counts.append(ids.numel())

    def end(self) -> None:
        """Nothing is held back."""


class _StepClock(StoppingCriteria):
    """A criterion that never stops, and notes when the first tokens of a batch were there."""

    def __init__(self):
        self.first = 0.0

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        self.first = self.first or time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
