"""Batches: every sequence writes what it would alone, however differently the sequences advance."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import fill, prompt, tiny_drafter, tiny_target
from transformers import DynamicCache, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, StoppingCriteria

from modeling_domino import loop_domino, texts_domino, tree_domino
from modeling_domino.cache_domino import cache_keyword
from modeling_domino.drafting_domino import draft_chain


PAD = 62
PROMPT = 9


def ragged(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts of 9, 8, 7, ... tokens and their mask."""
    ids = prompt(PROMPT, batch=batch)
    mask = (torch.arange(PROMPT) >= torch.arange(batch)[:, None] % PROMPT).long()
    return ids.masked_fill(mask == 0, PAD), mask


def alone(target, ids, mask, **kwargs) -> list[list[int]]:
    """What the target writes for each prompt by itself."""
    texts = []
    for row, seen in zip(ids, mask):
        row = row[seen == 1][None]
        output = target.generate(row, do_sample=False, pad_token_id=PAD, **kwargs)
        texts.append(output[0, row.shape[1] :].tolist())
    return texts


def together(target, drafter, ids, mask, **kwargs) -> list[list[int]]:
    """The same by our loop over the batch; what follows a text must be padding."""
    output = drafter.spec_generate(target, ids, attention_mask=mask, pad_token_id=PAD, **kwargs)
    assert torch.equal(output[:, :PROMPT], ids)
    texts = [run.output_ids for run in drafter.last_runs]
    for row, text in zip(output[:, PROMPT:].tolist(), texts):
        assert row == text + [PAD] * (len(row) - len(text))
    assert max(map(len, texts)) == output.shape[1] - PROMPT
    return texts


def script_rows(monkeypatch, references: list[list[int]], wrong_every: list[int]) -> None:
    """Drafts each sequence's own continuation, with every `wrong_every[i]`-th token of it spoilt (0: none)."""
    spoilt = [
        [(token + 1) % 60 if wrong and i % wrong == wrong - 1 else token for i, token in enumerate(text)]
        for text, wrong in zip(references, wrong_every)
    ]
    loops = []
    initialise = loop_domino.DecodeLoop.__init__

    def remember(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        loops.append(self)

    def scripted(num_drafts, **kwargs):
        chain = draft_chain(num_drafts=num_drafts, **kwargs)
        loop = loops[-1]
        drafts = [
            (spoilt[row][loop.texts.lengths[row] - PROMPT :] + [0] * num_drafts)[:num_drafts]
            for row in loop.texts.rows
        ]
        return dataclasses.replace(chain, ids=torch.tensor(drafts, dtype=torch.long))

    monkeypatch.setattr(loop_domino.DecodeLoop, "__init__", remember)
    monkeypatch.setattr(loop_domino, "draft_chain", scripted)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("batch", [8])
def test_ragged_prompts(kind, attention, batch):
    target = tiny_target(kind)
    target.set_attn_implementation(attention)
    ids, mask = ragged(batch)
    for shift_label, with_head in ((True, True), (False, True), (True, False)):
        drafter = tiny_drafter(target, shift_label=shift_label, with_head=with_head)
        expected = alone(target, ids, mask, max_new_tokens=16)
        assert together(target, drafter, ids, mask, max_new_tokens=16) == expected


@pytest.mark.parametrize("slack", [0, 10_000])
def test_sequences_that_advance_differently(target, slack, monkeypatch):
    """From all accepted to none; with `slack` 0 the caches are compacted every few rounds."""
    monkeypatch.setattr(loop_domino, "HIDDEN_SLACK", slack)
    monkeypatch.setattr(loop_domino, "HIDDEN_SHARE", 1.0 if slack == 0 else 1.5)
    compacted = []
    compact = loop_domino.compact
    monkeypatch.setattr(loop_domino, "compact", lambda *args: compacted.append(1) or compact(*args))
    drafter = tiny_drafter(target, block_size=5)
    ids, mask = ragged(5)
    expected = alone(target, ids, mask, max_new_tokens=70)
    script_rows(monkeypatch, expected, [0, 1, 2, 3, 7])
    assert together(target, drafter, ids, mask, max_new_tokens=60) == [text[:60] for text in expected]
    assert bool(compacted) == (slack == 0)
    taus = [run.tau for run in drafter.last_runs]
    assert taus[0] > 5 and taus[1] == 1.0 and taus[0] > taus[4] > taus[3] > taus[2] > taus[1]


def test_the_mask_has_room_for_the_slowest_sequence(target, monkeypatch):
    """One sequence accepts nothing while another accepts everything: the most columns there can be."""
    drafter = tiny_drafter(target, block_size=8)
    ids, mask = ragged(2)
    expected = alone(target, ids, mask, max_new_tokens=150)
    script_rows(monkeypatch, expected, [0, 1])
    assert together(target, drafter, ids, mask, max_new_tokens=150) == expected


def test_a_limit_of_any_size_costs_nothing_ahead(target, monkeypatch):
    """Texts and masks grow as they are written, in batches and for trees, behind padding too."""
    monkeypatch.setattr(texts_domino, "FIRST_COLUMNS", 4)
    monkeypatch.setattr(tree_domino, "FIRST_ROWS", 4)
    monkeypatch.setattr(loop_domino, "HIDDEN_SLACK", 0)
    drafter = tiny_drafter(target, block_size=4)
    ids, mask = ragged(3)
    stops = [alone(target, ids, mask, max_new_tokens=50)[row][30 + row] for row in range(3)]
    expected = alone(target, ids, mask, max_new_tokens=50, eos_token_id=stops)
    options = {"max_new_tokens": 10**9, "eos_token_id": stops}
    assert together(target, drafter, ids, mask, **options) == expected
    for tree in (None, 7):
        for row in range(3):
            assert (
                together(target, drafter, ids[row][None], mask[row][None], tree=tree, **options)
                == expected[row : row + 1]
            )


@pytest.mark.parametrize("width", [1, 3, 5])
def test_early_stops(target, width, monkeypatch):
    drafter = tiny_drafter(target, block_size=5)
    ids, mask = ragged(4)
    free = alone(target, ids, mask, max_new_tokens=40)
    # Tokens at which the sequences end after different numbers of tokens.
    stops = [free[0][3], free[1][11], free[2][20]]
    expected = alone(target, ids, mask, max_new_tokens=40, eos_token_id=stops)
    assert len({len(text) for text in expected}) > 1
    script_rows(monkeypatch, free, [0, 2, 0, 3])
    options = {"max_new_tokens": 40, "eos_token_id": stops, "verify_width": width}
    assert together(target, drafter, ids, mask, **options) == expected


def test_processors_and_criteria_see_each_sequence_in_its_place(target, monkeypatch):
    drafter = tiny_drafter(target, block_size=5)
    ids, mask = ragged(3)
    seen = []

    def allowed(batch_id: int, text: torch.Tensor) -> list[int]:
        seen.append(batch_id)
        return list(range(batch_id, 60, 3))

    class StopsBySum(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids.sum(dim=1) % 11 == 0

    expected = []
    for row in range(3):
        prompt_ids = ids[row][mask[row] == 1][None]
        output = target.generate(
            prompt_ids,
            do_sample=False,
            max_new_tokens=30,
            pad_token_id=PAD,
            prefix_allowed_tokens_fn=lambda _, text, row=row: allowed(row, text),
            # Pads count for the repetition penalty in a batch, so none may be drawn anyway.
            logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)]),
        )
        expected.append(output[0, prompt_ids.shape[1] :].tolist())
    script_rows(monkeypatch, expected, [0, 2, 3])
    options = {
        "max_new_tokens": 30,
        "prefix_allowed_tokens_fn": allowed,
        "logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)]),
    }
    assert together(target, drafter, ids, mask, **options) == expected
    assert set(seen) == {0, 1, 2}

    stopped = together(target, drafter, ids, mask, stopping_criteria=[StopsBySum()], **options)
    for row, (text, whole) in enumerate(zip(stopped, expected)):
        sums = ids[row].sum() + torch.tensor(whole).cumsum(0)
        ends = (sums % 11 == 0).nonzero().flatten().tolist()
        assert text == (whole[: ends[0] + 1] if ends else whole)


@pytest.mark.parametrize("rule", ["match", "speculative", "block"])
def test_sampled_sequences_follow_the_law(rule):
    """Two prompts, many sequences of each in one batch: the second token's law, row by row."""
    target = tiny_target(vocab_size=5, num_layers=2, hidden_size=16)
    drafter = tiny_drafter(target, block_size=3, target_layer_ids=[0], num_hidden_layers=1)
    prompts = torch.tensor([[1, 3, 0], [4, 2, 2]])
    torch.manual_seed(0)
    runs = 150
    output = torch.cat(
        [
            drafter.spec_generate(
                target,
                prompts,
                max_new_tokens=2,
                temperature=0.9,
                rule=rule,
                num_return_sequences=50,
                attention_mask=torch.ones_like(prompts),
                pad_token_id=0,
            )
            for _ in range(runs // 50)
        ]
    )
    assert output.shape == (2 * runs, 5)
    for ids in prompts:
        texts = output[(output[:, :3] == ids).all(dim=1)][:, 3:]
        assert len(texts) == runs
        with torch.no_grad():
            first = (target(ids[None]).logits[0, -1] / 0.9).softmax(-1)
            pairs = torch.cat([ids.expand(5, -1), torch.arange(5)[:, None]], dim=1)
            law = (first[:, None] * (target(pairs).logits[:, -1] / 0.9).softmax(-1)).flatten()
        counts = torch.bincount(5 * texts[:, 0] + texts[:, 1], minlength=25)
        expected = law * runs
        common = expected >= 4
        observed = torch.cat([counts[common], counts[~common].sum()[None]])
        expected = torch.cat([expected[common], expected[~common].sum()[None]])
        degrees = len(expected) - 1
        # Five standard deviations of the chi-square law.
        assert ((observed - expected) ** 2 / expected).sum() < degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("tree", [None, 8])
def test_a_filled_cache_behind_padding(target, tree):
    """Its columns are no waste: they once counted as hidden, and compaction threw them away."""
    drafter = tiny_drafter(target)
    filled, length = 200, 206
    ids = prompt(length)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    cache = DynamicCache()
    keyword = cache_keyword(target)
    with torch.no_grad():
        positions = (mask[:, :filled].cumsum(-1) - 1).clamp(min=0)
        target(ids[:, :filled], attention_mask=mask[:, :filled], position_ids=positions, **{keyword: cache})
    expected = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20, pad_token_id=PAD)
    output = drafter.spec_generate(
        target,
        ids[:, filled:],
        attention_mask=mask,
        max_new_tokens=20,
        pad_token_id=PAD,
        tree=tree,
        **{keyword: cache},
    )
    assert torch.equal(output[:, 6:], expected[:, length:])


def test_what_follows_an_end_is_padding_for_processors_too(target):
    drafter = tiny_drafter(target)
    ids, mask = ragged(3)
    free = alone(target, ids, mask, max_new_tokens=20)
    stop = free[0][2]

    def only_pads_after_the_end(batch_id: int, text: torch.Tensor) -> list[int]:
        new = text[PROMPT:].tolist()
        # The first sequence ends at once; none of its drafts comes near its text.
        if batch_id == 0 and new[: len(expected[0])] == expected[0]:
            ended.append(len(new))
            assert set(new[len(expected[0]) :]) <= {PAD}, new
        return list(range(60))

    ended = []

    options = {"max_new_tokens": 20, "eos_token_id": [stop]}
    expected = alone(target, ids, mask, **options, prefix_allowed_tokens_fn=lambda *args: list(range(60)))
    options["prefix_allowed_tokens_fn"] = only_pads_after_the_end
    assert together(target, drafter, ids, mask, **options) == expected
    assert max(ended) > len(expected[0])


@pytest.mark.parametrize(
    "ids", [torch.ones(1, 0).long(), torch.ones(3).long(), torch.ones(1, 3)], ids=["empty", "flat", "float"]
)
def test_what_is_no_prompt_is_refused(ids):
    target = tiny_target()
    with pytest.raises(ValueError, match="must hold at least one token id for each sequence"):
        tiny_drafter(target).spec_generate(target, ids, max_new_tokens=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"assistant_model": object()}, "has its drafter already"),
        ({"prompt_lookup_num_tokens": 3}, "got prompt_lookup_num_tokens"),
        ({"temperature": float("nan")}, "must be a number, 0 .greedy. or positive, got nan"),
        ({"stop_token_ids": []}, "must hold an id, got"),
        ({"verify_width": 2.5}, "must be an integer of at least 0, .*got 2.5"),
    ],
)
def test_options_that_would_be_ignored_or_misread(target, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_drafter(target).spec_generate(target, prompt(4), max_new_tokens=4, **options)
    with pytest.raises(ValueError, match="drafts for a target, got NoneType"):
        tiny_drafter(target).spec_generate(None, prompt(4))
    with pytest.raises(ValueError, match="must be a tensor of token ids"):
        tiny_drafter(target).spec_generate(target, [[1, 2]], max_new_tokens=4)


def test_refusals(target):
    drafter = tiny_drafter(target)
    ids, mask = ragged(2)
    with pytest.raises(ValueError, match="Trees and filled caches are for one sequence at a time, got a batch of 2"):
        drafter.spec_generate(target, ids, attention_mask=mask, max_new_tokens=4, tree=4, pad_token_id=PAD)
    sliding = fill(tiny_target(use_sliding_window=True, sliding_window=4, max_window_layers=2))
    with pytest.raises(ValueError, match="Batches need a target with full attention"):
        tiny_drafter(sliding).spec_generate(sliding, ids, attention_mask=mask, max_new_tokens=4, pad_token_id=PAD)
