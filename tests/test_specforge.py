"""SpecForge's own Domino model agrees with ours, tensor for tensor, on drawn configurations (a test-only peer)."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from conftest import fill, pattern, prompt, require_peer, tiny_target
from transformers import Qwen3Config

from modeling_domino import DominoConfig, DominoDraftModel
from modeling_domino.cache_domino import DominoCache
from modeling_domino.drafting_domino import draft_chain
from modeling_domino.record_domino import StageClock
from modeling_domino.target_domino import TargetView


with warnings.catch_warnings():
    # It mentions kernels that are not installed.
    warnings.simplefilter("ignore")
    require_peer("specforge")
    from specforge.modeling.draft.domino import DominoDraftModel as Peer


def drawn_config(draw: random.Random, *, shift_label: bool, prefix_len: int) -> dict:
    """A config.json as SpecForge writes it."""
    heads = draw.choice([1, 2, 4])
    return {
        "architectures": ["DominoDraftModel"],
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": draw.choice([24, 48]),
        "num_hidden_layers": draw.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "head_dim": draw.choice([8, 16]),
        "max_position_embeddings": 256,
        "rope_theta": draw.choice([1e4, 1e6]),
        "attention_bias": draw.random() < 0.5,
        "tie_word_embeddings": False,
        "block_size": draw.choice([4, 5, 8]),
        "num_target_layers": 6,
        "emb_dim": 6,
        "dflash_config": {
            "projector_type": "domino",
            "mask_token_id": draw.randrange(64),
            "target_layer_ids": draw.sample(range(6), draw.choice([1, 2, 3])),
            "shift_label": shift_label,
            "pure_draft_prefix_len": prefix_len,
            "gru_hidden_dim": draw.choice([8, 16]),
            "emb_dim": 6,
        },
    }


@pytest.mark.parametrize("drawn", range(3))
@pytest.mark.parametrize("prefix_len", [0, 1, 2])
@pytest.mark.parametrize("shift_label", [True, False], ids=["shift", "noshift"])
@torch.no_grad()
def test_logits_and_drafts_agree(shift_label, prefix_len, drawn):
    draw = random.Random(f"{shift_label} {prefix_len} {drawn}")
    raw = drawn_config(draw, shift_label=shift_label, prefix_len=prefix_len)
    peer_config = Qwen3Config(**raw)
    peer_config._attn_implementation = "sdpa"
    peer = fill(Peer(peer_config))
    ours = DominoDraftModel(DominoConfig.from_dict(raw)).eval()
    # Same names, same shapes, none left over.
    ours.load_state_dict(peer.state_dict())
    target = tiny_target()
    view = TargetView(target, ours.config)

    batch, context_length, block_size = 2, draw.choice([1, 5, 12]), raw["block_size"]
    taps = pattern(batch, context_length, ours.fc.in_features, offset=draw.randrange(10_000))
    positions = torch.arange(context_length + block_size)[None].expand(batch, -1)
    anchor = prompt(1, batch=batch, offset=draw.randrange(10_000))
    block = torch.cat([anchor, anchor.new_full((batch, block_size - 1), ours.config.mask_token_id)], dim=1)
    embeds = target.get_input_embeddings()(block)

    expected = peer(positions, noise_embedding=embeds, target_hidden=taps, is_causal=False)
    hidden = ours(embeds, taps, positions).last_hidden_state
    torch.testing.assert_close(hidden, expected)

    tokens = torch.cat([anchor, prompt(block_size - 1, batch=batch, offset=77)], dim=1)
    consumed = target.get_input_embeddings()(tokens)
    base, first = target.lm_head(hidden), ours.config.first_draft_slot
    expected_logits = peer.apply_logits_head(
        base[:, None], prev_token_embeddings=consumed[:, None], hidden_states=hidden[:, None]
    ).squeeze(1)
    corrected = ours.head.teacher_forced(base[:, first:], hidden[:, first:], consumed[:, : block_size - first])
    torch.testing.assert_close(torch.cat([base[:, :first], corrected], dim=1), expected_logits)
    assert not torch.allclose(expected_logits, base)

    chain = draft_chain(
        ours,
        view,
        DominoCache(),
        prefix_ids=anchor,
        context_hidden_states=taps,
        position_ids=positions,
        # SpecForge drafts K - 1 tokens, with the shift too.
        num_drafts=block_size - 1,
        clock=StageClock(torch.device("cpu")),
    )
    assert torch.equal(chain.ids, peer._sample_draft_tokens(target, hidden, block.clone()))


def test_a_missing_peer_fails_under_ci_and_skips_elsewhere(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(ModuleNotFoundError):
        require_peer("no_such_peer")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="no_such_peer is not installed"):
        require_peer("no_such_peer")
