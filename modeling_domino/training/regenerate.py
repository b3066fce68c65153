"""`domino regenerate`: prompts answered by the target itself, as sharded, resumable training data.

The drafter must learn the target's own words, under the chat template and at the temperature it will be used with
(https://huggingface.co/papers/2605.29707, section 4: greedy answers). Answers come from transformers in this process, or
from a server that speaks the OpenAI protocol (vLLM, SGLang). A shard is written aside and renamed, so it is whole or
absent; a run that is started again goes on with the first shard that is absent.
"""

from __future__ import annotations

import gzip
import json
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import tqdm

from ..provenance import provenance
from .config import CommandParser
from .data import render_prompt
from .pair import PairArguments, load_target, load_tokenizer


SETTINGS_FILE = "regenerate.json"
THINKING = {"template": None, "on": True, "off": False}

# Ids of an answer and why it ended ("eos" or "length").
Answer = tuple[list[int], str]


@dataclass(frozen=True)
class Decoding:
    """How answers are decoded; part of the settings that a resumed run must share.

    Args:
        target (`str`): Hub id, folder or "default".
        max_new_tokens (`int`): cap of an answer.
        temperature (`float`): 0 for greedy answers.
        thinking (`bool`, *optional*): `enable_thinking` of the chat template; `None` leaves it to the template.
        seed (`int`): of sampled answers, combined with the shard.
    """

    target: str
    max_new_tokens: int = 256
    temperature: float = 0.0
    thinking: bool | None = None
    seed: int = 0

    @property
    def template_kwargs(self) -> dict[str, bool]:
        """What the chat template is told."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking}


def regenerate(
    prompts: list[dict[str, Any]],
    folder: str | Path,
    answer: Callable[[list[list[str]], int], list[Answer]],
    tokenizer,
    decoding: Decoding,
    *,
    shard_size: int = 256,
    progress: bool = True,
) -> list[Path]:
    """Answers `prompts` into shards `answers-00000.jsonl.gz`, ... of `folder`.

    Args:
        prompts: rows with `id` and `turns` (user texts); a second turn is asked after the first is answered.
        answer: takes conversations (user, assistant, ..., user texts) and a seed, gives their answers in order.
        tokenizer: the target's, to put answers into later turns.
        decoding ([`Decoding`]): recorded, and compared with what `folder` was begun with.

    Returns:
        The paths of all shards.

    Raises:
        ValueError: if `folder` was begun with other settings or prompts.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**asdict(decoding), "prompts": len(prompts), "shard_size": shard_size, "first_id": prompts[0]["id"]}
    _begin(folder, settings)
    paths = []
    starts = range(0, len(prompts), shard_size)
    for number, start in enumerate(tqdm(starts, desc="shards", disable=not progress)):
        path = folder / f"answers-{number:05d}.jsonl.gz"
        if not path.exists():
            rows = answer_turns(prompts[start : start + shard_size], answer, tokenizer, decoding.seed + number)
            _write_shard(path, rows)
        paths.append(path)
    return paths


def answer_turns(prompts: list[dict[str, Any]], answer, tokenizer, seed: int) -> list[dict[str, Any]]:
    """Training rows of some prompts, one for each turn: `id` (`id#2` for the second turn), `turns`, `response_ids`, `finish`."""
    rows = []
    talks: dict[str, list[str]] = {prompt["id"]: [] for prompt in prompts}
    for turn in range(max(len(prompt["turns"]) for prompt in prompts)):
        asked = [prompt for prompt in prompts if len(prompt["turns"]) > turn]
        for prompt in asked:
            talks[prompt["id"]].append(prompt["turns"][turn])
        answers = answer([talks[prompt["id"]] for prompt in asked], seed)
        for prompt, (ids, finish) in zip(asked, answers, strict=True):
            name = prompt["id"] if turn == 0 else f"{prompt['id']}#{turn + 1}"
            rows.append({"id": name, "turns": list(talks[prompt["id"]]), "response_ids": ids, "finish": finish})
            talks[prompt["id"]].append(tokenizer.decode(ids, skip_special_tokens=True))
    return rows


def answer_in_process(target, tokenizer, decoding: Decoding, *, batch_size: int = 32):
    """An answerer that runs the target here, in left-padded batches of prompts of similar length."""
    stop = target.generation_config.eos_token_id
    stop_ids = set(stop if isinstance(stop, list) else [stop])
    pad = target.generation_config.pad_token_id
    pad = min(i for i in stop_ids if i is not None) if pad is None and stop_ids != {None} else pad or 0
    options: dict[str, Any] = {"max_new_tokens": decoding.max_new_tokens, "do_sample": False, "pad_token_id": pad}
    if target.device.type == "cpu":
        # The default cache is copied whole for every token, which costs more than the token.
        options.update(cache_implementation="static", disable_compile=True)
    if decoding.temperature > 0:
        options.update(do_sample=True, temperature=decoding.temperature, top_k=0, top_p=1.0)

    @torch.no_grad()
    def answer(talks: list[list[str]], seed: int) -> list[Answer]:
        torch.manual_seed(seed)
        rendered = [render_prompt(tokenizer, turns, **decoding.template_kwargs) for turns in talks]
        order = sorted(range(len(rendered)), key=lambda i: len(rendered[i]))
        answers: dict[int, Answer] = {}
        for chunk in _chunks(order, batch_size):
            width = max(len(rendered[i]) for i in chunk)
            ids = torch.tensor([[pad] * (width - len(rendered[i])) + rendered[i] for i in chunk])
            mask = torch.tensor([[0] * (width - len(rendered[i])) + [1] * len(rendered[i]) for i in chunk])
            output = target.generate(ids.to(target.device), attention_mask=mask.to(target.device), **options)
            for i, tokens in zip(chunk, output[:, width:].tolist(), strict=True):
                answers[i] = cut_at_stop(tokens, stop_ids)
        return [answers[i] for i in range(len(talks))]

    return answer


def answer_by_server(url: str, model: str, tokenizer, decoding: Decoding, *, parallel: int = 16, timeout: float = 600):
    """An answerer that asks an OpenAI-compatible server for completions of the rendered prompt.

    The server's token ids are used where it returns them (vLLM: `return_token_ids`); otherwise its text is encoded again,
    which can differ at token boundaries.
    """

    def ask(turns: list[str], seed: int) -> Answer:
        body = {
            "model": model,
            "prompt": render_prompt(tokenizer, turns, **decoding.template_kwargs),
            "max_tokens": decoding.max_new_tokens,
            "temperature": decoding.temperature,
            "seed": seed,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{url.rstrip('/')}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                choice = json.load(response)["choices"][0]
        except (OSError, KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"{url} must answer completions of the OpenAI protocol for model {model!r}, it failed with {error!r}; check "
                "the address (it ends in /v1) and the model's name, then run the command again: finished shards are kept."
            ) from error
        finished = choice.get("finish_reason") == "stop"
        ids = choice.get("token_ids") or tokenizer.encode(choice["text"], add_special_tokens=False)
        if finished and ids[-1:] != [tokenizer.eos_token_id]:
            ids = [*ids, tokenizer.eos_token_id]
        return ids, "eos" if finished else "length"

    def answer(talks: list[list[str]], seed: int) -> list[Answer]:
        with ThreadPoolExecutor(parallel) as pool:
            return list(pool.map(lambda turns: ask(turns, seed), talks))

    return answer


def cut_at_stop(tokens: list[int], stop_ids: set[int]) -> Answer:
    """The answer up to and with its first stop token, and how it ended; what follows in a batch is padding."""
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: i + 1], "eos"
    return tokens, "length"


def read_prompts(source: str, *, column: str = "prompt", split: str = "train", limit: int | None = None):
    """Prompts from a JSONL file with `id` and `turns`, or from a column of a dataset on the Hub.

    A column may hold texts, or conversations as lists of messages, whose user turns are taken.
    """
    if Path(source).suffix in (".jsonl", ".json"):
        rows = []
        with Path(source).open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                row = json.loads(line)
                if not row.get("turns"):
                    raise ValueError(
                        f"{source}, line {number}: a prompt must have `turns` (user texts), got {line[:60]!r}."
                    )
                rows.append({"id": row.get("id", f"{Path(source).stem}/{number}"), "turns": row["turns"]})
        return rows[:limit]
    from datasets import load_dataset

    data = load_dataset(source, split=split if limit is None else f"{split}[:{limit}]")
    return [{"id": f"{source}/{i}", "turns": user_turns(cell)} for i, cell in enumerate(data[column])]


def user_turns(cell: str | list[dict[str, str]]) -> list[str]:
    """The user's texts of a dataset cell: a text, or messages in either of the two common spellings."""
    if isinstance(cell, str):
        return [cell]
    role = "role" if cell and "role" in cell[0] else "from"
    text = "content" if role == "role" else "value"
    return [message[text] for message in cell if message[role] in ("user", "human")]


def _begin(folder: Path, settings: dict[str, Any]) -> None:
    path = folder / SETTINGS_FILE
    if path.exists():
        begun = json.loads(path.read_text())["settings"]
        if begun != settings:
            changed = sorted(key for key in settings if begun.get(key) != settings[key])
            raise ValueError(
                f"{folder} was begun with other settings ({', '.join(changed)}: "
                f"{', '.join(str(begun.get(key)) for key in changed)}); repeat them, or choose another folder."
            )
        return
    record = {"settings": settings, "provenance": provenance()}
    scratch = folder / f".{SETTINGS_FILE}"
    scratch.write_text(json.dumps(record, indent=2) + "\n")
    scratch.replace(path)


def _write_shard(path: Path, rows: list[dict[str, Any]]) -> None:
    scratch = path.with_name(f".{path.name}")
    try:
        with gzip.open(scratch, "wt", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
        scratch.replace(path)
    finally:
        # A full disk leaves no half shard behind.
        scratch.unlink(missing_ok=True)


def _chunks(items: list[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


@dataclass
class RegenerateArguments:
    """Arguments of the command.

    Args:
        prompts (`str`): JSONL file with `id` and `turns`, or a dataset on the Hub.
        output (`str`): folder of the shards.
        target (`str`): as for `domino train`.
        url (`str`, *optional*): an OpenAI-compatible server (ends in /v1) that answers instead of this process.
        model (`str`, *optional*): the server's name of the target.
        thinking (`str`): "template" (its default), "on" or "off".
    """

    prompts: str = field(metadata={"help": "JSONL file with id and turns, or a dataset on the Hub."})
    output: str = field(metadata={"help": "Folder of the shards."})
    target: str = field(default="default", metadata={"help": "Hub id or folder; 'default' for SmolLM2-135M-Instruct."})
    url: str | None = field(default=None, metadata={"help": "OpenAI-compatible server, ends in /v1."})
    model: str | None = field(default=None, metadata={"help": "The server's name of the target."})
    column: str = field(default="prompt", metadata={"help": "Column of a Hub dataset."})
    split: str = field(default="train", metadata={"help": "Split of a Hub dataset."})
    limit: int | None = field(default=None, metadata={"help": "Most prompts."})
    max_new_tokens: int = field(default=256, metadata={"help": "Cap of an answer."})
    temperature: float = field(default=0.0, metadata={"help": "0 for greedy answers."})
    thinking: str = field(default="template", metadata={"help": "template, on or off."})
    seed: int = field(default=0, metadata={"help": "Of sampled answers."})
    shard_size: int = field(default=256, metadata={"help": "Prompts of a shard."})
    batch_size: int = field(default=32, metadata={"help": "Prompts answered at once."})
    dtype: str = field(default="float32", metadata={"help": "dtype of the target in this process."})


def main(argv: list[str] | None = None) -> list[Path]:
    """Answers prompts as the command line says; returns the shards."""
    argv = sys.argv[1:] if argv is None else argv
    # The first argument may be given without its name.
    if argv and not argv[0].startswith("-"):
        argv = ["--prompts", *argv]
    parser = CommandParser(RegenerateArguments, prog="domino regenerate")
    (args,) = parser.parse_args_into_dataclasses(argv)
    if args.thinking not in THINKING:
        raise ValueError(f"`thinking` must be one of {', '.join(THINKING)}, got {args.thinking!r}.")
    decoding = Decoding(args.target, args.max_new_tokens, args.temperature, THINKING[args.thinking], args.seed)
    prompts = read_prompts(args.prompts, column=args.column, split=args.split, limit=args.limit)
    if args.url:
        tokenizer = load_tokenizer(args.target)
        answer = answer_by_server(args.url, args.model or args.target, tokenizer, decoding, parallel=args.batch_size)
    else:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
        pair = PairArguments(target=args.target, target_dtype=args.dtype)
        target, tokenizer = load_target(pair, bf16=False, device=device)
        answer = answer_in_process(target, tokenizer, decoding, batch_size=args.batch_size)
    return regenerate(prompts, args.output, answer, tokenizer, decoding, shard_size=args.shard_size)


if __name__ == "__main__":
    main()
