"""The kernels of a chain against the torch functions of `ops_domino.py`, in Triton's interpreter and on a device."""

from __future__ import annotations

import math
import types

import pytest
import torch
from conftest import pattern

from modeling_domino import ops_domino as ops


pytestmark = pytest.mark.usefixtures("unwritten_is_nan")

DIM, WIDTH, RANK, VOCAB, STEPS = 20, 12, 6, 203, 3
NAN, INF = math.nan, math.inf
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
BATCHES = pytest.mark.parametrize("batch", [1, 3])
# Sums of a few dozen products in another order.
FP32 = {"atol": 2e-6, "rtol": 2e-5}
# With the rounding of eager bf16, a sum in another order may still round to the neighbour.
BF16 = {"atol": 1e-2, "rtol": 1e-2}


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return FP32 if dtype == torch.float32 else BF16


@pytest.fixture
def sizes(kernel_device):
    """A head and a block of odd sizes on the device of the test."""

    def make(*, batch: int, dtype: torch.dtype, bias: bool = False, rank: int = RANK, vocab: int = VOCAB, steps=STEPS):
        def values(*shape, offset, scale=1.0):
            return (pattern(*shape, offset=offset) * scale).to(kernel_device, dtype)

        biases = (None,) * 4
        if bias:
            biases = tuple(values(n, offset=7 * n) for n in (3 * WIDTH, 3 * WIDTH, rank, vocab))
        weights = ops.HeadWeights(
            values(3 * WIDTH, DIM, offset=1, scale=0.3),
            values(3 * WIDTH, WIDTH, offset=1000, scale=0.4),
            values(rank, DIM + WIDTH, offset=2000, scale=0.3),
            values(vocab, rank, offset=3000),
            *biases,
        )
        return types.SimpleNamespace(
            weights=weights,
            base=values(batch, steps, vocab, offset=4000),
            hidden=values(batch, steps, DIM, offset=5000),
            embeddings=values(vocab, DIM, offset=6000),
            features=values(batch, rank, offset=7000),
            anchors=torch.arange(3, 3 + 50 * batch, 50, device=kernel_device) % vocab,
            rounded=dtype == torch.bfloat16,
            device=kernel_device,
        )

    return make


def near(ids: torch.Tensor, logits: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `ids` `[B]` are the best of `logits` `[B, V]`, or within the tolerance of the best."""
    best, chosen = logits.amax(-1), logits.gather(-1, ids[:, None]).squeeze(-1)
    return torch.allclose(chosen.float(), best.float(), **tolerance(dtype))


# ---- single operations


@DTYPES
@BATCHES
@pytest.mark.parametrize("bias", [False, True])
def test_gru_step(domino_kernels, sizes, dtype, batch, bias):
    given = sizes(batch=batch, dtype=dtype, bias=bias)
    state = given.features.new_ones(batch, WIDTH) * 0.25
    args = (given.hidden[:, 1], state, *given.weights[:2], *given.weights[4:6])
    output = domino_kernels.gru_step(*args, rounded=given.rounded)
    assert output.dtype == dtype
    torch.testing.assert_close(output, ops.gru_step(*args), **tolerance(dtype))


@DTYPES
@pytest.mark.parametrize("batch", [1, 3, 5], ids=["1", "3", "dot"])
@pytest.mark.parametrize("bias, rank", [(False, RANK), (True, 8)])
def test_correction_and_argmax(domino_kernels, sizes, dtype, batch, bias, rank):
    given = sizes(batch=batch, dtype=dtype, bias=bias, rank=rank)
    weight, bias_out = given.weights.weight_out, given.weights.bias_out
    ids = domino_kernels.correct_argmax(given.base[:, 0], given.features, weight, bias_out, rounded=given.rounded)
    logits = given.base[:, 0] + ops.low_rank_correction(given.features, weight, bias_out)
    assert near(ids, logits, dtype)
    if dtype == torch.float32:
        assert torch.equal(ids, ops.pick(logits))


@BATCHES
@pytest.mark.parametrize(
    "values, best",
    [
        ({5: 3.0, 150: 3.0, 70: 3.0}, 5),
        ({0: NAN, 9: -INF, 202: -1e30}, 202),
        ({17: INF, 3: NAN, 202: INF}, 17),
        ({4: -0.0, 3: 0.0}, 3),
        ({202: 0.0, 201: -0.0}, 201),
        (dict.fromkeys(range(VOCAB), NAN), 0),
        ({**dict.fromkeys(range(VOCAB), NAN), 44: -INF}, 44),
    ],
    ids=["ties", "nan below", "inf", "zeros", "zeros at the end", "all nan", "nan behind -inf"],
)
def test_the_order_of_logits_is_the_librarys(domino_kernels, sizes, batch, values, best):
    """Ties across tiles, NaN, infinities and zeros of both signs, on base logits that no correction moves."""
    given = sizes(batch=batch, dtype=torch.float32)
    base = torch.full((batch, VOCAB), -INF if any(v == -1e30 for v in values.values()) else -1.0)
    base[:, list(values)] = torch.tensor(list(values.values()))
    base = base.to(given.device)
    features = torch.zeros_like(given.features)
    assert ops.pick(base).tolist() == [best] * batch
    assert domino_kernels.correct_argmax(base, features, given.weights.weight_out).tolist() == [best] * batch
    # The same over candidates, in any order.
    ids = torch.arange(VOCAB - 1, -1, -1, device=given.device).expand(batch, -1)
    rows = domino_kernels.gather_rows(given.weights.weight_out, ids)
    chosen = domino_kernels.choose_candidate(base.gather(1, ids), features, rows, ids)
    assert chosen.tolist() == [best] * batch
    # And each tile's shortlist.
    listed = domino_kernels.shortlist(base, tile=64, count=4)
    assert torch.equal(listed, ops.tile_shortlist(base, 64, 4))


@DTYPES
@pytest.mark.parametrize("vocab, tile, count", [(203, 64, 4), (130, 128, 4), (64, 64, 1), (5, 16, 7)])
def test_the_shortlist_is_the_best_of_every_tile(domino_kernels, sizes, dtype, vocab, tile, count):
    # Rounded, so that there are ties.
    logits = (sizes(batch=3, dtype=dtype, vocab=vocab).base * 4).round()
    ids = domino_kernels.shortlist(logits, tile=tile, count=count)
    assert torch.equal(ids, ops.tile_shortlist(logits, tile, count))
    assert (ids == -1).any() == (vocab % tile != 0 and vocab % tile < count)


@DTYPES
def test_gathered_rows_are_copies_and_zeros_where_there_is_no_id(domino_kernels, sizes, dtype):
    weight = sizes(batch=1, dtype=dtype).weights.weight_out
    ids = torch.tensor([[202, -1, 0], [7, 7, -1]], device=weight.device)
    assert torch.equal(domino_kernels.gather_rows(weight, ids), ops.gather_rows(weight, ids))


@DTYPES
@BATCHES
@pytest.mark.parametrize("bias", [False, True])
def test_the_short_head_picks_among_candidates(domino_kernels, sizes, dtype, batch, bias):
    given = sizes(batch=batch, dtype=dtype, bias=bias)
    ids = ops.tile_shortlist(given.base[:, 0], 64, 12)
    assert ids.shape[1] > 32 and (ids == -1).any()
    rows = ops.gather_rows(given.weights.weight_out, ids)
    base = given.base[:, 0].gather(1, ids.clamp(min=0))
    bias_out = given.weights.bias_out
    chosen = domino_kernels.choose_candidate(base, given.features, rows, ids, bias_out, rounded=given.rounded)
    biases = None if bias_out is None else bias_out[ids.clamp(min=0)]
    logits = ops.candidate_logits(base, given.features, rows, biases).masked_fill(ids < 0, -INF)
    places = (ids == chosen[:, None]).int().argmax(-1)
    assert near(places, logits, dtype)


@pytest.mark.parametrize("dtype, batch", [(torch.float32, 1), (torch.float32, 3), (torch.bfloat16, 7)])
@pytest.mark.parametrize("bias", [False, True])
def test_finalize_gives_the_law_of_the_drafts(domino_kernels, sizes, dtype, batch, bias):
    given = sizes(batch=batch, dtype=dtype, bias=bias)
    features = torch.stack([given.features, -given.features, 2 * given.features], dim=1)
    tokens = torch.arange(batch * STEPS, device=given.device).reshape(batch, STEPS) * 31 % VOCAB
    temperature = torch.tensor([0.7], device=given.device)
    args = (given.base, features, tokens, given.weights.weight_out, 1, temperature, given.weights.bias_out)
    for output, expected in zip(
        domino_kernels.finalize(*args, rounded=given.rounded), ops.draft_log_probabilities(*args)
    ):
        torch.testing.assert_close(output, expected, **tolerance(dtype))


def test_finalize_counts_what_has_no_probability_as_nothing(domino_kernels, sizes):
    given = sizes(batch=1, dtype=torch.float32)
    base = given.base.clone()
    base[0, 0, :190] = -INF
    temperature = torch.ones(1, device=given.device)
    features = torch.zeros(1, STEPS, RANK, device=given.device)
    tokens = torch.tensor([[5, 195, 0]], device=given.device)
    args = (base, features, tokens, given.weights.weight_out, 1, temperature)
    log_q, log_z = domino_kernels.finalize(*args)
    expected = ops.draft_log_probabilities(*args)
    assert log_q[0, 0] == -INF
    torch.testing.assert_close(log_q, expected[0], **FP32)
    torch.testing.assert_close(log_z, expected[1], **FP32)


# ---- sampling


def test_philox_gives_the_number_of_its_authors():
    """The known answer of the Random123 library for counter and key of zeros; the kernels' equality is tested below."""
    zero = torch.tensor([0])
    assert ops.philox(zero, zero, 0, zero).item() == 0x6627E8D5


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1])
@pytest.mark.parametrize("batch", [1, 3, 5], ids=["1", "3", "dot"])
def test_sampled_tokens_are_those_of_the_reference(domino_kernels, sizes, batch, seed):
    given = sizes(batch=batch, dtype=torch.float32)
    seeds, temperature = torch.tensor([seed], device=given.device), torch.tensor([0.8], device=given.device)
    weight = given.weights.weight_out
    for step in (0, 5):
        ids = domino_kernels.correct_sample(given.base[:, 0], given.features, weight, seeds, temperature, step=step)
        logits = given.base[:, 0] + ops.low_rank_correction(given.features, weight)
        assert torch.equal(ids, ops.sample(logits, seeds, temperature, step))


def test_a_sample_depends_on_neither_tiles_nor_batch_nor_list(domino_kernels, sizes, monkeypatch):
    given = sizes(batch=3, dtype=torch.float32)
    seed, temperature = torch.tensor([11], device=given.device), torch.ones(1, device=given.device)
    weight = given.weights.weight_out

    def draw(batch):
        base, features = given.base[:batch, 0], given.features[:batch]
        return domino_kernels.correct_sample(base, features, weight, seed, temperature).tolist()

    tokens = draw(3)
    assert draw(2) == tokens[:2]
    chain = domino_kernels.chain
    monkeypatch.setattr(chain, "head_tile", lambda rank: {"IDS": 16, "num_warps": 4})
    assert draw(3) == tokens
    monkeypatch.setattr(chain, "DOT_FROM", 1)
    assert draw(3) == tokens
    ids = torch.arange(VOCAB, device=given.device).flip(0).expand(3, -1)
    rows = ops.gather_rows(weight, ids)
    base = given.base[:, 0].gather(1, ids)
    assert domino_kernels.choose_candidate(base, given.features, rows, ids, None, seed, temperature).tolist() == tokens


def test_samples_follow_the_softmax():
    """A seeded chi-square of the reference, whose tokens the kernels draw: 12 tokens, 20,000 draws."""
    logits = pattern(1, 12).expand(20_000, -1) * 2
    drawn = ops.sample(logits, torch.tensor([5]), torch.tensor([0.9]), step=3)
    counts = drawn.bincount(minlength=12).double()
    expected = (logits[0].double() / 0.9).softmax(-1) * 20_000
    assert expected.min() > 20
    statistic = ((counts - expected) ** 2 / expected).sum()
    # The 99.9 % point of chi-square with 11 degrees of freedom.
    assert statistic < 31.3


def test_the_kernel_draws_from_the_softmax(domino_kernels, sizes):
    """The same for the kernel itself: each row of a large batch is a draw of its own."""
    given = sizes(batch=1, dtype=torch.float32, vocab=8)
    draws = 3000
    base = (pattern(1, 8, offset=50) * 1.5).expand(draws, -1).to(given.device).contiguous()
    features = torch.zeros(draws, RANK, device=given.device)
    seed, temperature = torch.tensor([2], device=given.device), torch.tensor([1.3], device=given.device)
    drawn = domino_kernels.correct_sample(base, features, given.weights.weight_out, seed, temperature)
    expected = (base[0].double() / 1.3).softmax(-1).cpu() * draws
    statistic = ((drawn.cpu().bincount(minlength=8) - expected) ** 2 / expected).sum()
    # The 99.9 % point with 7 degrees of freedom.
    assert expected.min() > 50 and statistic < 24.3


# ---- the rollout


def rollout_pair(kernels, given, *, prefix_len=1, table=False, **options):
    """Drafts and features by the kernels and by the torch function."""

    def gates(ids):
        return ops.gru_gates(given.embeddings[ids], given.weights.weight_ih, given.weights.bias_ih)

    tables = {"embeddings": given.embeddings}
    if table:
        tables = {"gates_table": gates(torch.arange(given.embeddings.shape[0], device=given.device))}
    ours = kernels.chain_rollout(
        given.base, given.hidden, given.anchors, given.weights, prefix_len, rounded=given.rounded, **tables, **options
    )
    theirs = ops.chain_rollout(given.base, given.hidden, given.anchors, gates, given.weights, prefix_len, **options)
    return ours, theirs


@pytest.mark.parametrize("table", [False, True], ids=["embeddings", "table"])
@pytest.mark.parametrize("batch, bias, prefix_len", [(1, False, 0), (3, True, 1), (1, True, 2), (5, False, 3)])
def test_a_rollout_drafts_the_same_tokens(domino_kernels, sizes, batch, bias, prefix_len, table):
    given = sizes(batch=batch, dtype=torch.float32, bias=bias)
    (ids, features), (expected, expected_features) = rollout_pair(
        domino_kernels, given, prefix_len=prefix_len, table=table
    )
    assert torch.equal(ids, expected)
    torch.testing.assert_close(features, expected_features, **FP32)


@BATCHES
def test_a_rollout_in_bf16_stays_within_a_logit_gap(domino_kernels, sizes, batch):
    """Near-ties may fall the other way; up to there the drafts are equal, and there the two logits are neighbours."""
    given = sizes(batch=batch, dtype=torch.bfloat16)
    (ids, features), (expected, _) = rollout_pair(domino_kernels, given)
    assert features.dtype == torch.bfloat16
    for row in range(batch):
        for step in range(STEPS):
            logits = given.base[row, step] + ops.low_rank_correction(features[row, step], given.weights.weight_out)
            if step == 0:
                logits = given.base[row, 0]
            assert near(ids[row, step][None], logits[None], torch.bfloat16)
            if ids[row, step] != expected[row, step]:
                break


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("how", ["exact", "tiles"])
def test_a_rollout_over_candidates(domino_kernels, sizes, batch, how):
    given = sizes(batch=batch, dtype=torch.float32, bias=batch == 3)
    candidates = ops.shortlist(given.base, 20) if how == "exact" else domino_kernels.shortlist(given.base, tile=64)
    (ids, features), (expected, expected_features) = rollout_pair(
        domino_kernels, given, prefix_len=1, table=batch == 1, candidates=candidates
    )
    assert torch.equal(ids, expected)
    torch.testing.assert_close(features, expected_features, **FP32)
    assert (ids[..., None] == candidates).any(-1).all()


@pytest.mark.parametrize("short", [False, True], ids=["vocabulary", "candidates"])
def test_a_sampled_rollout_draws_the_same_tokens(domino_kernels, sizes, short):
    given = sizes(batch=3, dtype=torch.float32)
    options = {
        "seed": torch.tensor([77], device=given.device),
        "temperature": torch.tensor([1.1], device=given.device),
    }
    if short:
        options["candidates"] = ops.shortlist(given.base, 30)
    (ids, _), (expected, _) = rollout_pair(domino_kernels, given, **options)
    assert torch.equal(ids, expected)
    options["seed"] = options["seed"] + 1
    assert not torch.equal(rollout_pair(domino_kernels, given, **options)[0][0], expected)


# ---- bad input


def test_other_dtypes_are_refused(domino_kernels, sizes):
    given = sizes(batch=1, dtype=torch.float16)
    with pytest.raises(TypeError, match="compute in float32 and bfloat16, `base_logits` is float16"):
        domino_kernels.correct_argmax(given.base[:, 0], given.features, given.weights.weight_out)


def test_weights_that_are_not_contiguous_are_refused(domino_kernels, sizes):
    given = sizes(batch=1, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"`weight_out` has strides \(1, 203\).*pass `weight_out.contiguous\(\)`"):
        domino_kernels.correct_argmax(given.base[:, 0], given.features, given.weights.weight_out.t().contiguous().t())


def test_activations_that_are_not_contiguous_are_read_right(domino_kernels, sizes):
    given = sizes(batch=3, dtype=torch.float32)
    expected = rollout_pair(domino_kernels, given)[1]
    given.base = given.base.transpose(0, 1).contiguous().transpose(0, 1)
    given.hidden = given.hidden.transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(rollout_pair(domino_kernels, given)[0][0], expected[0])


def test_a_table_of_another_size_is_refused(domino_kernels, sizes):
    given = sizes(batch=1, dtype=torch.float32)
    args = (given.base, given.hidden, given.anchors, given.weights, 1)
    with pytest.raises(ValueError, match=r"`gates_table` must be \[V, 36\] for this head, got \[203, 20\]"):
        domino_kernels.chain_rollout(*args, gates_table=given.embeddings)
    with pytest.raises(ValueError, match="got both or none"):
        domino_kernels.chain_rollout(*args)


def test_a_tile_that_is_no_power_of_two_is_refused(domino_kernels, sizes):
    given = sizes(batch=1, dtype=torch.float32)
    with pytest.raises(ValueError, match="got tile=100, count=4"):
        domino_kernels.shortlist(given.base, tile=100)


def test_the_operations_have_the_shapes_they_promise_to_compilers(domino_kernels, sizes):
    given = sizes(batch=3, dtype=torch.float32)
    ops_of = domino_kernels.chain
    temperature, tokens = torch.ones(1, device=given.device), given.anchors[:, None].expand(-1, STEPS).contiguous()
    features = given.features[:, None].expand(-1, STEPS, -1).contiguous()
    weights, biases = list(given.weights[:4]), list(given.weights[4:])
    for operation, args in [
        (ops_of._gru_step, (given.hidden[:, 0], given.features.new_zeros(3, WIDTH), *weights[:2], None, None, False)),
        (ops_of._shortlist, (given.base, 64, 4)),
        (ops_of._gather_rows, (weights[3], given.anchors)),
        (ops_of._finalize, (given.base, features, tokens, weights[3], None, 1, temperature, False)),
        (
            ops_of._chain_rollout,
            (
                given.base,
                given.hidden,
                given.anchors,
                given.embeddings,
                weights,
                biases,
                1,
                None,
                None,
                None,
                None,
                False,
                False,
            ),
        ),
    ]:
        torch.library.opcheck(operation, args, test_utils=("test_schema", "test_faketensor"))
