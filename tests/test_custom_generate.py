"""A staged folder is a custom_generate repository: one line drafts, for users who installed nothing of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import prompt, tiny_drafter, tiny_target
from fresh_process import REPO_ID, TAG, put_in_hub_cache, run_fresh
from hub_server import running_hub

import modeling_domino
from modeling_domino.stage import stage


SHIM = Path(modeling_domino.__file__).parent / "custom_generate"
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What one fresh process saw of a staged repository: in the Hub's cache, and as folders with and without a stamp."""
    folder = tmp_path_factory.mktemp("staged")
    home = tmp_path_factory.mktemp("home")
    target = tiny_target()
    target.save_pretrained(folder / "target")
    tiny_drafter(target).save_pretrained(folder / "drafter")
    stage(str(folder / "drafter"), repo_id=REPO_ID, tag=TAG, output=folder / "staged")
    stage(str(folder / "drafter"), output=folder / "unstamped")
    put_in_hub_cache(folder / "staged", home)
    return run_fresh(
        f"""
from transformers import AutoModel, AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

target = AutoModelForCausalLM.from_pretrained({str(folder / "target")!r})
ids = torch.tensor([{prompt(5)[0].tolist()}])
options = dict(max_new_tokens={NEW_TOKENS}, do_sample=False)
# Sixty-four tokens of one letter each, the first ones those that transformers tries a tokenizer with.
words = {{chr(97 + i) if i < 26 else chr(256 + i): i for i in range(64)}}
backend = Tokenizer(models.BPE(words, merges=[]))
backend.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)

class Collected(BaseStreamer):
    def __init__(self):
        self.ids, self.ended = [], False
    def put(self, value):
        self.ids += value.flatten().tolist()
    def end(self):
        self.ended = True

def one_line(*args, repo={REPO_ID!r}, **kwargs):
    return target.generate(*args, custom_generate=repo, trust_remote_code=True, **kwargs)

def both(**kwargs):
    return [one_line(ids, **options, **kwargs)[0].tolist(), target.generate(ids, **options, **kwargs)[0].tolist()]

RESULTS["plain"] = target.generate(ids, **options)[0].tolist()
RESULTS["one line"] = one_line(ids, **options)[0].tolist()
RESULTS["keywords"] = one_line(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
from transformers import GenerationConfig
RESULTS["positional"] = one_line(ids, GenerationConfig(**options))[0].tolist()
RESULTS["pinned"] = one_line(ids, revision={TAG!r}, **options)[0].tolist()
drafter = AutoModel.from_pretrained({REPO_ID!r}, trust_remote_code=True)
RESULTS["assistant"] = one_line(ids, assistant_model=drafter, **options)[0].tolist()
RESULTS["run"] = [len(drafter.last_run.rounds), drafter.last_run.new_tokens]

shim = next(module for name, module in sys.modules.items() if name.endswith("custom_generate.generate"))
RESULTS["loads"] = shim.load_drafter.cache_info().misses
RESULTS["stamp"] = [shim.DRAFTER_ID, shim.DRAFTER_REVISION]

streamer = Collected()
RESULTS["streamed text"] = one_line(ids, streamer=streamer, **options)[0].tolist()
RESULTS["streamed"], RESULTS["ended"] = streamer.ids, streamer.ended
stop = tokenizer.decode(RESULTS["plain"][13:15])
RESULTS["stop strings"] = both(stop_strings=[stop], tokenizer=tokenizer)
RESULTS["eos"] = both(eos_token_id=[RESULTS["plain"][12], 63])
RESULTS["penalty"] = both(repetition_penalty=1.3)
from transformers import StoppingCriteria, StoppingCriteriaList
class AtLength(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((1,), input_ids.shape[1] >= 13)
RESULTS["criteria"] = both(stopping_criteria=StoppingCriteriaList([AtLength()]))
output = one_line(ids, return_dict_in_generate=True, output_scores=True, **options)
RESULTS["dictionary"] = [type(output).__name__, output.sequences[0].tolist(), len(output.scores)]
torch.manual_seed(0)
RESULTS["sampled"] = list(one_line(ids, max_new_tokens=8, do_sample=True).shape)

local = {str(folder / "unstamped")!r}
RESULTS["unstamped"] = error_of(one_line, ids, repo=local, **options)
RESULTS["unstamped with assistant"] = one_line(ids, repo=local, assistant_model=drafter, **options)[0].tolist()
RESULTS["stamped folder with assistant"] = one_line(
    ids, repo={str(folder / "staged")!r}, assistant_model=drafter, **options
)[0].tolist()
RESULTS["without trust"] = error_of(target.generate, ids, custom_generate={REPO_ID!r}, **options)
RESULTS["drafter as model"] = error_of(drafter.generate, ids, **options)
chat = AutoModelForCausalLM.from_pretrained({REPO_ID!r}, trust_remote_code=True)
RESULTS["causal lm as model"] = error_of(chat.generate, ids, **options)
RESULTS["shim given a drafter"] = error_of(shim.generate, ids, model=drafter)
RESULTS["drafter with custom_generate"] = error_of(
    lambda: type(drafter).generate(drafter, ids, custom_generate={REPO_ID!r}, trust_remote_code=True)
)
""",
        home,
    )


def test_one_line_downloads_the_repository_and_then_works_offline(tmp_path):
    target = tiny_target()
    target.save_pretrained(tmp_path / "target")
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    stage(str(tmp_path / "drafter"), repo_id=REPO_ID, tag=TAG, output=tmp_path / "staged")
    home = tmp_path / "home"
    home.mkdir()
    script = f"""
from transformers import AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained({str(tmp_path / "target")!r})
ids = torch.tensor([{prompt(5)[0].tolist()}])
options = dict(max_new_tokens={NEW_TOKENS}, do_sample=False)
text = target.generate(ids, custom_generate={REPO_ID!r}, trust_remote_code=True, **options)
RESULTS["text"] = text[0].tolist()
"""
    plain = target.generate(prompt(5), max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
    with running_hub() as hub:
        hub.seed(REPO_ID, tmp_path / "staged", tag=TAG)
        assert run_fresh(script, home, **hub.environment(token=None))["text"] == plain
    assert run_fresh(script, home)["text"] == plain


@pytest.mark.parametrize(
    "call",
    [
        "one line",
        "keywords",
        "positional",
        "pinned",
        "assistant",
        "streamed text",
        "unstamped with assistant",
        "stamped folder with assistant",
    ],
)
def test_text_is_the_targets(call, results):
    assert results[call] == results["plain"]
    assert len(results["plain"]) == 5 + NEW_TOKENS


def test_the_drafter_really_drafted(results):
    rounds, new_tokens = results["run"]
    assert 0 < rounds <= NEW_TOKENS
    assert new_tokens == NEW_TOKENS


def test_the_drafter_comes_from_the_stamp_and_is_loaded_once_per_revision(results):
    assert results["stamp"] == [REPO_ID, TAG]
    # The stamped revision, and the same one asked for by name, are one and the same.
    assert results["loads"] == 1


def test_every_token_is_streamed(results):
    assert results["streamed"] == results["plain"]
    assert results["ended"]


@pytest.mark.parametrize("option", ["stop strings", "eos", "criteria", "penalty"])
def test_options_apply(option, results):
    drafted, plain = results[option]
    assert drafted == plain
    if option != "penalty":
        assert len(plain) < 5 + NEW_TOKENS


def test_dictionary(results):
    kind, sequence, num_scores = results["dictionary"]
    assert kind == "GenerateDecoderOnlyOutput"
    assert sequence == results["plain"]
    assert num_scores == NEW_TOKENS


def test_sampling(results):
    assert results["sampled"] == [1, 13]


def test_an_unstamped_folder_says_so_in_one_sentence(results):
    assert results["unstamped"].startswith("ValueError: This copy of custom_generate does not know its drafter")
    assert "assistant_model=drafter" in results["unstamped"]
    assert len(results["unstamped"]) < 250


def test_without_trust_the_error_names_the_flag(results):
    assert "trust_remote_code=True" in results["without trust"]


@pytest.mark.parametrize(
    "call", ["drafter as model", "causal lm as model", "shim given a drafter", "drafter with custom_generate"]
)
def test_a_drafter_asked_to_write_gives_the_helpful_sentence(call, results):
    assert results[call].startswith("TypeError: This is a drafter, not a language model")
    assert len(results[call]) < 300


def test_requirements_are_one_simple_specifier_per_line():
    lines = (SHIM / "requirements.txt").read_text().splitlines()
    assert lines
    assert not any("," in line or ";" in line or "[" in line for line in lines)
    assert {line.replace("<", ">").split(">")[0] for line in lines} == {"torch", "transformers"}


def test_the_packaged_stamp_names_no_drafter():
    namespace: dict = {}
    exec((SHIM / "stamp.py").read_text(), namespace)
    assert namespace["DRAFTER_ID"] is namespace["DRAFTER_REVISION"] is None
