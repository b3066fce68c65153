"""Files that must not be published: training state, caches, pickles, links, what is too large, and whatever holds a secret."""

from __future__ import annotations

import fnmatch
import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path


# In lower case; names are compared without case.
DENIED_FILES = (
    *("*.pt", "*.pth", "*.bin", "*.ckpt", "*.pkl", "*.pickle", "*.pyc", "*.incomplete", "*.lock", ".ds_store"),
    *("optimizer*", "scheduler.*", "rng_state*", "trainer_state.json"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *(".env*", ".netrc", ".npmrc", ".pypirc", ".git-credentials"),
)
DENIED_FOLDERS = {"__pycache__", ".cache", ".git", ".ipynb_checkpoints", ".pytest_cache", ".ruff_cache", "wandb"}
# The Hub's advice for a single file.
MOST_BYTES = 20 << 30
SECRETS = {
    "a Hugging Face token": r"hf_(?:[A-Za-z0-9]{30,}|oauth_[A-Za-z0-9._-]{20,})",
    "a token of an organisation on the Hub": r"api_org_[A-Za-z0-9]{30,}",
    "a GitHub token": r"gh[opsru]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{22,}",
    "a Google key": r"AIza[A-Za-z0-9_-]{35}",
    "an API key": r"sk-[A-Za-z0-9_-]{20,}",
    "an AWS key": r"(?:AKIA|ASIA)[0-9A-Z]{16}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password in an address": r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/:@\"'<>]*:[^\s/@\"'<>]+@[A-Za-z0-9\[]",
}
# Not within a longer word; the last letter of an escape (\n in JSON, %3D in an address, ESC[31m) is no word.
SECRET_BEGINS = rb"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2})|(?<=[0-9]m))"
SECRET_PATTERNS = {
    what: re.compile(SECRET_BEGINS + rb"(?:" + pattern.encode() + rb")") for what, pattern in SECRETS.items()
}


def file_problems(folder: Path) -> list[str]:
    """Files that have no business in a repository, and secrets in those that have."""
    problems = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink()):
        name = path.relative_to(folder)
        if path.is_symlink():
            problems.append(f"{name} is a link; publish the file itself.")
        elif _is_denied(name):
            problems.append(f"{name} is not for publishing (training state, cache, pickle or secret); remove it.")
        elif path.stat().st_size > MOST_BYTES:
            problems.append(f"{name} has {path.stat().st_size:,} bytes; split it below {MOST_BYTES:,}.")
        elif path.suffix != ".safetensors":
            try:
                problems += [f"{name} contains {what}; remove and revoke it." for what in secrets_in(path)]
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                problems.append(f"{name} is no whole gzip file ({error}); make it again, or remove it.")
    return problems


def _is_denied(name: Path) -> bool:
    lower = Path(str(name).lower())
    return bool(DENIED_FOLDERS & set(lower.parts[:-1])) or any(
        fnmatch.fnmatchcase(lower.name, deny) for deny in DENIED_FILES
    )


def secrets_in(path: Path) -> Iterator[str]:
    """What kinds of secrets a file contains, compressed or not, in UTF-8 or UTF-16."""
    content = path.read_bytes()
    if path.suffix.lower() == ".gz":
        content = gzip.decompress(content)
    # UTF-16 is ASCII with a zero byte beside each letter.
    readings = (content, content.replace(b"\0", b"")) if b"\0" in content else (content,)
    for what, pattern in SECRET_PATTERNS.items():
        if any(pattern.search(reading) for reading in readings):
            yield what
