"""Cards, rendered from what stands in a folder: config, training record, ablation, results, recipe; never typed.

`domino card NAME` writes `hub_cards/NAME/README.md` for an id that is still to be chosen (`ORG/NAME`); a push renders the card again
for its repository and tag. What is not there is said to be missing, not left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData, ModelCard, ModelCardData

from hub_cards.answers import SOURCES, answer_facts
from modeling_domino import DominoConfig
from modeling_domino.benchmark.blocks import results_block, speed_block
from modeling_domino.benchmark.report import model_index
from modeling_domino.benchmark.summary import NOT_RUN
from modeling_domino.benchmark.tables import PUBLISHED, table
from modeling_domino.facts import drafter_facts
from modeling_domino.provenance import sha256_of
from modeling_domino.stage import RECIPE, read_recipe
from modeling_domino.training.regenerate import SETTINGS_FILE


HERE = Path(__file__).parent
TEMPLATES = HERE / "templates"
ENGINES = HERE / "engines.json"
# What people say of a drafter that no file of its training says: licence, languages, sources of its prompts.
FACTS = "card.json"
RESULTS = Path("results", "dev.json")
FIGURE = Path("results", "tasks.svg")
TAGS = (
    *("speculative-decoding", "speculative-decoding-draft", "draft-model", "domino", "dflash", "block-diffusion"),
    "custom_generate",
)
UNCHOSEN = ("ORG", "v1")


def render(
    folder: Path,
    *,
    repo_id: str | None = None,
    tag: str = UNCHOSEN[1],
    facts: Path | None = None,
    licence: dict[str, str] | None = None,
) -> str:
    """The card of a folder.

    Args:
        folder (`Path`): a drafter, a recipe for one, or answers to prompts.
        repo_id (`str`, *optional*): the repository; by default one of this name whose organisation is still open.
        tag (`str`): the tag that snippets pin.
        facts (`Path`, *optional*): where card.json or recipe.json lie, by default in `folder`.
        licence (`dict`, *optional*): of the source of a recipe, as its own card names it in its front matter.

    Raises:
        ValueError: if the folder is none of these, or a file that the card is made from is missing.
    """
    repo_id = repo_id or f"{UNCHOSEN[0]}/{folder.name}"
    if (folder / SETTINGS_FILE).is_file():
        return _render_answers(folder, repo_id, tag)
    recipe = read_recipe(facts or folder)
    if recipe is not None:
        about = {**recipe, "license": "unknown", **(licence or {})}
    elif ((facts or folder) / FACTS).is_file():
        about = _read((facts or folder) / FACTS)
    else:
        raise ValueError(f"The card of {folder.name} needs {FACTS} with its license and language, or {RECIPE}.")
    return _render_drafter(folder, repo_id, tag, about)


def engines_table() -> str:
    """Engines and devices, and what was tried on them: the one table of README and cards."""
    engines = _read(ENGINES)
    rows = [
        [row["engine"], row["device"], row["loads"], row["head"], row["version"] or "-", row["date"] or "-"]
        for row in engines["rows"]
    ]
    header = ("engine", "device", "loads", "head runs", "tested version", "date")
    return f"{_text_table(header, rows)}\n\n{engines['note']}"


def render_page(page: Path) -> str:
    """A Markdown page with the table between `<!-- engines -->` and `<!-- /engines -->` made anew."""
    text = page.read_text(encoding="utf-8")
    pattern = r"(<!-- engines -->)\n.*?(<!-- /engines -->)"
    return re.sub(pattern, lambda match: f"{match[1]}\n\n{engines_table()}\n\n{match[2]}", text, flags=re.DOTALL)


# ---- drafters


def _render_drafter(folder: Path, repo_id: str, tag: str, about: dict[str, Any]) -> str:
    # A recipe's folder holds no drafter until it is staged.
    staged = (folder / "config.json").is_file()
    config = DominoConfig.from_pretrained(folder) if staged else DominoConfig.from_dict(about["config"])
    facts = drafter_facts(config)
    target = about.get("target") or config.target_model
    if target is None:
        raise ValueError(f"The card of {folder.name} needs its target: set `target_model` in config.json.")
    summary = _read(folder / RESULTS) if (folder / RESULTS).is_file() else None
    if summary is None and "source" not in about:
        raise ValueError(f"The card of {folder.name} needs {RESULTS.as_posix()}; `domino bench` measures it.")
    data = ModelCardData(
        language=about["language"],
        license=about["license"],
        license_name=about.get("license_name"),
        license_link=about.get("license_link"),
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=target,
        base_model_relation="finetune",
        datasets=_datasets(about.get("prompt_sources", [])) or None,
        tags=list(TAGS),
        **({} if summary is None else model_index(summary)),
    )
    content = {
        "name": repo_id.split("/")[-1],
        "repo_id": repo_id,
        "tag": tag,
        "target": target,
        "source": about.get("source"),
        "revision": about.get("revision"),
        # Qwen3's template thinks aloud unless told otherwise, and its drafters were trained without.
        "template_options": "    enable_thinking=False,\n" if about.get("thinking") is False else "",
        "results": None,
        "published": _published(about.get("published_as")),
        "configuration": _configuration(config, facts),
        "data": _data(folder, about),
        "engines": engines_table(),
        "files": _files(folder, about),
    }
    if summary is not None:
        content |= _measured(summary) | {"figure": FIGURE.as_posix() if (folder / FIGURE).is_file() else None}
    card = ModelCard.from_template(data, template_path=str(TEMPLATES / "model.md"), **content)
    return f"{str(card).rstrip()}\n"


def _measured(summary: dict[str, Any]) -> dict[str, Any]:
    provenance, tokens = summary["provenance"], summary["tokens"]
    averages = {
        method: cells["average"]
        for method, cells in summary["results"].items()
        if method in ("chain", "tree") and cells["average"] != NOT_RUN
    }
    if not averages:
        raise ValueError(
            "A drafter's results need the method chain or tree; run `domino bench --methods plain,chain`."
        )
    best = max(averages, key=lambda method: averages[method]["speedup"])
    speedup = averages[best]["speedup"]
    verdict = (
        f"On average over the tasks the {best} decodes {speedup:.2f}x as fast as plain generation on this hardware"
        + (": it pays." if speedup > 1 else ": it does not pay there.")
    )
    return {
        "results": results_block(summary),
        "speed": speed_block(summary),
        "verdict": verdict,
        "command": _command(provenance),
        "dtype": provenance["dtype"],
        "tokens": f"{tokens['compared']:,}",
        "texts": tokens["texts"],
        "differing": f"{tokens['differing']:,}",
    }


def _configuration(config: DominoConfig, facts: dict[str, Any]) -> str:
    rows = [
        ["drafts a round", f"{facts['drafts_per_round']} (block of {facts['block_size']})"],
        ["layers", f"{config.num_hidden_layers}, hidden size {config.hidden_size}"],
        ["reads the target's layers", f"{', '.join(map(str, config.target_layer_ids))} of {config.num_target_layers}"],
        ["correction head", f"GRU of {config.gru_hidden_dim}, rank {config.emb_dim}" if config.has_head else "none"],
        ["first drafts without correction", f"{config.pure_draft_prefix_len}"],
        ["mask token", f"{config.mask_token_id}"],
        ["parameters stored", f"{facts['stored_parameters']:,}"],
        ["of them in the head", f"{facts['head_parameters']:,}"],
        ["borrowed from the target", f"embeddings and output head, {facts['borrowed_embedding_parameters']:,} each"],
    ]
    return _text_table(("setting", "value"), rows)


def _data(folder: Path, about: dict[str, Any]) -> str:
    """What the drafter was trained on, and what that took."""
    lines = []
    if sources := about.get("prompt_sources"):
        known = _read(SOURCES)
        named = [f"{known[name]['name']} ({known[name]['licence']})" for name in sources]
        lines.append(f"Trained on the target's own greedy answers to prompts of: {'; '.join(named)}.")
    if (folder / "training.json").is_file():
        lines.append(_cost(_read(folder / "training.json")))
    elif "source" in about:
        lines.append("As published by its authors, who describe data and training in the paper; not trained by us.")
    if (folder / "ablation.json").is_file():
        lines.append(_ablation(_read(folder / "ablation.json")))
    if not lines:
        raise ValueError(f"The card of {folder.name} needs training.json, the record that `domino train` writes.")
    return "\n\n".join(lines)


def _cost(record: dict[str, Any]) -> str:
    hardware, end = record["provenance"]["hardware"], training_end(record)
    steps, final = end["steps"], end["final"]
    text = f"{steps:,} steps in {record['seconds']:,.0f} seconds on {hardware.get('gpu') or hardware['cpu']}"
    text += f", {record['processes']} processes" if record.get("processes", 1) > 1 else ""
    text += f", {record['sequences_visited']:,} sequences visited" if "sequences_visited" in record else ""
    # A training of several sessions may have had several.
    seeds = record["seed"] if isinstance(record["seed"], list) else [record["seed"]]
    text += f"; seed {', '.join(map(str, seeds))}."
    if "eval_acceptance" in final:
        text += f" Held-out acceptance length at its end: {final['eval_acceptance']:.2f}"
        text += f", {final['eval_acceptance_base']:.2f} without the correction."
    return f"{text} The whole record, with every command, is `training.json`."


def training_end(record: dict[str, Any]) -> dict[str, Any]:
    """Steps of a training, and the last evaluation in its log."""
    log = record.get("log_history") or [{}]
    last = next((entry for entry in reversed(log) if "eval_acceptance" in entry), {})
    steps = record.get("steps") or max(entry.get("step", 0) for entry in log)
    return {"steps": steps, "final": record.get("final") or last}


def _ablation(record: dict[str, Any]) -> str:
    rows = []
    for name, arm in record["arms"].items():
        run = isinstance(arm, dict)
        cells = [arm["tau"].get(head, {}).get("tau") if run else None for head in ("head_on", "head_off")]
        acceptance = arm["eval"].get("eval_acceptance") if run else None
        shown = ["-" if value is None else f"{value:.2f}" for value in (*cells, acceptance)]
        rows.append([name, *(shown if run else [arm, arm, arm])])
    header = ["arm", "tau", "tau, head off", "held-out acceptance"]
    about = record.get("what", "Arms on the same data and budget.")
    return f"Ablation. {about}\n\n{table(header, rows)}"


def _files(folder: Path, about: dict[str, Any]) -> str:
    sha256 = sha256_of(folder)
    rows = [["weights, SHA-256", f"`{sha256}`" if sha256 else "made from the source when the repository is staged"]]
    for name in ("training.json", RESULTS.as_posix()):
        if (folder / name).is_file():
            versions = _read(folder / name)["provenance"]["versions"]
            shown = [f"{package} {versions[package]}" for package in ("torch", "transformers") if package in versions]
            rows.append([f"versions behind {name}", ", ".join(shown)])
    if about.get("stored_parameters") and not sha256:
        rows.append(["parameters expected", f"{about['stored_parameters']:,}"])
    return _text_table(("file", "value"), rows)


def _published(model: str | None) -> str | None:
    """Published numbers of a target, one table a set-up."""
    if model is None:
        return None
    sections = []
    for setup in _read(PUBLISHED)["setups"]:
        rows = [row for row in setup["rows"] if row.get("model") == model and "tau" in row]
        if rows:
            shown = [
                [row["method"], row.get("task", "mean"), f"{row['tau']:.2f}", f"{row['speedup']:.2f}"] for row in rows
            ]
            sections.append(
                f"{setup['source']}; {setup['setup']}. Baseline: {setup['baseline']}.\n\n"
                + table(["method", "task", "tau", "speed-up"], shown)
            )
    return "\n\n".join(sections)


def _datasets(names: Sequence[str]) -> list[str]:
    known = _read(SOURCES)
    return list(dict.fromkeys(known[name]["dataset"] for name in names if known[name]["dataset"]))


# ---- answers


def _render_answers(folder: Path, repo_id: str, tag: str) -> str:
    facts = answer_facts(folder)
    settings, provenance, sources = facts["settings"], facts["provenance"], facts["sources"]
    licences = sorted({source["licence"] for source in sources})
    datasets = sorted({source["dataset"] for source in sources if source["dataset"]})
    data = DatasetCardData(
        language=["en"],
        license=licences if len(licences) > 1 else licences[0],
        pretty_name=repo_id.split("/")[-1],
        task_categories=["text-generation"],
        size_categories=[_size_category(facts["rows"])],
        source_datasets=datasets or None,
        tags=["speculative-decoding", "domino", "synthetic"],
        configs=[{"config_name": "default", "data_files": "*.jsonl.gz"}],
    )
    decoding = "greedily" if settings["temperature"] == 0 else f"at temperature {settings['temperature']:g}"
    content = {
        "name": repo_id.split("/")[-1],
        "repo_id": repo_id,
        "tag": tag,
        "target": facts["target"],
        "rows": f"{facts['rows']:,}",
        "tokens": f"{facts['tokens']:,}",
        "shards": "one shard" if facts["shards"] == 1 else f"{facts['shards']} shards",
        "finished": ", ".join(f"{count:,} end by `{how}`" for how, count in sorted(facts["finish"].items())),
        "sources": _text_table(
            ("prompts of", "answers", "licence", "data set"),
            [[each["name"], f"{each['rows']:,}", each["licence"], each["dataset"] or "-"] for each in sources],
        ),
        "command": _command(provenance),
        "decoding": f"decoded {decoding}, at most {settings['max_new_tokens']} tokens an answer",
        "dtype": provenance["dtype"],
        "hardware": provenance["hardware"].get("gpu") or provenance["hardware"]["cpu"],
        "torch": provenance["versions"]["torch"],
        "transformers": provenance["versions"]["transformers"],
    }
    card = DatasetCard.from_template(data, template_path=str(TEMPLATES / "dataset.md"), **content)
    return f"{str(card).rstrip()}\n"


def _size_category(rows: int) -> str:
    bounds = [(1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M")]
    return next((name for most, name in bounds if rows < most), "1M<n<10M")


def _command(provenance: dict[str, Any]) -> str:
    """The recorded command as a user types it."""
    return re.sub(r"^(cli|__main__)\.py", "domino", provenance["command"])


def _text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
