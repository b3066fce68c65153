"""The commands end to end on a micro target: regenerate, train, generate; each cut off and resumed, and the ablation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import tiny_target, tiny_tokenizer

from modeling_domino import DominoDraftModel
from modeling_domino.training import ablate, regenerate, train
from modeling_domino.training.data import read_rows, render_prompt
from modeling_domino.training.evaluate import measure_tau


PROMPTS = [{"id": f"p/{i}", "turns": [f"{a} {b}"]} for i, (a, b) in enumerate(zip("abcdefgh", "ijklmnop"))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """A micro target that has learned one fixed answer to each prompt, saved with its tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    target, tokenizer = tiny_target("llama", num_layers=4), tiny_tokenizer()
    target.generation_config.eos_token_id = target.config.eos_token_id = tokenizer.eos_token_id
    target.generation_config.pad_token_id = target.config.pad_token_id = tokenizer.pad_token_id
    prompts = torch.tensor([render_prompt(tokenizer, prompt["turns"]) for prompt in PROMPTS])
    steps = torch.arange(20)
    answers = 5 + (torch.arange(len(PROMPTS))[:, None] * 7 + steps * steps) % 55
    ids = torch.cat([prompts, answers, torch.full((len(PROMPTS), 1), tokenizer.eos_token_id)], dim=1)
    labels = ids.clone()
    labels[:, : prompts.shape[1]] = -100
    optimizer = torch.optim.AdamW(target.parameters(), lr=5e-3)
    target.train()
    for _ in range(120):
        loss = target(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    target.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path):
    return train.load_target(train.PairArguments(target=str(folder)), bf16=False, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def answers(pair, tmp_path_factory) -> Path:
    """The target's answers, in two shards."""
    folder = tmp_path_factory.mktemp("answers")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    command = [str(prompts), "--output", str(folder), "--target", str(pair), "--max-new-tokens", "24"]
    regenerate.main([*command, "--shard-size", "5", "--batch-size", "3"])
    return folder


def command_of(pair: Path, answers: Path, output: Path, *more: str) -> list[str]:
    options = {
        "output_dir": output,
        "target": pair,
        "block_size": 4,
        "num_layers": 1,
        "target_layer_ids": 2,
        "mask_token_id": 63,
        "gru_hidden_dim": 16,
        "emb_dim": 16,
        "eval_samples": 1,
        "per_device_train_batch_size": 4,
        "max_steps": 60,
        "learning_rate": 1e-2,
        "logging_steps": 10,
        "report_to": "none",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    shards = [str(path) for path in sorted(answers.glob("*.jsonl.gz"))]
    return [*words, "--use_cpu", "--disable_tqdm", "true", "--train_data", *shards, *more]


def test_answers_are_the_targets_own(pair, answers):
    target, tokenizer = load(pair)
    rows = [row for path in sorted(answers.glob("*.jsonl.gz")) for row in read_rows(path)]
    assert [row["id"] for row in rows] == [prompt["id"] for prompt in PROMPTS]
    for row in rows:
        prompt = torch.tensor([render_prompt(tokenizer, row["turns"])])
        output = target.generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :].tolist()
        assert row["response_ids"] == output
        assert row["finish"] == ("eos" if output[-1] == tokenizer.eos_token_id else "length")


def test_regeneration_resumes_and_refuses_other_settings(pair, answers, tmp_path, capsys):
    prompts = answers / "prompts.jsonl"
    command = [str(prompts), "--output", str(tmp_path), "--target", str(pair), "--max-new-tokens", "24"]
    command += ["--shard-size", "5", "--batch-size", "3"]
    regenerate.main(command)
    first, second = sorted(tmp_path.glob("*.jsonl.gz"))
    kept, made = first.stat().st_mtime_ns, second.read_bytes()
    second.unlink()
    regenerate.main(command)
    assert first.stat().st_mtime_ns == kept
    assert list(read_rows(second)) == list(read_rows(answers / second.name))
    assert made
    with pytest.raises(ValueError, match=r"other settings \(max_new_tokens: 24\)"):
        regenerate.main([*command[:-6], "--max-new-tokens", "9", *command[-4:]])


def test_later_turns_are_asked_behind_the_answer():
    asked = []

    def answer(talks, seed):
        asked.append([list(turns) for turns in talks])
        return [([4 + len(turns)], "length") for turns in talks]

    prompts = [{"id": "x", "turns": ["a", "b"]}, {"id": "y", "turns": ["c"]}]
    rows = regenerate.answer_turns(prompts, answer, tiny_tokenizer(), 0)
    assert asked == [[["a"], ["c"]], [["a", "b", "b"]]]
    assert [(row["id"], row["turns"]) for row in rows] == [("x", ["a"]), ("y", ["c"]), ("x#2", ["a", "b", "b"])]


def test_a_trained_micro_drafter_is_accepted_almost_whole(pair, answers, tmp_path):
    record = train.main(command_of(pair, answers, tmp_path, "--eval_samples", "0", "--max_steps", "80"))
    assert record["log_history"][0]["lambda"] > record["log_history"][-2]["lambda"]
    target, tokenizer = load(pair)
    drafter = DominoDraftModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert drafter.config.target_layer_ids == [2] and drafter.config.shift_label
    prompts = [torch.tensor([render_prompt(tokenizer, prompt["turns"])]) for prompt in PROMPTS]
    measured = measure_tau(drafter, target, prompts, max_new_tokens=20)
    assert measured["tau"] > 3.5, measured
    assert json.loads((tmp_path / "training.json").read_text())["seed"] == record["seed"]


def test_a_killed_run_goes_on_by_the_same_command(pair, answers, tmp_path, monkeypatch):
    command = command_of(pair, answers, tmp_path, "--save_strategy", "steps", "--save_steps", "5", "--max_steps", "12")
    step = train.DominoTrainer.training_step

    def killed(self, *args, **kwargs):
        if self.state.global_step == 7:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(train.DominoTrainer, "training_step", killed)
    with pytest.raises(KeyboardInterrupt):
        train.main(command)
    seen = []
    monkeypatch.setattr(
        train.DominoTrainer,
        "training_step",
        lambda self, *args, **kwargs: (seen.append(self.state.global_step), step(self, *args, **kwargs))[1],
    )
    train.main(command)
    assert seen[0] == 5 and seen[-1] == 11


def test_a_drafter_is_trained_on_from_its_weights_and_a_dflash_one_gets_a_head(pair, answers, tmp_path):
    train.main(command_of(pair, answers, tmp_path / "dflash", "--gru_hidden_dim", "0", "--max_steps", "3"))
    dflash = DominoDraftModel.from_pretrained(tmp_path / "dflash", dtype=torch.float32)
    assert not dflash.config.has_head
    more = ["--init_from", str(tmp_path / "dflash"), "--trainable", "head", "--max_steps", "3"]
    train.main(command_of(pair, answers, tmp_path / "domino", *more, "--lambda_schedule", "constant:0"))
    domino = DominoDraftModel.from_pretrained(tmp_path / "domino", dtype=torch.float32)
    assert domino.config.has_head and domino.embed_proj[-1].weight.any()
    for name, tensor in dflash.state_dict().items():
        assert torch.equal(tensor, domino.state_dict()[name]), name


def test_arms_share_their_start_and_an_ablation_resumes(pair, answers, tmp_path):
    command = command_of(pair, answers, tmp_path, "--max_steps", "2", "--tau_prompts", "1", "--tau_new_tokens", "8")
    record = ablate.main(command)
    assert list(record["arms"]) == ["full", "no-curriculum", "ttt", "no-head"]
    first = {name: arm["curve"] for name, arm in record["arms"].items()}
    assert record["arms"]["no-head"]["head"] == "none" and set(record["arms"]["no-head"]["tau"]) == {"head_on"}
    assert set(record["arms"]["full"]["tau"]) == {"head_on", "head_off"}
    (tmp_path / "ttt" / "arm.json").unlink()
    again = ablate.main(command)
    assert again["arms"]["full"]["seconds"] == record["arms"]["full"]["seconds"]
    assert again["arms"]["ttt"]["curve"] == first["ttt"]
    with pytest.raises(ValueError, match="`arms` must be out of full, no-curriculum, ttt, no-head, got nothing"):
        ablate.main([*command, "--arms", "full,nothing"])
