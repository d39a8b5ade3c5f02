"""What a forest of given rows must be, from the definition: which rows share which column, in O(B^2 L) plain Python."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from sp_compile.layout import Forest

DROPPED = None
Symbols = Sequence[Sequence[Hashable]]


def expected(rows: Symbols, look_ahead: int = 0) -> dict[str, Any]:
    """Every field of the forest of `rows`, [B][L] symbols with DROPPED where there is no token."""
    width = len(rows[0]) if rows else 0

    def shared(a: int, b: int, column: int) -> bool:
        last = min(column + look_ahead, width - 1)
        return all(rows[a][c] == rows[b][c] for c in range(last + 1))

    through: dict[tuple[int, int], tuple[int, ...]] = {}
    for b in range(len(rows)):
        for column in range(width):
            if rows[b][column] is not DROPPED:
                through[b, column] = tuple(other for other in range(len(rows)) if shared(b, other, column))
    # A token is (smallest row through it, column).
    paths = [[(through[b, c][0], c) for c in range(width) if (b, c) in through] for b in range(len(rows))]
    rows_of = {(members[0], column): members for (_, column), members in through.items()}
    before = {token: (path[i - 1] if i else None) for path in paths for i, token in enumerate(path)}

    def children(token: tuple[int, int] | None) -> list[tuple[int, int]]:
        return sorted(other for other, previous in before.items() if previous == token)

    order: list[tuple[int, int]] = []
    node_of: dict[tuple[int, int], int] = {}
    nodes: list[list[tuple[int, int]]] = []
    parents: list[int] = []

    def visit(token: tuple[int, int]) -> None:
        previous = before[token]
        if previous is not None and rows_of[previous] == rows_of[token]:
            node_of[token] = node_of[previous]
            nodes[node_of[token]].append(token)
        else:
            node_of[token] = len(nodes)
            nodes.append([token])
            parents.append(-1 if previous is None else node_of[previous])
        order.append(token)
        for child in children(token):
            visit(child)

    for root in children(None):
        visit(root)
    number = {token: i for i, token in enumerate(order)}
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)

    def is_below(token: tuple[int, int], node: int) -> bool:
        at = node_of[token]
        while at >= 0 and at != node:
            at = parents[at]
        return at == node

    node_last = [max(i for i, token in enumerate(order) if is_below(token, node)) for node in range(len(nodes))]
    index = [[-1] * width for _ in rows]
    for b, path in enumerate(paths):
        for token in path:
            index[b][token[1]] = number[token]
    logical = sum(len(path) for path in paths)
    return {
        "node_start": [number[node[0]] for node in nodes],
        "node_len": [len(node) for node in nodes],
        "parent": parents,
        "depth": depth,
        "row_node": [node_of[path[-1]] if path else -1 for path in paths],
        "row": [token[0] for token in order],
        "column": [token[1] for token in order],
        "count": [len(rows_of[token]) for token in order],
        "prev": [-1 if before[token] is None else number[before[token]] for token in order],  # type: ignore[index]
        "end": [node_last[node_of[token]] + 1 for token in order],
        "index": index,
        "num_rows": len(rows),
        "num_columns": width,
        "num_tokens": len(order),
        "logical_tokens": logical,
        "sharing": logical / len(order) if order else 1.0,
    }


def check(forest: Forest, rows: Symbols, look_ahead: int = 0) -> None:
    """Asserts that `forest` is the forest of `rows`, field by field."""
    for name, value in expected(rows, look_ahead).items():
        got = getattr(forest, name)
        if isinstance(got, np.ndarray):
            assert got.dtype == np.int64, name
            assert not got.flags.writeable, name
            want = np.array(value, dtype=np.int64).reshape(got.shape) if np.size(got) == np.size(value) else np.array(value)
            np.testing.assert_array_equal(got, want, err_msg=name)
        else:
            assert got == value, name


def symbols(rows: Sequence[Sequence[Hashable]]) -> list[list[Hashable]]:
    """Rows of any lengths, right-padded with DROPPED."""
    width = max((len(row) for row in rows), default=0)
    return [list(row) + [DROPPED] * (width - len(row)) for row in rows]
