"""What a folder of regenerated answers holds: counts over its shards, and where its prompts come from."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from modeling_domino.default_pair import HUB_ID
from modeling_domino.training.regenerate import SETTINGS_FILE


# Name, licence and address of every source of prompts, by the part of a prompt's id before the slash.
SOURCES = Path(__file__).parent / "sources.json"


def answer_facts(folder: Path) -> dict[str, Any]:
    """Counts, target and settings of a folder that `domino regenerate` wrote.

    Raises:
        ValueError: if a shard is missing or damaged, or prompts come from a source whose licence is not in sources.json.
    """
    record = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
    shards = sorted(folder.glob("*.jsonl.gz"))
    if not shards:
        raise ValueError(f"A folder of answers needs shards (*.jsonl.gz), {folder} has none; run `domino regenerate`.")
    by_source: Counter[str] = Counter()
    finish: Counter[str] = Counter()
    tokens = 0
    for shard in shards:
        try:
            for line in gzip.decompress(shard.read_bytes()).splitlines():
                row = json.loads(line)
                by_source[row["id"].split("/")[0]] += 1
                finish[row["finish"]] += 1
                tokens += len(row["response_ids"])
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{shard} is no complete shard ({error}); remove it and run `domino regenerate`."
            ) from None
    known = json.loads(SOURCES.read_text(encoding="utf-8"))
    if unknown := sorted(by_source.keys() - known.keys()):
        raise ValueError(f"Prompts of {', '.join(unknown)} need a licence; add them to {SOURCES.name} in hub_cards/.")
    settings = record["settings"]
    return {
        "target": HUB_ID if settings["target"] == "default" else settings["target"],
        "settings": settings,
        "provenance": record["provenance"],
        "shards": len(shards),
        "rows": sum(by_source.values()),
        "tokens": tokens,
        "finish": dict(finish),
        "sources": [
            {**known[name], "rows": count} for name, count in sorted(by_source.items(), key=lambda item: -item[1])
        ],
    }
