"""The stretch of one rank as a forest, so that what runs on packed values runs on a rank's part of them.

Nodes that a border cuts become shorter, those whose parent lies on a lower rank become roots, and padding tokens are roots of their own.
Columns, depth-first order and counts are those of the whole pack. What only the whole pack says has names of its own, for graph inputs:

    rank_send, rank_place, rank_send_back, rank_place_back, rank_queries    [S] see `RankPlan.tensors`
    rank_splits                                                            [2, C] on the host
    rank_end, rank_column                                                  [T'] of the padded pack
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import torch

from sp_compile.errors import StaleRoute
from sp_compile.layout.forest import Forest
from sp_compile.layout.rank_plans import RankPlan
from sp_compile.layout.tensors import register

PREFIX = "rank_"


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

    def tensors(self, names: Sequence[str], device: torch.device | str) -> tuple[torch.Tensor, ...]:
        """As `Forest.tensors`; `count` is 0 for padding, and the plan's tensors have names of their own."""
        ours = [name for name in names if name.startswith(PREFIX) or name == "count"]
        made = dict(zip(ours, self.plan.tensors([name.removeprefix(PREFIX) for name in ours], device), strict=True))
        others = [name for name in names if name not in made]
        made |= dict(zip(others, super().tensors(others, device), strict=True))
        return tuple(made[name] for name in names)

    @cached_property
    def _key(self) -> bytes:
        plan = self.plan
        digest = hashlib.blake2b(plan.forest.key(), digest_size=32)
        digest.update(f"{plan.attention.kind} {plan.ranks} {plan.rank}".encode())
        return digest.digest()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return LocalForest.of, (self.plan,)


def _of_no_rank(forest: Forest) -> NoReturn:
    raise StaleRoute(
        "context parallel: expected the plan of a rank, got a forest alone; call inside of share(plan_over_ranks(forest, group))"
    )


for _name in ("send", "place", "send_back", "place_back", "queries"):
    register(PREFIX + _name, _of_no_rank)
for _name in ("end", "column"):
    register(PREFIX + _name, _of_no_rank, ("rank_T",))
register(PREFIX + "splits", _of_no_rank, (2, "rank_C"), host=True)
