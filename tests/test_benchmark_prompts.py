"""Prompts of the benchmark: local files, the package's own samples, datasets in the papers' formats, and what is refused."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from conftest import tiny_tokenizer

from modeling_domino.benchmark.prompts import (
    HUB_DATASETS,
    TASKS,
    Prompt,
    context_prompts,
    load_prompts,
    read_prompts,
    tasks_of_folder,
    turns_of,
)


def write(folder, *lines: str, task: str = "riddles"):
    (folder / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_the_dev_prompts_are_those_of_the_papers_tasks():
    assert tasks_of_folder("dev") == ["gsm8k", "math500", "aime25", "humaneval", "mbpp", "mt-bench"]
    for task in tasks_of_folder("dev"):
        prompts = load_prompts(task)
        assert len(prompts) == (6 if task == "aime25" else 24)
        assert all(prompt.id.startswith(f"{task}/") for prompt in prompts)
        assert {len(prompt.turns) for prompt in prompts} == ({2} if task == "mt-bench" else {1})
    assert "boxed" in load_prompts("gsm8k")[0].turns[0]


def test_a_folder_of_files_and_the_first_of_its_prompts(tmp_path):
    rows = [json.dumps({"id": f"r/{i}", "turns": [f"one {i}", "two"]}) for i in range(5)]
    folder = write(tmp_path, *rows, "")
    assert tasks_of_folder(folder) == ["riddles"]
    assert len(load_prompts("riddles", folder)) == 5
    assert load_prompts("riddles", folder, max_samples=2) == [
        Prompt("r/0", ("one 0", "two")),
        Prompt("r/1", ("one 1", "two")),
    ]


def test_separators_that_are_not_line_breaks_stay_in_a_prompt(tmp_path):
    folder = write(tmp_path, json.dumps({"id": "a", "turns": ["x\u2028y"]}, ensure_ascii=False))
    assert load_prompts("riddles", folder)[0].turns == ("x\u2028y",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "b", "turns": ["x"', "riddles.jsonl, line 2: not JSON"),
        ('["b"]', "line 2: `turns` must be a list"),
        ('{"id": "b", "turns": []}', "line 2: `turns` must be a list"),
        ('{"id": "b", "turns": "x"}', "line 2: `turns` must be a list"),
        ('{"id": "b", "turns": ["x", 3]}', "line 2: `turns` must be a list"),
        ('{"turns": ["x"]}', "line 2: `id` must be a string"),
        ('{"id": "a", "turns": ["x"]}', "line 2: the id a was there before"),
    ],
)
def test_malformed_lines_are_named(tmp_path, line, message):
    folder = write(tmp_path, '{"id": "a", "turns": ["x"]}', line)
    with pytest.raises(ValueError, match=message):
        read_prompts(folder / "riddles.jsonl")


def test_what_is_not_there_is_said_with_what_is(tmp_path):
    with pytest.raises(ValueError, match="no task gsm9k in the dev prompts; known: gsm8k, math500, aime25"):
        load_prompts("gsm9k")
    with pytest.raises(ValueError, match="no task gsm8k in .*; known: riddles"):
        load_prompts("gsm8k", write(tmp_path, '{"id": "a", "turns": ["x"]}'))
    with pytest.raises(ValueError, match="no task riddles on the Hub; known: gsm8k, .*alpaca"):
        load_prompts("riddles", "hub")
    with pytest.raises(ValueError, match="no folder nowhere with prompts"):
        load_prompts("gsm8k", "nowhere")
    with pytest.raises(ValueError, match="riddles.jsonl holds no prompts"):
        load_prompts("riddles", write(tmp_path, ""))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        load_prompts("gsm8k", max_samples=0)


ROWS = {
    "gsm8k": ({"question": "1+1?"}, ["1+1?\nPlease reason step by step, and put your final answer within \\boxed{}."]),
    "math500": ({"problem": "$x$"}, ["$x$\nPlease reason step by step, and put your final answer within \\boxed{}."]),
    "aime25": ({"problem": "{n}"}, ["{n}\nPlease reason step by step, and put your final answer within \\boxed{}."]),
    "humaneval": (
        {"prompt": "def f():\n"},
        [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n\n```"
        ],
    ),
    "mbpp": ({"prompt": "Write f."}, ["Write f."]),
    "mt-bench": ({"prompt": ["first", "second"]}, ["first", "second"]),
    "alpaca": ({"instruction": "Sort.", "input": "b a"}, ["Sort.\n\nInput:\nb a"]),
}


@pytest.mark.parametrize("task", ROWS)
def test_formats_of_the_papers(task):
    row, turns = ROWS[task]
    assert turns_of(task, row) == turns


def test_formats_with_optional_parts():
    assert turns_of("alpaca", {"instruction": "Rhyme.", "input": ""}) == ["Rhyme."]
    (bare,) = turns_of("livecodebench", {"question_content": "Q", "starter_code": ""})
    (started,) = turns_of("livecodebench", {"question_content": "Q", "starter_code": "class S:"})
    assert "### Question:\nQ\n\n### Format: Write your code in the following format:\n```python\n# YOUR CODE" in bare
    assert "### Format: Use the following code structure:\n```python\nclass S:\n```\n\n### Answer: (use" in started


def test_datasets_are_read_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(*name, split, **files):
        asked.append((name, split, *files))
        return [{"question": f"q{i}"} for i in range(50)] if "gsm8k" in name[0] else [{"question_content": "q"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    everything = load_prompts("gsm8k", "hub")
    chosen = load_prompts("gsm8k", "hub", max_samples=5)
    assert [prompt.id for prompt in everything[:2]] == ["gsm8k/0", "gsm8k/1"]
    # The same ones each time, not just the first, in their order.
    assert chosen == load_prompts("gsm8k", "hub", max_samples=5) != everything[:5]
    assert chosen == [prompt for prompt in everything if prompt in chosen]
    assert load_prompts("gsm8k", "hub", max_samples=5, seed=1) != chosen
    assert load_prompts("livecodebench", "hub")[0].id == "livecodebench/0"
    assert asked[0] == (("openai/gsm8k", "main"), "test")
    assert asked[-1] == (("json",), "test", "data_files")
    assert set(HUB_DATASETS) == set(TASKS)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install datasets"):
        load_prompts("gsm8k", "hub")


def test_contexts_have_the_length_they_are_named_by(tmp_path):
    (tmp_path / "letters.jsonl").write_text(
        '{"id": 1, "turns": ["a b c d e", "f g"]}\n{"id": 2, "turns": ["h i j"]}\n'
    )
    tokenizer = tiny_tokenizer()
    tasks = context_prompts([1, 7, 35], tokenizer, tmp_path, count=2)
    assert list(tasks) == ["context-1", "context-7", "context-35"]
    assert [prompt.id for prompt in tasks["context-7"]] == ["context-7/0", "context-7/1"]
    first, second = (prompt.turns[0] for prompt in tasks["context-7"])
    # The text goes round: the second prompt begins in its middle.
    assert first == "a b c d e f g" and second == "f g h i j a b"
    for length in (1, 7, 35):
        for prompt in tasks[f"context-{length}"]:
            assert len(tokenizer(prompt.turns[0])["input_ids"]) == length
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        context_prompts([0], tokenizer, tmp_path)
