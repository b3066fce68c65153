"""The drafter model: loading is exact or refused, numerics hold in every dtype, and every way of using it wrong says so."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re

import pytest
import torch
import transformers
from conftest import fill, pattern, prompt, tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin

from modeling_domino import DominoConfig, DominoDraftModel, DominoForCausalLM, install_plug, remove_plug
from modeling_domino.cache_domino import DominoCache
from modeling_domino.plug_domino import PATCHED


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def drafter(target):
    return tiny_drafter(target)


@pytest.fixture
def folder(drafter, tmp_path):
    """A saved drafter."""
    drafter.save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def rewrite(folder, change, **config_changes) -> None:
    """Replaces the stored tensors by `change(tensors)`, and some keys of the config."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if config_changes:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**raw, **config_changes}))


def is_one_sentence(error: BaseException) -> bool:
    text = str(error)
    return "\n" not in text and text.endswith(".") and ". " not in text


def run(drafter, **kwargs) -> torch.Tensor:
    """The backbone over a fixed block and context, in the drafter's dtype."""
    inputs = pattern(1, drafter.config.block_size, 32), pattern(1, 5, drafter.fc.in_features, offset=9)
    with torch.no_grad():
        return drafter(*(value.to(drafter.dtype) for value in inputs), **kwargs).last_hidden_state


# ---- sizes of the published drafters


def published(hidden_size: int, intermediate_size: int, vocab_size: int, num_target_layers: int, **changes):
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_target_layers": num_target_layers,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "mask_token_id": 151669,
        "block_size": 16,
        "projector_type": "domino",
        "shift_label": True,
        "pure_draft_prefix_len": 1,
        "gru_hidden_dim": 1024,
        "emb_dim": 256,
    }
    return DominoConfig(**{**fields, **changes})


PUBLISHED = {
    "4B": (published(2560, 9728, 151936, 36), 588_250_368, 50_823_168),
    "8B": (published(4096, 12288, 151936, 36), 1_104_561_408, 55_934_976),
    "27B": (
        published(
            5120, 17408, 248320, 64, mask_token_id=248070, target_layer_ids=[1, 16, 31, 46, 61], shift_label=False
        ),
        1_814_230_272,
        None,
    ),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_parameter_counts_of_the_published_drafters(size):
    config, total, head = PUBLISHED[size]
    with torch.device("meta"):
        model = DominoDraftModel(config)
    tensors = dict(model.named_parameters())
    assert sum(parameter.numel() for parameter in tensors.values()) == total
    assert len(tensors) == len(model.state_dict()) == 62
    in_head = sum(value.numel() for name, value in tensors.items() if name.startswith(("prefix_gru.", "embed_proj.")))
    assert head is None or in_head == head


def test_the_share_of_the_head():
    """The paper's "+56 M, +5.3 %" for 8B; 9.46 % for 4B."""
    _, total, head = PUBLISHED["8B"]
    assert total - head == 1_048_626_432 and round(100 * head / (total - head), 2) == 5.33
    _, total, head = PUBLISHED["4B"]
    assert round(100 * head / (total - head), 2) == 9.46


def test_names_and_shapes_are_the_released_ones(target):
    tensors = tiny_drafter(target, num_hidden_layers=1, gru_hidden_dim=12, emb_dim=6).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "layers.0.self_attn.q_proj.weight": (32, 32),
        "layers.0.self_attn.k_proj.weight": (16, 32),
        "layers.0.self_attn.v_proj.weight": (16, 32),
        "layers.0.self_attn.o_proj.weight": (32, 32),
        "layers.0.self_attn.q_norm.weight": (16,),
        "layers.0.self_attn.k_norm.weight": (16,),
        "layers.0.mlp.gate_proj.weight": (48, 32),
        "layers.0.mlp.up_proj.weight": (48, 32),
        "layers.0.mlp.down_proj.weight": (32, 48),
        "layers.0.input_layernorm.weight": (32,),
        "layers.0.post_attention_layernorm.weight": (32,),
        "fc.weight": (32, 64),
        "hidden_norm.weight": (32,),
        "norm.weight": (32,),
        "prefix_gru.weight_ih_l0": (36, 32),
        "prefix_gru.weight_hh_l0": (36, 12),
        "embed_proj.0.weight": (6, 44),
        "embed_proj.2.weight": (64, 6),
    }


def test_a_five_layer_dflash_drafter_has_58_tensors(target):
    assert len(tiny_drafter(target, num_hidden_layers=5).state_dict()) == 62
    assert len(tiny_drafter(target, num_hidden_layers=5, with_head=False).state_dict()) == 58


# ---- loading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("with_head", [True, False], ids=["domino", "dflash"])
def test_every_tensor_is_equal_after_loading(target, dtype, with_head, tmp_path):
    drafter = tiny_drafter(target, with_head=with_head).to(dtype)
    drafter.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    loaded = DominoDraftModel.from_pretrained(tmp_path)
    assert stored.keys() == loaded.state_dict().keys()
    assert loaded.dtype == dtype
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, stored[name]), name
        assert torch.equal(tensor, drafter.state_dict()[name]), name
    assert torch.equal(run(loaded.eval()), run(drafter))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16], ids=str)
def test_the_dtype_asked_for_is_the_dtype_got(target, stored, asked, tmp_path):
    drafter = tiny_drafter(target)
    drafter.to(stored).save_pretrained(tmp_path)
    loaded = DominoDraftModel.from_pretrained(tmp_path, dtype=asked)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(asked)), name


LOADS = {
    "plain": {},
    "device_map": {"device_map": "cpu"},
    "dtype auto": {"dtype": "auto"},
    "config given": {"config": True},
    "low memory": {"low_cpu_mem_usage": True},
}


@pytest.mark.parametrize("way", LOADS)
def test_ways_of_loading_give_the_same_model(folder, drafter, way, capfd):
    kwargs = dict(LOADS[way])
    if "config" in kwargs:
        kwargs["config"] = DominoConfig.from_pretrained(folder)
    loaded = DominoDraftModel.from_pretrained(folder, **kwargs)
    assert not loaded.training
    assert torch.equal(run(loaded), run(drafter))
    # Nothing to explain away: no "newly initialised", no "model of type qwen3".
    assert "[transformers]" not in capfd.readouterr().err


def test_a_field_may_be_overridden_when_loading(folder):
    assert DominoDraftModel.from_pretrained(folder, block_size=8).config.block_size == 8


@pytest.mark.parametrize(
    "override", [{"block_size": 0}, {"mask_token_id": 400}, {"pure_draft_prefix_len": 9}, {"target_layer_ids": [1, 9]}]
)
def test_an_overridden_field_is_checked(folder, override):
    with pytest.raises(ValueError, match=f"`{next(iter(override))}` must ") as caught:
        DominoDraftModel.from_pretrained(folder, **override)
    assert is_one_sentence(caught.value)


def test_sharded_checkpoints_load(drafter, tmp_path):
    drafter.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert torch.equal(run(DominoDraftModel.from_pretrained(tmp_path)), run(drafter))


def test_loading_info_on_request(folder):
    model, info = DominoDraftModel.from_pretrained(folder, output_loading_info=True)
    assert isinstance(model, DominoDraftModel)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


# Every tensor of a drafter with one layer, in turn.
NAMES = sorted(tiny_drafter(tiny_target(num_layers=4), num_hidden_layers=1).state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_each_missing_tensor_is_refused(target, name, tmp_path):
    tiny_drafter(target, num_hidden_layers=1).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {key: value for key, value in tensors.items() if key != name})
    with pytest.raises(ValueError, match=f"lacks tensors {re.escape(name)}; ") as caught:
        DominoDraftModel.from_pretrained(tmp_path)
    assert is_one_sentence(caught.value), str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_each_misshaped_tensor_is_refused(target, name, tmp_path):
    tiny_drafter(target, num_hidden_layers=1).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {**tensors, name: torch.cat([tensors[name], tensors[name]])})
    with pytest.raises(
        ValueError, match=rf"has misshaped tensors {re.escape(name)} \[\d+.*\] for \[\d+.*\]; "
    ) as caught:
        DominoDraftModel.from_pretrained(tmp_path)
    assert is_one_sentence(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "name", ["prefix_gru.bias_ih_l0", "layers.9.mlp.up_proj.weight", "confidence_head.weight", "x"]
)
def test_an_unknown_tensor_is_refused(folder, name):
    rewrite(folder, lambda tensors: {**tensors, name: torch.zeros(3)})
    with pytest.raises(ValueError, match=f"has unknown tensors {re.escape(name)}; ") as caught:
        DominoDraftModel.from_pretrained(folder)
    assert is_one_sentence(caught.value), str(caught.value)


def test_many_missing_tensors_are_summed_up(folder):
    rewrite(folder, lambda tensors: {"norm.weight": tensors["norm.weight"]})
    with pytest.raises(ValueError, match=r"lacks tensors .*(, .*){3} and \d+ more; "):
        DominoDraftModel.from_pretrained(folder)


def test_a_head_without_projector_type_is_refused(target, folder):
    """The other silent fall-back: a Domino checkpoint whose config calls it DFlash."""
    dflash = tiny_drafter(target, with_head=False)
    (folder / "config.json").write_text(dflash.config.to_json_string())
    with pytest.raises(ValueError, match=r"has unknown tensors embed_proj.0.weight, embed_proj.2.weight, prefix_gru"):
        DominoDraftModel.from_pretrained(folder)


def test_another_number_of_taps_is_refused(folder):
    raw = json.loads((folder / "config.json").read_text())
    raw["target_layer_ids"] = raw["dflash_config"]["target_layer_ids"] = [1, 3, 4]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"has misshaped tensors fc.weight \[32, 64\] for \[32, 96\]; "):
        DominoDraftModel.from_pretrained(folder)


def head_in(container: str):
    return lambda name: container + name if name.startswith(("prefix_gru.", "embed_proj.")) else name


def torchspec_name(name: str) -> str:
    for ours, theirs in {
        "prefix_gru.": "causal_gru.",
        "embed_proj.0.": "correction_w1.",
        "embed_proj.2.": "correction_w2.",
        "fc.": "context_proj.",
        "hidden_norm.": "context_norm.",
    }.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return "final_norm.weight" if name == "norm.weight" else name


SPELLINGS = {
    "early SpecForge": head_in("logit_head."),
    "speculators": head_in("domino_head."),
    "newer speculators": head_in("logits_correction."),
    "draft_model": lambda name: f"draft_model.{name}",
    "dflash_module": lambda name: f"dflash_module.{name}",
    "model": lambda name: f"model.{name}",
    "container around a container": lambda name: "draft_model." + head_in("logit_head.")(name),
    "TorchSpec": torchspec_name,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_published_spellings_load_exactly(target, spelling, tmp_path):
    drafter = tiny_drafter(target, gru_bias=spelling == "TorchSpec")
    drafter.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: {SPELLINGS[spelling](name): tensor for name, tensor in tensors.items()})
    loaded = DominoDraftModel.from_pretrained(tmp_path)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    if spelling == "TorchSpec":
        assert {"prefix_gru.bias_ih_l0", "prefix_gru.bias_hh_l0"} <= loaded.state_dict().keys()


def test_a_spelling_with_a_missing_head_tensor_is_still_refused(folder):
    rename = SPELLINGS["early SpecForge"]
    rewrite(folder, lambda tensors: {rename(name): tensors[name] for name in tensors if name != "embed_proj.2.weight"})
    with pytest.raises(ValueError, match="lacks tensors embed_proj.2.weight"):
        DominoDraftModel.from_pretrained(folder)


def test_stored_target_tensors_are_ignored_and_mentioned(folder, drafter, caplog):
    rewrite(
        folder,
        lambda tensors: {**tensors, "embed_tokens.weight": torch.ones(64, 32), "lm_head.weight": torch.ones(64, 32)},
    )
    with caplog.at_level("WARNING"):
        loaded = DominoDraftModel.from_pretrained(folder)
    assert "also stores embed_tokens.weight, lm_head.weight; they are ignored" in caplog.text
    assert torch.equal(run(loaded.eval()), run(drafter))


def test_the_auto_classes_are_registered(folder):
    assert type(AutoConfig.from_pretrained(folder)) is DominoConfig
    assert type(AutoModel.from_pretrained(folder)) is DominoDraftModel
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is DominoForCausalLM
    assert type(AutoModel.from_config(DominoConfig.from_pretrained(folder))) is DominoDraftModel


def test_the_auto_classes_check_tensors_too(folder):
    rewrite(folder, lambda tensors: {key: value for key, value in tensors.items() if key != "norm.weight"})
    for auto in (AutoModel, AutoModelForCausalLM):
        with pytest.raises(ValueError, match=r"lacks tensors norm.weight"):
            auto.from_pretrained(folder)


def test_stock_qwen3_configs_stay_qwen3():
    """Registering under "qwen3" would hijack every Qwen3 target."""
    assert type(AutoConfig.for_model("qwen3")) is transformers.Qwen3Config


def test_a_fresh_drafter_is_initialised_like_its_parts(target):
    torch.manual_seed(0)
    drafter = DominoDraftModel(tiny_drafter(target, gru_hidden_dim=64).config)
    assert torch.equal(drafter.norm.weight, torch.ones(32))
    assert 0.01 < drafter.fc.weight.std() < 0.03
    assert 0.06 < drafter.prefix_gru.weight_hh_l0.std() < 0.08, "uniform within 1 / sqrt(64)"


# ---- dtypes


def test_fp16_is_refused_when_loading(folder):
    with pytest.raises(
        ValueError, match="must run in bfloat16 or float32, got float16 .*dtype=torch.bfloat16"
    ) as caught:
        DominoDraftModel.from_pretrained(folder, dtype=torch.float16)
    assert is_one_sentence(caught.value)


def test_fp16_weights_are_refused_unless_another_dtype_is_asked(target, tmp_path):
    tiny_drafter(target).half().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="got float16"):
        DominoDraftModel.from_pretrained(tmp_path)
    assert DominoDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("path", ["stock", "loop", "attach"])
def test_fp16_is_refused_when_drafting(target, drafter, path):
    drafter.half()
    call = {
        "stock": lambda: target.generate(prompt(4), assistant_model=drafter, max_new_tokens=4),
        "loop": lambda: drafter.spec_generate(target, prompt(4), 4),
        "attach": lambda: drafter.attach(target),
    }[path]
    with pytest.raises(ValueError, match="must run in bfloat16 or float32, got float16"):
        call()


CASTS = {
    "fp32": lambda drafter, folder: drafter,
    "to(bf16)": lambda drafter, folder: drafter.to(torch.bfloat16),
    "bfloat16()": lambda drafter, folder: drafter.bfloat16(),
    "half()": lambda drafter, folder: drafter.half(),
    "to(bf16).float()": lambda drafter, folder: drafter.to(torch.bfloat16).float(),
    "from_pretrained": lambda drafter, folder: DominoDraftModel.from_pretrained(folder),
    "from_pretrained(bf16)": lambda drafter, folder: DominoDraftModel.from_pretrained(folder, dtype=torch.bfloat16),
    "deepcopy": lambda drafter, folder: copy.deepcopy(drafter.to(torch.bfloat16)),
    "pickle": lambda drafter, folder: pickle.loads(pickle.dumps(drafter.to(torch.bfloat16))),
}


@pytest.mark.parametrize("cast", CASTS)
def test_rotary_frequencies_stay_exact(drafter, folder, cast):
    model = CASTS[cast](drafter, folder)
    exact = 1.0 / (10000.0 ** (torch.arange(0, 16, 2, dtype=torch.int64).float() / 16))
    for buffer in (model.rotary_emb.inv_freq, model.rotary_emb.original_inv_freq):
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, exact)
    positions = torch.tensor([[100_000]])
    cos, sin = model.rotary_emb(torch.zeros(1, dtype=torch.float32), positions)
    angles = torch.cat([positions[0, 0] * exact] * 2)
    torch.testing.assert_close(cos[0, 0], angles.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[0, 0], angles.sin(), rtol=0, atol=1e-6)


def test_bf16_drafts_are_near_fp32(target, drafter):
    expected = run(drafter)
    got = run(copy.deepcopy(drafter).to(torch.bfloat16)).float()
    # bf16 has 8 bits; two layers and a norm leave about 3 % of values of order 1.
    torch.testing.assert_close(got, expected, rtol=0.1, atol=0.1)


# ---- attention


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_eager_equals_sdpa(target, masked, dtype):
    drafter = tiny_drafter(target).to(dtype)
    mask = torch.ones(1, 9, dtype=torch.long)
    mask[0, :2] = 0
    outputs = {}
    for implementation in ("eager", "sdpa"):
        drafter.set_attn_implementation(implementation)
        assert drafter.config._attn_implementation == implementation
        outputs[implementation] = run(drafter, attention_mask=mask if masked else None)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(outputs["eager"], outputs["sdpa"], **tolerance)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_padded_context_does_not_matter(target, implementation):
    drafter = tiny_drafter(target)
    drafter.set_attn_implementation(implementation)
    block, taps = pattern(1, 4, 32), pattern(1, 5, 64, offset=9)
    expected = drafter(block, taps).last_hidden_state
    padded = torch.cat([100 * torch.ones(1, 3, 64), taps], dim=1)
    positions = torch.tensor([[0, 0, 0, *range(9)]])
    mask = torch.tensor([[0] * 3 + [1] * 9])
    got = drafter(block, padded, positions, mask).last_hidden_state
    torch.testing.assert_close(got, expected)
    # The same in the form that the attention function takes as it is.
    allowed = mask[:, None, None, :].bool().expand(1, 1, 4, 12)
    if implementation == "eager":
        allowed = torch.zeros(1, 1, 4, 12).masked_fill(~allowed, torch.finfo(torch.float32).min)
    torch.testing.assert_close(drafter(block, padded, positions, allowed).last_hidden_state, expected)


def test_attention_is_bidirectional_within_the_block(drafter):
    block, taps = pattern(1, 4, 32), pattern(1, 5, 64, offset=9)
    changed = block.clone()
    changed[:, -1] += 1
    with torch.no_grad():
        first, second = (drafter(x, taps).last_hidden_state[:, 0] for x in (block, changed))
    assert not torch.allclose(first, second)


OTHER_ATTENTION = [
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
    "paged|eager",
    "paged|sdpa",
    "kernels-community/flash-attn2",
    "nonsense",
]


@pytest.mark.parametrize("implementation", OTHER_ATTENTION)
def test_other_attention_is_refused(drafter, folder, implementation):
    for call in (
        lambda: DominoDraftModel.from_pretrained(folder, attn_implementation=implementation),
        lambda: drafter.set_attn_implementation(implementation),
        lambda: AutoModel.from_pretrained(folder, attn_implementation=implementation),
    ):
        with pytest.raises(
            ValueError, match=rf"must be one of 'sdpa', 'eager' .*got '{re.escape(implementation)}'"
        ) as caught:
            call()
        assert is_one_sentence(caught.value)
    assert drafter.config._attn_implementation in ("eager", "sdpa")


# ---- with and without the head


def test_head_off_equals_the_backbone_loaded_without_head(target, drafter, tmp_path):
    """The same weights, once with the correction bypassed and once as a DFlash drafter."""
    backbone = {
        name: value
        for name, value in drafter.state_dict().items()
        if not name.startswith(("prefix_gru.", "embed_proj."))
    }
    config = tiny_drafter(target, with_head=False).config
    bare = DominoDraftModel(config)
    bare.load_state_dict(backbone)
    bare.save_pretrained(tmp_path)
    bare = DominoDraftModel.from_pretrained(tmp_path).eval()
    assert torch.equal(run(bare), run(drafter))
    drafter.use_head = False
    drafter.record_details = bare.record_details = True
    runs = []
    for model in (drafter, bare):
        model.spec_generate(target, prompt(6), 20)
        runs.append([(step.draft_ids, step.accepted) for step in model.last_run.steps])
    assert runs[0] == runs[1]


def test_the_head_changes_drafts(target, drafter):
    drafts = []
    for use_head in (True, False):
        drafter.use_head = use_head
        drafter.spec_generate(target, prompt(6), 20)
        drafts.append([step.draft_ids for step in drafter.last_run.steps])
    assert drafts[0] != drafts[1]


def test_what_it_is_stands_in_repr_and_describe(target, drafter):
    assert drafter.describe() == "Domino, GRU 12, rank 6, block 4, 2 layers, taps [1, 4]"
    assert drafter.head_state == "domino"
    drafter.use_head = False
    assert drafter.describe().startswith("Domino with its head off") and drafter.head is None
    assert drafter.head_state == "off"
    dflash = tiny_drafter(target, with_head=False)
    assert dflash.describe().startswith("DFlash, no correction head") and dflash.head is None
    assert dflash.head_state == "none"
    assert "DFlash, no correction head" in repr(dflash)
    assert "Domino with its head off" in repr(drafter)


# ---- copies, and the plug


def is_plugged() -> bool:
    return all(hasattr(getattr(GenerationMixin, name), "_domino_original") for name in PATCHED)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda drafter: pickle.loads(pickle.dumps(drafter)),
    "torch.save": lambda drafter: torch_round_trip(drafter),
}


def torch_round_trip(drafter):
    buffer = io.BytesIO()
    torch.save(drafter, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("way", COPIES)
def test_copies_work_and_install_the_plug(target, drafter, way):
    expected = target.generate(prompt(5), max_new_tokens=12, do_sample=False)
    drafter.use_head = False
    try:
        remove_plug()
        assert not is_plugged()
        twin = COPIES[way](drafter)
        assert is_plugged()
    finally:
        install_plug()
    assert twin.head_state == "off" and twin.config.to_dict() == drafter.config.to_dict()
    assert torch.equal(run(twin), run(drafter))
    assert torch.equal(target.generate(prompt(5), assistant_model=twin, max_new_tokens=12, do_sample=False), expected)


def test_a_new_drafter_installs_the_plug(target):
    try:
        remove_plug()
        tiny_drafter(target)
        assert is_plugged()
    finally:
        install_plug()


@pytest.mark.parametrize("model_class", [DominoDraftModel, DominoForCausalLM])
@pytest.mark.parametrize("named", [None, "Qwen/Qwen3-4B"])
def test_generate_on_a_drafter_names_the_call_that_works(target, model_class, named):
    drafter = model_class(tiny_drafter(target, target_model=named).config)
    with pytest.raises(TypeError, match="This is a drafter, not a language model") as caught:
        drafter.generate(prompt(3), max_new_tokens=3)
    text = str(caught.value)
    assert is_one_sentence(caught.value)
    assert f'from_pretrained("{named or "<target id>"}").generate(**inputs, assistant_model=drafter)' in text


# ---- forward


def test_context_may_be_empty(drafter):
    with torch.no_grad():
        output = drafter(pattern(1, 4, 32)).last_hidden_state
        stored = drafter(pattern(1, 4, 32), cache=DominoCache()).last_hidden_state
    assert output.shape == (1, 4, 32) and output.isfinite().all()
    torch.testing.assert_close(stored, output)


def test_batch_rows_do_not_mix(drafter):
    block, taps = pattern(3, 4, 32), pattern(3, 5, 64, offset=9)
    with torch.no_grad():
        together = drafter(block, taps).last_hidden_state
        for i in range(3):
            torch.testing.assert_close(
                drafter(block[i : i + 1], taps[i : i + 1]).last_hidden_state, together[i : i + 1]
            )


def test_only_relative_positions_matter(drafter):
    positions = torch.arange(9)[None]
    torch.testing.assert_close(
        run(drafter, position_ids=positions), run(drafter, position_ids=positions + 1000), rtol=1e-3, atol=1e-3
    )
    assert not torch.allclose(run(drafter, position_ids=positions), run(drafter, position_ids=2 * positions))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_parameter_gets_a_gradient(target, checkpointing):
    drafter = fill(tiny_drafter(target)).train()
    if checkpointing:
        # The older name is deprecated from 5.24, the newer one is missing before.
        getattr(drafter, "activation_checkpointing_enable", drafter.gradient_checkpointing_enable)()
    hidden = drafter(pattern(1, 4, 32), pattern(1, 5, 64, offset=9)).last_hidden_state
    logits = drafter.head.teacher_forced(target.lm_head(hidden), hidden, pattern(1, 4, 32, offset=3))
    (logits * pattern(1, 4, 64, offset=5)).sum().backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
