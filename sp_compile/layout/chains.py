"""Forest -> first-child chains -> plain attention passes.

In depth-first preorder a node's first child starts where the node ends, so a *chain* (a node, its first child, that child's first
child, ...) is one contiguous range of tokens, and the chains cut the pack into consecutive ranges. The visible pairs of a forest are

* inside a chain: one causal pass;
* across chains: the tokens that branch off at node p, from p's second child to the end of p's subtree, are contiguous too and all
  see the same contiguous keys, those of p's chain up to the end of p: one rectangular pass per branching node.

A pair (query, ancestor key) with the key in chain C either has its query in C as well, or leaves C at exactly one node: it is covered
once. Consecutive chains of equal length become one batched causal pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sp_compile.layout.build import Ints
from sp_compile.layout.tensors import register

if TYPE_CHECKING:
    from sp_compile.layout.forest import Forest

CAUSAL = 0
CROSS = 1
FIELDS = ("kind", "q_start", "q_len", "k_start", "k_len", "batch")


def chain_of_node(parent: Ints) -> Ints:
    """int64 [nodes]: number of the first-child chain of each node, in pack order."""
    heads = np.ones(len(parent), dtype=bool)
    heads[1:] = parent[1:] != np.arange(len(parent) - 1)
    return np.cumsum(heads, dtype=np.int64) - 1


def attention_passes(forest: Forest) -> Ints:
    """int64 [passes, 6] with columns `FIELDS`: causal passes in pack order, then cross passes in order of the branching node.

    CAUSAL: `batch` consecutive chains of `q_len` tokens from `q_start`; keys repeat the queries. CROSS: every query of
    [q_start, q_start + q_len) sees every key of [k_start, k_start + k_len); `batch` is 1.
    """
    start, length, parent = forest.node_start, forest.node_len, forest.parent
    nodes = len(parent)
    if nodes == 0:
        return np.empty((0, len(FIELDS)), dtype=np.int64)
    stop = start + length
    chain = chain_of_node(parent)
    heads = np.flatnonzero(np.diff(chain, prepend=-1))
    chain_start = start[heads]
    chain_len = np.diff(chain_start, append=stop[-1])

    runs = np.flatnonzero(np.diff(chain_len, prepend=-1))
    batch = np.diff(runs, append=len(heads))
    causal = np.stack([np.full(len(runs), CAUSAL), chain_start[runs], chain_len[runs], chain_start[runs], chain_len[runs], batch], axis=1)

    later = heads[parent[heads] >= 0]
    # Heads ascend, so the first one met for a parent is its second child.
    branching, first = np.unique(parent[later], return_index=True)
    q_start = start[later[first]]
    # Subtree ends are node numbers; the node after the last starts at T.
    q_len = np.append(start, stop[-1])[forest.node_end[branching]] - q_start
    k_start = chain_start[chain[branching]]
    cross = np.stack([np.full(len(branching), CROSS), q_start, q_len, k_start, stop[branching] - k_start, np.ones_like(q_len)], axis=1)
    return np.concatenate([causal, cross]).astype(np.int64)


register("attention_passes", attention_passes, ("attention_passes", len(FIELDS)))
