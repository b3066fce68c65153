"""Taps: the outputs of the tapped layers, by hooks and by native selection, for the right run only."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import prompt, tiny_target

from modeling_domino.cache_domino import cache_keyword
from modeling_domino.taps_domino import SELECTS_BY_INDEX, TargetTaps


CPU = torch.device("cpu")
NUM_LAYERS = 6
# `None` is what the release decides; native selection exists from 5.23.
WAYS = [None, True, pytest.param(False, marks=pytest.mark.skipif(not SELECTS_BY_INDEX, reason="no native selection"))]
BOTH = pytest.mark.parametrize("use_hooks", WAYS, ids=["default", "hooks", "native"])


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def target(request):
    return tiny_target(request.param, num_layers=NUM_LAYERS)


def layers_of(target):
    return target.get_decoder().layers


def num_hooks(target) -> int:
    """Hooks of this package; transformers leaves its own on the layers."""
    hooks = [hook for layer in layers_of(target) for hook in layer._forward_hooks.values()]
    return sum(hook.__module__ == TargetTaps.__module__ for hook in hooks)


@torch.no_grad()
def read(target, ids, layer_ids, use_hooks=None, **kwargs):
    with TargetTaps(layers_of(target), layer_ids, use_hooks=use_hooks, **kwargs) as taps:
        return taps.read(target(ids, **taps.forward_kwargs), device=CPU)


@torch.no_grad()
def by_running_the_layers(target, ids) -> list[torch.Tensor]:
    """Each layer's output, collected without TargetTaps: the input of the next layer, and of the final norm."""
    decoder, inputs = target.get_decoder(), []
    handles = [
        module.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        for module in (*decoder.layers[1:], decoder.norm)
    ]
    target(ids)
    for handle in handles:
        handle.remove()
    return inputs


@BOTH
@pytest.mark.parametrize("layer_ids", [[1, 4], [0, 2, 4], [4, 1], [5], [0, 5], [3]], ids=str)
def test_taps_are_the_outputs_of_the_layers_in_the_drafters_order(target, layer_ids, use_hooks):
    ids = prompt(7, batch=2)
    outputs = by_running_the_layers(target, ids)
    expected = torch.cat([outputs[i] for i in layer_ids], dim=-1)
    assert torch.equal(read(target, ids, layer_ids, use_hooks), expected)


@BOTH
@torch.no_grad()
def test_a_tap_is_hidden_states_one_further(target, use_hooks):
    ids = prompt(7)
    all_states = target(ids, output_hidden_states=True).hidden_states
    for layer in range(NUM_LAYERS - 1):
        assert torch.equal(read(target, ids, [layer], use_hooks), all_states[layer + 1])


@BOTH
@torch.no_grad()
def test_the_last_layer_is_read_before_the_final_norm(target, use_hooks):
    ids = prompt(7)
    tap = read(target, ids, [NUM_LAYERS - 1], use_hooks)
    after_norm = target(ids, output_hidden_states=True).hidden_states[-1]
    assert not torch.allclose(tap, after_norm)
    torch.testing.assert_close(target.get_decoder().norm(tap), after_norm)


@BOTH
@torch.no_grad()
def test_all_hidden_states_on_request_leave_the_taps_alone(target, use_hooks):
    ids, layer_ids = prompt(7), [1, 5]
    with TargetTaps(layers_of(target), layer_ids, all_hidden_states=True, use_hooks=use_hooks) as taps:
        outputs = target(ids, **taps.forward_kwargs)
        everything = taps.read(outputs, device=CPU)
    assert len(outputs.hidden_states) == NUM_LAYERS + 1
    assert torch.equal(everything, read(target, ids, layer_ids, use_hooks))


@BOTH
@torch.no_grad()
def test_only_tapped_layers_are_captured(target, use_hooks):
    with TargetTaps(layers_of(target), [1, 4, 5], use_hooks=use_hooks) as taps:
        outputs = target(prompt(7), **taps.forward_kwargs)
        selected = [state for state in outputs.hidden_states or () if state is not None]
        assert set(taps._captured) | set(taps._native_ids) == {1, 4, 5}
        assert len(selected) + len(taps._captured) == 3


@BOTH
@torch.no_grad()
def test_the_committed_rows_are_the_first(target, use_hooks):
    ids = prompt(7)
    with TargetTaps(layers_of(target), [1, 4], use_hooks=use_hooks) as taps:
        outputs = target(ids, **taps.forward_kwargs)
        assert torch.equal(taps.read(outputs, 3, device=CPU), taps.read(outputs, device=CPU)[:, :3])


@BOTH
@torch.no_grad()
def test_taps_follow_a_cached_continuation(target, use_hooks):
    ids, keyword = prompt(7), cache_keyword(target)
    whole = read(target, ids, [1, 5], use_hooks)
    with TargetTaps(layers_of(target), [1, 5], use_hooks=use_hooks) as taps:
        outputs = target(ids[:, :4], use_cache=True, **taps.forward_kwargs)
        first = taps.read(outputs, device=CPU)
        # Nobody listens here: a forward of somebody else's, in between.
        target(ids[:, :2])
        assert torch.equal(taps.read(outputs, device=CPU), first)
        taps.listen()
        outputs = target(ids[:, 4:], use_cache=True, **{keyword: outputs[keyword]}, **taps.forward_kwargs)
        second = taps.read(outputs, device=CPU)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole)


@BOTH
def test_hooks_are_removed_also_after_an_error(target, use_hooks):
    with pytest.raises(RuntimeError, match="stop"), TargetTaps(layers_of(target), [1, 5], use_hooks=use_hooks) as taps:
        assert num_hooks(target) > 0
        raise RuntimeError("stop")
    assert num_hooks(target) == 0
    taps.close()
    assert not taps._captured


def test_threads_do_not_read_each_others_states(target):
    """Two runs on one target, forward by forward in turn: each reads its own."""
    prompts = [prompt(5), prompt(9, offset=300)]
    expected = [read(target, ids, [1, 5]) for ids in prompts]
    results, turn = [None, None], threading.Barrier(2, timeout=30)

    def run(i: int) -> None:
        with torch.no_grad(), TargetTaps(layers_of(target), [1, 5], use_hooks=True) as taps:
            turn.wait()
            if i == 0:
                outputs = target(prompts[0], **taps.forward_kwargs)
            turn.wait()
            if i == 1:
                outputs = target(prompts[1], **taps.forward_kwargs)
            turn.wait()
            results[i] = taps.read(outputs, device=CPU)
            turn.wait()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, right in zip(results, expected):
        assert torch.equal(result, right)
    assert num_hooks(target) == 0
