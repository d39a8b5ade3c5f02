"""Each special shape of a batch, against values written by hand or the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sp_compile.layout import Forest
from tests.layout.forest_oracle import DROPPED, check, expected, symbols

Symbols = list[list[int | None]]


def packed(rows: Symbols) -> Forest:
    """The forest of rows with DROPPED; what stands at dropped columns differs from row to row."""
    ids = np.array([[-b if value is DROPPED else value for value in row] for b, row in enumerate(rows)])
    return Forest.from_tokens(ids, keep=np.array([[value is not DROPPED for value in row] for row in rows]))


def text(*rows: str) -> Forest:
    return Forest.from_rows([[ord(letter) for letter in row] for row in rows])


def check_text(*rows: str) -> Forest:
    forest = text(*rows)
    check(forest, symbols([[ord(letter) for letter in row] for row in rows]))
    return forest


def test_star_written_out() -> None:
    forest = text("PPPab", "PPPc", "PPPade")
    assert forest.node_start.tolist() == [0, 3, 4, 5, 7]
    assert forest.node_len.tolist() == [3, 1, 1, 2, 1]
    assert forest.parent.tolist() == [-1, 0, 1, 1, 0]
    assert forest.depth.tolist() == [0, 1, 2, 2, 1]
    assert forest.row.tolist() == [0, 0, 0, 0, 0, 2, 2, 1]
    assert forest.column.tolist() == [0, 1, 2, 3, 4, 4, 5, 3]
    assert forest.count.tolist() == [3, 3, 3, 2, 1, 1, 1, 1]
    assert forest.prev.tolist() == [-1, 0, 1, 2, 3, 3, 5, 2]
    assert forest.end.tolist() == [8, 8, 8, 7, 5, 7, 7, 8]
    assert forest.index.tolist() == [[0, 1, 2, 3, 4, -1], [0, 1, 2, 7, -1, -1], [0, 1, 2, 3, 5, 6]]
    assert forest.row_node.tolist() == [2, 4, 3]
    assert (forest.num_rows, forest.num_columns, forest.num_tokens, forest.logical_tokens) == (3, 6, 8, 15)
    assert forest.sharing == 15 / 8


@pytest.mark.parametrize(
    "rows",
    [
        ["abc"],
        ["a"],
        ["ab", "cd", "ef"],
        ["abcd", "ab"],
        ["ab", "abcd"],
        ["ab", "abcd", "abce", "ab"],
        ["abc", "abc", "abc"],
        ["a", "b", "a", "c", "b"],
        ["PQRx", "S", "PQRy", "PQRz", "Sy"],
        ["", "ab", "", "a"],
        ["", ""],
        ["abcdefgh", "abcdefg", "abcdef", "abcde", "abcd", "abc", "ab", "a"],
        ["xa", "ya", "xb", "yb", "za"],
    ],
    ids=lambda rows: "-".join(row or "_" for row in rows),
)
def test_shape_equals_definition(rows: list[str]) -> None:
    check_text(*rows)


def test_identical_rows_share_everything() -> None:
    forest = check_text("abc", "abc")
    assert forest.count.tolist() == [2, 2, 2]
    assert forest.num_nodes == 1


def test_strict_prefix_ends_a_node_where_the_count_changes() -> None:
    forest = check_text("abcd", "ab")
    assert forest.node_len.tolist() == [2, 2]
    assert forest.count.tolist() == [2, 2, 1, 1]


def test_siblings_follow_smallest_row_not_token_value() -> None:
    forest = check_text("z", "ab", "z", "ac")
    assert forest.row[forest.node_start].tolist() == [0, 1, 1, 3]


def test_no_rows_and_no_columns() -> None:
    for forest in (
        Forest.from_rows([]),
        Forest.from_tokens(np.zeros((0, 5), dtype=np.int64)),
        Forest.from_tokens(np.zeros((3, 0), dtype=bool)),
    ):
        assert (forest.num_nodes, forest.num_tokens, forest.logical_tokens, forest.sharing) == (0, 0, 0, 1.0)
        assert forest.index.shape == (forest.num_rows, forest.num_columns)
        assert forest.tensor("count", "cpu").shape == (0,)
    assert Forest.from_rows([]) == Forest([], [], [], [])


def test_batch_of_padding_only() -> None:
    ids = np.zeros((3, 4), dtype=np.int64)
    forest = Forest.from_tokens(ids, keep=np.zeros((3, 4), dtype=bool))
    check(forest, [[DROPPED] * 4] * 3)
    assert forest.row_node.tolist() == [-1, -1, -1]


def test_left_and_right_padding() -> None:
    rows: Symbols = [
        [DROPPED, DROPPED, 1, 2, 3, 4],
        [DROPPED, DROPPED, 1, 2, 5, DROPPED],
        [7, 8, 1, 2, 3, 4],
        [DROPPED, DROPPED, 1, 2, DROPPED, DROPPED],
        [DROPPED, 1, 2, 3, 4, DROPPED],
        [7, 8, 1, 2, DROPPED, DROPPED],
    ]
    forest = packed(rows)
    check(forest, rows)
    assert forest.column[forest.node_start].tolist()[0] == 2


def test_roots_under_different_left_padding_keep_row_order() -> None:
    rows: Symbols = [[1, 2, 3], [DROPPED, 5, 6], [7, 8, 9], [DROPPED, 4, 6], [DROPPED, DROPPED, 1]]
    forest = packed(rows)
    check(forest, rows)
    assert forest.row[forest.node_start].tolist() == [0, 1, 2, 3, 4]


def test_holes_inside_rows() -> None:
    rows: Symbols = [[1, DROPPED, 2, 3], [1, 9, 2, 3], [1, DROPPED, 2, 4], [1, DROPPED, DROPPED, 3], [8, DROPPED, DROPPED, 8]]
    forest = packed(rows)
    check(forest, rows)
    check(forest.refined(1), rows, 1)
    assert forest.run_start.size > forest.num_nodes


def test_dropped_columns_are_not_read() -> None:
    keep = np.array([[True, False, True]] * 2)
    assert Forest.from_tokens(np.array([[1, 2, 3], [1, 4, 3]]), keep=keep).num_tokens == 2
    assert Forest.from_tokens(np.array([[1, 2, 3], [1, 4, 3]])).num_tokens == 5


def test_every_input_is_a_key() -> None:
    ids = np.array([[1, 2, 3], [1, 2, 3]])
    assert Forest.from_tokens(ids, np.array([[0, 1, 2], [0, 1, 3]])).num_tokens == 4
    assert Forest.from_tokens(ids, np.array([0.5, 0.25], dtype=np.float32)).num_tokens == 6
    assert Forest.from_tokens(ids, torch.tensor([True, True])).num_tokens == 3
    assert Forest.from_tokens(ids, torch.arange(3).expand(2, 3)).num_tokens == 3


@pytest.mark.parametrize("make", [lambda x: x, torch.from_numpy], ids=["numpy", "torch"])
def test_floats_compare_by_bits(make: object) -> None:
    assert callable(make)
    zeros = np.array([[0.0, 1.0], [-0.0, 1.0]], dtype=np.float32)
    assert Forest.from_tokens(make(zeros)).num_tokens == 4
    nans = np.array([[0x7FC00001, 1], [0x7FC00001, 1], [0x7FC00002, 1]], dtype=np.uint32).view(np.float32)
    assert Forest.from_tokens(make(nans)).num_tokens == 4


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64]
)
def test_every_key_dtype(dtype: torch.dtype) -> None:
    ids = torch.tensor([[1, 0, 1], [1, 0, 0], [1, 1, 1]]).to(dtype)
    reference = Forest.from_tokens(np.array([[1, 0, 1], [1, 0, 0], [1, 1, 1]]))
    assert Forest.from_tokens(ids) == reference
    assert Forest.from_tokens(ids.t().contiguous().t()) == reference
    assert Forest.from_tokens(ids.repeat(1, 2)[:, :3]) == reference


def test_groups_need_the_same_key_and_equal_tokens() -> None:
    prompts = [[1, 2], [1, 2], [1, 2], [5]]
    completions = [[3], [4], [3], []]
    one = Forest.from_groups(prompts, completions, [0, 0, 0, 0])
    two = Forest.from_groups(prompts, completions, ["x", "x", "y", "y"])
    check(one, symbols([[1, 2, 3], [1, 2, 4], [1, 2, 3], [5]]))
    check(two, symbols([["x1", "x2", "x3"], ["x1", "x2", "x4"], ["y1", "y2", "y3"], ["y5"]]))
    assert Forest.from_groups(prompts, completions, torch.tensor([7, 7, 2, 2])) == two


def test_ragged_groups() -> None:
    sizes = [1, 7, 3, 1]
    prompts = [[100 + g] * (g + 2) for g, size in enumerate(sizes) for _ in range(size)]
    completions = [[b] * (b % 4) for b in range(len(prompts))]
    groups = [g for g, size in enumerate(sizes) for _ in range(size)]
    check(Forest.from_groups(prompts, completions, groups), symbols([p + c for p, c in zip(prompts, completions, strict=True)]))


def test_many_roots() -> None:
    rows = [[b % 37, b] for b in range(200)]
    check(Forest.from_rows(rows), symbols(rows))


def test_deep_tree() -> None:
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 3, (40, 60))
    for b in range(1, 40):
        rows[b, : b + 5] = rows[b - 1, : b + 5]
    forest = Forest.from_tokens(rows)
    check(forest, rows.tolist())
    assert int(forest.depth.max()) > 20


def test_divergence_at_block_borders() -> None:
    # Wide enough that rows are read in several blocks, and diverge on both sides of their borders.
    base = np.arange(1400)
    rows = []
    for column in (0, 1, 63, 64, 65, 319, 320, 321, 1343, 1344, 1345, 1398, 1399):
        row = base.copy()
        row[column:] += 10_000
        rows += [base, row]
    forest = Forest.from_tokens(np.stack(rows))
    want = expected_small(rows)
    assert forest.num_tokens == want
    for b, row in enumerate(rows):
        np.testing.assert_array_equal(np.stack(rows)[forest.row[forest.index[b]], forest.column[forest.index[b]]], row)


def expected_small(rows: list[np.ndarray]) -> int:
    """Physical tokens: distinct (prefix, column) pairs."""
    return len({row[: column + 1].tobytes() for row in rows for column in range(len(row))})


def test_oracle_on_the_hand_written_star() -> None:
    want = expected(symbols(["PPPab", "PPPc", "PPPade"]))
    assert want["end"] == [8, 8, 8, 7, 5, 7, 7, 8]
    assert want["parent"] == [-1, 0, 1, 1, 0]
