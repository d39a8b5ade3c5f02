"""Checks of an explicitly described forest. Everything that `build` guarantees by construction is checked here for callers."""

from __future__ import annotations

import numpy as np

from sp_compile.errors import InvalidForest
from sp_compile.layout.build import Ints, Parts, column_runs
from sp_compile.layout.inputs import integer, integer_vector


def validated_parts(node_start: object, node_len: object, parent: object, row_node: object, column: object, num_columns: object) -> Parts:
    """Checks the arguments of `Forest(...)`, see there."""
    starts, lengths = integer_vector(node_start, "node_start"), integer_vector(node_len, "node_len")
    parents, rows = integer_vector(parent, "parent"), integer_vector(row_node, "row_node")
    for name, array in (("node_len", lengths), ("parent", parents)):
        if array.size != starts.size:
            raise InvalidForest(f"{name}: expected {starts.size} entries, one per node as in node_start, got {array.size}")
    _check_spans(starts, lengths)
    _check_preorder(parents)
    _check_rows(parents, rows)
    if column is None:
        run_start, run_column = starts, _path_positions(lengths, parents)
        top = int((run_column + lengths).max(initial=0))
    else:
        columns = integer_vector(column, "column")
        _check_columns(columns, starts, lengths, parents)
        run_start, run_column = column_runs(columns, starts)
        top = int(columns.max(initial=-1)) + 1
    width = top if num_columns is None else integer(num_columns, "num_columns")
    if width < top:
        raise InvalidForest(f"num_columns: expected at least {top}, one more than the largest column, got {width}")
    return Parts(lengths, parents, rows, run_start, run_column, width)


def _check_spans(starts: Ints, lengths: Ints) -> None:
    short = np.flatnonzero(lengths < 1)
    if short.size:
        raise InvalidForest(f"node_len: expected at least 1 token in every node, got {lengths[short[0]]} for node {short[0]}")
    total = sum(lengths.tolist())
    if total > np.iinfo(np.int64).max:
        raise InvalidForest(f"node_len: expected fewer than 2**63 tokens, got {total}")
    expected = np.cumsum(lengths) - lengths
    wrong = np.flatnonzero(starts != expected)
    if wrong.size:
        node = wrong[0]
        kind = "overlaps its predecessor" if starts[node] < expected[node] else "leaves a gap"
        raise InvalidForest(f"node_start: expected node {node} to start at {expected[node]}, got {starts[node]}: it {kind}")


def _check_preorder(parents: Ints) -> None:
    path: list[int] = []
    for node, parent in enumerate(parents.tolist()):
        if not -1 <= parent < node:
            raise InvalidForest(f"parent: expected -1 or an earlier node for node {node}, got {parent}")
        while path and path[-1] != parent:
            path.pop()
        if parent >= 0 and not path:
            raise InvalidForest(
                f"parent: expected depth-first preorder, the parent of node {node} among node {node - 1} and its ancestors, got {parent}"
            )
        path.append(node)


def _check_rows(parents: Ints, rows: Ints) -> None:
    nodes = parents.size
    wrong = np.flatnonzero((rows < -1) | (rows >= nodes))
    if wrong.size:
        raise InvalidForest(f"row_node: expected nodes in -1..{nodes - 1}, got {rows[wrong[0]]} for row {wrong[0]}")
    # Every leaf needs a row; inner nodes then have the rows of their leaves.
    reached = np.zeros(nodes, dtype=np.bool_)
    reached[rows[rows >= 0]] = True
    reached[parents[parents >= 0]] = True
    if not reached.all():
        raise InvalidForest(f"row_node: expected a row through every node, got none that ends in leaf {int(np.argmin(reached))}")


def _path_positions(lengths: Ints, parents: Ints) -> Ints:
    """Tokens before each node on its path."""
    before = [0] * lengths.size
    sizes = lengths.tolist()
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            before[node] = before[parent] + sizes[parent]
    return np.array(before, dtype=np.int64)


def _check_columns(columns: Ints, starts: Ints, lengths: Ints, parents: Ints) -> None:
    total = int(lengths.sum())
    if columns.size != total:
        raise InvalidForest(f"column: expected {total} entries, one per token, got {columns.size}")
    if total and int(columns.min()) < 0:
        token = int(np.argmin(columns))
        raise InvalidForest(f"column: expected columns from 0, got {columns[token]} for token {token}")
    previous = np.empty_like(columns)
    previous[1:] = columns[:-1]
    previous[starts] = np.where(parents < 0, -1, columns[(starts + lengths)[parents] - 1]) if total else -1
    wrong = np.flatnonzero(columns <= previous)
    if wrong.size:
        token = wrong[0]
        found = f"{columns[token]} after {previous[token]} at token {token}"
        raise InvalidForest(f"column: expected columns that increase along every row, got {found}")
