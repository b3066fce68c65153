"""Times of the correction per block: kernels, their torch twin, and the published eager form, in one run.

    kernels benchmark domino-drafters/domino-kernels            one operation after the other, verified (`kernels` library)
    python kernels/benchmarks/benchmark.py --output FILE        a record with provenance, on the device that is here
    python kernels/benchmarks/benchmark.py --render FILE        the table of a record
    python kernels/benchmarks/benchmark.py --page README.md     the same, put into a page where it names the record

Weights are random: they change no time. All forms of one size run in turns, so that a busy machine slows them alike.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


try:
    from kernels.benchmark import Benchmark
except ImportError:  # the record needs no library
    Benchmark = object

HERE = Path(__file__).resolve().parent
# Bytes a second of the memory, from the makers' data sheets.
PEAKS = {"A100": 2.039e12, "H100": 3.352e12, "H200": 4.8e12, "B200": 8.0e12}
PREFIX_LEN = 1
CANDIDATES = 64


@dataclass(frozen=True)
class Size:
    """Hidden size, GRU width, rank, vocabulary, drafts of a block; named as in the library's legend."""

    D: int
    G: int
    R: int
    V: int
    n: int = 15


SIZES = {
    "SmolLM2-135M, rank 64": Size(576, 256, 64, 49152),
    "SmolLM2-135M, rank 128": Size(576, 256, 128, 49152),
    "Qwen3-4B": Size(2560, 1024, 256, 151936),
    "Qwen3-8B": Size(4096, 1024, 256, 151936),
}


class Block:
    """A head of random weights and the block that it corrects."""

    def __init__(self, kernel, size: Size, device: str, dtype: torch.dtype, batch: int = 1):
        torch.manual_seed(0)
        self.kernel, self.size, self.device = kernel, size, device
        with torch.device(device):
            self.gru = nn.GRU(size.D, size.G, batch_first=True, bias=False).to(dtype).requires_grad_(False)
            first = nn.Linear(size.D + size.G, size.R, bias=False)
            self.projection = nn.Sequential(first, nn.SiLU(), nn.Linear(size.R, size.V, bias=False)).to(dtype)
            self.projection.requires_grad_(False)
            self.hidden = torch.randn(batch, size.n, size.D).to(dtype)
            self.base = (3 * torch.randn(batch, size.n, size.V)).to(dtype)
            self.anchors = torch.full((batch,), 5)
            # Zeros take no memory before they are written, and as long to read.
            self.embeddings = torch.zeros(size.V, size.D, dtype=dtype)
            self.gates = torch.zeros(size.V, 3 * size.G, dtype=dtype)
        weights = (self.gru.weight_ih_l0, self.gru.weight_hh_l0, self.projection[0].weight, self.projection[2].weight)
        self.weights = kernel.HeadWeights(*weights)
        # What the drafter uses on a CPU where it measures that it gains; W_in is too small for it to matter.
        laid_out = (
            {}
            if device != "cpu"
            else {
                name: kernel.chain.ops.by_columns(getattr(self.weights, name))
                for name in ("weight_ih", "weight_hh", "weight_out")
            }
        )
        self.columns = self.weights._replace(**laid_out)

    @torch.no_grad()
    def eager(self) -> torch.Tensor:
        """The published form: a module call for the GRU, one for both layers of the correction, an argmax."""
        token, state, drafts = self.anchors[:, None], None, []
        for i in range(self.size.n):
            output, state = self.gru(nn.functional.embedding(token, self.embeddings), state)
            logits = self.base[:, i : i + 1]
            if i >= PREFIX_LEN:
                logits = logits + self.projection(torch.cat([self.hidden[:, i : i + 1], output], dim=-1))
            token = logits.argmax(dim=-1)
            drafts.append(token)
        return torch.cat(drafts, dim=1)

    @torch.no_grad()
    def rollout(self, *, table: bool = False, candidates: int = 0, tiles: bool = False) -> torch.Tensor:
        """By what the kernel build runs on this device: kernels, or their torch twin."""
        listed = self.kernel.shortlist(self.base) if tiles else self.listed(candidates)
        tables = {"gates_table": self.gates} if table else {"embeddings": self.embeddings}
        return self.kernel.chain_rollout(
            self.base, self.hidden, self.anchors, self.weights, PREFIX_LEN, candidates=listed, **tables
        )[0]

    @torch.no_grad()
    def by_columns(self, *, table: bool = False, candidates: int = 0) -> torch.Tensor:
        """By the torch functions on matrices in the layout that a drafter gives them on a CPU where it gains."""
        ops, listed, weights = self.kernel.chain.ops, self.listed(candidates), self.columns
        if listed is not None:
            # A shortlist gathers rows.
            weights = weights._replace(weight_out=self.weights.weight_out)

        def gates_of(ids: torch.Tensor) -> torch.Tensor:
            return self.gates[ids] if table else ops.gru_gates(self.embeddings[ids], weights.weight_ih)

        return ops.chain_rollout(self.base, self.hidden, self.anchors, gates_of, weights, PREFIX_LEN, listed)[0]

    def listed(self, candidates: int) -> torch.Tensor | None:
        return self.kernel.chain.ops.shortlist(self.base, candidates) if candidates else None

    def forms(self) -> dict[str, object]:
        forms = {
            "published eager form": self.eager,
            "exact": self.rollout,
            "exact, gates table": lambda: self.rollout(table=True),
            f"shortlist of {CANDIDATES}": lambda: self.rollout(candidates=CANDIDATES),
            f"shortlist of {CANDIDATES}, gates table": lambda: self.rollout(candidates=CANDIDATES, table=True),
        }
        if self.device == "cpu":
            for name, options in (
                ("exact", {}),
                ("exact, gates table", {"table": True}),
                (f"shortlist of {CANDIDATES}", {"candidates": CANDIDATES}),
                (f"shortlist of {CANDIDATES}, gates table", {"candidates": CANDIDATES, "table": True}),
            ):
                forms[f"{name}, by columns"] = lambda options=options: self.by_columns(**options)
        else:
            forms["shortlist of tiles, gates table"] = lambda: self.rollout(tiles=True, table=True)
            forms = {
                **forms,
                **{f"{name}, graph": graphed(form) for name, form in forms.items() if name != "published eager form"},
            }
            forms["published eager form, torch.compile"] = torch.compile(self.eager, mode="reduce-overhead")
        return forms

    def bytes_of(self, form: str) -> int:
        """What one block has to read from memory: the floor that bandwidth sets."""
        size, width = self.size, self.base.element_size()
        recurrent = size.n * (3 * size.G * size.G + size.R * size.G) + size.R * size.D
        inputs = size.n * (3 * size.G if "table" in form else 3 * size.G * size.D + size.D)
        corrected = size.n - PREFIX_LEN
        count = size.V // 256 if "tiles" in form else CANDIDATES
        if "shortlist" in form:
            wide = size.n * size.V + corrected * count * size.R
        else:
            wide = size.n * size.V + corrected * size.V * size.R
        return width * (recurrent + inputs + wide)


def graphed(form):
    """The same as one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            form()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = form()

    def replay():
        graph.replay()
        return output

    return replay


def seconds(form, device: str) -> float:
    """One run; on a device by its own events, on a CPU the processor's time of its one thread: others may be at work too."""
    if device == "cpu":
        started = time.process_time()
        form()
        return time.process_time() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    form()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def milliseconds_of(taken: list[float]) -> dict[str, float | list[float]]:
    """Median and quartiles of seconds."""
    low, median, high = (1e3 * value for value in statistics.quantiles(taken, n=4))
    return {"median": median, "quartiles": [low, high]}


def milliseconds_text(spread: dict[str, float | list[float]]) -> str:
    low, high = spread["quartiles"]
    return f"{spread['median']:.2f} [{low:.2f}, {high:.2f}]"


def bandwidth(device: str) -> float:
    """Bytes a second: from the data sheet, or on a CPU as read by summing 256 MB."""
    if device != "cpu":
        name = torch.cuda.get_device_name()
        return next((peak for key, peak in PEAKS.items() if key in name), float("nan"))
    data = torch.ones(2**26)
    return data.numel() * 4 / min(seconds(data.sum, device) for _ in range(5))


def measure(kernel, name: str, device: str, dtype: torch.dtype, repeats: int, peak: float) -> list[dict]:
    """Records of all forms of one size."""
    block = Block(kernel, SIZES[name], device, dtype)
    forms = block.forms()
    expected = block.eager()
    drafts = {form: run() for form, run in forms.items()}
    times = {form: [] for form in forms}
    for _ in range(repeats):
        for form, run in forms.items():
            times[form].append(seconds(run, device))
    eager = statistics.median(times["published eager form"])
    records = []
    for form, taken in times.items():
        median = statistics.median(taken)
        records.append(
            {
                "size": name,
                "form": form,
                "implementation": "eager"
                if "eager" in form
                else "torch"
                if kernel.missing(torch.device(device))
                else "triton",
                "milliseconds": milliseconds_of(taken),
                "of_eager": median / eager,
                "bytes": block.bytes_of(form),
                "of_roofline": block.bytes_of(form) / median / peak,
                "same_drafts": torch.equal(drafts[form], expected),
                "repeats": repeats,
            }
        )
    return records


def hardware(device: str) -> str:
    if device != "cpu":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def provenance(device: str, dtype: torch.dtype, peak: float) -> dict:
    git = subprocess.run(["git", "-C", HERE, "rev-parse", "HEAD"], capture_output=True, text=True)
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    return {
        "git_sha": git.stdout.strip() or None,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": version},
        "hardware": hardware(device),
        "device": device,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype)[6:],
        "bandwidth_bytes_per_second": peak,
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "command": " ".join(["python", f"kernels/benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def write_record(output: Path, record: dict) -> None:
    """Writes it whole or not at all, and says so in one line of JSON."""
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, json.dumps(record, indent=2) + "\n")
    sys.stdout.write(json.dumps({"written": str(output), "records": len(record["results"])}) + "\n")


def write_whole(path: Path, text: str) -> None:
    work = path.with_name(path.name + ".part")
    work.write_text(text, encoding="utf-8")
    work.replace(path)


def load_kernel(folder: Path):
    """The kernels of the working tree."""
    subprocess.run(
        [sys.executable, HERE.parent / "build.py", "--output", folder / "build"], check=True, capture_output=True
    )
    file = folder / "build" / "torch-cpu" / "__init__.py"
    spec = importlib.util.spec_from_file_location("domino_kernels_to_measure", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def render(record: dict) -> str:
    """A record as a Markdown table."""
    source = record["provenance"]
    lines = [
        f"Milliseconds{' of processor time' if source['device'] == 'cpu' else ''} per block of 15 drafts, {source['dtype']} on "
        f"{source['hardware']}, threads: {source['threads']}; median and quartiles, all forms in turns:",
        "",
        "| size | form | by | ms | of eager |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    for each in record["results"]:
        time_text = milliseconds_text(each["milliseconds"])
        lines.append(
            f"| {each['size']} | {each['form']} | {each['implementation']} | {time_text} | {each['of_eager']:.2f} |"
        )
    return "\n".join(lines)


def render_page(text: str, folder: Path) -> str:
    """A page with the table of each record between the comments that name it."""

    def block(found: re.Match) -> str:
        record = json.loads((folder / found[2]).read_text(encoding="utf-8"))
        return f"{found[1]}\n\n{render(record)}\n\n<!-- /kernels -->"

    return re.sub(r"(<!-- kernels: (\S+) -->).*?<!-- /kernels -->", block, text, flags=re.DOTALL)


class DominoKernelsBenchmark(Benchmark):
    """One operation after the other for `kernels benchmark`, which checks each against what `verify_*` returns."""

    seed = 0

    def _setup(self) -> None:
        on_device = self.device != "cpu"
        size = SIZES["Qwen3-4B" if on_device else "SmolLM2-135M, rank 64"]
        self.block = Block(self.kernel, size, self.device, torch.bfloat16 if on_device else torch.float32)
        self.features = torch.randn(1, size.R, device=self.device, dtype=self.block.base.dtype)

    setup_rollout = setup_table = setup_short = setup_head = setup_step = setup_shortlist = setup_finalize = _setup

    def benchmark_rollout(self):
        self.out = self.block.rollout()

    def verify_rollout(self):
        return self._twin()

    def benchmark_table(self):
        self.out = self.block.rollout(table=True)

    def verify_table(self):
        return self._twin()

    def benchmark_short(self):
        self.out = self.block.rollout(candidates=CANDIDATES)

    def verify_short(self):
        return self._twin(self.kernel.chain.ops.shortlist(self.block.base, CANDIDATES))

    def benchmark_head(self):
        self.out = self.kernel.correct_argmax(self.block.base[:, 0], self.features, self.block.weights.weight_out)

    def verify_head(self):
        ops = self.kernel.chain.ops
        return ops.pick(
            self.block.base[:, 0].float() + self.features.float() @ self.block.weights.weight_out.float().t()
        )

    def benchmark_step(self):
        weights = self.block.weights
        self.state = self.features.new_ones(1, self.block.size.G) / 2
        self.out = self.kernel.gru_step(self.block.hidden[:, 0], self.state, weights.weight_ih, weights.weight_hh)

    def verify_step(self):
        weights = self.block.weights
        return self.kernel.chain.ops.gru_step(
            self.block.hidden[:, 0], self.state, weights.weight_ih, weights.weight_hh
        )

    def benchmark_shortlist(self):
        self.out = self.kernel.shortlist(self.block.base)

    def verify_shortlist(self):
        return self.kernel.chain.ops.tile_shortlist(self.block.base)

    def _law_inputs(self):
        size, one = self.block.size, torch.ones(1, device=self.device)
        tokens = torch.arange(size.n, device=self.device)[None]
        features = self.features[:, None].expand(-1, size.n, -1).contiguous()
        return self.block.base, features, tokens, self.block.weights.weight_out, PREFIX_LEN, one

    def benchmark_finalize(self):
        self.out = self.kernel.finalize(*self._law_inputs())[0]

    def verify_finalize(self):
        return self.kernel.chain.ops.draft_log_probabilities(*self._law_inputs())[0]

    def _twin(self, candidates=None):
        """The torch function on the same device, in fp32: with random weights the best logit leads by far."""
        block, ops = self.block, self.kernel.chain.ops
        weights = ops.HeadWeights(*(None if weight is None else weight.float() for weight in block.weights))
        return ops.chain_rollout(
            block.base.float(),
            block.hidden.float(),
            block.anchors,
            lambda ids: ops.gru_gates(block.embeddings[ids].float(), weights.weight_ih),
            weights,
            PREFIX_LEN,
            candidates,
        )[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, help="measure, and write the record here")
    what.add_argument("--render", type=Path, help="print the table of a record")
    what.add_argument("--page", type=Path, help="render the records that a Markdown page names into it")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    if options.render is not None:
        sys.stdout.write(render(json.loads(options.render.read_text())) + "\n")
        return
    if options.page is not None:
        write_whole(options.page, render_page(options.page.read_text(encoding="utf-8"), options.page.parent))
        return
    if options.repeats < 2:
        parser.error(f"--repeats must be at least 2 for quartiles, got {options.repeats}.")
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("timing needs TRITON_INTERPRET unset, it is 1 here; unset it.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cpu":
        torch.set_num_threads(1)
    peak = bandwidth(device)
    with tempfile.TemporaryDirectory() as folder:
        kernel = load_kernel(Path(folder))
        results = []
        for name in options.sizes:
            results += measure(kernel, name, device, dtype, options.repeats, peak)
    record = {"provenance": provenance(device, dtype, peak), "results": results}
    write_record(options.output, record)


if __name__ == "__main__":
    main()
