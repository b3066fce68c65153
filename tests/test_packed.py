"""Prepacked weights: the same results to rounding, the same texts, and a model that is left as it was."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from conftest import PATHS, fill, prompt, tiny_drafter, tiny_target
from torch import nn

from modeling_domino import packed_domino
from modeling_domino.generation_domino import stream
from modeling_domino.packed_domino import PackedLinears, PackedMatrices, packed_pair


# Layouts add up in another order.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture
def pack_everything(monkeypatch):
    """Packs layers of any size, whatever the measurement on this machine says."""
    monkeypatch.setattr(packed_domino, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(packed_domino, "WORTH", float("inf"))


@pytest.fixture
def calls(monkeypatch):
    """Rows of every multiplication on packed weights."""
    seen = []
    original = packed_domino._PackedLayer.packed

    def packed(self, rows):
        seen.append(rows.numel() // rows.shape[-1])
        return original(self, rows)

    monkeypatch.setattr(packed_domino._PackedLayer, "packed", packed)
    return seen


def two_layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return fill(nn.Sequential(nn.Linear(37, 130), nn.SiLU(), nn.Linear(130, 21, bias=False))).to(dtype)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", [(1, 37), (2, 37), (1, 5, 37), (3, 4, 37), (1, 64, 37)])
@torch.no_grad()
def test_packed_equals_usual(pack_everything, calls, dtype, shape):
    model, rows = two_layers(dtype), torch.linspace(-1, 1, 37).expand(shape).to(dtype)
    usual = model(rows)
    with PackedLinears(model).refresh():
        calls.clear()
        torch.testing.assert_close(model(rows), usual, rtol=0, atol=ROUNDING[dtype])
        assert calls == [rows.numel() // 37] * 2


@torch.no_grad()
def test_prompts_take_the_usual_way(pack_everything, calls):
    model, inputs = two_layers(), torch.linspace(-1, 1, 37).expand(packed_domino.MOST_ROWS + 1, 37)
    usual = model(inputs)
    with PackedLinears(model).refresh():
        calls.clear()
        assert torch.equal(model(inputs), usual)
    assert calls == []


def test_gradients_are_those_of_the_usual_way(pack_everything, calls):
    model, inputs = two_layers(), torch.linspace(-1, 1, 37).expand(5, 37)
    with PackedLinears(model).refresh():
        calls.clear()
        model(inputs).sum().backward()
    assert calls == [] and model[0].weight.grad.abs().sum() > 0


@torch.no_grad()
def test_the_model_is_left_as_it_was(pack_everything):
    model = two_layers()
    before, state = [dict(vars(module)) for module in model.modules()], copy.deepcopy(model.state_dict())
    with pytest.raises(KeyboardInterrupt), PackedLinears(model).refresh():
        assert "forward" in vars(model[0])
        raise KeyboardInterrupt
    assert [dict(vars(module)) for module in model.modules()] == before
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())


@torch.no_grad()
def test_blocks_within_each_other_end_with_the_outer_one(pack_everything, calls):
    model, rows = two_layers(), torch.ones(5, 37)
    packed = PackedLinears(model).refresh()
    with packed:
        with packed:
            pass
        calls.clear()
        model(rows)
        assert len(calls) == 2
    assert "forward" not in vars(model[0])


def through_fused_optimiser(model):
    with torch.enable_grad():
        model(torch.ones(2, 37)).sum().backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


CHANGES = {
    "in place": lambda model: model[0].weight.mul_(2),
    "through .data": lambda model: model[0].weight.data.add_(0.5),
    "other data": lambda model: setattr(model[0].weight, "data", model[0].weight.data * 2),
    "replaced": lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight * 2)),
    "loaded": lambda model: model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}, assign=True),
    "cast and back": lambda model: model.to(torch.bfloat16).float(),
    "cast": lambda model: model.to(torch.bfloat16),
    "fused optimiser": through_fused_optimiser,
    # A plain sum sees neither.
    "rows change places": lambda model: model[0].weight.data.copy_(model[0].weight.data.flip(0)),
    "columns change places": lambda model: model[0].weight.copy_(model[0].weight.flip(1)),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changed_weights_are_packed_anew(pack_everything, calls, change):
    model, rows = two_layers(), torch.linspace(-1, 1, 37).expand(5, 37)
    packed = PackedLinears(model).refresh()
    with packed:
        model(rows)
    CHANGES[change](model)
    rows = rows.to(model[0].weight.dtype)
    usual = model(rows)
    calls.clear()
    with packed.refresh():
        torch.testing.assert_close(model(rows), usual, rtol=0, atol=10 * ROUNDING[rows.dtype])
    assert len(calls) >= 2


@pytest.mark.parametrize("path", PATHS)
def test_a_target_that_is_trained_or_cast_between_generations(pack_everything, path):
    target = tiny_target()
    drafter = tiny_drafter(target)
    PATHS[path](target, drafter, prompt(7), max_new_tokens=10)
    target.model.layers[2].mlp.down_proj.weight.data += 0.1
    expected = target.generate(prompt(7), do_sample=False, max_new_tokens=30)
    assert torch.equal(PATHS[path](target, drafter, prompt(7), max_new_tokens=30), expected)
    target.to(torch.bfloat16)
    PATHS[path](target, drafter, prompt(7), max_new_tokens=10)
    assert drafter.last_run.new_tokens == 10


def test_models_made_in_inference_mode_are_packed(pack_everything):
    with torch.inference_mode():
        target = tiny_target()
        drafter = tiny_drafter(target)
        expected = target.generate(prompt(7), do_sample=False, max_new_tokens=20)
        for _ in range(2):
            assert torch.equal(drafter.spec_generate(target, prompt(7), max_new_tokens=20), expected)


def test_between_rounds_the_models_are_the_consumers(pack_everything):
    target = tiny_target()
    drafter = tiny_drafter(target)
    steps = stream(target, drafter, prompt(7), do_sample=False, max_new_tokens=20)
    next(steps), next(steps)
    assert not any("forward" in vars(module) for model in (target, drafter) for module in model.modules())
    steps.close()


def test_a_copy_of_a_packed_target_runs_on_its_own_weights(pack_everything):
    target = tiny_target()
    drafter = tiny_drafter(target)
    with packed_pair(target, drafter, prepack=True):
        twin = copy.deepcopy(target)
    target.lm_head.weight.data.zero_()
    expected = tiny_target().generate(prompt(7), do_sample=False, max_new_tokens=10)
    assert torch.equal(twin.generate(prompt(7), do_sample=False, max_new_tokens=10), expected)


@torch.no_grad()
def test_shapes_that_do_not_gain_are_left_alone(monkeypatch, calls):
    monkeypatch.setattr(packed_domino, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(packed_domino, "WORTH", 0.0)
    model = two_layers()
    with PackedLinears(model).refresh() as packed:
        calls.clear()
        model(torch.ones(5, 37))
    assert calls == [] and packed.num_bytes == 0


@pytest.mark.parametrize("gaining", [(), (1,), (4,), (1, 4)])
def test_one_row_and_a_few_are_packed_where_each_gains(monkeypatch, calls, gaining):
    """What is measured does not depend on the first run: a plain one once decided that blocks gain nothing either."""
    monkeypatch.setattr(packed_domino, "LEAST_WEIGHTS", 0)

    def seconds(ways, rows):
        # Rows of linear layers come in a batch; other matrices gain nothing.
        gains = rows.dim() == 3 and rows.shape[1] in gaining
        return [0.1 if gains else 1.0, *[1.0] * (len(ways) - 1)]

    monkeypatch.setattr(packed_domino, "_fastest_of", seconds)
    monkeypatch.setattr(packed_domino, "_FASTEST", {})
    target = tiny_target()
    drafter = tiny_drafter(target)
    expected = target.generate(prompt(5), do_sample=False, max_new_tokens=12)
    for width in (0, 3):
        assert torch.equal(drafter.spec_generate(target, prompt(5), max_new_tokens=12, verify_width=width), expected)
        assert (drafter.last_run.packed_bytes > 0) == bool(gaining)
        assert (1 in calls) == (1 in gaining)
        assert any(rows > 1 for rows in calls) == (4 in gaining)


@pytest.fixture
def layouts(monkeypatch):
    """Decides which layout is the fastest for one row and for a few, for matrices of any size."""

    def decide(one: str, few: str) -> None:
        names = iter([one, few] * 20)
        monkeypatch.setattr(packed_domino, "_fastest_name", lambda products, weight, count: next(names))

    monkeypatch.setattr(packed_domino, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(packed_domino, "_FASTEST", {})
    return decide


LAYOUTS = ["rows", "columns", "blocks"]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("one, few", [("rows", "columns"), ("columns", "blocks"), ("blocks", "rows")])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_a_matrix_gives_the_same_in_every_layout(layouts, dtype, one, few, bias):
    layouts(one, few)
    weight = torch.linspace(-1, 1, 21 * 37).sin().reshape(21, 37).to(dtype)
    bias = torch.linspace(0, 1, 21).to(dtype) if bias else None
    product = PackedMatrices()
    for shape in ((1, 37), (37,), (4, 37), (2, 3, 37)):
        rows = torch.linspace(-1, 1, 37).cos().expand(shape).to(dtype)
        usual = torch.nn.functional.linear(rows, weight, bias)
        assert torch.equal(product(rows, weight, bias), usual) and product.num_bytes == 0
    product.__enter__()
    for shape in ((1, 37), (37,), (4, 37), (2, 3, 37)):
        rows = torch.linspace(-1, 1, 37).cos().expand(shape).to(dtype)
        usual = torch.nn.functional.linear(rows, weight, bias)
        torch.testing.assert_close(product(rows, weight, bias), usual, rtol=0, atol=10 * ROUNDING[dtype])
    assert product.num_bytes == len({one, few} - {"rows"}) * weight.numel() * weight.element_size()


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_a_matrix_that_has_changed_is_laid_out_anew(layouts, layout):
    """Also one that leaves no version, as fused optimisers do: each generation looks."""
    layouts(layout, layout)
    product, rows = PackedMatrices().__enter__(), torch.ones(1, 6)
    weight = torch.ones(5, 6)
    assert product(rows, weight).tolist() == [[6.0] * 5]
    weight.mul_(2)
    assert product.refresh()(rows, weight).tolist() == [[12.0] * 5]
    weight.data = torch.full((5, 6), 3.0)
    assert product.refresh()(rows, weight).tolist() == [[18.0] * 5]
    # Another in the place of the first, and more than are kept.
    for value in range(20):
        weight = torch.full((5, 6), float(value))
        assert product(rows, weight).tolist() == [[6.0 * value] * 5]
    assert len(product._known) <= packed_domino.MOST_MATRICES


def test_matrices_are_trained_as_they_are(layouts):
    layouts("columns", "columns")
    product, weight = PackedMatrices().__enter__(), torch.ones(5, 6, requires_grad=True)
    product(torch.ones(1, 6), weight).sum().backward()
    assert weight.grad is not None and product._known == {}


def test_the_slow_layouts_are_left_alone(monkeypatch):
    """A copy must gain a tenth, whatever it is; the measurement decides, for one row and a few apart."""
    monkeypatch.setattr(packed_domino, "_FASTEST", {})
    seconds = {1: [1.0, 0.95, 0.92], packed_domino.MEASURED_ROWS: [1.0, 0.8, 0.5]}
    monkeypatch.setattr(packed_domino, "_fastest_of", lambda ways, rows: seconds[len(rows)])
    weight = torch.ones(300, 300)
    one, few, copies = packed_domino._fastest_layouts(weight)
    assert copies == 1 and list(packed_domino._FASTEST.values()) == [("rows", "blocks")]
    torch.testing.assert_close(one(torch.ones(1, 300)), few(torch.ones(1, 300)))


@pytest.mark.parametrize("prepack", [None, False])
def test_the_head_drafts_the_same_by_other_layouts(layouts, prepack):
    """The whole vocabulary is corrected through the layouts, unless the user wants no copies."""
    layouts("columns", "blocks")
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.set_kernels("torch")
    ids = {}
    for layout in (False, True):
        drafter.prepack = prepack if layout else False
        drafter.spec_generate(target, prompt(6), max_new_tokens=16, do_sample=False, candidates=0)
        ids[layout] = [step.draft_ids for step in drafter.last_run.steps]
    assert ids[True] == ids[False]
    assert bool(packed_domino._FASTEST) == (prepack is None)
    if prepack is None:
        # Copies of what a rollout multiplies by, counted with those of the linear layers: W_ih, W_hh and W_out.
        gru, last = drafter.prefix_gru, drafter.embed_proj[2]
        numbers = sum(weight.numel() for weight in (gru.weight_ih_l0, gru.weight_hh_l0, last.weight))
        assert packed_domino.packed_matrices(drafter).num_bytes == 2 * 4 * numbers
        assert drafter.last_run.packed_bytes >= 2 * 4 * numbers


def test_adapted_and_offloaded_layers_are_left_alone(pack_everything):
    class Adapted(nn.Linear):
        pass

    model = nn.Sequential(Adapted(37, 37), nn.Linear(37, 37), nn.Linear(37, 37, device="meta"), nn.Linear(37, 37))
    model[1].forward = lambda rows: rows
    with PackedLinears(model).refresh() as packed:
        assert packed.num_bytes == 37 * 37 * 4
    assert model[1].forward(1) == 1


def test_copies_live_as_long_as_their_model(pack_everything):
    target = tiny_target()
    with packed_pair(target, tiny_drafter(target), prepack=None) as packed:
        assert packed.num_bytes > 0
    del packed
    alive = weakref.ref(target)
    del target
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_texts_are_the_targets(pack_everything, calls, path, kind):
    target = tiny_target(kind)
    drafter = tiny_drafter(target, block_size=5)
    expected = target.generate(prompt(7), do_sample=False, max_new_tokens=40)
    calls.clear()
    assert torch.equal(PATHS[path](target, drafter, prompt(7), max_new_tokens=40), expected)
    run = drafter.last_run
    assert run.packed_bytes > 0 and run.trace()["packed_bytes"] == run.packed_bytes
    # Verification and block are both of five rows and more; the 7 rows of the prompt are few, too.
    assert calls.count(5) + calls.count(6) > 100
    assert not any("forward" in vars(module) for module in target.modules())


def test_trees_and_batches_are_served_too(pack_everything):
    target = tiny_target()
    drafter = tiny_drafter(target)
    ids = prompt(7, batch=3)
    mask = torch.ones_like(ids)
    expected = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=30, pad_token_id=0)
    output = drafter.spec_generate(target, ids, attention_mask=mask, max_new_tokens=30, pad_token_id=0)
    assert torch.equal(output, expected) and drafter.last_run.packed_bytes > 0
    expected = target.generate(ids[:1], do_sample=False, max_new_tokens=30)
    assert torch.equal(drafter.spec_generate(target, ids[:1], max_new_tokens=30, tree=8), expected)
    assert drafter.last_run.packed_bytes > 0


def test_off_means_off(pack_everything, calls):
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.prepack = False
    drafter.spec_generate(target, prompt(7), max_new_tokens=10)
    assert calls == [] and drafter.last_run.packed_bytes == 0


def test_large_targets_are_packed_on_request_only(pack_everything, monkeypatch):
    monkeypatch.setattr(packed_domino, "AUTOMATIC_BYTES", 1000)
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.spec_generate(target, prompt(7), max_new_tokens=10)
    assert drafter.last_run.packed_bytes == 0
    drafter.prepack = True
    drafter.spec_generate(target, prompt(7), max_new_tokens=10)
    assert drafter.last_run.packed_bytes > 0


def test_a_word_is_no_answer():
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.prepack = "yes"
    with pytest.raises(ValueError, match="`prepack` must be True, False, or None .* got 'yes'"):
        drafter.spec_generate(target, prompt(7), max_new_tokens=3)


@pytest.mark.parametrize("path", PATHS)
def test_asking_where_nothing_can_be_packed_is_refused(path):
    # All layers of this target are below the size that pays.
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.prepack = True
    with pytest.raises(ValueError, match="`prepack=True` needs a target with plain linear layers"):
        PATHS[path](target, drafter, prompt(7), max_new_tokens=10)
