"""The arguments of a training run: transformers' own, and what a drafter needs beside them.

Recipe: https://huggingface.co/papers/2605.29707, section 3.3 and appendix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import HfArgumentParser, TrainingArguments


OBJECTIVES = ("ce", "kl", "tv")
TRAINABLE = ("all", "head")

# The paper's decay of the loss weights over a block, by block size.
PAPER_GAMMA = {8: 4.0, 16: 7.0}


class CommandParser(HfArgumentParser):
    """Reads the arguments of a training command; wrong usage is one sentence, not the list of all arguments."""

    def error(self, message: str):
        """Raises what argparse would print.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{message}; `{self.prog} --help` lists every argument.")


@dataclass
class DominoTrainingArguments(TrainingArguments):
    """Arguments of a drafter's training.

    As in the paper by default: AdamW (0.9, 0.999), learning rate 6e-4 with cosine decay and 4 % warm-up, no weight decay,
    gradients clipped at 1, 3 epochs, inputs cut at 3072 tokens, cross entropy on ids, teacher forcing, the base-anchored
    curriculum (lambda linear from 1 to 0), weights exp(-k / gamma).

    What differs from the paper:
        - all anchors of a sequence are trained on at each visit (`max_anchors`), because the target's forward is paid per
          visit; the reference draws 256 of 3072 tokens.
        - gamma for block sizes other than 8 and 16 is half the block size, at least 1.
        - the global batch is what `per_device_train_batch_size`, `gradient_accumulation_steps` and the number of
          processes make of it (the paper: 16 sequences).
        - the best checkpoint is the one with the longest expected acceptance, and evaluation reports it.
        - anchors are drawn per sample from (seed, epoch, id), so the number of processes does not change them.
        - `score_vocab`, `objective`, `ttt` and `trainable` are options that the paper's main run does not use.

    Args (beside those of `TrainingArguments`):
        max_length (`int`): longest sequence, prompt and answer, in tokens; longer ones are cut.
        max_anchors (`int`, *optional*): most blocks per sequence and visit; `None` for all.
        gamma (`float`, *optional*): decay of the loss weights in slots; `None` for the paper's.
        lambda_schedule (`str`): weight of the base loss over the run, see [`Curriculum`].
        objective (`str`): "ce" on ids, or distillation to the target's distribution by "kl" or "tv" (total variation).
        soft_weight (`float`): share of the distillation term beside the cross entropy; without effect under "ce".
        score_vocab (`int`): tokens that the loss scores, the most frequent ones of the answers and always the labels; 0 for
            the whole vocabulary.
        score_negatives (`int`): random other tokens scored with them, drawn anew for every micro-batch.
        ttt (`bool`): "training-time test": the GRU reads the drafter's own picks instead of the true tokens.
        flex_attention (`bool`): FlexAttention with a block mask that skips unseen tiles (GPUs) instead of SDPA with a dense one.
        trainable (`str`): "all", or "head" to train the correction head on a frozen backbone.
        eval_anchors (`int`): most blocks per sequence in an evaluation.
        eval_prompts (`int`): prompts of the evaluation data that an evaluation really generates for; 0 for none.
        eval_new_tokens (`int`): tokens to generate for each of them.

    Raises:
        ValueError: one sentence that names the argument.
    """

    learning_rate: float = field(default=6e-4)
    lr_scheduler_type: str = field(default="cosine")
    warmup_steps: float = field(default=0.04)
    weight_decay: float = field(default=0.0)
    max_grad_norm: float = field(default=1.0)
    num_train_epochs: float = field(default=3.0)
    metric_for_best_model: str | None = field(default="acceptance")
    greater_is_better: bool | None = field(default=True)
    save_total_limit: int | None = field(default=2)
    # A batch carries what the objective needs, not what a forward's signature names.
    remove_unused_columns: bool = field(default=False)
    # A loss that is not a number ends the run (see the trainer); hiding it would train on.
    logging_nan_inf_filter: bool = field(default=False)
    # Every trained parameter is in the graph at every lambda, so DDP need not search for unused ones.
    ddp_find_unused_parameters: bool | None = field(default=False)

    max_length: int = field(default=3072, metadata={"help": "Longest sequence in tokens."})
    max_anchors: int | None = field(default=None, metadata={"help": "Most blocks per sequence and visit."})
    gamma: float | None = field(default=None, metadata={"help": "Decay of the loss weights; default: the paper's."})
    lambda_schedule: str = field(
        default="linear", metadata={"help": "linear[:fraction], cosine[:fraction], constant:x."}
    )
    objective: str = field(default="ce", metadata={"help": "ce, kl or tv."})
    soft_weight: float = field(default=1.0, metadata={"help": "Share of the kl or tv term beside the cross entropy."})
    score_vocab: int = field(default=0, metadata={"help": "Most frequent answer tokens to score; 0 for all."})
    score_negatives: int = field(default=0, metadata={"help": "Random other tokens to score."})
    ttt: bool = field(default=False, metadata={"help": "The GRU reads the drafter's own picks."})
    flex_attention: bool = field(default=False, metadata={"help": "FlexAttention (GPUs) instead of SDPA."})
    trainable: str = field(default="all", metadata={"help": "all or head."})
    eval_anchors: int = field(default=32, metadata={"help": "Most blocks per sequence in an evaluation."})
    eval_prompts: int = field(default=0, metadata={"help": "Prompts to generate for in an evaluation."})
    eval_new_tokens: int = field(default=128, metadata={"help": "Tokens to generate for each of them."})

    def __post_init__(self):
        super().__post_init__()
        if self.push_to_hub:
            raise ValueError("`push_to_hub` would publish unchecked; train without it and publish with `domino push`.")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"`objective` must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}.")
        if self.trainable not in TRAINABLE:
            raise ValueError(f"`trainable` must be one of {', '.join(TRAINABLE)}, got {self.trainable!r}.")
        if not 0.0 <= self.soft_weight <= 1.0:
            raise ValueError(f"`soft_weight` must lie in 0..1, got {self.soft_weight}.")
        if self.gamma is not None and self.gamma <= 0:
            raise ValueError(f"`gamma` must be positive, got {self.gamma}.")
        if self.max_anchors is not None and self.max_anchors < 1:
            raise ValueError(f"`max_anchors` must be at least 1, or left out for all anchors, got {self.max_anchors}.")
        if self.score_negatives and not self.score_vocab:
            raise ValueError("`score_negatives` needs `score_vocab`: without it every token is scored already.")

    def resolve_gamma(self, block_size: int) -> float:
        """The decay of the loss weights for a block of this size."""
        if self.gamma is not None:
            return self.gamma
        return PAPER_GAMMA.get(block_size, max(1.0, block_size / 2))
