"""Gates of the trainer: overfitting reaches generation, resuming and several processes change nothing, failures are said."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import prompt, tiny_drafter, tiny_target
from safetensors.torch import load_file

from modeling_domino.training.config import DominoTrainingArguments
from modeling_domino.training.data import BlockDataset, Sample, collate_blocks
from modeling_domino.training.evaluate import measure_tau
from modeling_domino.training.model import DominoTrainingModel
from modeling_domino.training.train import leave_group
from modeling_domino.training.trainer import DominoTrainer, last_checkpoint, mark_complete


# Two processes add the same numbers in another order.
TWO_PROCESS_TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}


def arguments(folder, **changes) -> DominoTrainingArguments:
    fields = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 5,
    }
    return DominoTrainingArguments(**{**fields, **changes})


def samples_of(*lengths: int) -> list[Sample]:
    return [Sample(f"s{i}", prompt(n, offset=100 * i)[0], 3) for i, n in enumerate(lengths)]


def trainer_of(args, samples, *, eval_samples=None, target=None, **drafter) -> DominoTrainer:
    target = target or tiny_target()
    model = DominoTrainingModel(tiny_drafter(target, **drafter), target, args)
    return DominoTrainer(model, args, samples, eval_samples)


def weights_of(trainer: DominoTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.drafter.state_dict().items()}


@pytest.mark.parametrize("shift_label", [True, False])
def test_an_overfitted_sample_is_accepted_whole_in_generation(tmp_path, shift_label):
    """The gate that catches every offset between training and decoding: accuracy 1.0, then whole blocks."""
    target = tiny_target()
    with torch.no_grad():
        answer = target.generate(prompt(5), max_new_tokens=12, do_sample=False)[0]
    args = arguments(
        tmp_path, max_steps=120, gradient_accumulation_steps=1, learning_rate=1e-2, lambda_schedule="linear:0.3"
    )
    trainer = trainer_of(args, [Sample("one", answer, 5)], target=target, shift_label=shift_label)
    trainer.train()
    last = [entry for entry in trainer.state.log_history if "train_accuracy_1" in entry][-1]
    drafts = trainer.model.drafter.config.num_draft_tokens
    assert [last[f"train_accuracy_{i + 1}"] for i in range(drafts)] == [1.0] * drafts
    drafter = trainer.model.drafter.eval()
    output = drafter.spec_generate(target, answer[None, :5], max_new_tokens=12)
    assert torch.equal(output[0], answer)
    assert drafter.last_run.accepted[0] == drafts
    assert measure_tau(drafter, target, [answer[None, :5]], max_new_tokens=1 + 2 * (drafts + 1))["tau"] == drafts + 1


def test_lambda_follows_the_schedule(tmp_path):
    trainer = trainer_of(arguments(tmp_path, max_steps=4), samples_of(12, 14, 9, 11))
    seen = []
    forward = trainer.model.forward
    trainer.model.forward = lambda **batch: (seen.append(trainer.model.lam), forward(**batch))[1]
    trainer.train()
    assert seen == [1.0, 1.0, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25]


def test_a_resumed_run_equals_a_straight_one_bitwise(tmp_path):
    """Cut in the middle of the second epoch, with anchors drawn and optimiser, schedule and order restored."""
    samples = samples_of(20, 14, 9, 17, 11)
    common = {"max_anchors": 4, "max_steps": 6}
    straight = trainer_of(arguments(tmp_path / "straight", **common), samples)
    straight.train()
    cut = {"save_strategy": "steps", "save_steps": 4}
    first = trainer_of(arguments(tmp_path / "cut", **common, **cut), samples)
    first.add_callback(StopAt(4))
    first.train()
    second = trainer_of(arguments(tmp_path / "cut", **common, **cut), samples, salt=9)
    second.train(resume_from_checkpoint=str(last_checkpoint(tmp_path / "cut")))
    assert second.state.global_step == 6
    expected = weights_of(straight)
    for name, tensor in weights_of(second).items():
        assert torch.equal(tensor, expected[name]), name


def test_anchors_change_between_epochs_and_not_between_orders():
    data = BlockDataset(samples_of(40, 30), num_drafts=4, gamma=2.0, max_anchors=5, seed=1)
    swapped = BlockDataset(samples_of(40, 30)[::-1], num_drafts=4, gamma=2.0, max_anchors=5, seed=1)
    first = data[0]["anchors"]
    assert torch.equal(first, swapped[1]["anchors"])
    assert not torch.equal(first, data[1, 0]["anchors"])
    assert len(first) == 5 and first.min() >= 3 and first.max() <= 38


def test_an_incomplete_checkpoint_is_passed_over(tmp_path):
    """What a kill leaves half written never counts, whichever file is missing."""
    for step in (2, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        mark_complete(folder)
    assert last_checkpoint(tmp_path).name == "checkpoint-10"
    (tmp_path / "checkpoint-10" / "model.safetensors").write_bytes(b"wei")
    assert last_checkpoint(tmp_path).name == "checkpoint-2"
    (tmp_path / "checkpoint-2" / "complete.json").unlink()
    assert last_checkpoint(tmp_path) is None


def test_a_loss_that_is_not_a_number_ends_the_run_and_names_the_checkpoint(tmp_path):
    args = arguments(tmp_path, save_strategy="steps", save_steps=2)
    trainer = trainer_of(args, samples_of(12, 14, 9))
    trainer.add_callback(Poison(3))
    with pytest.raises(FloatingPointError, match="The loss became nan at step 3 .*checkpoint-2: resume from it"):
        trainer.train()
    again = trainer_of(arguments(tmp_path / "b", save_strategy="steps", save_steps=2), samples_of(12, 14, 9))
    again.add_callback(Poison(2))
    with pytest.raises(FloatingPointError, match="no checkpoint is written"):
        again.train()
    assert last_checkpoint(tmp_path / "b") is None
    weights = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_checkpoints_are_drafters_and_the_best_one_is_by_acceptance(tmp_path):
    from modeling_domino import DominoDraftModel

    samples = samples_of(20, 14, 9)
    args = arguments(
        tmp_path,
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=2,
        eval_steps=2,
        load_best_model_at_end=True,
        eval_prompts=1,
        eval_new_tokens=6,
    )
    trainer = trainer_of(args, samples, eval_samples=samples_of(16))
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_acceptance" in entry]
    assert len(evaluations) == 3
    assert {"eval_tau", "eval_accuracy_base_4", "eval_given_prefix_4", "eval_cut_blocks"} <= evaluations[0].keys()
    best = max(evaluations, key=lambda entry: entry["eval_acceptance"])
    assert trainer.state.best_metric == best["eval_acceptance"]
    folder = Path(trainer.state.best_model_checkpoint)
    loaded = DominoDraftModel.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in weights_of(trainer).items())


def test_two_processes_equal_one(tmp_path):
    """Two gloo processes of one sequence each take the steps of one process that accumulates two."""
    one = run_script(tmp_path / "one", processes=1, accumulation=2)
    two = run_script(tmp_path / "two", processes=2, accumulation=1)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, **TWO_PROCESS_TOLERANCE, msg=name)


def test_sharded_parameters_are_all_trained_and_gathered(tmp_path):
    """FSDP2 around the training module (head inside): two sharded processes take the step of one."""
    sharded = run_script(tmp_path / "sharded", processes=2, accumulation=1, mode="fsdp")
    whole = run_script(tmp_path / "whole", processes=1, accumulation=1, mode="fsdp")
    assert sharded.keys() == whole.keys() and "prefix_gru.weight_hh_l0" in whole
    start = tiny_drafter(tiny_target()).state_dict()
    for name, tensor in whole.items():
        torch.testing.assert_close(sharded[name], tensor, **TWO_PROCESS_TOLERANCE, msg=name)
        assert not torch.equal(tensor, start[name]), name


def run_script(folder: Path, *, processes: int, accumulation: int, mode: str = "train") -> dict[str, torch.Tensor]:
    """Trains in fresh processes, as `accelerate launch` starts them, and returns the weights."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir()
    running = []
    for rank in range(processes):
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])]),
            "OMP_NUM_THREADS": "1",
        }
        if processes > 1 or mode == "fsdp":
            env.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(processes),
                LOCAL_WORLD_SIZE=str(processes),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
        changes = {"output_dir": str(folder), "gradient_accumulation_steps": accumulation}
        if processes > 1:
            changes["ddp_backend"] = "gloo"
        running.append(subprocess.Popen([sys.executable, __file__, mode, json.dumps(changes)], env=env))
    assert [process.wait(timeout=240) for process in running] == [0] * processes
    return load_file(folder / "model.safetensors")


def train_in_this_process(changes: dict) -> None:
    args = arguments(changes.pop("output_dir"), max_steps=3, **changes)
    trainer = trainer_of(args, samples_of(20, 14, 9, 17, 11, 25))
    trainer.train()
    trainer.save_model()
    leave_group()


def shard_in_this_process(changes: dict) -> None:
    """Two sequences per step, over however many processes there are; Adam would hide a wrong scale, so plain SGD."""
    import torch.distributed as dist
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    module = trainer_of(arguments(changes["output_dir"], do_train=False), samples_of(20)).model.train()
    for layer in module.drafter.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.lam = 0.5
    data = BlockDataset(samples_of(20, 14), num_drafts=4, gamma=2.0)
    mine = [data[i] for i in range(2) if i % dist.get_world_size() == dist.get_rank()]
    total = sum(data[i]["weights"].sum() for i in range(2))
    loss = module(**collate_blocks(mine)).loss_sum / total * dist.get_world_size()
    loss.backward()
    optimizer.step()
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        state = {name.removeprefix("drafter."): tensor.contiguous() for name, tensor in state.items()}
        save_file(state, Path(changes["output_dir"], "model.safetensors"))
    dist.destroy_process_group()


class StopAt:
    """Stops a run after a step, as a kill after its checkpoint would."""

    def __new__(cls, step: int):
        from transformers import TrainerCallback

        class Stop(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                control.should_training_stop = state.global_step >= step

        return Stop()


class Poison:
    """Puts a NaN into the drafter's weights after a step."""

    def __new__(cls, step: int):
        from transformers import TrainerCallback

        class PoisonWeights(TrainerCallback):
            def on_step_end(self, args, state, control, model=None, **kwargs):
                if state.global_step == step:
                    model.drafter.fc.weight.data[0, 0] = float("nan")

        return PoisonWeights()


if __name__ == "__main__":
    {"train": train_in_this_process, "fsdp": shard_in_this_process}[sys.argv[1]](json.loads(sys.argv[2]))
