"""Draft trees: the builder against plain best-first search, the accept walk by enumeration, and the text they yield."""

from __future__ import annotations

import heapq
import itertools

import pytest
import torch
from conftest import fill, generate_loop, prompt, tiny_drafter, tiny_target
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
)

from modeling_domino import drafting_domino, tree_domino
from modeling_domino.cache_domino import keep_rows
from modeling_domino.drafting_domino import Block
from modeling_domino.target_domino import TargetView
from modeling_domino.tree_domino import DraftTree, TreeMask, TreeShape
from modeling_domino.verification_domino import accept_tree


WIDE = TreeShape(nodes=24, lanes=24, candidates=64, children=64)
SHAPES = [TreeShape(nodes=1), TreeShape(nodes=6, lanes=2, candidates=5, children=2), WIDE]


def tree_of(tokens: list[int], parents: list[int]) -> DraftTree:
    """A tree from tokens and the rows of their parents (0 is the anchor)."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    as_batch = [torch.tensor([values]) for values in (tokens, parents, depths[1:])]
    return DraftTree(*as_batch, scores=torch.zeros(1, len(tokens)))


def path_of(row: int, parents: list[int]) -> list[int]:
    """Rows from the anchor's child down to `row`."""
    return [] if row == 0 else [*path_of(parents[row - 1], parents), row]


def test_ancestors_and_mask_show_each_row_its_own_path():
    parents = [0, 0, 1, 3, 2, 4, 6, 7]
    ancestors = tree_of([5] * 8, parents).ancestors()[0]
    for row in range(9):
        assert ancestors[row].nonzero().flatten().tolist() == [0, *path_of(row, parents)]

    padding = torch.tensor([[0, 0, 1, 1]])
    mask = TreeMask(9, 40, like=torch.zeros(1), padding=padding)
    mask.behind(4, tree_of([5] * 8, [0] * 8).ancestors())
    # A second, smaller tree further on: what the first one hid is prefix by now.
    small = tree_of([1, 2], [0, 1]).ancestors()
    seen = mask.behind(7, small) == 0
    assert seen.shape == (1, 1, 3, 10)
    assert seen[0, 0, :, :2].any() == False  # noqa: E712
    assert seen[0, 0, :, 2:7].all()
    assert torch.equal(seen[0, 0, :, 7:], small[0])


def test_a_mask_grows_with_the_text_and_not_with_its_limit(monkeypatch):
    monkeypatch.setattr(tree_domino, "FIRST_ROWS", 8)
    padding = torch.tensor([[0, 0, 1, 1]])
    tree = tree_of([5] * 3, [0, 1, 0]).ancestors()
    whole = TreeMask(4, 60, like=torch.zeros(1), padding=padding)
    mask = TreeMask(4, 10**9, like=torch.zeros(1), padding=padding)
    whole._mask = whole._mask.new_zeros(1, 1, 4, 60)
    whole._mask[..., :2] = whole._hidden
    for first in (4, 6, 9, 30, 31, 56):
        assert torch.equal(mask.behind(first, tree), whole.behind(first, tree))
    assert mask._mask.shape[3] <= 2 * 60


def best_first(view, head, hidden, base_logits, anchor_embeds, budget: int):
    """The obvious builder: always extend the best open path, with the whole vocabulary, until the budget is spent."""
    base = base_logits[0].float()

    def extend(state, embeds, depth):
        logits = base[depth]
        state = head.advance(state, embeds)
        if depth >= head.prefix_len:
            logits = head.correct(logits[None], hidden[:, depth], state)[0]
        return state, logits.log_softmax(dim=-1)

    order = itertools.count()
    heap = [(0.0, next(order), (), head.initial_state(1), anchor_embeds)]
    found = []
    while heap and len(found) <= budget:
        cost, _, path, state, embeds = heapq.heappop(heap)
        found.append((path, -cost))
        if len(path) == base.shape[0]:
            continue
        state, log_probabilities = extend(state, embeds, len(path))
        for token, value in enumerate(log_probabilities.tolist()):
            child = view.embed(torch.tensor([[token]]), like=hidden)[:, 0]
            heapq.heappush(heap, (cost - value, next(order), (*path, token), state, child))
    return dict(found[1:])


def grow(drafter, view, hidden, base_logits, anchor_embeds, shape, *, temperature=1.0, details=False) -> DraftTree:
    """The builder on a block that was read already."""
    block = Block(hidden, anchor_embeds, base_logits, drafter.head, drafter.config.vocab_size)
    scales = [temperature] * base_logits.shape[1]
    return drafting_domino._best_nodes(drafting_domino._grow(block, view, shape, scales, details), shape.nodes)


@pytest.mark.parametrize("prefix_len", [0, 1, 3])
@pytest.mark.parametrize("depth", [1, 3, 5])
def test_frontier_builder_is_best_first_search(prefix_len, depth):
    target = tiny_target(vocab_size=20)
    drafter = tiny_drafter(target, block_size=5, prefix_len=prefix_len)
    view = TargetView(target, drafter.config)
    for salt in range(3):
        hidden = torch.randn(1, depth, 32, generator=torch.Generator().manual_seed(salt))
        base_logits = 2 * torch.randn(1, depth, 20, generator=torch.Generator().manual_seed(100 + salt))
        anchor_embeds = view.embed(torch.tensor([[salt]]), like=hidden)[:, 0]
        with torch.no_grad():
            shape = TreeShape(nodes=15, lanes=15, candidates=20, children=20)
            tree = grow(drafter, view, hidden, base_logits, anchor_embeds, shape)
            expected = best_first(view, drafter.head, hidden, base_logits, anchor_embeds, 15)
        parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()
        grown = {
            tuple(tokens[row - 1] for row in path_of(i + 1, parents)): score
            for i, score in enumerate(tree.scores[0].tolist())
        }
        assert list(grown) == list(expected)
        assert list(grown.values()) == pytest.approx(list(expected.values()), abs=1e-5)
        assert tree.depths[0].tolist() == [len(path) for path in grown]


def test_fewer_candidates_keep_the_normaliser_of_the_whole_vocabulary():
    target = tiny_target(vocab_size=20)
    drafter = tiny_drafter(target, prefix_len=4)
    view = TargetView(target, drafter.config)
    base_logits = torch.randn(1, 3, 20, generator=torch.Generator().manual_seed(0))
    hidden = torch.zeros(1, 3, 32)
    with torch.no_grad():
        shape = TreeShape(nodes=4, candidates=3)
        tree = grow(drafter, view, hidden, base_logits, hidden[:, 0], shape, temperature=0.5, details=True)
    # Within the prefix nothing is corrected, so the scores are the tempered base law itself.
    law = (base_logits[0] / 0.5).softmax(dim=-1)
    first = tree.depths[0] == 1
    assert torch.allclose(tree.scores[0][first].exp(), law[0][tree.tokens[0][first]])
    assert torch.allclose(tree.probabilities, tree.base_probabilities, atol=1e-6)
    assert tree.base_ids[0].tolist() == [base_logits[0, depth - 1].argmax() for depth in tree.depths[0]]


def test_every_walk_over_small_trees():
    trees = [([0, 1, 2], [0, 1, 2]), ([0, 1, 2], [0, 0, 0]), ([0, 1, 1, 2], [0, 0, 1, 2]), ([2, 2, 0], [0, 1, 1])]
    for tokens, parents in trees:
        tree = tree_of(tokens, parents)
        for own in itertools.product(range(3), repeat=len(tokens) + 1):
            row, path = 0, []
            while True:
                children = [i + 1 for i, parent in enumerate(parents) if parent == row and tokens[i] == own[row]]
                if not children:
                    break
                row = children[0]
                path.append(row)
            accepted, own_id, rows = accept_tree(
                tree.tokens, tree.parents, tree.ancestors(), torch.tensor([own], dtype=torch.long)
            )
            assert accepted.item() == len(path)
            assert own_id.item() == own[row]
            assert rows[0, : len(path) + 1].tolist() == [0, *path]


def test_the_law_of_a_walk_is_the_targets_law():
    """Every pick of the target at every row, with its weight: two tokens of text follow the target exactly."""
    vocab, generator = 3, torch.Generator().manual_seed(0)
    first = torch.rand(vocab, generator=generator, dtype=torch.float64)
    second = torch.rand(vocab, vocab, generator=generator, dtype=torch.float64)
    first, second = first / first.sum(), second / second.sum(dim=1, keepdim=True)
    tokens, parents = [1, 0, 2], [0, 0, 1]
    tree = tree_of(tokens, parents)
    # The law at a row depends on the row's last token alone here.
    laws = [first, second[1], second[0], second[2]]
    law = torch.zeros(vocab, vocab, dtype=torch.float64)
    for own in itertools.product(range(vocab), repeat=4):
        weight = torch.stack([laws[row][token] for row, token in enumerate(own)]).prod()
        accepted, own_id, rows = accept_tree(tree.tokens, tree.parents, tree.ancestors(), torch.tensor([own]))
        text = [tokens[row - 1] for row in rows[0, 1 : accepted + 1].tolist()] + [own_id.item()]
        if len(text) == 1:
            law[text[0]] += weight * second[text[0]]
        else:
            law[text[0], text[1]] += weight
    assert torch.allclose(law, first[:, None] * second, atol=1e-12)


def test_keep_rows_moves_the_path_behind_the_prefix():
    cache = DynamicCache()
    states = torch.arange(10.0)[None, None, :, None].expand(1, 2, 10, 3)
    for layer in range(2):
        cache.update(states.clone(), -states, layer)
    keep_rows(cache, 6, torch.tensor([0, 3, 5]))
    for layer in cache.layers:
        assert layer.keys[0, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 7, 9]
        assert layer.values[0, 1, :, 2].tolist() == [0, -1, -2, -3, -4, -7, -9]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_text_is_the_targets(kind, attention, shape):
    target = tiny_target(kind)
    target.set_attn_implementation(attention)
    for shift_label, block_size, with_head in ((True, 4, True), (False, 5, True), (True, 1, True), (False, 4, False)):
        drafter = tiny_drafter(target, block_size=block_size, shift_label=shift_label, with_head=with_head)
        expected = target.generate(prompt(5), do_sample=False, max_new_tokens=30)
        assert torch.equal(generate_loop(target, drafter, prompt(5), max_new_tokens=30, tree=shape), expected)
        run = drafter.last_run
        assert run.kind == "tree"
        assert run.output_ids == expected[0, 5:].tolist()


def test_a_tree_of_every_token_always_follows_the_target():
    target = tiny_target(vocab_size=12)
    drafter = tiny_drafter(target, block_size=2)
    everything = TreeShape(nodes=12 + 144, lanes=12, candidates=12, children=12)
    expected = target.generate(prompt(5, vocab_size=12), do_sample=False, max_new_tokens=31)
    assert torch.equal(
        generate_loop(target, drafter, prompt(5, vocab_size=12), max_new_tokens=31, tree=everything), expected
    )
    assert drafter.last_run.accepted == [2] * 10


@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 6, 7])
def test_cut_points(tokens):
    target = tiny_target(vocab_size=12)
    drafter = tiny_drafter(target, block_size=4)
    shape = TreeShape(nodes=60, lanes=12, candidates=12, children=12)
    ids = prompt(5, vocab_size=12)
    expected = target.generate(ids, do_sample=False, max_new_tokens=tokens)
    assert torch.equal(generate_loop(target, drafter, ids, max_new_tokens=tokens, tree=shape), expected)

    class StopsAt(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((1,), input_ids.shape[1] == 5 + tokens, dtype=torch.bool)

    stopped = generate_loop(target, drafter, ids, max_new_tokens=20, tree=shape, stopping_criteria=[StopsAt()])
    assert torch.equal(stopped, expected)

    eos = expected[0, -1].item()
    kwargs = {"max_new_tokens": 20, "eos_token_id": [eos, 11], "pad_token_id": 0}
    expected = target.generate(ids, do_sample=False, **kwargs)
    assert torch.equal(generate_loop(target, drafter, ids, tree=shape, **kwargs), expected)


def test_left_padding_and_processors_on_the_path():
    target = tiny_target()
    drafter = tiny_drafter(target)
    ids = torch.cat([torch.full((1, 3), 62), prompt(5)], dim=1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    kwargs = {
        "attention_mask": mask,
        "max_new_tokens": 25,
        "pad_token_id": 62,
        "logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)]),
    }
    expected = target.generate(ids, do_sample=False, **kwargs)
    assert torch.equal(generate_loop(target, drafter, ids, tree=WIDE, **kwargs), expected)


def test_sampled_text_follows_the_targets_law():
    target = tiny_target(vocab_size=6)
    drafter = tiny_drafter(target, block_size=2)
    ids = prompt(3, vocab_size=6)
    with torch.no_grad():
        first = (target(ids).logits[0, -1] / 0.8).softmax(dim=-1)
        pairs = torch.cat([ids.expand(6, -1), torch.arange(6)[:, None]], dim=1)
        second = (target(pairs).logits[:, -1] / 0.8).softmax(dim=-1)
        triples = torch.cat([pairs.repeat_interleave(6, dim=0), torch.arange(6).repeat(6)[:, None]], dim=1)
        third = (target(triples).logits[:, -1] / 0.8).softmax(dim=-1).view(6, 6, 6)
    law = first[:, None, None] * second[:, :, None] * third
    torch.manual_seed(0)
    samples, counts = 300, torch.zeros(6, 6, 6)
    options = {"max_new_tokens": 3, "do_sample": True, "temperature": 0.8, "top_k": 0, "tree": TreeShape(nodes=5)}
    for _ in range(samples):
        counts[tuple(generate_loop(target, drafter, ids, **options)[0, 3:].tolist())] += 1
    assert drafter.last_run.rule == "match"
    # Pairs, since triples are too rare for the statistic: the first two tokens, and the last two.
    for dim in (2, 0):
        expected, observed = law.sum(dim).flatten() * samples, counts.sum(dim).flatten()
        common = expected >= 5
        observed = torch.cat([observed[common], observed[~common].sum()[None]])
        expected = torch.cat([expected[common], expected[~common].sum()[None]])
        degrees = len(expected) - 1
        chi_square = ((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum().item()
        # Five standard deviations of the chi-square law.
        assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


def test_trace_has_parents_and_path():
    target = tiny_target(vocab_size=12)
    drafter = tiny_drafter(target)
    drafter.record_details = True
    generate_loop(target, drafter, prompt(5, vocab_size=12), max_new_tokens=20, tree=TreeShape(nodes=9))
    trace = drafter.last_run.trace()
    assert trace["kind"] == "tree"
    for step in trace["rounds"]:
        assert len(step["draft_ids"]) == len(step["parents"]) == len(step["base_ids"]) == len(step["probabilities"])
        assert all(-1 <= parent < node for node, parent in enumerate(step["parents"]))
        assert len(step["path"]) == step["accepted"]
        assert [step["parents"][node] for node in step["path"]] == [-1, *step["path"][:-1]][: step["accepted"]]


@pytest.mark.parametrize("nodes", [4, 16, 60])
def test_a_drafter_that_computes_nan_still_writes_the_targets_text(nodes):
    """Its nodes once hung on the anchor with the depth of another parent, and the text was wrong."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    with torch.no_grad():
        drafter.embed_proj[2].weight[5:40] = float("nan")
    expected = target.generate(prompt(5), do_sample=False, max_new_tokens=30)
    assert torch.equal(generate_loop(target, drafter, prompt(5), max_new_tokens=30, tree=nodes), expected)
    for step in drafter.last_run.rounds:
        depths = {-1: 0}
        for node, parent in enumerate(step.parents or []):
            assert parent < node
            depths[node] = depths[parent] + 1
        assert max(depths.values()) <= drafter.config.num_draft_tokens


def test_processors_are_not_asked_about_texts_they_rule_out():
    target = tiny_target(vocab_size=12)
    drafter = tiny_drafter(target)

    def allowed(batch_id: int, text: torch.Tensor) -> list[int]:
        # Odd and even tokens by turns; the text so far must keep to it.
        new = text[5:].tolist()
        assert all(token % 2 == i % 2 for i, token in enumerate(new)), new
        return list(range(len(new) % 2, 12, 2))

    options = {"max_new_tokens": 20, "prefix_allowed_tokens_fn": allowed}
    expected = target.generate(prompt(5, vocab_size=12), do_sample=False, **options)
    assert torch.equal(generate_loop(target, drafter, prompt(5, vocab_size=12), tree=WIDE, **options), expected)


def test_refusals():
    target = tiny_target()
    drafter = tiny_drafter(target)
    for wrong in (2.5, True):
        with pytest.raises(ValueError, match="must be an integer of at least 1"):
            generate_loop(target, drafter, prompt(4), max_new_tokens=4, tree=wrong)
    for wrong in ("16", "AUTO", TreeShape):
        with pytest.raises(ValueError, match='must be a number of nodes, "auto" or a `TreeShape`, got'):
            generate_loop(target, drafter, prompt(4), max_new_tokens=4, tree=wrong)
    with pytest.raises(ValueError, match="`nodes` of a draft tree must be an integer of at least 1, got 0"):
        generate_loop(target, drafter, prompt(4), max_new_tokens=4, tree=0)
    with pytest.raises(ValueError, match="Trees are verified by `rule='match'`"):
        generate_loop(target, drafter, prompt(4), max_new_tokens=4, tree=4, do_sample=True, rule="speculative")
    with pytest.raises(ValueError, match="dynamic cache, got StaticCache"):
        generate_loop(target, drafter, prompt(4), max_new_tokens=4, tree=4, cache_implementation="static")
    sliding = tiny_target(use_sliding_window=True, sliding_window=4, max_window_layers=2)
    with pytest.raises(ValueError, match="full attention in every layer"):
        generate_loop(sliding, tiny_drafter(sliding), prompt(4), max_new_tokens=4, tree=4)
    # A family without a list of layers: its batches were wrong in silence.
    fields = {name: getattr(target.config, name) for name in ("vocab_size", "hidden_size", "head_dim")}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6, "intermediate_size": 64}
    mistral = fill(MistralForCausalLM(MistralConfig(**fields, **heads, sliding_window=7, eos_token_id=None)))
    drafter, ids = tiny_drafter(mistral), prompt(5, batch=2)
    for options in ({"tree": 4, "input_ids": ids[:1]}, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}):
        with pytest.raises(
            ValueError, match="full attention in every layer, MistralForCausalLM has sliding_attention"
        ):
            drafter.spec_generate(mistral, max_new_tokens=4, **options)
