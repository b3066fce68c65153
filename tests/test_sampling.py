"""Sampled text follows the target's law, on both decoding paths: seeded chi-square tests against exact laws."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import prompt, tiny_drafter, tiny_target
from torch.nn import functional as F
from transformers import StoppingCriteriaList

from modeling_domino.generation_domino import stream


VOCAB = 3
RUNS = 150
# A right sampler fails one in a million seeds, and the seeds are fixed; a wrong one misses by hundreds.
Z_LIMIT = 4.8

PATHS = {
    "stock": lambda target, drafter, ids, **kwargs: target.generate(ids, assistant_model=drafter, **kwargs),
    "speculative": lambda target, drafter, ids, **kwargs: loop(target, drafter, ids, rule="speculative", **kwargs),
    "block": lambda target, drafter, ids, **kwargs: loop(target, drafter, ids, rule="block", **kwargs),
    "match": lambda target, drafter, ids, **kwargs: loop(target, drafter, ids, rule="match", **kwargs),
}
ALL = pytest.mark.parametrize("path", PATHS)


def loop(target, drafter, input_ids, **kwargs):
    steps = stream(target, drafter, input_ids, **kwargs)
    return torch.cat([input_ids, input_ids.new_tensor([[t for step in steps for t in step.token_ids]])], dim=1)


def z_score(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Chi-square of counts, as standard deviations above its mean; rare cells are pooled."""
    order = expected.argsort()
    observed, expected = observed[order].double(), expected[order].double()
    assert observed[expected == 0].sum() == 0, "text outside the target's support"
    observed, expected = observed[expected > 0], expected[expected > 0]
    rare = int((expected.cumsum(0) < 5).sum()) + 1
    observed = torch.cat([observed[:rare].sum()[None], observed[rare:]])
    expected = torch.cat([expected[:rare].sum()[None], expected[rare:]])
    # The Wilson-Hilferty cube root of a chi-square is close to normal.
    freedom = max(1, len(expected) - 1)
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    spread = 2 / (9 * freedom)
    return ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


def exact_law(target, input_ids, length: int, *, ends=lambda ids: False, processors=None) -> dict[tuple, float]:
    """Probability of every text of at most `length` tokens; `ends` says where a text stops early."""
    law = {(): 1.0}
    done = {}
    for _ in range(length):
        prefixes = list(law)
        ids = torch.cat(
            [input_ids.expand(len(prefixes), -1), torch.tensor(prefixes).long().view(len(prefixes), -1)], 1
        )
        logits = target(ids).logits[:, -1].float()
        if processors is not None:
            logits = processors(ids, logits)
        grown = {}
        for prefix, row in zip(prefixes, logits.double().softmax(-1).tolist()):
            for token, probability in enumerate(row):
                text = (*prefix, token)
                where = done if ends(text) else grown
                where[text] = law[prefix] * probability
        law = grown
    return {**done, **law}


def check_texts(target, drafter, path, law, *, runs: int, input_ids, **options) -> None:
    counts = dict.fromkeys(law, 0)
    options.update(attention_mask=torch.ones_like(input_ids), pad_token_id=0)
    torch.manual_seed(0)
    for _ in range(runs):
        output = PATHS[path](target, drafter, input_ids, do_sample=True, top_k=0, **options)
        counts[tuple(output[0, input_ids.shape[1] :].tolist())] += 1
    z = z_score(torch.tensor(list(counts.values())), runs * torch.tensor(list(law.values())))
    assert z < Z_LIMIT, f"z = {z:.1f}"


@pytest.fixture(scope="module")
def pair():
    target = tiny_target(vocab_size=VOCAB, num_layers=2, hidden_size=16)
    with torch.no_grad():
        # Flatter laws: every text of a few tokens shall occur.
        target.lm_head.weight.mul_(0.7)
    return target, tiny_drafter(target, block_size=4, target_layer_ids=[0], num_hidden_layers=1)


@pytest.fixture(scope="module")
def uniform_pair():
    """Target and drafter that draw from all tokens alike: the hardest case for drafts that are dropped when they stop."""
    target = tiny_target(vocab_size=VOCAB, num_layers=2, hidden_size=16)
    with torch.no_grad():
        target.lm_head.weight.zero_()
    return target, tiny_drafter(target, block_size=4, target_layer_ids=[0], num_hidden_layers=1, with_head=False)


@ALL
@torch.no_grad()
def test_law_of_whole_texts(pair, path):
    input_ids = prompt(3, vocab_size=VOCAB)
    check_texts(*pair, path, exact_law(pair[0], input_ids, 4), runs=RUNS, input_ids=input_ids, max_new_tokens=4)


@ALL
@torch.no_grad()
def test_law_with_stop_tokens(uniform_pair, path):
    """A sampled draft that stops the text must not be dropped for being one: that favours the other tokens."""
    input_ids = prompt(3, vocab_size=VOCAB)
    law = exact_law(uniform_pair[0], input_ids, 4, ends=lambda text: text[-1] == 1)
    check_texts(*uniform_pair, path, law, runs=2 * RUNS, input_ids=input_ids, max_new_tokens=4, eos_token_id=[1])


def ends_oddly(text) -> bool:
    return len(text) > 1 and text[-1] + text[-2] == 2


@ALL
@torch.no_grad()
def test_law_with_a_stopping_criterion(uniform_pair, path):
    input_ids = prompt(3, vocab_size=VOCAB)
    law = exact_law(uniform_pair[0], input_ids, 4, ends=ends_oddly)
    criteria = StoppingCriteriaList([lambda ids, scores, **kwargs: torch.tensor([ends_oddly(ids[0, 3:].tolist())])])
    check_texts(*uniform_pair, path, law, runs=RUNS, input_ids=input_ids, max_new_tokens=4, stopping_criteria=criteria)


def markov_target(vocab_size: int):
    """A target whose next token depends on the last one only: its layers add nothing to the embedding."""
    target = tiny_target(vocab_size=vocab_size, num_layers=2, hidden_size=16)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return target


PROCESSORS = {
    "none": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8, "temperature": 1.3},
    "bias": {"sequence_bias": [[[1], 0.7], [[2, 3], 2.0]], "temperature": 0.8},
    "banned": {"bad_words_ids": [[0], [4, 2]], "min_p": 0.05},
}


@ALL
@pytest.mark.parametrize("name", PROCESSORS)
@torch.no_grad()
def test_law_of_transitions(name, path):
    """One long text of a chain: thousands of independent draws, many of them in accepted blocks."""
    target = markov_target(8)
    drafter = tiny_drafter(target, block_size=5, target_layer_ids=[0], num_hidden_layers=1)
    options = {"do_sample": True, "top_k": 0, **PROCESSORS[name]}
    torch.manual_seed(1)
    output = PATHS[path](target, drafter, prompt(2, vocab_size=8), max_new_tokens=320, pad_token_id=0, **options)
    assert sum(drafter.last_run.accepted) > 30
    text = output[0, 1:]
    ids = torch.arange(8)[:, None]
    if name == "none":
        processed = target(ids).logits[:, -1].float()
    else:
        # What plain sampling would draw from, asked of plain generate.
        config = {**options, "max_new_tokens": 1, "output_scores": True, "return_dict_in_generate": True}
        mask = torch.ones(1, 2, dtype=torch.long)
        # Behind another token: transformers 5.8 ignores a bias on two tokens in a text of one.
        rows = [
            target.generate(F.pad(row[None], (1, 0)), attention_mask=mask, pad_token_id=0, **config).scores[0]
            for row in ids
        ]
        processed = torch.cat(rows)
    law = processed.double().softmax(-1)
    counts = torch.zeros(8, 8)
    for last, token in itertools.pairwise(text.tolist()):
        counts[last, token] += 1
    z = z_score(counts.flatten(), (counts.sum(1, keepdim=True) * law).flatten())
    assert z < Z_LIMIT, f"z = {z:.1f}"


@torch.no_grad()
def test_processors_that_allow_only_a_stop_token(pair):
    """Then there is nothing to draft from; the text still ends where it must."""
    target, drafter = pair
    ids = prompt(3, vocab_size=VOCAB)

    def allowed(batch_id, text):
        return [1] if len(text) >= 6 else [0, 2]

    options = {"do_sample": True, "top_k": 0, "eos_token_id": 1, "max_new_tokens": 12, "pad_token_id": 1}
    for generate in PATHS.values():
        output = generate(target, drafter, ids, prefix_allowed_tokens_fn=allowed, **options)
        assert output.shape[1] == 7 and output[0, -1] == 1
        # Nor does a top-k that keeps the stop token alone leave a draft without a law.
        generate(target, drafter, ids, **{**options, "top_k": 1})
