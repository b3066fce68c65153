"""Numbers from benchmark records: tau, speed-up over plain generation with bootstrap intervals, acceptance, cost model.

Pure functions of records, without torch; the same records give the same numbers on every machine.

- tau: tokens a verification, the target's own included, over all rounds of all prompts. The forward that reads the prompt
  verifies nothing and is left out; at most `cap` = drafts + 1. `tau_mean` is the mean of the prompts' own tau instead,
  which is how DFlash's scripts average.
- speed-up: seconds a token of the plain baseline over those of the method, on the same prompts, without reading the
  prompt, as in the papers; `speedup_total` includes it. mean, median and sd are over the prompts' own speed-ups.
- round cost: seconds a round over plain generation's seconds a token, on the same prompts; what tau must exceed to pay.
- intervals: 95 %, from resampling prompts together with their baseline (paired); a prompt's turns stay together.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .prompts import TASKS
from .variants import method_of, options_of


METHODS = ("plain", "prompt-lookup", "assistant", "dflash", "head-off", "chain", "tree", "chain-stock")
PLAIN = ("plain-generate", "plain-loop")
# As in `record_domino`, which needs torch.
STAGES = ("context", "backbone", "base_head", "domino_head", "verify", "commit", "other")
DRAFT_STAGES = STAGES[:4]
NOT_RUN = "not run"
RESAMPLES = 1000
REST_LIMIT = 0.10

Record = dict[str, Any]


def place_of(method: str) -> tuple[int, str]:
    """Where a method stands among others: as in `METHODS`, its variants behind it."""
    return METHODS.index(method_of(method)), method


def summarise(records: Sequence[Record], provenance: dict[str, Any], *, resamples: int = RESAMPLES) -> dict[str, Any]:
    """The summary of a run: results by method and task, of its lowest temperature and of the others.

    Raises:
        ValueError: without a record of plain generation there is nothing to compare with.
    """
    temperatures = sorted({record["temperature"] for record in records})
    if not temperatures:
        raise ValueError("There are no records to summarise.")
    session = provenance["sessions"][-1]
    settings = provenance["settings"]
    baselines, results = {}, {}
    for temperature in temperatures:
        chosen = [record for record in records if record["temperature"] == temperature]
        baselines[f"{temperature:g}"] = baseline_of(chosen)
        results[f"{temperature:g}"] = _results(chosen, baselines[f"{temperature:g}"], settings, resamples)
    first = f"{temperatures[0]:g}"
    compared = [record for record in records if record["identical"] is not None]
    return {
        "provenance": {**session, "models": settings},
        "temperature": temperatures[0],
        "results": results[first],
        "results_at": {name: value for name, value in results.items() if name != first},
        # Which of its two forms the plain baseline is, the faster one.
        "plain_is": baselines,
        "tokens": {
            "compared": sum(record["tokens_compared"] for record in compared),
            "differing": sum(record["tokens_differing"] for record in compared),
            "texts": len(compared),
            "texts_differing": sum(not record["identical"] for record in compared),
        },
    }


def by_temperature(summary: dict[str, Any]) -> dict[str, Any]:
    """The results by temperature, the summary's first one first."""
    return {f"{summary['temperature']:g}": summary["results"], **summary["results_at"]}


def baseline_of(records: Sequence[Record]) -> str:
    """The faster form of plain generation: fewer seconds a token over the prompts that both have answered."""
    by_form = {form: {_prompt(r): r for r in records if r["method"] == form} for form in PLAIN}
    present = [form for form in PLAIN if by_form[form]]
    if not present:
        raise ValueError("There is no record of plain generation, which everything is compared with.")
    both = set.intersection(*(set(by_form[form]) for form in present))
    if len(present) == 1 or not both:
        return present[0]
    return min(present, key=lambda form: _pooled([by_form[form][prompt] for prompt in sorted(both)]))


def _pooled(records: Sequence[Record]) -> float:
    tokens = sum(decode_tokens(record) for record in records)
    return sum(decode_seconds(record) for record in records) / tokens if tokens else float("inf")


def _prompt(record: Record) -> tuple:
    return record["task"], record["id"], record["turn"]


def decode_tokens(record: Record) -> int:
    """Tokens of the rounds, without what the reading of the prompt gave."""
    return record["rounds"] + sum(record["accepted"])


def decode_seconds(record: Record) -> float:
    """Seconds of the rounds; of a batch, the prompt's equal share."""
    return (record["seconds"] - record["first_token_seconds"]) / record["batch"]


def _results(records: Sequence[Record], baseline: str, settings: dict[str, Any], resamples: int) -> dict[str, Any]:
    """`{method: {task: cell}}`, tasks in the papers' order and their average last."""
    present = {record["task"] for record in records}
    tasks = [*(task for task in TASKS if task in present), *sorted(present - set(TASKS))]
    plain = {_prompt(record): record for record in records if record["method"] == baseline}
    results: dict[str, Any] = {}
    drafting = {record["method"] for record in records} - {*PLAIN}
    for method in [METHODS[0], *PLAIN, *sorted({*METHODS[1:], *drafting}, key=place_of)]:
        stored = baseline if method == "plain" else method
        cells: dict[str, Any] = {}
        strata = []
        beside = None if method in ("plain", *PLAIN) else _beside(records, method, tasks, resamples)
        for task in tasks:
            pairs = [
                (record, plain[_prompt(record)])
                for record in records
                if record["method"] == stored and record["task"] == task and _prompt(record) in plain
            ]
            if pairs:
                strata.append(_units(pairs))
                cells[task] = _cell(pairs, cap_of(stored, settings), resamples)
                if beside is not None:
                    cells[task]["beside"] = beside[task]
            else:
                cells[task] = NOT_RUN
        cells["average"] = (
            _average([c for c in cells.values() if c != NOT_RUN], strata, resamples) if strata else NOT_RUN
        )
        if beside is not None and strata:
            cells["average"]["beside"] = beside["average"]
        results[method] = cells
    return results


def _beside(
    records: Sequence[Record], method: str, tasks: Sequence[str], resamples: int
) -> dict[str, dict[str, Any] | None] | None:
    """How a method or variant compares with the chain, over the prompts that both have answered.

    By task, and the mean over tasks: ratios of tau and of speed with paired intervals; `None` without the chain.
    """
    others = {_prompt(record): record for record in records if record["method"] == "chain"}
    if method == "chain" or not others:
        return None
    strata = {}
    for task in tasks:
        own = [record for record in records if record["method"] == method and record["task"] == task]
        strata[task] = _units([(record, others[_prompt(record)]) for record in own if _prompt(record) in others])

    def ratios(chosen: list[Sequence[Unit]]) -> dict[str, Any] | None:
        if not chosen:
            return None
        numbers: dict[str, Any] = {}
        for name, statistic in (("tau_ratio", tau_ratio_of), ("speed_ratio", speedup_of)):
            values = [statistic([sum(column) for column in zip(*units)]) for units in chosen]
            known = [value for value in values if value is not None]
            numbers[name] = statistics.fmean(known) if known else None
            numbers[f"{name}_ci"] = bootstrap(chosen, statistic, resamples=resamples)
        return _rounded(numbers)

    filled = [units for units in strata.values() if units]
    return {"average": ratios(filled), **{task: ratios([units] if units else []) for task, units in strata.items()}}


def cap_of(method: str, settings: dict[str, Any]) -> int | None:
    """The most tokens a verification can give; `None` where the method sets no bound of its own."""
    options = settings["settings"] | {name.replace("-", "_"): value for name, value in options_of(method).items()}
    method = method_of(method)
    if method in PLAIN:
        return 1
    if method == "prompt-lookup":
        return options["lookup_tokens"] + 1
    drafts = settings["drafts_per_round"].get("dflash" if method == "dflash" else "drafter")
    if method == "assistant" or drafts is None:
        return None
    width = options["verify_width"]
    return (min(drafts, width) if type(width) is int else drafts) + 1


Unit = tuple[float, ...]


def _units(pairs: Sequence[tuple[Record, Record]]) -> list[Unit]:
    """One unit a prompt: tokens and rounds, decode seconds and tokens, then seconds, tokens and rounds of the other record."""
    units: dict[tuple, list[float]] = {}
    for record, plain in pairs:
        unit = units.setdefault((record["task"], record["id"]), [0.0] * 7)
        values = (
            decode_tokens(record),
            record["rounds"],
            decode_seconds(record),
            decode_tokens(record),
            decode_seconds(plain),
            decode_tokens(plain),
            plain["rounds"],
        )
        for i, value in enumerate(values):
            unit[i] += value
    return [tuple(unit) for _, unit in sorted(units.items())]


def tau_of(sums: Sequence[float]) -> float | None:
    return sums[0] / sums[1] if sums[1] else None


def speedup_of(sums: Sequence[float]) -> float | None:
    if not (sums[2] > 0 and sums[3] and sums[5]):
        return None
    return (sums[4] / sums[5]) / (sums[2] / sums[3])


def tau_ratio_of(sums: Sequence[float]) -> float | None:
    if not (sums[1] and sums[5] and sums[6]):
        return None
    return (sums[0] / sums[1]) / (sums[5] / sums[6])


def round_cost_of(sums: Sequence[float]) -> float | None:
    if not (sums[1] and sums[4] > 0 and sums[5]):
        return None
    return (sums[2] / sums[1]) / (sums[4] / sums[5])


def bootstrap(
    strata: Sequence[Sequence[Unit]],
    statistic: Callable[[Sequence[float]], float | None],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[float] | None:
    """A 95 % interval of the mean over strata of `statistic(sums of a stratum's units)`.

    Units are drawn with replacement within their stratum. `None` where a stratum has a single unit, which says nothing
    about spread.
    """
    if not strata or min(len(units) for units in strata) < 2:
        return None
    generator = random.Random(seed)
    values = []
    for _ in range(resamples):
        means = []
        for units in strata:
            drawn = generator.choices(units, k=len(units))
            means.append(statistic([sum(column) for column in zip(*drawn)]))
        known = [value for value in means if value is not None]
        if known:
            values.append(sum(known) / len(known))
    values.sort()
    return [percentile(values, 2.5), percentile(values, 97.5)] if values else None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, interpolated between neighbours."""
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _cell(pairs: Sequence[tuple[Record, Record]], cap: int | None, resamples: int) -> dict[str, Any]:
    units = _units(pairs)
    sums = [sum(column) for column in zip(*units)]
    own = [value for value in (speedup_of(unit) for unit in units) if value is not None]
    taus = [value for value in (tau_of(unit) for unit in units) if value is not None]
    records = [record for record, _ in pairs]
    seconds = sorted(record["seconds"] for record in records)
    compared = [record for record in records if record["identical"] is not None]
    total = sum(r["seconds"] / r["batch"] for r in records) / max(1, sum(r["new_tokens"] for r in records))
    plain_total = sum(p["seconds"] / p["batch"] for _, p in pairs) / max(1, sum(p["new_tokens"] for _, p in pairs))
    return _rounded(
        {
            "tau": tau_of(sums),
            "tau_ci": bootstrap([units], tau_of, resamples=resamples),
            "tau_cap": cap,
            "tau_mean": statistics.fmean(taus) if taus else None,
            "speedup": speedup_of(sums),
            "speedup_ci": bootstrap([units], speedup_of, resamples=resamples),
            "speedup_total": plain_total / total if total else None,
            "mean": statistics.fmean(own) if own else None,
            "median": statistics.median(own) if own else None,
            "sd": statistics.stdev(own) if len(own) > 1 else None,
            "round_cost": round_cost_of(sums),
            "tokens_per_second": sums[3] / sums[2] if sums[2] > 0 else None,
            "first_token_seconds": statistics.median(record["first_token_seconds"] for record in records),
            "latency_p50": percentile(seconds, 50),
            "latency_p90": percentile(seconds, 90),
            "identical": sum(record["identical"] for record in compared) if compared else None,
            "compared": len(compared),
            "samples": len(records),
            "prompts": len(units),
            "peak_memory_mb": _largest(record["peak_memory_mb"] for record in records),
        }
    )


def _average(cells: Sequence[dict[str, Any]], strata: Sequence[Sequence[Unit]], resamples: int) -> dict[str, Any]:
    """The mean over tasks, each with the same weight, as the papers average."""

    def mean(name: str) -> float | None:
        values = [cell[name] for cell in cells if cell[name] is not None]
        return statistics.fmean(values) if values else None

    names = ("tau", "tau_mean", "speedup", "speedup_total", "mean", "median", "sd", "round_cost", "tokens_per_second")
    compared = [cell["identical"] for cell in cells if cell["identical"] is not None]
    return _rounded(
        {
            **{name: mean(name) for name in names},
            "tau_cap": cells[0]["tau_cap"],
            "tau_ci": bootstrap(strata, tau_of, resamples=resamples),
            "speedup_ci": bootstrap(strata, speedup_of, resamples=resamples),
            "first_token_seconds": mean("first_token_seconds"),
            "latency_p50": mean("latency_p50"),
            "latency_p90": mean("latency_p90"),
            "identical": sum(compared) if compared else None,
            "compared": sum(cell["compared"] for cell in cells),
            "samples": sum(cell["samples"] for cell in cells),
            "prompts": sum(cell["prompts"] for cell in cells),
            "peak_memory_mb": _largest(cell["peak_memory_mb"] for cell in cells),
            "tasks": len(cells),
        }
    )


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _rounded(cell: dict[str, Any]) -> dict[str, Any]:
    """Four decimals: what is published is what is compared."""

    def cut(value: Any) -> Any:
        if isinstance(value, list):
            return [cut(each) for each in value]
        return round(value, 4) if isinstance(value, float) else value

    return {name: cut(value) for name, value in cell.items()}


def histogram(records: Sequence[Record]) -> list[int]:
    """How many rounds kept 0, 1, 2, ... drafts."""
    accepted = [count for record in records for count in record["accepted"]]
    counts = [0] * (max(accepted, default=0) + 1)
    for count in accepted:
        counts[count] += 1
    return counts


def conditional_acceptance(records: Sequence[Record]) -> list[tuple[int, float]]:
    """For each slot: how many rounds had a draft there with all before it accepted, and the share that kept it."""
    rounds = [
        (count, drafted)
        for record in records
        if record["drafted"] is not None
        for count, drafted in zip(record["accepted"], record["drafted"])
    ]
    slots = []
    for slot in range(1, max((drafted for _, drafted in rounds), default=0) + 1):
        reached = [count for count, drafted in rounds if drafted >= slot and count >= slot - 1]
        if not reached:
            break
        slots.append((len(reached), sum(count >= slot for count in reached) / len(reached)))
    return slots


def cost_model(records: Sequence[Record], plain: Sequence[Record]) -> dict[str, Any] | None:
    """The cost model of one method: milliseconds a round by stage, and predicted beside measured speed-up.

    eta = tau * L_target / (T_draft + T_verify), where L_target is plain generation's time a token and T_draft = context +
    backbone + base_head + domino_head. What the model leaves out, commit and other, is the rest. `None` where the stages
    were not timed (on an accelerator, where timing them would slow the round down).
    """
    prompts = {_prompt(record) for record in plain}
    records = [record for record in records if _prompt(record) in prompts]
    rounds = sum(record["rounds"] for record in records)
    if not rounds or not all(record["stage_seconds"] for record in records if record["rounds"]):
        return None
    stages = {
        stage: 1000 * sum(record["stage_seconds"].get(stage, 0.0) / record["batch"] for record in records) / rounds
        for stage in STAGES
    }
    matched = {_prompt(record) for record in records}
    target = 1000 * _pooled([record for record in plain if _prompt(record) in matched])
    whole = sum(stages.values())
    draft = sum(stages[stage] for stage in DRAFT_STAGES)
    tau = sum(decode_tokens(record) for record in records) / rounds
    rest = 1 - (draft + stages["verify"]) / whole
    return {
        "stages": stages,
        "round": whole,
        "draft": draft,
        "target": target,
        "tau": tau,
        "predicted": tau * target / (draft + stages["verify"]),
        "measured": tau * target / whole,
        "head_of_round": stages["domino_head"] / whole,
        "head_of_draft": stages["domino_head"] / draft if draft else 0.0,
        "rest": rest,
        "flagged": rest > REST_LIMIT,
    }
