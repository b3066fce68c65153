"""Configuration of a Domino drafter, and the reader of every published spelling of it.

A drafter's `config.json` comes in several dialects (the public "flat" form, SpecForge, NeMo Automodel, ModelOpt,
vLLM speculators, verl-SpeCo, TorchSpec, and head-less DFlash). `canonical_fields` turns any of them into the fields of
`DominoConfig`; nothing else in the library knows that dialects exist. What is saved is always the same: model type
`domino`, our fields at top level and nested in `dflash_config`, so that both our code and SGLang read it.

Domino: https://huggingface.co/papers/2605.29707, sections 3.1 (backbone) and 3.2 (correction head).
"""

# No `from __future__ import annotations` here: string annotations switch off the field validation of `@strict`.

import copy
import warnings
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config


AUTO_MAP = {
    "AutoConfig": "configuration_domino.DominoConfig",
    "AutoModel": "modeling_domino.DominoDraftModel",
    "AutoModelForCausalLM": "modeling_domino.DominoForCausalLM",
}

# Other names of our fields: TorchSpec's, and speculators' (whose ids count the embedding as layer 0).
FIELD_ALIASES = {
    "gru_hidden_size": "gru_hidden_dim",
    "correction_rank": "emb_dim",
    "logits_correction_emb_dim": "emb_dim",
    "sample_from_anchor": "shift_label",
}
SHIFTED_TAPS = "aux_hidden_state_layer_ids"

PROJECTOR_ALIASES = {"causal_v5": "domino", "dflash": None}

# Keys of other members of the DFlash family that change what a drafter computes, and the value that changes nothing.
FOREIGN_FEATURES = {
    "use_bias_norm": False,
    "use_bias_gate": False,
    "conv_kernel_size": 0,
    "selector_rank": 0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
}

# (shift_label, pure_draft_prefix_len) that each source means when it leaves them out.
DEFAULTS_BY_SOURCE = {
    "official": (False, 0),
    "nemo": (False, 0),
    "specforge": (False, 0),
    "torchspec": (False, 0),
    "modelopt": (True, 1),
    "speculators": (True, 1),
    "verl": (True, 1),
}


def source_format(raw: dict[str, Any]) -> str:
    """Names the tool that wrote a raw `config.json`; decides only what absent keys mean (see `DEFAULTS_BY_SOURCE`)."""
    architectures = raw.get("architectures") or []
    if "speculators_model_type" in raw or "transformer_layer_config" in raw:
        return "speculators"
    if "gru_hidden_size" in raw or "correction_rank" in raw:
        return "torchspec"
    if raw.get("model_type") == "domino" and "dflash_config" not in raw:
        return "verl"
    if "Qwen3DFlashDraftModel" in architectures:
        return "nemo"
    if "DominoDraftModel" in architectures:
        return "specforge"
    if "auto_map" not in raw and "torch_dtype" in raw:
        return "modelopt"
    return "official"


def canonical_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Turns the `config.json` of any published drafter into the keyword arguments of `DominoConfig`.

    Reading twice changes nothing, so a dictionary that is already canonical passes through.

    Args:
        raw (`dict`): the parsed `config.json`; it is not modified.

    Returns:
        `dict`: `raw` with the drafter's fields at top level only, `model_type` "domino", and without foreign remote code.

    Raises:
        ValueError: if a key is given twice with different values, has the wrong kind of value, or names a drafter that
            this code cannot run.
    """
    source = source_format(raw)
    # Deep, because transformers completes the rope dictionary in place.
    fields = copy.deepcopy(raw)
    nested = fields.pop("dflash_config", None) or {}
    if not isinstance(nested, dict):
        raise ValueError(f"`dflash_config` must be a dictionary, got {nested!r}.")
    for scope in (fields, nested):
        _rename_aliases(scope)
    if layer_config := fields.pop("transformer_layer_config", None):
        fields = {**layer_config, **fields}
    for key, value in nested.items():
        if key in fields and fields[key] is not None and value is not None and fields[key] != value:
            raise ValueError(
                f"The drafter's config gives `{key}` twice: {fields[key]!r} at top level and {value!r} in "
                "`dflash_config`; remove the wrong one."
            )
        if value is not None or key not in fields:
            fields[key] = value
    fields["model_type"] = "domino"
    # Foreign remote code must not follow the weights into what we save.
    fields.pop("auto_map", None)
    for key in ("speculators_model_type", "speculators_version", "sliding_window_non_causal"):
        fields.pop(key, None)
    if source == "speculators" and fields.get("block_size") is None:
        warnings.warn("The drafter's config gives no `block_size`; using speculators' default of 8.", stacklevel=2)
        fields["block_size"] = 8
    verifier = (fields.pop("speculators_config", None) or {}).get("verifier") or {}
    if verifier.get("name_or_path"):
        fields.setdefault("target_model", verifier["name_or_path"])
    if source == "torchspec":
        # There `num_target_layers` counts the taps, and the GRU alone has biases.
        fields["num_target_layers"] = fields.pop("target_num_hidden_layers", None)
        fields.setdefault("gru_bias", True)
    _read_head(fields, source)
    # transformers 5 reads `rope_parameters`; the two older keys are written beside it for other readers.
    if fields.get("rope_parameters") is not None:
        fields.pop("rope_theta", None)
        fields.pop("rope_scaling", None)
    return fields


def _rename_aliases(scope: dict[str, Any]) -> None:
    for alias, name in FIELD_ALIASES.items():
        if alias in scope:
            value = scope.pop(alias)
            if scope.setdefault(name, value) != value:
                raise ValueError(
                    f"The drafter's config gives `{name}` as {scope[name]!r} and `{alias}` as {value!r}; remove one."
                )
    if SHIFTED_TAPS in scope:
        taps = [index - 1 for index in scope.pop(SHIFTED_TAPS)]
        if scope.setdefault("target_layer_ids", taps) != taps:
            raise ValueError(
                f"The drafter's config gives `target_layer_ids` {scope['target_layer_ids']} and `{SHIFTED_TAPS}` that "
                f"means {taps}; remove one."
            )


def _read_head(fields: dict[str, Any], source: str) -> None:
    """Settles `projector_type` and what absent head keys mean; a drafter without head keys is a DFlash drafter."""
    projector = fields.get("projector_type")
    projector = PROJECTOR_ALIASES.get(projector, projector)
    # These sources tell their Domino drafters by class alone. A null that an earlier reading left stays one.
    by_class = source in ("torchspec", "verl", "speculators") and "projector_type" not in fields
    if by_class and fields.get("gru_hidden_dim") is not None:
        projector = "domino"
    if projector not in ("domino", None):
        raise ValueError(
            f"`projector_type` must be 'domino' (or absent for a DFlash drafter without a head), got {projector!r}; "
            "this drafter needs the code of the project that made it."
        )
    fields["projector_type"] = projector
    for key, neutral in FOREIGN_FEATURES.items():
        value = fields.pop(key, None)
        if value is not None and value != neutral:
            raise ValueError(
                f"`{key}` must be absent or {str(neutral).lower()}, got {str(value).lower()}: that variant of the "
                "drafter is not supported."
            )
    draft_vocab = fields.pop("draft_vocab_size", None)
    if draft_vocab is not None and draft_vocab != fields.get("vocab_size", draft_vocab):
        raise ValueError(
            f"`draft_vocab_size` must equal the target's vocabulary ({fields.get('vocab_size')}), got {draft_vocab}: "
            "drafters with a reduced output vocabulary are not supported."
        )
    if projector is None:
        fields.setdefault("shift_label", False)
        fields.setdefault("pure_draft_prefix_len", 0)
        return
    absent = [key for key in ("shift_label", "pure_draft_prefix_len") if fields.get(key) is None]
    if absent:
        shift_label, prefix_len = DEFAULTS_BY_SOURCE[source]
        defaults = {"shift_label": shift_label, "pure_draft_prefix_len": prefix_len}
        warnings.warn(
            f"The drafter's config does not give {', '.join(f'`{key}`' for key in absent)}; using the defaults of its "
            f"source format ({source}): {', '.join(f'{key}={defaults[key]}' for key in absent)}. A wrong value halves "
            "the acceptance without any error: check it against the training command.",
            stacklevel=2,
        )
        fields.update({key: defaults[key] for key in absent})


def how_to_use(target_model: str | None) -> str:
    """What to tell someone who asks a drafter to write."""
    return (
        "This is a drafter, not a language model: load its target and call "
        f'`AutoModelForCausalLM.from_pretrained("{target_model or "<target id>"}")'
        ".generate(**inputs, assistant_model=drafter)`."
    )


@strict
class DominoConfig(Qwen3Config):
    r"""Configuration of a [`DominoDraftModel`].

    Args (beside those of `Qwen3Config`, which describe the backbone):
        block_size (`int`): tokens of one draft block, the anchor included (K).
        target_layer_ids (`list[int]`): decoder layers of the target whose OUTPUT is read, 0-based (L of them).
        mask_token_id (`int`): the token that fills the block behind the anchor.
        num_target_layers (`int`, *optional*): depth of the target, checked when the two meet.
        projector_type (`str`, *optional*): "domino", or `None` for a DFlash drafter without a correction head.
        shift_label (`bool`): whether slot k of the block predicts the token after position anchor + k (`True`), or the
            token at it, leaving slot 0 unused (`False`).
        pure_draft_prefix_len (`int`): drafts at the head of the block that use the base logits alone (P).
        gru_hidden_dim (`int`): width of the prefix GRU (G). Only with a head.
        emb_dim (`int`): rank of the correction (R). Only with a head.
        gru_bias (`bool`): whether the GRU carries biases.
        target_model (`str`, *optional*): Hub id of the target that the drafter was trained for.
        draft_candidates (`int`, *optional*): tokens per draft that the head corrects, the likeliest of the base logits; 0
            for the whole vocabulary. By default 64 on a CPU and all elsewhere (see `resolve_options`).
        draft_vocab (`int`, *optional*): draft from so many of the most frequent tokens, ranked in `draft_vocab.json`.
        draft_temperatures (`list[float]`, *optional*): what each draft's logits are divided by, for a drafter that is too
            sure or too unsure of itself at some depth; made by `domino calibrate`.

    Raises:
        ValueError: one sentence that names the field, what is required and what was given.
    """

    model_type = "domino"
    has_no_defaults_at_init = True

    block_size: int | None = None
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    num_target_layers: int | None = None
    projector_type: str | None = None
    shift_label: bool = False
    pure_draft_prefix_len: int = 0
    gru_hidden_dim: int | None = None
    emb_dim: int | None = None
    gru_bias: bool = False
    target_model: str | None = None
    draft_candidates: int | None = None
    draft_vocab: int | None = None
    draft_temperatures: list[float] | None = None

    def __post_init__(self, **kwargs):
        if "dflash_config" in kwargs:
            raise ValueError(
                "`dflash_config` must be read with `DominoConfig.from_dict`, which settles it against the top-level "
                "keys; the constructor takes the drafter's fields by name."
            )
        kwargs.pop("auto_map", None)
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Checks the fields against each other; the model asks again, as `from_pretrained(..., block_size=8)` sets late."""
        self._check_block()
        self._check_taps()
        self._check_head()
        self._check_layers()
        self._check_drafting()

    @property
    def has_head(self) -> bool:
        """Whether the drafter carries the Domino correction head."""
        return self.projector_type is not None

    @property
    def first_draft_slot(self) -> int:
        """Slot of the block that predicts the first draft: 0, or 1 when `shift_label` is false."""
        return 0 if self.shift_label else 1

    @property
    def num_draft_tokens(self) -> int:
        """Drafts that one block yields: K with `shift_label`, K - 1 without."""
        return self.block_size - self.first_draft_slot

    @property
    def auto_map(self) -> dict[str, str]:
        """Where the Auto classes find the code: always beside the weights."""
        return dict(AUTO_MAP)

    @property
    def dflash_config(self) -> dict[str, Any]:
        """The nested block that SGLang and the published loaders read."""
        nested = {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "shift_label": self.shift_label,
        }
        if self.has_head:
            nested.update(
                projector_type=self.projector_type,
                pure_draft_prefix_len=self.pure_draft_prefix_len,
                gru_hidden_dim=self.gru_hidden_dim,
                emb_dim=self.emb_dim,
            )
        return nested

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        in_pipeline = kwargs.get("_from_pipeline") is not None
        raw, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        fields = canonical_fields(raw)
        if in_pipeline:
            # Here, because a pipeline buries what the model itself raises while loading under its own traces.
            raise ValueError(how_to_use(fields.get("target_model")))
        return fields, kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        return super().from_dict(canonical_fields(config_dict), **kwargs)

    @classmethod
    def from_json_file(cls, json_file):
        return cls(**canonical_fields(cls._dict_from_json_file(json_file)))

    def to_dict(self) -> dict[str, Any]:
        """The saved form (spec of the public checkpoints): readable by our code, by SGLang and by older loaders."""
        output = super().to_dict()
        output["architectures"] = ["DFlashDraftModel"]
        output["auto_map"] = self.auto_map
        output["dflash_config"] = self.dflash_config
        if not self.has_head:
            # A head-less drafter is recognised by the absence of these keys, also by other loaders.
            for key in ("projector_type", "gru_hidden_dim", "emb_dim", "gru_bias", "pure_draft_prefix_len"):
                output.pop(key, None)
        for key in ("draft_candidates", "draft_vocab", "draft_temperatures"):
            if output.get(key) is None:
                output.pop(key, None)
        rope = dict(self.rope_parameters or {})
        output["rope_theta"] = rope.pop("rope_theta", None)
        output["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
        return output

    def _check_block(self) -> None:
        if self.block_size is None or self.block_size < 1:
            raise ValueError(f"`block_size` must be a positive integer, got {self.block_size}.")
        if self.num_draft_tokens < 1:
            raise ValueError(
                f"`block_size` must be at least 2 when `shift_label` is false (slot 0 is unused), got {self.block_size}."
            )
        if self.mask_token_id is None:
            raise ValueError(
                "`mask_token_id` must be given: it is the token the drafter was trained with, and no default (pad, eos) "
                "can stand in for it; take it from the drafter's training config."
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` must lie in the vocabulary of {self.vocab_size} tokens, got {self.mask_token_id}."
            )

    def _check_taps(self) -> None:
        taps = self.target_layer_ids
        if not taps:
            raise ValueError(
                "`target_layer_ids` must list the target's decoder layers that the drafter reads (0-based, their "
                f"output), got {taps}; it cannot be guessed, take it from the drafter's training config."
            )
        if len(set(taps)) != len(taps) or min(taps) < 0:
            raise ValueError(f"`target_layer_ids` must be distinct and not negative, got {taps}.")
        if self.num_target_layers is not None and max(taps) >= self.num_target_layers:
            raise ValueError(
                f"`target_layer_ids` must lie in 0..{self.num_target_layers - 1} (`num_target_layers` is "
                f"{self.num_target_layers}), got {taps}."
            )

    def _check_head(self) -> None:
        if not self.has_head:
            if self.gru_hidden_dim is not None or self.emb_dim is not None:
                raise ValueError(
                    "`projector_type` must be 'domino' when `gru_hidden_dim` or `emb_dim` is given, got None; remove "
                    "them for a DFlash drafter without a head."
                )
            return
        if self.projector_type != "domino":
            raise ValueError(f"`projector_type` must be 'domino' or absent, got {self.projector_type!r}.")
        for key in ("gru_hidden_dim", "emb_dim"):
            if getattr(self, key) is None or getattr(self, key) < 1:
                raise ValueError(f"`{key}` must be a positive integer for a Domino head, got {getattr(self, key)}.")
        if not 0 <= self.pure_draft_prefix_len <= self.num_draft_tokens:
            raise ValueError(
                f"`pure_draft_prefix_len` must lie in 0..{self.num_draft_tokens} (the drafts of one block), got "
                f"{self.pure_draft_prefix_len}."
            )

    def _check_layers(self) -> None:
        others = sorted(set(self.layer_types or []) - {"full_attention"})
        if others:
            raise ValueError(
                f"`layer_types` must be 'full_attention' for every layer of a drafter, got {', '.join(others)} too: "
                "drafters with other attention are not supported."
            )

    def _check_drafting(self) -> None:
        for key, least in (("draft_candidates", 0), ("draft_vocab", 1)):
            if getattr(self, key) is not None and getattr(self, key) < least:
                raise ValueError(f"`{key}` must be at least {least}, got {getattr(self, key)}.")
        temperatures = self.draft_temperatures
        if temperatures is not None and (len(temperatures) != self.num_draft_tokens or not min(temperatures) > 0):
            raise ValueError(
                f"`draft_temperatures` must be {self.num_draft_tokens} positive numbers (the drafts of one block), got "
                f"{temperatures}."
            )
