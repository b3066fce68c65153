"""Files that are written whole or not at all: a reader sees the old file or the new one, never a part."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Writes aside, in the same folder, and renames."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def write_json(path: Path, content: Any) -> None:
    """`write_text` of indented JSON with a last newline."""
    write_text(path, json.dumps(content, indent=2) + "\n")
