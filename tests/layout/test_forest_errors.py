"""Wrong descriptions and inputs raise InvalidForest with what was expected and what came; forests cannot be changed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from sp_compile.errors import InvalidForest
from sp_compile.layout import Forest

GOOD: dict[str, Any] = {"node_start": [0, 3, 4], "node_len": [3, 1, 2], "parent": [-1, 0, 0], "row_node": [1, 2]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"node_start": [0, 2, 4]}, r"node_start: expected node 1 to start at 3, got 2: it overlaps"),
        ({"node_start": [0, 3, 5]}, r"expected node 2 to start at 4, got 5: it leaves a gap"),
        ({"node_start": [1, 4, 5]}, r"expected node 0 to start at 0, got 1"),
        ({"node_len": [3, 0, 2]}, r"node_len: expected at least 1 token in every node, got 0 for node 1"),
        ({"node_len": [3, -1, 2]}, r"at least 1 token"),
        ({"node_len": [3, 1]}, r"node_len: expected 3 entries, one per node as in node_start, got 2"),
        ({"node_len": [3, 1.0, 2]}, r"node_len: expected an integer, got 1\.0 \(float\)"),
        ({"node_len": np.array([3.0, 1.0, 2.0])}, r"node_len: expected an integer dtype, got float64"),
        ({"node_len": torch.tensor([3.0, 1.0, 2.0]).bfloat16()}, r"node_len: expected an integer dtype, got torch.bfloat16"),
        ({"parent": [-1, 0, True]}, r"parent: expected an integer, got True \(bool\)"),
        ({"parent": torch.tensor([True, False, False])}, r"parent: expected an integer dtype, got torch.bool"),
        ({"parent": [[-1, 0, 0]]}, r"parent: expected an integer, got \[-1, 0, 0\] \(list\)"),
        ({"parent": np.array([[-1, 0, 0]])}, r"parent: expected 1 dimension, got shape \[1, 3\]"),
        ({"parent": "abc"}, r"parent: expected a 1-D integer array, got str"),
        ({"parent": [-1, 1, 0]}, r"parent: expected -1 or an earlier node for node 1, got 1"),
        ({"parent": [-1, 2, 0]}, r"an earlier node for node 1, got 2"),
        ({"parent": [-2, 0, 0]}, r"an earlier node for node 0, got -2"),
        ({"parent": [-1, -1, 0]}, r"expected depth-first preorder, the parent of node 2 among node 1 and its ancestors, got 0"),
        ({"row_node": [1, 3]}, r"row_node: expected nodes in -1..2, got 3 for row 1"),
        ({"row_node": [1, -2]}, r"row_node: expected nodes in -1..2, got -2 for row 1"),
        ({"row_node": [1, 0]}, r"expected a row through every node, got none that ends in leaf 2"),
        ({"row_node": [1.5, 2]}, r"row_node: expected an integer, got 1.5"),
        ({"row_node": [2**70, 2]}, r"at most 64 bits"),
        ({"row_node": np.array([2**63, 2], dtype=np.uint64)}, r"below 2\*\*63"),
        ({"column": [0, 1, 2, 3, 3]}, r"column: expected 6 entries, one per token, got 5"),
        ({"column": [0, 1, 1, 3, 3, 4]}, r"increase along every row, got 1 after 1 at token 2"),
        ({"column": [0, 1, 2, 3, 2, 4]}, r"increase along every row, got 2 after 2 at token 4"),
        ({"column": [-1, 1, 2, 3, 3, 4]}, r"column: expected columns from 0, got -1 for token 0"),
        ({"num_columns": 4}, r"num_columns: expected at least 5, one more than the largest column, got 4"),
        ({"num_columns": 5.0}, r"num_columns: expected an integer, got 5\.0"),
        ({"node_len": [2**62, 2**62, 2**62]}, r"fewer than 2\*\*63"),
    ],
)
def test_explicit_description_is_checked(change: dict[str, Any], message: str) -> None:
    Forest(**GOOD)
    with pytest.raises(InvalidForest, match=message):
        Forest(**(GOOD | change))


def test_parent_before_node_is_not_enough() -> None:
    # 0 has children 1 and 2; node 3 hangs below 1 but comes after 2.
    with pytest.raises(InvalidForest, match="depth-first preorder, the parent of node 3"):
        Forest([0, 1, 2, 3], [1, 1, 1, 1], [-1, 0, 0, 1], [2, 3])


IDS = np.zeros((2, 3), dtype=np.int64)


@pytest.mark.parametrize(
    ("keys", "keep", "message"),
    [
        ((), None, r"at least one input of shape \[rows, columns\], got 0"),
        ((np.zeros(2, dtype=np.int64),), None, r"at least one input of shape \[rows, columns\], got 1 of shape \[rows\]"),
        ((IDS, IDS[:, :2]), None, r"input 1: expected shape \[2, 3\] to agree with input 0, got \[2, 2\]"),
        ((IDS, np.zeros(3, dtype=np.int64)), None, r"input 1: expected shape \[2\] to agree with input 0, got \[3\]"),
        ((np.zeros((2, 3, 4)),), None, r"input 0: expected shape \[rows, columns\] or \[rows\], got \[2, 3, 4\]"),
        ((np.float64(3.0),), None, r"input 0: expected a numpy array or a torch tensor, got float64"),
        (([[1, 2]],), None, r"expected a numpy array or a torch tensor, got list"),
        ((IDS.astype(str),), None, r"int, bool or float array of at most 64 bits"),
        ((IDS.astype(complex),), None, r"got dtype complex128"),
        ((IDS.astype(object),), None, r"got dtype object"),
        ((torch.zeros(2, 3, dtype=torch.complex64),), None, r"got torch.complex64"),
        ((torch.zeros(2, 3).to_sparse(),), None, r"strided"),
        ((torch.zeros(2, 3, device="meta"),), None, r"input 0: expected a tensor on cpu, got one on meta"),
        ((IDS,), IDS, r"keep: expected a bool array of shape \[rows, columns\], got int64"),
        ((IDS,), np.ones(2, dtype=bool), r"keep: expected a bool array of shape \[rows, columns\], got bool of shape \[2\]"),
        ((IDS,), np.ones((2, 4), dtype=bool), r"keep: expected shape \[2, 3\] to agree with input 0, got \[2, 4\]"),
    ],
)
def test_batches_are_checked(keys: tuple[object, ...], keep: object, message: str) -> None:
    with pytest.raises(InvalidForest, match=message):
        Forest.from_tokens(*keys, keep=keep)


def test_fake_tensors_are_refused() -> None:
    with torch._subclasses.FakeTensorMode(), pytest.raises(InvalidForest, match="ordinary tensor with data"):
        Forest.from_tokens(torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1.0]], r"rows\[0\]: expected an integer, got 1\.0"),
        ([[1], np.array([0.5])], r"rows\[1\]: expected an integer dtype, got float64"),
        ([[True]], r"got True \(bool\)"),
        ([np.zeros((2, 2), dtype=int)], r"rows\[0\]: expected 1 dimension, got shape \[2, 2\]"),
        (["ab"], r"rows\[0\]: expected a 1-D integer array, got str"),
        ("ab", r"rows: expected a sequence of 1-D integer arrays"),
        (np.zeros((2, 2), dtype=int), r"rows: expected a sequence of 1-D integer arrays, one per row, got ndarray"),
    ],
)
def test_rows_are_checked(rows: Any, message: str) -> None:
    with pytest.raises(InvalidForest, match=message):
        Forest.from_rows(rows)


@pytest.mark.parametrize(
    ("prompts", "completions", "groups", "message"),
    [
        ([[1]], [], [0], r"completions: expected 1, one for each prompt, got 0"),
        ([[1]], [[2]], [0, 1], r"groups: expected 1 entries, one per row, got 2"),
        ([[1]], [[2]], [0.5], r"groups: expected an integer, got 0\.5"),
        ([[1]], [[2]], [False], r"groups: expected an integer, got False"),
        ([[1]], [[2]], torch.tensor([0.0]), r"groups: expected an integer dtype, got torch.float32"),
        ([[1]], [[2]], 0, r"groups: expected one integer or string per row, got int"),
        ([[1]], [[2.0]], [0], r"completions\[0\]: expected an integer, got 2\.0"),
        ([[1.0]], [[2]], [0], r"prompts\[0\]: expected an integer, got 1\.0"),
    ],
)
def test_groups_are_checked(prompts: Any, completions: Any, groups: Any, message: str) -> None:
    with pytest.raises(InvalidForest, match=message):
        Forest.from_groups(prompts, completions, groups)


@pytest.mark.parametrize(("k", "message"), [(-1, "at least 0, got -1"), (1.0, "an integer, got 1.0"), (True, "an integer, got True")])
def test_refined_checks_k(k: Any, message: str) -> None:
    with pytest.raises(InvalidForest, match=message):
        Forest(**GOOD).refined(k)


def test_invalid_forest_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="earlier node"):
        Forest([0], [1], [0], [0])


def test_forest_is_immutable() -> None:
    forest = Forest(**GOOD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        forest.num_columns = 9  # type: ignore[misc]
    names = "node_start node_len parent row_node run_start run_column depth node_end node_row node_count row column count prev end index"
    for name in names.split():
        with pytest.raises(ValueError, match="read-only"):
            getattr(forest, name)[...] = 0


def test_forest_does_not_alias_its_arguments() -> None:
    arguments: dict[str, Any] = {name: np.array(value) for name, value in GOOD.items()}
    forest = Forest(**arguments)
    key = forest.key()
    for array in arguments.values():
        array[...] = 7
    assert forest == Forest(**GOOD)
    assert Forest(forest.node_start, forest.node_len, forest.parent, forest.row_node).key() == key
