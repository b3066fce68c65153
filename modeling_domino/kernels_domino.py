"""Which implementation drafts: Triton kernels, or the torch functions of `ops_domino.py`; and says so.

Kernels come from a folder, from what is installed, or from the Hub, and from the Hub only when it is asked for by name:
nothing is downloaded unasked, and no failure is silent. `drafter.kernel_report()` tells what ran, and why not the other.

    choice        what runs
    "auto"        kernels if they are here (`LOCAL_KERNELS` of the `kernels` library, or a `domino_kernels` that can be
                  imported) and the device has a compiler; torch otherwise. The default.
    "torch"       the torch functions
    "kernels"     kernels from where "auto" looks; an error if they cannot run
    a folder      a build made by `kernels/build.py`; an error if it cannot run
    "hub", or an  `kernels.get_kernel`, trusting that one repository; an error if it cannot run
    id ORG/NAME

The choice is an argument (`drafter.set_kernels(...)`), or the variable `DOMINO_KERNELS` where there was none.
"""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from .graphs_domino import Graphs, versions_of
from .ops_domino import HeadWeights, chain_rollout, gru_gates, shortlist, tree_expand, tree_step


VARIABLE = "DOMINO_KERNELS"
# Where the project publishes its kernels; a drafter's config may name others (`kernels`).
REPOSITORY = "domino-drafters/domino-kernels"
VERSION = 1
# Tokens whose gates are computed at once.
TABLE_ROWS = 4096
DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class KernelReport:
    """What drafts.

    Args:
        choice: what was asked for.
        source: where the kernels came from; `None` without kernels.
        reason: why the torch functions ran, or would; `None` if the kernels can run.
        chains, trees: blocks drafted so far, by implementation.
        rounds: static rounds so far (`static_domino.py`), as a CUDA graph and without.
        graphs: CUDA graphs that are held, of blocks and of static rounds.
    """

    choice: str
    source: str | None = None
    reason: str | None = None
    chains: dict[str, int] = field(default_factory=lambda: {"triton": 0, "torch": 0})
    trees: dict[str, int] = field(default_factory=lambda: {"triton": 0, "torch": 0})
    rounds: dict[str, int] = field(default_factory=lambda: {"captured": 0, "uncaptured": 0})
    graphs: int = 0

    def __str__(self) -> str:
        what = f"Triton kernels ({self.source})" if self.reason is None else f"torch ({self.reason})"
        done = [
            f"{count} {name} by {implementation}"
            for name in ("chains", "trees")
            for implementation, count in getattr(self, name).items()
            if count
        ]
        done += [f"{count} static rounds {how}" for how, count in self.rounds.items() if count]
        return f"Drafting by {what}; so far {', '.join(done) or 'nothing'}."


class Kernels:
    """The choice of one drafter, what it resolved to, and its graphs."""

    def __init__(self, choice: str, gates_table: bool = False):
        self.choice, self.gates_table = choice, gates_table
        self.module: ModuleType | None = None
        self.reason: str | None = None
        self.report = KernelReport(choice)
        self.rollouts = Graphs()
        # Static rounds that are kept, with a graph each; they refer to no model between two texts.
        self.rounds: list = []
        self.table: tuple | None = None
        if choice == "torch":
            self.reason = "as chosen"
        else:
            self.module, self.report.source, self.reason = _find(choice)

    def unable(self, device: torch.device) -> str | None:
        """Why the kernels cannot run on `device`.

        Raises:
            RuntimeError: if they were asked for by name, and cannot.
        """
        reason = self.reason or self.module.missing(device)
        if reason is not None and self.choice not in ("auto", "torch"):
            raise RuntimeError(
                f"The drafter was told to use kernels ({self.choice}), which cannot run: {reason}; choose 'auto' or "
                "'torch' instead."
            )
        return reason


_CHOSEN: weakref.WeakKeyDictionary[nn.Module, Kernels] = weakref.WeakKeyDictionary()


def set_kernels(drafter, choice: str | os.PathLike = "auto", *, gates_table: bool = False) -> KernelReport:
    """Chooses what a drafter drafts with; see the module's docstring for `choice`.

    Args:
        gates_table (`bool`): keep what every token gives to the GRU's gates, `[V, 3G]` on the drafter's device (933 MB
            at Qwen3-4B sizes in bf16): one launch and one read of W_ih less per draft.

    Returns:
        [`KernelReport`].

    Raises:
        ValueError, ImportError, OSError: if kernels were asked for by name and are not there.
    """
    if not isinstance(choice, str | os.PathLike):
        raise ValueError(
            f"The kernels of a drafter are chosen by a word, a folder or a Hub id, got {choice!r}; 'auto' is the default."
        )
    choice = os.fspath(choice)
    if choice == "hub":
        choice = getattr(drafter.config, "kernels", None) or REPOSITORY
    made, before = Kernels(choice, gates_table), _CHOSEN.get(drafter)
    # Static rounds hold caches: their memory is free at once.
    for each in before.rounds if before is not None else ():
        each.graphs.forget()
    _CHOSEN[drafter] = made
    return kernel_report(drafter)


def kernel_report(drafter) -> KernelReport:
    """What drafts with this drafter, and why; asking changes nothing."""
    kernels = kernels_of(drafter)
    report = kernels.report
    report.reason = kernels.reason or kernels.module.missing(drafter.device)
    report.graphs = len(kernels.rollouts) + sum(len(each.graphs) for each in kernels.rounds)
    return report


def kernels_of(drafter) -> Kernels:
    """The drafter's choice, and what goes with it."""
    kernels = _CHOSEN.get(drafter)
    if kernels is None:
        kernels = _CHOSEN[drafter] = Kernels(os.environ.get(VARIABLE) or "auto")
    return kernels


def _find(choice: str) -> tuple[ModuleType | None, str | None, str | None]:
    """The kernels, where they came from, and why there are none."""
    if choice in ("auto", "kernels"):
        return _find_here(required=choice == "kernels")
    try:
        import kernels as library
    except ImportError as error:
        raise ImportError(
            f"Kernels from {choice} need the library `kernels`, which is not installed; `pip install kernels`, or choose "
            "'torch'."
        ) from error
    if Path(choice).is_dir():
        return library.get_local_kernel(Path(choice)), choice, None
    if choice.count("/") != 1 or choice.startswith((".", "/", "~")):
        raise ValueError(
            f"The kernels of a drafter must be 'auto', 'torch', 'kernels', 'hub', a folder with a build, or a Hub id, got "
            f"{choice!r}; `python kernels/build.py` makes a build in kernels/."
        )
    module = library.get_kernel(choice, version=VERSION, trust_remote_code=[choice])
    return module, f"{choice}, version {VERSION}", None


def _find_here(required: bool) -> tuple[ModuleType | None, str | None, str | None]:
    """Kernels that are on this machine already and were put there for us."""
    folder = dict(
        entry.split("=", 1) for entry in os.environ.get("LOCAL_KERNELS", "").split(":") if entry.count("=") == 1
    ).get(REPOSITORY)
    if folder is not None:
        return _find(folder)
    try:
        return importlib.import_module("domino_kernels"), "the installed domino_kernels", None
    except ImportError:
        pass
    reason = (
        f"no kernels here: LOCAL_KERNELS names none for {REPOSITORY}, and domino_kernels is not installed; "
        "`drafter.set_kernels('hub')` fetches them"
    )
    if required:
        raise ImportError(f"The drafter was told to use kernels, but there are {reason}.")
    return None, None, reason


# ---- drafting


def roll_out(
    drafter,
    view,
    head,
    *,
    base_logits: torch.Tensor,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    candidates: int = 0,
    vocabulary: torch.Tensor | None = None,
    want_probabilities: bool = False,
    calibrated: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The likeliest drafts of a chain, by the kernels or by their torch twin.

    Args:
        head (`DominoHead`): corrects the logits; `None` for none.
        base_logits: `[B, n, U]`.
        hidden: `[B, n, D]`.
        anchors: `[B]`.
        candidates: how many of the base logits each draft is chosen from, 0 for all.
        vocabulary (*optional*): the tokens that the U logits stand for, `[U]`.
        want_probabilities: also the probability of each draft given those before it.
        calibrated: those probabilities are tempered, draft by draft.

    Returns:
        Token ids `[B, n]` and probabilities `[B, n]`; `None` if drafting has to go step by step: without head, and where
        probabilities come cheaper, or only, that way.
    """
    if head is None or base_logits.shape[1] == 0:
        return None
    kernels = kernels_of(drafter)
    places = candidates if 0 < candidates < base_logits.shape[-1] else 0
    able = kernels.unable(base_logits.device) is None and not (want_probabilities and (places or calibrated))
    table = _input_table(kernels, view, head, base_logits, hidden, embeddings=able)
    able = able and table is not None and _dtypes_fit(head, base_logits, hidden)
    kernels.report.chains["triton" if able else "torch"] += 1
    if want_probabilities and not able:
        return None
    listed = shortlist(base_logits, places) if places else None
    run = _by_kernels if able else _by_torch
    ids, features = run(kernels, view, head, base_logits, hidden, anchors, listed, vocabulary, table)
    tokens = ids if vocabulary is None else vocabulary[ids]
    if not want_probabilities:
        return tokens, None
    weights, one = head_weights(head), torch.ones(1, device=ids.device)
    log_q, _ = kernels.module.finalize(
        base_logits, features, ids, weights.weight_out, head.prefix_len, one, weights.bias_out
    )
    return tokens, log_q.exp()


def _by_torch(kernels: Kernels, view, head, base_logits, hidden, anchors, listed, vocabulary, table):
    weights = head_weights(head)

    def gates_of(ids: torch.Tensor) -> torch.Tensor:
        if table is not None:
            return table[ids]
        return gru_gates(view.embed(ids[:, None], like=hidden)[:, 0], weights.weight_ih, weights.bias_ih, head.linear)

    return chain_rollout(
        base_logits,
        hidden,
        anchors,
        gates_of,
        weights,
        head.prefix_len,
        listed,
        vocabulary=vocabulary,
        linear=head.linear,
    )


def _by_kernels(kernels: Kernels, view, head, base_logits, hidden, anchors, listed, vocabulary, table):
    weights = head_weights(head)
    tables = {"gates_table" if kernels.gates_table else "embeddings": table}

    def run(base_logits, hidden, anchors, candidates=None):
        return kernels.module.chain_rollout(
            base_logits,
            hidden,
            anchors,
            weights,
            head.prefix_len,
            candidates=candidates,
            vocabulary=vocabulary,
            **tables,
        )

    inputs = [tensor for tensor in (base_logits, hidden, anchors, listed) if tensor is not None]
    constants = [tensor for tensor in (*weights, table, vocabulary) if tensor is not None]
    return kernels.rollouts(run, inputs, constants, head.prefix_len)


def tree_functions(drafter, head, base_logits: torch.Tensor) -> tuple[Callable, Callable]:
    """`tree_step` and `tree_expand`, by the kernels or by torch."""
    kernels = kernels_of(drafter)
    if head is None:
        return tree_step, tree_expand
    able = kernels.unable(base_logits.device) is None and _dtypes_fit(head, base_logits)
    kernels.report.trees["triton" if able else "torch"] += 1
    return (kernels.module.tree_step, kernels.module.tree_expand) if able else (tree_step, tree_expand)


def head_weights(head) -> HeadWeights:
    """The parameters of a head as the kernels take them."""
    gru, (first, _, last) = head.prefix_gru, head.embed_proj
    biases = (gru.bias_ih_l0, gru.bias_hh_l0) if gru.bias else (None, None)
    return HeadWeights(
        gru.weight_ih_l0, gru.weight_hh_l0, first.weight, last.weight, *biases, getattr(first, "bias", None), last.bias
    )


def _dtypes_fit(head, *tensors: torch.Tensor) -> bool:
    given = [tensor for tensor in (*head_weights(head), *tensors) if tensor is not None]
    return all(tensor.dtype in DTYPES for tensor in given)


def _input_table(kernels: Kernels, view, head, *tensors: torch.Tensor, embeddings: bool) -> torch.Tensor | None:
    """What a token gives to the gates, if such a table was asked for; else, if wanted, the target's embeddings."""
    device = tensors[0].device
    if not kernels.gates_table:
        rows = view.embedding_rows() if embeddings else None
        fits = rows is not None and rows.device == device and rows.dtype in DTYPES
        return rows if fits else None
    weights = head_weights(head)
    read = (weights.weight_ih, weights.bias_ih, *view.target.get_input_embeddings().parameters())
    state = versions_of([tensor for tensor in read if tensor is not None])
    if kernels.table is None or kernels.table[0]() is not view.target or kernels.table[1] != state:
        size = view.target.get_input_embeddings().num_embeddings
        with torch.no_grad():
            parts = [
                gru_gates(view.embed(ids[None], like=weights.weight_ih)[0], weights.weight_ih, weights.bias_ih)
                for ids in torch.arange(size, device=device).split(TABLE_ROWS)
            ]
        kernels.table = (weakref.ref(view.target), state, torch.cat(parts))
    return kernels.table[2]
