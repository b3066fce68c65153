"""What a drafter is, by its config alone: shapes and parameter counts on the meta device; no weights are read."""

from __future__ import annotations

from typing import Any

import torch

from .configuration_domino import DominoConfig
from .modeling_domino import DominoDraftModel


HEAD_PARAMETERS = ("prefix_gru.", "embed_proj.")


def drafter_facts(config: DominoConfig) -> dict[str, Any]:
    """What `domino info` and cards say of a drafter: target, shapes, and stored, borrowed and head parameters."""
    with torch.device("meta"):
        drafter = DominoDraftModel(config)
    sizes = {name: parameter.numel() for name, parameter in drafter.named_parameters()}
    head = sum(size for name, size in sizes.items() if name.startswith(HEAD_PARAMETERS))
    stored = sum(sizes.values())
    borrowed = config.vocab_size * config.hidden_size
    return {
        "kind": drafter.describe(),
        "target": config.target_model or "not named in the config",
        "stored_parameters": stored,
        "backbone_parameters": stored - head,
        "head_parameters": head,
        "head_share_of_backbone_percent": round(100 * head / (stored - head), 2),
        # One matrix where the target ties them.
        "borrowed_embedding_parameters": borrowed,
        "borrowed_output_head_parameters": borrowed,
        "block_size": config.block_size,
        "drafts_per_round": config.num_draft_tokens,
        "mask_token_id": config.mask_token_id,
    }
