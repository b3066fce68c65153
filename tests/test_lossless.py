"""Greedy text is the target's own, token by token, on both decoding paths, whatever the drafter proposes (fp32)."""

from __future__ import annotations

import json
import random
import time

import pytest
import torch
import transformers
from conftest import PATHS, fill, prompt, script_drafts, tiny_drafter, tiny_target
from tokenizers import Tokenizer, decoders, models
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
)


VOCAB = 64
# In no prompt: `generate` takes pads in a prompt for padding.
PAD = 62
BOTH = pytest.mark.parametrize("path", PATHS)


def plain(target, input_ids, **kwargs):
    """The reference: the target alone."""
    return target.generate(input_ids, do_sample=False, **kwargs)


def follow(reference: torch.Tensor, *, wrong_every: int = 0):
    """A chooser that drafts the target's own text, with every `wrong_every`-th draft spoilt (1: all of them)."""
    ids = reference[0].tolist()

    def choose(length: int, num_drafts: int) -> list[int]:
        drafts = (ids[length:] + [0] * num_drafts)[:num_drafts]
        if wrong_every:
            drafts[wrong_every - 1 :: wrong_every] = [
                (token + 1) % VOCAB for token in drafts[wrong_every - 1 :: wrong_every]
            ]
        return drafts

    return choose


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@BOTH
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_real_drafter(kind, tied, path):
    target = tiny_target(kind, tied=tied)
    drafter = tiny_drafter(target, block_size=6)
    for offset in (0, 1000):
        input_ids = prompt(7, offset=offset)
        expected = plain(target, input_ids, max_new_tokens=40)
        assert torch.equal(PATHS[path](target, drafter, input_ids, max_new_tokens=40), expected)


@BOTH
@pytest.mark.parametrize("drafts", ["oracle", "first_wrong", "third_wrong", "mask", "random"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_scripted_drafts(target, kind, drafts, path, monkeypatch):
    target = target if kind == "qwen3" else tiny_target(kind)
    drafter = tiny_drafter(target, block_size=5)
    input_ids = prompt(6)
    reference = plain(target, input_ids, max_new_tokens=45)
    expected = reference[:, :-8]
    draw = random.Random(0)
    choose = {
        "oracle": follow(reference),
        "first_wrong": follow(reference, wrong_every=1),
        "third_wrong": follow(reference, wrong_every=3),
        "mask": lambda length, n: [VOCAB - 1] * n,
        "random": lambda length, n: [draw.randrange(VOCAB) for _ in range(n)],
    }[drafts]
    script_drafts(monkeypatch, choose)
    assert torch.equal(PATHS[path](target, drafter, input_ids, max_new_tokens=37), expected)
    accepted = drafter.last_run.accepted
    if drafts == "oracle":
        # 36 tokens behind the prefill's.
        assert accepted == [5] * 6
    elif drafts == "first_wrong":
        assert accepted == [0] * 36
    elif drafts == "third_wrong":
        assert set(accepted[:-1]) == {2}


@BOTH
@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("block_size", [*range(1, 10), 16, 17])
def test_blocks(target, block_size, shift_label, path, monkeypatch):
    if block_size == 1 and not shift_label:
        pytest.skip("a block of one token drafts nothing without the label shift, and the configuration says so")
    input_ids = prompt(4)
    reference = plain(target, input_ids, max_new_tokens=60)
    expected = reference[:, : 4 + 21]
    for prefix_len in (0, 1, 2):
        most = block_size if shift_label else block_size - 1
        drafter = tiny_drafter(
            target, block_size=block_size, shift_label=shift_label, prefix_len=min(prefix_len, most)
        )
        assert torch.equal(PATHS[path](target, drafter, input_ids, max_new_tokens=21), expected)
        assert all(len(step.draft_ids) <= most for step in drafter.last_run.steps)
    with monkeypatch.context() as patch:
        script_drafts(patch, follow(reference))
        assert torch.equal(PATHS[path](target, drafter, input_ids, max_new_tokens=21), expected)
        assert drafter.last_run.accepted[: 20 // (most + 1)] == [most] * (20 // (most + 1))


@BOTH
@pytest.mark.parametrize("shift_label", [True, False])
def test_dflash(target, shift_label, path):
    drafter = tiny_drafter(target, block_size=6, shift_label=shift_label, with_head=False)
    input_ids = prompt(9)
    expected = plain(target, input_ids, max_new_tokens=30)
    assert torch.equal(PATHS[path](target, drafter, input_ids, max_new_tokens=30), expected)
    assert drafter.last_run.head == "none"


@BOTH
def test_taps_of_the_first_and_the_last_layer(target, path):
    drafter = tiny_drafter(target, target_layer_ids=[0, 5, 2])
    input_ids = prompt(9)
    expected = plain(target, input_ids, max_new_tokens=30)
    assert torch.equal(PATHS[path](target, drafter, input_ids, max_new_tokens=30), expected)


def first_occurrences(reference: torch.Tensor, prompt_length: int) -> dict[int, int]:
    """Position of each token's first occurrence in the generated text."""
    first = {}
    for position, token in enumerate(reference[0, prompt_length:].tolist()):
        first.setdefault(token, position)
    return first


@BOTH
@pytest.mark.parametrize("drafts", ["oracle", "real", "first_wrong", "eos"])
def test_eos_at_every_position_of_a_block(target, drafts, path, monkeypatch):
    drafter = tiny_drafter(target, block_size=5)
    input_ids = prompt(5)
    reference = plain(target, input_ids, max_new_tokens=40)
    seen = set()
    for eos, position in first_occurrences(reference, 5).items():
        if position > 20:
            continue
        with monkeypatch.context() as patch:
            if drafts == "eos":
                script_drafts(patch, lambda length, n, eos=eos: [eos] * n)
            elif drafts != "real":
                script_drafts(patch, follow(reference, wrong_every=int(drafts == "first_wrong")))
            options = {"max_new_tokens": 30, "eos_token_id": [eos, 63], "pad_token_id": PAD}
            expected = plain(target, input_ids, **options)
            assert expected.shape[1] == 5 + position + 1
            assert torch.equal(PATHS[path](target, drafter, input_ids, **options), expected)
        run = drafter.last_run
        assert [*input_ids[0].tolist(), *run.output_ids] == expected[0].tolist()
        # A stop token is always the target's own, never a draft.
        assert run.steps[-1].own_id == eos
        assert not any(eos in step.draft_ids for step in run.steps)
        seen.add((position - 1) % 6)
    assert len(seen) >= 5


@BOTH
@pytest.mark.parametrize("max_new_tokens", range(1, 15))
def test_length_limit_inside_a_block(target, max_new_tokens, path, monkeypatch):
    drafter = tiny_drafter(target, block_size=5)
    input_ids = prompt(5)
    reference = plain(target, input_ids, max_new_tokens=40)
    script_drafts(monkeypatch, follow(reference))
    output = PATHS[path](target, drafter, input_ids, max_new_tokens=max_new_tokens)
    assert torch.equal(output, reference[:, : 5 + max_new_tokens])
    assert drafter.last_run.new_tokens == max_new_tokens
    # Nothing is drafted that could not be kept.
    room = max_new_tokens - 1
    for step in drafter.last_run.rounds:
        assert len(step.draft_ids) <= max(0, room - 1)
        room -= step.accepted + 1


@BOTH
@pytest.mark.parametrize("length", [1, 2])
def test_short_prompts(target, length, path):
    drafter = tiny_drafter(target)
    input_ids = prompt(length)
    expected = plain(target, input_ids, max_new_tokens=20)
    assert torch.equal(PATHS[path](target, drafter, input_ids, max_new_tokens=20), expected)


@BOTH
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("padding", [1, 5])
def test_left_padding(padding, tied, path):
    target = tiny_target("llama", tied=tied)
    drafter = tiny_drafter(target)
    bare = prompt(6)
    input_ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), bare], dim=1)
    attention_mask = (torch.arange(padding + 6)[None] >= padding).long()
    options = {"max_new_tokens": 25, "pad_token_id": PAD}
    expected = plain(target, input_ids, attention_mask=attention_mask, **options)
    output = PATHS[path](target, drafter, input_ids, attention_mask=attention_mask, **options)
    assert torch.equal(output, expected)
    padded = drafter.last_run
    # The padding is invisible to the drafter too: it drafts what it drafts for the bare prompt.
    assert torch.equal(PATHS[path](target, drafter, bare, **options), output[:, padding:])
    assert [step.draft_ids for step in padded.steps] == [step.draft_ids for step in drafter.last_run.steps]


class EndsWith:
    """A stopping criterion of the user's own: the text ends with these ids."""

    def __init__(self, *ids: int):
        self.ids = list(ids)

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.shape[0] == 1
        return torch.tensor([input_ids[0, -len(self.ids) :].tolist() == self.ids])


@BOTH
@pytest.mark.parametrize("drafts", ["oracle", "real", "first_wrong"])
def test_custom_stopping_criteria_inside_a_block(target, drafts, path, monkeypatch):
    drafter = tiny_drafter(target, block_size=5)
    input_ids = prompt(5)
    reference = plain(target, input_ids, max_new_tokens=40)
    if drafts != "real":
        script_drafts(monkeypatch, follow(reference, wrong_every=int(drafts == "first_wrong")))
    for position in range(1, 14):
        criteria = StoppingCriteriaList([EndsWith(*reference[0, 5 + position - 1 : 5 + position + 1].tolist())])
        expected = plain(target, input_ids, max_new_tokens=40, stopping_criteria=criteria)
        output = PATHS[path](target, drafter, input_ids, max_new_tokens=40, stopping_criteria=criteria)
        assert torch.equal(output, expected)
        assert drafter.last_run.output_ids == expected[0, 5:].tolist()


@pytest.fixture(scope="module")
def tokenizer():
    """Sixty-four tokens of one or two letters, so that a stop string can begin and end inside tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*letters, *(letters[i % 26] + letters[(7 * i + 3 + i // 26) % 26] for i in range(VOCAB - 26))]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@BOTH
@pytest.mark.parametrize("drafts", ["oracle", "real", "third_wrong"])
def test_stop_strings_inside_a_block(target, tokenizer, drafts, path, monkeypatch):
    drafter = tiny_drafter(target, block_size=5)
    input_ids = prompt(5)
    reference = plain(target, input_ids, max_new_tokens=40)
    if drafts != "real":
        script_drafts(monkeypatch, follow(reference, wrong_every=3 * (drafts == "third_wrong")))
    lengths = set()
    for position in range(6, 17, 2):
        two = tokenizer.convert_ids_to_tokens(reference[0, position : position + 2])
        # From the last letter of one token to the first of the next.
        for stop in (two[0] + two[1], two[0][-1] + two[1][0]):
            options = {"max_new_tokens": 40, "stop_strings": [stop, "never"], "tokenizer": tokenizer}
            expected = plain(target, input_ids, **options)
            assert torch.equal(PATHS[path](target, drafter, input_ids, **options), expected)
            lengths.add(expected.shape[1])
    assert len(lengths) >= 4


@BOTH
def test_time_limit_ends_the_text_early(target, path, monkeypatch):
    drafter = tiny_drafter(target)
    input_ids = prompt(5)
    criteria = StoppingCriteriaList([MaxTimeCriteria(max_time=0.0)])
    output = PATHS[path](target, drafter, input_ids, max_new_tokens=40, stopping_criteria=criteria)
    assert torch.equal(output, plain(target, input_ids, max_new_tokens=1))
    assert drafter.last_run.output_ids == output[0, 5:].tolist()


@BOTH
def test_prompt_that_ends_with_eos(target, path):
    drafter = tiny_drafter(target)
    input_ids = torch.cat([prompt(5), torch.tensor([[9]])], dim=1)
    options = {"max_new_tokens": 12, "eos_token_id": 9, "pad_token_id": PAD}
    expected = plain(target, input_ids, **options)
    assert expected.shape[1] > 7
    assert torch.equal(PATHS[path](target, drafter, input_ids, **options), expected)


class InPlace(LogitsProcessor):
    """A processor of the user's own that depends on the whole text and writes into what it is given."""

    def __call__(self, input_ids, scores):
        scores[:, (input_ids.sum() + torch.arange(20)) % VOCAB] -= 3.0
        return scores


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 12},
    "suppress": {"suppress_tokens": [40, 59], "begin_suppress_tokens": [27, 13]},
    "bad_words": {"bad_words_ids": [[40, 40], [61]]},
    "sequence_bias": {"sequence_bias": [[[40], -9.0], [[25, 29], 4.0]]},
    "forced_eos": {"forced_eos_token_id": 35, "eos_token_id": 63},
    "length_penalty": {"exponential_decay_length_penalty": (8, 1.6), "eos_token_id": 63},
    "custom": {"logits_processor": LogitsProcessorList([InPlace()])},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4, "bad_words_ids": [[25]]},
}


@BOTH
@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("name", PROCESSORS)
def test_logits_processors(target, name, shift_label, path, monkeypatch):
    drafter = tiny_drafter(target, block_size=5, shift_label=shift_label, prefix_len=0)
    input_ids = prompt(5)
    eos = plain(target, input_ids, max_new_tokens=9)[0, -1].item()
    options = {"max_new_tokens": 30, "eos_token_id": eos, "pad_token_id": PAD, **PROCESSORS[name]}
    expected = plain(target, input_ids, **options)
    assert not torch.equal(expected, plain(target, input_ids, max_new_tokens=30, eos_token_id=eos, pad_token_id=PAD))
    assert torch.equal(PATHS[path](target, drafter, input_ids, **options), expected)
    script_drafts(monkeypatch, follow(expected))
    assert torch.equal(PATHS[path](target, drafter, input_ids, **options), expected)
    # The own text is kept to the last draft: nothing is judged by another row's penalties.
    assert all(step.accepted == len(step.draft_ids) for step in drafter.last_run.rounds)


@BOTH
def test_drafts_see_the_processors(target, path):
    """A drafter under a ban never proposes what is banned, so the penalty costs no acceptance."""
    drafter = tiny_drafter(target, block_size=5)
    banned = list(range(0, VOCAB, 2))
    PATHS[path](target, drafter, prompt(5), max_new_tokens=20, suppress_tokens=banned)
    assert not {token for step in drafter.last_run.steps for token in step.draft_ids} & set(banned)


@BOTH
def test_ids_that_equal_the_mask_token_stay(target, path, monkeypatch):
    input_ids = prompt(5)
    reference = plain(target, input_ids, max_new_tokens=40)
    drafter = tiny_drafter(target, mask_token_id=reference[0, 5 + 7].item())
    for wrong_every in (0, 1):
        script_drafts(monkeypatch, follow(reference, wrong_every=wrong_every))
        assert torch.equal(PATHS[path](target, drafter, input_ids, max_new_tokens=30), reference[:, :35])
    # Nor does the prompt mind.
    input_ids[0, 2] = drafter.config.mask_token_id
    expected = plain(target, input_ids, max_new_tokens=30)
    assert torch.equal(PATHS[path](target, drafter, input_ids, max_new_tokens=30), expected)


@BOTH
@pytest.mark.parametrize("width", [1, 2, 3])
def test_verify_width(target, width, path):
    drafter = tiny_drafter(target, block_size=6)
    input_ids = prompt(5)
    name = {"stock": "num_assistant_tokens", "loop": "verify_width"}[path]
    output = PATHS[path](target, drafter, input_ids, max_new_tokens=25, **{name: width})
    assert torch.equal(output, plain(target, input_ids, max_new_tokens=25))
    assert max(len(step.draft_ids) for step in drafter.last_run.steps) == width


@BOTH
@pytest.mark.parametrize("drafts", ["oracle", "real", "third_wrong"])
@pytest.mark.parametrize("window", [4, 9])
def test_sliding_window_target(window, drafts, path, monkeypatch):
    target = tiny_target(use_sliding_window=True, sliding_window=window, max_window_layers=3)
    drafter = tiny_drafter(target, block_size=6)
    for length in (3, 12):
        input_ids = prompt(length)
        reference = plain(target, input_ids, max_new_tokens=50)
        with monkeypatch.context() as patch:
            if drafts != "real":
                script_drafts(patch, follow(reference, wrong_every=3 * (drafts == "third_wrong")))
            output = PATHS[path](target, drafter, input_ids, max_new_tokens=40)
        assert torch.equal(output, reference[:, : length + 40])


@BOTH
@pytest.mark.parametrize("kind", ["mixtral", "gemma2", "gpt_neox"])
def test_other_architectures(kind, path, monkeypatch):
    """Experts, soft caps with embedding scale, and parallel residuals under other names."""
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    special = {
        "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
        "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
        "gpt_neox": {},
    }[kind]
    target = fill(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **common, **special)))
    drafter = tiny_drafter(target)
    input_ids = prompt(9)
    reference = plain(target, input_ids, max_new_tokens=40)
    assert torch.equal(PATHS[path](target, drafter, input_ids, max_new_tokens=30), reference[:, :39])
    script_drafts(monkeypatch, follow(reference, wrong_every=4))
    assert torch.equal(PATHS[path](target, drafter, input_ids, max_new_tokens=30), reference[:, :39])


@BOTH
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations(attention, path):
    target = tiny_target(attn_implementation=attention)
    drafter = tiny_drafter(target, attn_implementation=attention)
    input_ids = prompt(8)
    attention_mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    options = {"attention_mask": attention_mask, "max_new_tokens": 25, "pad_token_id": PAD}
    expected = plain(target, input_ids, **options)
    assert torch.equal(PATHS[path](target, drafter, input_ids, **options), expected)


@BOTH
def test_generation_config_of_the_target(target, path):
    """What a model card sets by default applies without being named."""
    drafter = tiny_drafter(target)
    input_ids = prompt(5)
    config = GenerationConfig(max_new_tokens=17, repetition_penalty=1.4, do_sample=False, pad_token_id=PAD)
    expected = target.generate(input_ids, generation_config=config)
    assert torch.equal(PATHS[path](target, drafter, input_ids, generation_config=config), expected)


# The default pair's target writes real text; three prompts are what the quick suite can afford.
REAL_PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Q: What is 17 + 25?\nA:"]


def test_real_prompts(smollm2, monkeypatch):
    """Real text, and a stop string inside a block; spoilt copies of the text stand in for a trained drafter."""
    target, tokenizer, drafter = smollm2
    for text in REAL_PROMPTS:
        input_ids = tokenizer(text, return_tensors="pt").input_ids
        expected = plain(target, input_ids, max_new_tokens=10)
        assert torch.equal(PATHS["stock"](target, drafter, input_ids, max_new_tokens=5), expected[:, :-5])
        script_drafts(monkeypatch, follow(expected, wrong_every=4))
        stop = tokenizer.decode(expected[0, -5:-3])
        options = {"max_new_tokens": 10, "stop_strings": [stop], "tokenizer": tokenizer}
        stopped = plain(target, input_ids, **options)
        for generate in PATHS.values():
            assert torch.equal(generate(target, drafter, input_ids, max_new_tokens=10), expected)
            assert torch.equal(generate(target, drafter, input_ids, **options), stopped)
        monkeypatch.undo()


def compare_text(cases, tokens: int) -> dict:
    """Compares both paths with plain generation until `tokens` tokens have been compared.

    `cases` holds (target, tokens of a text); every text has another prompt and another drafter.
    """
    started, compared, differing, texts = time.perf_counter(), 0, 0, 0
    while compared < tokens:
        for target, length in cases:
            vocab_size = target.config.vocab_size
            drafter = tiny_drafter(target, block_size=2 + texts % 9, shift_label=texts % 2 == 0, salt=texts)
            input_ids = prompt(4 + texts % 13, vocab_size=vocab_size, offset=100 * texts)
            options = {"attention_mask": torch.ones_like(input_ids), "max_new_tokens": length, "pad_token_id": 0}
            expected = plain(target, input_ids, **options)
            for generate in PATHS.values():
                output = generate(target, drafter, input_ids, **options)
                width = max(output.shape[1], expected.shape[1])
                padded = [F.pad(ids, (0, width - ids.shape[1]), value=-1) for ids in (output, expected)]
                compared += expected.shape[1] - input_ids.shape[1]
                differing += int((padded[0] != padded[1]).sum())
            texts += 1
    return {
        "tokens_compared": compared,
        "tokens_that_differ": differing,
        "texts": texts,
        "transformers": transformers.__version__,
        "seconds": round(time.perf_counter() - started, 1),
    }


@pytest.mark.slow
def test_a_hundred_thousand_tokens(smollm2, capsys):
    """The nightly count, one JSON line: `python -m pytest -m slow tests/test_lossless.py -k hundred`."""
    tiny = [tiny_target(kind, tied=tied) for kind in ("qwen3", "llama") for tied in (False, True)]
    reports = {"tiny": compare_text([(target, 400) for target in tiny], 100_000)}
    reports["smollm2"] = compare_text([(smollm2[0], 64)], 1_000)
    with capsys.disabled():
        print("\n" + json.dumps(reports))
    assert [report["tokens_that_differ"] for report in reports.values()] == [0, 0]
