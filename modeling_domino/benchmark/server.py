"""Throughput of OpenAI-compatible servers: each server is an arm, measured at several concurrencies. Standard library only.

One record an arm and concurrency, with every request in it: tokens a second mean something only for a level as a whole.
Requests stream, so that the first token is timed; tokens are the server's own count (`usage`). Acceptance comes from the
server's metrics where it offers them. Only first turns are asked: a later one would depend on the arm's answer.
"""

from __future__ import annotations

import http.client
import json
import re
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .prompts import Prompt
from .records import RecordFile, check_settings, write_provenance
from .summary import percentile


SERVER_RECORDS = "server.jsonl"
CONCURRENCIES = (1, 2, 4, 8, 16, 32)
# Names in Prometheus' text format: a mean of the server's own (SGLang), or two counters (vLLM).
MEAN_METRICS = ("sglang:spec_accept_length",)
COUNTER_METRICS = ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_drafts_total")


@dataclass(frozen=True)
class ServerSettings:
    """What all levels of a folder share."""

    max_new_tokens: int = 256
    seed: int = 0
    thinking: bool = False
    timeout_seconds: float = 600.0


@dataclass(frozen=True)
class Arm:
    """One server: the name it has in the results, and its address up to the `/v1`."""

    name: str
    url: str


def parse_arms(words: Sequence[str]) -> list[Arm]:
    """`NAME=URL` or a bare URL, which is named "server"."""
    arms = []
    for word in words:
        name, url = re.fullmatch(r"(?:([\w.+-]+)=)?(.*)", word).groups()
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"`--server` takes URL or NAME=URL with http:// or https://, got {word}.")
        arms.append(Arm(name or "server", url.rstrip("/").removesuffix("/v1")))
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise ValueError(f"Servers need names of their own, got {', '.join(names)}; write NAME=URL.")
    return arms


def run_servers(
    arms: Sequence[Arm],
    tasks: dict[str, list[Prompt]],
    concurrencies: Sequence[int],
    temperatures: Sequence[float],
    settings: ServerSettings,
    out: Path,
    *,
    session: dict[str, Any],
    notify: Callable[[str], None] = lambda line: None,
) -> None:
    """Measures the levels that `out` does not hold yet.

    Raises:
        ValueError: if a server does not answer or refuses a request, or `out` holds levels of other settings.
    """
    if min(concurrencies) < 1:
        raise ValueError(f"A concurrency must be at least 1, got {min(concurrencies)}.")
    requests = [(task, prompt) for task, prompts in tasks.items() for prompt in prompts]
    asked = [f"{task}:{prompt.id}" for task, prompt in requests]
    shared = {"kind": "server", "settings": asdict(settings), "requests": asked}
    # All servers before the first level: an hour of work shall not end at an address with a slip.
    models = {arm.name: model_of(arm, settings) for arm in arms}
    check_settings(out, shared)
    write_provenance(out, shared, session)
    done = {level_of(record) for record in read_levels(out)}
    file = RecordFile(out / SERVER_RECORDS)
    try:
        for arm in arms:
            for temperature in temperatures:
                for concurrency in concurrencies:
                    if (arm.name, temperature, concurrency) in done:
                        continue
                    record = measure_level(arm, models[arm.name], requests, concurrency, temperature, settings)
                    file.append(record)
                    tokens = sum(request["new_tokens"] for request in record["requests"])
                    notify(f"{arm.name} T={temperature:g} x{concurrency}: {tokens / record['seconds']:.1f} tokens/s")
    finally:
        file.close()


def measure_level(
    arm: Arm,
    model: str,
    requests: Sequence[tuple[str, Prompt]],
    concurrency: int,
    temperature: float,
    settings: ServerSettings,
) -> dict[str, Any]:
    """All requests with `concurrency` of them under way; as many before that, which are discarded, warm the server up."""

    def send(request: tuple[str, Prompt]) -> dict[str, Any]:
        return ask(arm, model, *request, temperature, settings)

    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        list(pool.map(send, [requests[i % len(requests)] for i in range(concurrency)]))
        before = read_metrics(arm)
        started = time.perf_counter()
        answers = list(pool.map(send, requests))
        seconds = time.perf_counter() - started
    return {
        "arm": arm.name,
        "model": model,
        "temperature": temperature,
        "concurrency": concurrency,
        "seconds": round(seconds, 6),
        "tau": acceptance(before, read_metrics(arm)),
        "requests": answers,
    }


def ask(
    arm: Arm, model: str, task: str, prompt: Prompt, temperature: float, settings: ServerSettings
) -> dict[str, Any]:
    """One streamed chat completion: its tokens, its seconds and those until the first token."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt.turns[0]}],
        "max_tokens": settings.max_new_tokens,
        "temperature": temperature,
        "top_p": 1.0,
        "seed": settings.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": settings.thinking},
    }
    started = time.perf_counter()
    first, tokens = None, None
    with _open(arm, "/v1/chat/completions", settings.timeout_seconds, json.dumps(body).encode()) as response:
        for chunk in _events(arm, response):
            if first is None and any(_has_text(choice.get("delta") or {}) for choice in chunk.get("choices") or []):
                first = time.perf_counter() - started
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    seconds = time.perf_counter() - started
    if tokens is None:
        raise ValueError(
            f"{arm.name} counts no tokens: its last chunk must hold `usage` when `stream_options.include_usage` is set."
        )
    return {
        "task": task,
        "id": prompt.id,
        "new_tokens": tokens,
        "seconds": round(seconds, 6),
        "first_token_seconds": round(seconds if first is None else first, 6),
    }


def model_of(arm: Arm, settings: ServerSettings) -> str:
    """The name under which the server serves its model."""
    with _open(arm, "/v1/models", min(30.0, settings.timeout_seconds)) as response:
        try:
            return json.loads(response.read())["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            raise ValueError(
                f"{arm.name} at {arm.url} lists no model under /v1/models; is that an OpenAI server?"
            ) from None


def read_metrics(arm: Arm) -> dict[str, list[float]]:
    """The server's metrics, one value a set of labels (a worker, say); empty where it offers none."""
    try:
        with urllib.request.urlopen(f"{arm.url}/metrics", timeout=10) as response:
            text = response.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return {}
    metrics: dict[str, list[float]] = {}
    for name, value in re.findall(r"^([\w:]+)(?:\{[^\n]*\})? (\S+)", text, flags=re.MULTILINE):
        try:
            metrics.setdefault(name, []).append(float(value))
        except ValueError:
            continue
    return metrics


def acceptance(before: dict[str, list[float]], after: dict[str, list[float]]) -> float | None:
    """Tokens a verification from a server's metrics, the target's own included; `None` where they do not tell."""
    accepted, drafts = (sum(after.get(name, [])) - sum(before.get(name, [])) for name in COUNTER_METRICS)
    if drafts > 0:
        return round(1 + accepted / drafts, 4)
    for name in MEAN_METRICS:
        if any(after.get(name, [])):
            return round(statistics.fmean(after[name]), 4)
    return None


def level_of(record: dict[str, Any]) -> tuple:
    return record["arm"], record["temperature"], record["concurrency"]


def read_levels(folder: Path) -> list[dict[str, Any]]:
    """The levels of a folder, in an order that does not depend on when they were measured."""
    file = folder / SERVER_RECORDS
    if not file.is_file():
        return []
    levels = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            record = json.loads(line)
            levels[level_of(record)] = record
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"{file.name}, line {number}: not a server record.") from None
    # "plain" first: the others are compared with it.
    return [levels[key] for key in sorted(levels, key=lambda key: (key[0] != "plain", *key))]


def summarise_servers(levels: Sequence[dict[str, Any]], provenance: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second, latency and acceptance by arm, temperature and concurrency; speed-up over the arm named "plain"."""
    if not levels:
        raise ValueError("There are no records to summarise.")
    results: dict[str, Any] = {}
    plain: dict[tuple, float] = {}
    for record in levels:
        answers = record["requests"]
        seconds = sorted(answer["seconds"] for answer in answers)
        speed = sum(answer["new_tokens"] for answer in answers) / record["seconds"]
        level = (record["temperature"], record["concurrency"])
        if record["arm"] == "plain":
            plain[level] = speed
        cell = {
            "tokens_per_second": round(speed, 4),
            "speedup": round(speed / plain[level], 4) if level in plain else None,
            "tau": record["tau"],
            "first_token_seconds": round(statistics.median(a["first_token_seconds"] for a in answers), 4),
            "latency_p50": round(percentile(seconds, 50), 4),
            "latency_p90": round(percentile(seconds, 90), 4),
            "requests": len(answers),
        }
        arm = results.setdefault(record["arm"], {"model": record["model"], "levels": {}})
        arm["levels"].setdefault(f"{level[0]:g}", {})[str(level[1])] = cell
    return {
        "provenance": {**provenance["sessions"][-1], "settings": provenance["settings"]["settings"]},
        "server": results,
    }


def _open(arm: Arm, path: str, timeout: float, body: bytes | None = None):
    request = urllib.request.Request(f"{arm.url}{path}", data=body, headers={"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        said = " ".join(error.read(300).decode("utf-8", "replace").split())
        raise ValueError(f"{arm.name} at {arm.url}{path} refused a request with status {error.code}: {said}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ValueError(
            f"{arm.name} does not answer at {arm.url} ({reason}); start the server or correct --server."
        ) from None


def _events(arm: Arm, response: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    """The chunks of a stream of server-sent events."""
    try:
        for line in response:
            data = line.strip().removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            yield json.loads(data)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ValueError(f"{arm.name} at {arm.url} broke off an answer ({error}).") from None


def _has_text(delta: dict[str, Any]) -> bool:
    return bool(delta.get("content") or delta.get("reasoning_content"))
