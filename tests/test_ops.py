"""The torch functions that have a kernel twin: one order of logits, shortlists, and the split forms of the head."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import pattern

from modeling_domino.ops_domino import (
    BUCKET,
    gru_gates,
    gru_step,
    gru_update,
    hidden_features,
    key_ids,
    low_rank_features,
    order_keys,
    pick,
    shortlist,
    step_features,
)


NAN, INF = math.nan, math.inf
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def by_the_rule(row: list[float]) -> list[int]:
    """The order spelled out in Python: NaN behind everything, then larger first, then the smaller id."""
    return sorted(range(len(row)), key=lambda i: (math.isnan(row[i]), 0.0 if math.isnan(row[i]) else -row[i], i))


@DTYPES
def test_keys_sort_as_the_rule_says(dtype):
    row = torch.tensor([0.0, -0.0, NAN, INF, -INF, 1.5, 1.5, -3.25, -INF, -NAN, 2e-38, -2e-38, INF], dtype=dtype)
    keys = order_keys(row, torch.arange(13))
    assert key_ids(keys.sort(descending=True).values).tolist() == by_the_rule(row.tolist())
    assert pick(row) == 3


@pytest.mark.parametrize("row, best", [([NAN, -INF], 1), ([NAN, NAN], 0), ([-0.0, 0.0], 0), ([NAN, 1.0, 1.0], 1)])
def test_the_best_of_a_strange_row(row, best):
    assert pick(torch.tensor(row)) == best
    assert shortlist(torch.tensor(row), 1).tolist() == [best]


@DTYPES
@pytest.mark.parametrize("size", [1, 5, BUCKET, BUCKET + 1, 7 * BUCKET - 3, 1000])
@pytest.mark.parametrize("count", [1, 3, 64, 5000])
def test_a_shortlist_is_the_head_of_the_sorted_vocabulary(dtype, size, count):
    logits = pattern(2, 3, size).to(dtype)
    assert [row.tolist() for row in shortlist(logits, count).flatten(0, 1)] == [
        by_the_rule(row.tolist())[:count] for row in logits.flatten(0, 1)
    ]


@DTYPES
def test_a_shortlist_keeps_the_order_of_ties(dtype):
    """Few distinct values, so that ties cross the buckets and the end of the list."""
    logits = (pattern(4, 777) * 2).round().to(dtype)
    for count in (1, 50, 400):
        assert [row.tolist() for row in shortlist(logits, count)] == [
            by_the_rule(row.tolist())[:count] for row in logits
        ]


def test_nan_hides_no_candidate_of_its_bucket():
    logits = pattern(1, 5 * BUCKET)
    logits[0, ::BUCKET] = NAN
    logits[0, 7] = INF
    logits[0, 8:12] = -INF
    assert shortlist(logits, 40)[0].tolist() == by_the_rule(logits[0].tolist())[:40]
    assert pick(logits) == 7


def test_a_row_of_nan_has_a_shortlist_of_real_ids():
    ids = shortlist(torch.full((1, BUCKET + 5), NAN), BUCKET + 5)
    assert sorted(ids[0].tolist()) == list(range(BUCKET + 5))


@pytest.mark.parametrize("bias", [False, True])
def test_the_split_forms_are_the_whole_ones(bias):
    hidden, state, inputs = pattern(3, 6), pattern(3, 5, offset=9), pattern(3, 6, offset=50)
    weight_in, bias_in = pattern(4, 11, offset=77), pattern(4) if bias else None
    whole = low_rank_features(hidden, state, weight_in, bias_in)
    torch.testing.assert_close(step_features(hidden_features(hidden, weight_in, bias_in), state, weight_in), whole)

    weight_ih, weight_hh = pattern(15, 6, offset=200), pattern(15, 5, offset=300)
    biases = (pattern(15, offset=400), pattern(15, offset=500)) if bias else (None, None)
    table = gru_gates(inputs, weight_ih, biases[0])
    expected = gru_step(inputs, state, weight_ih, weight_hh, *biases)
    torch.testing.assert_close(
        gru_update(table[[2, 0, 1]], state[[2, 0, 1]], weight_hh, biases[1]), expected[[2, 0, 1]]
    )
