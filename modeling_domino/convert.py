"""Conversion of drafter checkpoints between the published formats: `domino convert SRC DST --to FORMAT`.

Reading is what `from_pretrained` does (`canonical_fields` for the config, `CHECKPOINT_NAMES` for the tensors); this file
adds the writers and the rules around them: nothing unknown is dropped silently, every change is reported, tensors keep
their bits, and the destination appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, Qwen3Config

from .configuration_domino import DominoConfig, canonical_fields
from .modeling_domino import BORROWED_NAMES, DominoDraftModel, parameter_name, require_tensors
from .target_domino import check_pair
from .vocabulary_domino import DRAFT_VOCAB_FILE


FORMATS = ("ours", "flat", "specforge", "speculators")

# Older spellings that the config class reads.
READ_KEYS = {"model_type", "rope_scaling", "rope_theta", "torch_dtype"}
# Keys that tools write and no drafter needs: what a conversion may drop without asking.
BOOKKEEPING_KEYS = {
    "_name_or_path",
    "conv_group_size",
    "mask_token",
    "num_context_layers",
    "selector_top_k",
    "target_hidden_size",
}
# Settings of the training run.
TRAINING_KEYS = {
    "lambda_base_decay_ratio",
    "lambda_base_decay_steps",
    "lambda_base_start",
    "loss_decay_gamma",
    "num_anchors",
}

HEAD_PREFIXES = ("prefix_gru.", "embed_proj.")


@dataclass
class Report:
    """What a conversion changed.

    Args:
        renamed: old and new name of each tensor that was renamed.
        added, dropped: tensors that only one side has, with the reason.
        cast: dtype changes of tensors.
        config: one line per config key that was added, dropped or changed.
        left: files of the source that are not part of a conversion.
    """

    source: str
    destination: str
    format: str
    num_tensors: int = 0
    renamed: list[tuple[str, str]] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    config: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """The report as text, one change a line."""
        for old, new in self.renamed:
            yield f"tensor  renamed  {old} -> {new}"
        for kind in ("added", "dropped", "cast"):
            for name in getattr(self, kind):
                yield f"tensor  {kind:7}  {name}"
        for change in self.config:
            yield f"config  {change}"
        for name in self.left:
            yield f"file    left     {name}"
        yield f"{self.source} -> {self.destination} ({self.format}, {self.num_tensors} tensors of the drafter)"


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: str = "ours",
    target: str | None = None,
    force: bool = False,
    ignore: Iterable[str] = (),
    revision: str | None = None,
) -> Report:
    """Converts a drafter.

    Args:
        source (`str` or `Path`): a folder or a Hub id, in any published format.
        destination (`str` or `Path`): the folder to write; it must not exist.
        to (`str`): "ours", "flat" (what SGLang loads), "specforge" or "speculators".
        target (`str`, *optional*): folder or Hub id of the target: the pair is checked, the config names it, and
            "speculators" stores its embeddings and output head.
        force (`bool`): replace `destination` if it holds a checkpoint.
        ignore: config keys to drop although they are unknown here.
        revision (`str`, *optional*): of the source on the Hub.

    Returns:
        [`Report`].

    Raises:
        ValueError: if the source is not understood completely, or the format cannot hold it; nothing is written.
    """
    if to not in FORMATS:
        raise ValueError(f"The format must be one of {', '.join(FORMATS)}, got {to!r}.")
    destination = Path(destination)
    _check_destination(destination, Path(source), force)
    folder = _local_folder(source, revision)
    raw = _read_raw_config(folder / "config.json")
    report = Report(str(source), str(destination), to)
    tensors = _read_tensors(folder, report)
    config = _read_config(raw, tensors, set(ignore))
    if target is not None:
        _fit_to_target(config, target)
    _check_tensors(source, config, tensors)
    report.left = sorted(
        path.name
        for path in folder.iterdir()
        if path.name != "config.json" and not path.name.startswith("model.safetensors")
    )
    report.num_tensors = len(tensors)
    with written_at_once(destination) as work:
        _WRITERS[to](work, config, tensors, report, target)
        if to == "ours" and DRAFT_VOCAB_FILE in report.left:
            shutil.copyfile(folder / DRAFT_VOCAB_FILE, work / DRAFT_VOCAB_FILE)
            report.left.remove(DRAFT_VOCAB_FILE)
        report.config = list(_config_changes(raw, json.loads((work / "config.json").read_text())))
    return report


def _check_destination(destination: Path, source: Path, force: bool) -> None:
    if source.exists() and destination.resolve() == source.resolve():
        raise ValueError(f"Source and destination must differ, got {destination} for both.")
    if not destination.exists():
        return
    if not force:
        raise ValueError(f"{destination} must not exist; choose another folder or pass --force to replace it.")
    if not (destination / "config.json").is_file() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(
            f"--force replaces only a folder with a config.json, got {destination}; choose another folder."
        )


def _local_folder(source: str | Path, revision: str | None) -> Path:
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(snapshot_download(str(source), revision=revision, allow_patterns=["*.json", "*.safetensors"]))
    if not (folder / "config.json").is_file():
        raise ValueError(f"A drafter needs a config.json, {source} has none.")
    return folder


def _read_raw_config(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be JSON: {error}.") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(raw).__name__}.")
    return raw


def _weight_files(folder: Path) -> list[Path]:
    """The files of `model.safetensors`, one or several."""
    index = folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise ValueError(f"{folder} must hold {', '.join(missing)}; save the weights as safetensors there first.")
    return sorted(folder / name for name in names)


def _read_tensors(folder: Path, report: Report) -> dict[str, torch.Tensor]:
    """The drafter's own tensors under our names."""
    tensors = {}
    for file in _weight_files(folder):
        with _opened(file) as shard:
            for old in shard.keys():  # noqa: SIM118 - the shard is no dictionary
                new = parameter_name(old)
                if new in BORROWED_NAMES:
                    report.dropped.append(f"{old} (read from the target)")
                    continue
                if new in tensors:
                    raise ValueError(f"{folder} holds two tensors that mean {new}, the second is {old}; remove one.")
                if new != old:
                    report.renamed.append((old, new))
                tensors[new] = shard.get_tensor(old)
    return tensors


def _opened(file: Path):
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is no complete safetensors file ({error}); copy or save it again.") from None


def _read_config(raw: dict[str, Any], tensors: dict[str, torch.Tensor], ignore: set[str]) -> DominoConfig:
    fields = {key: value for key, value in canonical_fields(raw).items() if key not in ignore}
    known = {known.name for known in dataclasses.fields(DominoConfig)} | READ_KEYS
    unknown = sorted(
        key
        for key, value in fields.items()
        if key not in known | BOOKKEEPING_KEYS | TRAINING_KEYS and value not in (None, False)
    )
    if unknown:
        raise ValueError(
            f"The drafter's config has keys that are not understood here: {', '.join(unknown)}; if they do not change "
            f"what the drafter computes, pass {' '.join(f'--ignore {key}' for key in unknown)}."
        )
    config = DominoConfig.from_dict({key: value for key, value in fields.items() if key in known})
    if config.has_head:
        config.gru_bias = "prefix_gru.bias_ih_l0" in tensors
    return config


def _fit_to_target(config: DominoConfig, target: str) -> None:
    """Checks the pair and writes into the config what the drafter shares with its target."""
    target_config = AutoConfig.from_pretrained(target)
    with torch.device("meta"):
        check_pair(AutoModelForCausalLM.from_config(target_config), config)
    text_config = target_config.get_text_config()
    config.num_target_layers = text_config.num_hidden_layers
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # Pipelines compare them.
        setattr(config, key, getattr(text_config, key, None))
    if not Path(target).exists():
        config.target_model = target


def _check_tensors(source: str | Path, config: DominoConfig, tensors: dict[str, torch.Tensor]) -> None:
    expected = _empty_model(config).state_dict()
    require_tensors(
        source,
        missing=sorted(expected.keys() - tensors.keys()),
        unexpected=sorted(tensors.keys() - expected.keys()),
        misshaped=sorted(
            name for name in expected.keys() & tensors.keys() if expected[name].shape != tensors[name].shape
        ),
    )
    others = sorted({str(tensor.dtype) for tensor in tensors.values()} - {"torch.bfloat16", "torch.float32"})
    if others:
        raise ValueError(
            f"A drafter's tensors must be bfloat16 or float32, {source} has {', '.join(others)}; save it from the "
            "training run in one of those (float16 overflows, packed weights cannot be converted)."
        )


def _empty_model(config: DominoConfig) -> DominoDraftModel:
    with torch.device("meta"):
        return DominoDraftModel(config)


@contextlib.contextmanager
def written_at_once(destination: Path) -> Iterator[Path]:
    """A working folder that becomes `destination` when the block ends, and vanishes when it fails."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=destination.parent, prefix=f".{destination.name}."))
    try:
        (scratch / "new").mkdir()
        yield scratch / "new"
        if destination.exists():
            destination.rename(scratch / "old")
        try:
            (scratch / "new").rename(destination)
        except OSError:
            if (scratch / "old").exists():
                (scratch / "old").rename(destination)
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_ours(work: Path, config: DominoConfig, tensors: dict[str, torch.Tensor], report, target) -> None:
    model = _empty_model(config)
    model.load_state_dict(tensors, assign=True)
    model.save_pretrained(work)


def _write_flat(work: Path, config: DominoConfig, tensors: dict[str, torch.Tensor], report, target) -> None:
    if config.has_head and config.pure_draft_prefix_len != 1:
        raise ValueError(
            f"SGLang requires `pure_draft_prefix_len` 1 of a Domino drafter, this one has "
            f"{config.pure_draft_prefix_len}; export it with --to specforge."
        )
    if config.block_size < 2:
        raise ValueError(f"SGLang requires a `block_size` above 1, this drafter has {config.block_size}.")
    _require_no_bias(config, "flat")
    _require_own_slots(config, "flat")
    exact = [name for name, tensor in tensors.items() if tensor.dtype == torch.float32]
    for name in exact:
        tensors[name] = tensors[name].to(torch.bfloat16)
    if exact:
        report.cast.append(f"{len(exact)} of them float32 -> bfloat16 (what SGLang runs drafters in)")
    _write(work, _flat_config(config, "DFlashDraftModel", tensors), tensors)


def _write_specforge(work: Path, config: DominoConfig, tensors: dict[str, torch.Tensor], report, target) -> None:
    _require_no_bias(config, "specforge")
    _require_own_slots(config, "specforge")
    architecture = "DominoDraftModel" if config.has_head else "DFlashDraftModel"
    _write(work, _flat_config(config, architecture, tensors), tensors)


def _write_speculators(work: Path, config: DominoConfig, tensors: dict[str, torch.Tensor], report, target) -> None:
    if target is None:
        raise ValueError(
            "The speculators format stores the target's embeddings and output head; name it with --target."
        )
    _require_no_bias(config, "speculators")
    named = {}
    for name, tensor in tensors.items():
        new = f"domino_head.{name}" if name.startswith(HEAD_PREFIXES) else name
        if new != name:
            report.renamed.append((name, new))
        named[new] = tensor
    for name, tensor in zip(BORROWED_NAMES, _borrowed_tensors(target)):
        report.added.append(f"{name} (from {target})")
        named[name] = tensor
    drafter = {key: value for key, value in config.dflash_config.items() if key != "target_layer_ids"}
    written = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_draft_tokens}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": config.target_model or Path(target).name,
                "architectures": AutoConfig.from_pretrained(target).architectures or [],
            },
        },
        "transformer_layer_config": _backbone_config(config),
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "sample_from_anchor": config.shift_label,
        "dtype": _dtype(tensors),
        **drafter,
    }
    _write(work, written, named)


_WRITERS = {
    "ours": _write_ours,
    "flat": _write_flat,
    "specforge": _write_specforge,
    "speculators": _write_speculators,
}


def _require_no_bias(config: DominoConfig, to: str) -> None:
    if config.gru_bias:
        raise ValueError(
            f"The {to} format has no place for prefix_gru.bias_ih_l0 and prefix_gru.bias_hh_l0, which this drafter has; "
            "only --to ours keeps them."
        )


def _require_own_slots(config: DominoConfig, to: str) -> None:
    if not config.has_head and config.shift_label:
        raise ValueError(
            f"A DFlash drafter in the {to} format predicts each token at its own slot, this one has `shift_label` true; "
            "export it with --to ours or --to speculators."
        )


def _backbone_config(config: DominoConfig) -> dict[str, Any]:
    """The plain Qwen3 part of the config, with the older rope keys beside the new one."""
    names = {known.name for known in dataclasses.fields(Qwen3Config)}
    names -= {known.name for known in dataclasses.fields(PreTrainedConfig)} - {"tie_word_embeddings"}
    everything = config.to_dict()
    return {
        "model_type": "qwen3",
        **{key: value for key, value in everything.items() if key in names | {"rope_theta", "rope_scaling"}},
    }


def _flat_config(config: DominoConfig, architecture: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The form of the public checkpoints."""
    fields = {
        "architectures": [architecture],
        **_backbone_config(config),
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "emb_dim": config.emb_dim,
        "dflash_config": config.dflash_config,
        "dtype": _dtype(tensors),
        "target_model": config.target_model,
    }
    return {key: value for key, value in fields.items() if value is not None or key == "rope_scaling"}


def _dtype(tensors: dict[str, torch.Tensor]) -> str:
    return str(next(iter(tensors.values())).dtype).removeprefix("torch.")


def _borrowed_tensors(target: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's embeddings and output head, read from its files; a tied head is stored again."""
    folder = Path(target)
    if not folder.is_dir():
        folder = Path(snapshot_download(str(target), allow_patterns=["*.json", "*.safetensors"]))
    found: dict[str, list] = {name: [] for name in BORROWED_NAMES}
    for file in _weight_files(folder):
        with _opened(file) as shard:
            for stored in shard.keys():  # noqa: SIM118 - the shard is no dictionary
                for name in BORROWED_NAMES:
                    if stored == name or stored.endswith(f".{name}"):
                        found[name].append(shard.get_tensor(stored))
    embeddings, heads = (found[name] for name in BORROWED_NAMES)
    if len(embeddings) != 1 or len(heads) > 1:
        raise ValueError(
            f"{target} must hold one embed_tokens.weight and at most one lm_head.weight, found {len(embeddings)} and "
            f"{len(heads)}; name a plain checkpoint of the target."
        )
    return embeddings[0], heads[0] if heads else embeddings[0].clone()


def _write(work: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _config_changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """One line per key of the two configs that differs, nested ones as `outer.inner`."""
    before, after = _flattened(old), _flattened(new)
    gone, come = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
    for key in gone:
        # The same key with the same value at another depth has moved.
        moved = [other for other in come if other.split(".")[-1] == key.split(".")[-1] and after[other] == before[key]]
        if moved:
            come.remove(moved[0])
            yield f"renamed  {key} -> {moved[0]}"
        else:
            yield f"dropped  {key} = {json.dumps(before[key])}{_twin(key, before[key], after)}"
    for key in come:
        yield f"added    {key} = {json.dumps(after[key])}{_twin(key, after[key], before)}"
    for key in sorted(before.keys() & after.keys()):
        if before[key] != after[key]:
            yield f"changed  {key} = {json.dumps(before[key])} -> {json.dumps(after[key])}"


def _twin(key: str, value: Any, config: dict[str, Any]) -> str:
    """Says where the same value stands at another depth of the other config: nothing was lost or made up."""
    twins = [other for other in config if other.split(".")[-1] == key.split(".")[-1] and config[other] == value]
    return f" (same as {twins[0]} there)" if twins else ""


def _flattened(config: dict[str, Any]) -> dict[str, Any]:
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict) and key in ("dflash_config", "transformer_layer_config"):
            flat.update({f"{key}.{inner}": deeper for inner, deeper in value.items()})
        else:
            flat[key] = value
    return flat
