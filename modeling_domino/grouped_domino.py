"""Attention of a few rows on grouped heads: what makes verifications cheap in a long context on a CPU.

Where several query heads share a head of keys and values, transformers' sdpa attention copies keys and values for every
query head as soon as there is a mask, and rows of a verification need one: in every layer a copy larger than the cache.
Instead, the rows of the query heads that share keys can stand below each other, as rows of one head: the same sums.

From the first `with` block on, [`install`] has put a function in front of what transformers calls "sdpa". It does this for
the thread that is in a block, and else passes everything on; the model and its config stay as they are, since some models
ask for "sdpa" by name. The file knows nothing of drafters.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


# Chains and trees; above, copying keys and values costs little beside the arithmetic.
MOST_ROWS = 128
# Holds the open blocks of each thread, on the installed function: other copies of this code use the same.
MARK = "_domino_blocks"


class _Blocks(threading.local):
    """Of one thread: its open blocks, the last mask with its rows for all query heads that share keys, and whether a call is passed on."""

    count = 0
    mask: tuple | None = None
    is_passing = False


@contextlib.contextmanager
def grouped_heads(target: nn.Module) -> Iterator[None]:
    """A block for forwards of a few rows of `target`; it changes nothing where there is nothing to gain."""
    config = target.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    shared = heads != (getattr(config, "num_key_value_heads", None) or heads)
    if not (shared and target.device.type == "cpu" and config._attn_implementation == "sdpa"):
        yield
        return
    blocks = install()
    blocks.count += 1
    try:
        yield
    finally:
        blocks.count -= 1
        blocks.mask = None


def install() -> _Blocks:
    """Puts the function in front of "sdpa", unless it is there; what users register, before or after, is what it passes to."""
    present = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if hasattr(present, MARK):
        return getattr(present, MARK)
    blocks = _Blocks()
    # Set for this object of transformers alone, in front of what is registered for all.
    is_own = "sdpa" in ALL_ATTENTION_FUNCTIONS._local_mapping

    def usual(*args, **kwargs):
        # A wrapper that was registered later may call this function again: then the one before it is meant.
        if is_own or blocks.is_passing:
            return present(*args, **kwargs)
        blocks.is_passing = True
        try:
            return ALL_ATTENTION_FUNCTIONS._global_mapping["sdpa"](*args, **kwargs)
        finally:
            blocks.is_passing = False

    def attention(module: nn.Module, query, key, value, attention_mask, *args, **kwargs):
        if torch.compiler.is_compiling():
            return present(module, query, key, value, attention_mask, *args, **kwargs)
        if blocks.count == 0 or blocks.is_passing or args:
            return usual(module, query, key, value, attention_mask, *args, **kwargs)
        return grouped_attention(module, query, key, value, attention_mask, usual=usual, blocks=blocks, **kwargs)

    setattr(attention, MARK, blocks)
    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    return blocks


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    usual: Callable,
    blocks: _Blocks | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention in the form of transformers' `AttentionInterface`.

    Args:
        query: `[B, H, m, d]`.
        key, value: `[B, H', S, d]`, where H' divides H.
        attention_mask: `[B or 1, 1 or H, m, S]`, boolean or added to the scores.
        scaling: of the scores, d^-0.5 by default.
        usual (`Callable`): the attention that does everything else.
        blocks (*optional*): remember the mask of a forward, for which its layers ask one after the other.

    Returns:
        `[B, m, H, d]`, and `None` for the weights, which are never materialised.
    """
    batch, heads, rows, _ = query.shape
    groups = heads // key.shape[1]
    masked = attention_mask is not None and attention_mask.dim() == 4
    masked = masked and attention_mask.shape[1] in (1, heads) and attention_mask.shape[2] == rows
    other = dropout > 0 or any(kwargs.get(name) is not None for name in ("position_bias", "softcap"))
    if not masked or groups <= 1 or heads % groups or rows > MOST_ROWS or other:
        return usual(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    output = F.scaled_dot_product_attention(
        query.reshape(batch, -1, groups * rows, query.shape[-1]),
        key,
        value,
        attn_mask=_mask_of_groups(attention_mask, groups, query.dtype, blocks),
        scale=scaling,
    )
    return output.reshape(batch, heads, rows, -1).transpose(1, 2).contiguous(), None


def _mask_of_groups(mask: torch.Tensor, groups: int, dtype: torch.dtype, blocks: _Blocks | None) -> torch.Tensor:
    """What is added to the scores `[B, H', groups * m, S]`."""
    last = None if blocks is None else blocks.mask
    if last is not None and last[0] is mask and last[1:3] == (groups, dtype):
        return last[3]
    added = mask
    if mask.dtype == torch.bool:
        added = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    if mask.shape[1] == 1:
        added = added.repeat(1, 1, groups, 1)
    else:
        added = added.reshape(mask.shape[0], -1, groups * mask.shape[2], mask.shape[3])
    if blocks is not None:
        # With the mask itself, so that no other can take its place in memory.
        blocks.mask = (mask, groups, dtype, added)
    return added
