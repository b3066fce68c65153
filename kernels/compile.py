"""Compiles every kernel ahead of time for devices that need not be here, and tells what each costs them.

    python kernels/compile.py [--targets sm_80 sm_90 sm_100 gfx942] [--kernels NAME ...]

One JSON line a kernel and target: registers a thread, spilled loads and stores, bytes of shared memory. The sizes are those
of a Qwen3-4B drafter (D 2560, G 1024, R 256, V 151,936). Not for processes in which Triton's interpreter is on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
SIZES = {"D": 2560, "G": 1024, "R": 256}
R_PAD = 256


def load_kernels(folder: Path):
    """The kernels of the working tree, built into `folder` and imported."""
    here = Path(__file__).resolve().parent
    subprocess.run([sys.executable, here / "build.py", "--output", folder / "build"], check=True, capture_output=True)
    file = folder / "build" / "torch-cuda" / "__init__.py"
    spec = importlib.util.spec_from_file_location("domino_kernels_to_compile", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def variants(module) -> dict[str, tuple]:
    """What is compiled, by name: kernel, dtype of weights and logits, constants (None leaves an optional pointer out)."""
    chain, launch = module.chain, module.launch
    matvec, dot, head = launch.MATVEC, launch.DOT, launch.head_tile(SIZES["R"])
    rank = {"R": SIZES["R"], "R_PAD": R_PAD}
    sampling = {"SAMPLE": True, "ROUND": False}
    greedy = {"SAMPLE": False, "ROUND": False, "seed_ptr": None, "temperature_ptr": None}
    no_bias = {"bias_ptr": None}
    no_head_bias = {"bias_in_ptr": None, "bias_hh_ptr": None}
    state = {**SIZES, **matvec, "ROUND": False, "bias_hh_ptr": None, "vocabulary_ptr": None}
    return {
        "init": (chain.init_kernel, "bf16", {**SIZES, **matvec, "ROUND": False, **no_head_bias}),
        "input": (
            chain.input_kernel,
            "bf16",
            {
                "K": SIZES["D"],
                "N": 3 * SIZES["G"],
                "GATHER": True,
                "ROUND": False,
                "vocabulary_ptr": None,
                **no_bias,
                **matvec,
            },
        ),
        "update": (chain.update_kernel, "bf16", {"G": SIZES["G"], "ROUND": False, "COLS": 256, "num_warps": 4}),
        "state": (chain.state_kernel, "bf16", {**state, "TABLE": True, "parents_ptr": None}),
        "state, tree": (chain.state_kernel, "bf16", {**state, "TABLE": False, "keys_ptr": None}),
        "head": (chain.head_kernel, "bf16", {**rank, **greedy, **no_bias, "CORRECT": True, **head}),
        "head, base only": (chain.head_kernel, "bf16", {**rank, **greedy, **no_bias, "CORRECT": False, **head}),
        "head, sampled": (chain.head_kernel, "bf16", {**rank, **sampling, **no_bias, "CORRECT": True, **head}),
        "head, fp32": (chain.head_kernel, "fp32", {**rank, **greedy, **no_bias, "CORRECT": True, **head}),
        "head, dot": (chain.head_dot_kernel, "bf16", {"R": 256, **greedy, **no_bias, "INTERPRET": False, **dot}),
        "head, dot, sampled": (
            chain.head_dot_kernel,
            "bf16",
            {"R": 256, **sampling, **no_bias, "INTERPRET": False, **dot},
        ),
        "short": (
            chain.short_kernel,
            "bf16",
            {**rank, **greedy, "biases_ptr": None, "CORRECT": True, **launch.SHORT},
        ),
        "shortlist": (chain.shortlist_kernel, "bf16", {"TILE": 1024, "COUNT": 4, **launch.SHORTLIST}),
        "gather": (chain.gather_kernel, "bf16", {**rank, **launch.GATHER}),
        "finalize": (chain.finalize_kernel, "bf16", {"R": 256, "ROUND": False, **no_bias, "INTERPRET": False, **dot}),
        "expand": (
            module.tree.expand_kernel,
            "bf16",
            {
                "R": 256,
                "CHILDREN": 8,
                "CORRECT": True,
                "ROUND": False,
                "biases_ptr": None,
                "PLACES": 64,
                **launch.EXPAND,
            },
        ),
    }


# Pointers whose dtype is not that of weights and logits.
POINTERS = {
    **dict.fromkeys(["keys_ptr", "parents_ptr", "ids_ptr", "seed_ptr", "tokens_ptr", "places_ptr"], "*i64"),
    **dict.fromkeys(
        [
            "state_ptr",
            "new_state_ptr",
            "recurrent_ptr",
            "new_recurrent_ptr",
            "from_hidden_ptr",
            "mid_ptr",
            "output_ptr",
            "temperature_ptr",
            "maxima_ptr",
            "sums_ptr",
            "chosen_ptr",
            "tail_ptr",
            "lane_scores_ptr",
            "scores_ptr",
            "steps_ptr",
        ],
        "*fp32",
    ),
}


def compile_kernel(kernel, dtype: str, constants: dict, target: tuple) -> dict:
    """Compiles one kernel; pointers and strides are multiples of 16, as in every launch, or wide loads would vanish."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: constants[name] for name in ("num_warps", "num_stages") if name in constants}
    constants = {name: value for name, value in constants.items() if name not in options}
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = POINTERS.get(name, f"*{dtype}") if name.endswith("_ptr") else "i32"
        if name.endswith(("_ptr", "_stride")) or name == "V":
            attributes[(i,)] = [["tt.divisibility", 16]]
    # The scores of a tree's candidates come in fp32.
    if kernel.__name__ == "expand_kernel":
        signature["base_ptr"] = "*fp32"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget(*target), options=options)
    read = read_amd if target[0] == "hip" else read_nvidia
    return {**read(compiled), "shared": compiled.metadata.shared}


def read_amd(compiled) -> dict:
    text = compiled.asm["amdgcn"]

    def count(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])

    wide = len(re.findall(r"(?:global|buffer)_load_dwordx4", text))
    return {"registers": count("vgpr_count"), "spills": count("vgpr_spill_count"), "wide_loads": wide}


def read_nvidia(compiled) -> dict:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = run(tools / "cuobjdump", "--dump-resource-usage", file.name)
        code = run(tools / "nvdisasm", "-c", file.name)
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "wide_loads": len(re.findall(r"ld\.global[^;]*\.v[48]\.", compiled.asm["ptx"])),
    }


def run(*command) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--kernels", nargs="+", help="names of variants (default: all)")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("compiling needs TRITON_INTERPRET unset, it is 1 here; unset it.")
    with tempfile.TemporaryDirectory() as folder:
        todo = variants(load_kernels(Path(folder)))
        unknown = sorted(set(options.kernels or ()) - set(todo))
        if unknown:
            parser.error(f"--kernels must be among {', '.join(todo)}; got {', '.join(unknown)}.")
        for name in options.kernels or todo:
            for target in options.targets:
                record = {"kernel": name, "target": target, **compile_kernel(*todo[name], TARGETS[target])}
                sys.stdout.write(json.dumps(record) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
