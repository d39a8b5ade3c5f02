"""Document numbers along each row's path, against the same count on full rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_compile.errors import InvalidInput
from sp_compile.layout import Forest
from sp_compile.ops import paths
from tests.ops.forests import ROWS, forest, random_forest


def dense_segments(positions: list[int]) -> list[int]:
    """Counted along one row, from the definition."""
    numbers = [0]
    for before, here in itertools.pairwise(positions):
        numbers.append(numbers[-1] + (here != before + 1))
    return numbers[: len(positions)]


def check(tree: Forest, positions: torch.Tensor) -> None:
    got = paths.path_segments(positions, tree.tensor("prev", "cpu"))
    assert got.dtype == torch.int64
    for row in tree.index.tolist():
        path = [token for token in row if token >= 0]
        assert got[0, path].tolist() == dense_segments(positions[0, path].tolist())


@pytest.mark.parametrize("name", ROWS)
def test_segments_are_those_of_the_rows(name: str) -> None:
    tree = forest(name)
    generator = torch.Generator().manual_seed(0)
    jumps = torch.rand(tree.num_tokens, generator=generator) < 0.2
    check(tree, (tree.tensor("column", "cpu") + 100 * jumps)[None])
    check(tree, tree.tensor("column", "cpu")[None])


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_random_forests(seed: int) -> None:
    tree = random_forest(seed)
    check(tree, torch.randint(0, 3, (1, tree.num_tokens), generator=torch.Generator().manual_seed(seed)))


def test_counted_columns_are_one_document_although_branches_restart() -> None:
    tree = forest("star_1000")
    positions = tree.tensor("column", "cpu")[None]
    assert bool((positions[0, 1:] != positions[0, :-1] + 1).any()), "the packed order has jumps"
    assert not bool(paths.path_segments(positions, tree.tensor("prev", "cpu")).any())


def test_long_paths() -> None:
    prev = torch.arange(-1, 4095)
    assert torch.equal(paths.path_sums(torch.ones(4096, dtype=torch.int64), prev), torch.arange(1, 4097))


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"positions \[1, T\]"):
        paths.path_segments(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))


def test_opcheck() -> None:
    tree = forest("deep")
    torch.library.opcheck(torch.ops.sp_compile.path_segments.default, (tree.tensor("column", "cpu")[None], tree.tensor("prev", "cpu")))
