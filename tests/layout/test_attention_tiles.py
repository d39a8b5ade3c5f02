"""Runs of blocks for attention against the mask written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_compile.errors import InvalidForest
from sp_compile.layout import Forest
from sp_compile.layout.attention_tiles import ALIGN, BLOCK, LISTS, SHAPE, Runs, make_lists, sections, tile_names
from tests.ops.forests import ROWS, forest, random_forest

CUTS = [(None, None), (1, None), (7, None), (40, None), (None, 5), (None, 64), (30, 16), (10_000, None)]


def trees() -> list[Forest]:
    aligned = [[*range(256), *range(1000 * b, 1000 * b + 128)] for b in range(1, 4)]
    ragged = [[*range(300), *range(1000 * b, 1000 * b + 37 * b)] for b in range(1, 9)]
    rows = [[[5]], aligned, ragged, [[*range(BLOCK)]], [[*range(BLOCK + 1)]], [[b] for b in range(300)]]
    return [*map(Forest.from_rows, rows), *(random_forest(seed, rows=25, length=200) for seed in range(4))]


def matrix(runs: Runs) -> np.ndarray:
    """How often each owner visits each block."""
    blocks = len(runs.at) - 1
    found = np.zeros((blocks, blocks), dtype=np.int64)
    assert (runs.at[0], runs.at[-1]) == (0, len(runs.runs))
    for owner in range(blocks):
        given = runs.runs[runs.at[owner] : runs.at[owner + 1]]
        assert (given[:, 0] < given[:, 1]).all()
        assert (given[1:, 0] >= given[:-1, 1]).all()
        for first, last in given:
            found[owner, first:last] += 1
    assert (found.sum(1) == runs.visits).all()
    return found


def check(tree: Forest, window: int | None, chunk: int | None, block: int) -> None:
    end, column = tree.tensor("end", "cpu").numpy(), tree.column
    tokens = len(end)
    blocks = -(-tokens // block)
    query, key = np.arange(tokens)[:, None], np.arange(tokens)[None]
    ancestor = (key <= query) & (query < end[None])
    allowed = ancestor.copy()
    if window is not None:
        allowed &= column[:, None] - column[None] < window
    if chunk is not None:
        allowed &= column[:, None] // chunk == column[None] // chunk
    inside = np.zeros((2, blocks * block, blocks * block), dtype=np.int64)
    inside[0, :tokens, :tokens], inside[1, :tokens, :tokens] = allowed, 1
    count, most = (x.reshape(blocks, block, blocks, block).sum((1, 3)) for x in inside)
    own = np.eye(blocks, dtype=bool)
    lists = make_lists(end, column, window, chunk, block)
    assert lists.cut or (allowed == ancestor).all()
    found = {name: matrix(lists.runs[name]) for name in LISTS}
    assert (found["key_full"] == ((count == most) & ~own)).all()
    assert (found["key_part"][own] == 1).all()
    assert set(np.unique(found["key_part"] + found["key_full"])) <= {0, 1}
    # Under a window a part block may turn out to show nothing, where it holds tokens of several paths.
    assert (found["key_part"] + found["key_full"] >= (count > 0)).all()
    if not lists.cut:
        assert (found["key_part"] + found["key_full"] == ((count > 0) | own)).all()
    for kind in ("full", "part"):
        assert (found[f"query_{kind}"] == found[f"key_{kind}"].T).all()


@pytest.mark.parametrize("block", [128, 16])
@pytest.mark.parametrize("tree", [*trees(), *map(forest, ROWS)], ids=lambda tree: f"{tree.num_tokens}")
def test_lists_equal_the_mask(tree: Forest, block: int) -> None:
    for window, chunk in CUTS:
        check(tree, window, chunk, block)


SIZES = st.one_of(st.none(), st.integers(1, 90))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 12), length=st.integers(1, 80), window=SIZES, chunk=SIZES)
def test_lists_equal_the_mask_random_forest(seed: int, rows: int, length: int, window: int | None, chunk: int | None) -> None:
    check(random_forest(seed, rows, length), window, chunk, 16)


def test_windows_leave_as_many_visits_as_they_are_wide() -> None:
    tree = Forest.from_rows([[*range(20_000)]])
    lists = make_lists(tree.tensor("end", "cpu").numpy(), tree.column, 1000, None)
    assert max(lists.runs["key_full"].visits + lists.runs["key_part"].visits) == 9
    assert max(lists.runs["query_full"].visits + lists.runs["query_part"].visits) == 9


def test_runs_are_linear_in_blocks_where_visits_are_quadratic() -> None:
    tree = Forest.from_rows([[*range(200 * BLOCK)]])
    lists = make_lists(tree.tensor("end", "cpu").numpy(), tree.column, None, None)
    assert lists.shape.tolist() == [[200 * BLOCK, BLOCK, 200, 0, 199, 200, 199, 200]]
    assert lists.runs["key_full"].visits.sum() == 199 * 200 // 2


@pytest.mark.parametrize("cut", [(None, None), (9, None), (None, 8)])
def test_tensors_hold_the_lists(cut: tuple[int | None, int | None]) -> None:
    for tree in trees():
        names = tile_names(*cut)
        shape, tiles = tree.tensors(names, "meta")
        assert (shape.device.type, tiles.device.type, tiles.dtype) == ("cpu", "meta", torch.int32)
        shape, tiles = tree.tensors(names, "cpu")
        end, column = tree.tensor("end", "cpu"), tree.tensor("column", "cpu")
        lists = make_lists(end.numpy(), tree.column, *cut)
        assert torch.equal(shape, torch.from_numpy(lists.shape))
        places = sections(shape[0].tolist())
        assert all(at % ALIGN == 0 for at, _ in places.values())
        parts = {name: tiles[at : at + size] for name, (at, size) in places.items()}
        assert len(tiles) == places["all"][1]
        assert parts["end"].tolist() == end.tolist() + [0] * (len(parts["end"]) - tree.num_tokens)
        if lists.cut:
            low = column - cut[0] + 1 if cut[0] is not None else column // cut[1] * cut[1]
            assert parts["column"][: tree.num_tokens].tolist() == column.tolist()
            assert parts["low"][: tree.num_tokens].tolist() == low.tolist()
            assert len(parts["low"]) == len(parts["column"]) == len(parts["end"])
        else:
            assert len(parts["low"]) == len(parts["column"]) == 0
        for owners, items in (("query", "key"), ("key", "query")):
            work = lists.runs[f"{items}_full"].visits + lists.runs[f"{items}_part"].visits
            order = parts[f"{owners}_order"].numpy()
            assert sorted(order) == list(range(len(work)))
            assert (np.diff(work[order]) <= 0).all()
        for name, runs in lists.runs.items():
            assert parts[f"{name}_at"].tolist() == runs.at.tolist()
            assert parts[name].tolist() == runs.runs.ravel().tolist()


def test_names_say_the_window() -> None:
    assert tile_names(None, None) == ("attention_tiles_shape", "attention_tiles")
    assert tile_names(12, 7) == tile_names(12, 7) == ("attention_tiles_window_12_chunk_7_shape", "attention_tiles_window_12_chunk_7")
    for wrong in ((0, None), (None, -1)):
        with pytest.raises(InvalidForest, match="positive window and chunk"):
            tile_names(*wrong)


def test_without_tokens() -> None:
    tree = Forest.from_rows([[]])
    shape, tiles = tree.tensors(tile_names(None, None), "cpu")
    assert shape.tolist() == [[0] * len(SHAPE)]
    assert tiles.shape == (0,)
