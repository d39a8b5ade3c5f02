"""Forest -> what each block of queries and of keys visits in attention, as runs of blocks, and the order in which to start them.

Tokens are cut into blocks. A pair of blocks is *full* if every query sees every key, *part* if only some pairs are visible; the others are
not listed. Windows and chunks hide what lies in columns before `low[q] = max(column[q] - window + 1, column[q] // chunk * chunk)`.

Without them the lists take time linear in their number of runs: with the smallest and the largest end in a block of keys j, the blocks of
queries that see all of j are [j + 1, stop[j]), and those that see some are j itself and [stop[j], last[j]). Block of queries i is seen by a
run of full blocks that begins at j if stop[j - 1] <= i < stop[j], so the runs' two ends are ranges as well. A run of full blocks lies on
one path of the tree, on which columns ascend; windows cut its beginning off.

Two tensors, named by `tile_names`. The first stays on the CPU: int64 [1, 8], see `SHAPE`. The other is on the device, int32 [n], in
sections that start at multiples of `ALIGN` (`sections`):

    end                                  of every token, continued to whole blocks by 0, which no query sees
    column, low                          the same, if anything is hidden
    query_order, key_order               [blocks] those with most to visit first
    key_full_at, key_full, ...           for each block of queries, the runs of full blocks of keys, [blocks + 1] and [runs, 2]
    key_part_at, key_part                the same for part blocks, itself included
    query_full_at, ..., query_part       for each block of keys, the runs of blocks of queries
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from sp_compile.errors import InvalidForest
from sp_compile.layout.build import Ints
from sp_compile.layout.tensors import register, registered

if TYPE_CHECKING:
    from sp_compile.layout.forest import Forest

BLOCK = 128
ALIGN = 32
LISTS = ("key_full", "key_part", "query_full", "query_part")
SHAPE = ("tokens", "block", "blocks", "cut", *LISTS)
"""Tokens, tokens in a block, number of blocks, whether a window or chunk hides anything, and the number of runs in each list."""

Numbers = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Runs:
    """Runs [first, last) of blocks: those of owner b are `runs[at[b] : at[b + 1]]`, ascending."""

    at: Ints
    runs: Ints

    @property
    def visits(self) -> Ints:
        """Blocks that each owner visits."""
        length = np.concatenate([[0], np.cumsum(self.runs[:, 1] - self.runs[:, 0])])
        visits: Ints = length[self.at[1:]] - length[self.at[:-1]]
        return visits

    def owners(self) -> Ints:
        return np.repeat(np.arange(len(self.at) - 1), np.diff(self.at))

    def transposed(self) -> Runs:
        """For each block that is visited, the runs of its owners."""
        owner, item = _expand(self.owners(), self.runs[:, 0], self.runs[:, 1])
        return _runs(item, owner, len(self.at) - 1)


def _expand(label: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Each label as often as its range has numbers, and those numbers."""
    length = np.maximum(last - first, 0)
    before = np.cumsum(length) - length
    return np.repeat(label, length), np.arange(length.sum()) + np.repeat(first - before, length)


def _starts(owner: Ints, blocks: int) -> Ints:
    return np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=blocks))])


def _sorted(owner: Ints, item: Ints, blocks: int) -> tuple[Ints, Ints]:
    order = np.argsort(owner * blocks + item, kind="stable")
    return owner[order], item[order]


def _runs(owner: Ints, item: Ints, blocks: int) -> Runs:
    """Distinct pairs in any order, joined to runs."""
    owner, item = _sorted(owner, item, blocks)
    begins = np.ones(len(item), dtype=bool)
    begins[1:] = (np.diff(item) != 1) | (np.diff(owner) != 0)
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(item))
    runs = np.stack([item[first], item[last - 1] + 1], axis=1) if len(item) else np.empty((0, 2), dtype=np.int64)
    return Runs(_starts(owner[first], blocks), runs)


def _full_keys(stop: Ints) -> Runs:
    """For each block of queries i the runs of blocks of keys j with j < i < stop[j]."""
    blocks = len(stop)
    number = np.arange(blocks)
    before, behind = np.append(0, stop[:-1]), np.append(stop[1:], 0)
    label, item = _expand(number, np.maximum(number + 1, before), stop)
    owner, heads = _sorted(item, label, blocks)
    own = stop > number + 1
    label, item = _expand(number, np.maximum(number + 2, behind), stop)
    _, tails = _sorted(np.concatenate([item, number[own] + 1]), np.concatenate([label, number[own]]), blocks)
    return Runs(_starts(owner, blocks), np.stack([heads, tails + 1], axis=1))


def _first_where(values: Ints, first: Ints, last: Ints, least: Ints) -> Ints:
    """For each range [first, last), in which `values` ascend, the first place with values >= least, or last."""
    first, last = first.copy(), last.copy()
    while (first < last).any():
        middle = (first + last) // 2
        reached = values[np.minimum(middle, len(values) - 1)] >= least
        open_ = first < last
        last = np.where(open_ & reached, middle, last)
        first = np.where(open_ & ~reached, middle + 1, first)
    return first


@dataclass(frozen=True)
class Lists:
    """The lists of one forest under one window and chunk."""

    tokens: int
    block: int
    cut: bool
    runs: dict[str, Runs]

    @property
    def shape(self) -> Ints:
        counts = [len(self.runs[name].runs) for name in LISTS]
        return np.array([[self.tokens, self.block, -(-self.tokens // self.block), self.cut, *counts]], dtype=np.int64)


def lowest_columns(column: Ints, window: int | None, chunk: int | None) -> Ints:
    """The first column that each token sees."""
    cuts = [column - window + 1] if window is not None else []
    if chunk is not None:
        cuts.append(column // chunk * chunk)
    return np.maximum.reduce(cuts) if cuts else np.full_like(column, column.min())


def make_lists(end: Ints, column: Ints, window: int | None, chunk: int | None, block: int = BLOCK) -> Lists:
    """For `end` and `column` [T] of every token, T > 0."""
    tokens = len(end)
    blocks = -(-tokens // block)
    starts, number = np.arange(blocks) * block, np.arange(blocks)
    low, high = np.minimum.reduceat(end, starts), np.maximum.reduceat(end, starts)
    # The last block of queries may be short: it sees all of what is seen up to the last token.
    stop = np.maximum(np.where(low >= tokens, blocks, low // block), number + 1)
    last = np.maximum(-(-high // block), stop)
    keys, queries = _expand(number, stop, last)
    full = _full_keys(stop)
    lowest = lowest_columns(column, window, chunk)
    cut = bool(lowest.max() > column.min())
    if not cut:
        full_queries = _ranges(number + 1, stop)
    else:
        least, most = np.minimum.reduceat(lowest, starts), np.maximum.reduceat(lowest, starts)
        smallest, largest = np.minimum.reduceat(column, starts), np.maximum.reduceat(column, starts)
        owner = full.owners()
        some = _first_where(largest, full.runs[:, 0], full.runs[:, 1], least[owner])
        every = _first_where(smallest, some, full.runs[:, 1], most[owner])
        near = largest[keys] >= least[queries]
        more_queries, more_keys = _expand(owner, some, every)
        keys, queries = np.concatenate([keys[near], more_keys]), np.concatenate([queries[near], more_queries])
        kept = every < full.runs[:, 1]
        full = Runs(_starts(owner[kept], blocks), np.stack([every, full.runs[:, 1]], axis=1)[kept])
        full_queries = full.transposed()
    keys, queries = np.concatenate([keys, number]), np.concatenate([queries, number])
    part, part_queries = _runs(queries, keys, blocks), _runs(keys, queries, blocks)
    return Lists(tokens, block, cut, dict(zip(LISTS, (full, part, full_queries, part_queries), strict=True)))


def _ranges(first: Ints, last: Ints) -> Runs:
    """At most one run an owner."""
    kept = last > first
    return Runs(np.concatenate([[0], np.cumsum(kept)]), np.stack([first, last], axis=1)[kept])


def sections(shape: list[int]) -> dict[str, tuple[int, int]]:
    """Of the second tensor, given the numbers of the first: where each section starts, and its length."""
    given = dict(zip(SHAPE, shape, strict=True))
    blocks, padded = given["blocks"], given["blocks"] * given["block"]
    columns = padded if given["cut"] else 0
    sizes = {"end": padded, "column": columns, "low": columns, "query_order": blocks, "key_order": blocks}
    for name in LISTS:
        sizes |= {f"{name}_at": blocks + 1, name: 2 * given[name]}
    places, at = {}, 0
    for name, size in sizes.items():
        places[name] = at, size
        at += -(-size // ALIGN) * ALIGN
    places["all"] = 0, at
    return places


def tile_array(lists: Lists, end: Ints, column: Ints, window: int | None, chunk: int | None) -> Numbers:
    """The second tensor."""
    places = sections(lists.shape[0].tolist())
    made = np.zeros(places["all"][1], dtype=np.int32)
    parts = {"end": end} | ({"column": column, "low": lowest_columns(column, window, chunk)} if lists.cut else {})
    for side, name in (("query", "key"), ("key", "query")):
        work = lists.runs[f"{name}_full"].visits + lists.runs[f"{name}_part"].visits
        parts[f"{side}_order"] = np.argsort(-work, kind="stable")
    for name, runs in lists.runs.items():
        parts |= {f"{name}_at": runs.at, name: runs.runs.ravel()}
    for name, values in parts.items():
        made[places[name][0] : places[name][0] + len(values)] = values
    return made


_LOCK = Lock()
_made: WeakKeyDictionary[Forest, dict[tuple[int | None, int | None], Lists]] = WeakKeyDictionary()


def _lists(forest: Forest, window: int | None, chunk: int | None) -> Lists:
    known = _made.setdefault(forest, {})
    if (window, chunk) not in known:
        known[window, chunk] = make_lists(forest.tensor("end", "cpu").numpy(), forest.column, window, chunk)
    return known[window, chunk]


def _shape(forest: Forest, window: int | None, chunk: int | None) -> Ints:
    if not forest.num_tokens:
        return np.zeros((1, len(SHAPE)), dtype=np.int64)
    return _lists(forest, window, chunk).shape


def _tiles(forest: Forest, window: int | None, chunk: int | None) -> Numbers:
    if not forest.num_tokens:
        return np.empty(0, dtype=np.int32)
    return tile_array(_lists(forest, window, chunk), forest.tensor("end", "cpu").numpy(), forest.column, window, chunk)


def tile_names(window: int | None, chunk: int | None) -> tuple[str, str]:
    """Names of the two forest tensors for attention under a window and chunks, registered when first asked for; any thread may ask.

    Raises:
        InvalidForest: a window or chunk that is not positive.
    """
    if min(window or 1, chunk or 1) < 1 or 0 in (window, chunk):
        raise InvalidForest(f"attention tiles: expected a positive window and chunk, or None; got {window} and {chunk}")
    suffix = "".join(f"_{kind}_{size}" for kind, size in (("window", window), ("chunk", chunk)) if size is not None)
    names = f"attention_tiles{suffix}_shape", f"attention_tiles{suffix}"
    with _LOCK:
        if names[0] not in registered():
            register(names[0], partial(_shape, window=window, chunk=chunk), (1, len(SHAPE)), host=True)
            register(names[1], partial(_tiles, window=window, chunk=chunk), (names[1],), torch.int32)
    return names
