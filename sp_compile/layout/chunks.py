"""Forest -> chunks of at most c tokens, for recurrences that pass one state per chunk.

A plan is int64 [C, 1 + c]. Column 0 is the parent chunk, whose state after its last token is where this chunk starts; -1 for chunks that
start a row. A parent comes before its chunks. The other columns are the chunk's slots, in the order of the recurrence:

    i >= 0    token i is read here, and its results are written from here
    -1        nothing
    -2 - i    token i is read here, but another chunk writes it: a recomputed copy

Two grids:

    exact     starts anew at every node: no copies. Empty slots only at the end of a chunk.
    replay    that of the dense run: slot = column % c. There is a chunk for every distinct path through a cell of the grid; where rows part
              inside a cell, at P, what they share of it, [P - P % c, P), stands in each of their chunks and is written by the first. Empty
              where a row has no token: before its first one, after its last one, and in its holes.

Chunks are ordered by their last tokens.
"""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from sp_compile.errors import InvalidForest
from sp_compile.layout.build import Ints
from sp_compile.layout.tensors import register, registered

if TYPE_CHECKING:
    from sp_compile.layout.forest import Forest

EMPTY = -1
KINDS = ("exact", "replay")

_LOCK = Lock()


def chunk_tensor_name(kind: str, c: int) -> str:
    """Name of the forest tensor with chunks of size `c`, registered when it is first asked for; any thread may ask.

    Raises:
        InvalidForest: `kind` is none of `KINDS`, or `c` is not positive.
    """
    if kind not in KINDS or c < 1:
        raise InvalidForest(f"chunks: expected a kind among {', '.join(KINDS)} and a positive size; got {kind!r} and {c}")
    name = f"chunks_{kind}_{c}"
    with _LOCK:
        if name not in registered():
            register(name, partial(exact_chunks if kind == "exact" else replay_chunks, c=c), (name, 1 + c))
    return name


def exact_chunks(forest: Forest, c: int) -> Ints:
    """The plan whose grid starts at each node, see the module's docstring."""
    start, length, parent = forest.node_start, forest.node_len, forest.parent
    count = -(-length // c)
    last = np.cumsum(count) - 1
    node = np.repeat(np.arange(length.size), count)
    number = np.arange(node.size) - (last - count + 1)[node]
    plan = np.empty((node.size, 1 + c), dtype=np.int64)
    before = np.where(parent < 0, -1, last[parent]) if length.size else parent
    plan[:, 0] = np.where(number > 0, np.arange(node.size) - 1, before[node])
    tokens = (start[node] + number * c)[:, None] + np.arange(c)
    plan[:, 1:] = np.where(tokens < (start + length)[node][:, None], tokens, EMPTY)
    return plan


def replay_chunks(forest: Forest, c: int) -> Ints:
    """The plan on the grid of the dense run, see the module's docstring."""
    tokens = forest.num_tokens
    if tokens == 0:
        return np.empty((0, 1 + c), dtype=np.int64)
    cell = forest.column // c
    # A piece is a maximal stretch of tokens of one node in one cell.
    heads = np.zeros(tokens, dtype=bool)
    heads[forest.node_start] = True
    heads[1:] |= np.diff(cell) != 0
    start = np.flatnonzero(heads)
    length = np.diff(start, append=tokens)
    piece = np.cumsum(heads) - 1
    before = forest.prev[start]
    above = np.where(before < 0, -1, piece[before])
    inside = (above >= 0) & (cell[start] == cell[before])

    # A chunk ends at a piece behind which some row leaves the cell, or all rows end.
    goes_on = np.zeros(start.size, dtype=bool)
    goes_on[above[inside]] = True
    leaves = np.zeros(start.size, dtype=bool)
    leaves[above[(above >= 0) & ~inside]] = True
    ends = np.flatnonzero(leaves | ~goes_on)
    chunk_at = np.full(start.size, -1, dtype=np.int64)
    chunk_at[ends] = np.arange(ends.size)

    plan = np.full((ends.size, 1 + c), EMPTY, dtype=np.int64)
    chunks, current = np.arange(ends.size), ends
    owner = np.full(start.size, ends.size, dtype=np.int64)
    pairs: list[tuple[Ints, Ints]] = []
    while chunks.size:
        np.minimum.at(owner, current, chunks)
        pairs.append((chunks, current))
        first = ~inside[current]
        top = above[current[first]]
        plan[chunks[first], 0] = np.where(top < 0, -1, chunk_at[top])
        chunks, current = chunks[~first], above[current[~first]]
    chunks, current = (np.concatenate(part) for part in zip(*pairs, strict=True))
    sizes = length[current]
    offset = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    token = np.repeat(start[current], sizes) + offset
    owned = np.repeat(owner[current] == chunks, sizes)
    plan[np.repeat(chunks, sizes), 1 + forest.column[token] % c] = np.where(owned, token, -2 - token)
    return plan
