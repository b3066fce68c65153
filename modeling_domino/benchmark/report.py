"""The report of a benchmark folder: tables, plots and summary, from raw records alone.

Needs neither torch nor a GPU nor the models: `python -m modeling_domino.benchmark.report FOLDER` runs anywhere, and writes
the same bytes each time. Plots need matplotlib and are left out, with a word, where it is absent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..atomic import write_json, write_text
from .plots import draw_plots, draw_throughput
from .prompts import HUB_DATASETS, TASKS
from .records import flatten, read_provenance, read_records
from .server import SERVER_RECORDS, read_levels, summarise_servers
from .summary import (
    METHODS,
    NOT_RUN,
    PLAIN,
    STAGES,
    Record,
    by_temperature,
    conditional_acceptance,
    cost_model,
    decode_seconds,
    histogram,
    summarise,
)
from .tables import number, published_tables, ratio_text, speedup_text, table, tau_text
from .variants import method_of


LEGEND = """\
- **tau** counts the tokens of a verification, the target's own included; its cap (drafts + 1) stands behind the slash. The
  forward that reads the prompt is not counted.
- **Speed-up** is over plain generation without a drafter, after the first token, on the same prompts; plain is the faster
  of `target.generate` and our own loop without drafts. Brackets hold 95 % intervals from resampling prompts (paired).
- mean, median and SD are of the prompts' own speed-ups; "with prompt" is the speed-up with the reading of the prompt.
- memory is the peak of a generation: of tensors on CUDA, on Linux of the process; elsewhere that of the whole run.
- round cost is a round's time in tokens of plain generation: a method pays where tau is above it.
- **average** gives every task the same weight."""


def write_report(folder: Path) -> dict[str, Any]:
    """Writes `report.md`, `summary.json`, `model-index.yaml` and the plots into `folder`; returns the summary."""
    if (folder / SERVER_RECORDS).is_file():
        return _write_server_report(folder)
    records, provenance = read_records(folder), read_provenance(folder)
    summary = summarise(records, provenance)
    write_json(folder / "summary.json", summary)
    # JSON is YAML.
    write_json(folder / "model-index.yaml", model_index(summary))
    plots = draw_plots(records, summary, folder)
    write_text(folder / "report.md", render(records, summary, plots))
    return summary


def render(records: Sequence[Record], summary: dict[str, Any], plots: Sequence[str] = ()) -> str:
    """The report as Markdown."""
    sections = [_introduction(summary)]
    for name, results in by_temperature(summary).items():
        chosen = [record for record in records if f"{record['temperature']:g}" == name]
        sections += _temperature(name, chosen, results, summary)
    sections.append(_tokens(records, summary))
    if plots:
        sections.append("## Plots\n\n" + "\n".join(f"![{name}]({name})" for name in plots))
    else:
        sections.append("## Plots\n\nNot drawn: matplotlib is not installed.")
    sections.append(published_tables())
    return "\n\n".join(sections) + "\n"


def compare(folders: Sequence[Path]) -> str:
    """One table over several folders, for ablations: what their settings differ in, tau, speed-up and the head's share."""
    loaded = [(folder, read_records(folder), read_provenance(folder)) for folder in folders]
    settings = [flatten(provenance["settings"]) for _, _, provenance in loaded]
    names = sorted(set().union(*settings))
    changed = [name for name in names if len({json.dumps(each.get(name)) for each in settings}) > 1]
    rows = []
    for (folder, records, provenance), each in zip(loaded, settings):
        summary = summarise(records, provenance)
        for temperature, results in by_temperature(summary).items():
            chosen = [record for record in records if f"{record['temperature']:g}" == temperature]
            plain = [record for record in chosen if record["method"] == summary["plain_is"][temperature]]
            for method in [name for name in results if method_of(name) in METHODS[1:]]:
                cell = results[method]["average"]
                if cell != NOT_RUN:
                    cost = cost_model([record for record in chosen if record["method"] == method], plain)
                    head = "not measured" if cost is None else f"{100 * cost['head_of_round']:.1f} %"
                    setting = [str(each.get(name)) for name in changed]
                    rows.append([folder.name, *setting, temperature, method, tau_text(cell), speedup_text(cell), head])
    header = ["folder", *(name.removeprefix("settings.") for name in changed), "T", "method", "tau", "speed-up"]
    return f"## Comparison, average over tasks\n\n{table([*header, 'head of round'], rows)}\n"


def model_index(summary: dict[str, Any]) -> dict[str, Any]:
    """The results as a card's `model-index`."""
    provenance = summary["provenance"]
    models, hardware = provenance["models"], provenance["hardware"]
    machine = hardware.get("gpu") or hardware["cpu"] or hardware["device"]
    metrics = (
        ("tau", "acceptance_length", "acceptance length"),
        ("speedup", "speedup", "speed-up over plain generation"),
        ("tokens_per_second", "tokens_per_second", "tokens a second"),
    )
    results = []
    for temperature, methods in by_temperature(summary).items():
        for method in METHODS[1:]:
            for task, cell in methods[method].items():
                if cell == NOT_RUN or task == "average":
                    continue
                dataset = HUB_DATASETS[task][0][0] if task in HUB_DATASETS else task
                where = (
                    f"{task}, {method}, T={temperature}, {models['dtype']} on {machine}, batch 1, block {models['block_size']}, "
                    f"{cell['prompts']} prompts"
                )
                results.append(
                    {
                        "task": {"type": "text-generation"},
                        "dataset": {"type": dataset, "name": task},
                        "metrics": [
                            {"type": kind, "name": f"{shown} ({where})", "value": cell[name]}
                            for name, kind, shown in metrics
                            if cell[name] is not None
                        ],
                    }
                )
    return {"model-index": [{"name": provenance["models"]["drafter"], "results": results}]}


def _write_server_report(folder: Path) -> dict[str, Any]:
    """The report of servers, which has no model-index: what a server computes is its own affair."""
    summary = summarise_servers(read_levels(folder), read_provenance(folder))
    write_json(folder / "summary.json", summary)
    plots = draw_throughput(summary, folder)
    write_text(folder / "report.md", render_servers(summary, plots))
    return summary


def render_servers(summary: dict[str, Any], plots: Sequence[str] = ()) -> str:
    """The report of servers as Markdown."""
    arms, options = summary["server"], summary["provenance"]["settings"]
    lines = [
        "# Servers",
        "",
        *(f"- {name}: {arm['model']}" for name, arm in arms.items()),
        f"- up to {options['max_new_tokens']} new tokens, thinking {'on' if options['thinking'] else 'off'}, first turns only",
        "- tau is the servers' own figure, the target's token included; speed-up is over the arm named plain",
    ]
    if "plain" not in arms:
        lines.append("- no arm is named plain: speed-up not run")
    sections = ["\n".join(lines)]
    for temperature in sorted({name for arm in arms.values() for name in arm["levels"]}, key=float):
        rows = [
            [
                name,
                concurrency,
                number(cell["tokens_per_second"], 1),
                NOT_RUN if cell["speedup"] is None else number(cell["speedup"]),
                "not offered" if cell["tau"] is None else number(cell["tau"]),
                number(1000 * cell["first_token_seconds"], 0),
                number(cell["latency_p50"]),
                number(cell["latency_p90"]),
                str(cell["requests"]),
            ]
            for name, arm in arms.items()
            for concurrency, cell in arm["levels"].get(temperature, {}).items()
        ]
        header = ["arm", "concurrency", "tokens/s", "speed-up", "tau", "first token ms", "p50 s", "p90 s", "requests"]
        sections.append(f"## Temperature {temperature}\n\n{table(header, rows)}")
    sections += [f"![{name}]({name})" for name in plots]
    sections.append(published_tables())
    return "\n\n".join(sections) + "\n"


def _introduction(summary: dict[str, Any]) -> str:
    provenance = summary["provenance"]
    models, hardware = provenance["models"], provenance["hardware"]
    options = models["settings"]
    run = [task for task in summary["results"]["plain"] if task != "average"]
    missing = [task for task in TASKS if task not in run]
    place = f"{hardware['cpu']}, {hardware['threads']} threads" if hardware["device"] == "cpu" else hardware.get("gpu")
    lines = [
        f"# {models['drafter']} for {models['target']}",
        "",
        f"- {models['kind']}, block of {models['block_size']}, {models['dtype']} on {place or hardware['device']}",
        f"- up to {options['max_new_tokens']} new tokens, seed {options['seed']}, batch size {options['batch_size']}, "
        + (
            "no chat template"
            if options["raw"]
            else f"chat template, thinking {'on' if options['thinking'] else 'off'}"
        ),
        f"- {len(set(run) & set(TASKS))} of {len(TASKS)} tasks: {', '.join(run)}"
        + (f"; not run: {', '.join(missing)}" if missing else ""),
        f"- commit {provenance['git_sha'] or 'unknown'}{' with changes' if provenance['git_dirty'] else ''}, "
        f"torch {provenance['versions']['torch']}, transformers {provenance['versions']['transformers']}, "
        f"{provenance['date']}",
    ]
    if models.get("trained") is False:
        lines.append(
            "- **The drafter is untrained: its drafts are noise, and these numbers say nothing about Domino.**"
        )
    lines += [f"- deviation from the papers: {line}" for line in provenance.get("deviations", [])]
    return "\n".join([*lines, "", LEGEND])


def _temperature(name: str, records: Sequence[Record], results: dict[str, Any], summary: dict[str, Any]) -> list[str]:
    tasks = list(results["plain"])
    shown = [method for method in results if any(cell != NOT_RUN for cell in results[method].values())]
    absent = [method for method in METHODS if method not in shown]
    baseline = summary["plain_is"][name]
    plain = [record for record in records if record["method"] == baseline]
    sections = [
        f"## Temperature {name}\n\nplain is {baseline}, the faster form here."
        + (f" Methods not run: {', '.join(absent)}." if absent else ""),
        "### tau\n\n"
        + table(
            ["method", *tasks],
            [
                [method, *(tau_text(results[method][task]) for task in tasks)]
                for method in shown
                if method not in PLAIN
            ],
        ),
        "### Speed-up\n\n"
        + table(
            ["method", *tasks],
            [[method, *(speedup_text(results[method][task]) for task in tasks)] for method in shown],
        ),
        "### Time, average over tasks\n\n"
        + table(
            [
                "method",
                "tokens/s",
                "round cost",
                "with prompt",
                "mean",
                "median",
                "SD",
                "first token ms",
                "p50 s",
                "p90 s",
                "memory MB",
                "identical",
                "prompts",
            ],
            [_times(method, results[method]["average"]) for method in shown],
        ),
    ]
    drafting = [method for method in shown if method_of(method) in METHODS[1:]]
    by_method = {method: [record for record in records if record["method"] == method] for method in drafting}
    return [
        *sections,
        *_beside(results, tasks),
        _acceptance(by_method),
        _slots(by_method),
        _cost(by_method, plain, summary["provenance"]),
    ]


def _beside(results: dict[str, Any], tasks: Sequence[str]) -> list[str]:
    """Ratios to the chain; no section where there is none."""
    sections = []
    for ratio, title in (("tau_ratio", "tau"), ("speed_ratio", "speed")):
        rows = [
            [method, *(ratio_text(cells[task], ratio) for task in tasks)]
            for method, cells in results.items()
            if cells["average"] != NOT_RUN and cells["average"].get("beside")
        ]
        if rows:
            sections.append(
                f"### Ratio of {title} to the chain, paired over prompts\n\n{table(['method', *tasks], rows)}"
            )
    return sections


def _times(method: str, cell: dict[str, Any]) -> list[str]:
    compared = "not compared" if cell["identical"] is None else f"{cell['identical']} / {cell['compared']}"
    return [
        method,
        number(cell["tokens_per_second"], 1),
        *(number(cell[name]) for name in ("round_cost", "speedup_total", "mean", "median", "sd")),
        number(1000 * cell["first_token_seconds"], 0),
        *(number(cell[name]) for name in ("latency_p50", "latency_p90")),
        number(cell["peak_memory_mb"], 0),
        compared,
        str(cell["prompts"]),
    ]


def _acceptance(by_method: dict[str, Sequence[Record]]) -> str:
    counts = {method: histogram(records) for method, records in by_method.items()}
    longest = max((len(count) for count in counts.values()), default=0)
    rows = []
    for method, count in counts.items():
        rounds = sum(count)
        shares = [f"{100 * each / rounds:.1f} %" if rounds else "-" for each in count]
        rows.append([method, str(rounds), *shares, *["0.0 %"] * (longest - len(count))])
    return "### Rounds by number of accepted drafts\n\n" + table(["method", "rounds", *map(str, range(longest))], rows)


def _slots(by_method: dict[str, Sequence[Record]]) -> str:
    slots = {method: conditional_acceptance(records) for method, records in by_method.items()}
    slots = {method: shares for method, shares in slots.items() if shares}
    longest = max((len(shares) for shares in slots.values()), default=0)
    rows = [
        [method, *(f"{100 * share:.1f} %" for _, share in shares), *["not reached"] * (longest - len(shares))]
        for method, shares in slots.items()
    ]
    return (
        "### Acceptance by slot, given that all drafts before it were accepted\n\nOf a tree: of a path of that depth.\n\n"
        + table(["method", *(str(slot) for slot in range(1, longest + 1))], rows)
    )


def _cost(by_method: dict[str, Sequence[Record]], plain: Sequence[Record], provenance: dict[str, Any]) -> str:
    text = "### Cost model, milliseconds a round\n\n"
    costs = {method: cost_model(records, plain) for method, records in by_method.items()}
    costs = {method: cost for method, cost in costs.items() if cost is not None}
    if costs:
        text += (
            "eta = tau x L_target / (T_draft + T_verify); T_draft = context + backbone + base_head + domino_head.\n\n"
        )
        text += table(
            ["method", *STAGES, "round", "L_target", "tau", "eta predicted", "eta measured", "head of round", "rest"],
            [
                [
                    method,
                    *(number(cost["stages"][stage]) for stage in STAGES),
                    *(number(cost[name]) for name in ("round", "target", "tau", "predicted", "measured")),
                    f"{100 * cost['head_of_round']:.1f} %",
                    f"{100 * cost['rest']:.1f} %{' (!)' if cost['flagged'] else ''}",
                ]
                for method, cost in costs.items()
            ],
        )
        text += "\n\nThe rest is what the model leaves out, commit and other; (!) marks more than 10 %."
    else:
        text += "Not measured: stages are timed on a CPU only, timing them elsewhere would slow the round down."
    return f"{text}\n\n{_bandwidth(plain, provenance)}"


def _bandwidth(plain: Sequence[Record], provenance: dict[str, Any]) -> str:
    bandwidth, size = provenance.get("memory_bandwidth_gb_per_second"), provenance.get("target_weight_bytes")
    tokens = sum(record["rounds"] for record in plain)
    if not bandwidth or not size or not tokens:
        return "Share of the bandwidth bound: not measured."
    seconds = sum(decode_seconds(record) for record in plain)
    bound = bandwidth * 1e9 / size
    return (
        f"Plain generation reaches {100 * tokens / seconds / bound:.0f} % of the bandwidth bound: {bandwidth:.1f} GB/s "
        f"measured at the start, {size / 1e6:.0f} MB of weights a token, so at most {bound:.1f} tokens/s."
    )


def _tokens(records: Sequence[Record], summary: dict[str, Any]) -> str:
    tokens = summary["tokens"]
    text = (
        f"## Losslessness\n\n{tokens['compared']:,} tokens of {tokens['texts']} greedy texts compared with plain generation: "
        f"{tokens['differing']:,} differ, in {tokens['texts_differing']} texts."
    )
    rows = []
    for record in records:
        if record["identical"] is False:
            difference = record["first_difference"]
            gap = "text ends" if difference["logit_gap"] is None else number(difference["logit_gap"], 4)
            rows.append(
                [record["id"], str(record["turn"]), record["method"], str(difference["position"]), gap],
            )
    if rows:
        text += "\n\n" + table(["prompt", "turn", "method", "first difference at token", "logit gap"], rows)
    return text


def main(words: Sequence[str]) -> int:
    """`python -m modeling_domino.benchmark.report FOLDER`."""
    if len(words) != 1:
        print("usage: python -m modeling_domino.benchmark.report FOLDER", file=sys.stderr)
        return 2
    try:
        summary = write_report(Path(words[0]))
    except (ValueError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
