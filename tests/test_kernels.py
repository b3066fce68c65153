"""Which implementation drafts: the choice, what it says of itself, and that drafts do not depend on it."""

from __future__ import annotations

import pytest
import torch
from conftest import PATHS, generate_loop, pattern, prompt, tiny_drafter, tiny_target
from torch import nn

from modeling_domino import kernels_domino
from modeling_domino.kernels_domino import REPOSITORY, head_weights, roll_out
from modeling_domino.target_domino import TargetView
from modeling_domino.vocabulary_domino import DraftVocabulary


@pytest.fixture(autouse=True)
def nothing_is_chosen_outside(monkeypatch):
    for name in ("DOMINO_KERNELS", "LOCAL_KERNELS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def local_kernels(domino_kernels, kernel_repo, kernel_device):
    """A folder with a build; the interpreter is fast, and runs on CPU tensors."""
    pytest.importorskip("kernels", reason="the kernels library is not installed (`make test` installs it)")
    return str(kernel_repo)


def pair(device: str = "cpu", **config):
    target = tiny_target().to(device)
    return target, tiny_drafter(target, **config).to(device)


# ---- drafts do not depend on it


@pytest.mark.parametrize("gates_table", [False, True], ids=["embeddings", "table"])
@pytest.mark.parametrize("path", PATHS)
def test_chains_are_the_same_with_kernels_and_without(local_kernels, kernel_device, path, gates_table):
    target, drafter = pair(kernel_device, block_size=5, prefix_len=1)
    runs = []
    for choice in ("torch", local_kernels):
        drafter.set_kernels(choice, gates_table=gates_table)
        ids = PATHS[path](target, drafter, prompt(5).to(kernel_device), max_new_tokens=12)
        runs.append((ids.tolist(), [step.draft_ids for step in drafter.last_run.steps]))
        counts = drafter.kernel_report().chains
        assert counts["triton" if choice == local_kernels else "torch"] > 2
        assert sum(counts.values()) == max(counts.values())
    assert runs[0] == runs[1]


def test_trees_are_the_same_with_kernels_and_without(local_kernels, kernel_device):
    target, drafter = pair(kernel_device, block_size=4)
    runs = []
    for choice in ("torch", local_kernels):
        drafter.set_kernels(choice)
        ids = drafter.spec_generate(target, prompt(4).to(kernel_device), max_new_tokens=8, tree=6)
        runs.append((ids.tolist(), [(step.draft_ids, step.parents) for step in drafter.last_run.steps]))
    assert runs[0] == runs[1]
    assert drafter.kernel_report().trees["triton"] > 1


def test_batches_are_the_same_with_kernels_and_without(local_kernels, kernel_device):
    target, drafter = pair(kernel_device)
    texts = []
    for choice in ("torch", local_kernels):
        drafter.set_kernels(choice)
        texts.append(drafter.spec_generate(target, prompt(5, batch=3).to(kernel_device), max_new_tokens=6).tolist())
    assert texts[0] == texts[1]
    assert drafter.kernel_report().chains["triton"] > 0


@pytest.fixture
def block(kernel_device):
    """A target's view, a drafter, and what the backbone would make of a block."""
    target, drafter = pair(kernel_device)
    head = drafter.head

    def draft(choice, **options):
        drafter.set_kernels(choice)
        with torch.no_grad():
            return roll_out(
                drafter,
                TargetView(target, drafter.config),
                options.pop("head", head),
                hidden=pattern(2, 3, 32).to(kernel_device),
                anchors=torch.tensor([5, 40], device=kernel_device),
                **{"base_logits": pattern(2, 3, 64, offset=9).to(kernel_device), **options},
            )

    draft.head, draft.drafter, draft.device = head, drafter, kernel_device
    return draft


def test_candidates_are_the_same(local_kernels, block):
    ids, _ = block(local_kernels, candidates=7)
    assert torch.equal(ids, block("torch", candidates=7)[0])


def test_draft_vocabularies_are_the_same(local_kernels, block, kernel_device):
    """Logits over 20 tokens of 64, none at its own place: places and tokens must not be confused."""
    vocabulary = DraftVocabulary(torch.arange(63, 43, -1, device=kernel_device))
    options = {
        "base_logits": pattern(2, 3, 20, offset=9).to(kernel_device),
        "head": block.head.restricted(vocabulary.correction),
        "vocabulary": vocabulary.ids,
    }
    ids, _ = block(local_kernels, **options)
    assert torch.equal(ids, block("torch", **options)[0])
    assert torch.equal(block(local_kernels, candidates=4, **options)[0], block("torch", candidates=4, **options)[0])
    assert (ids > 43).all()


def test_probabilities_are_those_of_the_corrected_logits(local_kernels, block):
    ids, probabilities = block(local_kernels, want_probabilities=True)
    assert block("torch", want_probabilities=True) is None
    weights, head = head_weights(block.head), block.head
    with torch.no_grad():
        base = pattern(2, 3, 64, offset=9).to(ids.device)
        embeds = TargetView(tiny_target().to(ids.device), block.drafter.config).embed(
            torch.cat([torch.tensor([[5], [40]], device=ids.device), ids[:, :-1]], dim=1), like=weights.weight_in
        )
        law = head.teacher_forced(base, pattern(2, 3, 32).to(ids.device), embeds).softmax(-1)
    torch.testing.assert_close(probabilities, law.gather(2, ids[..., None])[..., 0], atol=1e-5, rtol=1e-4)


def test_probabilities_that_kernels_cannot_give_go_step_by_step(local_kernels, block):
    assert block(local_kernels, want_probabilities=True, candidates=7) is None
    assert block(local_kernels, want_probabilities=True, calibrated=True) is None
    assert block.drafter.kernel_report().chains == {"triton": 0, "torch": 1}


def test_trained_weights_are_read_anew(local_kernels, block):
    """Graphs and tables of old weights are dropped: nothing is chosen anew between the two blocks."""
    drafter, target = block.drafter, tiny_target().to(block.device)
    view = TargetView(target, drafter.config)
    inputs = {
        "base_logits": pattern(2, 3, 64, offset=9).to(block.device),
        "hidden": pattern(2, 3, 32).to(block.device),
        "anchors": torch.tensor([5, 40], device=block.device),
    }
    drafter.set_kernels(local_kernels, gates_table=True)
    with torch.no_grad():
        before, _ = roll_out(drafter, view, block.head, **inputs)
        drafter.prefix_gru.weight_ih_l0.mul_(-2.0)
        drafter.embed_proj[2].weight.mul_(-1.5)
        after, _ = roll_out(drafter, view, block.head, **inputs)
        # The table holds what the target's embeddings give to the gates.
        target.get_input_embeddings().weight.mul_(-3.0)
        later, _ = roll_out(drafter, view, block.head, **inputs)
        drafter.set_kernels("torch")
        expected, _ = roll_out(drafter, view, block.head, **inputs)
    assert torch.equal(after, block("torch")[0])
    assert not torch.equal(after, before)
    assert torch.equal(later, expected) and not torch.equal(later, after)


# ---- the choice


def test_without_kernels_torch_drafts_and_says_so():
    target, drafter = pair()
    generate_loop(target, drafter, prompt(4), max_new_tokens=6)
    report = drafter.kernel_report()
    assert report.choice == "auto" and report.source is None and report.chains["triton"] == 0
    assert str(report).startswith("Drafting by torch (no kernels here: LOCAL_KERNELS names none")
    assert f"{report.chains['torch']} chains by torch" in str(report)


def test_torch_can_be_chosen(monkeypatch):
    _, drafter = pair()
    monkeypatch.setenv("DOMINO_KERNELS", "torch")
    assert drafter.kernel_report().reason == "as chosen"
    assert str(drafter.kernel_report()) == "Drafting by torch (as chosen); so far nothing."


def test_kernels_that_are_asked_for_must_be_there():
    _, drafter = pair()
    with pytest.raises(ImportError, match="told to use kernels, but there are no kernels here"):
        drafter.set_kernels("kernels")
    for choice in (None, 3, ["torch"]):
        with pytest.raises(ValueError, match="are chosen by a word, a folder or a Hub id, got"):
            drafter.set_kernels(choice)
    with pytest.raises(ValueError, match="got 'kernel'; `python kernels/build.py` makes a build"):
        drafter.set_kernels("kernel")


def test_the_variable_and_local_kernels_choose(local_kernels, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", f"ORG/other=/nowhere:{REPOSITORY}={local_kernels}")
    assert pair()[1].kernel_report().source == local_kernels
    monkeypatch.delenv("LOCAL_KERNELS")
    monkeypatch.setenv("DOMINO_KERNELS", local_kernels)
    assert pair()[1].kernel_report().source == local_kernels


def test_kernels_that_cannot_run_on_the_device_say_why(local_kernels, monkeypatch, domino_kernels):
    """As on a machine without a GPU and with the interpreter off: "auto" falls back, a named build is an error."""
    target, drafter = pair()
    drafter.set_kernels(local_kernels)
    module = kernels_domino._CHOSEN[drafter].module
    monkeypatch.setattr(module.launch, "interpreted", lambda: False)
    assert drafter.kernel_report().reason == "Triton has no compiler for cpu tensors"
    with pytest.raises(RuntimeError, match="which cannot run: Triton has no compiler for cpu tensors; choose 'auto'"):
        generate_loop(target, drafter, prompt(4), max_new_tokens=6)
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPOSITORY}={local_kernels}")
    drafter.set_kernels("auto")
    generate_loop(target, drafter, prompt(4), max_new_tokens=6)
    assert drafter.kernel_report().chains["torch"] > 0


def test_nothing_is_fetched_unasked(monkeypatch):
    library = pytest.importorskip("kernels", reason="the kernels library is not installed (`make test` installs it)")
    asked = []
    monkeypatch.setattr(library, "get_kernel", lambda *args, **kwargs: asked.append((args, kwargs)))
    target, drafter = pair()
    generate_loop(target, drafter, prompt(4), max_new_tokens=6)
    assert asked == []
    with pytest.raises(AttributeError):
        # The library's stand-in returns no kernels.
        drafter.set_kernels("ORG/theirs")
    assert asked == [(("ORG/theirs",), {"version": 1, "trust_remote_code": ["ORG/theirs"]})]


def test_embeddings_that_do_not_lie_in_memory_as_they_are_read_are_not_used():
    target, drafter = pair()
    view = TargetView(target, drafter.config)
    assert view.embedding_rows() is target.get_input_embeddings().weight
    target.get_input_embeddings().register_forward_hook(lambda module, args, output: output * 2)
    assert view.embedding_rows() is None
    target, drafter = pair()
    target.set_input_embeddings(type("Scaled", (nn.Embedding,), {})(64, 32))
    assert TargetView(target, drafter.config).embedding_rows() is None


@pytest.mark.gpu
def test_a_captured_rollout_is_the_uncaptured_one(local_kernels, kernel_device):
    if kernel_device != "cuda":
        pytest.skip("graphs are captured on CUDA devices alone")
    target, drafter = pair(kernel_device)
    texts = []
    for choice in ("torch", local_kernels):
        drafter.set_kernels(choice)
        texts.append(generate_loop(target, drafter, prompt(5).to(kernel_device), max_new_tokens=24).tolist())
    assert texts[0] == texts[1]
    assert drafter.kernel_report().graphs > 0


def test_options_of_a_run_reach_the_kernels(local_kernels, kernel_device):
    target, drafter = pair(kernel_device)
    drafter.set_kernels(local_kernels)
    ids = drafter.spec_generate(target, prompt(4).to(kernel_device), max_new_tokens=6, candidates=3)
    assert drafter.kernel_report().chains["triton"] > 0
    drafter.set_kernels("torch")
    assert torch.equal(ids, drafter.spec_generate(target, prompt(4).to(kernel_device), max_new_tokens=6, candidates=3))


def test_a_static_round_holds_the_kernels(local_kernels, kernel_device):
    """They run as parts of the round, which is the graph, and draft what the torch functions draft."""
    target, drafter = pair(kernel_device)
    texts = []
    for choice in ("torch", local_kernels):
        drafter.set_kernels(choice)
        options = {"max_new_tokens": 5, "candidates": 3, "static": True}
        texts.append(generate_loop(target, drafter, prompt(5).to(kernel_device), **options).tolist())
    report = drafter.kernel_report()
    assert texts[0] == texts[1]
    assert report.chains["triton"] == len(drafter.last_run.rounds) and report.chains["torch"] == 0
    assert report.graphs == (kernel_device == "cuda")
    assert not kernels_domino.kernels_of(drafter).rollouts._entries
