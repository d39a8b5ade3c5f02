"""The stretch of one rank as a forest, so that what runs on packed values runs on a rank's part of them.

Nodes that a border cuts become shorter, those whose parent lies on a lower rank become roots, and padding tokens are roots of their own.
Columns, depth-first order and counts are those of the whole pack. What only the whole pack says has names of its own, for graph inputs:

    rank_send, rank_place, rank_send_back, rank_place_back, rank_queries    [S] see `RankPlan.tensors`
    rank_splits                                                            [2, C] on the host
    rank_end, rank_column                                                  [T'] of the padded pack
    rank_prev [S], rank_final, rank_entered, rank_chain_K                  for recurrences
    rank_state_send, rank_state_splits, rank_state_rows                    likewise; the last two on the host
    rank_halo_W, rank_halo_send_W, rank_halo_splits_W, rank_halo_rows_W    for convolutions; the last two on the host
    rank_look_K, rank_look_send_K, rank_look_splits_K, rank_look_rows_K    for values that look ahead, see `Look.code`; likewise
    rank_whole_index                                                       [B, L] tokens of the whole pack

`row`, `index` and the numbers of rows and columns are those of the batch: `index` holds local tokens, -1 where they are another rank's.

Paths enter the rank with external states: 0 is that of paths that begin in the rank, 1 + e that of entry e of the plan. `rank_prev` and
the plans of chunks name them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from threading import Lock
from typing import Any, NoReturn

import numpy as np
import torch

from sp_compile.errors import StaleRoute
from sp_compile.layout.chunks import EMPTY
from sp_compile.layout.fetches import Look
from sp_compile.layout.forest import Forest
from sp_compile.layout.rank_plans import RankPlan
from sp_compile.layout.refine import split_name
from sp_compile.layout.tensors import build_array, register, registered

PREFIX = "rank_"
_OURS = frozenset({"count", "row", "index"})
_WIDE = frozenset({"index", PREFIX + "whole_index"})


class LocalForest(Forest):
    """See the module. S = T' / C tokens.

    Attributes:
        plan: the rank's plan.
    """

    plan: RankPlan

    def __init__(self, plan: RankPlan) -> None:
        whole, first, stop = plan.forest, plan.first, min(plan.first + plan.size, plan.forest.num_tokens)
        some = first < stop
        begin = int(np.searchsorted(whole.node_start, first, side="right")) - 1 if some else 0
        after = int(np.searchsorted(whole.node_start, stop)) if some else 0
        starts = whole.node_start[begin:after]
        lengths = np.minimum(starts + whole.node_len[begin:after], stop) - np.maximum(starts, first)
        parents = np.where(whole.parent[begin:after] >= begin, whole.parent[begin:after] - begin, -1)
        # A row through a node ends in it here if it leaves the rank there, or ends.
        ends = whole.node_count[begin:after].copy()
        inner = parents >= 0
        np.subtract.at(ends, parents[inner], whole.node_count[begin:after][inner])
        padding = plan.size - max(stop - first, 0)
        lengths = np.concatenate([lengths, np.ones(padding, dtype=np.int64)])
        parents = np.concatenate([parents, np.full(padding, -1, dtype=np.int64)])
        rows = np.repeat(np.arange(lengths.size), np.concatenate([ends, np.ones(padding, dtype=np.int64)]))
        columns = plan.column[first : first + plan.size]
        super().__init__(np.cumsum(lengths) - lengths, lengths, parents, rows, column=columns, num_columns=max(whole.num_columns, 1))
        object.__setattr__(self, "plan", plan)

    @staticmethod
    def of(plan: RankPlan) -> LocalForest:
        """The forest of a plan, made once."""
        return plan.kept("local_forest", lambda: LocalForest(plan))

    @property
    def num_rows(self) -> int:
        """B of the whole batch."""
        return self.plan.forest.num_rows

    def tensors(self, names: Sequence[str], device: torch.device | str) -> tuple[torch.Tensor, ...]:
        """As `Forest.tensors`; `count` is 0 for padding, and the plan's tensors have names of their own."""
        made: dict[str, torch.Tensor] = {}
        for suffix in dict.fromkeys(name.partition("@")[2] for name in names):
            of_one = [name for name in names if name.partition("@")[2] == suffix]
            _, ahead, cut = split_name(of_one[0])
            forest = LocalForest.of(self.plan.finer(ahead, cut))
            bare = [name.partition("@")[0] for name in of_one]
            made |= dict(zip(of_one, forest._tensors_of(bare, device, self.num_columns), strict=True))
        return tuple(made[name] for name in names)

    def _tensors_of(self, names: Sequence[str], device: torch.device | str, columns: int) -> tuple[torch.Tensor, ...]:
        ours = [name for name in names if name.startswith((PREFIX, "chunks_")) or name in _OURS]
        asked = [f"{_of_plan(name)}@{columns}" if name in _WIDE else _of_plan(name) for name in ours]
        made = dict(zip(ours, self.plan.tensors(asked, device, self._array), strict=True))
        others = [name for name in names if name not in made]
        made |= dict(zip(others, super().tensors(others, device), strict=True))
        return tuple(made[name] for name in names)

    def _array(self, name: str) -> Any:
        base, _, columns = name.partition("@")
        if base in ("index", "whole_index"):
            return self.plan.index(int(columns), whole=base == "whole_index")
        if not name.startswith("chunks_"):
            return self.plan.array(name)
        chunks = build_array(self, name)
        slots, starts = chunks[:, 1:], np.flatnonzero(chunks[:, 0] < 0)
        first = slots[starts, (slots[starts] != EMPTY).argmax(1)]
        chunks[starts, 0] = self.plan.prev[np.where(first < 0, -2 - first, first)]
        return chunks

    @cached_property
    def _key(self) -> bytes:
        plan = self.plan
        digest = hashlib.blake2b(plan.forest.key(), digest_size=32)
        digest.update(f"{plan.attention.kind} {plan.ranks} {plan.rank}".encode())
        return digest.digest()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return LocalForest.of, (self.plan,)


def _of_plan(name: str) -> str:
    """The plan's name of a tensor: halo@4 for rank_halo_4, that is of a width."""
    own = name.removeprefix(PREFIX)
    base, _, width = own.rpartition("_")
    return f"{base}@{width}" if own != name and width.replace("x", "").isdigit() else own


def _of_no_rank(forest: Forest) -> NoReturn:
    raise StaleRoute(
        "context parallel: expected the plan of a rank, got a forest alone; call inside of share(plan_over_ranks(forest, group))"
    )


_SHAPES: dict[str, tuple[int | str, ...]] = {
    **dict.fromkeys(("send", "place", "send_back", "place_back", "queries", "prev"), ("T",)),
    **dict.fromkeys(("end", "column"), ("rank_T",)),
    "final": ("rank_final",),
    "entered": ("rank_entered",),
    "whole_index": ("B", "L"),
    "state_send": ("rank_state_send",),
}
for _name, _shape in _SHAPES.items():
    register(PREFIX + _name, _of_no_rank, _shape)
for _name in ("splits", "state_splits"):
    register(PREFIX + _name, _of_no_rank, (2, "rank_C"), host=True)
register(PREFIX + "state_rows", _of_no_rank, ("rank_state_rows",), host=True)

_LOCK = Lock()


def chain_name(links: int) -> str:
    """Name of the chains of states, padded to a number of links; registered when it is first asked for."""
    return _registered(f"{PREFIX}chain_{links}", ("rank_E", links))


def halo_names(width: int) -> dict[str, str]:
    """Names of what a convolution of `width` reads by the plan's names of it, registered when they are first asked for."""
    names = {what: f"{PREFIX}{what}_{width}" for what in ("halo", "halo_send", "halo_splits", "halo_rows")}
    shapes: dict[str, tuple[int | str, ...]] = {"halo": ("rank_entered", width - 1), "halo_splits": (2, "rank_C")}
    for what, name in names.items():
        _registered(name, shapes.get(what, (name,)), host=what in ("halo_splits", "halo_rows"))
    return names


def look_names(look: Look) -> dict[str, str]:
    """Names of what a look ahead reads by the plan's names of it, registered when they are first asked for."""
    names = {what: f"{PREFIX}{what}_{look.code}" for what in ("look", "look_send", "look_splits", "look_rows")}
    target = "T@{}-{}".format(*look.target) if any(look.target) else "T"
    shapes: dict[str, tuple[int | str, ...]] = {"look": (target,), "look_splits": (2, "rank_C")}
    for what, name in names.items():
        _registered(name, shapes.get(what, (name,)), host=what in ("look_splits", "look_rows"))
    return names


def _registered(name: str, shape: tuple[int | str, ...], host: bool = False) -> str:
    with _LOCK:
        if name not in registered():
            register(name, _of_no_rank, shape, host=host)
    return name
