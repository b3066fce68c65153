"""What a drafter borrows from its target, and whether the two fit.

The drafter stores neither embeddings nor output head: it calls the target's modules (never their `.weight`, so
quantised and offloaded ones work) and reads the output of some decoder layers.
"""

from __future__ import annotations

import logging
import weakref

import torch
from torch import nn


logger = logging.getLogger(__name__)

# Targets whose mask rows have been looked at, and the mask tokens asked about: the look costs a synchronisation.
_SEEN_MASKS: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()

# Layer types whose state cannot be rolled back after a rejected draft.
RECURRENT_MARKS = ("linear_attention", "mamba", "recurrent", "conv", "ssm", "rwkv", "hybrid")


class TargetView:
    """The target's parts that the drafter uses.

    Args:
        target (`PreTrainedModel`): a decoder-only model with a language-modelling head.
        config (`DominoConfig`): the drafter's configuration; the pair is checked.

    Raises:
        ValueError: one sentence, see [`check_pair`].
    """

    def __init__(self, target: nn.Module, config):
        check_pair(target, config)
        self.target = target
        self.layers = target.get_decoder().layers
        self._embedding = target.get_input_embeddings()
        self._output_head = target.get_output_embeddings()
        # Some targets scale the row inside the embedding module; drafters are trained on the raw row.
        scale = getattr(self._embedding, "embed_scale", None)
        self._embed_scale = None if scale is None else float(scale)
        # Read from the signature of its forward, which takes as long as a layer.
        self._selects_logits = target._supports_logits_to_keep()
        self._mention_empty_mask_row(config.mask_token_id)

    def logits_of_last(self, num_rows: int) -> dict[str, int]:
        """Arguments of the target's forward that make it compute logits of the last rows alone, if it can."""
        return {"logits_to_keep": num_rows} if self._selects_logits else {}

    def embed(self, ids: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
        """Raw embedding rows of `ids` `[B, n]` as `[B, n, D]`, with the device and dtype of `like`."""
        rows = self._embedding(ids)
        if self._embed_scale is not None:
            rows = rows / self._embed_scale
        return rows.to(device=like.device, dtype=like.dtype)

    def embedding_rows(self) -> torch.Tensor | None:
        """The raw rows `[V, D]` as they lie in memory; `None` where they are quantised, scaled, offloaded or wrapped."""
        module = self._embedding
        plain = type(module) is nn.Embedding and self._embed_scale is None and not module._forward_hooks
        if not plain or hasattr(module, "_hf_hook") or not module.weight.is_contiguous() or module.weight.is_meta:
            return None
        return module.weight

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The bare output head over the drafter's hidden states `[B, n, D]`: `[B, n, V]` on the drafter's device.

        Soft caps and logit scales that a target applies behind its head are left out, as in training.
        """
        parameter = next(self._output_head.parameters())
        # A 4-bit head stores integers and computes in the dtype of its input.
        dtype = parameter.dtype if parameter.is_floating_point() else self.target.dtype
        return self._output_head(hidden.to(device=self._device_of(parameter), dtype=dtype)).to(hidden.device)

    @torch.no_grad()
    def _mention_empty_mask_row(self, mask_token_id: int) -> None:
        """Warns, once per target, if the mask token's row is next to zero: the block would then carry no signal."""
        seen = _SEEN_MASKS.setdefault(self.target, set())
        device = next(self._embedding.parameters()).device
        if mask_token_id in seen or device.type == "meta":
            return
        seen.add(mask_token_id)
        count = self._embedding.num_embeddings
        # The mask's row and a sample of others, spread over the vocabulary.
        ids = torch.tensor([mask_token_id, *range(0, count, max(1, count // 64))], device=device)
        size, *sizes = self._embedding(ids).float().norm(dim=-1).tolist()
        usual = sorted(sizes)[len(sizes) // 2]
        if size < 0.01 * usual:
            logger.warning(
                "The embedding row of the mask token %d in %s is next to zero (norm %.2g, others %.2g): acceptance will "
                "be low unless the drafter was trained with that row; check `mask_token_id` and the target's weights.",
                mask_token_id,
                type(self.target).__name__,
                size,
                usual,
            )

    def _device_of(self, parameter: torch.Tensor) -> torch.device:
        # An offloaded head has its parameter on "meta"; its own hook moves the input.
        return self.target.device if parameter.device.type == "meta" else parameter.device


def check_pair(target: nn.Module, config) -> None:
    """Refuses a target that the drafter was not made for.

    Args:
        target (`PreTrainedModel`): the target; a model on the meta device is enough.
        config (`DominoConfig`): the drafter's configuration.

    Raises:
        ValueError: one sentence with what is required, what came and what to do.
    """
    text_config = target.config.get_text_config()
    name = type(target).__name__
    _check_architecture(target, text_config, name)
    depth = len(target.get_decoder().layers)
    if config.num_target_layers is not None and depth != config.num_target_layers:
        raise ValueError(
            f"The drafter was trained for a target of {config.num_target_layers} layers, {name} has {depth}; load the "
            f"target it names ({config.target_model or 'see its card'})."
        )
    if max(config.target_layer_ids) >= depth:
        raise ValueError(
            f"The drafter reads layer {max(config.target_layer_ids)} of its target, {name} has {depth} layers "
            f"(0..{depth - 1}); load the target it was trained for."
        )
    if text_config.hidden_size != config.hidden_size:
        raise ValueError(
            f"The drafter reads hidden states of size {config.hidden_size}, {name} has {text_config.hidden_size}; load "
            f"the target it was trained for ({config.target_model or 'see its card'})."
        )
    rows = target.get_input_embeddings().num_embeddings
    if rows != config.vocab_size:
        raise ValueError(
            f"The drafter was trained for a vocabulary of {config.vocab_size} tokens, {name} embeds {rows}; use the "
            "target with the embedding size it was published with (undo `resize_token_embeddings`)."
        )
    _mention_other_target(target, config)


def check_movable_rows(target: nn.Module, cache, *, what: str) -> None:
    """Refuses a target for `what` (trees, batches) if rows of its cache cannot be hidden and moved.

    Raises:
        ValueError: one sentence with what is required, what came and what to do.
    """
    text_config = target.config.get_text_config()
    attention = text_config._attn_implementation
    if attention not in ("eager", "sdpa"):
        raise ValueError(
            f"{what} need a target with eager or sdpa attention, got {attention}; load it with "
            '`attn_implementation="sdpa"`, or draft a chain for one prompt at a time.'
        )
    # Families without a list of layers have one window for all.
    window = getattr(text_config, "sliding_window", None) and getattr(text_config, "use_sliding_window", True)
    kinds = set(getattr(text_config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"{what} need a target with full attention in every layer, {type(target).__name__} has "
            f"{', '.join(sorted(kinds))}; draft a chain for one prompt at a time."
        )
    if type(cache).__name__ != "DynamicCache":
        raise ValueError(
            f"{what} need the default dynamic cache, got {type(cache).__name__}; draft a chain for one prompt at a time."
        )


def _check_architecture(target: nn.Module, text_config, name: str) -> None:
    if getattr(target.config, "is_encoder_decoder", False):
        raise ValueError(f"Domino drafts for decoder-only targets, {name} is an encoder-decoder; use another target.")
    # Some older families name it otherwise.
    kinds = getattr(text_config, "layer_types", None) or getattr(text_config, "layers_block_type", None) or []
    kinds = [str(kind) for kind in kinds]
    recurrent = sorted({kind for kind in kinds if any(mark in kind for mark in RECURRENT_MARKS)})
    if recurrent or getattr(target, "_is_stateful", False):
        raise ValueError(
            f"Speculative decoding must take rejected tokens back, which the recurrent state of {name} "
            f"({', '.join(recurrent) or 'stateful model'}) cannot; use a target with attention layers only."
        )
    output_head = target.get_output_embeddings()
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else None
    if output_head is None or decoder is None or not hasattr(decoder, "layers"):
        raise ValueError(
            f"Domino needs a causal language model with a decoder and an output head, {name} has none; load the target "
            "with AutoModelForCausalLM."
        )
    embedding = target.get_input_embeddings()
    if hasattr(embedding, "embed_norm"):
        raise ValueError(
            f"The embedding of {name} normalises its rows ({type(embedding).__name__}), which Domino drafters are not "
            "trained on; use another target."
        )


def _mention_other_target(target: nn.Module, config) -> None:
    loaded = getattr(target.config, "_name_or_path", "") or ""
    same_name = loaded.rstrip("/").split("/")[-1] == (config.target_model or "").split("/")[-1]
    if config.target_model and loaded.count("/") == 1 and not loaded.startswith((".", "/")) and not same_name:
        logger.warning(
            "The drafter was trained for %s, the target is %s: acceptance may be low.", config.target_model, loaded
        )
