"""The Domino drafter: a DFlash backbone on Qwen3 parts, with the Domino correction head at its root.

The backbone is a small Qwen3 that differs in one thing: its attention is bidirectional over a block of mask tokens, and
its keys and values also come from the target's hidden states of the committed context. The head corrects the block's
logits causally. Neither embeddings nor output head are stored; both are borrowed from the target.

Domino: https://huggingface.co/papers/2605.29707 (sections 3.1 and 3.2).

Notation of the shapes in this package: B batch, S committed context, K draft block, D hidden, G GRU width, R correction
rank, V vocabulary, L tapped layers, N tree nodes; n is the number of drafts of a round.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

# Every sibling is imported here: releases before 5.19 copy from a local folder only what the entry file names itself.
from .cache_domino import DominoCache
from .configuration_domino import DominoConfig, how_to_use
from .costs_domino import costs_of  # noqa: F401
from .drafting_domino import draft_chain  # noqa: F401
from .generation_domino import spec_generate
from .graphs_domino import Graphs  # noqa: F401
from .grouped_domino import grouped_heads  # noqa: F401
from .head_domino import DominoHead
from .kernels_domino import KernelReport, kernel_report, set_kernels
from .loop_domino import DecodeLoop  # noqa: F401
from .ops_domino import gru_step  # noqa: F401
from .packed_domino import packed_matrices
from .plug_domino import Attachment, candidate_generator, install_plug, run_assisted
from .record_domino import Run, get_last_runs
from .sizing_domino import Costs  # noqa: F401
from .static_domino import StaticLoop  # noqa: F401
from .taps_domino import TargetTaps  # noqa: F401
from .target_domino import (
    TargetView,  # noqa: F401
    check_pair,
)
from .texts_domino import Texts  # noqa: F401
from .tree_domino import DraftTree  # noqa: F401
from .verification_domino import accept_match  # noqa: F401
from .vocabulary_domino import DRAFT_VOCAB_FILE, check_ranking, ranking_text, read_ranking


logger = logging.getLogger(__name__)

# How published checkpoints spell our parameter names: containers around the drafter or its head, and TorchSpec's names.
# The patterns apply one after the other.
CHECKPOINT_NAMES = {
    r"^(?:draft_model\.|dflash_module\.|model\.)": "",
    r"^(?:logit_head\.|domino_head\.|logits_correction\.)": "",
    r"^causal_gru\.": "prefix_gru.",
    r"^correction_w1\.": "embed_proj.0.",
    r"^correction_w2\.": "embed_proj.2.",
    r"^context_proj\.": "fc.",
    r"^context_norm\.": "hidden_norm.",
    r"^final_norm\.": "norm.",
}

# Attention functions that take a block without causality and its mask over context and block.
ATTENTION = ("sdpa", "eager")

# Where a drafter is read from, among the arguments of `from_pretrained`.
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")

# Parameters of the target that some formats store beside the drafter's own; here they are read from the target.
BORROWED_NAMES = ("embed_tokens.weight", "lm_head.weight")


def parameter_name(checkpoint_name: str) -> str:
    """Our name of a tensor of a published checkpoint."""
    for pattern, name in CHECKPOINT_NAMES.items():
        checkpoint_name = re.sub(pattern, name, checkpoint_name)
    return checkpoint_name


def require_tensors(source, missing: list[str], unexpected: list[str], misshaped: list[str]) -> None:
    """Refuses weights that are not exactly the drafter's: it would load, and draft nonsense."""
    for problem, keys in (("lacks", missing), ("has unknown", unexpected), ("has misshaped", misshaped)):
        if keys:
            raise ValueError(
                f"{source} {problem} tensors {', '.join(keys[:4])}"
                f"{f' and {len(keys) - 4} more' if len(keys) > 4 else ''}; the drafter would draft nonsense, so it is not "
                "loaded: check that config and weights belong together."
            )


class DominoRotaryEmbedding(Qwen3RotaryEmbedding):
    """Rotary embedding whose frequencies stay fp32: rounded to bf16 they drift with the position."""

    def _apply(self, fn, recurse=True):
        exact = self.inv_freq
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32:
            self.inv_freq = exact.to(self.inv_freq.device)
            self.original_inv_freq = self.inv_freq.clone()
        return self


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies rotary positions `[B, n, head_dim]` to `[B, heads, n, head_dim]`."""
    # Queries and keys have different lengths here, so each is rotated on its own.
    return states * cos.unsqueeze(1) + rotate_half(states) * sin.unsqueeze(1)


class DominoAttention(nn.Module):
    """Qwen3 attention whose keys and values also come from the target's context (section 3.1), without causality."""

    def __init__(self, config: DominoConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = False
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def keys_values(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[B, kv_heads, n, head_dim]` of context or block rows `[B, n, D]`."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        keys = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        values = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        return rotate(keys, *position_embeddings), values

    def forward(
        self,
        hidden_states: torch.Tensor,
        context: torch.Tensor | None,
        block_positions: tuple[torch.Tensor, torch.Tensor],
        context_positions: tuple[torch.Tensor, torch.Tensor] | None,
        attention_mask: torch.Tensor | None,
        cache: DominoCache | None,
    ) -> torch.Tensor:
        batch, length = hidden_states.shape[:2]
        queries = self.q_norm(self.q_proj(hidden_states).view(batch, length, -1, self.head_dim)).transpose(1, 2)
        queries = rotate(queries, *block_positions)
        keys, values = self.keys_values(hidden_states, block_positions)
        if cache is not None:
            keys, values = cache.with_block(self.layer_idx, keys, values)
        elif context is not None:
            context_keys, context_values = self.keys_values(context, context_positions)
            keys = torch.cat([context_keys, keys], dim=2)
            values = torch.cat([context_values, values], dim=2)
        # transformers looks for this very call in the source before it lets `set_attn_implementation` change anything.
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, _ = attend(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
        )
        return self.o_proj(output.reshape(batch, length, -1))


class DominoDecoderLayer(GradientCheckpointingLayer):
    """Qwen3 decoder layer around [`DominoAttention`]."""

    def __init__(self, config: DominoConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DominoAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, *attention_args) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), *attention_args)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DominoPreTrainedModel(PreTrainedModel):
    """Loading rules of a drafter: every tensor must be there, none may be left over, and never fp16."""

    config: DominoConfig
    config_class = DominoConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DominoDecoderLayer"]
    _supports_sdpa = True
    _supports_attention_backend = True

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args, **kwargs) -> str:
        # Other functions take masks in other forms, or are causal; a kernel from the Hub would be loaded unasked.
        if attn_implementation not in (None, *ATTENTION):
            raise ValueError(
                f"`attn_implementation` must be one of {', '.join(map(repr, ATTENTION))} for a Domino drafter, got "
                f"{attn_implementation!r}; its target may use another."
            )
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.GRU):
            # torch's own initialisation, in the form that leaves loaded tensors alone.
            bound = module.hidden_size**-0.5
            for parameter in module.parameters():
                initialization.uniform_(parameter, -bound, bound)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """Loads a drafter from a folder or a Hub id, in any published spelling.

        Raises:
            ValueError: if a tensor is missing, left over or of another shape, or if the weights would be fp16.
        """
        kwargs.setdefault("key_mapping", CHECKPOINT_NAMES)
        kwargs.setdefault("ignore_mismatched_sizes", True)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
        borrowed = [key for key in unexpected if parameter_name(key) in BORROWED_NAMES]
        if borrowed:
            unexpected = [key for key in unexpected if key not in borrowed]
            logger.warning(
                "%s also stores %s; they are ignored, the drafter reads them from its target (`domino convert` leaves "
                "them out).",
                pretrained_model_name_or_path,
                ", ".join(borrowed),
            )
        misshaped = sorted(f"{name} {[*stored]} for {[*ours]}" for name, stored, ours in info["mismatched_keys"])
        require_tensors(pretrained_model_name_or_path, missing, unexpected, misshaped)
        model.check_dtype()
        if pretrained_model_name_or_path is not None:
            hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
            model.draft_ranking = read_ranking(pretrained_model_name_or_path, model.config.vocab_size, **hub)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory, *args, push_to_hub: bool = False, **kwargs):
        """Saves the drafter, and beside its weights the ranking of tokens if it has one; does not publish."""
        if push_to_hub:
            self.push_to_hub()
        super().save_pretrained(save_directory, *args, **kwargs)
        if self.draft_ranking is not None:
            path = Path(save_directory, DRAFT_VOCAB_FILE)
            scratch = path.with_name(f".{path.name}.{os.getpid()}")
            scratch.write_text(ranking_text(self.draft_ranking), encoding="utf-8")
            os.replace(scratch, path)

    def push_to_hub(self, *args, **kwargs):
        """Refused: nothing would check what is published.

        Raises:
            ValueError: always, with the ways that work.
        """
        raise ValueError(
            "`push_to_hub` would publish this drafter without a check or a card: save it with `save_pretrained(folder)`, then "
            "publish the folder with `domino push`, or as it is with `hf upload`."
        )

    def check_dtype(self) -> None:
        """Refuses fp16, in which hidden-state outliers overflow and acceptance falls to 0-6 %."""
        if self.dtype == torch.float16:
            raise ValueError(
                "A Domino drafter must run in bfloat16 or float32, got float16 (its hidden states overflow there); load "
                "it with `dtype=torch.bfloat16`."
            )


class DominoDraftModel(DominoPreTrainedModel):
    """Drafter of the Domino family: backbone and, unless it is a DFlash drafter, the correction head.

    Use it as `target.generate(**inputs, assistant_model=drafter)` or `drafter.spec_generate(target, input_ids)`.
    Creating one lets transformers' assisted decoding serve Domino drafters (see `plug_domino.py`).

    Attributes:
        record_details (`bool`): also record what the backbone alone would have picked, and probabilities. Costs a
            softmax over the vocabulary per draft.
        use_head (`bool`): set to `False` to bypass the correction ("head off").
        context_window (`int`, *optional*): how many tokens of context the drafts are made from, the last ones; bounds
            the memory and the time of drafting in texts longer than those it was trained on. All by default.
        prepack (`bool`, *optional*): run on prepacked weights on a CPU, with a second copy of the target's linear layers
            (see `packed_domino.py`); by default for targets of up to 2 GiB.
    """

    def __init__(self, config: DominoConfig):
        config.check()
        super().__init__(config)
        self.layers = nn.ModuleList([DominoDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DominoRotaryEmbedding(config)
        if config.has_head:
            # At the root, under the names of the released checkpoints; `head` groups the mathematics.
            width, rank = config.gru_hidden_dim, config.emb_dim
            self.prefix_gru = nn.GRU(config.hidden_size, width, batch_first=True, bias=config.gru_bias)
            self.embed_proj = nn.Sequential(
                nn.Linear(config.hidden_size + width, rank, bias=False),
                nn.SiLU(),
                nn.Linear(rank, config.vocab_size, bias=False),
            )
        self.use_head = True
        self.record_details = False
        self._draft_ranking: list[int] | None = None
        self.context_window: int | None = None
        self.prepack: bool | None = None
        install_plug()
        self.post_init()

    def __setstate__(self, state):
        super().__setstate__(state)
        # Unpickling does not run `__init__`.
        install_plug()

    @property
    def head(self) -> DominoHead | None:
        """The correction head, or `None` for a DFlash drafter or with `use_head = False`."""
        if not (self.config.has_head and self.use_head):
            return None
        return DominoHead(self.prefix_gru, self.embed_proj, self.config.pure_draft_prefix_len, packed_matrices(self))

    @property
    def head_state(self) -> str:
        """What corrects the drafts: "domino", "off" (bypassed) or "none" (DFlash)."""
        return "none" if not self.config.has_head else "domino" if self.use_head else "off"

    @property
    def draft_ranking(self) -> list[int] | None:
        """The target's tokens, the most frequent first, as far as they were seen; read from `draft_vocab.json` beside the
        weights. `draft_vocab=` says how many of them to draft from.
        """
        return self._draft_ranking

    @draft_ranking.setter
    def draft_ranking(self, ids: list[int] | None):
        if ids is not None:
            check_ranking(ids, self.config.vocab_size, source="`draft_ranking`")
        self._draft_ranking = ids

    @property
    def last_run(self) -> Run | None:
        """Statistics and trace of this drafter's last generation in this thread (of a batch: its first sequence)."""
        return next(iter(self.last_runs), None)

    @property
    def last_runs(self) -> list[Run]:
        """The same for every sequence of the last generation."""
        return get_last_runs(self)

    def describe(self) -> str:
        """One line on what this drafter is."""
        config = self.config
        kind = {
            "domino": f"Domino, GRU {config.gru_hidden_dim}, rank {config.emb_dim}",
            "off": "Domino with its head off",
            "none": "DFlash, no correction head",
        }[self.head_state]
        return f"{kind}, block {config.block_size}, {config.num_hidden_layers} layers, taps {config.target_layer_ids}"

    def extra_repr(self) -> str:
        return self.describe()

    def append_context(
        self, context_hidden_states: torch.Tensor, position_ids: torch.Tensor, cache: DominoCache
    ) -> None:
        """Commits context rows to the store: taps `[B, S', L * D]` at positions `[B, S']`."""
        context = self.hidden_norm(self.fc(context_hidden_states))
        positions = self.rotary_emb(context, position_ids)
        for i, layer in enumerate(self.layers):
            cache.append(i, *layer.self_attn.keys_values(context, positions))
        cache.commit(context.shape[1])

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: DominoCache | None = None,
    ) -> BaseModelOutput:
        """One pass of the backbone over a block.

        Args:
            noise_embeds: raw embeddings of the anchor and K - 1 mask tokens, `[B, K, D]`; in training several blocks
                side by side.
            context_hidden_states: taps of the context rows that are not in `cache` yet, `[B, S', L * D]`.
            position_ids: positions of those rows and of the block, `[B, S' + K]`; by default consecutive.
            attention_mask: 1 for real tokens, over stored context, new context and block, `[B, S + K]`; or what the
                attention function takes as it is, `[B, 1, K, S + K]`.
            cache (`DominoCache`, *optional*): context store; new rows are committed to it, the block is not.

        Returns:
            `BaseModelOutput` with `last_hidden_state` `[B, K, D]`, after the final norm.
        """
        num_context = 0 if context_hidden_states is None else context_hidden_states.shape[1]
        length = noise_embeds.shape[1]
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(past, past + num_context + length, device=noise_embeds.device)[None]
        context, context_positions = None, None
        if num_context and cache is not None:
            self.append_context(context_hidden_states, position_ids[:, :num_context], cache)
        elif num_context:
            context = self.hidden_norm(self.fc(context_hidden_states))
            context_positions = self.rotary_emb(context, position_ids[:, :num_context])
        block_positions = self.rotary_emb(noise_embeds, position_ids[:, num_context:])
        if cache is not None and attention_mask is not None and len(attention_mask.shape) == 2:
            attention_mask = attention_mask[:, -cache.num_visible - length :]
        mask = self._expand_mask(attention_mask, noise_embeds)
        hidden_states = noise_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states, context, block_positions, context_positions, mask, cache)
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def _expand_mask(self, mask: torch.Tensor | None, noise_embeds: torch.Tensor) -> torch.Tensor | None:
        """A `[B, S + K]` mask in the form the attention function takes; others pass through."""
        # A `BlockMask` of FlexAttention (training on GPUs) has a shape and no `dim`.
        if mask is None or len(mask.shape) != 2:
            return mask
        seen = mask[:, None, None, :].bool().expand(-1, 1, noise_embeds.shape[1], -1)
        if self.config._attn_implementation == "sdpa":
            return seen
        hidden = torch.finfo(noise_embeds.dtype).min
        return torch.zeros(seen.shape, dtype=noise_embeds.dtype, device=mask.device).masked_fill(~seen, hidden)

    spec_generate = spec_generate
    set_kernels = set_kernels

    def kernel_report(self) -> KernelReport:
        """Whether Triton kernels draft, where they came from, and why not; see `kernels_domino.py`."""
        return kernel_report(self)

    def attach(self, target) -> Attachment:
        """Lets `target.generate(...)` draft with this drafter without naming it; undone by `detach()`."""
        return Attachment(self, target)

    @classmethod
    def can_generate(cls) -> bool:
        """False, or remote loading would give it a generation config, and saving would write one."""
        return False

    def generate(self, *args, **kwargs):
        """A drafter cannot write on its own.

        Raises:
            TypeError: always, with the call that works.
        """
        raise TypeError(how_to_use(self.config.target_model))

    # The protocol that the plug looks for.
    def _domino_assisted_decoding(self, original, target, *args, **kwargs):
        return run_assisted(self, original, target, *args, **kwargs)

    def _domino_check_vocabulary(self, target):
        if target.config.get_text_config().vocab_size != self.config.vocab_size:
            check_pair(target, self.config)

    def _domino_get_candidate_generator(self, original, target, *args, **kwargs):
        return candidate_generator()


class DominoForCausalLM(DominoDraftModel):
    """What `AutoModelForCausalLM` loads from a drafter repo: the drafter, whose `generate` says how to use it."""

    @classmethod
    def can_generate(cls) -> bool:
        """True, so that a pipeline around it comes as far as `generate`."""
        return True


DominoConfig.register_for_auto_class()
DominoDraftModel.register_for_auto_class("AutoModel")
