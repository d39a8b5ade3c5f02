"""Forest -> the blocks of queries and keys that a block-sparse attention kernel visits, in time linear in their number.

Tokens are cut into blocks of `BLOCK`. In depth-first preorder token k is seen by the tokens k <= q < end[k], so the blocks of queries that
see a block of keys follow from the smallest and the largest end in it: behind the block itself, whose triangle is always seen in part, come
blocks that see all of it, up to the smallest end, and then blocks that see some of it, up to the largest.

Two tensors. `mask_shape`, on the CPU wherever the graph runs, is int64 [1, 8]: T, smallest and largest column, number of blocks, and the
widths of the four lists. `mask_blocks`, on the device, is int32 [n] and holds end[k] of every token, continued with zeros to whole blocks,
and then for each list how many items each block has, [blocks], and their numbers, [blocks, width], ascending. The lists:

    keys seen in part by each block of queries; keys seen by all of it
    queries that see a part of each block of keys; queries that see all of it
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
SHAPE = ("tokens", "low", "high", "blocks", *LISTS)

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


def _keys(ranges: Ranges, own: bool) -> list[Numbers]:
    """Counts and numbers of the list that says for each block whose ranges hold it, with the block itself behind them if `own`."""
    first, stop = ranges
    blocks = len(first)
    length = stop - first
    before = np.cumsum(length) - length
    item = np.arange(length.sum()) + np.repeat(first - before, length)
    # Stable, so that owners ascend; numbers of 16 bits are sorted in linear time.
    order = np.argsort(item.astype(np.uint16) if blocks <= 2**16 else item, kind="stable")
    count = _owners(ranges, blocks)
    made = np.zeros((blocks, max(1, count.max() + own)), dtype=np.int32)
    place = np.arange(len(item)) - np.repeat(np.cumsum(count) - count, count)
    made[item[order], place] = np.repeat(np.arange(blocks), length)[order]
    if own:
        made[np.arange(blocks), count] = np.arange(blocks)
    return [(count + own).astype(np.int32), made]


def block_lists(end: Ints) -> dict[str, list[Numbers]]:
    """For `end` [T] of every token, T > 0: by name, how many items each block has [blocks], and their numbers [blocks, width >= 1]."""
    full, part = _ranges(end)
    made = _keys(part, True), _keys(full, False), _queries(part, True), _queries(full, False)
    return dict(zip(LISTS, made, strict=True))


def mask_shape(forest: Forest) -> Ints:
    """int64 [1, 8], see the module's docstring."""
    if not forest.num_tokens:
        return np.zeros((1, len(SHAPE)), dtype=np.int64)
    columns = forest.column
    full, part = _ranges(forest.tensor("end", "cpu").numpy())
    blocks = len(full[0])
    widths = [_owners(part, blocks).max() + 1, _owners(full, blocks).max(), (part[1] - part[0]).max() + 1, (full[1] - full[0]).max()]
    given = [forest.num_tokens, columns.min(), columns.max(), blocks, *(max(1, width) for width in widths)]
    return np.array([given], dtype=np.int64)


def mask_blocks(forest: Forest) -> Numbers:
    """int32 [n], see the module's docstring."""
    if not forest.num_tokens:
        return np.empty(0, dtype=np.int32)
    end = forest.tensor("end", "cpu").numpy()
    parts = [end.astype(np.int32), np.zeros(-len(end) % BLOCK, dtype=np.int32)]
    return np.concatenate(parts + [array.ravel() for one in block_lists(end).values() for array in one])


register("mask_shape", mask_shape, (1, len(SHAPE)), host=True)
register("mask_blocks", mask_blocks, ("mask_blocks",), torch.int32)
