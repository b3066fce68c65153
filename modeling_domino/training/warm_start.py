"""Warm start: a new drafter that begins as the last layers of its target instead of as noise.

On little data this decides the run: after 100 steps the loss is 5.3 instead of 6.5 (SmolLM2-135M).
"""

from __future__ import annotations

import torch
from torch import nn


# Parts of a decoder layer that are copied where the target has them.
LAYER_PARTS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)


@torch.no_grad()
def warm_start(drafter: nn.Module, target: nn.Module) -> None:
    """Copies the target's last layers and norms into `drafter`; `fc` passes the last tap on; the correction is zero.

    Query and key norms that the target lacks stay at one.

    Raises:
        ValueError: if the drafter's layers do not have the target's shapes.
    """
    decoder = target.get_decoder()
    sources = decoder.layers[-len(drafter.layers) :]
    for layer, source in zip(drafter.layers, sources, strict=True):
        theirs = dict(source.named_modules())
        for name in LAYER_PARTS:
            if name in theirs:
                _copy(layer.get_submodule(name), theirs[name], name)
    _copy(drafter.norm, decoder.norm, "norm")
    # The context goes straight into the key and value projections, which expect the layer's normalised input.
    _copy(drafter.hidden_norm, sources[0].input_layernorm, "input_layernorm")
    width = drafter.config.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -width:] = torch.eye(width)
    if drafter.config.has_head:
        # Tokens that the loss never scores then keep their base logits.
        drafter.embed_proj[-1].weight.zero_()


def _copy(module: nn.Module, source: nn.Module, name: str) -> None:
    weight = getattr(source, "weight", None)
    if weight is None or weight.shape != module.weight.shape:
        raise ValueError(
            f"A warm start needs drafter layers of the target's shape {tuple(module.weight.shape)} for {name}, the target "
            f"has {None if weight is None else tuple(weight.shape)}; start from random weights with `--no-warm-start`."
        )
    module.weight.copy_(weight)
    if getattr(module, "bias", None) is not None and getattr(source, "bias", None) is not None:
        module.bias.copy_(source.bias)
