"""Numbers that a card states, and whether the files beside it hold them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hub_cards.answers import answer_facts
from hub_cards.cards import training_end
from modeling_domino import DominoConfig
from modeling_domino.benchmark.tables import PUBLISHED
from modeling_domino.facts import drafter_facts
from modeling_domino.stage import read_recipe


# 1,234 or 2.13.0 or .98 or 1e9 or 98 %. Not within a name ("block-16"), nor followed by a letter ("4B") but a speed-up's x.
NUMBER = re.compile(r"(?<![\w.,/-])-?(?:\d+(?:[.,]\d+)*|\.\d+)(?:[eE][+-]?\d+)?(?=x?(?!\w|[.,]\d))(?:\s?%)?")
THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
# Records behind a result are thousands of numbers, among which any claim would be found.
LONG_KEYS = {"log_history", "curve"}


def unknown_numbers(body: str, folder: Path) -> list[str]:
    """The numbers in a Markdown text that no result file of its folder holds, each once."""
    known, texts = known_numbers(folder)
    return [number for number in dict.fromkeys(numbers_in(body)) if not _is_known(number, known, texts)]


def numbers_in(body: str) -> list[str]:
    """The numbers that a Markdown text states, outside of code, links and comments."""
    for pattern in (r"^```.*?^```", r"`[^`\n]*`", r"<!--.*?-->", r"\]\([^)]*\)", r"https?://\S+"):
        body = re.sub(pattern, " ", body, flags=re.MULTILINE | re.DOTALL)
    return NUMBER.findall(body)


def known_numbers(folder: Path) -> tuple[set[float], str]:
    """What the JSON files of a folder hold, and this project's data behind all cards: numbers, and the texts with more."""
    values: list[Any] = [json.loads(path.read_text(encoding="utf-8")) for path in _sources(folder)]
    if recipe := read_recipe(folder):
        values.append(drafter_facts(DominoConfig.from_dict(recipe["config"])))
    elif (folder / "config.json").is_file():
        values.append(drafter_facts(DominoConfig.from_pretrained(folder)))
    if (folder / "regenerate.json").is_file():
        values.append(answer_facts(folder))
    if (folder / "training.json").is_file():
        values.append(training_end(json.loads((folder / "training.json").read_text(encoding="utf-8"))))
    # What the templates state is not about one drafter.
    templates = (Path(__file__).parent / "templates").glob("*.md")
    numbers, texts = set(), [" ".join(numbers_in(path.read_text(encoding="utf-8"))) for path in templates]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += [inner for key, inner in value.items() if key not in LONG_KEYS]
        elif isinstance(value, list):
            values += value
            # Counts of what is listed.
            numbers.add(float(len(value)))
        elif isinstance(value, str):
            texts.append(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers.add(float(value))
    return numbers, "\n".join(texts)


def _sources(folder: Path) -> list[Path]:
    own = [
        folder / name for name in ("config.json", "recipe.json", "training.json", "ablation.json", "regenerate.json")
    ]
    shared = sorted(Path(__file__).parent.glob("*.json"))
    files = [path for path in own if path.is_file()] + sorted(folder.glob("results/*.json"))
    return [*files, *shared, PUBLISHED]


def _is_known(number: str, known: set[float], texts: str) -> bool:
    if re.search(rf"(?<![\w.]){re.escape(number)}(?=x?(?!\w|\.\d))", texts):
        return True
    digits, percent = re.fullmatch(r"([^\s%]*)(\s?%)?", number).groups()
    if THOUSANDS.fullmatch(digits):
        digits = digits.replace(",", "")
    if "," in digits:
        return all(_is_known(each, known, texts) for each in digits.split(","))
    if digits.count(".") > 1:
        return False
    mantissa, _, exponent = digits.lower().partition("e")
    stated, places = float(digits), len(mantissa.partition(".")[2]) - int(exponent or 0)
    return any(round(each * (100 if percent else 1), places) == stated for each in known)
