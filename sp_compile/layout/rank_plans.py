"""What one rank of a context parallel group needs to know of a batch. Made on the host, once per batch; picklable.

Between attention layers a rank holds the contiguous stretch [a, b) of the padded pack. The path of a token may begin before a: its
*entries* are the tokens before a that directly precede tokens of the stretch. In depth-first preorder every ancestor of a token comes
before it, so all that a rank reads of others lies on lower ranks.

    halo     the W - 1 tokens that end in each entry, for causal convolutions
    states   the state of a recurrence after each entry. Every rank computes, from zeros, the states after the tokens that later ranks ask
             for (`final`), and how much each keeps of the state that its path entered the rank with; the state after an entry follows from
             those along its chain: the entry, the entry of that one's path on its rank, and so on
    looks    what tokens of a refined forest read of a coarser one, some columns ahead; each forest has shards of its own, so that any token
             of the one may lie on another rank than that of the other
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from sp_compile.errors import InvalidShards
from sp_compile.layout import shards, tensors
from sp_compile.layout.build import Ints
from sp_compile.layout.fetches import Fetch, Look
from sp_compile.layout.forest import Forest
from sp_compile.layout.refine import full_width, refined_forest
from sp_compile.layout.routes import Route, route_between
from sp_compile.layout.shards import Shards

Made = TypeVar("Made")

LAYOUTS: dict[str, Callable[..., Shards]] = {"contiguous": shards.contiguous, "zigzag": shards.zigzag, "balanced": shards.balanced}


@dataclass(frozen=True, eq=False)
class RankPlan:
    """See the module. C ranks, each of S = T' / C tokens.

    Attributes:
        forest: of the T tokens.
        sequence: the contiguous layout.
        attention: the layout of queries.
        rank, tensor_rank: whose plan it is.
    """

    forest: Forest
    sequence: Shards
    attention: Shards
    rank: int
    tensor_rank: int = 0
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Raises InvalidShards or StaleRoute unless both layouts are of this forest and over one grid that has the rank."""
        if self.sequence.kind != "contiguous":
            raise InvalidShards(f"rank plan: expected contiguous shards between attention layers, got {self.sequence.kind}")
        self.sequence.require(self.forest)
        self.attention.require(self.forest)
        self.sequence.member(self.rank, self.tensor_rank)
        _ = self.into

    def kept(self, name: object, make: Callable[[], Made]) -> Made:
        """What `make` gives, made once."""
        if name not in self._cache:
            self._cache[name] = make()
        found: Made = self._cache[name]
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return RankPlan, (self.forest, self.sequence, self.attention, self.rank, self.tensor_rank)

    def finer(self, ahead: int, cut: int) -> RankPlan:
        """The plan of the rank for the forest refined by `ahead` without the last `cut` columns, made once."""
        if not ahead and not cut:
            return self
        return self.kept(("finer", ahead, cut), lambda: self._of(refined_forest(self.forest, ahead, cut)))

    def _of(self, forest: Forest) -> RankPlan:
        grid = self.ranks, self.sequence.tensor_ranks
        return RankPlan(forest, shards.contiguous(forest, *grid), LAYOUTS[self.attention.kind](forest, *grid), self.rank, self.tensor_rank)

    @property
    def ranks(self) -> int:
        """C."""
        return self.sequence.ranks

    @property
    def size(self) -> int:
        """S."""
        return self.sequence.padded // self.ranks

    @property
    def first(self) -> int:
        """a, the first token of the rank."""
        return self.rank * self.size

    @cached_property
    def into(self) -> Route:
        """From the contiguous layout to that of attention; back by its inverse."""
        return route_between(self.sequence, self.attention, self.sequence.member(self.rank, self.tensor_rank))

    # The padded pack: a padding token is a root of one token.

    @cached_property
    def end(self) -> Ints:
        """[T'] exclusive end of each token's subtree."""
        return np.concatenate([self.forest.end, np.arange(self.forest.num_tokens, self.sequence.padded) + 1])

    @cached_property
    def column(self) -> Ints:
        """[T'] dense column of each token, 0 for padding."""
        return np.concatenate([self.forest.column, np.zeros(self.sequence.padded - self.forest.num_tokens, dtype=np.int64)])

    @cached_property
    def count(self) -> Ints:
        """[S] rows through each token of the rank, 0 for padding."""
        whole = np.concatenate([self.forest.count, np.zeros(self.sequence.padded - self.forest.num_tokens, dtype=np.int64)])
        return whole[self.first : self.first + self.size]

    @cached_property
    def row(self) -> Ints:
        """[S] a row through each token of the rank, 0 for padding."""
        own = self.forest.row[self.first : self.first + self.size]
        return np.concatenate([own, np.zeros(self.size - own.size, dtype=np.int64)])

    def index(self, columns: int, whole: bool = False) -> Ints:
        """[B, columns] local token of each row and column, -1 where it has none on this rank; `whole`: token of the pack, on any rank."""
        places = full_width(self.forest.index, columns)
        return places if whole else np.where((places >= self.first) & (places < self.first + self.size), places - self.first, -1)

    @cached_property
    def queries(self) -> Ints:
        """[S] token numbers of the rank's queries in the layout of attention."""
        return self.attention.order[self.first : self.first + self.size]

    # The rank's stretch

    @cached_property
    def entries(self) -> Ints:
        """[E] tokens before the rank's first that precede tokens of the rank, ascending."""
        return self._entries_of(self.rank)

    @cached_property
    def prev(self) -> Ints:
        """[S] local predecessor; -1 for a row's first token; -2 - e for a token that continues entry e."""
        first, stop = self.first, min(self.first + self.size, self.forest.num_tokens)
        before = self.forest.prev[first:stop]
        found = np.where(before >= first, before - first, np.where(before < 0, -1, -2 - np.searchsorted(self.entries, before)))
        return np.concatenate([found, np.full(self.size - found.size, -1, dtype=np.int64)])

    @cached_property
    def local_end(self) -> Ints:
        """[S] exclusive end of each local token's subtree within the rank."""
        stop = self.first + self.size
        return np.minimum(self.end[self.first : stop], stop) - self.first

    def _entries_of(self, rank: int) -> Ints:
        first, forest = rank * self.size, self.forest
        stop = min(first + self.size, forest.num_tokens)
        if first >= stop:
            return np.zeros(0, dtype=np.int64)
        heads = forest.node_start[np.searchsorted(forest.node_start, first) : np.searchsorted(forest.node_start, stop)]
        before = forest.prev[np.append(heads, first)]
        return np.unique(before[(before >= 0) & (before < first)])

    # Halo

    def halo(self, width: int) -> tuple[Fetch, Ints]:
        """What a convolution of `width` reads of others.

        Returns:
            the rows; int64 [1 + E, width - 1], for no entry (row 0) and each entry the received rows that end in it, oldest first, -1
            before the start of a row.
        """
        return self.kept(("halo", width), lambda: self._halo(width))

    def _halo(self, width: int) -> tuple[Fetch, Ints]:
        wanted = [self._paths(self._entries_of(rank), width - 1) for rank in range(self.ranks)]
        fetch = self._fetch([_distinct(tokens) for tokens in wanted], None)
        own = wanted[self.rank]
        table = np.where(own < 0, -1, np.searchsorted(fetch.rows, own))
        return fetch, np.concatenate([np.full((1, width - 1), -1, dtype=np.int64), table])

    def _paths(self, tokens: Ints, steps: int) -> Ints:
        """[n, steps] the tokens that end in each of `tokens`, oldest first, -1 before a row's first."""
        found = np.full((tokens.size, steps), -1, dtype=np.int64)
        for step in range(steps - 1, -1, -1):
            found[:, step] = tokens
            tokens = np.where(tokens < 0, -1, self.forest.prev[tokens])
        return found

    def _fetch(self, wanted: Sequence[Ints], available: Ints | None) -> Fetch:
        """The exchange in which each rank gets the tokens it wants; rows are places in `available`, or local tokens."""
        stop = self.first + self.size
        asked = [tokens[(tokens >= self.first) & (tokens < stop)] for tokens in wanted]
        rows = np.concatenate([*asked, np.zeros(0, dtype=np.int64)])
        send = rows - self.first if available is None else np.searchsorted(available, rows)
        own = wanted[self.rank]
        received = np.bincount(own // self.size, minlength=self.ranks) if own.size else np.zeros(self.ranks, dtype=np.int64)
        return Fetch(own, send, tuple(tokens.size for tokens in asked), tuple(received.tolist()))

    # Looks

    def look(self, look: Look) -> tuple[Fetch, Ints]:
        """What tokens of a finer forest read of a coarser one.

        Returns:
            the rows of the coarser forest; int64 [S of the finer forest] the received row of each token, -1 where it reads none.
        """
        return self.kept(look, lambda: self._look(look))

    def _look(self, look: Look) -> tuple[Fetch, Ints]:
        source, target = self.finer(*look.source), self.finer(*look.target)
        index, forest, size = source.forest.index, target.forest, target.size
        ahead = forest.column + look.offset
        read = index[forest.row, ahead % index.shape[1] if look.wraps else np.minimum(ahead, index.shape[1] - 1)]
        of_rank = [read[rank * size : (rank + 1) * size] for rank in range(self.ranks)]
        fetch = source._fetch([_distinct(tokens) for tokens in of_rank], None)
        own = of_rank[self.rank]
        table = np.full(size, -1, dtype=np.int64)
        table[: own.size] = np.where(own < 0, -1, np.searchsorted(fetch.rows, own))
        return fetch, table

    # States

    @cached_property
    def _links(self) -> dict[int, int]:
        """For each token that is an entry of some rank, the entry with which its path came to its own rank, -1 if it begins there."""
        return {token: self._entry_of(token) for rank in range(self.ranks) for token in self._entries_of(rank).tolist()}

    def _entry_of(self, token: int) -> int:
        forest, first = self.forest, token // self.size * self.size
        node = int(np.searchsorted(forest.node_start, token, side="right")) - 1
        while node >= 0 and forest.node_start[node] >= first:
            parent = int(forest.parent[node])
            if parent < 0:
                return -1
            last = int(forest.node_start[parent] + forest.node_len[parent]) - 1
            if last < first:
                return last
            node = parent
        return first - 1

    def _chain(self, token: int) -> list[int]:
        chain: list[int] = []
        while token >= 0:
            chain.append(token)
            token = self._links[token]
        return chain[::-1]

    @cached_property
    def final(self) -> Ints:
        """[F] local tokens whose states later ranks ask for, ascending."""
        mine = [token - self.first for token in self._links if self.first <= token < self.first + self.size]
        return np.array(sorted(mine), dtype=np.int64)

    @cached_property
    def states(self) -> tuple[Fetch, Ints]:
        """The rows of `final` states that each rank reads, and int64 [E, K] the received rows of each entry's chain.

        Oldest first, -1 where a chain is shorter; K is at least 1.
        """
        chains = [[self._chain(token) for token in self._entries_of(rank).tolist()] for rank in range(self.ranks)]
        wanted = [np.array(sorted({token for chain in of for token in chain}), dtype=np.int64) for of in chains]
        fetch = self._fetch(wanted, self.final + self.first)
        own = chains[self.rank]
        table = np.full((len(own), max([1, *(len(chain) for chain in own)])), -1, dtype=np.int64)
        for line, chain in zip(table, own, strict=True):
            line[line.size - len(chain) :] = np.searchsorted(fetch.rows, chain)
        return fetch, table

    # Tensors

    def tensors(
        self, names: Sequence[str], device: torch.device | str, array: Callable[[str], Any] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """int64 tensors on `device`, made once and shared; `splits` and received `rows` of an exchange stay on the host.

        Names: end, column, count, queries, prev, local_end, final, entered (0 for no entry, then 1 for each [1 + E]); send, place,
        send_back, place_back [T' / members] and splits [2, members] (sent, received) of the route into attention; state_send,
        state_splits, state_rows, chain, chain@K (padded to K links); halo_send@W, halo_splits@W, halo_rows@W, halo@W; row [S];
        look_send@K, look_splits@K, look_rows@K, look@K with the code K of a `Look`; whole_prev [T'].

        Args:
            array: makes the array of a name; None: the method of that name.
        """
        place = torch.device(device)
        missing = [name for name in names if (name, place) not in self._cache]
        fresh: dict[str, torch.Tensor] = {}
        for host in (False, True):
            here = [name for name in missing if ("splits" in name or "rows" in name) == host]
            arrays = [np.array((array or self.array)(name), dtype=np.int64) for name in here]
            made = tensors.upload(arrays, torch.device("cpu") if host else place) if here else []
            fresh.update(zip(here, made, strict=True))
        # Fake tensors, made while a compiler traces, must not outlive the trace.
        self._cache.update({(name, place): value for name, value in fresh.items() if type(value) is torch.Tensor})
        return tuple(fresh[name] if name in fresh else self._cache[name, place] for name in names)

    def array(self, name: str) -> Any:
        """What `tensors` gives under a name, on the host."""
        base, _, width = name.partition("@")
        what, _, part = base.partition("_")
        if base == "halo":
            return self.halo(int(width))[1]
        if base == "look":
            return self.look(Look.of(width))[1]
        if base == "chain":
            table = self.states[1]
            return np.pad(table, ((0, 0), (int(width or table.shape[1]) - table.shape[1], 0)), constant_values=-1)
        if what in ("halo", "look", "state") and part in ("send", "splits", "rows"):
            found = self.halo(int(width)) if what == "halo" else self.look(Look.of(width)) if what == "look" else self.states
            fetch = found[0]
            return (fetch.send_sizes, fetch.receive_sizes) if part == "splits" else getattr(fetch, part)
        if base == "entered":
            return np.arange(1 + self.entries.size) > 0
        if base in ("send", "place", "send_back", "place_back"):
            route = self.into if "_" not in base else self.into.inverse()
            return getattr(route, base.removesuffix("_back"))
        if base == "splits":
            return self.into.send_sizes, self.into.receive_sizes
        if base == "whole_prev":
            return np.concatenate([self.forest.prev, np.full(self.sequence.padded - self.forest.num_tokens, -1, dtype=np.int64)])
        if base in ("end", "column", "count", "queries", "prev", "local_end", "final", "row"):
            return getattr(self, base)
        raise InvalidShards(f"rank plan: expected the name of one of its tensors, got {name!r}")


def plan_rank(
    forest: Forest, ranks: int, rank: int, *, attention: str = "balanced", tensor_ranks: int = 1, tensor_rank: int = 0
) -> RankPlan:
    """The plan of one rank.

    Args:
        attention: layout of queries, a name in `LAYOUTS`.

    Raises:
        InvalidShards: an unknown layout, or a grid that has no such rank.
    """
    if attention not in LAYOUTS:
        raise InvalidShards(f"rank plan: expected a layout among {', '.join(LAYOUTS)}, got {attention!r}")
    sequence = shards.contiguous(forest, ranks, tensor_ranks)
    return RankPlan(forest, sequence, LAYOUTS[attention](forest, ranks, tensor_ranks), rank, tensor_rank)


def most_links(ranks: int) -> int:
    """A power of two that no chain of states over C ranks is longer than: each link lies on an earlier rank than the next."""
    return 1 << max(ranks - 2, 0).bit_length()


def take_local(values: torch.Tensor, plan: RankPlan, fill: float = 0) -> torch.Tensor:
    """The rank's part [1, S, ...] of packed values [1, T, ...]; padding holds `fill`.

    Raises:
        InvalidShards: the values are not [1, T, ...].
    """
    tokens = plan.forest.num_tokens
    if values.dim() < 2 or values.shape[0] != 1 or values.shape[1] != tokens:
        raise InvalidShards(f"take_local: expected [1, {tokens}, ...], got {list(values.shape)}")
    first, stop = min(plan.first, tokens), min(plan.first + plan.size, tokens)
    padding = values.new_full((1, plan.size - (stop - first), *values.shape[2:]), fill)
    return torch.cat([values[:, first:stop], padding], 1)


def _distinct(tokens: Ints) -> Ints:
    return np.unique(tokens[tokens >= 0])
