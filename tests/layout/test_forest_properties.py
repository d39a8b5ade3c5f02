"""Random batches against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_compile.layout import Forest
from tests.layout.forest_oracle import DROPPED, check, symbols

Rows = list[list[int]]
SMALL = settings(max_examples=150, deadline=None)
ragged = st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=7)
shape = st.tuples(st.integers(1, 7), st.integers(1, 8))


@st.composite
def kept_batches(draw: st.DrawFn, padded: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two keys [B, L] and keep [B, L]: left and right padding, or holes anywhere."""
    num_rows, width = draw(shape)
    values = st.lists(st.integers(0, 1), min_size=num_rows * width, max_size=num_rows * width)
    first = np.array(draw(values)).reshape(num_rows, width)
    second = np.array(draw(st.one_of(st.just([0] * (num_rows * width)), values))).reshape(num_rows, width)
    if padded:
        left = np.array(draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows)))
        length = np.array(draw(st.lists(st.integers(0, width), min_size=num_rows, max_size=num_rows)))
        column = np.arange(width)
        keep = (column >= left[:, None]) & (column < (left + length)[:, None])
    else:
        keep = np.array(draw(values)).reshape(num_rows, width) > 0
    return first, second, keep


def as_symbols(keys: list[np.ndarray], keep: np.ndarray) -> list[list[object]]:
    num_rows, width = keep.shape
    return [[tuple(int(key[b, c]) for key in keys) if keep[b, c] else DROPPED for c in range(width)] for b in range(num_rows)]


@SMALL
@given(ragged)
def test_rows_equal_definition(rows: Rows) -> None:
    check(Forest.from_rows(rows), symbols(rows))


@SMALL
@given(ragged, st.integers(1, 4))
def test_refined_equals_definition(rows: Rows, k: int) -> None:
    check(Forest.from_rows(rows).refined(k), symbols(rows), k)


@SMALL
@given(kept_batches(padded=True), st.integers(0, 3))
def test_padded_batches_equal_definition(batch: tuple[np.ndarray, np.ndarray, np.ndarray], k: int) -> None:
    first, second, keep = batch
    rows = as_symbols([first, second], keep)
    forest = Forest.from_tokens(first, torch.from_numpy(second).to(torch.int32), keep=keep)
    check(forest, rows)
    check(forest.refined(k), rows, k)


@SMALL
@given(kept_batches(padded=False), st.integers(0, 3))
def test_batches_with_holes_equal_definition(batch: tuple[np.ndarray, np.ndarray, np.ndarray], k: int) -> None:
    first, second, keep = batch
    rows = as_symbols([first, second], keep)
    forest = Forest.from_tokens(first.astype(np.float32), second, keep=torch.from_numpy(keep))
    check(forest, rows)
    check(forest.refined(k), rows, k)


@SMALL
@given(ragged, st.integers(0, 3), st.integers(0, 3))
def test_refinements_compose(rows: Rows, a: int, b: int) -> None:
    forest = Forest.from_rows(rows)
    refined = forest.refined(a + b)
    assert refined.logical_tokens == forest.logical_tokens
    assert refined.num_tokens >= forest.refined(a).num_tokens


@SMALL
@given(ragged, st.randoms(use_true_random=False))
def test_explicit_description_reproduces_the_forest(rows: Rows, random: object) -> None:
    forest = Forest.from_rows(rows)
    args = (forest.node_start, forest.node_len, forest.parent, forest.row_node)
    again = Forest(*args, column=forest.column, num_columns=forest.num_columns)
    assert again == forest
    assert Forest(*args) == forest
    check(again, symbols(rows))


@SMALL
@given(kept_batches(padded=False))
def test_index_inverts_the_batch(batch: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    first, second, keep = batch
    forest = Forest.from_tokens(first, second, keep=keep)
    np.testing.assert_array_equal(forest.index >= 0, keep)
    packed = first[forest.row, forest.column]
    np.testing.assert_array_equal(packed[forest.index[keep]], first[keep])
    assert int(forest.count.sum()) == int(keep.sum()) == forest.logical_tokens
    np.testing.assert_array_equal(np.bincount(forest.index[keep], minlength=forest.num_tokens), forest.count)


@SMALL
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=7), st.integers(0, 10**6))
def test_shuffled_rows_give_the_same_tokens(rows: Rows, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(rows))
    forest, shuffled = Forest.from_rows(rows), Forest.from_rows([rows[b] for b in order])
    assert (forest.num_tokens, forest.num_nodes, forest.logical_tokens) == (
        shuffled.num_tokens,
        shuffled.num_nodes,
        shuffled.logical_tokens,
    )


@pytest.mark.parametrize("padding", ["none", "right", "both", "holes"])
@pytest.mark.parametrize("width", [90, 700, 1500])
def test_wide_batches_equal_pairwise_definition(width: int, padding: str) -> None:
    rng = np.random.default_rng(width)
    num_rows, column = 20, np.arange(width)
    rows = rng.integers(0, 2, (num_rows, width))
    keep = np.ones((num_rows, width), dtype=bool)
    if padding in ("right", "both"):
        keep = column < rng.integers(0, width + 1, num_rows)[:, None]
    if padding == "both":
        keep &= column >= rng.choice([0, 7], num_rows)[:, None]
    if padding == "holes":
        keep = rng.integers(0, 8, (num_rows, width)) > 0
    for b in range(1, num_rows):
        source, shared = int(rng.integers(0, b)), int(rng.integers(0, width + 1))
        rows[b, :shared] = rows[source, :shared]
        keep[b, :shared] = keep[source, :shared]
    forest = Forest.from_tokens(rows, keep=keep)
    read = np.where(keep, rows, -1)
    apart = (read[:, None] != read[None]).cumsum(-1) > 0
    both = keep[:, None] & keep[None]
    for k in (0, 1, 3, width):
        ahead = np.concatenate([apart[..., k:], np.repeat(apart[..., -1:], min(k, width), axis=-1)], axis=-1)
        index = forest.refined(k).index
        np.testing.assert_array_equal(index >= 0, keep)
        np.testing.assert_array_equal(~ahead & both, (index[:, None] == index[None]) & both)


def test_refinement_example() -> None:
    letters = {letter: i for i, letter in enumerate("ABCxyDE")}
    rows = [[letters[letter] for letter in row] for row in ("ABCx", "ABCy", "ABD", "AB", "AE")]
    forest = Forest.from_rows(rows)
    assert [forest.refined(k).num_tokens for k in range(5)] == [7, 11, 14, 15, 15]
    for k in range(5):
        check(forest.refined(k), symbols(rows), k)
    assert forest.refined(1).count.tolist() == [4, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1]


def test_refinement_keeps_equal_rows_together() -> None:
    forest = Forest.from_rows([[1, 2, 3], [1, 2, 3]])
    assert forest.refined(100) == forest
