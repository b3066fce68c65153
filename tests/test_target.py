"""What is borrowed from the target, and every pair that is refused, in one sentence."""

from __future__ import annotations

import pytest
import torch
import transformers
from conftest import drafter_config, fill, pattern, prompt, tiny_drafter, tiny_target
from torch import nn
from transformers import AutoModelForCausalLM

from modeling_domino.cache_domino import cache_keyword
from modeling_domino.target_domino import TargetView, check_pair


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def target(request):
    return tiny_target(request.param)


def like(dtype=torch.float32) -> torch.Tensor:
    return torch.zeros(1, dtype=dtype)


# ---- borrowing


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_embeddings_and_output_head_are_the_targets(tied):
    target = tiny_target(tied=tied)
    view = TargetView(target, drafter_config(target))
    ids, hidden = prompt(5, batch=2), pattern(2, 5, 32)
    assert torch.equal(view.embed(ids, like=like()), target.get_input_embeddings().weight[ids])
    assert torch.equal(view.base_logits(hidden), target.get_output_embeddings()(hidden))


@torch.no_grad()
def test_the_output_head_gives_the_targets_own_logits(target):
    view = TargetView(target, drafter_config(target))
    outputs = target(prompt(5), output_hidden_states=True)
    torch.testing.assert_close(view.base_logits(outputs.hidden_states[-1]), outputs.logits)


@torch.no_grad()
def test_dtypes_follow_the_side_that_computes():
    """An fp32 drafter on a bf16 target, as for quantised and half-precision targets."""
    target = tiny_target().to(torch.bfloat16)
    view = TargetView(target, drafter_config(target))
    assert view.embed(prompt(3), like=like()).dtype == torch.float32
    assert view.base_logits(pattern(1, 3, 32)).dtype == torch.bfloat16


@torch.no_grad()
def test_the_scale_of_an_embedding_is_undone():
    target = tiny_gemma()
    embedding = target.get_input_embeddings()
    config = drafter_config(target)
    assert float(embedding.embed_scale) != 1.0
    view = TargetView(target, config)
    torch.testing.assert_close(view.embed(prompt(5), like=like()), embedding.weight[prompt(5)])


def test_soft_caps_behind_the_output_head_are_left_out():
    target = tiny_gemma(final_logit_softcapping=0.5)
    hidden = 10 * pattern(1, 3, 32)
    with torch.no_grad():
        logits = TargetView(target, drafter_config(target)).base_logits(hidden)
    assert logits.abs().max() > 0.5
    torch.testing.assert_close(logits, target.lm_head(hidden))


def tiny_gemma(**config):
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "pad_token_id": 0,
    }
    return fill(transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**{**fields, **config})))


TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGE = {"image_size": 8, "patch_size": 4}


def qwen3_vl():
    text = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    vision.update(deepstack_visual_indexes=[0], num_position_embeddings=16)
    return transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
    )


def llava():
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**VISION, **IMAGE),
        image_token_index=60,
    )
    return transformers.LlavaForConditionalGeneration(config)


def gemma3():
    text = transformers.Gemma3TextConfig(**TEXT, sliding_window=16, query_pre_attn_scalar=8)
    config = transformers.Gemma3Config(text_config=text, vision_config={**VISION, **IMAGE})
    return transformers.Gemma3ForConditionalGeneration(config)


@pytest.mark.parametrize("build", [qwen3_vl, llava, gemma3])
def test_a_vision_language_target_fits_with_a_text_prompt(build):
    """Its text model, embeddings and output head are found; Gemma 3 also slides over 16 tokens and scales its rows."""
    target = fill(build())
    drafter = tiny_drafter(target)
    ids = prompt(6, vocab_size=50)
    expected = target.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(target.generate(ids, assistant_model=drafter, max_new_tokens=20, do_sample=False), expected)
    assert torch.equal(drafter.spec_generate(target, ids, 20), expected)


# ---- the mask token's row


def with_mask_row(scale: float):
    target = tiny_target()
    with torch.no_grad():
        target.get_input_embeddings().weight[63] *= scale
    return target


@pytest.mark.parametrize("scale, warned", [(1.0, False), (0.1, False), (1e-3, True), (0.0, True)])
def test_a_next_to_zero_mask_row_is_mentioned_once(scale, warned, caplog):
    target = with_mask_row(scale)
    with caplog.at_level("WARNING"):
        for _ in range(3):
            TargetView(target, drafter_config(target))
    assert caplog.text.count("embedding row of the mask token 63 in Qwen3ForCausalLM is next to zero") == warned


def test_another_mask_token_of_the_same_target_is_looked_at_too(caplog):
    target = with_mask_row(0.0)
    with caplog.at_level("WARNING"):
        TargetView(target, drafter_config(target, mask_token_id=5))
        assert not caplog.records
        TargetView(target, drafter_config(target))
    assert len(caplog.records) == 1


# ---- pairs that fit


def test_a_fitting_pair_passes(target):
    check_pair(target, drafter_config(target))
    check_pair(target, drafter_config(target, num_target_layers=None))
    check_pair(target, drafter_config(target, target_layer_ids=[0, 5]))


def test_a_target_on_the_meta_device_is_enough(target):
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(target.config)
    check_pair(meta, drafter_config(target))


@pytest.mark.parametrize(
    "trained_for, loaded, mentioned",
    [
        ("org/right", "org/right", False),
        ("org/right", "mirror/right", False),
        ("org/right", "org/wrong", True),
        ("org/right", "./org/wrong", False),
        ("org/right", "/models/wrong", False),
        (None, "org/wrong", False),
    ],
)
def test_another_target_than_the_trained_one_is_mentioned(trained_for, loaded, mentioned, caplog):
    target = tiny_target()
    target.config._name_or_path = loaded
    with caplog.at_level("WARNING"):
        check_pair(target, drafter_config(target, target_model=trained_for))
    assert ("was trained for org/right, the target is org/wrong" in caplog.text) == mentioned


# ---- pairs that do not


def refused(target, config, message: str) -> None:
    """Refused with one sentence by the check alone and by everything that takes a pair."""
    for take in (check_pair, TargetView):
        with pytest.raises(ValueError, match=message) as caught:
            take(target, config)
        text = str(caught.value)
        assert "\n" not in text and text.endswith(".") and ". " not in text, text


def test_another_depth(target):
    config = drafter_config(target, num_target_layers=8)
    refused(target, config, r"trained for a target of 8 layers, \w+ has 6; load the target it names")


def test_taps_beyond_the_depth(target):
    config = drafter_config(target, num_target_layers=None, target_layer_ids=[1, 6])
    refused(target, config, r"reads layer 6 of its target, \w+ has 6 layers \(0\.\.5\)")


def test_another_hidden_size(target):
    other = tiny_target(hidden_size=48)
    refused(target, drafter_config(other), r"hidden states of size 48, \w+ has 32")


def test_another_vocabulary(target):
    other = tiny_target(vocab_size=80)
    refused(target, drafter_config(other), r"vocabulary of 80 tokens, \w+ embeds 64")


def test_resized_embeddings():
    target = tiny_target()
    config = drafter_config(target)
    target.resize_token_embeddings(72, mean_resizing=False)
    refused(target, config, r"vocabulary of 64 tokens, \w+ embeds 72; .*undo `resize_token_embeddings`")


def test_the_named_target_is_in_the_refusal(target):
    config = drafter_config(target, num_target_layers=8, target_model="Qwen/Qwen3-4B")
    refused(target, config, r"load the target it names \(Qwen/Qwen3-4B\)")


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
RECURRENT = {
    "Qwen3Next": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
    "Lfm2": {"full_attn_idxs": [2]},
    "Mamba": {},
    "Mamba2": {"num_heads": 8, "expand": 2, "n_groups": 1},
    "RecurrentGemma": {"lru_width": 32},
    "Jamba": {"mamba_dt_rank": 4, "use_mamba_kernels": False, "num_experts": 2},
    "FalconH1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "Bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "attn_layer_indices": [1]},
    "Qwen3_5": {},
}


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_and_hybrid_targets(family):
    kind = {"Qwen3_5": "Qwen3_5Text"}.get(family, family)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **RECURRENT[family]})
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config)
    drafter = drafter_config(tiny_target(num_layers=4))
    with pytest.raises(ValueError, match=rf"take rejected tokens back, .*{family}") as caught:
        check_pair(target, drafter)
    assert str(caught.value).endswith("use a target with attention layers only.")


def test_a_layer_type_of_a_text_model_inside_a_larger_one():
    """The text model's layers decide, wherever the family keeps its configuration."""
    target = tiny_target()
    target.config.layer_types = ["full_attention"] * 5 + ["linear_attention"]
    refused(target, drafter_config(target), r"recurrent state of Qwen3ForCausalLM \(linear_attention\)")


def test_encoder_decoders():
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=6, encoder_ffn_dim=32, decoder_ffn_dim=32
    )
    with torch.device("meta"):
        target = transformers.BartForConditionalGeneration(config)
    with pytest.raises(ValueError, match="decoder-only targets, BartForConditionalGeneration is an encoder-decoder"):
        check_pair(target, drafter_config(tiny_target()))


def test_a_model_without_output_head():
    target = tiny_target()
    with pytest.raises(ValueError, match="Qwen3Model has none; load the target with AutoModelForCausalLM"):
        check_pair(target.model, drafter_config(target))


def test_an_embedding_that_normalises_its_rows():
    target = tiny_target()
    target.get_input_embeddings().embed_norm = nn.Identity()
    refused(target, drafter_config(target), r"embedding of Qwen3ForCausalLM normalises its rows")


@pytest.mark.parametrize("path", ["stock", "loop", "attach"])
def test_a_misfit_is_refused_before_the_first_forward(path):
    target = tiny_target()
    drafter = tiny_drafter(tiny_target(num_layers=8))
    target.register_forward_pre_hook(lambda *args: pytest.fail("the target ran"))
    call = {
        "stock": lambda: target.generate(prompt(4), assistant_model=drafter, max_new_tokens=4),
        "loop": lambda: drafter.spec_generate(target, prompt(4), 4),
        "attach": lambda: drafter.attach(target),
    }[path]
    with pytest.raises(ValueError, match="trained for a target of 8 layers"):
        call()


def test_the_cache_keyword_is_read_from_the_signature(target):
    expected = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
    assert cache_keyword(target) == expected
