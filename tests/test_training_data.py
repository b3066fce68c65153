"""Training data: files that break are named, samples without blocks are counted, and no dev prompt is in them."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest
import torch
from conftest import tiny_tokenizer

from modeling_domino.training.data import (
    BlockDataset,
    EpochSampler,
    Sample,
    collate_blocks,
    limit_sources,
    rank_tokens,
    read_rows,
    read_samples,
    render_prompt,
    split_samples,
)
from modeling_domino.training.overlap import find_overlaps


# Prompts and answers are kept in the checkout or beside it, not in the repository.
ROOT = Path(__file__).parents[1]
SHARED = next((folder / "shared" for folder in (ROOT, ROOT.parent) if (folder / "shared" / "prompts").is_dir()), None)


def write(path: Path, rows: list[dict]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def row(name: str, answer: list[int], *turns: str) -> dict:
    return {"id": name, "turns": list(turns) or ["a b"], "response_ids": answer, "finish": "length"}


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_samples_are_the_rendered_prompt_and_the_answer(tmp_path, suffix):
    tokenizer = tiny_tokenizer()
    path = write(tmp_path / f"a.{suffix}", [row("x", [5, 6, 7]), row("y", [8, 9], "a", "b", "c d")])
    samples = read_samples([path], tokenizer, max_length=64, vocab_size=64)
    for sample, turns, answer in zip(samples, (["a b"], ["a", "b", "c d"]), ([5, 6, 7], [8, 9])):
        prompt = render_prompt(tokenizer, turns)
        assert sample.ids.tolist() == prompt + answer
        assert sample.prompt_length == len(prompt)
    messages = [{"role": "user", "content": "a b"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert render_prompt(tokenizer, ["a b"]) == expected


def test_samples_without_a_block_are_left_out_and_counted(tmp_path, caplog):
    path = write(tmp_path / "a.jsonl", [row("x", [5, 6, 7]), row("y", [5]), row("z", [])])
    with caplog.at_level(logging.WARNING):
        samples = read_samples([path], tiny_tokenizer(), max_length=64, vocab_size=64)
    assert [sample.id for sample in samples] == ["x"]
    assert "2 of 3 samples have no two answer tokens" in caplog.text
    with pytest.raises(ValueError, match="at least one sample with two answer tokens"):
        read_samples([path], tiny_tokenizer(), max_length=3, vocab_size=64)


def test_a_cut_off_shard_is_named_with_its_line(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", [row(str(i), list(range(i, 50))) for i in range(40)])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz must be a complete file .* breaks off after line \d+"):
        list(read_rows(path))
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps(row("x", [1, 2])) + "\n" + '{"id": "y", "turns": ["a"], "respo')
    with pytest.raises(ValueError, match=r"b\.jsonl, line 2: a row must be one JSON object"):
        list(read_rows(path))
    write(path, [{"id": "x", "turns": ["a"]}])
    with pytest.raises(
        ValueError, match="line 1: a row must have id, turns and response_ids, response_ids is missing"
    ):
        list(read_rows(path))


def test_ids_of_another_target_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [row("x", [5, 70])])
    with pytest.raises(ValueError, match=r"vocabulary of 64 tokens, got 5\.\.70"):
        read_samples([path], tiny_tokenizer(), max_length=64, vocab_size=64)


def test_splits_and_limits_depend_on_ids_only():
    samples = [Sample(f"{'ab'[i % 2]}/{i}", torch.arange(5), 2) for i in range(20)]
    train, held = split_samples(samples, 6)
    assert {s.id for s in held} == {s.id for s in split_samples(samples[::-1], 6)[1]}
    assert len(train) == 14 and not {s.id for s in train} & {s.id for s in held}
    limited = limit_sources(samples, 3)
    assert {s.id for s in limited} == {s.id for s in limit_sources(samples[::-1], 3)}
    assert sorted(s.id[0] for s in limited) == ["a"] * 3 + ["b"] * 3
    with pytest.raises(ValueError, match="fewer than all 20 samples, got 20"):
        split_samples(samples, 20)


def test_tokens_are_ranked_on_the_answers():
    samples = [Sample("x", torch.tensor([9, 9, 9, 4, 4, 7]), 3)]
    assert rank_tokens(samples) == [4, 7]


def test_padding_has_no_weight():
    data = BlockDataset([Sample("x", torch.arange(9), 3), Sample("y", torch.arange(5), 2)], num_drafts=3, gamma=2.0)
    batch = collate_blocks([data[0], data[1]])
    assert batch["anchor_mask"].tolist() == [[True] * 5, [True] * 2 + [False] * 3]
    assert not batch["weights"][1, 2:].any()
    assert batch["attention_mask"].sum(1).tolist() == [9, 5]


def test_the_order_is_a_function_of_seed_and_epoch():
    sampler = EpochSampler(10, seed=1)
    first = list(sampler)
    assert first == list(EpochSampler(10, seed=1)) and sorted(i for _, i in first) == list(range(10))
    sampler.epoch = 1
    assert [e for e, _ in sampler] == [1] * 10 and [i for _, i in sampler] != [i for _, i in first]


def test_overlaps_are_found():
    dev = [{"id": "dev/1", "turns": ["one two three four five six seven eight nine"]}]
    train = [
        {"id": "t/1", "turns": ["zero One, two three four five six seven! eight ten"]},
        {"id": "t/2", "turns": ["one two"]},
    ]
    assert find_overlaps(dev, train, length=8) == [("dev/1", "t/1", "one two three four five six seven eight")]
    assert find_overlaps(dev, train, length=9) == []


@pytest.mark.skipif(SHARED is None, reason="the prompt files are not part of the repository")
def test_no_dev_prompt_is_in_the_training_data():
    """No 13 words in a row of a dev prompt occur in a training prompt, but for the instructions that both append."""
    dev = [row for path in sorted((SHARED / "prompts").glob("*.jsonl")) if path.stem != "train" for row in load(path)]
    train = [row for path in sorted((SHARED / "data").glob("*.jsonl.gz")) for row in read_rows(path)]
    train += load(SHARED / "prompts" / "train.jsonl")
    assert len(dev) > 100 and len(train) > 10_000
    assert (
        find_overlaps(
            dev, train, length=13, ignore=("Please reason step by step, and put your final answer within \\boxed{}.",)
        )
        == []
    )


def load(path: Path) -> list[dict]:
    # Not `splitlines`: a text may hold other line separators.
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
