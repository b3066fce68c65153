"""The drafter's context store, and the few calls on the target's cache that differ between releases."""

from __future__ import annotations

import gc

import pytest
import torch
from conftest import PATHS, pattern, prompt, tiny_drafter, tiny_target
from transformers import DynamicCache

from modeling_domino import cache_domino
from modeling_domino.cache_domino import DominoCache, cache_keyword, cache_of, drop_last, empty_filled_cache
from modeling_domino.drafting_domino import draft_chain
from modeling_domino.generation_domino import stream
from modeling_domino.record_domino import StageClock
from modeling_domino.taps_domino import TargetTaps
from modeling_domino.target_domino import TargetView


def rows(length: int, offset: int = 0) -> torch.Tensor:
    return pattern(2, 3, length, 4, offset=offset)


def append(cache: DominoCache, context: torch.Tensor, num_layers: int = 2) -> None:
    for layer in range(num_layers):
        cache.append(layer, context + layer, -context - layer)
    cache.commit(context.shape[2])


def test_rows_come_back_in_order_with_the_block_behind():
    cache = DominoCache()
    first, second, block = rows(3), rows(2, 500), rows(4, 900)
    append(cache, first)
    append(cache, second)
    assert cache.get_seq_length() == 5
    for layer in range(2):
        keys, values = cache.with_block(layer, block, -block)
        assert torch.equal(keys, torch.cat([first + layer, second + layer, block], dim=2))
        assert torch.equal(values, torch.cat([-first - layer, -second - layer, -block], dim=2))
    assert cache.get_seq_length() == 5, "the block is not kept"


def test_a_block_without_context():
    cache = DominoCache()
    block = rows(4)
    keys, values = cache.with_block(0, block, -block)
    assert torch.equal(keys, block) and torch.equal(values, -block)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("chunk", [1, 7, 255, 256, 257, 600])
def test_growth_across_the_capacity_keeps_every_row(chunk):
    total = torch.cat([rows(chunk, offset) for offset in range(0, 1300, chunk)], dim=2)
    cache = DominoCache()
    for i in range(0, total.shape[2], chunk):
        append(cache, total[:, :, i : i + chunk])
        block = rows(4, i)
        keys, _ = cache.with_block(1, block, block)
        assert torch.equal(keys, torch.cat([total[:, :, : i + chunk] + 1, block], dim=2))


def test_growth_copies_seldom():
    cache, buffers = DominoCache(), set()
    for i in range(2000):
        append(cache, rows(1, i), num_layers=1)
        buffers.add(cache._keys[0].data_ptr())
    assert len(buffers) <= 5


@pytest.mark.parametrize("chunk", [1, 7, 64, 300])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_window_shows_the_last_rows(chunk, batch):
    total = torch.cat([rows(chunk, offset) for offset in range(0, 900, chunk)], dim=2)[:batch]
    cache = DominoCache(window=37)
    for end in range(chunk, total.shape[2] + 1, chunk):
        append(cache, total[:, :, end - chunk : end])
        block = rows(4, end)[:batch]
        keys, values = cache.with_block(1, block, -block)
        assert torch.equal(keys, torch.cat([total[:, :, max(0, end - 37) : end] + 1, block], dim=2))
        assert torch.equal(values[:, :, :-4], -keys[:, :, :-4])
        assert cache.get_seq_length() == end and cache.num_visible == min(end, 37)


def test_a_window_bounds_the_memory_of_a_single_sequence():
    cache = DominoCache(window=50)
    for i in range(3000):
        append(cache, rows(1, i)[:1], num_layers=1)
    assert cache._keys[0].shape[2] <= 2 * 50 + 256


@pytest.mark.parametrize("window", [0, -3, 2.5, True])
def test_a_window_is_a_positive_number_of_tokens(window):
    with pytest.raises(ValueError, match="context window of the drafter must be an integer of at least 1"):
        DominoCache(window=window)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("padding", [0, 3])
def test_drafts_in_a_window_are_those_of_its_context_alone(path, padding):
    target = tiny_target()
    drafter = tiny_drafter(target)
    ids = prompt(20)
    mask = (torch.arange(20) >= padding).long()[None]
    expected = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=60, pad_token_id=0)
    drafter.context_window = 8
    text = PATHS[path](target, drafter, ids, attention_mask=mask, max_new_tokens=60, pad_token_id=0)
    assert torch.equal(text, expected)
    # The reference: one pass over the last 8 rows of context, at their positions, without any cache.
    view = TargetView(target, drafter.config)
    with TargetTaps(view.layers, drafter.config.target_layer_ids, use_hooks=True) as taps:
        taps_of_text = taps.read(
            target(text, attention_mask=(torch.arange(80) >= padding).long()[None]), device=ids.device
        )
    anchor = 20
    for step in drafter.last_run.rounds:
        if len(step.draft_ids) == drafter.config.num_draft_tokens:
            chain = draft_chain(
                drafter=drafter,
                view=view,
                cache=DominoCache(),
                prefix_ids=text[:, anchor : anchor + 1],
                context_hidden_states=taps_of_text[:, anchor - 8 : anchor],
                position_ids=torch.arange(anchor - 8, anchor + drafter.config.block_size)[None] - padding,
                num_drafts=len(step.draft_ids),
                clock=StageClock(ids.device),
            )
            assert step.draft_ids == chain.ids[0].tolist()
        anchor += step.accepted + 1


def test_batches_in_a_window_write_what_each_writes_alone():
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.context_window = 6
    ids = prompt(9, batch=3)
    mask = (torch.arange(9) >= torch.tensor([[0], [2], [5]])).long()
    options = {"attention_mask": mask, "max_new_tokens": 80, "pad_token_id": 0}
    assert torch.equal(drafter.spec_generate(target, ids, **options), target.generate(ids, do_sample=False, **options))


CHUNKS = [[9], [1] * 9, [4, 5], [8, 1], [1, 3, 1, 4]]


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_incremental_context_equals_from_scratch(chunks, padded):
    """A block over a stored context is the block over the same context given at once."""
    drafter = tiny_drafter(tiny_target(), block_size=4)
    taps, block = pattern(2, 9, 64), pattern(2, 4, 32, offset=11)
    positions = torch.arange(13)[None].expand(2, -1)
    mask = torch.ones(2, 13, dtype=torch.long)
    if padded:
        # Left padding of the second sequence; its positions start at the first real token.
        mask[1, :3] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = drafter(block, taps, positions, mask if padded else None).last_hidden_state
    cache, start = DominoCache(), 0
    for size in chunks:
        end = start + size
        chunk_positions = torch.cat([positions[:, start:end], positions[:, end : end + 4]], dim=1)
        seen = torch.cat([mask[:, :end], mask.new_ones(2, 4)], dim=1) if padded else None
        output = drafter(block, taps[:, start:end], chunk_positions, seen, cache).last_hidden_state
        start = end
    assert cache.get_seq_length() == 9
    torch.testing.assert_close(output, expected)
    # The same block once more, nothing new committed.
    again = drafter(block, None, positions[:, 9:], mask if padded else None, cache).last_hidden_state
    torch.testing.assert_close(again, expected)


@torch.no_grad()
def test_default_positions_continue_behind_the_store():
    drafter = tiny_drafter(tiny_target(), block_size=4)
    taps, block = pattern(1, 9, 64), pattern(1, 4, 32, offset=11)
    cache = DominoCache()
    drafter(block, taps[:, :5], cache=cache)
    output = drafter(block, taps[:, 5:], cache=cache).last_hidden_state
    torch.testing.assert_close(output, drafter(block, taps).last_hidden_state)


# ---- the target's cache


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_the_targets_cache_is_found_and_dropped_from(kind):
    target = tiny_target(kind)
    keyword = cache_keyword(target)
    ids = prompt(8)
    expected = target(ids).logits[:, -1]
    cache = DynamicCache(config=target.config)
    outputs = target(ids[:, :6], use_cache=True, **{keyword: cache})
    assert cache_of(outputs, keyword) is cache and cache_of({keyword: cache}, keyword) is cache
    # Two rejected drafts, then nothing to drop, then the true tokens.
    target(torch.tensor([[1, 2]]), use_cache=True, **{keyword: cache})
    drop_last(cache, 2)
    assert cache.get_seq_length() == 6
    drop_last(cache, 0)
    assert cache.get_seq_length() == 6
    outputs = target(ids[:, 6:], use_cache=True, **{keyword: cache})
    torch.testing.assert_close(outputs.logits[:, -1], expected)


class Settings:
    _mask_length = -1


@torch.no_grad()
def test_a_filled_cache_is_emptied_only_when_the_whole_prompt_comes_again(caplog):
    target, ids = tiny_target(), prompt(6)

    def filled():
        cache = DynamicCache(config=target.config)
        target(ids, use_cache=True, **{cache_keyword(target): cache})
        return cache

    with caplog.at_level("WARNING"):
        cache = filled()
        empty_filled_cache(cache, ids[:, -2:], {"attention_mask": torch.ones(1, 8)}, Settings)
        assert cache.get_seq_length() == 6 and not caplog.records
        cache = DynamicCache(config=target.config)
        empty_filled_cache(cache, ids, {"attention_mask": torch.ones(1, 6)}, Settings)
        assert not caplog.records
        cache = filled()
        empty_filled_cache(cache, ids, {"attention_mask": torch.ones(1, 6)}, Settings)
        assert cache.get_seq_length() == 0
    assert "holds 6 tokens, and a whole prompt of 6" in caplog.text


# ---- several turns on one cache


def talk(target, drafter, turns: list[torch.Tensor], cache, **options) -> list[tuple[torch.Tensor, int]]:
    """The text after each turn, and how many tokens its first forward read."""
    read = []
    handle = target.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    text, record = turns[0][:, :0], []
    try:
        for turn in turns:
            text, start = torch.cat([text, turn], dim=1), len(read)
            options["attention_mask"] = torch.ones_like(text)
            text = drafter.spec_generate(target, text, 25, cache=cache, **options)
            record.append((text, read[start]))
    finally:
        handle.remove()
    return record


@pytest.mark.parametrize("options", [{}, {"tree": 6}, {"verify_width": 2}, {"eos_token_id": [3, 17, 40]}], ids=str)
@pytest.mark.parametrize("window", [None, 7])
def test_turns_on_one_cache_read_new_tokens_only(options, window, caplog):
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.context_window = window
    options = {"pad_token_id": 0, **options}
    cache, turns = DynamicCache(config=target.config), [prompt(9), prompt(5, offset=50), prompt(1, offset=90)]
    with caplog.at_level("WARNING"):
        record = talk(target, drafter, turns, cache, **options)
    assert "emptying" not in caplog.text
    before, run = 0, drafter.last_run
    for (text, read), turn in zip(record, turns, strict=True):
        prompt_length = before + turn.shape[1]
        whole = text[:, :prompt_length]
        fresh = drafter.spec_generate(target, whole, 25, attention_mask=torch.ones_like(whole), **options)
        assert torch.equal(text, fresh)
        # The last token of a text has no row in the cache yet.
        assert read == (turn.shape[1] + 1 if before else turn.shape[1])
        before = text.shape[1]
    # The drafter drafts as one that has read everything.
    assert [step.draft_ids for step in run.rounds] == [step.draft_ids for step in drafter.last_run.rounds]


@pytest.mark.parametrize("change", ["history", "cache", "drafter"])
def test_what_does_not_go_on_where_the_last_turn_ended_is_read_anew(change, caplog):
    target = tiny_target()
    drafter = tiny_drafter(target)
    cache = DynamicCache(config=target.config)
    # The name of older releases serves too.
    argument = {"past_key_values": cache}
    text = drafter.spec_generate(target, prompt(9), 20, **argument)
    if change == "history":
        text[0, 4] += 1
    elif change == "cache":
        drop_last(cache, 3)
    else:
        drafter = tiny_drafter(target, salt=1)
    text = torch.cat([text, prompt(3, offset=50)], dim=1)
    expected = target.generate(text, do_sample=False, max_new_tokens=20)
    with caplog.at_level("WARNING"):
        output = drafter.spec_generate(target, text, 20, **argument)
    assert "emptying it" in caplog.text and torch.equal(output, expected)


def between_turns(change):
    """A talk of two turns with `change(target, drafter)` between them; both texts of the second turn."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    cache = DynamicCache(config=target.config)
    text = torch.cat([drafter.spec_generate(target, prompt(9), 20, cache=cache), prompt(3, offset=50)], dim=1)
    change(target, drafter)
    expected = target.generate(text, do_sample=False, max_new_tokens=20)
    return drafter.spec_generate(target, text, 20, cache=cache), expected, drafter


def test_a_drafter_cast_between_turns_reads_anew(caplog):
    with caplog.at_level("WARNING"):
        output, expected, _ = between_turns(lambda target, drafter: drafter.to(torch.bfloat16))
    assert "emptying it" in caplog.text and torch.equal(output, expected)


def test_a_window_changed_between_turns_counts():
    output, expected, drafter = between_turns(lambda target, drafter: setattr(drafter, "context_window", 4))
    whole = drafter.last_run
    assert torch.equal(output, expected)
    drafter.spec_generate(tiny_target(), output[:, :-20], 20)
    assert [step.draft_ids for step in whole.rounds] == [step.draft_ids for step in drafter.last_run.rounds]
    with pytest.raises(ValueError, match="context window"):
        between_turns(lambda target, drafter: setattr(drafter, "context_window", -3))


def test_a_turn_in_inference_mode_and_one_outside():
    target = tiny_target()
    drafter = tiny_drafter(target)
    cache = DynamicCache(config=target.config)
    with torch.inference_mode():
        text = drafter.spec_generate(target, prompt(9), 20, cache=cache)
    text = torch.cat([text.clone(), prompt(3, offset=50)], dim=1)
    expected = target.generate(text, do_sample=False, max_new_tokens=20)
    assert torch.equal(drafter.spec_generate(target, text, 20, cache=cache), expected)


def test_a_cache_of_another_pair_is_not_gone_on_with(caplog):
    target, other = tiny_target(), tiny_target(salt=1)
    drafter = tiny_drafter(target)
    cache = DynamicCache(config=target.config)
    text = torch.cat([drafter.spec_generate(target, prompt(9), 20, cache=cache), prompt(3, offset=50)], dim=1)
    expected = other.generate(text, do_sample=False, max_new_tokens=20)
    with caplog.at_level("WARNING"):
        assert torch.equal(drafter.spec_generate(other, text, 20, cache=cache), expected)
    assert "emptying it" in caplog.text


def test_a_cache_of_one_sequence_is_refused_for_a_batch():
    target = tiny_target()
    drafter = tiny_drafter(target)
    cache = DynamicCache(config=target.config)
    drafter.spec_generate(target, prompt(9), 5, cache=cache)
    with pytest.raises(ValueError, match="filled for 1 sequence, and 3 came; pass a fresh cache"):
        drafter.spec_generate(target, prompt(20, batch=3), 5, cache=cache, attention_mask=torch.ones(3, 20).long())


@pytest.mark.parametrize(
    "wrong", [{"rule": "bogus"}, {"verify_width": -1}, {"auto_off": "no"}, {"tree": "big"}], ids=str
)
def test_a_refused_call_leaves_the_cache_as_it_was(wrong):
    target = tiny_target()
    drafter = tiny_drafter(target)
    cache = DynamicCache(config=target.config)
    text = torch.cat([drafter.spec_generate(target, prompt(9), 20, cache=cache), prompt(3, offset=50)], dim=1)
    held = cache.get_seq_length()
    for _ in range(2):
        with pytest.raises(ValueError, match="must be"):
            drafter.spec_generate(target, text, 20, cache=cache, **wrong)
    assert cache.get_seq_length() == held and cache in cache_domino._CONTEXTS


def test_a_turn_that_was_broken_off_is_read_anew():
    target = tiny_target()
    drafter = tiny_drafter(target)
    argument = {cache_keyword(target): DynamicCache(config=target.config)}
    steps = stream(target, drafter, prompt(9), do_sample=False, max_new_tokens=20, **argument)
    tokens = [token for step in (next(steps), next(steps)) for token in step.token_ids]
    steps.close()
    text = torch.cat([prompt(9), torch.tensor([tokens]), prompt(2, offset=7)], dim=1)
    expected = target.generate(text, do_sample=False, max_new_tokens=20)
    assert torch.equal(drafter.spec_generate(target, text, 20, **argument), expected)


def test_a_kept_context_lives_as_long_as_its_cache():
    target = tiny_target()
    drafter = tiny_drafter(target)
    cache = DynamicCache(config=target.config)
    drafter.spec_generate(target, prompt(9), 20, **{cache_keyword(target): cache})
    assert len(cache_domino._CONTEXTS) == 1
    del cache
    gc.collect()
    assert len(cache_domino._CONTEXTS) == 0
