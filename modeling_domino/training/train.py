"""`domino train`: reads the arguments, builds target, drafter and data, trains, and exports the best drafter.

Run directly or under `accelerate launch -m modeling_domino.training.train` for several GPUs or nodes.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import distributed as dist

from ..atomic import write_text
from ..modeling_domino import DominoDraftModel
from ..provenance import provenance
from .config import CommandParser, DominoTrainingArguments
from .data import Sample, limit_sources, rank_tokens, read_samples, split_samples
from .model import DominoTrainingModel
from .pair import PairArguments, load_drafter, load_target
from .trainer import DominoTrainer, last_checkpoint


logger = logging.getLogger(__name__)


@dataclass
class DataArguments:
    """What to train on.

    Args:
        train_data: JSONL files of the target's answers (see data.py).
        eval_samples (`int`): samples held out of them for evaluation; which ones depends on their ids alone.
        train_fraction (`float`): share of the training samples to use (scaling studies).
        max_per_source (`int`, *optional*): most training samples of one source, the part of an id before the slash.
    """

    train_data: list[str] = field(metadata={"help": "JSONL(.gz) files of the target's answers."})
    eval_samples: int = field(default=64, metadata={"help": "Samples held out for evaluation."})
    train_fraction: float = field(default=1.0, metadata={"help": "Share of the training samples to use."})
    max_per_source: int | None = field(default=None, metadata={"help": "Most training samples of one source."})


def main(argv: list[str] | None = None) -> dict:
    """Trains as the command line says; returns the training record that is also written beside the weights."""
    argv = sys.argv[1:] if argv is None else argv
    # Before any thread of the pool starts: denormal numbers make the softmax backward 100 times slower on CPUs.
    torch.set_flush_denormal(True)
    grouped_before = dist.is_available() and dist.is_initialized()
    args, pair, data = parse(argv)
    record = run(args, pair, data, command=["domino", "train", *argv])
    if not grouped_before:
        leave_group()
    return record


def leave_group() -> None:
    """Ends the group of processes, all at once: one that exits while another still talks to it makes that one abort."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def parse(argv: list[str]) -> tuple[DominoTrainingArguments, PairArguments, DataArguments]:
    """The three groups of arguments of a command line."""
    parser = CommandParser((DominoTrainingArguments, PairArguments, DataArguments), prog="domino train")
    args, pair, data = parser.parse_args_into_dataclasses(argv)
    return args, pair, data


def run(
    args: DominoTrainingArguments, pair: PairArguments, data: DataArguments, command: list[str] | None = None
) -> dict:
    """Trains, keeps the best checkpoint by acceptance, and exports it to `output_dir` in bf16 with its record.

    A run that was cut off goes on from its last complete checkpoint when it is started again.
    """
    started = time.time()
    target, tokenizer = load_target(pair, bf16=args.bf16, device=args.device)
    drafter = load_drafter(pair, target, seed=args.seed)
    train_samples, eval_samples = load_samples(data, tokenizer, args, target)
    trainer = make_trainer(args, drafter, target, train_samples, eval_samples)
    checkpoint = args.resume_from_checkpoint or last_checkpoint(args.output_dir)
    if checkpoint:
        logger.warning("Going on from %s.", checkpoint)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    record = {
        "provenance": provenance(device=args.device, dtype=target.dtype, command=command),
        "processes": args.world_size,
        "samples": {"train": len(train_samples), "eval": len(eval_samples)},
        "answer_tokens": sum(len(sample.ids) - sample.prompt_length for sample in train_samples),
        "seconds": round(time.time() - started, 1),
        "best_checkpoint": trainer.state.best_model_checkpoint and Path(trainer.state.best_model_checkpoint).name,
        "best_acceptance": trainer.state.best_metric,
        "seed": args.seed,
        "log_history": trainer.state.log_history,
    }
    # Every rank takes part: sharded weights are gathered here.
    trainer.save_model(args.output_dir)
    if args.should_save:
        export(args.output_dir, record)
    return record


def load_samples(
    data: DataArguments, tokenizer, args: DominoTrainingArguments, target
) -> tuple[list[Sample], list[Sample]]:
    """Training and evaluation samples."""
    vocab_size = target.get_input_embeddings().num_embeddings
    samples = read_samples(data.train_data, tokenizer, max_length=args.max_length, vocab_size=vocab_size)
    train_samples, eval_samples = split_samples(samples, data.eval_samples)
    if data.max_per_source:
        train_samples = limit_sources(train_samples, data.max_per_source)
    if data.train_fraction < 1.0:
        train_samples = train_samples[: max(1, round(len(train_samples) * data.train_fraction))]
    return train_samples, eval_samples


def make_trainer(
    args: DominoTrainingArguments, drafter, target, train_samples: list[Sample], eval_samples: list[Sample]
) -> DominoTrainer:
    """The trainer of `drafter` for `target`."""
    scored = rank_tokens(train_samples)[: args.score_vocab] if args.score_vocab else None
    model = DominoTrainingModel(drafter, target, args, scored)
    return DominoTrainer(model, args, train_samples, eval_samples)


def export(folder: str | Path, record: dict) -> None:
    """Turns the fp32 drafter in `folder` into bf16 for publication, and writes the record of its training beside it."""
    folder = Path(folder)
    DominoDraftModel.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    write_text(folder / "training.json", json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main()
