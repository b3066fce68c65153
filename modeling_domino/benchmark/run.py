"""Runs a benchmark: every method on every prompt, one raw record each, resumable at any point.

All methods of a prompt run one after the other, so that a machine that slows down slows them all. The plain baseline is
measured twice, with `target.generate` and with our own loop without drafts; the report takes the faster of the two.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from ..record_domino import name_of
from .machine import forget_peak_memory, peak_memory_mb
from .methods import BATCHED, Measured, Models, Settings, generate, generation_options
from .prompts import Prompt
from .records import RecordFile, check_settings, key_of, read_records, write_provenance
from .summary import METHODS, PLAIN, place_of
from .variants import method_of, options_of


WARM_UP_TOKENS = 8


def run_benchmark(
    models: Models,
    tasks: dict[str, list[Prompt]],
    methods: list[str],
    temperatures: list[float],
    settings: Settings,
    out: Path,
    *,
    about: dict[str, Any],
    session: dict[str, Any],
    shard: tuple[int, int] = (0, 1),
    notify: Callable[[str], None] = lambda line: None,
) -> None:
    """Measures what `out` does not hold yet.

    Args:
        about: facts that all records must share beside `settings`: models, weights, versions, machine.
        session: the provenance of this call.
        shard: this process's number and the number of processes; each takes every n-th prompt.
        notify: told the progress, one line at a time.

    Raises:
        ValueError: if a method is unknown or lacks its model, a prompt does not fit the context, or `out` holds records
            that were made with other settings or prompts.
    """
    methods = expand_methods(methods, models)
    if 0 in temperatures and (ruled := [method for method in methods if "rule" in options_of(method)]):
        raise ValueError(
            f"Greedy decoding has one rule, got {', '.join(ruled)} at temperature 0; leave one of them out."
        )
    if settings.batch_size > 1 and (single := [method for method in methods if method_of(method) not in BATCHED]):
        raise ValueError(
            f"In batches run {', '.join(BATCHED[1:])}, got {', '.join(single)} with a batch size of {settings.batch_size}; "
            "leave them out, or measure them one prompt at a time."
        )
    rank, world = shard
    shared = {**about, "settings": asdict(settings), "context": context_size(models.target)}
    # Before the first token: a prompt that cannot run shall not end an hour of work.
    for task, prompts in tasks.items():
        for prompt in prompts:
            check_length(task, prompt.id, 0, encode_turns(models.tokenizer, prompt.turns[:1], [], settings), models)
    check_settings(out, shared)
    if rank == 0:
        write_provenance(out, shared, session)
    done = {key_of(record): record for record in read_records(out)}
    file = RecordFile(out / ("records.jsonl" if world == 1 else f"records-{rank}.jsonl"))
    warm = False
    try:
        for task, prompts in tasks.items():
            for temperature in temperatures:
                own = prompts[rank::world]
                for start in range(0, len(own), settings.batch_size):
                    batch = own[start : start + settings.batch_size]
                    for job in _jobs(models, task, batch, methods, temperature, settings, done):
                        if not warm:
                            _warm_up(models, methods, job, settings)
                            warm = True
                        for number, record in enumerate(job.measure(models, settings), start=start + 1):
                            file.append(record)
                            done[key_of(record)] = record
                            place = f"{task} T={temperature:g} {number}/{len(own)} {record['id']}"
                            notify(f"{place} turn {job.turn} {job.method}: {_in_short(record)}")
    finally:
        file.close()


def require_methods(methods: list[str], given: Mapping[str, Any]) -> None:
    """Refuses unknown methods, and those whose own model is not given; needs no model loaded."""
    unknown = [method for method in methods if method_of(method) not in METHODS]
    if unknown:
        raise ValueError(f"There is no method {', '.join(unknown)}; known: {', '.join(METHODS)}.")
    for method in methods:
        options_of(method)
    for method, model in given.items():
        if method in map(method_of, methods) and model is None:
            raise ValueError(f"The method {method} needs a model: name one with --{method}.")


def expand_methods(methods: list[str], models: Models) -> list[str]:
    """Checks the methods' names and models; plain generation always comes first, in its two forms."""
    require_methods(methods, {"dflash": models.dflash, "assistant": models.assistant})
    if "head-off" in map(method_of, methods) and not models.drafter.config.has_head:
        raise ValueError("The method head-off needs a drafter with a Domino head, this one has none; leave it out.")
    return [*PLAIN, *sorted({*methods} - {"plain"}, key=place_of)]


@dataclass
class _Job:
    """One generation: a record for each of its prompts."""

    task: str
    ids: list[str]
    turn: int
    method: str
    temperature: float
    inputs: list[Any]
    plain_ids: list[list[int] | None]

    @property
    def keys(self) -> list[tuple]:
        """Those of its records."""
        return [(self.task, id, self.turn, self.method, self.temperature) for id in self.ids]

    def measure(self, models: Models, settings: Settings) -> list[dict[str, Any]]:
        longest = max(inputs["input_ids"].shape[1] for inputs in self.inputs)
        new_tokens = min(settings.max_new_tokens, context_size(models.target) - longest)
        options = generation_options(self.temperature, new_tokens)
        device = models.target.device
        forget_peak_memory(device)
        torch.manual_seed(settings.seed)
        measured = generate(models, self.method, *batch_inputs(models, self.inputs, options), settings)
        peak = peak_memory_mb(device)
        return [self._record(i, each, models, settings, peak) for i, each in enumerate(measured)]

    def _record(self, i: int, measured: Measured, models: Models, settings: Settings, peak) -> dict[str, Any]:
        plain_ids, prompt_ids = self.plain_ids[i], self.inputs[i]["input_ids"]
        compared = self.temperature == 0 and self.method != PLAIN[0]
        difference, differing = None, 0
        if compared:
            difference = first_difference(models.target, prompt_ids, plain_ids, measured.output_ids)
            differing = count_differing(plain_ids, measured.output_ids)
        return {
            "task": self.task,
            "id": self.ids[i],
            "turn": self.turn,
            "method": self.method,
            "temperature": self.temperature,
            "seed": settings.seed,
            "batch": len(self.ids),
            "prompt_tokens": prompt_ids.shape[1],
            "prompt_sha256": sha256_of_ids(prompt_ids[0].tolist()),
            "new_tokens": len(measured.output_ids),
            "rounds": len(measured.accepted),
            "accepted": measured.accepted,
            "drafted": measured.drafted,
            "seconds": round(measured.seconds, 6),
            "first_token_seconds": round(measured.first_token_seconds, 6),
            "stage_seconds": {stage: round(value, 6) for stage, value in measured.stage_seconds.items()},
            "peak_memory_mb": peak,
            "output_ids": measured.output_ids,
            "output_sha256": sha256_of_ids(measured.output_ids),
            # Two samples of one law differ; that the laws are equal is for the tests to show.
            "identical": difference is None if compared else None,
            "first_difference": difference,
            "tokens_compared": max(len(plain_ids), len(measured.output_ids)) if compared else 0,
            "tokens_differing": differing,
        }


def _jobs(
    models: Models,
    task: str,
    prompts: list[Prompt],
    methods: list[str],
    temperature: float,
    settings: Settings,
    done: dict[tuple, dict[str, Any]],
) -> Iterator[_Job]:
    """What is missing for the prompts of a batch. Every method answers the same text: later turns follow plain
    generation's answers.
    """
    answers: list[list[list[int]]] = [[] for _ in prompts]
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        asked = [i for i, prompt in enumerate(prompts) if len(prompt.turns) > turn]
        inputs = {}
        for i in asked:
            inputs[i] = encode_turns(models.tokenizer, prompts[i].turns[: turn + 1], answers[i], settings)
            inputs[i] = inputs[i].to(models.target.device)
            check_length(task, prompts[i].id, turn, inputs[i], models)
        plain_ids: dict[int, list[int] | None] = dict.fromkeys(asked)
        for method in methods:
            job = _Job(
                task,
                [prompts[i].id for i in asked],
                turn,
                method,
                temperature,
                [inputs[i] for i in asked],
                [plain_ids[i] for i in asked],
            )
            # A batch was timed as a whole, so it is measured again as a whole.
            if not all(key in done for key in job.keys):
                yield job
            for i, key in zip(asked, job.keys):
                if done[key]["prompt_sha256"] != sha256_of_ids(inputs[i]["input_ids"][0].tolist()):
                    raise ValueError(
                        f"The record of {prompts[i].id}, turn {turn}, {method} was made with another prompt text; name "
                        "another folder with --out."
                    )
                if method == PLAIN[0]:
                    plain_ids[i] = done[key]["output_ids"]
        for i in asked:
            answers[i].append(plain_ids[i])


def batch_inputs(models: Models, inputs: list[Any], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The inputs of several prompts as one batch, padded on the left, and the options that this takes."""
    if len(inputs) == 1:
        return inputs[0], options
    pad = models.target.generation_config.pad_token_id
    pad = models.tokenizer.pad_token_id if pad is None else pad
    width = max(each["input_ids"].shape[1] for each in inputs)
    rows = {
        name: torch.cat([F.pad(each[name], (width - each[name].shape[1], 0), value=fill) for each in inputs])
        for name, fill in (("input_ids", pad or 0), ("attention_mask", 0))
    }
    return rows, {**options, "pad_token_id": pad or 0}


def encode_turns(tokenizer, turns: tuple[str, ...], answers: list[list[int]], settings: Settings):
    """The ids of a conversation that ends with a user turn."""
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    if settings.raw:
        parts = [part for pair in zip(turns, [*texts, ""]) for part in pair if part]
        return tokenizer("\n\n".join(parts), return_tensors="pt", return_token_type_ids=False)
    if not tokenizer.chat_template:
        raise ValueError("The tokenizer has no chat template; pass --raw to use the prompts as they are.")
    chat = [{"role": "user", "content": turns[0]}]
    for text, turn in zip(texts, turns[1:]):
        chat += [{"role": "assistant", "content": text}, {"role": "user", "content": turn}]
    return tokenizer.apply_chat_template(
        chat,
        add_generation_prompt=True,
        enable_thinking=settings.thinking,
        return_tensors="pt",
        return_dict=True,
    )


def context_size(target) -> int:
    """Most tokens the target reads, the generated ones included."""
    return target.config.get_text_config().max_position_embeddings


def check_length(task: str, id: str, turn: int, inputs, models: Models) -> None:
    """Refuses a prompt that leaves no room for a token."""
    length, context = inputs["input_ids"].shape[1], context_size(models.target)
    if length >= context:
        raise ValueError(
            f"The prompt {id} of {task}, turn {turn}, has {length} tokens, the target reads at most {context}: leave the "
            "prompt out."
        )


def first_difference(target, prompt_ids: torch.Tensor, plain: list[int], other: list[int]) -> dict[str, Any] | None:
    """Where two greedy texts part, and how close the target's call was there; `None` if they are equal."""
    if plain == other:
        return None
    position = next((i for i, (a, b) in enumerate(zip(plain, other)) if a != b), min(len(plain), len(other)))
    if position == min(len(plain), len(other)):
        return {"position": position, "logit_gap": None}
    ids = torch.cat([prompt_ids, prompt_ids.new_tensor([plain[:position]])], dim=1)
    with torch.no_grad():
        logits = target(input_ids=ids).logits[0, -1].float()
    return {"position": position, "logit_gap": round((logits[plain[position]] - logits[other[position]]).item(), 4)}


def count_differing(plain: list[int], other: list[int]) -> int:
    """Positions at which two texts do not hold the same token."""
    return sum(a != b for a, b in zip(plain, other)) + abs(len(plain) - len(other))


def sha256_of_ids(ids: list[int]) -> str:
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()


def model_name(model) -> str:
    """The model's id, or the name of the folder it was loaded from: records name no path of a machine."""
    name = name_of(model)
    return Path(name).name if os.path.isabs(name) or name.startswith((".", "~")) else name


def models_facts(models: Models) -> dict[str, Any]:
    """What the report says of the models, and what all records of a folder share."""
    drafter, dflash = models.drafter, models.dflash
    return {
        "target": model_name(models.target),
        "drafter": model_name(drafter),
        "kind": drafter.describe(),
        "block_size": drafter.config.block_size,
        "drafts_per_round": {
            "drafter": drafter.config.num_draft_tokens,
            "dflash": None if dflash is None else dflash.config.num_draft_tokens,
        },
        "dflash": None if dflash is None else model_name(dflash),
        "assistant": None if models.assistant is None else model_name(models.assistant),
    }


def shard_of_process() -> tuple[int, int]:
    """Number of this process and of all, under `accelerate launch` or `torchrun`; (0, 1) elsewhere."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    from accelerate import PartialState

    # Without an accelerator it would take itself for the only process unless told.
    state = PartialState(cpu=not torch.accelerator.is_available())
    return state.process_index, state.num_processes


def wait_for_all(shard: tuple[int, int]) -> None:
    """Waits until every process has written its records."""
    if shard[1] > 1:
        from accelerate import PartialState

        PartialState().wait_for_everyone()


def _warm_up(models: Models, methods: list[str], job: _Job, settings: Settings) -> None:
    """Runs every method briefly; what that takes is not recorded."""
    for method in methods:
        options = generation_options(job.temperature, WARM_UP_TOKENS)
        generate(models, method, *batch_inputs(models, job.inputs, options), settings)


def _in_short(record: dict[str, Any]) -> str:
    rounds = record["rounds"]
    tau = f"{1 + sum(record['accepted']) / rounds:.2f}" if rounds else "-"
    differs = "" if record["identical"] is not False else ", DIFFERS"
    return f"{record['new_tokens']} tokens in {record['seconds']:.2f} s, tau {tau}{differs}"
