"""Our loop: its records equal the stock path's, its options, and its work per round, which is counted."""

from __future__ import annotations

import collections
import gc
import inspect
import json
import random

import pytest
import torch
from conftest import PATHS, generate_loop, generate_stock, prompt, script_drafts, tiny_drafter, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from modeling_domino.generation_domino import stream
from modeling_domino.record_domino import STAGES
from modeling_domino.taps_domino import TargetTaps


PAD = 62
BOTH = pytest.mark.parametrize("path", PATHS)


@pytest.fixture(scope="module")
def target():
    # Tied: its text is easier to draft, so that some drafts are kept.
    return tiny_target(tied=True)


@pytest.fixture
def drafter(target):
    return tiny_drafter(target, block_size=5)


@pytest.fixture
def input_ids():
    return prompt(6)


# The two paths tell the same story.


def comparable(run) -> dict:
    """A trace without what may differ: seconds."""
    trace = run.trace()
    assert trace.pop("seconds") > 0
    for step in trace["rounds"]:
        assert set(step.pop("stage_seconds")) <= set(STAGES)
    return trace


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_new_tokens": 2},
        {"max_new_tokens": 1},
        {"eos_token_id": [47, 63], "pad_token_id": PAD},
        {"stopping_criteria": StoppingCriteriaList([lambda ids, scores, **kw: torch.tensor([ids.shape[1] == 17])])},
        {"repetition_penalty": 1.3},
        {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]]), "pad_token_id": PAD},
    ],
    ids=["plain", "two", "one", "eos", "criterion", "penalty", "padding"],
)
@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("shift_label, with_head", [(True, True), (False, True), (True, False)])
def test_stock_trace_equals_ours(target, input_ids, options, details, shift_label, with_head):
    drafter = tiny_drafter(target, block_size=5, shift_label=shift_label, with_head=with_head)
    drafter.record_details = details
    runs = []
    for generate in PATHS.values():
        output = generate(target, drafter, input_ids, **{"max_new_tokens": 30, **options})
        run = drafter.last_run
        assert run.output_ids == output[0, 6:].tolist() and run.new_tokens == output.shape[1] - 6
        assert run.steps[0].is_prefill and run.steps[0].draft_ids == [] and run.steps[0].accepted == 0
        assert [run.steps[0], *run.rounds] == run.steps
        runs.append(run)
    stock, ours = runs
    assert (stock.path, ours.path) == ("stock", "loop")
    left, right = comparable(stock), comparable(ours)
    for name in ("probabilities", "base_probabilities"):
        for mine, theirs in zip(left["rounds"], right["rounds"]):
            # fp32 rounding of the order of sums.
            mine, theirs = mine.pop(name), theirs.pop(name)
            assert (mine is None) == (theirs is None)
            assert mine is None or mine == pytest.approx(theirs, rel=1e-3, abs=1e-6)
    assert left == right
    assert (stock.tau, stock.accepted) == (ours.tau, ours.accepted)


def test_random_text_gives_many_shapes_of_rounds(target, drafter, monkeypatch):
    """The comparison again with drafts that are right for a while: rounds of every length."""
    input_ids = prompt(6)
    ids = target.generate(input_ids, max_new_tokens=80, do_sample=False)[0].tolist()

    draw = random.Random(0)

    def choose(length: int, num_drafts: int) -> list[int]:
        right = draw.randrange(num_drafts + 1)
        return [token if i < right else (token + 1) % 64 for i, token in enumerate(ids[length : length + num_drafts])]

    script_drafts(monkeypatch, choose)
    runs = []
    for generate in PATHS.values():
        draw.seed(0)
        generate(target, drafter, input_ids, max_new_tokens=60)
        runs.append(comparable(drafter.last_run))
    assert runs[0] == runs[1]
    assert {step["accepted"] for step in runs[0]["rounds"]} >= {0, 1, 2, 3, 4}


# Schema and statistics.


@BOTH
def test_trace_schema(target, drafter, input_ids, path):
    drafter.record_details = True
    PATHS[path](target, drafter, input_ids, max_new_tokens=20)
    trace = json.loads(json.dumps(drafter.last_run.trace()))
    expected = {"version", "target", "drafter", "kind", "block_size", "prompt_tokens", "temperature", "rule"}
    assert expected | {"rounds", "output_ids", "seconds"} <= set(trace)
    assert trace["version"] == 1 and trace["kind"] == "chain" and trace["rule"] == "greedy"
    assert trace["block_size"] == 5 and trace["prompt_tokens"] == 6 and trace["temperature"] == 0.0
    for step in trace["rounds"]:
        keys = {"draft_ids", "base_ids", "probabilities", "base_probabilities", "accepted", "own_id", "stage_seconds"}
        assert keys <= set(step)
        lengths = {len(step[key]) for key in ("draft_ids", "base_ids", "probabilities", "base_probabilities")}
        assert lengths == {len(step["draft_ids"])}
        assert all(0 <= p <= 1 for p in step["probabilities"] + step["base_probabilities"])
        assert set(step["stage_seconds"]) <= set(STAGES) and min(step["stage_seconds"].values()) >= 0
    text = [trace["output_ids"][0]]
    for step in trace["rounds"]:
        text += [*step["draft_ids"][: step["accepted"]], step["own_id"]]
    assert text == trace["output_ids"]


@BOTH
def test_statistics_agree_with_the_text(target, drafter, input_ids, path):
    output = PATHS[path](target, drafter, input_ids, max_new_tokens=30)
    run = drafter.last_run
    new = output.shape[1] - 6
    assert run.tau == pytest.approx((new - 1) / len(run.rounds))
    assert sum(run.accepted) + len(run.steps) == new
    for step in run.rounds:
        assert step.accepted <= len(step.draft_ids)
        # Where a draft was refused, the target's own token is another one.
        if step.accepted < len(step.draft_ids):
            assert step.draft_ids[step.accepted] != step.own_id
    # The prefill is no round: a text of one token has a tau of nothing.
    PATHS[path](target, drafter, input_ids, max_new_tokens=1)
    assert drafter.last_run.tau == 0.0 and drafter.last_run.rounds == []


@BOTH
def test_stages_add_up_to_the_run(target, drafter, input_ids, path):
    PATHS[path](target, drafter, input_ids, max_new_tokens=30)
    run = drafter.last_run
    total = sum(sum(step.stage_seconds.values()) for step in run.steps)
    # No assertion about speed: only that no large part of the time is unaccounted for.
    assert 0.5 * run.seconds < total <= 1.05 * run.seconds


@BOTH
def test_details_name_the_backbones_own_choice(target, drafter, input_ids, path):
    """With the head off, what was drafted is what the backbone would have drafted; in-place processors change nothing."""
    drafter.record_details, drafter.use_head = True, False
    PATHS[path](target, drafter, input_ids, max_new_tokens=20)
    assert drafter.last_run.head == "off"
    for step in filter(lambda step: step.draft_ids, drafter.last_run.rounds):
        assert step.draft_ids == step.base_ids
        assert step.probabilities == pytest.approx(step.base_probabilities)

    def shift(ids, scores):
        scores[:, ::2] -= 50.0
        return scores

    PATHS[path](target, drafter, input_ids, max_new_tokens=20, logits_processor=[shift])
    ours = [token for step in drafter.last_run.rounds for token in step.base_ids or []]
    assert any(token % 2 == 0 for token in ours)
    assert not any(token % 2 == 0 for step in drafter.last_run.rounds for token in step.draft_ids)


# The stream.


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_stream_closed_early_still_records(target, drafter, input_ids, taken):
    generate_loop(target, drafter, input_ids, max_new_tokens=5)
    before = drafter.last_run
    steps = stream(target, drafter, input_ids, max_new_tokens=30, do_sample=False)
    got = [next(steps) for _ in range(taken)]
    steps.close()
    if taken == 0:
        assert drafter.last_run is before
    else:
        assert drafter.last_run.steps == got and drafter.last_run.seconds > 0
    assert not any(our_hooks(module) for module in target.modules())


def our_hooks(module) -> list:
    return [hook for hook in module._forward_hooks.values() if hook.__module__ == TargetTaps.__module__]


def test_abandoned_stream_removes_its_hooks(input_ids):
    target = tiny_target()
    drafter = tiny_drafter(target, target_layer_ids=[0, 5])
    steps = stream(target, drafter, input_ids, max_new_tokens=30, do_sample=False)
    next(steps)
    assert any(our_hooks(module) for module in target.modules())
    del steps
    gc.collect()
    assert not any(our_hooks(module) for module in target.modules())


def test_steps_come_as_they_are_made(target, drafter, input_ids):
    seen = []
    for step in stream(target, drafter, input_ids, max_new_tokens=20, do_sample=False):
        seen.append(step)
        assert step.token_ids[-1] == step.own_id
    assert seen == drafter.last_run.steps


# spec_generate as published.


def test_published_signature(drafter):
    parameters = list(inspect.signature(drafter.spec_generate).parameters.values())
    names = ["target", "input_ids", "max_new_tokens", "stop_token_ids", "temperature"]
    assert [p.name for p in parameters[:5]] == names
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters[:5])
    assert inspect.signature(drafter.spec_generate).parameters["return_dict"].kind is inspect.Parameter.KEYWORD_ONLY


def test_spec_generate(target, drafter, input_ids):
    expected = target.generate(input_ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(drafter.spec_generate(target, input_ids, 20, None, 0.0), expected)
    by_name = drafter.spec_generate(
        target=target, input_ids=input_ids, max_new_tokens=20, stop_token_ids=None, temperature=0.0
    )
    assert torch.equal(by_name, expected)
    output = drafter.spec_generate(target, input_ids, 20, return_dict=True)
    assert isinstance(output, GenerateDecoderOnlyOutput) and torch.equal(output.sequences, expected)
    stop = expected[0, 12].item()
    first = expected[0, 6:].tolist().index(stop)
    for stops in (stop, [stop], [63, stop]):
        output = drafter.spec_generate(target, input_ids, 20, stops, pad_token_id=PAD)
        assert torch.equal(output, expected[:, : 6 + first + 1])


def test_spec_generate_obeys_the_targets_defaults(target, drafter, input_ids):
    """Without limits and stop tokens those of the target apply."""
    stop = target.generate(input_ids, max_new_tokens=8, do_sample=False)[0, -1].item()
    config = target.generation_config
    config.max_new_tokens, config.eos_token_id, config.pad_token_id = 9, [stop], PAD
    try:
        expected = target.generate(input_ids, do_sample=False)
        assert torch.equal(drafter.spec_generate(target, input_ids), expected)
        assert expected.shape[1] < 15
    finally:
        config.max_new_tokens, config.eos_token_id, config.pad_token_id = None, None, None


def test_spec_generate_samples_the_whole_law(target, drafter, input_ids):
    """No hidden top-k: at a high temperature more than 50 tokens of the 64 occur; seeds repeat the text."""
    torch.manual_seed(0)
    output = drafter.spec_generate(target, input_ids, 400, temperature=50.0)
    assert len(set(output[0, 6:].tolist())) > 55
    assert drafter.last_run.temperature == 50.0 and drafter.last_run.rule != "greedy"
    torch.manual_seed(0)
    assert torch.equal(drafter.spec_generate(target, input_ids, 400, temperature=50.0), output)
    # The card's sampling defaults do not leak into greedy decoding.
    target.generation_config.do_sample, target.generation_config.temperature = True, 5.0
    try:
        expected = target.generate(input_ids, max_new_tokens=20, do_sample=False)
        assert torch.equal(drafter.spec_generate(target, input_ids, 20), expected)
        assert drafter.last_run.temperature == 0.0
    finally:
        target.generation_config.do_sample, target.generation_config.temperature = None, None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -1.0}, "`temperature` must be a number, 0 .greedy. or positive, got -1.0"),
        ({"temperature": "hot"}, "`temperature` must be a number, 0 .greedy. or positive, got 'hot'"),
        ({"temperature": float("inf")}, "`temperature` must be a number, 0 .greedy. or positive, got inf"),
        ({"rule": "typical"}, "`rule` must be one of greedy, match, speculative.*got 'typical'"),
        ({"rule": "match"}, "`rule='match'` needs do_sample=True, got do_sample=False"),
        ({"rule": "speculative"}, "`rule='speculative'` needs do_sample=True"),
        ({"rule": "greedy", "temperature": 1.0}, "`rule='greedy'` needs do_sample=False, got do_sample=True"),
        ({"verify_width": -1}, "verify width must be an integer of at least 0, .*got -1"),
        ({"stop_strings": ["a"]}, "`stop_strings` needs the target's tokenizer: pass `tokenizer=`"),
        ({"inputs_embeds": torch.zeros(1, 6, 32)}, "token ids, got inputs_embeds; use .*assistant_model=drafter"),
        ({"output_scores": True, "return_dict_in_generate": True}, "token ids, got output_scores; use"),
    ],
)
def test_errors(target, drafter, input_ids, options, message):
    with pytest.raises(ValueError, match=message):
        drafter.spec_generate(target, input_ids, max_new_tokens=5, **options)


# Work per round, counted.


class Counter(TorchDispatchMode):
    """Counts dispatched operators, and those that wait for the device."""

    WAITS = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal", "unique", "masked_select")

    def __init__(self):
        super().__init__()
        self.calls, self.cat_sizes = collections.Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        result = func(*args, **(kwargs or {}))
        if name == "cat":
            self.cat_sizes.append(result.numel())
        return result

    @property
    def waits(self) -> int:
        return sum(self.calls[name] for name in self.WAITS)


def rounds_counted(target, drafter, input_ids, monkeypatch, **options):
    """(operators, waits, cat sizes) of each round of our loop; `tolist` and `cpu` count as waits too."""
    host = collections.Counter()
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__"):
        original = getattr(torch.Tensor, name)

        def spy(self, *args, original=original, name=name, **kwargs):
            # A tensor that waits inside another wait is one wait.
            host["depth"] += 1
            try:
                host[name] += host["depth"] == 1
                return original(self, *args, **kwargs)
            finally:
                host["depth"] -= 1

        monkeypatch.setattr(torch.Tensor, name, spy)
    counted = []
    steps = stream(target, drafter, input_ids, do_sample=False, **options)
    next(steps)
    while True:
        host.clear()
        with Counter() as counter:
            step = next(steps, None)
        if step is None:
            return counted
        scalar_reads = sum(host[name] for name in host if name != "depth")
        counted.append((counter.calls.copy(), counter.waits, scalar_reads, counter.cat_sizes, len(step.draft_ids)))


@pytest.mark.parametrize("with_head", [True, False])
def test_one_wait_per_round(target, input_ids, with_head, monkeypatch):
    drafter = tiny_drafter(target, block_size=5, with_head=with_head)
    options = {"eos_token_id": [61], "pad_token_id": PAD, "max_new_tokens": 40}
    rounds = rounds_counted(target, drafter, input_ids, monkeypatch, **options)
    assert len(rounds) > 5
    # `tolist` of a vector dispatches nothing on the CPU; it is the one read from the host's side.
    assert [reads for _, _, reads, _, _ in rounds] == [1] * len(rounds)
    assert all(waits == 0 for _, waits, _, _, _ in rounds)


def test_work_does_not_grow_with_the_context(target, drafter, monkeypatch):
    """Operators per round and the size of what is concatenated are the same behind 20 and behind 1,500 tokens."""
    seen = []
    for length in (20, 1500):
        with monkeypatch.context() as patch:
            rounds = rounds_counted(target, drafter, prompt(length), patch, max_new_tokens=24)
        # The first round reads the whole prompt, and the last ones are short.
        full = [r for r in rounds[1:] if r[4] == 5]
        seen.append((full[0][0], max(size for r in full for size in r[3])))
    (short_calls, short_cat), (long_calls, long_cat) = seen
    assert short_calls == long_calls
    # The target's own cache concatenates its keys (DynamicCache does); nothing of ours does.
    keys = 2 * 8
    assert short_cat <= max(12 * 5 * 64, (20 + 24 + 6) * keys) and long_cat <= (1500 + 24 + 6) * keys


def test_nothing_of_ours_concatenates_the_context(target, drafter, monkeypatch):
    """With a target cache that does not grow by concatenation, no round builds anything of the context's size."""
    pytest.importorskip("transformers", minversion="5.24", reason="static caches before 5.24 are refused")
    with monkeypatch.context() as patch:
        rounds = rounds_counted(target, drafter, prompt(1500), patch, max_new_tokens=24, cache_implementation="static")
    largest = max(size for r in rounds[1:] for size in r[3])
    # One block over the vocabulary is the largest thing there is.
    assert largest <= 6 * 64


def test_only_tapped_layers_are_asked_for(target, drafter, input_ids, monkeypatch):
    """The target returns or is hooked for the tapped layers, no others."""
    asked = []

    def note(module, args, kwargs):
        asked.append(kwargs.get("output_hidden_states"))
        hooked = [i for i, layer in enumerate(target.model.layers) if our_hooks(layer)]
        asked[-1] = (asked[-1], hooked)

    handle = target.register_forward_pre_hook(note, with_kwargs=True)
    try:
        for generate in (generate_stock, generate_loop):
            asked.clear()
            generate(target, drafter, input_ids, max_new_tokens=12)
            for states, hooked in asked:
                native = states if isinstance(states, list) else []
                assert states in (None, False) or isinstance(states, list)
                assert sorted([i - 1 for i in native] + hooked) == [1, 4]
    finally:
        handle.remove()


def test_only_needed_rows_are_scored(target, drafter, input_ids, monkeypatch):
    """The output head sees one row at the prefill and the verified rows later, not the prompt."""
    rows = []
    handle = target.lm_head.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    try:
        generate_loop(target, drafter, prompt(40), max_new_tokens=12)
    finally:
        handle.remove()
    assert rows[0] == 1 and max(rows) == 6
