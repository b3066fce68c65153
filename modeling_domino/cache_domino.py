"""Caches: the drafter's own context store, and what releases of transformers differ in about the target's cache.

The drafter attends to the committed context (keys and values made from the target's taps) and to its own block. Only
the context is worth keeping, so the store appends context rows and lends space behind them to the block of the moment:
there is nothing to crop after a round, and no copy that grows with the context.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import DynamicCache, StaticCache


logger = logging.getLogger(__name__)

# From 5.14 sliding layers record the rows of an unfinished round until `crop` is called, with 0 too; before 5.14
# `crop(0)` emptied the cache.
CROP_ZERO_IS_SAFE = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 14)


class DominoCache:
    """Context keys and values of the drafter, per layer.

    Buffers `[B, kv_heads, capacity, head_dim]` grow by doubling; `get_seq_length()` counts committed context rows.
    Memory: 2 x layers x kv_heads x head_dim x capacity elements per sequence, where the capacity is at most twice the
    context, or with a window (and a single sequence) about twice the window, however long the text.

    Args:
        window (`int`, *optional*): how many context rows the block sees, the last ones; all of them by default.
    """

    def __init__(self, window: int | None = None):
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        if window is not None and (type(window) is not int or window < 1):
            raise ValueError(
                f"The context window of the drafter must be an integer of at least 1, got {window!r}; leave it out to draft "
                "from the whole context."
            )
        self._window = window
        self._length = 0
        # Rows in front that are out of the window for good; the buffers begin behind them. In a batch all rows stay:
        # compaction may bring any of them back into the window.
        self._dropped = 0
        self._may_drop = window is not None

    def get_seq_length(self) -> int:
        """Committed context rows (S), those outside the window included."""
        return self._length

    @property
    def num_visible(self) -> int:
        """Committed context rows that the block sees."""
        return self._length if self._window is None else min(self._length, self._window)

    def append(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes new context rows `[B, kv_heads, S', head_dim]` of one layer; they count after `commit`."""
        self._write(layer_idx, keys, values)

    def commit(self, num_rows: int) -> None:
        """Counts the `num_rows` context rows that every layer has appended."""
        self._length += num_rows
        if self._may_drop:
            self._drop_unseen()

    def with_block(
        self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The context rows in the window followed by the block's `[B, kv_heads, K, head_dim]`, as views; the block is
        not kept.
        """
        end = self._write(layer_idx, keys, values)
        start = end - keys.shape[2] - self.num_visible
        return self._keys[layer_idx][:, :, start:end], self._values[layer_idx][:, :, start:end]

    def serves(self, drafter) -> bool:
        """Whether a later run of `drafter` can go on with this store: same window, dtype and device, and writable."""
        keys = self._keys[0]
        writable = torch.is_inference_mode_enabled() or not keys.is_inference()
        same = (keys.dtype, keys.device, self._window) == (drafter.dtype, drafter.device, drafter.context_window)
        return same and writable

    def select_sequences(self, rows: torch.Tensor) -> None:
        """Keeps these sequences of the batch."""
        for states in (self._keys, self._values):
            states[:] = [buffer[rows.to(buffer.device)] for buffer in states]

    def gather(self, order: torch.Tensor) -> None:
        """Keeps the context rows `order` `[B, S]` of each sequence, in that order."""
        for states in (self._keys, self._values):
            states[:] = [_gather(buffer, order) for buffer in states]
        self._length = order.shape[1]

    def _write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        start = self._length - self._dropped
        end = start + keys.shape[2]
        if layer_idx == len(self._keys):
            self._may_drop &= keys.shape[0] == 1
            self._keys.append(_grown(keys[:, :, :0], 0, end))
            self._values.append(_grown(values[:, :, :0], 0, end))
        elif end > self._keys[layer_idx].shape[2]:
            self._keys[layer_idx] = _grown(self._keys[layer_idx], start, end)
            self._values[layer_idx] = _grown(self._values[layer_idx], start, end)
        self._keys[layer_idx][:, :, start:end] = keys
        self._values[layer_idx][:, :, start:end] = values
        return end

    def _drop_unseen(self) -> None:
        """Moves the window to the front of the buffers, once as many rows are out of it as are in it."""
        unseen = self._length - self._dropped - self._window
        if unseen < self._window:
            return
        for states in (self._keys, self._values):
            for buffer in states:
                # Source and destination do not overlap.
                buffer[:, :, : self._window] = buffer[:, :, unseen : unseen + self._window]
        self._dropped += unseen


def _grown(buffer: torch.Tensor, length: int, needed: int) -> torch.Tensor:
    batch, heads, capacity, head_dim = buffer.shape
    grown = buffer.new_empty(batch, heads, max(2 * capacity, needed + 256), head_dim)
    grown[:, :, :length] = buffer[:, :, :length]
    return grown


def _gather(states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows `order` `[B, m]` of keys or values `[B, heads, n, head_dim]`."""
    index = order.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
    return states.gather(2, index)


@dataclass
class _Context:
    """What a run left behind for the next turn: the pair, the drafter's store, the tokens `[1, S]` that both caches hold."""

    target: weakref.ref
    drafter: weakref.ref
    store: DominoCache
    ids: torch.Tensor


# By the target's cache, and for as long as that lives.
_CONTEXTS: weakref.WeakKeyDictionary[Any, _Context] = weakref.WeakKeyDictionary()


def keep_context(cache: Any, target, drafter, store: DominoCache, ids: torch.Tensor) -> None:
    """Keeps the drafter's store beside the target's cache, for the next turn of a talk.

    Args:
        cache: the target's, as the run leaves it.
        target (`PreTrainedModel`), drafter (`DominoDraftModel`): whose caches they are.
        store (`DominoCache`): with a row for each row of `cache`.
        ids: the tokens of those rows, `[1, S]`.
    """
    _CONTEXTS[cache] = _Context(weakref.ref(target), weakref.ref(drafter), store, ids.clone())


def take_context(
    cache: Any, target, drafter, input_ids: torch.Tensor, model_kwargs: dict[str, Any]
) -> DominoCache | None:
    """The store that fits a cache the caller passes again, if the prompt goes on where the last run of this pair ended.

    The prompt must be whole, unpadded and longer than what the cache holds, which must be as the run left it; and the
    drafter must read a store of this kind still.
    """
    context = _CONTEXTS.pop(cache, None)
    if context is None or context.target() is not target or context.drafter() is not drafter:
        return None
    if not context.store.serves(drafter):
        return None
    held, mask = context.ids.shape[1], model_kwargs.get("attention_mask")
    whole = mask is None or (mask.shape == input_ids.shape and bool(mask.all()))
    fits = whole and len(input_ids) == 1 and int(cache.get_seq_length()) == held < input_ids.shape[1]
    return context.store if fits and torch.equal(input_ids[:, :held], context.ids) else None


def cache_keyword(target: torch.nn.Module) -> str:
    """The name under which the target's forward takes its cache: `cache` from 5.24, `past_key_values` before.

    The wrong one is silently swallowed by `**kwargs`, so it is read from the signature.
    """
    return "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"


def cache_of(holder: Any, keyword: str) -> Any:
    """The cache in a target's output or in a dictionary of model arguments."""
    return holder.get(keyword) if isinstance(holder, dict) else getattr(holder, keyword)


def check_cache(cache: Any) -> None:
    """Refuses a target cache that cannot give back the rows of rejected drafts.

    Raises:
        ValueError: without a cache, or with a quantised one.
    """
    if cache is None:
        raise ValueError("Speculative decoding needs the target's cache; call with use_cache=True.")
    if "Quantized" in type(cache).__name__:
        raise ValueError(
            f"Speculative decoding must take rejected tokens back, which a {type(cache).__name__} cannot; use the "
            "default cache."
        )


def check_continued_cache(cache: Any, attention_mask: torch.Tensor | None) -> None:
    """Refuses to continue a filled cache where the core's assisted decoding gets it wrong, with every assistant.

    It cuts a mask over cache and new tokens to the length of the ids, from the wrong end; and before 5.14 the cache too.

    Raises:
        ValueError: with what to do instead.
    """
    if cache.get_seq_length() == 0:
        return
    padded = attention_mask is not None and not bool(attention_mask.all())
    if padded or not CROP_ZERO_IS_SAFE:
        raise ValueError(
            "transformers' assisted decoding cannot continue a filled cache "
            f"{'behind padding' if padded else 'before 5.14'}; pass the whole prompt, or use "
            "`drafter.spec_generate(target, input_ids, ...)`, which can."
        )


def without_sliding_layers(cache: Any) -> Any:
    """The cache to decode with, where a full sliding layer cannot be cropped (before 5.14): an empty default cache is
    exchanged for one that keeps every row, as assisted decoding does itself; the mask still slides.
    """
    sliding = any(getattr(layer, "is_sliding", False) for layer in getattr(cache, "layers", []))
    if CROP_ZERO_IS_SAFE or not sliding or type(cache) is not DynamicCache or cache.get_seq_length() > 0:
        return cache
    return DynamicCache()


def static_cache(target, num_rows: int) -> StaticCache:
    """A cache of `num_rows` rows in buffers that stay where they are.

    Raises:
        ValueError: if some of the target's layers keep something else, which cannot be taken back by overwriting.
    """
    cache = StaticCache(config=target.config, max_cache_len=num_rows)
    other = sorted({type(layer).__name__ for layer in cache.layers} - {"StaticLayer"})
    if other:
        raise ValueError(
            f"`static=True` needs a target with full attention in every layer, {type(target).__name__} keeps "
            f"{', '.join(other)}; leave `static` out."
        )
    return cache


def set_length(cache: StaticCache, length: torch.Tensor) -> None:
    """Lets the next forward write behind the first `length` rows; that is a tensor on the device, without dimensions."""
    for layer in cache.layers:
        layer.cumulative_length.copy_(length)


def start_recording(cache: Any) -> None:
    """Lets sliding layers keep the rows of a round until they are cropped (5.14 and later)."""
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()


def drop_last(cache: Any, num_rows: int) -> None:
    """Removes the last `num_rows` rows of the target's cache after a verification, on every supported release."""
    if num_rows > 0 or CROP_ZERO_IS_SAFE:
        cache.crop(-num_rows)


def keep_rows(cache: Any, num_rows: int, rows: torch.Tensor) -> None:
    """Of the last `num_rows` rows of the target's cache keeps `rows`, moved together at the front, and drops the others.

    Args:
        cache (`DynamicCache`): with the rows of a verified tree at its end.
        num_rows (`int`): how many rows the tree has, the anchor's included.
        rows: increasing indices among them, `[m]`.
    """
    for layer in cache.layers:
        for states in (layer.keys, layer.values):
            start = states.shape[2] - num_rows
            kept = states.index_select(2, rows.to(states.device) + start)
            states[:, :, start : start + rows.shape[0]] = kept
    drop_last(cache, num_rows - rows.shape[0])


def compact(cache: Any, order: torch.Tensor) -> None:
    """Keeps the rows `order` `[B, m]` of each sequence in the target's cache, in that order."""
    for layer in cache.layers:
        layer.keys, layer.values = _gather(layer.keys, order), _gather(layer.values, order)


def empty_filled_cache(cache: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any], generation_config) -> None:
    """Empties a cache that the caller filled, if the prompt it belongs to was passed again.

    From 5.3 assisted decoding feeds such a prompt on top of the cache, which gives wrong text with every assistant; and
    the drafter needs the taps of the whole prompt anyway. A call with just the new tokens (their mask covers the cache
    too) is left alone: the drafter then knows only those.
    """
    filled = cache.get_seq_length()
    if filled == 0:
        return
    held = next((len(layer.keys) for layer in getattr(cache, "layers", []) if torch.is_tensor(layer.keys)), None)
    if held not in (None, len(input_ids)):
        raise ValueError(
            f"The cache was filled for {held} sequence{'s' if held > 1 else ''}, and {len(input_ids)} came; pass a fresh cache."
        )
    mask = model_kwargs.get("attention_mask")
    mask_length = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
    if mask_length != input_ids.shape[1]:
        return
    logger.warning(
        "The cache holds %d tokens, and a whole prompt of %d was passed that does not go on where this drafter's last run "
        "on it ended: emptying it, so that target and drafter read the prompt together. Pass only the new tokens, with a "
        "mask over all, to keep it.",
        int(filled),
        input_ids.shape[1],
    )
    if hasattr(cache, "reset") and getattr(cache, "max_cache_len", None) not in (None, -1):
        cache.reset()
    else:
        cache.crop(-int(filled))
