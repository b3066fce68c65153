"""Graphs: what they keep and what makes them invalid; on a CPU their code runs uncaptured."""

from __future__ import annotations

import torch

from modeling_domino import graphs_domino
from modeling_domino.graphs_domino import Graphs, one_function


def test_graphs_keep_inputs_apart_and_forget_old_weights():
    graphs, weight, calls = Graphs(), torch.ones(3), []

    def double(inputs):
        calls.append(inputs.shape)
        return (inputs * weight * 2,)

    for value in (1.0, 5.0):
        (output,) = graphs(double, [torch.full((3,), value)], [weight], "double")
        assert output.tolist() == [2 * value] * 3
    graphs(double, [torch.ones(2, 3)], [weight], "double")
    assert len(graphs._entries) == 2
    weight.mul_(10)
    (output,) = graphs(double, [torch.ones(3)], [weight], "double")
    assert output.tolist() == [20.0] * 3 and len(graphs._entries) == 1
    for size in range(1, 20):
        graphs(double, [torch.ones(size, 3)], [weight], "double")
    assert len(graphs._entries) == graphs_domino.MAX_GRAPHS
    assert len(graphs) == 0, "a CPU captures nothing"


def test_graphs_of_inference_mode_serve_outside_of_it():
    graphs, weight = Graphs(), torch.ones(2)
    with torch.inference_mode():
        graphs(lambda inputs: (inputs + weight,), [torch.ones(2)], [weight])
    (output,) = graphs(lambda inputs: (inputs + weight,), [torch.full((2,), 4.0)], [weight])
    assert output.tolist() == [5.0, 5.0]


def test_functions_without_inputs_keep_their_tensors():
    """The first function of its kind is kept, for as long as the constants are what they were."""
    graphs, weight, state = Graphs(), torch.ones(2), torch.zeros(2)
    add, device = (lambda: state.add_(weight)), torch.device("cpu")
    kept = graphs.in_place(add, device, [weight], "add")
    kept()
    assert kept is add and graphs.in_place(lambda: None, device, [weight], "add") is add
    weight.mul_(2)
    other = graphs.in_place(lambda: None, device, [weight], "add")
    assert other is not add and state.tolist() == [1.0, 1.0]


def test_a_part_of_a_larger_function_is_no_graph_of_its_own():
    graphs = Graphs()
    with one_function():
        (output,) = graphs(lambda inputs: (inputs,), [weight := torch.ones(1)], [])
    assert output is weight and not graphs._entries
    graphs(lambda inputs: (inputs,), [torch.ones(1)], [])
    assert len(graphs._entries) == 1
