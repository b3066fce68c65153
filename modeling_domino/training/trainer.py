"""The trainer: transformers' `Trainer` with the objective's normalisation, the curriculum, and safe checkpoints.

The loop, accelerate, DDP, FSDP, DeepSpeed, trackers and resuming are transformers' own. Added here: the loss is divided
by the weights of the whole global batch (over ranks and accumulation steps, not a mean of local means), lambda follows the
run, evaluation measures acceptance, and a checkpoint counts only once it is complete.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .config import DominoTrainingArguments
from .data import BlockDataset, EpochSampler, Sample, collate_blocks
from .evaluate import measure_tau, prompts_of, summarise
from .losses import Curriculum
from .model import STATS, DominoTrainingModel


# Keeps the division finite when a rank's batch has no weight at all.
EPSILON = 1e-6

COMPLETE_MARK = "complete.json"


class DominoTrainer(Trainer):
    """Trains a [`DominoTrainingModel`].

    Args:
        model (`DominoTrainingModel`): drafter and objective.
        args (`DominoTrainingArguments`): the run.
        train_samples, eval_samples (`list[Sample]`): sequences to train on and to evaluate on.
    """

    def __init__(
        self,
        model: DominoTrainingModel,
        args: DominoTrainingArguments,
        train_samples: list[Sample],
        eval_samples: list[Sample] | None = None,
        **kwargs,
    ):
        config = model.drafter.config
        shape = {"num_drafts": config.num_draft_tokens, "gamma": args.resolve_gamma(config.block_size)}
        evaluation = None
        if eval_samples:
            evaluation = BlockDataset(eval_samples, max_anchors=args.eval_anchors, seed=0, **shape)
        self._sampler = EpochSampler(len(train_samples), args.seed)
        super().__init__(
            model=model,
            args=args,
            train_dataset=BlockDataset(train_samples, max_anchors=args.max_anchors, seed=args.seed, **shape),
            eval_dataset=evaluation,
            data_collator=collate_blocks,
            **kwargs,
        )
        self.add_callback(_SetEpoch(self._sampler))
        self.curriculum = Curriculum.parse(args.lambda_schedule)
        self.eval_samples = eval_samples or []
        # Makes every release hand `num_items_in_batch` on and leave the division to `compute_loss`.
        self.model_accepts_loss_kwargs = True
        self._stats = torch.zeros(len(STATS), config.num_draft_tokens, dtype=torch.float64)

    def _get_train_sampler(self, train_dataset=None):
        return self._sampler

    @property
    def _drafter(self):
        return self.accelerator.unwrap_model(self.model).drafter

    def current_lambda(self) -> float:
        """The curriculum's weight of the base loss in this step."""
        return self.curriculum.at(self.state.global_step / max(self.state.max_steps, 1))

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The micro-batches of one optimiser step, and the sum of their weights over all ranks."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator)]
        if not batches:
            return batches, None
        total = sum(batch["weights"].sum() for batch in batches).to(device)
        if self.args.world_size > 1:
            total = self.accelerator.gather(total.reshape(1)).sum()
        return batches, total

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The weighted sum of this micro-batch over the weights of the global batch.

        Raises:
            FloatingPointError: if it is not a number.
        """
        self.accelerator.unwrap_model(model).lam = lam = self.current_lambda()
        outputs = model(**inputs)
        total = inputs["weights"].sum() if num_items_in_batch is None else num_items_in_batch
        # DDP and FSDP average gradients over the ranks; the sum is wanted.
        loss = outputs.loss_sum / (total + EPSILON) * self.args.world_size
        if not torch.isfinite(loss.detach()):
            raise FloatingPointError(
                f"The loss became {loss.item()} at step {self.state.global_step} (lambda {lam:.3f}); nothing was saved "
                f"since {self._last_checkpoint_name()}: resume from it with a lower learning rate, or without bf16."
            )
        if model.training:
            self._stats += outputs.stats.cpu().double()
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, start_time=None):
        """Adds lambda and the block statistics since the last log to the training logs."""
        if "loss" in logs:
            logs["lambda"] = self.accelerator.unwrap_model(self.model).lam
            if self._stats[0, 0] > 0:
                logs.update({f"train_{key}": value for key, value in summarise(self._stats).items()})
            self._stats.zero_()
        super().log({k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in logs.items()}, start_time)

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """Acceptance statistics on the evaluation samples over the whole vocabulary, and tau on some of their prompts."""
        module = self.model_wrapped if self.is_fsdp_enabled or self.is_deepspeed_enabled else self.model
        was_training = module.training
        module.eval()
        stats = torch.zeros_like(self._stats, dtype=torch.float32, device=self.args.device)
        for batch in self.get_eval_dataloader(eval_dataset):
            with self.compute_loss_context_manager():
                stats += module(**self._prepare_inputs(batch)).stats
        module.train(was_training)
        stats = self.accelerator.reduce(stats, reduction="sum")
        metrics = {f"{metric_key_prefix}_{key}": value for key, value in summarise(stats).items()}
        if self.args.eval_prompts and not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            metrics[f"{metric_key_prefix}_tau"] = self._generate_tau()
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _generate_tau(self) -> float:
        module = self.accelerator.unwrap_model(self.model)
        prompts = prompts_of(self.eval_samples, self.args.eval_prompts, self.args.device)
        measured = measure_tau(module.drafter, module.view.target, prompts, max_new_tokens=self.args.eval_new_tokens)
        return measured["tau"]

    # Checkpoints: drafter folders in fp32, with transformers' optimiser, scheduler, RNG and trainer state beside them.

    def _save(self, output_dir=None, state_dict=None):
        """Writes a drafter that `from_pretrained` reads, not the wrapper around it."""
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        if state_dict is not None:
            state_dict = {name.removeprefix("drafter."): tensor for name, tensor in state_dict.items()}
        self._drafter.save_pretrained(folder, state_dict=state_dict)
        (folder / "training_args.json").write_text(self.args.to_json_string())

    def push_to_hub(self, *args, **kwargs):
        """Refused: what a run leaves behind holds more than belongs on the Hub.

        Raises:
            ValueError: always, with the command that publishes.
        """
        raise ValueError(
            "The trainer does not publish; stage, check and publish its output folder with `domino push`."
        )

    def _save_checkpoint(self, model, trial):
        # A loss can be a number once more before it shows what the last update did to the weights.
        if not all(torch.isfinite(parameter).all() for parameter in self.model.parameters()):
            raise FloatingPointError(
                f"The weights are not all numbers at step {self.state.global_step}, so no checkpoint is written; the last "
                f"good one is {self._last_checkpoint_name()}: resume from it with a lower learning rate, or without bf16."
            )
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            mark_complete(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._drafter.load_state_dict(load_file(Path(resume_from_checkpoint, "model.safetensors")))

    def _load_best_model(self):
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return super()._load_best_model()
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _last_checkpoint_name(self) -> str:
        checkpoint = last_checkpoint(self.args.output_dir)
        return str(checkpoint) if checkpoint else "the start (no checkpoint yet)"


class _SetEpoch(TrainerCallback):
    """Tells the sampler the epoch; accelerate does not reach it behind the batches that a resumed run skips."""

    def __init__(self, sampler: EpochSampler):
        self._sampler = sampler

    def on_epoch_begin(self, args, state, control, **kwargs):
        self._sampler.epoch = int(state.epoch)


def mark_complete(folder: Path) -> None:
    """Declares a checkpoint complete: written last, with the sizes of its files, and renamed into place."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != COMPLETE_MARK}
    scratch = folder / f".{COMPLETE_MARK}"
    scratch.write_text(json.dumps(sizes, indent=2) + "\n")
    scratch.replace(folder / COMPLETE_MARK)


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint has its mark and the files that the mark lists."""
    try:
        sizes = json.loads((folder / COMPLETE_MARK).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest complete checkpoint of a run, or `None`; what a kill or a full disk cut off is passed over."""
    found = [path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if is_complete(path)]
    return max(found, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)
