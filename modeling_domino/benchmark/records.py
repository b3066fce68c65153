"""Raw records of benchmark runs: one JSON line a prompt, turn, method and temperature, and where they come from.

A folder holds `records*.jsonl` (one file a process) and `provenance.json` with the settings that all its records share
and one entry a session. No torch here: the report reads records on any machine.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..atomic import write_json


RECORDS = "records*.jsonl"
PROVENANCE = "provenance.json"
KEY = ("task", "id", "turn", "method", "temperature")


def key_of(record: dict[str, Any]) -> tuple:
    """What a record is the record of; one folder holds one of each."""
    return tuple(record[name] for name in KEY)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All records of a folder, in an order that does not depend on when they were written.

    A line that a killed run left unfinished is skipped; any other malformed line is an error that names it.
    """
    records: dict[tuple, dict[str, Any]] = {}
    for file in sorted(folder.glob(RECORDS)):
        lines = file.read_text(encoding="utf-8").split("\n")
        # A finished line ends in a line break, so what follows the last one is unfinished.
        for number, line in enumerate(lines[:-1], start=1):
            try:
                record = json.loads(line)
                records[key_of(record)] = record
            except (ValueError, TypeError, KeyError):
                raise ValueError(f"{file.name}, line {number}: not a benchmark record.") from None
    return [records[key] for key in sorted(records, key=_order)]


def _order(key: tuple) -> tuple:
    # "gsm8k/9" comes before "gsm8k/10".
    parts = key[1].split("/")
    numbered = tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts)
    return key[0], numbered, *key[2:]


class RecordFile:
    """Appends records, each in one write that reaches the disk before the next prompt starts."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            # What a killed run left unfinished would run into the next line.
            data = path.read_bytes()
            os.truncate(path, data.rfind(b"\n") + 1)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, record: dict[str, Any]) -> None:
        os.write(self._file, f"{json.dumps(record)}\n".encode())
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def read_provenance(folder: Path) -> dict[str, Any]:
    """`settings` and `sessions` of a folder with records."""
    file = folder / PROVENANCE
    if not file.is_file():
        raise ValueError(f"{folder} holds no benchmark records; make some with `domino bench --out {folder}`.")
    return json.loads(file.read_text(encoding="utf-8"))


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Refuses to add records to a folder whose records were made with other settings."""
    if not (folder / PROVENANCE).is_file():
        return
    before, now = flatten(read_provenance(folder)["settings"]), flatten(settings)
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise ValueError(
                f"The records in {folder} were made with {name} = {before.get(name)}, this run has {now.get(name)}; "
                "name another folder with --out, or run with the old setting."
            )


def write_provenance(folder: Path, settings: dict[str, Any], session: dict[str, Any]) -> None:
    """Notes a session; the settings must have been checked."""
    sessions = read_provenance(folder)["sessions"] if (folder / PROVENANCE).is_file() else []
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PROVENANCE, {"settings": settings, "sessions": [*sessions, session]})


def flatten(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
