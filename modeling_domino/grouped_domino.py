"""Attention of a few rows on grouped heads: what makes verifications cheap in a long context on a CPU.

Where several query heads share a head of keys and values, transformers' sdpa attention copies keys and values for every
query head as soon as there is a mask, and rows of a verification need one: in every layer a copy larger than the cache.
Instead, the rows of the query heads that share keys can stand below each other, as rows of one head; transformers itself
does so for a single row. The sums are the same.

It is in force inside `with` blocks only, by the name of the attention in the target's config; without a mask, with many
rows, or for other attention than sdpa everything is as it was. It knows nothing of drafters.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


NAME = "domino_grouped_sdpa"
# Chains and trees; above, copying keys and values costs little beside the arithmetic.
MOST_ROWS = 128

_GROUPED: weakref.WeakKeyDictionary[nn.Module, GroupedHeads] = weakref.WeakKeyDictionary()
# The mask of a forward and its rows for all query heads that share keys: the layers ask one after the other.
_LAST = threading.local()


def attention_of(model: nn.Module) -> str:
    """The attention that the user chose for the text model, also while another thread is in a block of [`grouped_heads`]."""
    chosen = model.config.get_text_config()._attn_implementation
    return "sdpa" if chosen == NAME else chosen


def grouped_heads(target: nn.Module) -> AbstractContextManager:
    """The `with` block for forwards of a few rows of `target`; one that does nothing where there is nothing to gain."""
    config = target.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    shared = heads != (getattr(config, "num_key_value_heads", None) or heads)
    on_cpu = target.device.type == "cpu"
    # Without the flag the model does not look its attention up by name.
    by_name = getattr(target, "_supports_attention_backend", False)
    if not (shared and on_cpu and by_name and attention_of(target) == "sdpa"):
        return contextlib.nullcontext()
    return _GROUPED.setdefault(target, GroupedHeads(config))


class GroupedHeads:
    """Has the layers of a model attend by [`grouped_attention`] between `__enter__` and `__exit__`.

    Blocks may be nested, also from several threads.

    Args:
        config (`PreTrainedConfig`): of the text model, set to sdpa attention.
    """

    def __init__(self, config):
        self._config = config
        self._depth = 0
        self._lock = threading.Lock()

    def __enter__(self) -> GroupedHeads:
        with self._lock:
            self._depth += 1
            self._config._attn_implementation = NAME
        return self

    def __exit__(self, *exception) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._config._attn_implementation = "sdpa"
        _LAST.masks = None


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention in the form of transformers' `AttentionInterface`.

    Args:
        query: `[B, H, m, d]`.
        key, value: `[B, H', S, d]`, where H' divides H.
        attention_mask: `[B or 1, 1 or H, m, S]`, boolean or added to the scores.
        scaling: of the scores, d^-0.5 by default.

    Returns:
        `[B, m, H, d]`, and `None` for the weights, which are never materialised.
    """
    batch, heads, rows, _ = query.shape
    groups = heads // key.shape[1]
    other = dropout > 0 or any(kwargs.get(name) is not None for name in ("position_bias", "softcap"))
    if attention_mask is None or groups == 1 or rows > MOST_ROWS or other:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    output = F.scaled_dot_product_attention(
        query.reshape(batch, -1, groups * rows, query.shape[-1]),
        key,
        value,
        attn_mask=_mask_of_groups(attention_mask, groups, query.dtype),
        scale=scaling,
    )
    return output.reshape(batch, heads, rows, -1).transpose(1, 2).contiguous(), None


def _mask_of_groups(mask: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores `[B, H', groups * m, S]`."""
    last = getattr(_LAST, "masks", None)
    if last is not None and last[0] is mask and last[1:3] == (groups, dtype):
        return last[3]
    added = mask
    if mask.dtype == torch.bool:
        added = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    if mask.shape[1] == 1:
        added = added.repeat(1, 1, groups, 1)
    else:
        added = added.reshape(mask.shape[0], -1, groups * mask.shape[2], mask.shape[3])
    _LAST.masks = (mask, groups, dtype, added)
    return added


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
