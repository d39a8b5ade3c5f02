"""Shards of a pack: every token has one holder, sizes follow the quantum, and the balanced layout balances pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_compile.errors import InvalidShards, StaleRoute
from sp_compile.layout import Forest
from sp_compile.layout.rank_plans import LAYOUTS
from sp_compile.layout.shards import Shards, balanced, contiguous, local_borders, padded_length, padded_work, path_lengths, quantum, zigzag

FORESTS = st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=8).map(Forest.from_rows)
GRIDS = st.tuples(st.integers(1, 5), st.integers(1, 3))


def star(prompt: int, rows: int, tail: int) -> Forest:
    return Forest.from_rows([[*range(prompt), *range(1000 * b, 1000 * b + tail)] for b in range(1, rows + 1)])


@pytest.mark.parametrize(
    ("ranks", "tensor_ranks", "wanted"), [(1, 1, 1), (2, 1, 4), (4, 1, 8), (1, 2, 4), (1, 3, 6), (2, 3, 12), (1024, 1, 2048)]
)
def test_quantum(ranks: int, tensor_ranks: int, wanted: int) -> None:
    assert quantum(ranks, tensor_ranks) == wanted
    assert padded_length(1, ranks, tensor_ranks) == padded_length(wanted, ranks, tensor_ranks) == wanted
    assert padded_length(0, ranks, tensor_ranks) == 0


@settings(max_examples=60, deadline=None)
@given(FORESTS, GRIDS, st.sampled_from(sorted(LAYOUTS)))
def test_every_token_has_one_holder(forest: Forest, grid: tuple[int, int], kind: str) -> None:
    made = LAYOUTS[kind](forest, *grid)
    members = [made.local(m) for m in range(made.members)]
    assert sorted(np.concatenate(members).tolist()) == list(range(padded_length(forest.num_tokens, *grid)))
    assert {part.size for part in members} == {made.size}
    assert made.order[made.place].tolist() == list(range(made.padded))
    again = Shards.from_state(made.state())
    assert again.state() == made.state()
    again.require(forest)


@settings(max_examples=40, deadline=None)
@given(FORESTS, GRIDS)
def test_contiguous_and_zigzag_by_definition(forest: Forest, grid: tuple[int, int]) -> None:
    ranks, tensor_ranks = grid
    flat, folded = contiguous(forest, *grid), zigzag(forest, *grid)
    length = flat.padded // ranks
    for rank in range(ranks):
        of = [shards.order[shards.member(rank) * shards.size :][:length].tolist() for shards in (flat, folded)]
        assert of[0] == list(range(rank * length, (rank + 1) * length))
        if ranks > 1:
            half, late = length // 2, 2 * ranks - 1 - rank
            assert of[1] == [*range(rank * half, (rank + 1) * half), *range(late * half, (late + 1) * half)]
        parts = [folded.local(folded.member(rank, t)).tolist() for t in range(tensor_ranks)]
        assert [token for part in parts for token in part] == of[1]


def test_odd_tensor_rank_holds_parts_of_both_chunks() -> None:
    made = zigzag(Forest.from_rows([list(range(12))]), 2, 3)
    assert [made.local(m).tolist() for m in range(6)] == [[0, 1], [2, 9], [10, 11], [3, 4], [5, 6], [7, 8]]


@settings(max_examples=60, deadline=None)
@given(FORESTS)
def test_path_lengths_are_visible_keys(forest: Forest) -> None:
    tokens = np.arange(forest.num_tokens)
    allow = (tokens[None] <= tokens[:, None]) & (tokens[:, None] < forest.end[None])
    assert path_lengths(forest).tolist() == allow.sum(1).tolist()


@settings(max_examples=60, deadline=None)
@given(FORESTS, GRIDS)
def test_balanced_is_no_worse_than_zigzag(forest: Forest, grid: tuple[int, int]) -> None:
    made = balanced(forest, *grid)
    work = padded_work(forest, made.padded)
    assert made.loads(work).sum() == work.sum()
    assert made.loads(work).max(initial=0) <= zigzag(forest, *grid).loads(work).max(initial=0)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("forest", [star(8192, 8, 1024), star(500, 3, 7000), star(37, 40, 333)], ids=["wide", "long", "many"])
def test_balanced_on_stars(forest: Forest, ranks: int) -> None:
    """Zigzag is off by up to a third there: the keys of a star's later tokens do not grow."""
    made = balanced(forest, ranks)
    loads = made.loads(padded_work(forest, made.padded))
    assert loads.max() <= 1.02 * loads.mean()
    for rank in range(ranks):
        assert (np.diff(made.local(rank)) > 0).all()


def test_balanced_leaves_tokens_where_they_are_if_that_is_balanced() -> None:
    forest = Forest.from_rows([[100 * b + i for i in range(8)] for b in range(4)])
    assert balanced(forest, 4).order.tolist() == contiguous(forest, 4).order.tolist()


def test_balanced_follows_a_given_work() -> None:
    forest = Forest.from_rows([list(range(4096))])
    work = np.zeros(4096, dtype=np.int64)
    work[:2048] = 1
    made = balanced(forest, 4, work=work)
    assert made.loads(work).tolist() == [512] * 4
    with pytest.raises(InvalidShards, match=r"expected integers \[4096\]"):
        balanced(forest, 4, work=work[1:])


def test_borders_of_a_slice_of_the_flattened_pack() -> None:
    """Not lengths divided by ranks; padding is a piece of its own, and a rank may hold nothing else."""
    forest = Forest.from_rows([[1, 2, 3, 4, 5], [6, 7, 8], [9]])
    shards = contiguous(forest, 4)
    found = [local_borders(shards, np.array([0, 5, 8, 9]), m).tolist() for m in range(4)]
    assert found == [[0, 4], [0, 1, 4], [0, 1, 4], [0, 4]]
    with pytest.raises(InvalidShards, match="from 0 to 9"):
        local_borders(shards, np.array([0, 5, 8]), 0)
    with pytest.raises(InvalidShards, match="contiguous"):
        local_borders(zigzag(forest, 4), np.array([0, 5, 8, 9]), 0)


def test_wrong_descriptions_are_refused() -> None:
    forest, other = star(5, 2, 3), star(6, 2, 3)
    state = zigzag(forest, 2).state()
    with pytest.raises(StaleRoute, match="another forest"):
        Shards.from_state(state).require(other)
    doubled = np.frombuffer(state["order"], dtype="<i8").copy()
    doubled[0] = doubled[1]
    for change, said in (
        ({"order": doubled.tobytes()}, "every token"),
        ({"order": state["order"][:-8]}, "order: expected int64"),
        ({"ranks": 4}, "order: expected int64"),
        ({"ranks": True}, "positive integer"),
        ({"kind": "spiral"}, "kind among"),
        ({"key": b"x"}, "32 bytes"),
        ({"tokens": -1}, "at least 0"),
        ({"more": 1}, "expected a state"),
    ):
        with pytest.raises(InvalidShards, match=said):
            Shards.from_state({**state, **change})
    with pytest.raises(InvalidShards, match="rank < 2"):
        zigzag(forest, 2).member(2)
    with pytest.raises(InvalidShards, match=r"0\.\.1"):
        zigzag(forest, 2).local(2)
