"""Records of a run: one `Step` per target forward, one `Run` per generation.

Both decoding paths (our loop and transformers' assisted decoding) fill the same records; streaming, statistics, the
terminal, the Space and the benchmark all read them. Tau, the acceptance length, counts the target's own token.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch


# What the drafts of a round carry beside their ids, when it is asked for.
DETAILS = ("base_ids", "probabilities", "base_probabilities")
STAGES = ("context", "backbone", "base_head", "domino_head", "verify", "commit", "other")
TRACE_VERSION = 1


@dataclass
class Step:
    """One forward of the target.

    Args:
        draft_ids: the drafts that were verified, in order (a chain) or by node (a tree).
        accepted: how many of them the target kept.
        own_id: the target's own token of the round, behind the accepted drafts.
        base_ids: what the backbone alone would have picked at each slot; only with `record_details`.
        probabilities: the drafter's probability of each draft; only with `record_details`.
        base_probabilities: the backbone's probability of each draft; only with `record_details`.
        parents: trees only: index of each node's parent among the drafts, -1 for children of the anchor.
        path: trees only: indices of the accepted drafts, in order.
        stage_seconds: seconds by stage (`STAGES`), of the round of the whole batch.
        is_prefill: the forward that read the prompt; it drafts nothing and is not counted as a round.
        is_plain: a round that drafted nothing because drafting did not pay (`auto_off`).
    """

    draft_ids: list[int]
    accepted: int
    own_id: int
    base_ids: list[int] | None = None
    probabilities: list[float] | None = None
    base_probabilities: list[float] | None = None
    parents: list[int] | None = None
    path: list[int] | None = None
    stage_seconds: dict[str, float] = field(default_factory=dict)
    is_prefill: bool = False
    is_plain: bool = False

    @property
    def token_ids(self) -> list[int]:
        """The tokens this step adds to the text."""
        return [*self.accepted_ids, self.own_id]

    @property
    def accepted_ids(self) -> list[int]:
        """The drafts that the target kept, in order."""
        path = range(self.accepted) if self.path is None else self.path
        return [self.draft_ids[i] for i in path]

    def keep_drafts(self, num_drafts: int) -> None:
        """Forgets the drafts behind the first `num_drafts`."""
        for name in ("draft_ids", *DETAILS):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name)[:num_drafts])

    def trace(self) -> dict[str, Any]:
        """The round in the trace schema."""
        details = {name: getattr(self, name) for name in DETAILS}
        if not self.draft_ids:
            # Of nothing there is nothing to tell, whether details were asked for or not.
            details = dict.fromkeys(details, [])
        trace = {
            "draft_ids": self.draft_ids,
            **details,
            "accepted": self.accepted,
            "own_id": self.own_id,
            "stage_seconds": self.stage_seconds,
        }
        if self.is_plain:
            trace["is_plain"] = True
        return trace if self.parents is None else {**trace, "parents": self.parents, "path": self.path}


def details_of(drafts, row: int = 0) -> dict[str, list]:
    """The details of one sequence's drafts (a chain or a tree), for its `Step`; empty if none were asked for."""
    if drafts.base_ids is None:
        return {}
    return {name: getattr(drafts, name)[row].tolist() for name in DETAILS}


def name_of(model) -> str:
    """What a record calls a model: its id or folder as it was loaded, or its class if it was not."""
    return getattr(model.config, "_name_or_path", "") or type(model).__name__


@dataclass
class Run:
    """One generation with a drafter.

    Args:
        target, drafter: names as loaded.
        head: "domino", "off" (a Domino head that was bypassed) or "none" (DFlash, no correction head).
        kind: "chain" or "tree".
        path: "loop" (ours), "static" (ours, with `static=True`) or "stock" (transformers' assisted decoding).
        rule: the accept rule, "greedy", "match", "speculative" or "block".
        packed_bytes: memory of the prepacked copies of the weights that served the forwards; 0 without.
    """

    target: str
    drafter: str
    head: str
    path: str
    block_size: int
    prompt_tokens: int
    temperature: float
    rule: str
    kind: str = "chain"
    steps: list[Step] = field(default_factory=list)
    seconds: float = 0.0
    packed_bytes: int = 0

    @property
    def rounds(self) -> list[Step]:
        """The steps that verified a draft block (without the prefill)."""
        return [step for step in self.steps if not step.is_prefill]

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens, without the prompt."""
        return [token for step in self.steps for token in step.token_ids]

    @property
    def new_tokens(self) -> int:
        """How many tokens were generated."""
        return sum(step.accepted + 1 for step in self.steps)

    @property
    def plain_steps(self) -> int:
        """Rounds that drafted nothing because drafting did not pay (`auto_off`); they count in tau as keeping nothing."""
        return sum(step.is_plain for step in self.steps)

    @property
    def tau(self) -> float:
        """Mean acceptance length: tokens per verification, the target's own included; 0.0 when nothing was verified."""
        rounds = self.rounds
        return sum(step.accepted + 1 for step in rounds) / len(rounds) if rounds else 0.0

    @property
    def accepted(self) -> list[int]:
        """Accepted drafts of each round."""
        return [step.accepted for step in self.rounds]

    def trace(self) -> dict[str, Any]:
        """The run as a JSON-ready dictionary (version 1 of the trace schema)."""
        return {
            "version": TRACE_VERSION,
            "target": self.target,
            "drafter": self.drafter,
            "kind": self.kind,
            "head": self.head,
            "block_size": self.block_size,
            "prompt_tokens": self.prompt_tokens,
            "temperature": self.temperature,
            "rule": self.rule,
            "packed_bytes": self.packed_bytes,
            "plain_steps": self.plain_steps,
            "rounds": [step.trace() for step in self.rounds],
            "output_ids": self.output_ids,
            "seconds": self.seconds,
        }


def synchronize(device: torch.device) -> None:
    """Waits until `device` has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class StageClock:
    """Adds up seconds by stage between marks.

    On an accelerator, work is queued: without `synchronize` the seconds tell when it was launched, not when it ran, so
    nothing is recorded there unless asked for.
    """

    def __init__(self, device: torch.device, *, synchronize: bool = False):
        self._device = device
        self._synchronize = synchronize and device.type != "cpu"
        self._active = device.type == "cpu" or self._synchronize
        self._seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, stage: str) -> None:
        """Books the time since the last mark to `stage`."""
        if not self._active:
            return
        if self._synchronize:
            synchronize(self._device)
        now = time.perf_counter()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """The seconds of the finished step; starts the next one."""
        seconds, self._seconds = self._seconds, {}
        return seconds


# Runs are kept per thread and per drafter: a drafter can serve several threads, and must stay picklable.
_THREAD = threading.local()


def _runs() -> weakref.WeakKeyDictionary:
    if not hasattr(_THREAD, "runs"):
        _THREAD.runs = weakref.WeakKeyDictionary()
    return _THREAD.runs


def set_last_runs(drafter, runs: list[Run]) -> None:
    """Makes `runs` the last ones of `drafter` in this thread, one for each sequence of a batch; none forgets those before."""
    _runs()[drafter] = runs


def get_last_runs(drafter) -> list[Run]:
    """The last runs of `drafter` in this thread; empty before the first."""
    return _runs().get(drafter, [])
