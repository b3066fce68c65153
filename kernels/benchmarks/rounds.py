"""Times of a whole round at published sizes, with random weights: the usual loop, static rounds (one CUDA graph), plain steps.

    python kernels/benchmarks/rounds.py --output FILE            a record with provenance, on the device that is here
    python kernels/benchmarks/rounds.py --render FILE            the table of a record

Needs the library (`pip install -e .`), not the Hub: weights change no time. Random drafts are refused, so a round commits
one token; committing more costs the same. On a device every round is timed by its own events.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmark import bandwidth, milliseconds_of, milliseconds_text, provenance, write_record
from transformers import Qwen3Config, Qwen3ForCausalLM

from modeling_domino import DominoConfig, DominoDraftModel
from modeling_domino.generation_domino import stream


@dataclass(frozen=True)
class Size:
    """A Qwen3 target and its drafter; names of config fields, G and R of the head."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int = 16
    drafter_layers: int = 5
    taps: int = 5
    G: int = 1024
    R: int = 256


SIZES = {
    "Qwen3-4B": Size(2560, 9728, 36, 32, 8, 128, 151936),
    "Qwen3-8B": Size(4096, 12288, 36, 32, 8, 128, 151936),
}


@contextlib.contextmanager
def made_on(device: str, dtype: torch.dtype):
    """Models are made where they run, in their dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def pair(size: Size, device: str, dtype: torch.dtype):
    """A target and a drafter of random weights."""
    torch.manual_seed(0)
    fields = {
        name: getattr(size, name)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    }
    fields |= {"vocab_size": size.vocab_size, "max_position_embeddings": 40960, "eos_token_id": None}
    step = max(1, (size.num_hidden_layers - 2) // max(1, size.taps - 1))
    config = DominoConfig(
        **fields,
        num_hidden_layers=size.drafter_layers,
        num_target_layers=size.num_hidden_layers,
        target_layer_ids=[min(i * step, size.num_hidden_layers - 1) for i in range(size.taps)],
        block_size=size.block_size,
        mask_token_id=size.vocab_size - 1,
        projector_type="domino",
        shift_label=True,
        pure_draft_prefix_len=1,
        gru_hidden_dim=size.G,
        emb_dim=size.R,
    )
    with made_on(device, dtype):
        target = Qwen3ForCausalLM(Qwen3Config(**fields, num_hidden_layers=size.num_hidden_layers)).eval()
        drafter = DominoDraftModel(config).eval()
    return target, drafter


def times_of(target, drafter, *, context: int, rounds: int, **options) -> list[float]:
    """Seconds of `rounds` rounds behind a prompt of `context` tokens; the first are left out, they warm up."""
    device, warm_up = target.device, 3
    ids = torch.arange(context, device=device)[None] % 1000 + 5
    # A round commits at most a block; the text must not end before the last.
    most = (rounds + warm_up + 1) * drafter.config.block_size
    steps = stream(target, drafter, ids, do_sample=False, max_new_tokens=most, eos_token_id=None, **options)
    next(steps)
    taken = []
    for _ in range(rounds + warm_up):
        if device.type == "cpu":
            started = time.perf_counter()
            next(steps)
            taken.append(time.perf_counter() - started)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        next(steps)
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) / 1000)
    steps.close()
    return taken[warm_up:]


def forms(device: str, kernels: str | None) -> dict[str, tuple[str, dict]]:
    """What is timed: the kernels to draft with, and the options of the loop."""
    found: dict[str, tuple[str, dict]] = {
        "plain step, usual loop": ("torch", {"verify_width": 0}),
        "plain step, static": ("torch", {"verify_width": 0, "static": True}),
        "round, usual loop, torch": ("torch", {"candidates": 0}),
        "round, static, torch": ("torch", {"candidates": 0, "static": True}),
    }
    if kernels is not None:
        found |= {
            "round, usual loop, kernels": (kernels, {"candidates": 0}),
            "round, static, kernels": (kernels, {"candidates": 0, "static": True}),
            "round, static, kernels, shortlist of 64": (kernels, {"candidates": 64, "static": True}),
        }
    return found


def measure(
    name: str, device: str, dtype: torch.dtype, *, context: int, rounds: int, kernels: str | None
) -> list[dict]:
    """Records of all forms of one size; rounds that were to be one graph and were not are an error."""
    target, drafter = pair(SIZES[name], device, dtype)
    # Kernels that are not there shall not cost a measurement.
    for choice in dict.fromkeys(choice for choice, _ in forms(device, kernels).values()):
        drafter.set_kernels(choice)
    records = []
    for form, (choice, options) in forms(device, kernels).items():
        drafter.set_kernels(choice)
        taken = times_of(target, drafter, context=context, rounds=rounds, **options)
        report = drafter.kernel_report()
        if options.get("static") and device != "cpu" and report.rounds["captured"] == 0:
            raise RuntimeError(f"{form} of {name} was to be one CUDA graph, and none was captured: {report}")
        records.append(
            {
                "size": name,
                "form": form,
                "milliseconds": milliseconds_of(taken),
                "rounds": rounds,
                "context": context,
                "kernels": str(report),
            }
        )
    plain = min(each["milliseconds"]["median"] for each in records if each["form"].startswith("plain"))
    for each in records:
        each["of_plain"] = each["milliseconds"]["median"] / plain
    return records


def render(record: dict) -> str:
    """A record as a Markdown table."""
    source, first = record["provenance"], record["results"][0]
    lines = [
        f"Milliseconds per round behind {first['context']:,} tokens, {source['dtype']} on {source['hardware']}, random weights; "
        f"median and quartiles of {first['rounds']} rounds; blocks as the drafter has them:",
        "",
        "| size | form | ms | of the faster plain step |",
        "| --- | --- | ---: | ---: |",
    ]
    for each in record["results"]:
        time_text = milliseconds_text(each["milliseconds"])
        lines.append(f"| {each['size']} | {each['form']} | {time_text} | {each['of_plain']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, help="measure, and write the record here")
    what.add_argument("--render", type=Path, help="print the table of a record")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each form, at least 2 (default 30)")
    parser.add_argument("--context", type=int, default=512, help="tokens in front of them (default 512)")
    parser.add_argument(
        "--kernels", help="a build made by kernels/build.py, or what `set_kernels` takes; none by default"
    )
    options = parser.parse_args()
    if options.render is not None:
        sys.stdout.write(render(json.loads(options.render.read_text())) + "\n")
        return
    if options.rounds < 2 or options.context < 1:
        parser.error(
            f"--rounds must be at least 2 and --context at least 1, got {options.rounds} and {options.context}."
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    record = {"provenance": provenance(device, dtype, bandwidth(device)), "results": []}
    for name in options.sizes:
        record["results"] += measure(
            name, device, dtype, context=options.context, rounds=options.rounds, kernels=options.kernels
        )
        # After each size: a second that fails leaves the first.
        write_record(options.output, record)


if __name__ == "__main__":
    main()
