"""Lists of blocks for block-sparse attention against the mask written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sp_compile.layout import Forest, mask_blocks
from sp_compile.layout.build import Ints
from sp_compile.layout.mask_blocks import BLOCK, LISTS, ORDER, SHAPE, Numbers, key_lists, query_lists, walks
from tests.ops.forests import ROWS, forest, random_forest


def block_lists(end: Ints) -> dict[str, list[Numbers]]:
    return dict(zip(LISTS, key_lists(end) + query_lists(end), strict=True))


def trees() -> list[Forest]:
    aligned = [[*range(256), *range(1000 * b, 1000 * b + 128)] for b in range(1, 4)]
    ragged = [[*range(300), *range(1000 * b, 1000 * b + 37 * b)] for b in range(1, 9)]
    rows = [[[5]], aligned, ragged, [[*range(BLOCK)]], [[*range(BLOCK + 1)]], [[b] for b in range(300)]]
    return [*map(Forest.from_rows, rows), *(random_forest(seed, rows=25, length=200) for seed in range(6))]


@pytest.mark.parametrize("block", [128, 16])
@pytest.mark.parametrize("tree", [*trees(), *map(forest, ROWS)], ids=lambda tree: f"{tree.num_tokens}")
def test_lists_equal_the_mask(tree: Forest, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_blocks, "BLOCK", block)
    end = tree.tensor("end", "cpu").numpy()
    tokens = len(end)
    blocks = -(-tokens // block)
    query, key = np.arange(tokens)[:, None], np.arange(tokens)[None]
    allowed = (key <= query) & (query < end[None])
    inside = np.zeros((blocks * block,) * 2, dtype=np.int64)
    real = inside.copy()
    inside[:tokens, :tokens], real[:tokens, :tokens] = allowed, 1
    count, most = (x.reshape(blocks, block, blocks, block).sum((1, 3)) for x in (inside, real))
    own = np.eye(blocks, dtype=bool)
    # A block whose triangle is one token is kept as one that is seen in part, so that every block of queries has one.
    want = {"full": (count == most) & ~own, "part": (count > 0) & ((count < most) | own)}
    lists = block_lists(end)
    assert set(lists) == set(LISTS)
    for name, (number, items) in lists.items():
        assert number.dtype == items.dtype == np.int32
        found = np.zeros((blocks, blocks), dtype=np.int64)
        for row in range(blocks):
            given = items[row, : number[row]]
            assert (np.diff(given) > 0).all()
            found[row, given] += 1
        kind, of = name.split("_")
        assert (found == (want[kind] if of == "keys" else want[kind].T)).all(), name


@pytest.mark.parametrize("block", [128, 16, 5])
@pytest.mark.parametrize("tree", [*trees(), *map(forest, ROWS)], ids=lambda tree: f"{tree.num_tokens}")
def test_walks_visit_the_lists_and_turns_count_those_before(tree: Forest, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_blocks, "BLOCK", block)
    end = tree.tensor("end", "cpu").numpy()
    lists, found = block_lists(end), walks(end)
    assert set(found) == set(ORDER)
    assert all(column.dtype == np.int32 for column in found.values())
    blocks = -(-len(end) // block)
    assert sorted(found["block"].tolist()) == [*range(blocks)]
    taken = np.zeros(blocks, dtype=np.int64)
    for row, middle, stop, last_turn, turn in zip(*(found[name].tolist() for name in ORDER), strict=True):
        part, full = ([*items[row, : number[row]]] for number, items in (lists["part_queries"], lists["full_queries"]))
        assert part == [row, *range(middle, stop)]
        assert full == [*range(row + 1, middle)]
        # Whoever comes before has added before: the counter of a block that waits is raised by earlier ones only, so that all end.
        assert taken[row:stop].tolist() == [*[turn] * (stop - row - 1), last_turn]
        taken[row:stop] += 1
    keys = lists["part_keys"][0] + lists["full_keys"][0]
    assert taken.tolist() == keys.tolist()


@pytest.mark.parametrize("tree", trees()[:4], ids=lambda tree: f"{tree.num_tokens}")
def test_tensors_hold_the_lists(tree: Forest) -> None:
    shape, blocks = tree.tensors(("mask_shape", "mask_blocks"), "meta")
    assert (shape.device.type, blocks.device.type, blocks.dtype) == ("cpu", "meta", torch.int32)
    shape, blocks, queries = tree.tensors(("mask_shape", "mask_blocks", "mask_queries"), "cpu")
    given = dict(zip(SHAPE, shape[0].tolist(), strict=True))
    column = tree.tensor("column", "cpu")
    assert (given["tokens"], given["low"], given["high"]) == (tree.num_tokens, int(column.min()), int(column.max()))
    rows = given["blocks"]
    assert blocks[: tree.num_tokens].tolist() == tree.tensor("end", "cpu").tolist()
    assert not blocks[tree.num_tokens : rows * BLOCK].any()
    held = {name: blocks[rows * BLOCK :] if name.endswith("keys") else queries for name in LISTS}
    at = {"keys": 0, "queries": 0}
    for name, (number, items) in block_lists(tree.tensor("end", "cpu").numpy()).items():
        assert items.shape == (rows, given[name])
        found = held[name][at[name.split("_")[1]] :]
        assert found[:rows].tolist() == number.tolist()
        assert found[rows : rows + items.size].tolist() == items.ravel().tolist()
        at[name.split("_")[1]] += rows + items.size
    assert at == {"keys": len(blocks) - rows * BLOCK, "queries": len(queries)}
    order = tree.tensor("mask_order", "cpu")
    assert order.dtype == torch.int32
    assert order.tolist() == np.concatenate([walks(tree.tensor("end", "cpu").numpy())[name] for name in ORDER]).tolist()


def test_without_tokens() -> None:
    tree = Forest.from_rows([[]])
    assert tree.tensor("mask_shape", "cpu").tolist() == [[0] * len(SHAPE)]
    assert tree.tensor("mask_blocks", "cpu").shape == (0,)
    assert all(tree.tensor(name, "cpu").shape == (0,) for name in ("mask_queries", "mask_order"))
