"""Tiny deterministic models for the whole suite: weights come from a pattern, so no seed and no platform changes them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
import zlib
from pathlib import Path


# Triton decides when it is first imported, and transformers imports it; `TRITON_INTERPRET=0 pytest -m gpu` compiles.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from modeling_domino import DominoConfig, DominoDraftModel, loop_domino, plug_domino
from modeling_domino.drafting_domino import draft_chain
from modeling_domino.generation_domino import stream


GOLDEN = Path(__file__).parent / "golden"
GOLDEN_NAMES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())

# Models this small run slower on several threads than on one.
torch.set_num_threads(1)


def pattern(*shape: int, offset: int = 0) -> torch.Tensor:
    """Values in [-1, 1) that look random but are a function of their index: the fraction of a large sine."""
    index = torch.arange(math.prod(shape), dtype=torch.float64) + offset
    return ((index.sin() * 43758.5453).remainder(1.0) * 2 - 1).reshape(shape).float()


@torch.no_grad()
def fill(model: nn.Module, *, salt: int = 0) -> nn.Module:
    """Fills every parameter from the pattern, scaled as an initialisation would be; returns the model in eval mode."""
    for name, parameter in model.named_parameters():
        values = pattern(*parameter.shape, offset=zlib.crc32(f"{name}{salt}".encode()) % 100_000)
        if parameter.dim() == 1:
            # Norms are named so; other vectors are biases.
            values = 1 + 0.1 * values if "norm" in name else 0.1 * values
        elif "embed_tokens" not in name:
            values = values * math.sqrt(3 / parameter.shape[-1])
        parameter.copy_(values)
    return model.eval()


def tiny_target(
    kind: str = "qwen3",
    *,
    tied: bool = False,
    vocab_size: int = 64,
    num_layers: int = 6,
    hidden_size: int = 32,
    salt: int = 0,
    **config,
):
    """A stock Qwen3 or Llama language model without special tokens, in fp32."""
    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[kind]
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return fill(model_class(config_class(**{**fields, **config})), salt=salt)


def drafter_config(target, **config) -> DominoConfig:
    """The configuration of [`tiny_drafter`]; `config` overrides any field."""
    text_config = target.config.get_text_config()
    fields = {
        "vocab_size": target.get_input_embeddings().num_embeddings,
        "hidden_size": text_config.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "num_target_layers": text_config.num_hidden_layers,
        "target_layer_ids": [1, text_config.num_hidden_layers - 2],
        "mask_token_id": target.get_input_embeddings().num_embeddings - 1,
        "block_size": 4,
        "projector_type": "domino",
        "shift_label": True,
        "pure_draft_prefix_len": 1,
        "gru_hidden_dim": 12,
        "emb_dim": 6,
    }
    return DominoConfig(**{**fields, **config})


def tiny_drafter(
    target,
    *,
    block_size: int = 4,
    shift_label: bool = True,
    prefix_len: int = 1,
    with_head: bool = True,
    target_layer_ids: list[int] | None = None,
    salt: int = 0,
    **config,
) -> DominoDraftModel:
    """A drafter that fits `target`, in fp32; without head it is a DFlash drafter."""
    config.update(block_size=block_size, shift_label=shift_label)
    if target_layer_ids is not None:
        config["target_layer_ids"] = target_layer_ids
    if with_head:
        config["pure_draft_prefix_len"] = prefix_len
    else:
        config.update(projector_type=None, pure_draft_prefix_len=0, gru_hidden_dim=None, emb_dim=None)
    return fill(DominoDraftModel(drafter_config(target, **config)), salt=salt)


def prompt(length: int, *, vocab_size: int = 64, batch: int = 1, offset: int = 0) -> torch.Tensor:
    """Token ids `[batch, length]` from the pattern."""
    return ((pattern(batch, length, offset=offset) + 1) / 2 * vocab_size).long().clamp(max=vocab_size - 1)


def golden_pair(name: str):
    """Target, drafter and expected tensors of one golden folder; the drafter is loaded as any public one is."""
    folder = GOLDEN / name
    target_config = Qwen3Config(**json.loads((folder / "target_config.json").read_text()))
    target = Qwen3ForCausalLM(target_config)
    target.load_state_dict(load_file(folder / "target.safetensors"))
    return target.eval(), DominoDraftModel.from_pretrained(folder).eval(), load_file(folder / "expected.safetensors")


def require_peer(module: str) -> None:
    """Skips the calling test file when a test-only dependency is absent; under CI its absence is a failure."""
    if os.environ.get("CI") == "true":
        __import__(module)
    else:
        pytest.importorskip(module, reason=f"{module} is not installed (`make test` installs it)")


def script_drafts(monkeypatch, choose) -> None:
    """Replaces the drafts of both decoding paths by `choose(length, num_drafts)`, a list of ids; the drafter still runs.

    `length` is the number of committed tokens, prompt and anchor included. Such drafts are greedy: they have no law.
    """

    def scripted(cache, context_hidden_states, num_drafts, **kwargs):
        length = cache.get_seq_length() + context_hidden_states.shape[1] + 1
        chain = draft_chain(cache=cache, context_hidden_states=context_hidden_states, num_drafts=num_drafts, **kwargs)
        return dataclasses.replace(chain, ids=torch.tensor([choose(length, num_drafts)], dtype=torch.long))

    for module in (loop_domino, plug_domino):
        monkeypatch.setattr(module, "draft_chain", scripted)


def generate_stock(target, drafter, input_ids=None, **kwargs):
    """Ids by transformers' loop with the drafter as assistant."""
    return target.generate(input_ids, assistant_model=drafter, **{"do_sample": False, **kwargs})


def generate_loop(target, drafter, input_ids=None, **kwargs):
    """Ids by our loop, with every option of `generate`."""
    steps = list(stream(target, drafter, input_ids, **{"do_sample": False, **kwargs}))
    tokens = [token for step in steps for token in step.token_ids]
    return torch.cat([input_ids, input_ids.new_tensor([tokens])], dim=1)


PATHS = {"stock": generate_stock, "loop": generate_loop}


def tiny_tokenizer(vocab_size: int = 64):
    """A word tokenizer with a chat template: letters are words, the rest of the vocabulary is `w<id>`."""
    words = ["<pad>", "<user>", "<assistant>", "<end>", *"abcdefghijklmnopqrstuvwxyz"]
    words += [f"w{i}" for i in range(len(words), vocab_size)]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<end>",
        chat_template=(
            "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
            "{% if add_generation_prompt %}<assistant> {% endif %}"
        ),
    )


@pytest.fixture(scope="session")
def kernel_repo(tmp_path_factory) -> Path:
    """A kernel repository as `kernels/build.py` assembles it."""
    folder = tmp_path_factory.mktemp("domino-kernels")
    script = Path(__file__).parent.parent / "kernels" / "build.py"
    subprocess.run([sys.executable, script, "--output", folder / "build"], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def domino_kernels(kernel_repo):
    """The kernels, imported as the `kernels` library does; Triton's interpreter runs them on CPU tensors."""
    require_peer("triton")
    if os.environ["TRITON_INTERPRET"] == "1":
        _interpret_faster()
    # Not the variant that the library picks here: its operations are registered once.
    file = kernel_repo / "build" / "torch-cuda" / "__init__.py"
    spec = importlib.util.spec_from_file_location("domino_kernels_under_test", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _interpret_faster() -> None:
    """The interpreter patches the language anew for every call of a device function: once a launch is enough."""
    from triton.runtime import interpreter

    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def call(self, *args, **kwargs):
        if id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            patch(self.fn)
        return self.rewrite()(*args, **kwargs)

    def start(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    interpreter.GridExecutor.__call__ = start


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request) -> str:
    """Where kernels are tested: in the interpreter, and with `-m gpu` on a device."""
    interpreted = os.environ["TRITON_INTERPRET"] == "1"
    if request.param == "cuda" and (interpreted or not torch.cuda.is_available()):
        pytest.skip("no GPU was used: needs one, and TRITON_INTERPRET=0")
    if request.param == "cpu" and not interpreted:
        pytest.skip("Triton's interpreter is off")
    return request.param


@pytest.fixture
def unwritten_is_nan():
    """Every `torch.empty` holds NaN, or the largest integer, so that what a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def smollm2():
    """The default pair: the target writes real text, its drafter may be untrained."""
    from modeling_domino import default_pair

    try:
        target, tokenizer = default_pair.load_default_target()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return target, tokenizer, default_pair.load_default_drafter()[0]
