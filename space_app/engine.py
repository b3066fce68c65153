"""The models behind the page: loads a pair, and yields the library's own traces of what it does. Knows nothing of Gradio.

The drafter brings its decode loop with it (`trust_remote_code`, at a pinned revision), so that nothing of our package is
needed here. Which pair: `pair.json` beside this file, or the variables DOMINO_TARGET and DOMINO_DRAFTER (a folder or a
Hub id, for the latter with DOMINO_DRAFTER_REVISION).
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, StoppingCriteriaList


MOST_CHARACTERS = 4000
MOST_PROMPT_TOKENS = 1024
MOST_NEW_TOKENS = 256
TREE_NODES = 16
ON_ZERO_GPU = bool(os.environ.get("SPACES_ZERO_GPU"))
RACERS = ("plain", "head-off", "chain", "tree")


class Refused(ValueError):
    """What a visitor can change; the message is a sentence for the page."""


class Engine:
    """A target with its drafter, loaded at the first use.

    Several threads may generate at once: models and switches are used under one lock, step by step, so no visitor waits
    for another's whole text and an abandoned generation holds nothing.

    Args:
        target, drafter: folders or Hub ids.
        target_revision, drafter_revision: of those on the Hub; a drafter from there must be pinned, it brings code.
    """

    def __init__(
        self, target: str, drafter: str, *, target_revision: str | None = None, drafter_revision: str | None = None
    ):
        self.names = {"target": target, "drafter": drafter}
        self.revisions = {"target": target_revision, "drafter": drafter_revision}
        self.target = self.drafter = self.tokenizer = None
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._stopped: set[str] = set()

    def load(self) -> None:
        """Loads and warms up the pair, once.

        Raises:
            Refused: if it cannot be loaded; the next call tries again.
        """
        with self._loading:
            if self.drafter is not None:
                return
            if self.revisions["drafter"] is None and not Path(self.names["drafter"]).is_dir():
                raise Refused(
                    f"The drafter {self.names['drafter']} brings code, so its revision must be pinned, got none; set "
                    "DOMINO_DRAFTER_REVISION."
                )
            device = "cuda" if torch.cuda.is_available() else "cpu"
            dtype = torch.bfloat16 if device == "cuda" else torch.float32
            # A target brings no code; without the word, a terminal would be asked.
            stock = {"trust_remote_code": False}
            if self.revisions["target"] is not None:
                stock["revision"] = self.revisions["target"]
            code = {"trust_remote_code": True, "revision": self.revisions["drafter"] or "main"}
            try:
                self.tokenizer = AutoTokenizer.from_pretrained(self.names["target"], **stock)
                self.target = AutoModelForCausalLM.from_pretrained(self.names["target"], dtype=dtype, **stock)
                drafter = AutoModel.from_pretrained(self.names["drafter"], dtype=dtype, **code)
                for role, model in (("target", self.target), ("drafter", drafter)):
                    model.to(device).eval()
                    # Traces name models, never a folder of this machine.
                    model.config._name_or_path = self.public_name(role)
                if not ON_ZERO_GPU:
                    # There the main process must not compute.
                    for _ in self._stream(drafter, self._inputs("Hi"), {"max_new_tokens": 2}):
                        pass
            except (OSError, ValueError, ImportError, RuntimeError) as error:
                why = (str(error).strip() or type(error).__name__).splitlines()[0]
                for role, name in self.names.items():
                    why = why.replace(name, self.public_name(role))
                raise Refused(
                    f"The pair {self.public_name('target')} and {self.public_name('drafter')} could not be loaded: {why}"
                ) from error
            self.drafter = drafter

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens too."""
        return self.tokenizer.decode(ids)

    def text(self, ids: list[int]) -> str:
        """The text of an answer."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def public_name(self, role: str) -> str:
        """The Hub id of the "target" or "drafter", or the last name of its folder: never a path of this machine."""
        name = self.names[role]
        return Path(name).name if Path(name).is_dir() or Path(name).is_absolute() else name

    def facts(self) -> dict[str, str]:
        """What ran where, for the footer."""
        facts = {
            role: self.public_name(role) + (f" at {self.revisions[role]}" if self.revisions[role] else "")
            for role in ("target", "drafter")
        }
        if self.drafter is None:
            return facts
        device = self.target.device
        return {
            **facts,
            "kind": self.drafter.describe(),
            "hardware": "ZeroGPU" if ON_ZERO_GPU else _hardware(device),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        }

    def allow(self, visit: str) -> None:
        """Takes back an earlier [`stop`] of this visit."""
        self._stopped.discard(visit)

    def stop(self, visit: str) -> None:
        """Ends what this visit is generating, at the end of its round."""
        self._stopped.add(visit)

    def is_stopped(self, visit: str) -> bool:
        return visit in self._stopped

    def rounds(
        self, prompt: str, max_new_tokens: int, tree: bool = False, visit: str = ""
    ) -> Iterator[dict[str, Any]]:
        """Generates greedily, and yields the trace so far after every forward of the target.

        The last one is the whole trace as the library recorded it, also when the visit was stopped.

        Raises:
            Refused: for a prompt or a length that is not served.
        """
        inputs, options = self._prepare(prompt, max_new_tokens)
        shape = {"tree": TREE_NODES} if tree else {}
        steps = self._stream(self.drafter, inputs, {**options, **shape}, details=True)
        rounds, output_ids = [], []
        for step in steps:
            output_ids = [*output_ids, *step.token_ids]
            if not step.is_prefill:
                rounds = [*rounds, step.trace()]
            yield {"rounds": rounds, "output_ids": output_ids}
            if self.is_stopped(visit):
                steps.close()
        yield self.drafter.last_run.trace()

    def race(self, prompt: str, max_new_tokens: int, visit: str = "") -> Iterator[dict[str, Any]]:
        """Records every racer on its own, one after the other, and yields the race after each.

        A race has `recorded` lanes, `next` (what is being recorded), the drafter's `family`, and the `reference`: the ids of the stock
        `target.generate`, which no drafter and none of our code has touched. The plain lane is the faster of that and of
        our loop without drafts.

        Raises:
            Refused: for a prompt or a length that is not served.
        """
        inputs, options = self._prepare(prompt, max_new_tokens)
        family = "DFlash" if self.drafter.head_state == "none" else "Domino"
        race: dict[str, Any] = {"recorded": [], "next": "plain", "reference": [], "family": family}
        yield race
        stock = self._run_stock(inputs, options, visit)
        race = {**race, "reference": stock["output_ids"]}
        racers = RACERS if family == "Domino" else ("plain", "chain", "tree")
        for method in racers:
            yield {**race, "next": method}
            if self.is_stopped(visit):
                return
            lane = self._run_loop(method, inputs, options, visit)
            if method == "plain":
                lane = min(lane, stock, key=lambda one: one["seconds"])
            if self.is_stopped(visit):
                return
            race = {**race, "recorded": [*race["recorded"], lane]}
        yield {**race, "next": None}

    def _run_loop(self, method: str, inputs, options: dict[str, Any], visit: str) -> dict[str, Any]:
        """One lane by the library's loop; `points` are seconds and tokens after every forward."""
        extras = {"plain": {"verify_width": 0}, "tree": {"tree": TREE_NODES}}.get(method, {})
        steps = self._stream(self.drafter, inputs, {**options, **extras}, use_head=method != "head-off")
        points, tokens, started = [], 0, time.perf_counter()
        for step in steps:
            tokens += len(step.token_ids)
            points.append([round(time.perf_counter() - started, 4), tokens])
            if self.is_stopped(visit):
                steps.close()
        run = self.drafter.last_run
        return _lane(method, points, run.output_ids, tau=run.tau)

    def _run_stock(self, inputs, options: dict[str, Any], visit: str) -> dict[str, Any]:
        """The plain lane by `target.generate`."""
        clock = _Clock()

        def stopped(ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
            return torch.full((ids.shape[0],), self.is_stopped(visit), device=ids.device)

        with self._lock:
            clock.start()
            output = self.target.generate(
                **inputs, **options, streamer=clock, stopping_criteria=StoppingCriteriaList([stopped])
            )
        return _lane("plain", clock.points, output[0, inputs["input_ids"].shape[1] :].tolist(), tau=1.0)

    def _stream(self, drafter, inputs, options: dict[str, Any], *, details: bool = False, use_head: bool = True):
        """The steps of the drafter's own decode loop; every one is made under the lock, with the switches set."""
        # The loop travels with the drafter: it lies where its `spec_generate` comes from.
        stream = sys.modules[type(drafter).spec_generate.__module__].stream
        with self._lock:
            drafter.record_details, drafter.use_head = details, use_head
            steps = stream(self.target, drafter, **{"do_sample": False, **inputs, **options})
        try:
            while True:
                with self._lock:
                    drafter.record_details, drafter.use_head = details, use_head
                    step = next(steps, None)
                if step is None:
                    return
                yield step
        finally:
            steps.close()

    def _prepare(self, prompt: str, max_new_tokens: int):
        prompt = (prompt or "").strip()
        if not prompt:
            raise Refused("The prompt is empty; ask something.")
        if len(prompt) > MOST_CHARACTERS:
            raise Refused(
                f"A prompt has at most {MOST_CHARACTERS:,} characters here, this one has {len(prompt):,}; cut it."
            )
        if not 1 <= max_new_tokens <= MOST_NEW_TOKENS:
            raise Refused(f"From 1 to {MOST_NEW_TOKENS} new tokens are served here, asked were {max_new_tokens}.")
        self.load()
        inputs = self._inputs(prompt)
        length = inputs["input_ids"].shape[1]
        if length > MOST_PROMPT_TOKENS:
            raise Refused(f"A prompt has at most {MOST_PROMPT_TOKENS:,} tokens here, this one has {length:,}; cut it.")
        return inputs, {"max_new_tokens": int(max_new_tokens), "do_sample": False}

    def _inputs(self, prompt: str):
        if self.tokenizer.chat_template:
            chat = [{"role": "user", "content": prompt}]
            inputs = self.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        return inputs.to(self.target.device)


def engine_of_this_space() -> Engine:
    """The engine for the pair that this folder or the environment names; loads nothing."""
    file = Path(__file__).with_name("pair.json")
    pair = json.loads(file.read_text()) if file.is_file() else {}
    for name in ("target", "drafter", "target_revision", "drafter_revision"):
        value = os.environ.get(f"DOMINO_{name.upper()}")
        if value:
            pair[name] = value
            # A revision belongs to the repository it was named with.
            if f"DOMINO_{name.upper()}_REVISION" not in os.environ:
                pair.pop(f"{name}_revision", None)
    if not {"target", "drafter"} <= set(pair):
        raise ValueError(
            "The Space needs a pair: a pair.json beside engine.py, or the variables DOMINO_TARGET and DOMINO_DRAFTER; "
            "in a checkout start it with `domino space`."
        )
    return Engine(
        pair["target"],
        pair["drafter"],
        target_revision=pair.get("target_revision"),
        drafter_revision=pair.get("drafter_revision"),
    )


def _lane(method: str, points: list[list[float]], output_ids: list[int], *, tau: float) -> dict[str, Any]:
    return {
        "method": method,
        "points": points,
        "output_ids": output_ids,
        "tau": tau,
        "seconds": points[-1][0] if points else 0.0,
    }


class _Clock:
    """A streamer that notes when how many tokens were there; the first call brings the prompt."""

    def __init__(self):
        self.points: list[list[float]] = []
        self._tokens = -1

    def start(self) -> None:
        self._started = time.perf_counter()

    def put(self, ids: torch.Tensor) -> None:
        self._tokens += 1 if self._tokens < 0 else ids.numel()
        if self._tokens:
            self.points.append([round(time.perf_counter() - self._started, 4), self._tokens])

    def end(self) -> None:
        """Nothing is held back."""


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"CPU {line.split(':', 1)[1].strip()}, threads {torch.get_num_threads()}"
    except OSError:
        pass
    return f"CPU {platform.processor() or platform.machine()}, threads {torch.get_num_threads()}"
