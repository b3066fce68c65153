"""The kernels of a tree against the torch functions of `ops_domino.py`."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import pattern

from modeling_domino import ops_domino as ops


pytestmark = pytest.mark.usefixtures("unwritten_is_nan")

DIM, WIDTH, RANK, COUNT = 20, 12, 6, 37
NAN, INF = math.nan, math.inf
# Sums in another order; with the rounding of eager bf16 one may round to the neighbour.
TOLERANCES = {torch.float32: {"atol": 3e-6, "rtol": 2e-5}, torch.bfloat16: {"atol": 2e-2, "rtol": 1e-2}}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=["fp32", "bf16"])


@DTYPES
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_every_lane_continues_its_parent(domino_kernels, kernel_device, dtype, lanes, bias):
    def values(*shape, offset, scale=0.4):
        return (pattern(*shape, offset=offset) * scale).to(kernel_device, dtype)

    biases = tuple(values(n, offset=9 * n) for n in (3 * WIDTH, 3 * WIDTH, RANK, 5)) if bias else (None,) * 4
    weights = ops.HeadWeights(
        values(3 * WIDTH, DIM, offset=1),
        values(3 * WIDTH, WIDTH, offset=100),
        values(RANK, DIM + WIDTH, offset=700),
        values(5, RANK, offset=900),
        *biases,
    )
    state = values(4, WIDTH, offset=40)
    recurrent = torch.nn.functional.linear(state, weights.weight_hh, weights.bias_hh)
    parents = torch.tensor([3, 0, 3], device=kernel_device)[:lanes]
    args = (values(lanes, 3 * WIDTH, offset=60), parents, state, recurrent, values(RANK, offset=80), weights)
    outputs = domino_kernels.tree_step(*args, rounded=dtype == torch.bfloat16)
    for output, expected in zip(outputs, ops.tree_step(*args)):
        assert output.dtype == dtype
        torch.testing.assert_close(output, expected, **TOLERANCES[dtype])


@pytest.fixture
def candidates(kernel_device):
    def make(dtype=torch.float32, *, lanes=3, bias=False):
        def values(*shape, offset):
            return pattern(*shape, offset=offset).to(kernel_device, dtype)

        return {
            "base_logits": values(COUNT, offset=1).float() * 3,
            "features": values(lanes, RANK, offset=200),
            "rows": values(COUNT, RANK, offset=300),
            "tail": torch.tensor([0.4], device=kernel_device),
            "lane_scores": -torch.arange(lanes, device=kernel_device) * 0.7,
            "temperature": torch.tensor([0.9], device=kernel_device),
            "children": 5,
            "biases": values(COUNT, offset=800) if bias else None,
        }

    return make


@DTYPES
@pytest.mark.parametrize("lanes, bias, corrected", [(1, False, True), (3, True, True), (3, False, False)])
def test_the_best_children_of_every_lane(domino_kernels, candidates, dtype, lanes, bias, corrected):
    given = candidates(dtype, lanes=lanes, bias=bias)
    if not corrected:
        given["features"] = None
    places, scores, steps = domino_kernels.tree_expand(**given, rounded=dtype == torch.bfloat16)
    expected_places, expected_scores, expected_steps = ops.tree_expand(**given)
    torch.testing.assert_close(scores, expected_scores, **TOLERANCES[dtype])
    torch.testing.assert_close(steps, expected_steps, **TOLERANCES[dtype])
    if dtype == torch.float32:
        assert torch.equal(places, expected_places)


@pytest.mark.parametrize(
    "changes",
    [
        {4: 9.0, 2: 9.0, 30: 9.0},
        {3: NAN},
        dict.fromkeys(range(COUNT), -INF),
        {**dict.fromkeys(range(COUNT), -INF), 8: 1.0},
        {0: -0.0, 1: 0.0},
    ],
    ids=["ties", "nan", "nothing", "one", "zeros"],
)
def test_strange_candidates_still_make_a_tree(domino_kernels, candidates, changes):
    given = candidates()
    given["base_logits"][list(changes)] = torch.tensor(list(changes.values()), device=given["tail"].device)
    given["features"] = torch.zeros_like(given["features"])
    places, scores, steps = domino_kernels.tree_expand(**given)
    expected_places, expected_scores, expected_steps = ops.tree_expand(**given)
    assert torch.equal(places, expected_places)
    torch.testing.assert_close(scores, expected_scores, atol=3e-6, rtol=2e-5)
    torch.testing.assert_close(steps, expected_steps, atol=3e-6, rtol=2e-5)


def test_no_mass_at_all(domino_kernels, candidates):
    """Neither candidates nor tail: every child is as likely as nothing, and they keep the order of the list."""
    given = candidates(lanes=1)
    given["base_logits"].fill_(-INF)
    given["tail"].fill_(-INF)
    given["features"] = None
    places, _, steps = domino_kernels.tree_expand(**given)
    expected_places, _, expected_steps = ops.tree_expand(**given)
    assert torch.equal(places, expected_places)
    assert torch.equal(steps, expected_steps)


def test_more_children_than_candidates_are_refused(domino_kernels, candidates):
    with pytest.raises(ValueError, match="between 1 and the number of candidates, got 38 of 37"):
        domino_kernels.tree_expand(**{**candidates(), "children": 38})


def test_the_operations_have_the_shapes_they_promise_to_compilers(domino_kernels, candidates):
    given = {**candidates(), "rounded": False}
    torch.library.opcheck(
        domino_kernels.tree._tree_expand, tuple(given.values()), test_utils=("test_schema", "test_faketensor")
    )
