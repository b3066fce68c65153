"""Kernels of the Domino correction head: chains and trees of drafts.

The functions take tensors on any device. Where Triton runs they launch kernels; elsewhere they are the torch functions of
`ops.py`, of the same meaning; `missing(device)` says why.
"""

from . import layers
from .chain import (
    chain_rollout,
    choose_candidate,
    correct_argmax,
    correct_sample,
    finalize,
    gather_rows,
    gru_step,
    shortlist,
)
from .launch import missing
from .ops import HeadWeights
from .tree import tree_expand, tree_step


__all__ = [
    "HeadWeights",
    "chain_rollout",
    "choose_candidate",
    "correct_argmax",
    "correct_sample",
    "finalize",
    "gather_rows",
    "gru_step",
    "layers",
    "missing",
    "shortlist",
    "tree_expand",
    "tree_step",
]
