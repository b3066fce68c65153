"""Attention on grouped heads: the numbers of transformers' own, without its copies, and a model that is left as it was."""

from __future__ import annotations

import importlib.util
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from conftest import PATHS, prompt, tiny_drafter, tiny_target
from transformers import AttentionInterface
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_domino import grouped_domino
from modeling_domino.generation_domino import stream
from modeling_domino.grouped_domino import MARK, MOST_ROWS, grouped_attention, grouped_heads


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


def refuse(*args, **kwargs):
    raise AssertionError("the usual attention was called")


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
    ours, weights = grouped_attention(module, query, key, value, mask, scaling=0.3, usual=refuse)
    assert copies == [] and weights is None and ours.shape == (batch, rows, heads, 16)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ROUNDING[dtype])


@pytest.mark.parametrize(
    "case", ["no mask", "many rows", "dropout", "softcap", "one head each", "one mask row for all", "three dimensions"]
)
def test_the_rest_goes_to_transformers(case):
    """Whatever the way is not made for takes the usual one, with everything that was passed."""
    rows, shared = MOST_ROWS + 1 if case == "many rows" else 4, 4 if case == "one head each" else 2
    query, key, value = inputs(1, 4, shared, rows, 200)
    mask = None if case == "no mask" else causal(1, rows, 200)
    if case == "one mask row for all":
        mask = mask[:, :, -1:]
    if case == "three dimensions":
        mask = mask[0]
    options = {"scaling": 0.2, "is_causal": True, "extra": 3, "dropout": 0.5 if case == "dropout" else 0.0}
    if case == "softcap":
        options["softcap"] = 30.0
    seen = []
    module = object()
    grouped_attention(module, query, key, value, mask, usual=lambda *a, **k: seen.append((a, k)), **options)
    ((args, kwargs),) = seen
    assert all(a is b for a, b in zip(args, (module, query, key, value, mask))) and kwargs == options


def test_one_mask_after_another():
    """The rows of a mask serve all layers of a forward, and no other mask of the same shape."""
    query, key, value = inputs(1, 4, 2, 3, 20)
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    for hidden in range(4):
        mask = causal(1, 3, 20)
        mask[..., :hidden] = False
        for _ in range(2):
            ours, _ = grouped_attention(module, query, key, value, mask, usual=refuse)
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


def test_trees_and_batches(copies):
    target = tiny_target()
    drafter, input_ids = tiny_drafter(target, num_attention_heads=3), prompt(7)
    pair = torch.cat([input_ids, input_ids.flip(1)])
    mask = torch.ones_like(pair)
    mask[1, :3] = 0
    plain = [target.generate(ids, do_sample=False, max_new_tokens=16) for ids in (input_ids, pair[1:, 3:])]
    copies.clear()
    assert torch.equal(drafter.spec_generate(target, input_ids, do_sample=False, max_new_tokens=16, tree=8), plain[0])
    assert copies == []
    outputs = drafter.spec_generate(target, pair, attention_mask=mask, do_sample=False, max_new_tokens=16)
    assert torch.equal(outputs[:1], plain[0]) and torch.equal(outputs[1:, 3:], plain[1])
    # In a batch the drafter's own attention has a mask too, and its heads are copied; the target's are not.
    assert set(copies) == {3} and target.config.num_attention_heads // target.config.num_key_value_heads == 2


def test_between_the_rounds_attention_is_as_it_was(copies):
    target = tiny_target()
    drafter = tiny_drafter(target)
    seen = set()
    for _ in stream(target, drafter, prompt(5), do_sample=False, max_new_tokens=12):
        with torch.no_grad():
            target(prompt(5), attention_mask=torch.tensor([[0, 1, 1, 1, 1]]))
        seen.add(tuple(copies))
        copies.clear()
    # Keys and values of each of the six layers, as ever.
    assert seen == {(2,) * 12}


@pytest.fixture
def attends():
    """Copies of keys and values in a forward with a mask: 12 in the usual way, none in ours."""

    def attend(target, copies: list[int]) -> int:
        copies.clear()
        with torch.no_grad():
            target(prompt(5), attention_mask=torch.tensor([[0, 1, 1, 1, 1]]))
        return len(copies)

    return attend


def test_blocks_nest_and_end_with_errors(copies, attends):
    target = tiny_target()
    with pytest.raises(RuntimeError, match="stop"), grouped_heads(target):
        with grouped_heads(target):
            assert attends(target, copies) == 0 and target.config._attn_implementation == "sdpa"
        assert attends(target, copies) == 0
        raise RuntimeError("stop")
    assert attends(target, copies) == 12 and getattr(ALL_ATTENTION_FUNCTIONS["sdpa"], MARK).mask is None


def test_other_threads_are_left_alone(copies, attends):
    """A thread that is in no block attends as ever; one that ends its block ends nobody else's."""
    target, inside, done, found = tiny_target(), threading.Event(), threading.Event(), []

    def stay():
        with grouped_heads(target):
            inside.set()
            done.wait(10)
            found.append(attends(target, copies))

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(10)
    with grouped_heads(target):
        assert attends(target, copies) == 0
    assert attends(target, copies) == 12
    done.set()
    thread.join()
    assert found == [0]


def test_padded_prompts_and_fully_masked_rows(copies):
    """Rows in front of a padded prompt see nothing; what they give is not read, and the others are right."""
    target, ids = tiny_target(), prompt(8, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        theirs = target(ids, attention_mask=mask, position_ids=positions).logits
        with grouped_heads(target):
            copies.clear()
            ours = target(ids, attention_mask=mask, position_ids=positions).logits
    assert copies == []
    torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()])


@pytest.mark.parametrize("how", ["set", "registered"])
@pytest.mark.parametrize("when", ["before", "between", "inside"])
def test_attention_that_the_user_put_in_place_runs(monkeypatch, how, when):
    """Without a mask it is the usual attention that runs: the user's, whenever it came."""

    def own(*args, **kwargs):
        called.append(args[0])
        return sdpa_attention_forward(*args, **kwargs)

    def put() -> None:
        if how == "set":
            ALL_ATTENTION_FUNCTIONS["sdpa"] = own
        else:
            AttentionInterface.register("sdpa", own)

    called, target = [], tiny_target()
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", sdpa_attention_forward)
    if when == "before":
        put()
    with grouped_heads(target):
        pass
    if when == "between":
        put()
    with grouped_heads(target), torch.no_grad():
        if when == "inside":
            put()
        target(prompt(4))
    assert len(called) == 6


def test_a_wrapper_around_ours_may_be_registered(monkeypatch, attends, copies):
    """It is what ours passes calls to, and it calls ours: they once called one another for ever."""
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", sdpa_attention_forward)
    target, called = tiny_target(), []
    with grouped_heads(target):
        pass
    inner = ALL_ATTENTION_FUNCTIONS["sdpa"]
    AttentionInterface.register("sdpa", lambda *args, **kwargs: called.append(1) or inner(*args, **kwargs))
    assert attends(target, copies) == 12 and len(called) == 6
    with grouped_heads(target):
        assert attends(target, copies) == 0


def test_two_copies_of_the_code_share_one_function(copies, attends, monkeypatch):
    """A drafter from a folder brings its own copy: two functions in front of each other once called one another for ever."""
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})
    spec = importlib.util.spec_from_file_location("another_grouped", grouped_domino.__file__)
    another = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, another)
    spec.loader.exec_module(another)
    target = tiny_target()
    for first, second in ((another, grouped_domino), (grouped_domino, another)):
        one, two = first.grouped_heads(target), second.grouped_heads(target)
        # Not the last in is the first out, as with two threads.
        one.__enter__()
        two.__enter__()
        one.__exit__(None, None, None)
        assert attends(target, copies) == 0
        one = first.grouped_heads(target)
        one.__enter__()
        two.__exit__(None, None, None)
        one.__exit__(None, None, None)
        assert attends(target, copies) == 12
    assert another.install() is grouped_domino.install()


@pytest.mark.parametrize("case", ["eager", "one head each"])
def test_other_targets_are_left_alone(monkeypatch, case):
    monkeypatch.setattr(grouped_domino, "install", refuse)
    target = tiny_target(num_key_value_heads=4) if case == "one head each" else tiny_target()
    if case == "eager":
        target.set_attn_implementation("eager")
    with grouped_heads(target):
        pass
