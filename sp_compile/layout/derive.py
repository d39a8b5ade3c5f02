"""What follows from the independent arrays of a forest: per node, per token, and per row and column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sp_compile.layout.build import Ints

if TYPE_CHECKING:
    from sp_compile.layout.forest import Forest

Array = TypeVar("Array", bound=np.ndarray[Any, Any])

_LONG_ROW = 512
_LONG_RUN = 256


@dataclass(frozen=True)
class PerNode:
    """[nodes] int64 arrays, see the properties of `Forest`."""

    depth: Ints
    node_end: Ints
    node_row: Ints
    node_count: Ints


def read_only(array: Array) -> Array:
    """The same array, not writable any more."""
    array.setflags(write=False)
    return array


def per_node(forest: Forest) -> PerNode:
    """Depth, subtree end, smallest row and row count of every node."""
    nodes = forest.num_nodes
    parents = forest.parent.tolist()
    depth, size = [0] * nodes, [1] * nodes
    ending = np.flatnonzero(forest.row_node >= 0)
    count: list[int] = np.bincount(forest.row_node[ending], minlength=nodes).tolist()
    first = np.full(nodes, forest.num_rows, dtype=np.int64)
    first[forest.row_node[ending[::-1]]] = ending[::-1]
    smallest: list[int] = first.tolist()
    for node, parent in enumerate(parents):
        if parent >= 0:
            depth[node] = depth[parent] + 1
    for node in range(nodes - 1, -1, -1):
        parent = parents[node]
        if parent >= 0:
            size[parent] += size[node]
            count[parent] += count[node]
            smallest[parent] = min(smallest[parent], smallest[node])
    node_end = [node + extent for node, extent in enumerate(size)]
    return PerNode(*(read_only(np.array(values, dtype=np.int64)) for values in (depth, node_end, smallest, count)))


# Per token: fresh arrays, which a tensor may take over.


def row(forest: Forest) -> Ints:
    """[T] smallest row through each token."""
    return np.repeat(forest.node_row, forest.node_len)


def count(forest: Forest) -> Ints:
    """[T] rows through each token."""
    return np.repeat(forest.node_count, forest.node_len)


def end(forest: Forest) -> Ints:
    """[T] exclusive end of the subtree of each token's node."""
    return np.repeat(np.append(forest.node_start, forest.num_tokens)[forest.node_end], forest.node_len)


def column(forest: Forest) -> Ints:
    """[T] dense column of each token."""
    offsets, lengths = forest.run_column - forest.run_start, np.diff(forest.run_start, append=forest.num_tokens)
    if offsets.size * _LONG_RUN > forest.num_tokens:
        return np.arange(forest.num_tokens, dtype=np.int64) + np.repeat(offsets, lengths)
    result, counted = np.empty(forest.num_tokens, dtype=np.int64), np.arange(lengths.max(initial=0), dtype=np.int64)
    for start, first, length in zip(forest.run_start.tolist(), forest.run_column.tolist(), lengths.tolist(), strict=True):
        np.add(counted[:length], first, out=result[start : start + length])  # no second array of T, whose pages would have to be made
    return result


def prev(forest: Forest) -> Ints:
    """[T] token before each token in its rows, -1 for a row's first."""
    result = np.arange(-1, forest.num_tokens - 1, dtype=np.int64)
    result[forest.node_start] = _before_node(forest)
    return result


# Per row and column


def index(forest: Forest) -> Ints:
    """[B, L] physical token of row b at column l, -1 where the row has none; a fresh array."""
    # Sorted by last node, the nodes that a row adds to those seen so far are consecutive, and so are their tokens; what stands in the
    # columns before them is equal to the row before.
    order = np.argsort(forest.row_node, kind="stable")
    stops = np.append(forest.node_start + forest.node_len, 0)[forest.row_node[order]]
    starts = np.concatenate(([0], stops))[:-1]
    fresh = np.flatnonzero(stops > starts)
    before = _before_node(forest)[np.searchsorted(forest.node_start, starts[fresh], side="right") - 1]
    shared = np.where(stops > 0, forest.num_columns, 0)
    shared[fresh] = np.where(before < 0, 0, _column_at(forest, np.maximum(before, 0)) + 1)
    # A step per row pays off where rows are long.
    fill = _index_by_row if forest.num_columns >= _LONG_ROW else _index_at_once
    return fill(forest, order, starts, stops, shared)


def _index_by_row(forest: Forest, order: Ints, starts: Ints, stops: Ints, shared: Ints) -> Ints:
    lines = np.empty((forest.num_rows, forest.num_columns), dtype=np.int64)
    previous = -1
    for row, start, stop, common in zip(*(values.tolist() for values in (order, starts, stops, shared)), strict=True):
        line = lines[row]
        if common:
            line[:common] = lines[previous, :common]
        left = right = common
        if start < stop:
            left, right = (_column_at(forest, np.array((start, stop - 1))) + np.array((0, 1))).tolist()
            if right - left == stop - start:
                line[left:right] = np.arange(start, stop)
            else:
                line[left:right] = -1
                line[forest.column[start:stop]] = np.arange(start, stop)
        line[common:left] = -1
        line[right:] = -1
        previous = row
    return lines


def _index_at_once(forest: Forest, order: Ints, starts: Ints, stops: Ints, shared: Ints) -> Ints:
    places, columns = np.arange(order.size), np.arange(forest.num_columns)
    fresh = np.full((order.size, forest.num_columns), -1, dtype=np.int64)
    fresh[np.repeat(places, np.maximum(stops - starts, 0)), forest.column] = np.arange(forest.num_tokens)
    source = np.maximum.accumulate(np.where(columns >= shared[:, None], places[:, None], 0), axis=0)
    lines = np.empty_like(fresh)
    lines[order] = fresh[source, columns]
    return lines


def _before_node(forest: Forest) -> Ints:
    """[nodes] last token of the parent, -1 for roots."""
    if not forest.num_nodes:
        return forest.parent
    return np.where(forest.parent < 0, -1, (forest.node_start + forest.node_len)[forest.parent] - 1)


def _column_at(forest: Forest, tokens: Ints) -> Ints:
    """Dense columns of some tokens, without the [T] array."""
    run = np.searchsorted(forest.run_start, tokens, side="right") - 1
    return forest.run_column[run] + tokens - forest.run_start[run]
