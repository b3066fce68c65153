"""Every published format loads, generates identically and converts both ways; what is not understood is refused."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import types
import warnings
from numbers import Integral
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GOLDEN, GOLDEN_NAMES, golden_pair, prompt, require_peer, tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from modeling_domino import DominoDraftModel
from modeling_domino.convert import FORMATS, convert


NAME = "shift_p1_b4"
HEAD = ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight")


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def golden(name: str = NAME) -> tuple[dict, dict[str, torch.Tensor]]:
    return json.loads((GOLDEN / name / "config.json").read_text()), load_file(GOLDEN / name / "model.safetensors")


def top_level(config: dict) -> dict:
    """The config with everything of `dflash_config` at top level."""
    config = {**config, **config["dflash_config"]}
    del config["dflash_config"]
    return config


def rename(tensors: dict, prefix: str = "", head: str = "") -> dict:
    return {f"{prefix}{head if name in HEAD else ''}{name}": tensor for name, tensor in tensors.items()}


def specforge(config, tensors, target):
    return {**config, "architectures": ["DominoDraftModel"]}, rename(tensors, head="logit_head.")


def speculators(config, tensors, target):
    layers = {key: config[key] for key in config if key.startswith(("num_", "hidden", "head_dim", "rms", "rope"))}
    layers.update({key: config[key] for key in ("intermediate_size", "vocab_size", "max_position_embeddings")})
    del layers["num_target_layers"]
    top = {
        key: config["dflash_config"][key] for key in ("mask_token_id", "projector_type", "emb_dim", "gru_hidden_dim")
    }
    spelled = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "acme/target"}},
        "transformer_layer_config": {"model_type": "qwen3", **layers},
        "draft_vocab_size": config["vocab_size"],
        "block_size": config["block_size"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config["dflash_config"]["target_layer_ids"]],
        "shift_label": config["dflash_config"]["shift_label"],
        "pure_draft_prefix_len": config["dflash_config"]["pure_draft_prefix_len"],
        "use_bias_norm": False,
        **top,
    }
    stored = {
        "embed_tokens.weight": target.get_input_embeddings().weight.detach(),
        "lm_head.weight": target.get_output_embeddings().weight.detach(),
    }
    return spelled, {**rename(tensors, head="domino_head."), **stored}


def nemo(config, tensors, target):
    nested = {**config["dflash_config"], "block_size": config["block_size"]}
    spelled = {**config, "architectures": ["Qwen3DFlashDraftModel"], "dflash_config": nested}
    del spelled["block_size"]
    return spelled, rename(tensors, prefix="model.")


def modelopt(config, tensors, target):
    spelled = {key: value for key, value in config.items() if key not in ("auto_map", "dtype")}
    return {**spelled, "torch_dtype": "float32"}, rename(tensors, prefix="dflash_module.")


def verl(config, tensors, target):
    spelled = {key: value for key, value in top_level(config).items() if key not in ("auto_map", "architectures")}
    return {**spelled, "model_type": "domino"}, rename(tensors, prefix="draft_model.")


def torchspec(config, tensors, target):
    spelled = top_level(config)
    for key in ("projector_type", "auto_map", "architectures"):
        del spelled[key]
    spelled.update(
        model_type="domino",
        gru_hidden_size=spelled.pop("gru_hidden_dim"),
        correction_rank=spelled.pop("emb_dim"),
        num_target_layers=len(spelled["target_layer_ids"]),
        target_num_hidden_layers=config["num_target_layers"],
        target_hidden_size=config["hidden_size"],
    )
    names = {
        "fc.weight": "context_proj.weight",
        "hidden_norm.weight": "context_norm.weight",
        "norm.weight": "final_norm.weight",
        "embed_proj.0.weight": "correction_w1.weight",
        "embed_proj.2.weight": "correction_w2.weight",
    }
    spelled_tensors = {
        names.get(name, name.replace("prefix_gru.", "causal_gru.")): tensor for name, tensor in tensors.items()
    }
    width = 3 * config["dflash_config"]["gru_hidden_dim"]
    # Without effect, so that the drafts can be compared; other values in a test of their own.
    spelled_tensors.update({f"causal_gru.bias_{side}_l0": torch.zeros(width) for side in ("ih", "hh")})
    spelled_tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.detach()
    return spelled, spelled_tensors


def dflash_alias(config, tensors, target):
    nested = {**config["dflash_config"], "projector_type": "causal_v5"}
    return {**config, "dflash_config": nested}, tensors


VARIANTS = (specforge, speculators, nemo, modelopt, verl, torchspec, dflash_alias)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair") / "target"
    golden_pair(NAME)[0].save_pretrained(folder)
    return folder


@pytest.fixture
def exact(tmp_path):
    """The golden drafter in bfloat16, in the public form: every format can hold its bits."""
    config, tensors = golden()
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    return write(tmp_path / "exact", {**config, "dtype": "bfloat16"}, tensors), tensors


def drafted(drafter, target) -> tuple[list[int], list[list[int]]]:
    """The text and the drafts behind it."""
    text = drafter.spec_generate(target, prompt(6, vocab_size=97), max_new_tokens=16)
    return text[0].tolist(), [step.draft_ids for step in drafter.last_run.rounds]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
@pytest.mark.parametrize("name", [NAME, "noshift_p1_b4"])
def test_every_variant_loads_and_drafts_identically(variant, name, tmp_path):
    target, reference, _ = golden_pair(name)
    folder = write(tmp_path / "source", *variant(*golden(name), target))
    loaded = DominoDraftModel.from_pretrained(folder).eval()
    convert(folder, tmp_path / "ours")
    converted = DominoDraftModel.from_pretrained(tmp_path / "ours").eval()
    expected = drafted(reference, target)
    assert drafted(loaded, target) == drafted(converted, target) == expected
    for drafter in (loaded, converted):
        state = drafter.state_dict()
        assert all(torch.equal(state[key], tensor) for key, tensor in reference.state_dict().items())


def test_biases_of_the_gru_are_kept_and_change_the_drafts(tmp_path):
    target, reference, _ = golden_pair(NAME)
    config, tensors = torchspec(*golden(), target)
    for side in ("ih", "hh"):
        tensors[f"causal_gru.bias_{side}_l0"] = 2 * torch.arange(len(tensors[f"causal_gru.bias_{side}_l0"])).sin()
    folder = write(tmp_path / "source", config, tensors)
    convert(folder, tmp_path / "ours")
    for source in (folder, tmp_path / "ours"):
        drafter = DominoDraftModel.from_pretrained(source).eval()
        assert drafter.config.gru_bias
        assert torch.equal(drafter.prefix_gru.bias_ih_l0, tensors["causal_gru.bias_ih_l0"])
    assert drafted(drafter, target)[1] != drafted(reference, target)[1]
    for to in ("flat", "specforge"):
        with pytest.raises(ValueError, match=f"{to} format has no place for prefix_gru.bias_ih_l0"):
            convert(folder, tmp_path / to, to=to)


def test_biases_of_the_projection_are_refused_by_name(tmp_path):
    config, tensors = golden()
    folder = write(tmp_path / "source", config, {**tensors, "embed_proj.0.bias": torch.zeros(8)})
    with pytest.raises(ValueError, match="has unknown tensors embed_proj.0.bias"):
        convert(folder, tmp_path / "ours")


@pytest.mark.parametrize("missing", HEAD)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.__name__)
def test_each_missing_head_tensor_is_refused(variant, missing, tmp_path):
    config, tensors = golden()
    del tensors[missing]
    target = golden_pair(NAME)[0]
    if variant is torchspec:
        tensors.setdefault(missing, None)
        spelled, spelled_tensors = variant(config, tensors, target)
        spelled_tensors = {name: tensor for name, tensor in spelled_tensors.items() if tensor is not None}
    else:
        spelled, spelled_tensors = variant(config, tensors, target)
    folder = write(tmp_path / "source", spelled, spelled_tensors)
    for read in (DominoDraftModel.from_pretrained, lambda folder: convert(folder, tmp_path / "ours")):
        with pytest.raises(ValueError, match=f"lacks tensors {missing}"):
            read(folder)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("name", ["layers.0.extra.weight", "markov_head.weight", "d2t"])
def test_unknown_tensors_are_refused(name, tmp_path):
    config, tensors = golden()
    folder = write(tmp_path / "source", config, {**tensors, name: torch.zeros(2)})
    with pytest.raises(ValueError, match=f"has unknown tensors {name}"):
        convert(folder, tmp_path / "ours")


def test_a_tensor_that_is_there_twice_is_refused(tmp_path):
    config, tensors = golden()
    folder = write(tmp_path / "source", config, {**tensors, "model.norm.weight": tensors["norm.weight"] + 1})
    with pytest.raises(ValueError, match="two tensors that mean norm.weight"):
        convert(folder, tmp_path / "ours")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 8, "dflash_config": {"block_size": 4}}, "gives `block_size` twice: 8"),
        ({"emb_dim": 9}, "gives `emb_dim` twice: 9"),
        ({"dflash_config": {"selector_rank": 4}}, "`selector_rank` must be absent or 0, got 4"),
        ({"dflash_config": {"mystery": 3}}, "keys that are not understood here: mystery; .* --ignore mystery"),
        ({"draft_vocab_size": 64}, "`draft_vocab_size` must equal the target's vocabulary"),
        ({"dflash_config": {"projector_type": "dspark"}}, "`projector_type` must be 'domino'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_configs_that_are_not_understood_are_refused(change, message, tmp_path):
    config, tensors = golden()
    nested = {**config["dflash_config"], **change.get("dflash_config", {})}
    folder = write(tmp_path / "source", {**config, **change, "dflash_config": nested}, tensors)
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_an_unknown_key_can_be_dropped_by_name(tmp_path):
    config, tensors = golden()
    folder = write(tmp_path / "source", {**config, "mystery": 3}, tensors)
    report = convert(folder, tmp_path / "ours", ignore=["mystery"])
    assert "dropped  mystery = 3" in report.config


@pytest.mark.parametrize(
    ("variant", "defaults"), [(nemo, (False, 0)), (modelopt, (True, 1)), (speculators, (True, 1))]
)
def test_defaults_are_those_of_the_source_and_said_aloud(variant, defaults, tmp_path):
    config, tensors = golden()
    spelled, spelled_tensors = variant(config, tensors, golden_pair(NAME)[0])
    for scope in (spelled, spelled.get("dflash_config", {})):
        for key in ("shift_label", "pure_draft_prefix_len"):
            scope.pop(key, None)
    folder = write(tmp_path / "source", spelled, spelled_tensors)
    with pytest.warns(UserWarning, match=f"shift_label={defaults[0]}, pure_draft_prefix_len={defaults[1]}"):
        convert(folder, tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (written["shift_label"], written["pure_draft_prefix_len"]) == defaults


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("through", FORMATS)
def test_round_trips_are_bit_exact(through, to, exact, target_folder, tmp_path):
    source, tensors = exact
    convert(source, tmp_path / "through", to=through, target=str(target_folder))
    convert(tmp_path / "through", tmp_path / "back", to=to, target=str(target_folder))
    drafter = DominoDraftModel.from_pretrained(tmp_path / "back")
    state = drafter.state_dict()
    assert state.keys() == tensors.keys()
    assert all(state[name].dtype == torch.bfloat16 and torch.equal(state[name], tensors[name]) for name in tensors)
    first, back = (DominoDraftModel.from_pretrained(folder).config for folder in (source, tmp_path / "back"))
    assert first.dflash_config == back.dflash_config
    assert (first.num_target_layers, first.block_size) == (back.num_target_layers, back.block_size)
    assert first.rope_parameters == back.rope_parameters


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_ours_and_specforge_keep_fp32(name, tmp_path):
    _, tensors = golden(name)
    convert(GOLDEN / name, tmp_path / "specforge", to="specforge")
    convert(tmp_path / "specforge", tmp_path / "ours")
    for folder in ("specforge", "ours"):
        written = load_file(tmp_path / folder / "model.safetensors")
        assert written.keys() == tensors.keys()
        assert all(torch.equal(written[key], tensors[key]) for key in tensors)


def test_every_change_is_reported(target_folder, tmp_path):
    config, tensors = specforge(*golden(), None)
    folder = write(tmp_path / "source", config, tensors)
    (folder / "domino.py").write_text("")
    report = convert(folder, tmp_path / "ours")
    lines = list(report.lines())
    for name in HEAD:
        assert f"tensor  renamed  logit_head.{name} -> {name}" in lines
    assert 'config  changed  model_type = "qwen3" -> "domino"' in lines
    assert "file    left     domino.py" in lines
    report = convert(folder, tmp_path / "speculators", to="speculators", target=str(target_folder))
    lines = list(report.lines())
    assert f"tensor  added    embed_tokens.weight (from {target_folder})" in lines
    assert "config  renamed  hidden_size -> transformer_layer_config.hidden_size" in lines
    assert "config  added    aux_hidden_state_layer_ids = [1, 3, 5]" in lines
    report = convert(tmp_path / "speculators", tmp_path / "back")
    assert report.dropped == [f"{name} (read from the target)" for name in ("embed_tokens.weight", "lm_head.weight")]
    assert convert(GOLDEN / NAME, tmp_path / "flat", to="flat").cast


def test_loading_a_speculators_folder_says_what_it_ignores(tmp_path, caplog):
    target, reference, _ = golden_pair(NAME)
    folder = write(tmp_path / "source", *speculators(*golden(), target))
    with caplog.at_level("WARNING"):
        drafter = DominoDraftModel.from_pretrained(folder)
    assert "also stores embed_tokens.weight, lm_head.weight; they are ignored" in caplog.text
    assert "domino convert" in caplog.text
    assert drafter.config.target_model == "acme/target"


def test_the_target_of_a_speculators_export_is_required_and_checked(target_folder, tmp_path):
    with pytest.raises(ValueError, match="name it with --target"):
        convert(GOLDEN / NAME, tmp_path / "out", to="speculators")
    tiny_target().save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="vocabulary of 97"):
        convert(GOLDEN / NAME, tmp_path / "out", to="speculators", target=str(tmp_path / "other"))
    assert not (tmp_path / "out").exists()


def test_a_tied_target_is_stored_twice(tmp_path):
    target = tiny_target(tied=True)
    target.save_pretrained(tmp_path / "target")
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    convert(tmp_path / "drafter", tmp_path / "out", to="speculators", target=str(tmp_path / "target"))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written["embed_tokens.weight"], written["lm_head.weight"])
    assert torch.equal(written["embed_tokens.weight"], target.get_input_embeddings().weight)


def test_an_existing_destination_is_kept(exact, tmp_path):
    source, _ = exact
    convert(source, tmp_path / "out")
    before = (tmp_path / "out" / "config.json").read_bytes()
    with pytest.raises(ValueError, match="must not exist; choose another folder or pass --force"):
        convert(source, tmp_path / "out", to="flat")
    assert (tmp_path / "out" / "config.json").read_bytes() == before
    convert(source, tmp_path / "out", to="flat", force=True)
    assert not list((tmp_path / "out").glob("*.py"))
    (tmp_path / "diary").mkdir()
    (tmp_path / "diary" / "today.txt").write_text("dear")
    with pytest.raises(ValueError, match="--force replaces only a folder with a config.json"):
        convert(source, tmp_path / "diary", force=True)
    with pytest.raises(ValueError, match="must differ"):
        convert(source, source, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["diary", "exact", "out"]


def test_a_failure_while_writing_leaves_nothing(exact, tmp_path, monkeypatch):
    source, _ = exact
    convert(source, tmp_path / "out")
    before = (tmp_path / "out" / "config.json").read_bytes()

    def full_disk(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("modeling_domino.convert.save_file", full_disk)
    for destination, force in (("new", False), ("out", True)):
        with pytest.raises(OSError, match="No space left"):
            convert(source, tmp_path / destination, to="flat", force=force)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exact", "out"]
    assert (tmp_path / "out" / "config.json").read_bytes() == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float64])
def test_other_dtypes_are_refused(dtype, tmp_path):
    config, tensors = golden()
    folder = write(tmp_path / "source", config, {name: tensor.to(dtype) for name, tensor in tensors.items()})
    with pytest.raises(ValueError, match="must be bfloat16 or float32"):
        convert(folder, tmp_path / "ours")


def test_pickled_weights_are_refused(tmp_path):
    config, tensors = golden()
    folder = write(tmp_path / "source", config, tensors)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="must hold model.safetensors"):
        convert(folder, tmp_path / "ours")


def test_sharded_weights_are_read(exact, tmp_path):
    source, tensors = exact
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, keys in shards.items():
        save_file({key: tensors[key] for key in keys}, source / file)
    (source / "model.safetensors").unlink()
    weight_map = {key: file for file, keys in shards.items() for key in keys}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    convert(source, tmp_path / "ours")
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == tensors.keys()


def test_a_dflash_folder_drafts_and_says_that_it_has_no_head(tmp_path):
    """z-lab's form: no projector, no head tensors, foreign remote code in the auto_map."""
    config, tensors = golden("noshift_p1_b4")
    nested = {key: config["dflash_config"][key] for key in ("mask_token_id", "target_layer_ids")}
    spelled = {key: value for key, value in config.items() if key != "emb_dim"} | {"dflash_config": nested}
    backbone = {name: tensor for name, tensor in tensors.items() if name not in HEAD}
    folder = write(tmp_path / "source", spelled, backbone)
    target, domino, _ = golden_pair("noshift_p1_b4")
    convert(folder, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "flat", to="flat")
    assert load_file(tmp_path / "flat" / "model.safetensors").keys() == backbone.keys()
    written = json.loads((tmp_path / "flat" / "config.json").read_text())
    assert "projector_type" not in written["dflash_config"]
    domino.use_head = False
    input_ids = prompt(6, vocab_size=97)
    plain = target.generate(input_ids, max_new_tokens=16, do_sample=False)
    expected = drafted(domino, target)
    for source in (folder, tmp_path / "ours"):
        drafter = DominoDraftModel.from_pretrained(source).eval()
        assert drafted(drafter, target) == expected
        text = target.generate(input_ids, max_new_tokens=16, do_sample=False, assistant_model=drafter)
        assert torch.equal(text, plain)
        assert "DFlash, no correction head" in repr(drafter)
        assert drafter.last_run.trace()["head"] == "none"


@pytest.mark.parametrize(
    ("name", "message"),
    [("noshift_p0_b8_one_token_prompt", "`pure_draft_prefix_len` 1 .* has 0"), ("shift_p2_b6", "this one has 2")],
)
def test_flat_export_names_the_rule_of_sglang(name, message, tmp_path):
    with pytest.raises(ValueError, match=f"SGLang requires {message}" if "must" in message else message):
        convert(GOLDEN / name, tmp_path / "flat", to="flat")


def test_flat_export_is_the_public_form(tmp_path):
    convert(GOLDEN / NAME, tmp_path / "flat", to="flat")
    config = json.loads((tmp_path / "flat" / "config.json").read_text())
    public, tensors = golden()
    assert config["model_type"] == "qwen3"
    assert config["architectures"] == ["DFlashDraftModel"]
    assert "auto_map" not in config
    assert config["dtype"] == "bfloat16"
    assert config["dflash_config"] == public["dflash_config"]
    assert config["emb_dim"] == public["emb_dim"]
    for key in ("block_size", "num_target_layers", "rope_theta", "hidden_size", "vocab_size"):
        assert config[key] == public[key]
    written = load_file(tmp_path / "flat" / "model.safetensors")
    assert all(torch.equal(written[key], tensors[key].bfloat16()) for key in tensors)


def test_flat_export_of_a_dflash_drafter_keeps_to_its_own_slots(tmp_path):
    tiny_drafter(tiny_target(), with_head=False, shift_label=True).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="predicts each token at its own slot"):
        convert(tmp_path / "source", tmp_path / "flat", to="flat")


def functions_of(file: Path, namespace: dict[str, Any]) -> dict[str, Any]:
    """The functions and dataclasses of a module that cannot be imported; what is missing shows when it is called."""
    tree = ast.parse(file.read_text())
    wanted = [
        node
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        or (isinstance(node, ast.Assign) and node.targets[0].id == "DEFAULT_DFLASH_MASK_TOKEN")
    ]
    body = [ast.ImportFrom(module="__future__", names=[ast.alias("annotations")], level=0), *wanted]
    code = compile(ast.fix_missing_locations(ast.Module(body=body, type_ignores=[])), str(file), "exec")
    exec(code, namespace)
    return namespace


@pytest.fixture(scope="module")
def sglang_parser():
    """SGLang's own reader of drafter configs, taken out of its wheel: the package itself needs a GPU stack."""
    try:
        files = importlib.metadata.files("sglang")
    except importlib.metadata.PackageNotFoundError:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip("sglang is not installed (`make test` installs its wheel)")
    file = next(file for file in files if str(file).endswith("sglang/srt/speculative/dflash_utils.py"))
    import dataclasses
    import logging
    import typing

    module = types.ModuleType("sglang_dflash_utils")
    # Dataclasses look their module up.
    sys.modules[module.__name__] = module
    namespace = {"__name__": module.__name__, "dataclass": dataclasses.dataclass, "Integral": Integral}
    namespace |= {"logging": logging, **vars(typing)}
    return functions_of(Path(file.locate()), namespace)["parse_dflash_draft_config"]


@pytest.mark.parametrize("name", [NAME, "noshift_p1_b4", "shift_p1_b16"])
def test_sglang_reads_the_flat_export(name, sglang_parser, tmp_path):
    convert(GOLDEN / name, tmp_path / "flat", to="flat")
    # As SGLang's server does: transformers' own class for the model type.
    parsed = sglang_parser(draft_hf_config=AutoConfig.from_pretrained(tmp_path / "flat"))
    public, _ = golden(name)
    nested = public["dflash_config"]
    assert parsed.is_domino
    assert parsed.shift_label is nested["shift_label"]
    assert parsed.pure_draft_prefix_len == 1
    assert (parsed.gru_hidden_dim, parsed.emb_dim) == (nested["gru_hidden_dim"], nested["emb_dim"])
    assert parsed.block_size == public["block_size"]
    assert parsed.mask_token_id == nested["mask_token_id"]
    taps = parsed.resolve_target_layer_ids(target_num_layers=public["num_target_layers"])
    assert taps == nested["target_layer_ids"]


def test_sglang_reads_a_dflash_export(sglang_parser, tmp_path):
    tiny_drafter(tiny_target(), with_head=False, shift_label=False).save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "flat", to="flat")
    parsed = sglang_parser(draft_hf_config=AutoConfig.from_pretrained(tmp_path / "flat"))
    assert not parsed.is_domino
    assert parsed.target_layer_ids == [1, 4]


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_specforge_loads_its_export(name, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        require_peer("specforge")
        from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig
    convert(GOLDEN / name, tmp_path / "specforge", to="specforge")
    config = AutoDraftModelConfig.from_file(str(tmp_path / "specforge" / "config.json"))
    assert config.block_size == golden(name)[0]["block_size"]
    peer, info = AutoDraftModel.from_pretrained(str(tmp_path / "specforge"), output_loading_info=True)
    assert type(peer).__name__ == "DominoDraftModel"
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    nested = golden(name)[0]["dflash_config"]
    assert (peer.shift_label, peer.pure_draft_prefix_len) == (nested["shift_label"], nested["pure_draft_prefix_len"])
    state = peer.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in golden(name)[1].items())


@pytest.fixture(scope="module")
def speculators_config_class():
    """The config class of the speculators package, without its models: those import a server and a data stack."""
    require_peer("loguru")
    spec = importlib.util.find_spec("speculators")
    if spec is None:
        require_peer("speculators")
    root = Path(spec.submodule_search_locations[0])
    packages = ("speculators", "speculators.models", "speculators.models.dflash")
    for name in packages:
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    config = importlib.import_module("speculators.config")
    sys.modules["speculators"].SpeculatorModelConfig = config.SpeculatorModelConfig
    config_class = importlib.import_module("speculators.models.dflash.config").DFlashSpeculatorConfig
    importlib.import_module("speculators.proposals.greedy")
    config.reload_schemas()
    yield config_class
    for name in [name for name in sys.modules if name.split(".")[0] == "speculators"]:
        del sys.modules[name]


@pytest.mark.parametrize("shift_label", [True, False])
def test_speculators_reads_its_export(shift_label, speculators_config_class, target_folder, tmp_path):
    name = NAME if shift_label else "noshift_p1_b4"
    convert(GOLDEN / name, tmp_path / "out", to="speculators", target=str(target_folder))
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    config = speculators_config_class.from_dict(raw)
    public, _ = golden(name)
    assert config.aux_hidden_state_layer_ids == [layer + 1 for layer in public["dflash_config"]["target_layer_ids"]]
    assert config.block_size == public["block_size"]
    assert config.draft_vocab_size == config.target_vocab_size == public["vocab_size"]
    assert config.sample_from_anchor is shift_label
    assert config.transformer_layer_config.rope_parameters["rope_theta"] == public["rope_theta"]
    method = config.speculators_config.proposal_methods[0]
    assert method.speculative_tokens == public["block_size"] - (0 if shift_label else 1)
    assert config.speculators_config.verifier.architectures == ["Qwen3ForCausalLM"]
    # What it writes is read again here.
    saved = json.loads(json.dumps(config.to_dict(), default=lambda dtype: str(dtype).removeprefix("torch.")))
    written = DominoDraftModel.config_class.from_dict(saved)
    assert written.dflash_config == DominoDraftModel.config_class.from_dict(public).dflash_config


def test_the_format_must_be_known(tmp_path):
    with pytest.raises(ValueError, match="must be one of ours, flat, specforge, speculators, got 'gguf'"):
        convert(GOLDEN / NAME, tmp_path / "out", to="gguf")


def test_a_drafter_of_our_own_form_keeps_everything(tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target, target_model="acme/target", rms_norm_eps=1e-5)
    drafter.save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "again")
    assert (report.renamed, report.added, report.dropped, report.config) == ([], [], [], [])
    for path in (tmp_path / "source").iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_files_that_are_not_what_they_should_be_are_named(tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(GOLDEN / GOLDEN_NAMES[0], broken)
    config = (broken / "config.json").read_text()
    for text, message in (
        ("", "config.json must be JSON"),
        ("[1]", "config.json must hold a JSON object, got list"),
        (json.dumps({**json.loads(config), "dflash_config": 7}), "`dflash_config` must be a dictionary, got 7"),
    ):
        (broken / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            convert(broken, tmp_path / "out")
    (broken / "config.json").write_text(config)
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="model.safetensors is no complete safetensors file"):
        convert(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()
