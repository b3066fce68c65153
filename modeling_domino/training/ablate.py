"""`domino ablate`: the same data, batches, initial weights and budget for several arms, and one record of all of them.

The arms are the paper's (https://huggingface.co/papers/2605.29707, section 4): the full recipe, without the curriculum,
with the head fed its own picks ("ttt"), and without a head, which is DFlash on the same data.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..atomic import write_json
from ..provenance import provenance
from .config import CommandParser, DominoTrainingArguments
from .evaluate import measure_tau, prompts_of
from .pair import PairArguments, load_drafter, load_target, without_head
from .train import DataArguments, load_samples, make_trainer
from .trainer import last_checkpoint


logger = logging.getLogger(__name__)

# What each arm changes in the training arguments.
ARMS = {
    "full": {},
    "no-curriculum": {"lambda_schedule": "constant:0"},
    "ttt": {"ttt": True},
    "no-head": {},
}

CURVES = ("lambda", "train_base_ce", "train_final_ce", "train_acceptance", "train_acceptance_base")


@dataclass
class AblationArguments:
    """Which arms, and how long each is evaluated.

    Args:
        arms (`str`): comma-separated, out of `ARMS`.
        tau_prompts (`int`): held-out prompts that every arm generates for.
        tau_new_tokens (`int`): tokens for each of them.
    """

    arms: str = field(default=",".join(ARMS), metadata={"help": f"Comma-separated, out of {', '.join(ARMS)}."})
    tau_prompts: int = field(default=8, metadata={"help": "Held-out prompts to generate for."})
    tau_new_tokens: int = field(default=96, metadata={"help": "Tokens for each of them."})


def main(argv: list[str] | None = None) -> dict:
    """Runs the arms that have no record yet, and writes `ablation.json` over all of them."""
    argv = sys.argv[1:] if argv is None else argv
    torch.set_flush_denormal(True)
    parser = CommandParser(
        (DominoTrainingArguments, PairArguments, DataArguments, AblationArguments), prog="domino ablate"
    )
    args, pair, data, ablation = parser.parse_args_into_dataclasses(argv)
    names = ablation.arms.split(",")
    if unknown := [name for name in names if name not in ARMS]:
        raise ValueError(f"`arms` must be out of {', '.join(ARMS)}, got {', '.join(unknown)}.")
    target, tokenizer = load_target(pair, bf16=args.bf16, device=args.device)
    train_samples, eval_samples = load_samples(data, tokenizer, args, target)
    root = Path(args.output_dir)
    record = {"provenance": provenance(command=["domino", "ablate", *argv]), "arms": {}}
    for name in names:
        done = root / name / "arm.json"
        if done.exists():
            result = json.loads(done.read_text())
        else:
            arm_args = replace(args, output_dir=str(root / name), **ARMS[name])
            result = run_arm(name, arm_args, pair, target, train_samples, eval_samples, ablation)
            if args.should_save:  # one process of several writes
                write_json(done, result)
        record["arms"][name] = result
    if args.should_save:
        write_json(root / "ablation.json", record)
    return record


def run_arm(name, args, pair, target, train_samples, eval_samples, ablation) -> dict:
    """Trains one arm, from its last checkpoint if it was cut off, and evaluates it with and without the correction."""
    drafter = load_drafter(pair, target, seed=args.seed)
    if name == "no-head":
        drafter = without_head(drafter)
    started = time.time()
    trainer = make_trainer(args, drafter, target, train_samples, eval_samples)
    checkpoint = last_checkpoint(args.output_dir)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    seconds = round(time.time() - started, 1)
    metrics = trainer.evaluate()
    trained = trainer.accelerator.unwrap_model(trainer.model).drafter
    prompts = prompts_of(eval_samples, ablation.tau_prompts, args.device)
    tau = {"head_on": measure_tau(trained, target, prompts, max_new_tokens=ablation.tau_new_tokens)}
    if trained.config.has_head:
        tau["head_off"] = measure_tau(trained, target, prompts, max_new_tokens=ablation.tau_new_tokens, use_head=False)
    curve = [
        {"step": entry["step"], **{key: entry[key] for key in CURVES if key in entry}}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    return {
        "changes": ARMS[name],
        "head": trained.head_state,
        "seconds": seconds,
        "tau": tau,
        "eval": metrics,
        "curve": curve,
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main()
