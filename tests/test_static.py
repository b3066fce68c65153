"""Static rounds: the usual loop's steps and the target's text, in buffers that stay, with nothing that a graph cannot hold.

There is no CUDA graph on a CPU. [`Tape`] stands in for one: it repeats the operators of one round, on the tensors that
they had, whatever Python would do in later rounds.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from conftest import fill, generate_loop, prompt, tiny_drafter, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from modeling_domino import graphs_domino, loop_domino, static_domino
from modeling_domino.cache_domino import cache_keyword
from modeling_domino.drafting_domino import draft_chain
from modeling_domino.generation_domino import stream


VOCAB = 64
PAD = 62
# They wait for the device, make what a graph would not make again, or have a size that depends on what tensors hold.
FORBIDDEN = (
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique2",
    "equal",
    "lift_fresh",
    "lift_fresh_copy",
)


class Forbid(TorchDispatchMode):
    """Raises where a round would wait for the device, take a value from the host, or draw a random number."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in FORBIDDEN, f"{name} in a static round"
        # Attention could drop out; it is told not to.
        draws = torch.Tag.nondeterministic_seeded in function.tags and "dot_product" not in name
        assert not draws, f"{name} draws in a static round"
        return function(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """The operators of one call; `replay` runs them again and writes what they give into the tensors of the first time."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.replays = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        # Views, and what works in place, have no memory of their own.
        own = [(i, t) for i, t in enumerate(tree_leaves(outputs)) if torch.is_tensor(t) and t.numel()]
        own = [(i, t) for i, t in own if t.untyped_storage().data_ptr() not in given]
        if own or function._schema.is_mutable:
            self.calls.append((function, args, kwargs or {}, own))
        return outputs

    def replay(self):
        self.replays += 1
        # A graph does not ask what mode it was made in.
        with torch.inference_mode():
            for function, args, kwargs, own in self.calls:
                again = tree_leaves(function(*args, **kwargs))
                for i, old in own:
                    assert old.shape == again[i].shape
                    old.copy_(again[i])


@pytest.fixture
def tapes(monkeypatch) -> list[Tape]:
    """Captures by tape, as CUDA devices do by graph."""
    made = []

    def capture(function, buffers, device):
        for _ in range(graphs_domino.WARM_UPS):
            function(*buffers)
        tape = Tape()
        with tape, Forbid():
            outputs = function(*buffers)
        made.append(tape)
        return buffers, function, tape, outputs

    monkeypatch.setattr(graphs_domino.Graphs, "_capture", staticmethod(capture))
    return made


def small_target(kind: str = "qwen3", **config):
    # Tied: its text is easier to draft, so that some drafts are kept.
    return tiny_target(kind, **{"tied": True, "num_layers": 2, **config})


def small_drafter(target, **config):
    return tiny_drafter(target, **{"block_size": 5, "target_layer_ids": [0, 1], **config})


@pytest.fixture(scope="module")
def target():
    return small_target()


@pytest.fixture(autouse=True)
def small_caches(monkeypatch):
    """One size for most texts of this file."""
    monkeypatch.setattr(static_domino, "ROWS", 64)


@pytest.fixture
def drafter(target):
    return small_drafter(target)


def plain(target, input_ids, **kwargs):
    return target.generate(input_ids, do_sample=False, **{"pad_token_id": PAD, **kwargs})


def held(drafter) -> list:
    return static_domino.kernels_of(drafter).rounds


def steps_of(drafter) -> list[tuple]:
    return [(step.draft_ids, step.accepted, step.own_id, step.is_prefill) for step in drafter.last_run.steps]


def same_as_the_usual_loop(target, drafter, input_ids, **options) -> list[tuple]:
    """Text and steps with `static=True` are those of the usual loop, and the text is the target's; returns the steps."""
    options = {"max_new_tokens": 24, "pad_token_id": PAD, **options}
    ids = generate_loop(target, drafter, input_ids, **options)
    expected = steps_of(drafter)
    assert drafter.last_run.path == "loop"
    assert torch.equal(generate_loop(target, drafter, input_ids, static=True, **options), ids)
    assert steps_of(drafter) == expected
    assert drafter.last_run.path == "static"
    return expected


def script(monkeypatch, texts: torch.Tensor, right: int | None) -> None:
    """Drafts that are the target's own text, except each `right`-th; by tensors alone, for both loops.

    `texts` are the target's, prompt included, `[1, S]`; drafts start behind the anchor.
    """
    spoilt = texts[0].clone()
    if right is not None:
        spoilt[right - 1 :: right] = (spoilt[right - 1 :: right] + 1) % 60

    def scripted(*args, context_hidden_states, position_ids, num_drafts, **kwargs):
        given = {"context_hidden_states": context_hidden_states, "position_ids": position_ids}
        chain = draft_chain(*args, **given, num_drafts=num_drafts, **kwargs)
        places = position_ids[:, context_hidden_states.shape[1], None] + 1 + torch.arange(num_drafts)
        return dataclasses.replace(chain, ids=spoilt[places.clamp(max=len(spoilt) - 1)])

    for module in (loop_domino, static_domino):
        monkeypatch.setattr(module, "draft_chain", scripted)


# The text, and the steps.


@pytest.mark.parametrize(
    "kind, right", [("qwen3", "drafter"), ("qwen3", None), ("qwen3", 1), ("llama", "drafter"), ("llama", 3)]
)
def test_the_same_steps(kind, right, tapes, monkeypatch):
    target = small_target(kind)
    drafter = small_drafter(target)
    for length in (1, 23):
        input_ids = prompt(length, offset=length)
        text = plain(target, input_ids, max_new_tokens=40)
        with monkeypatch.context() as patch:
            if right != "drafter":
                script(patch, text, right)
            for new in (1, 2, 6, 7, 8):
                output = drafter.spec_generate(target, input_ids, max_new_tokens=new, static=True)
                assert torch.equal(output, text[:, : length + new])
            steps = same_as_the_usual_loop(target, drafter, input_ids, max_new_tokens=40)
            assert drafter.last_run.output_ids == text[0, length:].tolist()
            accepted = [step[1] for step in steps[1:]]
            if right is None:
                assert accepted == [5] * 6 + [2]
            elif right == 1:
                assert accepted == [0] * 39
        assert drafter.kernel_report().graphs == 1
    # Caches of one size for all: up to 64 rows.
    assert len(tapes) == 2 and drafter.kernel_report().rounds["uncaptured"] == 0


@pytest.mark.parametrize("length, right", [(1, None), (4, 2), (9, 4)])
def test_uncaptured_and_without_a_row_to_spare(target, drafter, right, length, monkeypatch):
    """The caches end with the drafts of the last round, wherever that begins."""
    monkeypatch.setattr(static_domino, "ROWS", 1)
    input_ids = prompt(length)
    text = plain(target, input_ids, max_new_tokens=30)
    script(monkeypatch, text, right)
    for new in (18, 19, 20, 21, 22):
        output = drafter.spec_generate(target, input_ids, max_new_tokens=new, static=True)
        assert torch.equal(output, text[:, : length + new])
        assert held(drafter)[0].cache.layers[0].keys.shape[2] == length + new + 5
    report = drafter.kernel_report()
    assert report.graphs == 0 and report.rounds["captured"] == 0 and report.rounds["uncaptured"] > 0


@pytest.mark.parametrize("right", [None, 3])
def test_early_ends(target, drafter, right, tapes, monkeypatch):
    """A stop token, or a criterion, at every place of a block."""
    input_ids = prompt(6)
    text = plain(target, input_ids, max_new_tokens=40)
    script(monkeypatch, text, right)
    for place in range(7, 13):
        stop = int(text[0, place])
        expected = plain(target, input_ids, max_new_tokens=40, eos_token_id=stop)
        same_as_the_usual_loop(target, drafter, input_ids, max_new_tokens=40, eos_token_id=stop)
        assert drafter.last_run.output_ids == expected[0, 6:].tolist()
        criteria = StoppingCriteriaList([lambda ids, scores, end=place, **kw: torch.tensor([ids.shape[1] == end])])
        same_as_the_usual_loop(target, drafter, input_ids, max_new_tokens=40, stopping_criteria=criteria)
        assert drafter.last_run.new_tokens == place - 6
    assert len(tapes) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"candidates": 3},
        {"draft_vocab": 20, "candidates": 4},
        {"verify_width": 1},
        {"verify_width": 3},
        {"verify_width": 0},
        {"suppress_tokens": [3, 7, 11], "candidates": 8},
    ],
    ids=str,
)
def test_options(target, drafter, options, tapes):
    drafter.draft_ranking = list(range(40, 4, -1))
    expected = plain(target, prompt(6), max_new_tokens=16, suppress_tokens=options.get("suppress_tokens"))
    for _ in range(2):
        same_as_the_usual_loop(target, drafter, prompt(6), max_new_tokens=16, **options)
    assert drafter.last_run.output_ids == expected[0, 6:].tolist()
    # The processors of a call are its own.
    assert len(tapes) == (2 if "suppress_tokens" in options else 1)


@pytest.mark.parametrize("shift_label, with_head", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("block_size", [1, 6])
def test_drafters(target, block_size, shift_label, with_head, tapes):
    options = {"max_new_tokens": 12}
    if block_size == 1 and not shift_label:
        pytest.skip("a block of one token drafts nothing without the label shift, and the configuration says so")
    drafter = small_drafter(target, block_size=block_size, shift_label=shift_label, with_head=with_head)
    same_as_the_usual_loop(target, drafter, prompt(6), **options)
    if with_head:
        drafter.use_head = False
        same_as_the_usual_loop(target, drafter, prompt(6), **options)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 3])
def test_windows_and_attention(target, drafter, window, attention, tapes):
    drafter.context_window = window
    drafter.set_attn_implementation(attention)
    target.set_attn_implementation(attention)
    try:
        same_as_the_usual_loop(target, drafter, prompt(11))
    finally:
        target.set_attn_implementation("sdpa")


def test_a_drafter_of_another_dtype(target, tapes):
    drafter = small_drafter(target).to(torch.bfloat16)
    expected = plain(target, prompt(6), max_new_tokens=24)
    assert torch.equal(drafter.spec_generate(target, prompt(6), max_new_tokens=24, static=True), expected)
    assert len(tapes) == 1


def test_inference_mode_and_outside_of_it(target, drafter, tapes):
    expected = plain(target, prompt(6), max_new_tokens=24)
    with torch.inference_mode():
        inside = drafter.spec_generate(target, prompt(6), max_new_tokens=24, static=True)
    outside = drafter.spec_generate(target, prompt(6), max_new_tokens=24, static=True)
    assert torch.equal(inside, expected) and torch.equal(outside, expected)
    assert len(tapes) == 1


def test_a_streamer_gets_what_it_always_gets(target, drafter):
    class Streamer(BaseStreamer):
        def __init__(self):
            self.got = []

        def put(self, value):
            self.got.append(value.flatten().tolist())

        def end(self):
            self.got.append("end")

    streamers = [Streamer(), Streamer()]
    for streamer, static in zip(streamers, (False, True)):
        drafter.spec_generate(target, prompt(6), max_new_tokens=12, streamer=streamer, static=static)
    assert streamers[0].got == streamers[1].got and streamers[0].got[-1] == "end"


# What a graph needs.


def test_the_state_stays_where_it_is(target, drafter):
    """Over rounds and over texts: one round, no tensor of it made again."""
    kept, places = set(), set()
    for offset in (0, 50):
        for _ in stream(target, drafter, prompt(6, offset=offset), do_sample=False, max_new_tokens=24, static=True):
            (each,) = held(drafter)
            kept.add(id(each))
            places.add(tuple((id(tensor), tensor.data_ptr()) for tensor in each.state()))
    assert len(kept) == len(places) == 1


@pytest.mark.parametrize("options", [{}, {"candidates": 0}, {"draft_vocab": 20}, {"suppress_tokens": [3]}], ids=str)
def test_a_round_waits_for_nothing(target, drafter, options, monkeypatch):
    """No operator reads a value, has a size that depends on one, takes one from the host, or draws."""
    drafter.draft_ranking = list(range(40, 4, -1))
    expected = drafter.spec_generate(target, prompt(6), max_new_tokens=24, static=True, **options)
    run = static_domino.StaticRound.run

    def watched(self):
        with Forbid():
            run(self)

    monkeypatch.setattr(static_domino.StaticRound, "run", watched)
    read = []
    for name in ("tolist", "item", "__bool__", "__int__", "__index__", "__float__", "numpy", "cpu"):
        original = getattr(torch.Tensor, name)

        def spy(self, *args, original=original, name=name):
            read.append(name)
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, spy)
    rounds = stream(target, drafter, prompt(6), do_sample=False, max_new_tokens=24, static=True, **options)
    tokens = list(next(rounds).token_ids)
    while True:
        read.clear()
        step = next(rounds, None)
        if step is None:
            break
        assert read == ["tolist"]
        tokens += step.token_ids
    assert tokens == expected[0, 6:].tolist()


def test_the_watch_sees_what_it_is_for():
    for wait in (
        lambda: torch.ones(1).item(),
        lambda: torch.ones(3).nonzero(),
        lambda: torch.ones(2)[torch.tensor([True, False])],
        lambda: torch.tensor([1.0]),
        lambda: torch.rand(1),
    ):
        with pytest.raises(AssertionError, match="in a static round"), Forbid():
            wait()


def test_a_captured_round_runs_no_python(target, drafter, tapes, monkeypatch):
    """Replays alone, from the second text on; the report and the runs say so."""
    first = drafter.spec_generate(target, prompt(6), max_new_tokens=24, static=True)
    (tape,) = tapes
    report = drafter.kernel_report()
    rounds = len(drafter.last_run.rounds)
    assert report.graphs == 1 and tape.replays == rounds
    assert report.rounds == {"captured": rounds, "uncaptured": 0}
    assert report.chains == {"triton": 0, "torch": rounds}
    assert f"{rounds} static rounds captured" in str(report)
    monkeypatch.setattr(static_domino.StaticRound, "run", lambda self: pytest.fail("not captured"))
    assert torch.equal(drafter.spec_generate(target, prompt(6), max_new_tokens=24, static=True), first)
    assert tape.replays == 2 * rounds and len(tapes) == 1
    # Behind other numbers in the same buffers.
    input_ids = prompt(5, offset=90)
    expected = plain(target, input_ids, max_new_tokens=25)
    assert torch.equal(drafter.spec_generate(target, input_ids, max_new_tokens=25, static=True), expected)
    assert len(tapes) == 1


def test_uncaptured_rounds_say_so(target, drafter):
    drafter.spec_generate(target, prompt(6), max_new_tokens=24, static=True)
    report = drafter.kernel_report()
    assert report.graphs == 0 and report.rounds == {"captured": 0, "uncaptured": len(drafter.last_run.rounds)}
    assert drafter.last_run.path == "static" and drafter.last_run.packed_bytes == 0


@pytest.mark.parametrize("whose", ["drafter", "target"])
def test_new_weights_make_a_new_graph(whose, tapes):
    target = small_target()
    drafter = small_drafter(target)
    before = same_as_the_usual_loop(target, drafter, prompt(6))
    fill({"drafter": drafter, "target": target}[whose], salt=1)
    after = same_as_the_usual_loop(target, drafter, prompt(6))
    assert after != before and len(tapes) == 2 and drafter.kernel_report().graphs == 1
    assert drafter.last_run.output_ids == plain(target, prompt(6), max_new_tokens=24)[0, 6:].tolist()


def test_other_code_makes_a_new_graph(tapes):
    """A hook that changes the target is no weight; the text must follow it all the same."""
    target = small_target()
    drafter = small_drafter(target)
    before = same_as_the_usual_loop(target, drafter, prompt(6))
    handle = target.model.layers[1].register_forward_hook(lambda module, args, output: output * 1.5)
    assert same_as_the_usual_loop(target, drafter, prompt(6)) != before
    handle.remove()
    assert same_as_the_usual_loop(target, drafter, prompt(6)) == before


def test_rows_of_another_draft_vocabulary_do_not_reach_a_kept_graph(target, drafter, tapes):
    drafter.draft_ranking = list(range(40, 4, -1))
    expected = same_as_the_usual_loop(target, drafter, prompt(6), draft_vocab=20)
    generate_loop(target, drafter, prompt(6), max_new_tokens=24, draft_vocab=12)
    gc.collect()
    assert same_as_the_usual_loop(target, drafter, prompt(6), draft_vocab=20) == expected
    assert len(tapes) == 1


# Who holds a round, and for how long.


def test_of_idle_rounds_one_is_kept(target, drafter, tapes, monkeypatch):
    monkeypatch.setattr(static_domino, "ROWS", 1)
    for new in (14, 16, 16):
        drafter.spec_generate(target, prompt(6), max_new_tokens=new, static=True)
        assert len(held(drafter)) == 1 and drafter.kernel_report().graphs == 1
    assert len(tapes) == 2


def test_texts_of_about_one_length_share_a_round(target, drafter, tapes):
    for length in (1, 9, 30):
        same_as_the_usual_loop(target, drafter, prompt(length), max_new_tokens=24)
    assert len(tapes) == 1 and held(drafter)[0].columns.shape == (64,)


def test_texts_that_are_written_in_turns(target, drafter, tapes):
    """Each has a round of its own; what one leaves open, or never begins, costs the others nothing."""
    prompts = [prompt(6, offset=offset) for offset in (0, 50)]
    options = {"do_sample": False, "max_new_tokens": 24, "static": True}
    never = stream(target, drafter, prompts[0], **options)
    streams = [stream(target, drafter, each, **options) for each in prompts]
    texts = [[], []]
    for steps in zip(*streams):
        for text, step in zip(texts, steps):
            text += step.token_ids
        assert len(held(drafter)) == 2
    for text, rest in zip(texts, streams):
        text += [token for step in rest for token in step.token_ids]
    # `zip` asks the second no more once the first has ended.
    expected = plain(target, prompts[0], max_new_tokens=24)[0, 6:].tolist()
    assert texts[0] == expected
    assert plain(target, prompts[1], max_new_tokens=24)[0, 6:].tolist()[: len(texts[1])] == texts[1]
    left = stream(target, drafter, prompts[0], **options)
    next(left), next(left)
    left.close()
    never.close()
    same_as_the_usual_loop(target, drafter, prompts[0])
    assert len(held(drafter)) == 1 and not held(drafter)[0].is_busy


def test_models_can_go(tapes):
    target = small_target()
    drafter = small_drafter(target)
    drafter.spec_generate(target, prompt(6), max_new_tokens=8, static=True)
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None
    gone = weakref.ref(drafter)
    del drafter
    gc.collect()
    assert gone() is None


def test_a_round_goes_without_being_collected(target, drafter, tapes):
    drafter.spec_generate(target, prompt(6), max_new_tokens=8, static=True)
    gone = weakref.ref(held(drafter)[0])
    gc.disable()
    try:
        tapes.clear()
        drafter.set_kernels("torch")
        assert gone() is None and held(drafter) == []
    finally:
        gc.enable()


def test_another_target_gets_a_round_of_its_own(target, drafter, tapes):
    other = small_target(salt=3)
    for each in (target, other, target):
        expected = plain(each, prompt(6), max_new_tokens=24)
        assert torch.equal(drafter.spec_generate(each, prompt(6), max_new_tokens=24, static=True), expected)
    assert len(tapes) == 3


# What it refuses.


@pytest.mark.parametrize(
    "options, match",
    [
        ({"do_sample": True}, "greedy decoding, got do_sample=True"),
        ({"tree": 4}, "a tree or a size that changes"),
        ({"verify_width": "auto"}, "a tree or a size that changes"),
        ({"auto_off": True}, "a tree or a size that changes"),
        ({"repetition_penalty": 1.3}, "scores alone, got RepetitionPenaltyLogitsProcessor"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1]])}, "without padding"),
        ({"position_ids": torch.tensor([[5, 6, 7, 8]])}, "count from 0"),
    ],
    ids=str,
)
def test_refusals(target, drafter, options, match):
    with pytest.raises(ValueError, match=match) as error:
        generate_loop(target, drafter, prompt(4), static=True, max_new_tokens=8, pad_token_id=PAD, **options)
    assert "`static`" in str(error.value) and "out." in str(error.value)


def test_more_refusals(target, drafter, monkeypatch):
    options = {"static": True, "max_new_tokens": 8}
    with pytest.raises(ValueError, match="one prompt, got a batch of 2"):
        drafter.spec_generate(target, prompt(4, batch=2), **options)
    with pytest.raises(ValueError, match="caches of its own, got one"):
        drafter.spec_generate(target, prompt(4), **options, **{cache_keyword(target): DynamicCache()})
    drafter.record_details = True
    with pytest.raises(ValueError, match="no details, got `record_details`"):
        drafter.spec_generate(target, prompt(4), **options)
    drafter.record_details = False
    drafter.prepack = True
    with pytest.raises(ValueError, match="got `prepack=True`"):
        drafter.spec_generate(target, prompt(4), **options)
    drafter.prepack = None
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="no autocast"):
        drafter.spec_generate(target, prompt(4), **options)
    monkeypatch.setattr(target.model.rotary_emb, "rope_type", "dynamic")
    with pytest.raises(ValueError, match="text's length, got dynamic"):
        drafter.spec_generate(target, prompt(4), **options)


def test_sliding_windows_are_refused():
    target = small_target(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ValueError, match="full attention in every layer, .* keeps StaticSlidingWindowLayer"):
        small_drafter(target).spec_generate(target, prompt(4), max_new_tokens=8, static=True)


def test_what_cannot_be_captured_is_said(target, drafter, monkeypatch):
    def fail(function, buffers, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs_domino.Graphs, "_capture", staticmethod(fail))
    with pytest.raises(RuntimeError, match="a CUDA graph can hold, which failed .*; leave `static` out"):
        drafter.spec_generate(target, prompt(4), max_new_tokens=8, static=True)
    assert not any(each.is_busy for each in held(drafter))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("candidates", [0, 8])
def test_a_captured_round_is_the_uncaptured_one(candidates, device, monkeypatch, request):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU was used: rounds are captured on CUDA devices alone")
    if device == "cpu":
        request.getfixturevalue("tapes")
    target = small_target().to(device)
    drafter = small_drafter(target).to(device)
    drafter.set_kernels("torch")
    rounds = 0
    for offset in (50, 0):
        input_ids = prompt(6, offset=offset).to(device)
        steps = same_as_the_usual_loop(target, drafter, input_ids, candidates=candidates)
        rounds += len(drafter.last_run.rounds)
    report = drafter.kernel_report()
    assert report.graphs == 1 and report.rounds == {"captured": rounds, "uncaptured": 0}

    def capture(function, buffers, device):
        return buffers, function, None, None

    monkeypatch.setattr(graphs_domino.Graphs, "_capture", staticmethod(capture))
    drafter.set_kernels("torch")
    assert same_as_the_usual_loop(target, drafter, input_ids, candidates=candidates) == steps
    report = drafter.kernel_report()
    assert report.graphs == 0 and report.rounds == {"captured": 0, "uncaptured": len(drafter.last_run.rounds)}
