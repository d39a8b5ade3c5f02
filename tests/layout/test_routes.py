"""Routes bring every row to its place, and back; stale and inconsistent ones are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_compile.errors import InvalidShards, StaleRoute
from sp_compile.layout import Forest
from sp_compile.layout.rank_plans import LAYOUTS
from sp_compile.layout.routes import Route, route_between
from sp_compile.layout.shards import Shards, contiguous, zigzag

FORESTS = st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=8).map(Forest.from_rows)
GRIDS = st.tuples(st.integers(1, 5), st.integers(1, 3))
KINDS = st.sampled_from(sorted(LAYOUTS))


def travel(routes: list[Route], rows: list[np.ndarray]) -> list[np.ndarray]:
    """What an all-to-all with the routes of all members does."""
    sent = [np.split(x[route.send], np.cumsum(route.send_sizes)[:-1]) for route, x in zip(routes, rows, strict=True)]
    found = []
    for member, route in enumerate(routes):
        parts = [sent[other][member] for other in range(len(routes))]
        assert [part.size for part in parts] == list(route.receive_sizes)
        found.append(np.concatenate(parts)[route.place])
    return found


def held(shards: Shards) -> list[np.ndarray]:
    return [shards.local(m) for m in range(shards.members)]


@settings(max_examples=80, deadline=None)
@given(FORESTS, GRIDS, KINDS, KINDS)
def test_route_brings_every_token_home_and_back(forest: Forest, grid: tuple[int, int], source: str, target: str) -> None:
    here, there = LAYOUTS[source](forest, *grid), LAYOUTS[target](forest, *grid)
    routes = [route_between(here, there, m) for m in range(here.members)]
    back = [route.inverse() for route in routes]
    for got, want in zip(travel(routes, held(here)), held(there), strict=True):
        assert got.tolist() == want.tolist()
    for got, want in zip(travel(back, held(there)), held(here), strict=True):
        assert got.tolist() == want.tolist()
    same = here.order.tolist() == there.order.tolist()
    assert [route.identity for route in routes] == [same] * here.members
    if same:
        assert not any(route.crossing for route in routes)
    for route in routes:
        assert Route.from_state(route.state()).state() == route.state()
        route.require(forest.key(), route.member, here.members, here.size)


def test_no_route_moves_anything_on_one_rank() -> None:
    forest = Forest.from_rows([list(range(7))])
    for kind in LAYOUTS:
        assert route_between(contiguous(forest, 1), LAYOUTS[kind](forest, 1), 0).identity


def test_row_counts_of_a_zigzag() -> None:
    """Half of a rank's rows stay where the early chunk is its own; nothing is sent twice."""
    forest = Forest.from_rows([list(range(16))])
    sizes = [route_between(contiguous(forest, 4), zigzag(forest, 4), m).send_sizes for m in range(4)]
    assert sizes == [(2, 2, 0, 0), (0, 0, 2, 2), (0, 0, 2, 2), (2, 2, 0, 0)]


def test_layouts_that_do_not_meet() -> None:
    forest, other = Forest.from_rows([list(range(8))]), Forest.from_rows([list(range(1, 9)), [1, 5]])
    with pytest.raises(StaleRoute, match="different forests"):
        route_between(contiguous(forest, 2), zigzag(other, 2), 0)
    with pytest.raises(InvalidShards, match="one grid"):
        route_between(contiguous(forest, 2), zigzag(forest, 4), 0)
    with pytest.raises(InvalidShards, match="one grid"):
        route_between(contiguous(forest, 4, 1), zigzag(forest, 2, 2), 0)
    with pytest.raises(InvalidShards, match="member"):
        route_between(contiguous(forest, 2), zigzag(forest, 2), 2)


def test_stale_routes_say_what_changed() -> None:
    forest, other = Forest.from_rows([list(range(8))]), Forest.from_rows([list(range(9))])
    route = route_between(contiguous(forest, 2), zigzag(forest, 2), 1)
    route.require(forest.key(), 1, 2, 4)
    for wanted, said in (
        ((other.key(), 1, 2, 4), "another forest"),
        ((forest.key(), 0, 2, 4), "member 1 instead of 0"),
        ((forest.key(), 1, 4, 4), "members 2 instead of 4"),
        ((forest.key(), 1, 2, 6), "rows 4 instead of 6"),
    ):
        with pytest.raises(StaleRoute, match=said):
            route.require(*wanted)


def test_wrong_routes_are_refused() -> None:
    forest = Forest.from_rows([list(range(8))])
    state = route_between(contiguous(forest, 2), zigzag(forest, 2), 1).state()
    twice = np.array([0, 0, 1, 2], dtype="<i8").tobytes()
    for change, said in (
        ({"send": twice}, "send: expected an int64 permutation"),
        ({"place": twice}, "place: expected an int64 permutation"),
        ({"send_sizes": (4, 1)}, "add up to 4"),
        ({"send_sizes": (4,)}, "2 numbers of rows"),
        ({"receive_sizes": (-1, 5)}, "2 numbers of rows"),
        ({"receive_sizes": (1, 3)}, "to the member itself"),
        ({"member": 2}, r"0\.\.1"),
        ({"identity": True}, "identity"),
        ({"send": b"123"}, "expected a state"),
    ):
        with pytest.raises(InvalidShards, match=said):
            Route.from_state({**state, **change})
