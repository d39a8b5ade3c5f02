"""Chunk plans: what each slot has behind it is its token's path, every token is written once, and the grid is the one asked for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_compile.errors import InvalidForest
from sp_compile.layout import Forest
from sp_compile.layout.chunks import chunk_tensor_name, exact_chunks, replay_chunks
from sp_compile.layout.tensors import symbolic_shape

ROWS = st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=8)
SIZES = st.integers(1, 6)


@st.composite
def with_holes(draw: st.DrawFn) -> Forest:
    """Rows of a [B, L] batch with dropped columns at the start, at the end and in between."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    bits = st.lists(st.booleans(), min_size=columns, max_size=columns)
    tokens = np.array([draw(bits) for _ in range(rows)], dtype=np.int64)
    keep = np.ones((rows, columns), dtype=bool)
    for row in range(rows):
        keep[row, : draw(st.integers(0, columns))] = False
        keep[row, draw(st.integers(0, columns)) :] = False
        keep[row, draw(st.integers(0, columns - 1))] = False
    return Forest.from_tokens(np.where(keep, tokens, 0), keep=keep)


def path(forest: Forest, token: int) -> list[int]:
    """Tokens from the start of its rows to a token, itself included."""
    found = []
    while token >= 0:
        found.append(token)
        token = int(forest.prev[token])
    return found[::-1]


def check(forest: Forest, plan: np.ndarray) -> None:
    """What holds for every plan, by walking it slot by slot."""
    behind: list[list[int]] = []
    written: list[int] = []
    for number, (parent, *slots) in enumerate(plan.tolist()):
        assert -1 <= parent < number
        state = list(behind[parent]) if parent >= 0 else []
        for slot in slots:
            if slot == -1:
                continue
            token = slot if slot >= 0 else -2 - slot
            state.append(token)
            assert state == path(forest, token)
            if slot >= 0:
                written.append(token)
        assert any(slot != -1 for slot in slots)
        behind.append(state)
    assert sorted(written) == list(range(forest.num_tokens))


@settings(max_examples=80, deadline=None)
@given(ROWS, SIZES)
def test_exact_grid_starts_at_every_node(rows: list[list[int]], c: int) -> None:
    forest = Forest.from_rows(rows)
    plan = exact_chunks(forest, c)
    check(forest, plan)
    starts, stops = forest.node_start.tolist(), (forest.node_start + forest.node_len).tolist()
    wanted = [list(range(a, min(a + c, stop))) for start, stop in zip(starts, stops, strict=True) for a in range(start, stop, c)]
    assert [[slot for slot in slots if slot != -1] for slots in plan[:, 1:].tolist()] == wanted
    assert all((np.diff(slots == -1) >= 0).all() for slots in plan[:, 1:].astype(np.int64))


def cells(forest: Forest, c: int) -> list[tuple[int, ...]]:
    """The distinct paths of rows through cells of the grid, without those that others only continue and no later cell is reached from."""
    paths: set[tuple[int, ...]] = set()
    left: set[tuple[int, ...]] = set()
    for row in forest.index:
        parts: dict[int, list[int]] = {}
        for column in np.flatnonzero(row >= 0).tolist():
            parts.setdefault(column // c, []).append(int(row[column]))
        inside = [tuple(part) for _, part in sorted(parts.items())]
        paths.update(inside)
        left.update(inside[:-1])
    return sorted(
        (one for one in paths if one in left or not any(len(other) > len(one) and other[: len(one)] == one for other in paths)),
        key=lambda one: one[-1],
    )


def check_replay(forest: Forest, c: int) -> None:
    plan = replay_chunks(forest, c)
    check(forest, plan)
    decoded = np.where(plan < -1, -2 - plan, plan)[:, 1:]
    assert [tuple(slot for slot in slots if slot != -1) for slots in decoded.tolist()] == cells(forest, c)
    for slots in decoded:
        used = np.flatnonzero(slots != -1)
        assert (forest.column[slots[used]] % c == used).all()
        assert len(set((forest.column[slots[used]] // c).tolist())) == 1
    seen: set[int] = set()
    for slots in plan[:, 1:].tolist():
        own, copies = {slot for slot in slots if slot >= 0}, {-2 - slot for slot in slots if slot < -1}
        assert copies <= seen
        assert not own & seen
        seen |= own


@settings(max_examples=80, deadline=None)
@given(ROWS, SIZES)
def test_replay_grid_is_that_of_the_dense_run(rows: list[list[int]], c: int) -> None:
    check_replay(Forest.from_rows(rows), c)


@settings(max_examples=80, deadline=None)
@given(with_holes(), SIZES)
def test_replay_grid_follows_dense_columns(forest: Forest, c: int) -> None:
    check_replay(forest, c)
    check(forest, exact_chunks(forest, c))


def test_replay_of_one_fork() -> None:
    forest = Forest.from_rows([[0, 1, 2, 3, 4, 5], [0, 1, 2, 9]])
    assert replay_chunks(forest, 2).tolist() == [[-1, 0, 1], [0, 2, 3], [1, 4, 5], [0, -4, 6]]
    assert exact_chunks(forest, 2).tolist() == [[-1, 0, 1], [0, 2, -1], [1, 3, 4], [2, 5, -1], [1, 6, -1]]


def test_rows_that_leave_a_cell_where_others_go_on_in_it() -> None:
    """Behind the shared token of column 0 one row has column 1, of the same cell, and another a hole and then column 2."""
    keep = np.array([[True, True, True], [True, False, True]])
    forest = Forest.from_tokens(np.arange(3) * keep, keep=keep)
    assert replay_chunks(forest, 2).tolist() == [[-1, 0, -1], [-1, -2, 1], [1, 2, -1], [0, 3, -1]]
    check_replay(forest, 2)


def test_plans_without_tokens() -> None:
    for rows in ([], [[]], [[], []]):
        assert exact_chunks(Forest.from_rows(rows), 8).shape == (0, 9)
        assert replay_chunks(Forest.from_rows(rows), 8).shape == (0, 9)


@pytest.mark.parametrize("kind", ["exact", "replay"])
def test_plan_is_a_forest_tensor(kind: str) -> None:
    name = chunk_tensor_name(kind, 3)
    assert name == f"chunks_{kind}_3"
    assert chunk_tensor_name(kind, 3) == name
    assert symbolic_shape(name) == ((name, 4), torch.int64)
    forest = Forest.from_rows([[1, 2, 3, 4, 5], [1, 2, 9]])
    made = exact_chunks if kind == "exact" else replay_chunks
    assert (forest.tensor(name, "cpu").numpy() == made(forest, 3)).all()


def test_names_are_registered_once_by_many_threads() -> None:
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda c: chunk_tensor_name("exact", 1000 + c % 4), range(64)))
    assert sorted(set(names)) == [f"chunks_exact_{1000 + c}" for c in range(4)]


@pytest.mark.parametrize(("kind", "c"), [("exact", 0), ("replay", -1), ("dense", 64)])
def test_wrong_names_are_refused(kind: str, c: int) -> None:
    with pytest.raises(InvalidForest, match="expected a kind"):
        chunk_tensor_name(kind, c)
