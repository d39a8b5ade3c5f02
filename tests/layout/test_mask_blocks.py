"""Lists of blocks for block-sparse attention against the mask written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sp_compile.layout import Forest, mask_blocks
from sp_compile.layout.mask_blocks import BLOCK, LISTS, SHAPE, block_lists
from tests.ops.forests import ROWS, forest, random_forest


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


@pytest.mark.parametrize("tree", trees()[:4], ids=lambda tree: f"{tree.num_tokens}")
def test_tensors_hold_the_lists(tree: Forest) -> None:
    shape, blocks = tree.tensors(("mask_shape", "mask_blocks"), "meta")
    assert (shape.device.type, blocks.device.type, blocks.dtype) == ("cpu", "meta", torch.int32)
    shape, blocks = tree.tensors(("mask_shape", "mask_blocks"), "cpu")
    given = dict(zip(SHAPE, shape[0].tolist(), strict=True))
    column = tree.tensor("column", "cpu")
    assert (given["tokens"], given["low"], given["high"]) == (tree.num_tokens, int(column.min()), int(column.max()))
    rows = given["blocks"]
    assert blocks[: tree.num_tokens].tolist() == tree.tensor("end", "cpu").tolist()
    assert not blocks[tree.num_tokens : rows * BLOCK].any()
    at = rows * BLOCK
    for name, (number, items) in block_lists(tree.tensor("end", "cpu").numpy()).items():
        assert items.shape == (rows, given[name])
        assert blocks[at : at + rows].tolist() == number.tolist()
        at += rows
        assert blocks[at : at + items.size].tolist() == items.ravel().tolist()
        at += items.size
    assert at == len(blocks)


def test_without_tokens() -> None:
    tree = Forest.from_rows([[]])
    assert tree.tensor("mask_shape", "cpu").tolist() == [[0] * len(SHAPE)]
    assert tree.tensor("mask_blocks", "cpu").shape == (0,)
