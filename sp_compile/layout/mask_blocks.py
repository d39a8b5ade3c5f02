"""Forest -> the blocks of queries and keys that a block-sparse attention kernel visits, in time linear in their number.

Tokens are cut into blocks of `BLOCK`. In depth-first preorder token k is seen by the tokens k <= q < end[k], so the blocks of queries that
see a block of keys follow from the smallest and the largest end in it: behind the block itself, whose triangle is always seen in part, come
blocks that see all of it, up to the smallest end, and then blocks that see some of it, up to the largest.

Four tensors. `mask_shape`, on the CPU wherever the graph runs, is int64 [1, 8]: T, smallest and largest column, number of blocks, and the
widths of the four lists. The others are on the device and int32. `mask_blocks` [n] holds end[k] of every token, continued with zeros to
whole blocks, and then two lists, `mask_queries` [m] the other two; each as how many items each block has, [blocks], and their numbers,
[blocks, width], ascending. The lists:

    keys seen in part by each block of queries; keys seen by all of it
    queries that see a part of each block of keys; queries that see all of it

`mask_order` [5 * blocks] is for a kernel that needs no lists of queries: five columns whose rows are blocks of keys in an order in which to
start with them. The blocks of queries of each are walked from the last one down to the block itself. Outer subtrees come before those in
them, later ones before earlier ones:

    block              number of the block of keys
    middle, stop       first block of queries behind the block itself that sees only a part; behind the last that sees anything
    last_turn, turn    how many rows before this one have a part in the gradient of its last block of queries; of each other one

The number is the same for all but the last, since subtrees are nested: a block of keys that starts inside these queries and reaches beyond
them must hold the border, and so be the last block of queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sp_compile.layout.build import Ints
from sp_compile.layout.tensors import register

if TYPE_CHECKING:
    from sp_compile.layout.forest import Forest

BLOCK = 128
LISTS = ("part_keys", "full_keys", "part_queries", "full_queries")
SHAPE = ("tokens", "low", "high", "blocks", *LISTS, "nodes")
ORDER = ("block", "middle", "stop", "last_turn", "turn")

Numbers = np.ndarray[Any, np.dtype[np.int32]]
Ranges = tuple[Ints, Ints]


def _ranges(end: Ints) -> tuple[Ranges, Ranges]:
    """First and last + 1 block of queries that see all, and that see some, of each block of keys; the block itself is in neither."""
    blocks = -(-len(end) // BLOCK)
    starts = np.arange(blocks) * BLOCK
    low, high = np.minimum.reduceat(end, starts), np.maximum.reduceat(end, starts)
    first = np.arange(1, blocks + 1)
    # The last block of queries may be short: it sees all of what is seen up to the last token.
    stop = np.maximum(np.where(low >= len(end), blocks, low // BLOCK), first)
    return (first, stop), (stop, np.maximum(-(-high // BLOCK), stop))


def _owners(ranges: Ranges, blocks: int) -> Ints:
    """How many of the ranges hold each block."""
    first, stop = (np.bincount(x, minlength=blocks + 1) for x in ranges)
    return np.cumsum(first - stop)[:blocks]


def _queries(ranges: Ranges, own: bool) -> list[Numbers]:
    """Counts and numbers of the list whose items are the ranges, with the block itself before them if `own`."""
    first, stop = (x.astype(np.int32) for x in ranges)
    count = stop - first
    items = first[:, None] + np.arange(max(count.max(), 0 if own else 1), dtype=np.int32)
    if own:
        items = np.concatenate([np.arange(len(first), dtype=np.int32)[:, None], items], axis=1)
    return [count + own, items]


def _keys(ranges: Ranges) -> list[Numbers]:
    """Counts and numbers of the list that says for each block whose ranges hold it, with the block itself behind them."""
    first, stop = ranges
    blocks = len(first)
    length = stop - first
    before = np.cumsum(length) - length
    item = np.arange(length.sum()) + np.repeat(first - before, length)
    # Stable, so that owners ascend; numbers of 16 bits are sorted in linear time.
    order = np.argsort(item.astype(np.uint16) if blocks <= 2**16 else item, kind="stable")
    count = _owners(ranges, blocks)
    made = np.zeros((blocks, count.max() + 1), dtype=np.int32)
    place = np.arange(len(item)) - np.repeat(np.cumsum(count) - count, count)
    made[item[order], place] = np.repeat(np.arange(blocks), length)[order]
    made[np.arange(blocks), count] = np.arange(blocks)
    return [(count + 1).astype(np.int32), made]


def _nested_keys(ranges: Ranges) -> list[Numbers]:
    """The same without the block itself, for ranges that begin behind their own block and are nested: the last to come is the first to go.

    So what holds a block is a stack, and what lies at one height is the last that came there.
    """
    first, stop = ranges
    blocks = len(first)
    count = _owners(ranges, blocks)
    made = np.zeros((blocks, max(1, count.max())), dtype=np.int32)
    owner = np.flatnonzero(stop > first)
    made[owner + 1, count[owner + 1] - 1] = owner
    return [count.astype(np.int32), np.maximum.accumulate(made, axis=0, out=made)]


def key_lists(end: Ints) -> list[list[Numbers]]:
    """For `end` [T] of every token, T > 0: the first two of `LISTS`, each how many items a block has [blocks], and [blocks, width >= 1]."""
    full, part = _ranges(end)
    return [_keys(part), _nested_keys(full)]


def query_lists(end: Ints) -> list[list[Numbers]]:
    """The other two, likewise."""
    full, part = _ranges(end)
    return [_queries(part, True), _queries(full, False)]


def walks(end: Ints) -> dict[str, Numbers]:
    """For `end` [T] of every token, T > 0: the columns of `mask_order`, [blocks] each."""
    full, part = _ranges(end)
    block, stop = full[0] - 1, part[1]
    blocks = len(block)
    # Behind outer blocks, which are those that stop later, come those with the same stop, in ascending order.
    order = np.argsort(-stop, kind="stable")
    sorted_stop = stop[order]
    equal = np.arange(blocks) - np.searchsorted(-sorted_stop, -sorted_stop)
    # Blocks that start before `stop` and stop behind it also see the block there, which sees itself.
    outer = np.append(_owners((block, stop), blocks) - 1, 0)[sorted_stop]
    last_turn = outer + equal
    turn = last_turn - (stop[sorted_stop - 1] > sorted_stop)
    columns = order, full[1][order], sorted_stop, last_turn, turn
    return {name: column.astype(np.int32) for name, column in zip(ORDER, columns, strict=True)}


def mask_shape(forest: Forest) -> Ints:
    """int64 [1, 9], see the module's docstring."""
    if not forest.num_tokens:
        return np.zeros((1, len(SHAPE)), dtype=np.int64)
    columns = forest.column
    full, part = _ranges(forest.tensor("end", "cpu").numpy())
    blocks = len(full[0])
    widths = [_owners(part, blocks).max() + 1, _owners(full, blocks).max(), (part[1] - part[0]).max() + 1, (full[1] - full[0]).max()]
    given = [forest.num_tokens, columns.min(), columns.max(), blocks, *(max(1, width) for width in widths), forest.num_nodes]
    return np.array([given], dtype=np.int64)


def _flat(lists: list[list[Numbers]]) -> list[Numbers]:
    return [array.ravel() for one in lists for array in one]


def mask_blocks(forest: Forest) -> Numbers:
    """int32 [n], see the module's docstring."""
    if not forest.num_tokens:
        return np.empty(0, dtype=np.int32)
    end = forest.tensor("end", "cpu").numpy()
    return np.concatenate([end.astype(np.int32), np.zeros(-len(end) % BLOCK, dtype=np.int32), *_flat(key_lists(end))])


def mask_queries(forest: Forest) -> Numbers:
    """int32 [m], see the module's docstring."""
    return np.concatenate(_flat(query_lists(forest.tensor("end", "cpu").numpy()))) if forest.num_tokens else np.empty(0, dtype=np.int32)


def mask_order(forest: Forest) -> Numbers:
    """int32 [m], see the module's docstring."""
    if not forest.num_tokens:
        return np.empty(0, dtype=np.int32)
    return np.concatenate([*walks(forest.tensor("end", "cpu").numpy()).values()])


register("mask_shape", mask_shape, (1, len(SHAPE)), host=True)
register("mask_blocks", mask_blocks, ("mask_blocks",), torch.int32)
register("mask_queries", mask_queries, ("mask_queries",), torch.int32)
register("mask_order", mask_order, ("mask_order",), torch.int32)
