"""The configuration: every published spelling reads to the same fields, and what is saved carries all of them."""

from __future__ import annotations

import copy
import json
import types
import warnings
from pathlib import Path

import pytest
import transformers
from conftest import GOLDEN, GOLDEN_NAMES, drafter_config, tiny_drafter, tiny_target
from huggingface_hub import HfApi, ModelCard
from transformers import AutoConfig

from modeling_domino import DominoConfig, DominoDraftModel
from modeling_domino.configuration_domino import FOREIGN_FEATURES, canonical_fields


# The fields that the dialects put at top level, inside `dflash_config`, or in both places.
DRAFTER_FIELDS = (
    "block_size",
    "num_target_layers",
    "target_layer_ids",
    "mask_token_id",
    "projector_type",
    "shift_label",
    "pure_draft_prefix_len",
    "gru_hidden_dim",
    "emb_dim",
)
BACKBONE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
SIZES = {"gru_hidden_dim": 12, "emb_dim": 6}
RULES = {"shift_label": True, "pure_draft_prefix_len": 1}
TAPS = {"mask_token_id": 63, "target_layer_ids": [1, 4]}
NESTED = {"projector_type": "domino", **TAPS, **RULES, **SIZES}
BLOCK = {"block_size": 8, "num_target_layers": 6}

# One config.json per source, as the tool writes it.
DIALECTS = {
    "official": {
        **BACKBONE,
        **BLOCK,
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "emb_dim": 6,
        "dtype": "bfloat16",
        "dflash_config": NESTED,
    },
    "official_legacy_projector": {
        **BACKBONE,
        **BLOCK,
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "torch_dtype": "bfloat16",
        "dflash_config": {**NESTED, "projector_type": "causal_v5"},
    },
    "specforge": {
        **BACKBONE,
        **BLOCK,
        "model_type": "qwen3",
        "architectures": ["DominoDraftModel"],
        "auto_map": {"AutoModel": "domino.DominoDraftModel"},
        "emb_dim": 6,
        "dflash_config": NESTED,
    },
    "speculators": {
        **BLOCK,
        **RULES,
        **SIZES,
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "Qwen/Qwen3-4B"}},
        "architectures": ["DFlashSpeculator"],
        "projector_type": "domino",
        "mask_token_id": 63,
        "aux_hidden_state_layer_ids": [2, 5],
        "draft_vocab_size": 64,
        "transformer_layer_config": {**BACKBONE, "model_type": "qwen3"},
    },
    "speculators_domino": {
        **BLOCK,
        "speculators_model_type": "domino",
        "architectures": ["DominoSpeculator"],
        "gru_hidden_dim": 12,
        "logits_correction_emb_dim": 6,
        "sample_from_anchor": True,
        "pure_draft_prefix_len": 1,
        "mask_token_id": 63,
        "aux_hidden_state_layer_ids": [2, 5],
        "draft_vocab_size": 64,
        "transformer_layer_config": {**BACKBONE, "model_type": "qwen3"},
    },
    "nemo": {
        **BACKBONE,
        "num_target_layers": 6,
        "model_type": "qwen3",
        "architectures": ["Qwen3DFlashDraftModel"],
        "dflash_config": {**NESTED, "block_size": 8},
    },
    "modelopt": {
        **BACKBONE,
        **BLOCK,
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "torch_dtype": "bfloat16",
        "dflash_config": NESTED,
    },
    "verl": {**BACKBONE, **BLOCK, **NESTED, "model_type": "domino", "architectures": ["DominoForCausalLM"]},
    "verl_without_projector": {
        **BACKBONE,
        **BLOCK,
        **TAPS,
        **RULES,
        **SIZES,
        "model_type": "domino",
        "architectures": ["DominoForCausalLM"],
    },
    # There, `num_target_layers` counts the taps.
    "torchspec": {
        **BACKBONE,
        **RULES,
        **TAPS,
        "block_size": 8,
        "model_type": "domino",
        "architectures": ["DominoDraftModel"],
        "num_target_layers": 2,
        "target_num_hidden_layers": 6,
        "target_hidden_size": 32,
        "gru_hidden_size": 12,
        "correction_rank": 6,
    },
}
EXPECTED = {**BLOCK, **TAPS, **RULES, **SIZES, "projector_type": "domino"}

DFLASH = {
    **BACKBONE,
    **BLOCK,
    "model_type": "qwen3",
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "dtype": "bfloat16",
    "dflash_config": TAPS,
}


def drop(raw: dict, *keys: str) -> dict:
    """A copy without these keys, wherever they stand."""
    raw = {key: value for key, value in copy.deepcopy(raw).items() if key not in keys}
    if "dflash_config" in raw:
        raw["dflash_config"] = {key: value for key, value in raw["dflash_config"].items() if key not in keys}
    return raw


def write(folder, raw: dict):
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def is_one_sentence(error: BaseException) -> bool:
    text = str(error)
    return "\n" not in text and text.endswith(".") and ". " not in text


@pytest.mark.parametrize("source", DIALECTS)
def test_every_dialect_reads_to_the_same_fields(source, tmp_path):
    raw = copy.deepcopy(DIALECTS[source])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_dict = DominoConfig.from_dict(raw)
        from_folder = DominoConfig.from_pretrained(write(tmp_path, raw))
        from_file = DominoConfig.from_json_file(tmp_path / "config.json")
    for config in (from_dict, from_folder, from_file):
        assert {key: getattr(config, key) for key in DRAFTER_FIELDS} == EXPECTED
        assert {key: getattr(config, key) for key in ("hidden_size", "head_dim", "vocab_size")} == {
            key: BACKBONE[key] for key in ("hidden_size", "head_dim", "vocab_size")
        }
        assert config.model_type == "domino"
        assert config.rope_parameters["rope_theta"] == 500000.0
        assert config.gru_bias is (source == "torchspec")
    assert raw == DIALECTS[source], "the caller's dictionary was modified"


@pytest.mark.parametrize("source", DIALECTS)
def test_reading_twice_changes_nothing(source):
    once = canonical_fields(DIALECTS[source])
    assert canonical_fields(once) == once


def test_the_torch_dtype_of_older_configs_is_kept(tmp_path):
    config = DominoConfig.from_pretrained(write(tmp_path, DIALECTS["modelopt"]))
    assert str(config.dtype) in ("bfloat16", "torch.bfloat16")


def test_the_target_of_a_speculators_config_is_kept():
    assert DominoConfig.from_dict(DIALECTS["speculators"]).target_model == "Qwen/Qwen3-4B"


@pytest.mark.parametrize(
    "source, defaults",
    [
        ("official", (False, 0)),
        ("nemo", (False, 0)),
        ("specforge", (False, 0)),
        ("torchspec", (False, 0)),
        ("modelopt", (True, 1)),
        ("speculators", (True, 1)),
        ("speculators_domino", (True, 1)),
        ("verl", (True, 1)),
    ],
)
def test_absent_rules_take_the_defaults_of_their_source_and_say_so(source, defaults, tmp_path):
    raw = drop(DIALECTS[source], "shift_label", "pure_draft_prefix_len", "sample_from_anchor")
    with pytest.warns(UserWarning, match="does not give `shift_label`, `pure_draft_prefix_len`") as caught:
        config = DominoConfig.from_pretrained(write(tmp_path, raw))
    assert (config.shift_label, config.pure_draft_prefix_len) == defaults
    assert len([w for w in caught if "does not give" in str(w.message)]) == 1, "one warning per read"

    with pytest.warns(UserWarning, match=r"does not give `pure_draft_prefix_len`; .*pure_draft_prefix_len="):
        assert DominoConfig.from_dict(drop(DIALECTS[source], "pure_draft_prefix_len")).shift_label is True


def test_speculators_default_block_is_mentioned():
    with pytest.warns(UserWarning, match="no `block_size`; using speculators' default of 8"):
        assert DominoConfig.from_dict(drop(DIALECTS["speculators"], "block_size")).block_size == 8


def test_a_null_counts_as_absent():
    raw = {**copy.deepcopy(DIALECTS["official"]), "target_layer_ids": None, "emb_dim": None}
    assert DominoConfig.from_dict(raw).target_layer_ids == [1, 4]


def test_an_unknown_key_is_kept():
    assert DominoConfig.from_dict(top(training_note="x")).training_note == "x"


# ---- refusals


def nested(**changes) -> dict:
    raw = copy.deepcopy(DIALECTS["official"])
    raw["dflash_config"].update(changes)
    return raw


def top(**changes) -> dict:
    return {**copy.deepcopy(DIALECTS["official"]), **changes}


REFUSED = {
    "emb_dim twice": (top(emb_dim=7), r"`emb_dim` twice: 7 at top level and 6 in `dflash_config`"),
    "block_size twice": (nested(block_size=16), r"`block_size` twice: 8 at top level and 16"),
    "taps twice": (top(target_layer_ids=[0, 3]), r"`target_layer_ids` twice"),
    "taps and shifted taps": (
        {**DIALECTS["speculators"], "target_layer_ids": [2, 5]},
        r"`target_layer_ids` \[2, 5\] and `aux_hidden_state_layer_ids` that means \[1, 4\]",
    ),
    "alias and name": (
        {**DIALECTS["torchspec"], "gru_hidden_dim": 13},
        r"`gru_hidden_dim` as 13 and `gru_hidden_size`",
    ),
    "other projector": (nested(projector_type="dspark"), r"`projector_type` must be 'domino'.*'dspark'"),
    "bias norm": (nested(use_bias_norm=True), r"`use_bias_norm` must be absent or false"),
    "bias gate": (nested(use_bias_gate=True), r"`use_bias_gate` must be absent or false"),
    "reduced vocabulary": (
        {**DIALECTS["speculators"], "draft_vocab_size": 32},
        r"`draft_vocab_size` must equal .*\(64\), got 32",
    ),
    "no mask token": (drop(DIALECTS["official"], "mask_token_id"), r"`mask_token_id` must be given"),
    "mask token outside": (
        nested(mask_token_id=64),
        r"`mask_token_id` must lie in the vocabulary of 64 tokens, got 64",
    ),
    "no taps": (drop(DIALECTS["official"], "target_layer_ids"), r"`target_layer_ids` must list"),
    "empty taps": (nested(target_layer_ids=[]), r"`target_layer_ids` must list"),
    "repeated taps": (nested(target_layer_ids=[1, 1]), r"`target_layer_ids` must be distinct"),
    "negative taps": (nested(target_layer_ids=[-1, 1]), r"`target_layer_ids` must be distinct and not negative"),
    "deep taps": (nested(target_layer_ids=[1, 6]), r"`target_layer_ids` must lie in 0..5 .* got \[1, 6\]"),
    "no block": (drop(DIALECTS["official"], "block_size"), r"`block_size` must be a positive integer, got None"),
    "empty block": (top(block_size=0), r"`block_size` must be a positive integer, got 0"),
    "one slot without shift": (
        {**nested(shift_label=False, pure_draft_prefix_len=0), "block_size": 1},
        r"`block_size` must be at least 2 when `shift_label` is false",
    ),
    "prefix too long": (nested(pure_draft_prefix_len=9), r"`pure_draft_prefix_len` must lie in 0..8"),
    "negative prefix": (nested(pure_draft_prefix_len=-1), r"`pure_draft_prefix_len` must lie in 0..8"),
    "no GRU width": (drop(DIALECTS["official"], "gru_hidden_dim"), r"`gru_hidden_dim` must be a positive integer"),
    "no rank": (drop(DIALECTS["official"], "emb_dim"), r"`emb_dim` must be a positive integer"),
    "head without projector": (
        drop(DIALECTS["official"], "projector_type"),
        r"`projector_type` must be 'domino' when",
    ),
    "sliding layers": (
        top(layer_types=["full_attention", "sliding_attention"], use_sliding_window=True, sliding_window=4),
        r"`layer_types` must be 'full_attention' .*sliding_attention",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_are_one_sentence(case, tmp_path):
    raw, message = REFUSED[case]
    for read in (DominoConfig.from_dict, lambda raw: DominoConfig.from_pretrained(write(tmp_path, raw))):
        with pytest.raises(ValueError, match=message) as caught:
            read(copy.deepcopy(raw))
        assert is_one_sentence(caught.value), str(caught.value)


@pytest.mark.parametrize("key", FOREIGN_FEATURES)
def test_features_of_other_drafters_are_refused_unless_switched_off(key):
    neutral = FOREIGN_FEATURES[key]
    for scope in (top, nested):
        assert DominoConfig.from_dict(scope(**{key: neutral})).has_head
        with pytest.raises(ValueError, match=f"`{key}` must be absent or {str(neutral).lower()}, got ") as caught:
            DominoConfig.from_dict(scope(**{key: 3}))
        assert is_one_sentence(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": "four"},
        {"shift_label": "true"},
        {"shift_label": 1},
        {"mask_token_id": "<mask>"},
        {"target_layer_ids": "1,4"},
        {"target_layer_ids": ["1", "4"]},
        {"emb_dim": 6.5},
        {"gru_bias": "no"},
    ],
)
def test_fields_are_typed(changes):
    fields = canonical_fields(DIALECTS["official"])
    with pytest.raises(Exception, match=next(iter(changes))) as caught:
        DominoConfig(**{**fields, **changes})
    assert "Strict" in type(caught.value).__name__ or isinstance(caught.value, (TypeError, ValueError))


def test_the_constructor_takes_no_nested_block():
    with pytest.raises(ValueError, match="`dflash_config` must be read with `DominoConfig.from_dict`"):
        DominoConfig(**DIALECTS["official"])


# ---- what is saved


def check_saved(raw: dict, config: DominoConfig) -> None:
    """The keys that other readers look for, each where it looks for it."""
    assert raw["model_type"] == "domino"
    assert raw["architectures"] == ["DFlashDraftModel"]
    assert raw["auto_map"] == {
        "AutoConfig": "configuration_domino.DominoConfig",
        "AutoModel": "modeling_domino.DominoDraftModel",
        "AutoModelForCausalLM": "modeling_domino.DominoForCausalLM",
    }
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 500000.0
    assert raw["rope_scaling"] is None
    assert raw["block_size"] == 8 and raw["num_target_layers"] == 6
    if config.has_head:
        assert raw["dflash_config"] == NESTED
        assert {key: raw[key] for key in NESTED} == NESTED
    else:
        assert raw["dflash_config"] == {**TAPS, "shift_label": False}
        assert not {"projector_type", "gru_hidden_dim", "emb_dim"} & (raw.keys() | raw["dflash_config"].keys())


def saved_forms(config: DominoConfig, tmp_path) -> dict[str, dict]:
    model = DominoDraftModel(config)
    config.save_pretrained(tmp_path / "config")
    model.save_pretrained(tmp_path / "model")
    config.to_json_file(tmp_path / "diff.json")
    config.to_json_file(tmp_path / "full.json", use_diff=False)
    return {
        "to_dict": config.to_dict(),
        "to_diff_dict": config.to_diff_dict(),
        "json": json.loads(config.to_json_string()),
        "json without diff": json.loads(config.to_json_string(use_diff=False)),
        "diff file": json.loads((tmp_path / "diff.json").read_text()),
        "full file": json.loads((tmp_path / "full.json").read_text()),
        "config.save_pretrained": json.loads((tmp_path / "config" / "config.json").read_text()),
        "model.save_pretrained": json.loads((tmp_path / "model" / "config.json").read_text()),
    }


@pytest.mark.parametrize("raw", [DIALECTS["official"], DFLASH], ids=["domino", "dflash"])
def test_every_way_of_saving_carries_both_forms(raw, tmp_path):
    config = DominoConfig.from_dict(copy.deepcopy(raw))
    for way, saved in saved_forms(config, tmp_path).items():
        check_saved(saved, config)
        again = DominoConfig.from_dict(saved)
        assert again.to_dict() == config.to_dict() | {"dtype": again.to_dict().get("dtype")}, way


def test_a_pushed_configuration_carries_both_forms_too(monkeypatch):
    """`push_to_hub` up to the commit, which is kept here; that of a drafter refuses and names `domino push`."""
    config = DominoConfig.from_dict(copy.deepcopy(DIALECTS["official"]))
    commits = []

    def commit(*args, operations, **kwargs):
        commits.append({op.path_in_repo: Path(op.path_or_fileobj).read_bytes() for op in operations})

    def create(*args, **kwargs):
        return types.SimpleNamespace(repo_id="org/drafter")

    hub = transformers.utils.hub
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *args, **kwargs: ModelCard("# Drafter"))
    # Up to some release these are functions of the module, later methods of its client.
    for name, stand_in in (("create_repo", create), ("create_commit", commit)):
        monkeypatch.setattr(hub, name, stand_in, raising=False)
        monkeypatch.setattr(HfApi, name, lambda self, *args, stand_in=stand_in, **kwargs: stand_in(*args, **kwargs))
    config.push_to_hub("org/drafter")
    (files,) = commits
    check_saved(json.loads(files["config.json"]), config)
    with pytest.raises(ValueError, match="domino push"):
        DominoDraftModel(config).push_to_hub("org/drafter")
    assert len(commits) == 1


@pytest.mark.parametrize("raw", [*DIALECTS.values(), DFLASH], ids=[*DIALECTS, "dflash"])
def test_a_round_trip_is_exact_also_the_second_time(raw, tmp_path):
    config = DominoConfig.from_dict(copy.deepcopy(raw))
    texts = []
    for i in range(3):
        config.save_pretrained(tmp_path / str(i))
        texts.append((tmp_path / str(i) / "config.json").read_text())
        loaded = DominoConfig.from_pretrained(tmp_path / str(i))
        assert {key: getattr(loaded, key) for key in DRAFTER_FIELDS} == {
            key: getattr(config, key) for key in DRAFTER_FIELDS
        }
        assert loaded.rope_parameters == config.rope_parameters
        config = loaded
    assert texts[0] == texts[1] == texts[2]


def test_a_model_keeps_the_saved_form_over_two_loads(tmp_path):
    model = tiny_drafter(tiny_target())
    model.save_pretrained(tmp_path / "0")
    second = DominoDraftModel.from_pretrained(tmp_path / "0")
    second.save_pretrained(tmp_path / "1")
    first, again = (json.loads((tmp_path / i / "config.json").read_text()) for i in "01")
    assert first == again
    assert again["architectures"] == ["DFlashDraftModel"]


def test_rope_scaling_survives_for_old_and_new_readers(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    raw = {**copy.deepcopy(DIALECTS["official"]), "rope_scaling": scaling}
    config = DominoConfig.from_dict(raw)
    saved = json.loads(config.to_json_string())
    assert saved["rope_theta"] == 500000.0
    assert {key: saved["rope_scaling"][key] for key in scaling} == scaling
    assert {key: saved["rope_parameters"][key] for key in scaling} == scaling
    assert DominoConfig.from_dict(saved).rope_parameters == config.rope_parameters


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_configs_read(name):
    raw = json.loads((GOLDEN / name / "config.json").read_text())
    config = DominoConfig.from_pretrained(GOLDEN / name)
    assert config.block_size == raw["block_size"]
    assert config.dflash_config == raw["dflash_config"]


# ---- DFlash, and reading back


def test_a_config_without_projector_is_a_dflash_drafter():
    config = DominoConfig.from_dict(DFLASH)
    assert not config.has_head
    assert config.shift_label is False and config.num_draft_tokens == 7
    assert config.dflash_config == {**TAPS, "shift_label": False}


def test_dflash_config_stays_readable_as_a_dictionary():
    config = drafter_config(tiny_target())
    assert isinstance(config.dflash_config, dict)
    assert config.dflash_config["target_layer_ids"] == [1, 4]
    config.dflash_config["target_layer_ids"].append(5)
    assert config.target_layer_ids == [1, 4], "the nested block is a copy"


@pytest.mark.parametrize("shift_label, first, drafts", [(True, 0, 8), (False, 1, 7)])
def test_slots_follow_the_shift(shift_label, first, drafts):
    config = drafter_config(tiny_target(), block_size=8, shift_label=shift_label)
    assert (config.first_draft_slot, config.num_draft_tokens) == (first, drafts)


def test_auto_config_knows_the_model_type(tmp_path):
    drafter_config(tiny_target()).save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is DominoConfig


def test_a_config_deep_copies():
    config = DominoConfig.from_dict(DFLASH)
    assert copy.deepcopy(config).to_dict() == config.to_dict()
