"""Prompts of the benchmark tasks: local JSONL files, the package's own small samples, or datasets of the Hub.

A prompt is an id and its user turns. Templates and tokenizers are not known here. The Hub's datasets are formatted as
in the evaluation of DFlash (https://huggingface.co/papers/2602.06036), whose numbers they shall compare with.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


BOXED = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
CODE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"

# Arguments of `datasets.load_dataset`, the task's rows.
HUB_DATASETS: dict[str, tuple[tuple[str, ...], str]] = {
    "gsm8k": (("openai/gsm8k", "main"), "test"),
    "math500": (("HuggingFaceH4/MATH-500",), "test"),
    "aime25": (("MathArena/aime_2025",), "train"),
    "humaneval": (("openai/openai_humaneval",), "test"),
    "mbpp": (("google-research-datasets/mbpp", "sanitized"), "test"),
    "livecodebench": (("livecodebench/code_generation_lite",), "test"),
    "mt-bench": (("HuggingFaceH4/mt_bench_prompts",), "train"),
    "alpaca": (("tatsu-lab/alpaca",), "train"),
}
TASKS = tuple(HUB_DATASETS)
DEV_PROMPTS = Path(__file__).parent / "dev_prompts"


@dataclass(frozen=True)
class Prompt:
    """One conversation: its user turns, asked one after the other."""

    id: str
    turns: tuple[str, ...]


def load_prompts(
    task: str, source: str | Path = "dev", *, max_samples: int | None = None, seed: int = 0
) -> list[Prompt]:
    """The prompts of a task.

    Args:
        task (`str`): name of a file `<task>.jsonl`, or one of `TASKS` on the Hub.
        source: "dev" (the samples in this package), "hub", or a folder with files `<task>.jsonl`.
        max_samples (`int`, *optional*): of a file the first ones; of a dataset, whose rows are often sorted by subject, a
            sample that depends on `seed` only.

    Raises:
        ValueError: for an unknown task, an empty one or a malformed line, which is named.
        ImportError: if a dataset is asked for and `datasets` is not installed.
    """
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"The number of samples must be at least 1, got {max_samples}.")
    if source == "hub":
        prompts = _load_dataset(task)
        if max_samples is not None and max_samples < len(prompts):
            chosen = sorted(random.Random(seed).sample(range(len(prompts)), max_samples))
            return [prompts[i] for i in chosen]
        return prompts
    folder = DEV_PROMPTS if source == "dev" else Path(source)
    known = ", ".join(tasks_of_folder(source)) or "none"
    file = folder / f"{task}.jsonl"
    if not file.is_file():
        raise ValueError(
            f"There is no task {task} in {'the dev prompts' if source == 'dev' else source}; known: {known}."
        )
    return read_prompts(file)[:max_samples]


def context_prompts(
    lengths: Iterable[int], tokenizer, source: str | Path = "dev", *, count: int = 1
) -> dict[str, list[Prompt]]:
    """Tasks `context-N` whose prompts have about N tokens: how the cost of a round grows with the context.

    The text is that of all prompts of `source`, one behind the other; it asks for nothing in particular.

    Args:
        lengths: numbers of tokens.
        tokenizer: the target's.
        count (`int`): prompts of each length, which begin at different places.
    """
    texts = [
        turn for task in tasks_of_folder(source) for prompt in load_prompts(task, source) for turn in prompt.turns
    ]
    ids = tokenizer("\n\n".join(texts), add_special_tokens=False)["input_ids"]
    tasks = {}
    for length in lengths:
        if length < 1:
            raise ValueError(f"A context must have at least 1 token, got {length}.")
        starts = [len(ids) * i // count for i in range(count)]
        rows = [(ids[start:] + ids * (1 + length // len(ids)))[:length] for start in starts]
        name = f"context-{length}"
        tasks[name] = [Prompt(f"{name}/{i}", (tokenizer.decode(row),)) for i, row in enumerate(rows)]
    return tasks


def tasks_of_folder(source: str | Path) -> list[str]:
    """The tasks with a file in a folder, or of "dev"; those of the papers first, in their order."""
    folder = DEV_PROMPTS if source == "dev" else Path(source)
    if not folder.is_dir():
        raise ValueError(f"There is no folder {source} with prompts; name one, or dev, or hub.")
    found = {path.stem for path in folder.glob("*.jsonl")}
    return [*(task for task in TASKS if task in found), *sorted(found - set(TASKS))]


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts of a JSONL file with `id` and `turns`; errors name file and line."""
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file.name}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno}).") from None
        turns = row.get("turns") if isinstance(row, dict) else None
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise ValueError(f"{where}: `turns` must be a list of one or more non-empty strings.")
        if not isinstance(row.get("id"), str | int):
            raise ValueError(f"{where}: `id` must be a string, it names the prompt in the records.")
        prompt = Prompt(str(row["id"]), tuple(turns))
        if prompt.id in prompts:
            raise ValueError(f"{where}: the id {prompt.id} was there before; ids must be unique.")
        prompts[prompt.id] = prompt
    if not prompts:
        raise ValueError(f"{file.name} holds no prompts.")
    return list(prompts.values())


def turns_of(task: str, row: dict[str, Any]) -> list[str]:
    """The user turns of one row of a task's dataset."""
    match task:
        case "gsm8k":
            return [BOXED.format(row["question"])]
        case "math500" | "aime25":
            return [BOXED.format(row["problem"])]
        case "humaneval":
            return [CODE.format(row["prompt"])]
        case "mbpp":
            return [row["prompt"]]
        case "mt-bench":
            return list(row["prompt"])
        case "alpaca":
            return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]]
        case "livecodebench":
            return [_code_contest(row)]
    raise ValueError(f"There is no task {task}; known: {', '.join(TASKS)}.")


def _code_contest(row: dict[str, Any]) -> str:
    starter = row.get("starter_code")
    how = "Use the following code structure" if starter else "Write your code in the following format"
    return "\n\n".join(
        [
            "You are an expert Python programmer. You will be given a question (problem specification) and will generate "
            "a correct Python program that matches the specification and passes all tests. You will NOT return anything "
            "except for the program",
            f"### Question:\n{row['question_content']}",
            f"### Format: {how}:\n```python\n{starter or '# YOUR CODE HERE'}\n```",
            "### Answer: (use the provided format with backticks)",
        ]
    )


def _load_dataset(task: str) -> list[Prompt]:
    if task not in HUB_DATASETS:
        raise ValueError(f"There is no task {task} on the Hub; known: {', '.join(TASKS)}.")
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError(
            f"Loading {task} from the Hub needs the package datasets, which is not installed: run `pip install "
            "datasets`, or take local prompts with --prompts."
        ) from None
    name, split = HUB_DATASETS[task]
    if task == "livecodebench":
        # The repository's own loader is a script, which `datasets` no longer runs; its files are read as they are.
        files = [f"hf://datasets/{name[0]}/test{number}.jsonl" for number in ("", 2, 3, 4, 5, 6)]
        rows: Iterable[dict[str, Any]] = load_dataset("json", data_files={split: files}, split=split)
    else:
        rows = load_dataset(*name, split=split)
    return [Prompt(f"{task}/{number}", tuple(turns_of(task, row))) for number, row in enumerate(rows)]
