"""Running a snippet as a user would who installed nothing of ours: a new process, an empty Hugging Face home."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path


REPO_ID = "acme/tiny-domino"
TAG = "v1"

# Hides packages that are installed here from every import, `find_spec` included.
HIDE = """
import sys

HIDDEN = {"modeling_domino", "triton", "kernels", "accelerate", "specforge"}

class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]

import json, logging, warnings
import torch
torch.set_num_threads(1)
RESULTS = {}

def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
"""


def run_fresh(script: str, home: Path, **environment: str) -> dict:
    """Runs `script` in a new process without our package; returns what it put into `RESULTS` (JSON values)."""
    out = home / "results.json"
    out.unlink(missing_ok=True)
    code = f"{HIDE}\n{script}\nopen({str(out)!r}, 'w').write(json.dumps(RESULTS))\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=home,
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    # Some errors of transformers carry a list of every config class there is.
    assert done.returncode == 0, "\n".join(line[:300] for line in done.stderr.splitlines()[-40:])
    return {**json.loads(out.read_text()), "stderr": done.stderr}


def put_in_hub_cache(folder: Path, home: Path, *, repo_id: str = REPO_ID, tag: str = TAG) -> str:
    """Lays a folder into the Hub cache of `home` as a download of branch main and of `tag` does; returns the commit."""
    commit = hashlib.sha1(folder.as_posix().encode()).hexdigest()
    repo = home / "hub" / f"models--{repo_id.replace('/', '--')}"
    shutil.copytree(folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    for ref in ("main", tag):
        (repo / "refs" / ref).write_text(commit)
    return commit
