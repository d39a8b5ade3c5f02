"""How tokens travel when a pack changes from one layout over the ranks to another. Made once per batch, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sp_compile.errors import InvalidShards, StaleRoute
from sp_compile.layout.build import Ints
from sp_compile.layout.derive import read_only
from sp_compile.layout.shards import Shards


@dataclass(frozen=True, eq=False)
class Route:
    """One member's part of a conversion of S rows a member.

    Rows `send` are sent, `send_sizes[g]` of them to member g, and the buffer that arrives holds `receive_sizes[g]` rows from member g;
    row i of the result is row `place[i]` of that buffer. The way back, which is that of gradients too, is `inverse()`.

    Attributes:
        member: whose part it is.
        members: of the grid.
        key: `Forest.key()` of the pack.
        source, target: kinds of the two layouts.
        send: int64 [S] permutation of local rows, by receiver.
        place: int64 [S] permutation of received rows.
        send_sizes, receive_sizes: rows to and from each member, Python integers.
        identity: the two layouts are one on every member: nothing is sent and nothing moves.
    """

    member: int
    members: int
    key: bytes = field(repr=False)
    source: str
    target: str
    send: Ints = field(repr=False)
    place: Ints = field(repr=False)
    send_sizes: tuple[int, ...]
    receive_sizes: tuple[int, ...]
    identity: bool

    def __post_init__(self) -> None:
        """Raises InvalidShards unless every row is sent once and every received row has one place."""
        rows = self.send.size
        if not 0 <= self.member < self.members:
            raise InvalidShards(f"route: expected a member of 0..{self.members - 1}, got {self.member}")
        for name, value in (("send", self.send), ("place", self.place)):
            if value.dtype != np.int64 or value.shape != (rows,) or not np.array_equal(np.sort(value), np.arange(rows)):
                raise InvalidShards(f"route: {name}: expected an int64 permutation of 0..{rows - 1}")
            object.__setattr__(self, name, read_only(value))
        for name, sizes in (("send_sizes", self.send_sizes), ("receive_sizes", self.receive_sizes)):
            if len(sizes) != self.members or any(type(s) is not int or s < 0 for s in sizes) or sum(sizes) != rows:
                raise InvalidShards(f"route: {name}: expected {self.members} numbers of rows that add up to {rows}, got {list(sizes)}")
        own = self.send_sizes[self.member]
        if own != self.receive_sizes[self.member]:
            raise InvalidShards(f"route: expected as many rows to the member itself as from it, got {own}")
        still = own == rows and np.array_equal(self.send[self.place], np.arange(rows))
        if self.identity and not still:
            raise InvalidShards("route: expected no row to move in an identity route")

    def inverse(self) -> Route:
        """The way back."""
        return Route(
            self.member, self.members, self.key, self.target, self.source, inverted(self.place), inverted(self.send),
            self.receive_sizes, self.send_sizes, self.identity,
        )  # fmt: skip

    @property
    def crossing(self) -> int:
        """Rows that leave this member."""
        return int(self.send.size) - self.send_sizes[self.member]

    def require(self, key: bytes, member: int, members: int, rows: int) -> None:
        """Raises StaleRoute unless this is the route of that pack, member, grid and number of local rows."""
        wrong = [] if key == self.key else ["another forest"]
        for name, want, got in (("member", member, self.member), ("members", members, self.members), ("rows", rows, self.send.size)):
            if want != got:
                wrong.append(f"{name} {got} instead of {want}")
        if wrong:
            raise StaleRoute(f"route {self.source} -> {self.target}: made for {', '.join(wrong)}; make the routes of this batch")

    def state(self) -> dict[str, Any]:
        """Plain values, from which `from_state` makes an equal route."""
        arrays = {name: getattr(self, name).astype("<i8", copy=False).tobytes() for name in ("send", "place")}
        names = ("member", "members", "key", "source", "target", "send_sizes", "receive_sizes", "identity")
        return {name: getattr(self, name) for name in names} | arrays

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Route:
        """A route of `state()`, checked as any other.

        Raises:
            InvalidShards: something is missing or inconsistent.
        """
        names = set(Route.__dataclass_fields__)
        if set(state) != names or not all(isinstance(state[n], bytes) and len(state[n]) % 8 == 0 for n in ("send", "place")):
            raise InvalidShards(f"route: expected a state with {', '.join(sorted(names))}, got {', '.join(sorted(state))}")
        arrays = {name: np.frombuffer(state[name], dtype="<i8").astype(np.int64) for name in ("send", "place")}
        sizes = {name: tuple(state[name]) for name in ("send_sizes", "receive_sizes")}
        return Route(**{**state, **arrays, **sizes})


def route_between(source: Shards, target: Shards, member: int) -> Route:
    """The route of one member from one layout of a pack to another.

    With tensor ranks it is one all-to-all over all members, not one per dimension of the grid.

    Raises:
        StaleRoute: the layouts are of different packs.
        InvalidShards: the layouts are over different grids, or there is no such member.
    """
    grids = (source.ranks, source.tensor_ranks), (target.ranks, target.tensor_ranks)
    if grids[0] != grids[1]:
        raise InvalidShards(f"route: expected layouts over one grid of ranks and tensor ranks, got {grids[0]} and {grids[1]}")
    if source.key != target.key or source.tokens != target.tokens:
        raise StaleRoute("route: expected two layouts of one pack, got those of different forests")
    size, members = source.size, source.members
    mine, theirs = source.local(member), target.local(member)
    goes = target.place[mine]
    comes = source.place[theirs] // max(size, 1)
    # Both sides order the rows of a pair of members by their places in the target.
    send, arrived = np.argsort(goes, kind="stable"), np.argsort(comes, kind="stable")
    sizes = (np.bincount(goes // max(size, 1), minlength=members), np.bincount(comes, minlength=members))
    return Route(
        member, members, source.key, source.kind, target.kind, send, inverted(arrived),
        tuple(sizes[0].tolist()), tuple(sizes[1].tolist()), np.array_equal(source.order, target.order),
    )  # fmt: skip


def inverted(permutation: Ints) -> Ints:
    """The permutation that undoes `permutation`."""
    result = np.empty_like(permutation)
    result[permutation] = np.arange(permutation.size)
    return result
