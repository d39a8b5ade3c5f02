"""Rank plans: local predecessors, halos and chains of states, all against a walk along the rows' paths."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_compile.errors import InvalidShards, StaleRoute
from sp_compile.layout import Forest
from sp_compile.layout.fetches import Look
from sp_compile.layout.local_forest import LocalForest
from sp_compile.layout.rank_plans import RankPlan, plan_rank, take_local
from sp_compile.layout.shards import contiguous, zigzag

FORESTS = st.lists(st.lists(st.integers(0, 1), max_size=14), max_size=8).map(Forest.from_rows)
RANKS = st.integers(1, 5)


def plans(forest: Forest, ranks: int, attention: str = "balanced") -> list[RankPlan]:
    return [plan_rank(forest, ranks, rank, attention=attention) for rank in range(ranks)]


def path(forest: Forest, token: int) -> list[int]:
    found = []
    while token >= 0:
        found.append(token)
        token = int(forest.prev[token])
    return found[::-1]


@settings(max_examples=60, deadline=None)
@given(FORESTS, RANKS)
def test_local_predecessors_and_ends(forest: Forest, ranks: int) -> None:
    for plan in plans(forest, ranks):
        for local in range(plan.size):
            token, before = plan.first + local, int(plan.prev[local])
            real = int(forest.prev[token]) if token < forest.num_tokens else -1
            assert real == (before + plan.first if before >= 0 else -1 if before == -1 else plan.entries[-2 - before])
            end = int(forest.end[token]) if token < forest.num_tokens else token + 1
            assert plan.local_end[local] == min(end, plan.first + plan.size) - plan.first
            assert plan.count[local] == (forest.count[token] if token < forest.num_tokens else 0)


def fetched(each: list[RankPlan], what: str, rows: list[np.ndarray], width: int = 0) -> list[np.ndarray]:
    """What the ranks receive if rank r sends rows of `rows[r]`."""
    fetches = [plan.halo(width)[0] if what == "halo" else plan.states[0] for plan in each]
    sent = [np.split(x[f.send], np.cumsum(f.send_sizes)[:-1]) for f, x in zip(fetches, rows, strict=True)]
    found = []
    for rank, fetch in enumerate(fetches):
        parts = [sent[other][rank] for other in range(len(each))]
        assert [part.size for part in parts] == list(fetch.receive_sizes)
        found.append(np.concatenate(parts))
        assert found[-1].tolist() == fetch.rows.tolist()
    return found


@settings(max_examples=60, deadline=None)
@given(FORESTS, RANKS, st.integers(1, 5))
def test_halo_is_what_precedes_each_entry(forest: Forest, ranks: int, width: int) -> None:
    each = plans(forest, ranks)
    received = fetched(each, "halo", [np.arange(p.first, p.first + p.size) for p in each], width)
    for plan, rows in zip(each, received, strict=True):
        table = plan.halo(width)[1]
        assert table.shape == (1 + plan.entries.size, width - 1)
        assert (table[0] == -1).all()
        for line, entry in zip(table[1:], plan.entries.tolist(), strict=True):
            wanted = [-1] * (width - 1) + path(forest, entry)
            assert [int(rows[i]) if i >= 0 else -1 for i in line] == wanted[len(wanted) - (width - 1) :]


@settings(max_examples=60, deadline=None)
@given(FORESTS, RANKS)
def test_chains_add_up_to_whole_paths(forest: Forest, ranks: int) -> None:
    """Each rank knows what a path collects on it; along the chain that is the path from its start."""
    each = plans(forest, ranks)
    received = fetched(each, "states", [plan.final + plan.first for plan in each])
    for plan, rows in zip(each, received, strict=True):
        _, table = plan.states
        assert table.shape[1] >= 1
        for line, entry in zip(table, plan.entries.tolist(), strict=True):
            walked: list[int] = []
            for token in (int(rows[i]) for i in line if i >= 0):
                first = token // plan.size * plan.size
                walked += [t for t in path(forest, token) if t >= first]
            assert walked == path(forest, entry)


LOOKS = st.builds(Look, st.tuples(st.integers(0, 2), st.integers(0, 1)), st.tuples(st.integers(0, 2), st.integers(0, 1)),
                  st.integers(0, 2), st.booleans())  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(FORESTS.filter(lambda forest: forest.num_columns > 2), RANKS, LOOKS)
def test_looks_reach_the_token_of_another_forest(forest: Forest, ranks: int, look: Look) -> None:
    """Whatever ranks hold the two; each rank's fetch and the others' sends agree."""
    each = plans(forest, ranks)
    fetches = [plan.look(look)[0] for plan in each]
    for rank, plan in enumerate(each):
        fetch, table = plan.look(look)
        source, target = plan.finer(*look.source), plan.finer(*look.target)
        assert table.size == target.size
        assert [f.send_sizes[rank] for f in fetches] == list(fetch.receive_sizes)
        for local, place in enumerate(table.tolist()):
            token = target.first + local
            if token >= target.forest.num_tokens:
                assert place == -1
                continue
            width = source.forest.num_columns
            column = int(target.forest.column[token]) + look.offset
            column = column % width if look.wraps else min(column, width - 1)
            wanted = int(source.forest.index[target.forest.row[token], column])
            assert (fetch.rows[place] if place >= 0 else -1) == wanted
    for rank, fetch in enumerate(fetches):
        source = each[rank].finer(*look.source)
        parts = np.split(fetch.send + source.first, np.cumsum(fetch.send_sizes)[:-1])
        for other, part in enumerate(parts):
            rows = fetches[other].rows
            assert part.tolist() == rows[(rows >= source.first) & (rows < source.first + source.size)].tolist()


@settings(max_examples=40, deadline=None)
@given(FORESTS, RANKS)
def test_every_place_of_a_row_is_on_one_rank(forest: Forest, ranks: int) -> None:
    each = plans(forest, ranks)
    columns = forest.num_columns + 1
    found = np.stack([np.where(plan.index(columns) < 0, -1, plan.index(columns) + plan.first) for plan in each])
    whole = each[0].index(columns, whole=True)
    assert ((found >= 0).sum(0) == (whole >= 0)).all()
    assert (found.max(0) == whole).all()
    for plan in each:
        own = plan.forest.row[plan.first : plan.first + plan.size]
        assert plan.row[: own.size].tolist() == own.tolist()
        assert not plan.row[own.size :].any()


def test_tensors_of_refined_forests_and_of_rows() -> None:
    forest = Forest.from_rows([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]])
    each = [LocalForest.of(plan) for plan in plans(forest, 2)]
    refined = forest.refined(1)
    for local in each:
        plan = local.plan.finer(1, 0)
        count, row, index, whole = local.tensors(("count@1-0", "row@1-0", "index@1-0", "rank_whole_index@1-0"), "cpu")
        assert count.tolist() == plan.count.tolist()
        assert row.tolist() == plan.row.tolist()
        assert whole.tolist() == refined.index.tolist()
        assert index.tolist() == plan.index(forest.num_columns).tolist()
        assert (local.num_rows, local.num_columns) == (3, 4)
    assert sum(int(local.tensor("count@1-0", "cpu").sum()) for local in each) == forest.logical_tokens


def test_traffic_of_a_star_grows_with_the_ranks_only() -> None:
    forest = Forest.from_rows([[*range(64), *range(1000 * b, 1000 * b + 16)] for b in range(1, 33)])
    for plan in plans(forest, 8):
        fetch, table = plan.states
        assert fetch.rows.size <= 2
        assert table.shape[1] <= 2
        assert plan.halo(4)[0].rows.size <= 6


def test_plans_travel_between_processes() -> None:
    forest = Forest.from_rows([[1, 2, 3, 4, 5], [1, 2, 6, 7], [8, 9]])
    plan = plan_rank(forest, 2, 1, attention="zigzag")
    again = pickle.loads(pickle.dumps(plan))
    names = ("end", "column", "count", "queries", "prev", "local_end", "final", "send", "place", "send_back", "place_back", "splits")
    names = (*names, "state_send", "state_splits", "chain", "halo_send@4", "halo_splits@4", "halo@4")
    for a, b in zip(plan.tensors(names, "cpu"), again.tensors(names, "cpu"), strict=True):
        assert a.dtype == torch.int64
        assert torch.equal(a, b)
    assert plan.tensors(["end"], "cpu")[0] is plan.tensors(["end"], "cpu")[0]
    with pytest.raises(InvalidShards, match="name of one of its tensors"):
        plan.tensors(["start"], "cpu")


def test_local_part_of_an_input() -> None:
    forest = Forest.from_rows([[1, 2, 3], [1, 4]])
    ids = torch.tensor([[1, 2, 3, 4]])
    parts = [take_local(ids, plan_rank(forest, 4, rank), fill=9).tolist() for rank in range(4)]
    assert parts == [[[1, 2]], [[3, 4]], [[9, 9]], [[9, 9]]]
    with pytest.raises(InvalidShards, match=r"expected \[1, 4, ...\]"):
        take_local(ids[:, 1:], plan_rank(forest, 4, 0))


def test_wrong_plans_are_refused() -> None:
    forest, other = Forest.from_rows([[1, 2, 3]]), Forest.from_rows([[1, 2], [3]])
    with pytest.raises(InvalidShards, match="a layout among"):
        plan_rank(forest, 2, 0, attention="spiral")
    with pytest.raises(InvalidShards, match="rank < 2"):
        plan_rank(forest, 2, 2)
    with pytest.raises(InvalidShards, match="expected contiguous"):
        RankPlan(forest, zigzag(forest, 2), zigzag(forest, 2), 0)
    with pytest.raises(StaleRoute, match="another forest"):
        RankPlan(forest, contiguous(other, 2), zigzag(forest, 2), 0)
    with pytest.raises(InvalidShards, match="one grid"):
        RankPlan(forest, contiguous(forest, 2), zigzag(forest, 4), 0)


@settings(max_examples=60, deadline=None)
@given(FORESTS, RANKS)
def test_stretch_of_a_rank_as_a_forest(forest: Forest, ranks: int) -> None:
    """Columns, order and counts are those of the whole pack; a predecessor on another rank makes a root."""
    for plan in plans(forest, ranks):
        local = LocalForest.of(plan)
        assert local is LocalForest.of(plan)
        assert local.num_tokens == plan.size
        assert local.prev.tolist() == np.maximum(plan.prev, -1).tolist()
        assert local.end.tolist() == plan.local_end.tolist()
        assert local.column.tolist() == plan.column[plan.first : plan.first + plan.size].tolist()
        count, end = local.tensors(["count", "rank_end"], "cpu")
        assert count.tolist() == plan.count.tolist()
        assert end.tolist() == plan.end.tolist()
        assert np.array_equal(local.count, np.maximum(plan.count, 1))
        assert pickle.loads(pickle.dumps(local)) == local
    different = {LocalForest.of(plan).key() for plan in plans(forest, ranks)} | {forest.key()}
    assert len(different) == ranks + 1
