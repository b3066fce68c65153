"""Attention on grouped heads: the numbers of transformers' own, without its copies, and a model that is left as it was."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from conftest import PATHS, prompt, tiny_drafter, tiny_target
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from modeling_domino import grouped_domino
from modeling_domino.generation_domino import stream
from modeling_domino.grouped_domino import MOST_ROWS, NAME, attention_of, grouped_attention, grouped_heads


# The same sums in tiles of another height.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


@pytest.fixture
def copies(monkeypatch):
    """Counts the copies of keys and values for every query head."""
    seen = []
    original = sdpa_attention.repeat_kv

    def repeat_kv(states, groups):
        seen.append(groups)
        return original(states, groups)

    monkeypatch.setattr(sdpa_attention, "repeat_kv", repeat_kv)
    return seen


def inputs(batch: int, heads: int, shared: int, rows: int, columns: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(heads * columns + rows)
    shapes = (batch, heads, rows, 16), (batch, shared, columns, 16), (batch, shared, columns, 16)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def causal(batch: int, rows: int, columns: int) -> torch.Tensor:
    """The rows see all in front of them; and each sequence of a batch misses some columns of its own."""
    seen = torch.ones(batch, 1, rows, columns, dtype=torch.bool).tril(columns - rows)
    for i in range(1, batch):
        seen[i, :, :, :i] = False
    return seen


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("kind", ["boolean", "added", "per head"])
@pytest.mark.parametrize(
    "batch, heads, shared, rows, columns",
    [(1, 9, 3, 6, 131), (1, 4, 1, 17, 40), (3, 6, 2, 5, 33), (2, 4, 2, 1, 9), (1, 4, 2, MOST_ROWS, 200)],
)
def test_it_is_the_attention_of_transformers(copies, dtype, kind, batch, heads, shared, rows, columns):
    query, key, value = inputs(batch, heads, shared, rows, columns, dtype)
    mask = causal(batch, rows, columns)
    if kind != "boolean":
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    if kind == "per head":
        mask = mask + torch.arange(heads, dtype=dtype)[:, None, None] * torch.linspace(0, 1, columns, dtype=dtype)
    module = SimpleNamespace(num_key_value_groups=heads // shared, is_causal=True)
    ours, weights = grouped_attention(module, query, key, value, mask, scaling=0.3)
    assert copies == [] and weights is None and ours.shape == (batch, rows, heads, 16)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ROUNDING[dtype])


@pytest.mark.parametrize("case", ["no mask", "many rows", "dropout", "one head each"])
def test_the_rest_goes_to_transformers(monkeypatch, case):
    """Whatever the way is not made for takes the usual one, with everything that was passed."""
    rows, shared = MOST_ROWS + 1 if case == "many rows" else 4, 4 if case == "one head each" else 2
    query, key, value = inputs(1, 4, shared, rows, 200)
    mask = None if case == "no mask" else causal(1, rows, 200)
    seen = []
    monkeypatch.setattr(grouped_domino, "sdpa_attention_forward", lambda *args, **kwargs: seen.append((args, kwargs)))
    module, dropout = object(), 0.5 if case == "dropout" else 0.0
    grouped_attention(module, query, key, value, mask, dropout=dropout, scaling=0.2, is_causal=True, extra=3)
    ((args, kwargs),) = seen
    assert all(a is b for a, b in zip(args, (module, query, key, value, mask)))
    assert kwargs == {"dropout": dropout, "scaling": 0.2, "is_causal": True, "extra": 3}


def test_one_mask_after_another():
    """The rows of a mask serve all layers of a forward, and no other mask of the same shape."""
    query, key, value = inputs(1, 4, 2, 3, 20)
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    for hidden in range(4):
        mask = causal(1, 3, 20)
        mask[..., :hidden] = False
        for _ in range(2):
            ours, _ = grouped_attention(module, query, key, value, mask)
            theirs, _ = sdpa_attention_forward(module, query, key, value, mask)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_verifications_copy_nothing_and_texts_are_the_same(copies, path, kind):
    target = tiny_target(kind)
    drafter, input_ids = tiny_drafter(target), prompt(7)
    plain = target.generate(input_ids, do_sample=False, max_new_tokens=20)
    copies.clear()
    mask = torch.ones_like(input_ids)
    assert torch.equal(PATHS[path](target, drafter, input_ids, attention_mask=mask, max_new_tokens=20), plain)
    assert any(step.draft_ids for step in drafter.last_run.steps) and copies == []
    assert target.config._attn_implementation == "sdpa"


def test_trees_and_batches(copies):
    target = tiny_target()
    drafter, input_ids = tiny_drafter(target), prompt(7)
    pair = torch.cat([input_ids, input_ids.flip(1)])
    mask = torch.ones_like(pair)
    mask[1, :3] = 0
    plain = [target.generate(ids, do_sample=False, max_new_tokens=16) for ids in (input_ids, pair[1:, 3:])]
    copies.clear()
    assert torch.equal(drafter.spec_generate(target, input_ids, do_sample=False, max_new_tokens=16, tree=8), plain[0])
    assert copies == []
    outputs = drafter.spec_generate(target, pair, attention_mask=mask, do_sample=False, max_new_tokens=16)
    assert torch.equal(outputs[:1], plain[0]) and torch.equal(outputs[1:, 3:], plain[1])
    # In a batch the drafter's own attention has a mask too, and its heads are copied: those of two layers.
    assert set(copies) == {drafter.layers[0].self_attn.num_key_value_groups}


def test_between_the_rounds_the_model_is_the_users():
    target = tiny_target()
    drafter = tiny_drafter(target)
    seen = set()
    for _ in stream(target, drafter, prompt(5), do_sample=False, max_new_tokens=12):
        seen.add(target.config._attn_implementation)
    assert seen == {"sdpa"}


def test_blocks_nest_and_end_with_errors():
    target = tiny_target()
    with pytest.raises(RuntimeError, match="stop"), grouped_heads(target):
        with grouped_heads(target):
            assert target.config._attn_implementation == NAME and attention_of(target) == "sdpa"
        assert target.config._attn_implementation == NAME
        raise RuntimeError("stop")
    assert target.config._attn_implementation == "sdpa"


def test_a_thread_that_ends_leaves_the_others_their_block():
    target, inside, done = tiny_target(), threading.Event(), threading.Event()

    def stay():
        with grouped_heads(target):
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(10)
    with grouped_heads(target):
        pass
    assert target.config._attn_implementation == NAME
    done.set()
    thread.join()
    assert target.config._attn_implementation == "sdpa"


def test_a_run_may_begin_while_another_is_in_a_block():
    """Trees ask for eager or sdpa attention: what a block writes into the config was once taken for the user's choice."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    with grouped_heads(target):
        outputs = drafter.spec_generate(target, prompt(5), do_sample=False, max_new_tokens=8, tree=8)
    assert torch.equal(outputs, target.generate(prompt(5), do_sample=False, max_new_tokens=8))


@pytest.mark.parametrize("case", ["eager", "one head each", "not by name"])
def test_other_targets_are_left_alone(monkeypatch, case):
    target = tiny_target(num_key_value_heads=4) if case == "one head each" else tiny_target()
    if case == "eager":
        target.set_attn_implementation("eager")
    if case == "not by name":
        monkeypatch.setattr(type(target), "_supports_attention_backend", False)
    before = target.config._attn_implementation
    with grouped_heads(target):
        assert target.config._attn_implementation == before
