"""transformers' assisted decoding with a Domino drafter: every option, every refusal, and nothing left behind.

transformers' own assisted-decoding tests (tests/generation/test_utils.py, 5.24) and what stands for them here:

| their test | here |
|---|---|
| test_assisted_decoding_matches_greedy_search (random, same) | test_lossless.py: real, oracle and adversarial drafters |
| test_assisted_decoding_sample | test_sampling.py: the exact law, not only that it runs |
| test_assisted_decoding_in_different_gpu | needs two accelerators; taps and embeddings are moved by `TargetView` and `TargetTaps.read` |
| test_assisted_decoding_in_gpu_cpu | the same |
| test_assisted_decoding_num_assistant_tokens_heuristic_schedule (and transient, constant) | does not apply: a block has its trained size and no schedule; the width is test_verify_width |
| test_assisted_decoding_encoder_decoder_shared_encoder, test_assisted_decoding_model_in_encoder_decoder | does not apply: decoder-only targets, the refusal is in test_target.py |
| test_assisted_generation_early_exit | does not apply: an early-exit assistant is the target itself |
| test_assisted_generation_uag, universal assisted generation | does not apply: a drafter shares its target's ids |
| test_assistant_dynamic_confidence_threshold | does not apply: it belongs to autoregressive assistants |
| test_generate_with_static_cache for assistants | test_static_cache |
| test_custom_logits_processor, test_stop_sequence_stopping_criteria | test_lossless.py: processors, criteria and stop strings inside a block |
| test_prompt_lookup_decoding_* | does not apply: another candidate generator, left alone (test_other_assistants_are_left_alone) |
| test_assisted_decoding on inputs_embeds, on return_dict outputs (scores, attentions, hidden states) | test_inputs_embeds, test_outputs_on_request |
| batch of more than one, no cache, beams (raises) | test_refusals |
"""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import subprocess
import sys
import threading

import pytest
import torch
import transformers
from conftest import PATHS, generate_stock, prompt, tiny_drafter, tiny_target
from packaging import version
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from modeling_domino import DominoDraftModel, install_plug, plug_domino, remove_plug
from modeling_domino.cache_domino import cache_keyword
from modeling_domino.generation_domino import stream
from modeling_domino.taps_domino import SELECTS_BY_INDEX, TargetTaps


BOTH = pytest.mark.parametrize("path", PATHS)
RELEASE = version.parse(transformers.__version__)
OPTIONS = {"do_sample": False, "max_new_tokens": 24}
PAD = 62


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture
def drafter(target):
    # The last layer is always read by a hook; from 5.23 the other one is not.
    return tiny_drafter(target, block_size=5, target_layer_ids=[1, 5])


@pytest.fixture
def input_ids():
    return prompt(6)


def num_hooks(target) -> int:
    """Our hooks on the target; the core keeps some of its own."""
    hooks = [hook for module in target.modules() for hook in module._forward_hooks.values()]
    return sum(hook.__module__ == TargetTaps.__module__ for hook in hooks)


@pytest.fixture(autouse=True)
def nothing_left_behind(target):
    """After every test: no hooks on the target, no session, the plug installed."""
    yield
    assert num_hooks(target) == 0
    assert plug_domino._SESSION.get() is None
    assert "generate" not in vars(target)
    install_plug()


class Collector(BaseStreamer):
    """Keeps what it gets; may raise in the middle."""

    def __init__(self, fail_after: int | None = None, error: type[BaseException] = RuntimeError):
        self.parts, self.ended, self.fail_after, self.error = [], 0, fail_after, error

    def put(self, value):
        self.parts.append(value.flatten().tolist())
        if len(self.parts) == self.fail_after:
            raise self.error("the streamer gave up")

    def end(self):
        self.ended += 1


# What plain generate has, the assisted one has too.


@BOTH
def test_streamer(target, drafter, input_ids, path):
    streamer = Collector()
    output = PATHS[path](target, drafter, input_ids, streamer=streamer, **OPTIONS)
    assert [token for part in streamer.parts for token in part] == output[0].tolist()
    assert streamer.parts[0] == input_ids[0].tolist() and streamer.ended == 1
    assert streamer.parts[1:] == [step.token_ids for step in drafter.last_run.steps]


def test_eos_lists_and_min_new_tokens(target, drafter, input_ids):
    reference = target.generate(input_ids, **OPTIONS)[0, 6:].tolist()
    for eos in ([reference[3]], [reference[8], reference[5]], [63, reference[10]]):
        options = {**OPTIONS, "eos_token_id": eos, "pad_token_id": PAD, "min_new_tokens": 5}
        expected = target.generate(input_ids, **options)
        assert torch.equal(generate_stock(target, drafter, input_ids, **options), expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", [0, 3])
def test_outputs_on_request(attention, padding):
    target = tiny_target(attn_implementation=attention)
    # Taps of a hooked and of natively selected layers, beside the user's own.
    drafter = tiny_drafter(target, block_size=5, target_layer_ids=[0, 3, 5])
    input_ids = prompt(8)
    mask = (torch.arange(8)[None] >= padding).long()
    options = {
        **OPTIONS,
        "attention_mask": mask,
        "pad_token_id": PAD,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": attention == "eager",
        "repetition_penalty": 1.2,
    }
    expected = target.generate(input_ids, **options)
    output = generate_stock(target, drafter, input_ids, **options)
    assert torch.equal(output.sequences, expected.sequences)
    # fp32 rounding of a block of rows against single rows.
    close = {"rtol": 1e-4, "atol": 1e-5}
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(output, name), getattr(expected, name), **close)
    assert len(output.hidden_states) == len(expected.hidden_states)
    for ours, theirs in zip(output.hidden_states, expected.hidden_states):
        torch.testing.assert_close(ours, theirs, **close)
    if attention == "eager":
        for ours, theirs in zip(output.attentions, expected.attentions):
            assert [a.shape for a in ours] == [a.shape for a in theirs]
            real = [
                (a[..., padding:, :], b[..., padding:, :]) if len(a[0, 0]) > 1 else (a, b)
                for a, b in zip(ours, theirs)
            ]
            for a, b in real:
                torch.testing.assert_close(a, b, **close)


def test_hidden_states_are_not_returned_unasked(target, drafter, input_ids):
    output = generate_stock(target, drafter, input_ids, return_dict_in_generate=True, **OPTIONS)
    assert output.hidden_states is None and output.scores is None


def filled_cache(target, input_ids):
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(input_ids, use_cache=True, **{cache_keyword(target): cache})
    return cache


def cache_argument(cache) -> dict:
    return {"past_key_values" if version.parse("5.24") > RELEASE else "cache": cache}


@BOTH
@pytest.mark.parametrize("filled", [0, 3, 5])
def test_full_prompt_on_a_filled_cache(target, drafter, input_ids, filled, path):
    """The core feeds the whole prompt on top of such a cache (5.3 and later): here it is read again."""
    cache = filled_cache(target, input_ids[:, :filled]) if filled else DynamicCache(config=target.config)
    output = PATHS[path](target, drafter, input_ids, **cache_argument(cache), **OPTIONS)
    assert torch.equal(output, target.generate(input_ids, **OPTIONS))
    # The caller's own object holds the text, for the next turn.
    assert cache.get_seq_length() == output.shape[1] - 1


@BOTH
def test_only_new_tokens_on_a_filled_cache(target, drafter, path):
    whole = prompt(9)
    options = {**OPTIONS, "attention_mask": torch.ones(1, 9, dtype=torch.long)}
    expected = target.generate(whole[:, 6:], **cache_argument(filled_cache(target, whole[:, :6])), **options)
    assert torch.equal(expected[:, 3:], target.generate(whole, **OPTIONS)[:, 9:])
    options.update(cache_argument(filled_cache(target, whole[:, :6])))
    if path == "stock" and version.parse("5.14") > RELEASE:
        with pytest.raises(ValueError, match="cannot continue a filled cache before 5.14.*spec_generate"):
            PATHS[path](target, drafter, whole[:, 6:], **options)
        return
    assert torch.equal(PATHS[path](target, drafter, whole[:, 6:], **options), expected)


@BOTH
def test_only_new_tokens_behind_padding(target, drafter, path):
    """The mask covers the cache too, and hides its padding."""
    whole = prompt(12)
    mask = (torch.arange(12)[None] >= 4).long()
    options = {**OPTIONS, "pad_token_id": PAD}
    expected = target.generate(whole, attention_mask=mask, **options)[:, 12:]
    cache = DynamicCache(config=target.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        target(
            whole[:, :9], attention_mask=mask[:, :9], position_ids=positions[:, :9], **{cache_keyword(target): cache}
        )
    options["attention_mask"] = mask
    options.update(cache_argument(cache))
    assert torch.equal(
        target.generate(whole[:, 9:], **{**options, **cache_argument(copy.deepcopy(cache))})[:, 3:], expected
    )
    if path == "stock":
        # The core cuts the mask from the wrong end: plainly wrong text with every assistant.
        with pytest.raises(ValueError, match="cannot continue a filled cache behind padding.*spec_generate"):
            PATHS[path](target, drafter, whole[:, 9:], **options)
    else:
        assert torch.equal(PATHS[path](target, drafter, whole[:, 9:], **options)[:, 3:], expected)


@BOTH
@pytest.mark.skipif(version.parse("5.24") > RELEASE, reason="assisted decoding refuses static caches before 5.24")
def test_static_cache(target, drafter, input_ids, path):
    expected = target.generate(input_ids, **OPTIONS)
    options = {**OPTIONS, "cache_implementation": "static"}
    if path == "stock":
        # Compiling is for accelerators; its only effect here would be minutes.
        options["disable_compile"] = True
    assert torch.equal(PATHS[path](target, drafter, input_ids, **options), expected)
    cache = StaticCache(config=target.config, max_cache_len=64)
    options = {**OPTIONS, **cache_argument(cache)}
    assert torch.equal(PATHS[path](target, drafter, input_ids, **options), expected)
    # The same object again, full as it is.
    assert torch.equal(PATHS[path](target, drafter, input_ids, **options), expected)


@pytest.mark.slow
@pytest.mark.skipif(version.parse("5.24") > RELEASE, reason="assisted decoding refuses static caches before 5.24")
def test_static_cache_compiled(input_ids):
    """The core compiles the verification, hooks and all; with the eager backend this is tracing only, for a minute."""
    target = tiny_target(num_layers=3)
    drafter = tiny_drafter(target, block_size=5, target_layer_ids=[1, 2])
    compile_config = transformers.CompileConfig(backend="eager", mode=None)
    compile_config._compile_all_devices = True
    options = {**OPTIONS, "cache_implementation": "static", "compile_config": compile_config}
    assert torch.equal(generate_stock(target, drafter, input_ids, **options), target.generate(input_ids, **OPTIONS))


@pytest.mark.skipif(version.parse("5.17") > RELEASE, reason="assisted decoding needs input_ids up to 5.16")
def test_inputs_embeds(target, drafter, input_ids):
    embeds = target.get_input_embeddings()(input_ids).detach()
    expected = target.generate(inputs_embeds=embeds, **OPTIONS)
    output = target.generate(inputs_embeds=embeds, assistant_model=drafter, **OPTIONS)
    assert torch.equal(output, expected)
    assert drafter.last_run.output_ids == expected[0].tolist()
    assert torch.equal(
        target.generate(input_ids, inputs_embeds=embeds, assistant_model=drafter, **OPTIONS),
        target.generate(input_ids, **OPTIONS),
    )


def test_bfloat16_target(input_ids):
    """Text may differ from plain bf16 generation at near-ties; it must be some text of the right length, drafted."""
    target = tiny_target().to(torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        drafter = tiny_drafter(target).to(dtype)
        for generate in PATHS.values():
            assert generate(target, drafter, input_ids, **OPTIONS).shape == (1, 30)
            assert drafter.last_run.new_tokens == 24


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*letters, *(letters[i % 26] + letters[(7 * i + 3 + i // 26) % 26] for i in range(38))]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=words[PAD])


def test_pipeline(target, drafter, tokenizer):
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    assisted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    expected = plain("hello", **OPTIONS)
    assert assisted("hello", **OPTIONS) == expected
    assert len(drafter.last_run.output_ids) == 24
    # The drafter may be named on the call too.
    assert plain("hello", assistant_model=drafter, **OPTIONS) == expected


def test_text_iterator_streamer(target, drafter, tokenizer, input_ids):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
    thread = threading.Thread(
        target=generate_stock, args=(target, drafter, input_ids), kwargs={"streamer": streamer, **OPTIONS}
    )
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(target.generate(input_ids, **OPTIONS)[0, 6:])


# The width of the verification.


def test_num_assistant_tokens(target, drafter, input_ids):
    expected = target.generate(input_ids, **OPTIONS)

    def widest(**options) -> int:
        assert torch.equal(generate_stock(target, drafter, input_ids, **{**OPTIONS, **options}), expected)
        return max(len(step.draft_ids) for step in drafter.last_run.steps)

    assert widest() == 5
    assert widest(num_assistant_tokens=2) == 2
    assert widest(num_assistant_tokens=99) == 5
    assert widest(generation_config=GenerationConfig(num_assistant_tokens=3)) == 3
    target.generation_config.num_assistant_tokens = 1
    try:
        assert widest() == 1
    finally:
        target.generation_config.num_assistant_tokens = None
    assert widest() == 5
    with pytest.raises(ValueError, match="verify width must be an integer of at least 1, .*got 0"):
        widest(num_assistant_tokens=0)


# attach and detach


def test_attach(target, drafter, input_ids):
    expected = target.generate(input_ids, **OPTIONS)
    attachment = drafter.attach(target)
    assert torch.equal(target.generate(input_ids, **OPTIONS), expected)
    run = drafter.last_run
    assert run.path == "stock" and run.new_tokens == 24
    # Named decoding methods and assistants go first.
    other = tiny_drafter(target, block_size=2)
    target.generate(input_ids, assistant_model=other, **OPTIONS)
    assert drafter.last_run is run and other.last_run is not None
    other.spec_generate(target, input_ids, max_new_tokens=5)
    assert other.last_run.path == "loop" and drafter.last_run is run
    with pytest.raises(ValueError, match="already attached.*detach"):
        other.attach(target)
    attachment.detach()
    attachment.detach()
    target.generate(input_ids, **OPTIONS)
    assert drafter.last_run is run
    with drafter.attach(target):
        target.generate(input_ids, **OPTIONS)
    assert drafter.last_run is not run and "generate" not in vars(target)


def test_copy_of_an_attached_target(drafter, input_ids):
    """It generates with its own weights, not with those of the target it was copied from."""
    target = tiny_target()
    drafter.attach(target)
    twin = copy.deepcopy(target)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert twin.generate(input_ids, **OPTIONS)[0, 6:].tolist() == [0] * 24
    assert drafter.last_run.output_ids == [0] * 24


def test_attach_to_a_compiled_target(target, drafter, input_ids):
    compiled = torch.compile(target, backend="eager")
    expected = target.generate(input_ids, **OPTIONS)
    with drafter.attach(compiled):
        assert torch.equal(compiled.generate(input_ids, **OPTIONS), expected)
        assert drafter.last_run.new_tokens == 24


# Installing and removing the plug.


def layers_of_plug(name: str) -> int:
    count, function = 0, getattr(GenerationMixin, name)
    while hasattr(function, plug_domino.MARK):
        function, count = getattr(function, plug_domino.MARK), count + 1
    return count


def test_plug_is_installed_once_and_removable(target, drafter, input_ids):
    for _ in range(3):
        tiny_drafter(target)
        install_plug()
        pickle.loads(pickle.dumps(drafter))
    assert [layers_of_plug(name) for name in plug_domino.PATCHED] == [1, 1]
    remove_plug()
    remove_plug()
    assert [layers_of_plug(name) for name in plug_domino.PATCHED] == [0, 0]
    # Our own loop does not need it; a new drafter brings it back.
    expected = target.generate(input_ids, **OPTIONS)
    assert torch.equal(drafter.spec_generate(target, input_ids, max_new_tokens=24), expected)
    again = tiny_drafter(target)
    assert [layers_of_plug(name) for name in plug_domino.PATCHED] == [1, 1]
    assert torch.equal(generate_stock(target, again, input_ids, **OPTIONS), expected)


def test_signatures_are_kept():
    """`generate` reads them to tell decoding arguments from model arguments."""
    wrapped = {name: inspect.signature(getattr(GenerationMixin, name)) for name in plug_domino.PATCHED}
    names = {name: getattr(GenerationMixin, name).__name__ for name in plug_domino.PATCHED}
    remove_plug()
    for name in plug_domino.PATCHED:
        assert wrapped[name] == inspect.signature(getattr(GenerationMixin, name))
        assert names[name] == name


@pytest.mark.parametrize("name", plug_domino.PATCHED)
def test_missing_private_method(target, name, monkeypatch):
    remove_plug()
    monkeypatch.delattr(GenerationMixin, name)
    with pytest.raises(RuntimeError, match=f"no GenerationMixin.{name} any more.*spec_generate"):
        install_plug()
    with pytest.raises(RuntimeError, match="spec_generate"):
        tiny_drafter(target)


def test_importing_changes_nothing():
    code = (
        "from transformers import GenerationMixin as G; before = G._assisted_decoding; import modeling_domino;"
        "assert G._assisted_decoding is before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unpickled_drafter_in_a_fresh_process(drafter, input_ids, tmp_path):
    # Only the drafter: an unpickled target returns no hidden states, with us or without.
    target = tiny_target()
    target.save_pretrained(tmp_path)
    expected = target.generate(input_ids, **OPTIONS)
    (tmp_path / "pair.pickle").write_bytes(pickle.dumps((drafter, input_ids, expected)))
    code = (
        "import pickle, sys, torch; from transformers import AutoModelForCausalLM;"
        "drafter, ids, expected = pickle.load(open(sys.argv[1] + '/pair.pickle', 'rb'));"
        "target = AutoModelForCausalLM.from_pretrained(sys.argv[1]);"
        "out = target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=24);"
        "assert torch.equal(out, expected) and drafter.last_run.new_tokens == 24"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_copied_drafter(target, drafter, input_ids):
    expected = generate_stock(target, drafter, input_ids, **OPTIONS)
    twin = copy.deepcopy(drafter)
    assert torch.equal(generate_stock(target, twin, input_ids, **OPTIONS), expected)
    assert twin.last_run is not drafter.last_run
    assert twin.last_run.accepted == drafter.last_run.accepted


def test_other_assistants_are_left_alone(target, input_ids):
    """Prompt lookup and ordinary assistants go through the wrapper as if it were not there."""
    options = {**OPTIONS, "eos_token_id": 63, "pad_token_id": PAD}
    expected = target.generate(input_ids, **options)
    assert torch.equal(target.generate(input_ids, prompt_lookup_num_tokens=3, **options), expected)
    assistant = tiny_target(num_layers=2, salt=1)
    assert torch.equal(target.generate(input_ids, assistant_model=assistant, **options), expected)


# Refusals: one clear sentence, before any forward.


class QuantizedDynamicCache(DynamicCache):
    """Stands for every cache that cannot be cropped by rows."""


def refusals(target):
    two = prompt(4, batch=2)
    one = prompt(4)
    quantised = cache_argument(QuantizedDynamicCache(config=target.config))
    return {
        "batch": ((two, {}), "one sequence.* got (a batch of )?2"),
        "no cache": ((one, {"use_cache": False}), "use_cache=True"),
        "quantised cache": ((one, quantised), "QuantizedDynamicCache cannot"),
        "several sequences": (
            (one, {"num_return_sequences": 2, "do_sample": True}),
            "num_return_sequences|one sequence, got 2",
        ),
    }


@BOTH
@pytest.mark.parametrize("case", refusals(tiny_target(num_layers=2)))
def test_refusals(target, drafter, case, path):
    (input_ids, options), message = refusals(target)[case]
    with pytest.raises(ValueError, match=message):
        PATHS[path](target, drafter, input_ids, **{**OPTIONS, **options})


def test_beams_ignore_the_assistant_with_a_warning_or_refuse(target, drafter, input_ids):
    with pytest.raises(ValueError, match="no beams, got num_beams=2"):
        PATHS["loop"](target, drafter, input_ids, num_beams=2, **OPTIONS)


@BOTH
def test_processors_with_a_memory(target, drafter, input_ids, path):
    """They keep a cache or a history of their own, into which rejected drafts would go: wrong text with every assistant."""
    synth_id = transformers.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])
    for name, value in (("guidance_scale", 1.5), ("watermarking_config", synth_id)):
        with pytest.raises(ValueError, match=f"`{name}` remembers.*generate without a drafter"):
            PATHS[path](target, drafter, input_ids, **{name: value}, **{**OPTIONS, "do_sample": True})


@BOTH
def test_recurrent_target(path):
    config = AutoConfig.for_model(
        "qwen3_next",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    target = AutoModelForCausalLM.from_config(config).eval()
    drafter = tiny_drafter(target)
    with pytest.raises(
        ValueError,
        match="recurrent state of Qwen3NextForCausalLM|not supported with stateful models, such as Qwen3Next",
    ):
        PATHS[path](target, drafter, prompt(4), **OPTIONS)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vocab_size": 60}, "vocabulary of 60 tokens, Qwen3ForCausalLM embeds 64"),
        ({"num_target_layers": 8}, "target of 8 layers, Qwen3ForCausalLM has 6"),
        ({"num_target_layers": None, "target_layer_ids": [1, 7]}, "reads layer 7 of its target"),
    ],
)
@BOTH
def test_drafter_of_another_target(target, input_ids, changes, message, path):
    drafter = tiny_drafter(target, **{"mask_token_id": 5, **changes})
    with pytest.raises(ValueError, match=message):
        PATHS[path](target, drafter, input_ids, **OPTIONS)


@BOTH
def test_half_precision_drafter(target, drafter, input_ids, path):
    with pytest.raises(ValueError, match="bfloat16 or float32, got float16"):
        PATHS[path](target, copy.deepcopy(drafter).half(), input_ids, **OPTIONS)


def test_stock_load_of_a_flat_folder(target, drafter, input_ids, tmp_path):
    """Without remote code a public drafter folder loads as a Qwen3 with random weights; it must not draft."""
    import json

    drafter.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["model_type"] = "qwen3"
    fields.pop("auto_map", None)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    stranger = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(stranger).__name__ == "Qwen3ForCausalLM"
    with pytest.raises(ValueError, match="Domino or DFlash drafter loaded as Qwen3ForCausalLM.*DominoDraftModel"):
        generate_stock(target, stranger, input_ids, **OPTIONS)


def test_official_remote_code_class(target, input_ids):
    """The published remote code defines a `DFlashDraftModel` on its own; it has no `generate` to draft with."""

    class DFlashDraftModel(LlamaForCausalLM):
        pass

    small = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(ValueError, match="drafter loaded as DFlashDraftModel.*DominoDraftModel.from_pretrained"):
        generate_stock(target, DFlashDraftModel(small), input_ids, **OPTIONS)


def test_drafter_as_a_chat_model(drafter, input_ids):
    with pytest.raises(TypeError, match="This is a drafter, not a language model: load its target"):
        drafter.generate(input_ids, max_new_tokens=5)


# Nothing is left behind, whatever happens.


@BOTH
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("fail_after", [1, 2, 4])
def test_error_inside_a_streamer(target, drafter, input_ids, fail_after, error, path):
    streamer = Collector(fail_after, error)
    with pytest.raises(error, match="gave up"):
        PATHS[path](target, drafter, input_ids, streamer=streamer, **OPTIONS)
    assert num_hooks(target) == 0
    assert plug_domino._SESSION.get() is None
    # And the pair works on.
    assert torch.equal(PATHS[path](target, drafter, input_ids, **OPTIONS), target.generate(input_ids, **OPTIONS))


def test_a_failed_run_does_not_show_the_statistics_of_the_one_before(target, drafter, input_ids):
    generate_stock(target, drafter, input_ids, **OPTIONS)
    with pytest.raises(RuntimeError):
        generate_stock(target, drafter, input_ids, streamer=Collector(3), **OPTIONS)
    assert drafter.last_run is None


@BOTH
def test_error_in_the_target(target, drafter, input_ids, path, monkeypatch):
    calls = []

    def fail(module, args, kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")

    handle = target.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            PATHS[path](target, drafter, input_ids, **OPTIONS)
    finally:
        handle.remove()
    assert num_hooks(target) == 0


@BOTH
def test_memory_is_let_go(target, drafter, input_ids, path):
    PATHS[path](target, drafter, input_ids, **OPTIONS)
    gc.collect()
    alive = [
        o
        for o in gc.get_objects()
        if type(o).__name__ in ("DominoCache", "TargetTaps", "DecodeLoop", "DominoCandidateGenerator")
    ]
    assert alive == []


@BOTH
def test_two_threads_on_one_pair(target, drafter, path):
    """Each thread has its own text and its own statistics."""
    prompts = [prompt(3 + 2 * i, offset=100 * i) for i in range(2)]
    expected = [target.generate(ids, do_sample=False, max_new_tokens=60) for ids in prompts]
    alone = []
    for ids in prompts:
        PATHS[path](target, drafter, ids, max_new_tokens=60)
        alone.append(drafter.last_run)
    barrier = threading.Barrier(2)
    results, errors = {}, []

    def work(i):
        try:
            assert drafter.last_run is None
            barrier.wait()
            for _ in range(3):
                output = PATHS[path](target, drafter, prompts[i], max_new_tokens=60)
                results.setdefault(i, []).append((output, drafter.last_run))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for i in range(2):
        for output, run in results[i]:
            assert torch.equal(output, expected[i])
            # Taps of the other thread would show as other drafts.
            assert [s.draft_ids for s in run.steps] == [s.draft_ids for s in alone[i].steps]


def test_a_stream_that_wanders_between_threads(target, drafter, input_ids):
    """Web frameworks ask a generator for its next item from whichever thread is free."""
    expected = [step.token_ids for step in stream(target, drafter, input_ids, **OPTIONS)]
    drafts = [step.draft_ids for step in drafter.last_run.steps]
    steps, got = stream(target, drafter, input_ids, **OPTIONS), []

    def pull():
        step = next(steps, None)
        got.append(step)

    while not got or got[-1] is not None:
        thread = threading.Thread(target=pull)
        thread.start()
        thread.join()
    assert [step.token_ids for step in got[:-1]] == expected
    assert [step.draft_ids for step in got[:-1]] == drafts


def test_interleaved_streams(target, drafter):
    """Two streams on one pair, advanced in turns."""
    prompts = [prompt(4), prompt(7, offset=50)]
    alone = [[step.draft_ids for step in stream(target, drafter, ids, **OPTIONS)] for ids in prompts]
    steps = [stream(target, drafter, ids, **OPTIONS) for ids in prompts]
    turns = [[], []]
    for _ in range(30):
        for i in range(2):
            step = next(steps[i], None)
            if step is not None:
                turns[i].append(step.draft_ids)
    assert turns == alone


def test_unpickled_target(drafter, input_ids):
    """It returns no hidden states in a fresh process; here it plays one that does not."""
    target = tiny_target()
    target.register_forward_hook(lambda module, args, outputs: setattr(outputs, "hidden_states", None))
    for generate in PATHS.values():
        if SELECTS_BY_INDEX:
            with pytest.raises(RuntimeError, match="returned none.*from_pretrained"):
                generate(target, drafter, input_ids, **OPTIONS)
        else:
            generate(target, drafter, input_ids, **OPTIONS)


def test_a_generation_within_a_streamer(target, drafter, input_ids):
    """A streamer that itself generates on the same pair does not disturb the run that called it."""

    class Nested(Collector):
        def put(self, value):
            super().put(value)
            if len(self.parts) == 3:
                generate_stock(target, drafter, prompt(9, offset=70), **OPTIONS)

    expected = generate_stock(target, drafter, input_ids, **OPTIONS)
    drafts = [step.draft_ids for step in drafter.last_run.steps]
    assert torch.equal(generate_stock(target, drafter, input_ids, streamer=Nested(), **OPTIONS), expected)
    assert [step.draft_ids for step in drafter.last_run.steps] == drafts


def test_lora_target(input_ids):
    peft = pytest.importorskip("peft")
    target = tiny_target()
    wrapped = peft.get_peft_model(target, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    drafter = tiny_drafter(target)
    expected = wrapped.generate(input_ids=input_ids, **OPTIONS)
    assert torch.equal(wrapped.generate(input_ids=input_ids, assistant_model=drafter, **OPTIONS), expected)
    assert torch.equal(drafter.spec_generate(wrapped, input_ids, max_new_tokens=24), expected)


def test_drafter_class_is_found_by_protocol(target, input_ids):
    """A drafter from remote code has its own copy of every class, and is served all the same."""

    class Stranger(DominoDraftModel):
        pass

    Stranger.__module__ = "transformers_modules.somewhere"
    drafter = tiny_drafter(target)
    drafter.__class__ = Stranger
    expected = target.generate(input_ids, **OPTIONS)
    criteria = StoppingCriteriaList([lambda ids, scores, **kwargs: torch.tensor([False])])
    assert torch.equal(generate_stock(target, drafter, input_ids, stopping_criteria=criteria, **OPTIONS), expected)
