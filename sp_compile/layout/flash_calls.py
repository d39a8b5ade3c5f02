"""Forest -> calls of a variable-length attention kernel: all chains in one causal call, then one call per depth of branching nodes.

The rectangular passes of `layout/chains.py` whose branching nodes have the same depth share neither queries (their subtrees are disjoint)
nor keys (a chain has one node at each depth). Each such set is one call in which every query and every key occurs once, so that gradients
of keys need no sum over rectangles.

A reproducible backward kernel gives a sequence few processors if its call holds many. So rectangles that are more than 1/`HEAVY` of the
work at their depth are calls of their own, and where some chain is, the causal call is described a second time, cut around such chains.

Two tensors: `flash_calls`, on the CPU wherever the graph runs, holds what the host must know to launch; `flash_plan`, on the device, what
the kernels read. `flash_calls` is int64 [1 + calls, 11]. Its first row is (T, smallest column, largest column, 0, ...); the others are

    kind               CHAINS: all chains, the first call; PART: some of them, all parts together are the first call; CROSS
    sequences          rectangles of the call, or chains
    q_len, k_len       queries and keys of all of them
    max_q, max_k       the most of one
    lengths            where in `flash_plan` the cumulated lengths stand: [sequences + 2] of queries, then those of keys; the last sequence
                       is empty and may be left out
    q_start, k_start   first token, where tokens are consecutive; else -1
    q_tokens, k_tokens where in `flash_plan` the token numbers stand; -1 where tokens are consecutive
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from sp_compile.layout.build import Ints
from sp_compile.layout.chains import CAUSAL, attention_passes
from sp_compile.layout.tensors import register

if TYPE_CHECKING:
    from sp_compile.layout.forest import Forest

CHAINS, PART, CROSS = range(3)
CALL = ("kind", "sequences", "q_len", "k_len", "max_q", "max_k", "lengths", "q_start", "k_start", "q_tokens", "k_tokens")
# What one of 16 heads or more gets as its own call then keeps a processor for less time than everything keeps all of about 130.
HEAVY = 8


class _Plan:
    def __init__(self, forest: Forest) -> None:
        columns = forest.column
        low, high = (int(columns.min()), int(columns.max())) if forest.num_tokens else (0, 0)
        self.calls = [[forest.num_tokens, low, high, *[0] * (len(CALL) - 3)]]
        self.parts: list[Ints] = []
        self.size = 0
        passes = attention_passes(forest)
        causal = passes[passes[:, 0] == CAUSAL]
        if len(causal):
            length = np.repeat(causal[:, 2], causal[:, 5])
            self.chains(np.cumsum(length) - length, length)  # chains cut the pack into consecutive ranges
        cross = passes[passes[:, 0] != CAUSAL]
        if len(cross):
            # The branching node is the one whose last token is the last key.
            node = np.searchsorted(forest.node_start, cross[:, 3] + cross[:, 4] - 1, side="right") - 1
            depth = forest.depth[node]
            for level in np.unique(depth):
                self.rectangles(*cross[depth == level, 1:5].T)

    def chains(self, start: Ints, length: Ints) -> None:
        self.add(CHAINS, start, length, start, length)
        heavy = _heavy(length * length)
        # A part begins at a heavy chain and behind one.
        border = heavy.copy()
        border[1:] |= heavy[:-1]
        cuts = np.flatnonzero(border[1:]) + 1
        if len(cuts):
            for one, many in zip(np.split(start, cuts), np.split(length, cuts), strict=True):
                self.add(PART, one, many, one, many)

    def rectangles(self, q_start: Ints, q_len: Ints, k_start: Ints, k_len: Ints) -> None:
        heavy = _heavy(q_len * k_len)
        for alone in (*np.flatnonzero(heavy)[:, None], np.flatnonzero(~heavy)):
            if len(alone):
                self.add(CROSS, q_start[alone], q_len[alone], k_start[alone], k_len[alone])

    def add(self, kind: int, q_start: Ints, q_len: Ints, k_start: Ints, k_len: Ints) -> None:
        lengths = self.place(np.concatenate([_cumulated(q_len), _cumulated(k_len)]))
        q_first, q_tokens = self.tokens(q_start, q_len)
        k_first, k_tokens = self.tokens(k_start, k_len)
        sizes = (kind, len(q_start), q_len.sum(), k_len.sum(), q_len.max(), k_len.max())
        self.calls.append([*map(int, sizes), lengths, q_first, k_first, q_tokens, k_tokens])

    def tokens(self, start: Ints, length: Ints) -> tuple[int, int]:
        if bool((start[1:] == (start + length)[:-1]).all()):
            return int(start[0]), -1
        before = np.cumsum(length) - length
        return -1, self.place(np.arange(length.sum()) + np.repeat(start - before, length))

    def place(self, values: Ints) -> int:
        at, self.size = self.size, self.size + len(values)
        self.parts.append(values)
        return at


def _cumulated(length: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(length), [length.sum()]])


def _heavy(work: Ints) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    found: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = work * HEAVY > work.sum()
    return found


def flash_calls(forest: Forest) -> Ints:
    """int64 [1 + calls, 11], see the module's docstring; CHAINS, then PARTs, then CROSS by depth. No tokens, no calls."""
    return np.array(_Plan(forest).calls, dtype=np.int64)


def flash_plan(forest: Forest) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """int32 [n] of cumulated lengths and token numbers, each at the place that `flash_calls` tells."""
    parts = _Plan(forest).parts
    return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, dtype=np.int32)


register("flash_calls", flash_calls, ("flash_calls", len(CALL)), host=True)
# Without a padding mask nothing is hidden; see `lowering/registry.py` for what stands in its place with one.
register("padding_hides", lambda forest: np.zeros(1, dtype=np.int64), (1,), host=True)
register("flash_plan", flash_plan, ("flash_plan",), torch.int32)
