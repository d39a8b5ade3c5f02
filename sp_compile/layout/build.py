"""From rows of tokens to a prefix trie, in numpy.

Two steps, both independent of what the tokens mean:

1. `sort_rows` puts rows that share a prefix side by side and measures how many leading columns neighbours have in common.
   Blocks of columns are compared for all rows at once; only rows that still agree with a neighbour are read further.
2. `assemble` derives nodes, parents and columns from that list of common lengths alone (as a suffix tree follows from its LCP array).

Cost: O(rows * columns) vectorised work, plus Python steps that grow with rows and nodes, never with tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Bits = NDArray[Any]

# Bytes of one key read per block: small enough to stay in cache, large enough to hide numpy's call overhead.
_BLOCK_BYTES = 1 << 20
_FIRST_BLOCK = 64


class Parts(NamedTuple):
    """The independent arrays of a forest; everything else follows from them.

    Attributes:
        node_len: [nodes] int64, tokens per node, in depth-first preorder.
        parent: [nodes] int64, -1 for roots.
        row_node: [B] int64, node in which row b ends, -1 for a row without tokens.
        run_start: [runs] int64, first token of each maximal stretch of consecutive columns inside one node.
        run_column: [runs] int64, dense column of that token.
        num_columns: L.
    """

    node_len: Ints
    parent: Ints
    row_node: Ints
    run_start: Ints
    run_column: Ints
    num_columns: int


def sort_rows(keys: Sequence[Bits], row_keys: Sequence[Bits], keep: Bools | None, num_rows: int, num_columns: int) -> tuple[Ints, Ints]:
    """Orders rows so that every set of rows with a common prefix is contiguous, and measures neighbours.

    Args:
        keys: unsigned [B, L] arrays; rows agree at a column if all of them are equal there.
        row_keys: unsigned [B] arrays; rows that differ in one agree nowhere.
        keep: bool [B, L] or None (all true). Where it is false, the keys are not read; "dropped" is a symbol of its own.
        num_rows: B.
        num_columns: L.

    Returns:
        `order` [B] int64, a permutation of the rows in which the first row of every such set is its smallest, and `common` [B] int64:
        leading columns in which rows order[k-1] and order[k] agree (L if they are equal; 0 for k = 0).
    """
    batch = _Sorting(keys, keep, np.arange(num_rows, dtype=np.int64), np.full(num_rows, num_columns, dtype=np.int64), num_columns)
    if num_rows == 0 or num_columns == 0:
        return batch.order, batch.common
    batch.common[0] = 0
    if row_keys:
        zeros = np.zeros(num_rows, dtype=np.int64)
        batch.split(batch.order.copy(), zeros, zeros, list(row_keys))
    column, width = 0, _FIRST_BLOCK
    widest = max((key.dtype.itemsize for key in keys), default=1)
    while column < num_columns:
        # Classes are runs of rows that agree in all columns so far; `pairs` are the places that agree with their predecessor.
        pairs = np.flatnonzero(batch.common == num_columns)
        if pairs.size == 0:
            break
        stop = min(num_columns, column + width)
        batch.split_block(pairs, column, stop)
        column = stop
        width = max(_FIRST_BLOCK, min(width * 4, _BLOCK_BYTES // (pairs.size * widest)))
    return batch.order, batch.common


class _Sorting(NamedTuple):
    """State of `sort_rows`; `order` and `common` are updated in place."""

    keys: Sequence[Bits]
    keep: Bools | None
    order: Ints
    common: Ints
    num_columns: int

    def split_block(self, pairs: Ints, column: int, stop: int) -> None:
        """Splits classes wherever they diverge in columns [column, stop)."""
        moved = self._unequal_neighbours(pairs, column, stop)
        if moved is None:
            return
        starts = np.flatnonzero(np.diff(pairs, prepend=-2) != 1)
        classes = np.repeat(np.arange(starts.size), np.diff(starts, append=pairs.size))
        pairs = pairs[np.logical_or.reduceat(moved, starts)[classes]]
        while pairs.size:
            starts = np.flatnonzero(np.diff(pairs, prepend=-2) != 1)
            sizes = np.diff(starts, append=pairs.size)
            # A class is its first row, to which the others are compared, and the pairs that follow it.
            heads = pairs[starts] - 1
            places = np.insert(pairs, starts, heads)
            classes = np.repeat(np.arange(starts.size), sizes + 1)
            leaves = self._first_difference(self.order[np.repeat(heads, sizes)], self.order[pairs], column, stop)
            leaves = np.insert(leaves, starts, self.num_columns)
            rows, columns = self.order[places], np.minimum(leaves, self.num_columns - 1)
            read = leaves < self.num_columns
            if self.keep is not None:
                read &= self.keep[rows, columns]
            symbols: list[Bits] = [np.where(read, key[rows, columns], key.dtype.type(0)) for key in self.keys]
            leaves = self.split(places, classes, leaves, [*symbols, read])
            # Rows that never left their first row are done with this block; the others have been compared to it alone.
            again = (self.common[places] == self.num_columns) & (leaves < self.num_columns)
            pairs = places[again]
            column = int(leaves[again].min(initial=stop - 1)) + 1

    def split(self, places: Ints, classes: Ints, leaves: Ints, symbols: list[Bits]) -> Ints:
        """Subdivides classes: rows stay together if they leave the first row of their class at the same column with the same symbols.

        Args:
            places: positions in `order`, ascending.
            classes: class of each, ascending.
            leaves: column at which the row there leaves the first row of its class, num_columns if it does not.
            symbols: what the row has at that column.

        Returns:
            `leaves` in the new order.
        """
        sort = np.lexsort((*symbols, -leaves, classes))
        changes = np.zeros(sort.size, dtype=np.bool_)
        changes[0] = True
        for values in (*symbols, leaves, classes):
            ordered = values[sort]
            changes[1:] |= ordered[1:] != ordered[:-1]
        # Rows ascend within a class and the sort is stable, so the first member of a subclass is its smallest row.
        leader = np.empty_like(sort)
        leader[sort] = sort[changes][np.cumsum(changes) - 1]
        # Depth first: the rows that leave last come next to the first row.
        final = np.lexsort((leader, -leaves, classes))
        leader, leaves = leader[final], leaves[final]
        self.order[places] = self.order[places][final]
        border = np.flatnonzero((leader[1:] != leader[:-1]) & (classes[1:] == classes[:-1])) + 1
        self.common[places[border]] = leaves[border]
        return leaves

    def _unequal_neighbours(self, pairs: Ints, column: int, stop: int) -> Bools | None:
        """Which pairs differ in columns [column, stop); None if none does. Reads views, not copies, where rows are in their first order."""
        low, high = int(pairs[0]) - 1, int(pairs[-1])
        if high - low > 2 * pairs.size:
            found = self._first_difference(self.order[pairs - 1], self.order[pairs], column, stop) < self.num_columns
            return found if found.any() else None
        rows = self.order[low : high + 1]
        consecutive = bool((np.diff(rows) == 1).all())
        lines: slice | Ints = slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else rows
        kept = None if self.keep is None else self.keep[lines, column:stop]
        unequal = None if kept is None else kept[1:] != kept[:-1]
        for key in self.keys:
            block = key[lines, column:stop]
            other = block[1:] != block[:-1]
            if kept is not None:
                other &= kept[1:]
            unequal = other if unequal is None else np.logical_or(unequal, other, out=unequal)
        if unequal is None or not unequal.any():
            return None
        found = unequal.any(axis=1)[pairs - low - 1]
        return found if found.any() else None

    def _first_difference(self, before: Ints, after: Ints, column: int, stop: int) -> Ints:
        """First column in [column, stop) at which row before[i] and row after[i] differ, num_columns if there is none."""
        first = np.full(before.size, self.num_columns, dtype=np.int64)
        alike = np.arange(before.size)
        width = _FIRST_BLOCK
        while column < stop and alike.size:
            upto = min(stop, column + width)
            unequal = np.zeros((alike.size, upto - column), dtype=np.bool_)
            for key in self.keys:
                unequal |= key[before[alike], column:upto] != key[after[alike], column:upto]
            if self.keep is not None:
                kept = self.keep[before[alike], column:upto]
                unequal &= kept
                unequal |= kept != self.keep[after[alike], column:upto]
            found = unequal.any(axis=1)
            first[alike[found]] = unequal[found].argmax(axis=1) + column if found.any() else 0
            alike = alike[~found]
            column, width = upto, width * 4
        return first


class _Kept:
    """Which columns of each row hold a token: first column and length, and all of them where some row has a hole."""

    def __init__(self, keep: Bools | None, num_rows: int, num_columns: int) -> None:
        self.num_columns = num_columns
        self.flat: Ints | None = None
        if keep is None:
            self.first = np.zeros(num_rows, dtype=np.int64)
            self.length = np.full(num_rows, num_columns, dtype=np.int64)
            return
        self.first = keep.argmax(axis=1).astype(np.int64) if num_columns else np.zeros(num_rows, dtype=np.int64)
        self.length = keep.sum(axis=1, dtype=np.int64)
        stop = num_columns - keep[:, ::-1].argmax(axis=1) if num_columns else self.first
        self.first[self.length == 0] = 0
        if ((stop - self.first != self.length) & (self.length > 0)).any():
            self.flat = np.flatnonzero(keep).astype(np.int64, copy=False)
            self.offset = np.cumsum(self.length) - self.length

    def tokens_before(self, rows: Ints, columns: Ints) -> Ints:
        """Number of tokens of each row in its first `columns` columns."""
        if self.flat is None:
            inside: Ints = np.clip(columns - self.first[rows], 0, self.length[rows])
            return inside
        before: Ints = np.searchsorted(self.flat, rows * self.num_columns + columns).astype(np.int64) - self.offset[rows]
        return before


def assemble(order: Ints, common: Ints, keep: Bools | None, num_columns: int) -> Parts:
    """Builds the compressed trie of rows from the columns that neighbours have in common.

    A node ends where rows diverge or where a row ends. Children of one node, and roots, follow each other by smallest row.

    Args:
        order: [B] rows, as from `sort_rows`.
        common: [B] columns in common with the predecessor in `order`, as from `sort_rows` (or a nondecreasing function of it).
        keep: bool [B, L] or None (all true).
        num_columns: L.
    """
    num_rows = order.size
    kept = _Kept(keep, num_rows, num_columns)
    length = kept.length[order]
    shared = kept.tokens_before(order, common)
    if num_rows:
        shared[0] = 0
    fresh = length - shared
    start = np.cumsum(fresh) - fresh
    total = int(fresh.sum())
    anchor = _anchors(shared, fresh, start)

    node_start = np.unique(np.concatenate((start[fresh > 0], anchor[anchor >= 0] + 1)))
    node_start = node_start[node_start < total]
    owners = np.flatnonzero(fresh)
    owner = owners[np.searchsorted(start[owners], node_start, side="right") - 1]
    parent_token = np.where(node_start == start[owner], anchor[owner], node_start - 1)
    parent = np.searchsorted(node_start, parent_token, side="right") - 1
    node_len = np.diff(node_start, append=total)
    row_node = np.empty(num_rows, dtype=np.int64)
    row_node[order] = np.searchsorted(node_start, np.where(fresh > 0, start + fresh - 1, anchor), side="right") - 1
    node_row = order[owner]

    column: Ints | None = None
    if kept.flat is None:
        node_column = kept.first[node_row] + shared[owner] + node_start - start[owner]
    else:
        source = np.arange(total) + np.repeat(kept.offset[order] + shared - start, fresh)
        column = kept.flat[source] - np.repeat(order * num_columns, fresh)
        node_column = column[node_start]

    # Rows are sorted by columns; dropped columns and refinement can leave siblings out of order.
    permutation = _preorder(parent, node_row)
    if permutation is not None:
        place = np.empty_like(permutation)
        place[permutation] = np.arange(permutation.size)
        old_start, node_len, node_column = node_start[permutation], node_len[permutation], node_column[permutation]
        parent = np.where(parent < 0, -1, place[parent])[permutation]
        row_node = np.where(row_node < 0, -1, place[row_node])
        node_start = np.cumsum(node_len) - node_len
        if column is not None:
            column = column[np.arange(total) + np.repeat(old_start - node_start, node_len)]
    run_start, run_column = (node_start, node_column) if column is None else column_runs(column, node_start)
    return Parts(node_len, parent, row_node, run_start, run_column, num_columns)


def column_runs(column: Ints, node_start: Ints) -> tuple[Ints, Ints]:
    """Run-length form of `column` [T]: a run starts at every node and wherever the column is not its predecessor's plus one."""
    opens = np.empty(column.size, dtype=np.bool_)
    opens[1:] = np.diff(column) != 1
    opens[node_start] = True
    run_start = np.flatnonzero(opens).astype(np.int64, copy=False)
    return run_start, column[run_start]


def _anchors(shared: Ints, fresh: Ints, start: Ints) -> Ints:
    """Physical index of the last token that each row shares with its predecessor in the order, -1 if none."""
    anchors: list[int] = []
    depths: list[int] = []
    bases: list[int] = []
    for depth, new, first in zip(shared.tolist(), fresh.tolist(), start.tolist(), strict=True):
        while depths and depths[-1] >= depth:
            depths.pop()
            bases.pop()
        anchors.append(bases[-1] + depth - 1 if depth else -1)
        if new:
            depths.append(depth)
            bases.append(first - depth)
    return np.array(anchors, dtype=np.int64)


def _preorder(parent: Ints, node_row: Ints) -> Ints | None:
    """Permutation into the preorder that visits siblings by ascending `node_row`; None if the nodes are in that order already."""
    by_parent = np.argsort(parent, kind="stable")
    sorted_parent, sorted_row = parent[by_parent], node_row[by_parent]
    if not ((sorted_parent[1:] == sorted_parent[:-1]) & (sorted_row[1:] < sorted_row[:-1])).any():
        return None
    children: dict[int, list[int]] = {}
    for node in np.argsort(-node_row, kind="stable").tolist():
        children.setdefault(int(parent[node]), []).append(node)
    permutation: list[int] = []
    stack = children[-1]
    while stack:
        node = stack.pop()
        permutation.append(node)
        stack.extend(children.get(node, ()))
    return np.array(permutation, dtype=np.int64)
