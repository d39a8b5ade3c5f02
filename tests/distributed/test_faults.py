"""What goes wrong on one rank is heard by all: one error everywhere, and nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from sp_compile.errors import InvalidForest, StaleRoute
from sp_compile.layout import Forest
from sp_compile.layout.rank_plans import plan_rank
from sp_compile.ops import over_ranks
from sp_compile.ops.rank_agreement import plan_over_ranks
from tests.distributed import cases, processes


def prepare(rank: int, ranks: int, fault: str) -> Any:
    tree, ids = cases.forest("star"), torch.arange(64)[None]
    if rank == 1 and fault == "rows":
        tree = cases.forest("deep")
    if rank == 1 and fault == "ids":
        ids = ids + 1
    if rank == 1 and fault == "layout":
        return plan_over_ranks(tree, dist.group.WORLD, attention="zigzag", inputs=[ids])

    def make() -> Forest:
        if rank == 1 and fault == "raises":
            raise InvalidForest("no such rows")
        return tree

    plan = plan_over_ranks(make, dist.group.WORLD, inputs=[ids])
    return plan.rank, plan.ranks


@pytest.mark.parametrize(
    ("fault", "said"),
    [("rows", "rank 1; give every rank"), ("ids", "rank 1; give"), ("layout", "rank 1"), ("raises", "rank 1: InvalidForest: no such rows")],
)
def test_every_rank_raises_the_same_error(fault: str, said: str) -> None:
    found = processes.run(3, prepare, fault)
    assert [(fine, value[0]) for fine, value in found] == [(False, "RanksDisagree")] * 3
    assert len({value[1] for _, value in found}) == 1
    assert said in found[0][1][1]


def test_ranks_that_agree_get_their_plans() -> None:
    assert processes.results(2, prepare, "") == [(0, 2), (1, 2)]


def test_values_of_another_batch_are_refused_before_anything_is_sent() -> None:
    plan = plan_rank(cases.forest("star"), 2, 0)
    short = torch.zeros(1, 4, plan.size - 1, 6)
    with pytest.raises(StaleRoute, match=f"rows {plan.size} instead of {plan.size - 1}"):
        over_ranks.convert(short, plan, "", dim=2)
    with pytest.raises(StaleRoute, match="make the plan of this batch"):
        over_ranks.attention(short, short, short, plan, "", scale=1.0)
    with pytest.raises(StaleRoute, match="make the plan of this batch"):
        over_ranks.convolution(short[0], torch.zeros(6, 4), None, plan, "")
    x = torch.zeros(plan.size - 1, 3)
    route = plan.tensors(("send", "place", "send_back", "place_back", "splits"), "cpu")
    with pytest.raises(StaleRoute, match=f"for {plan.size} rows, the values have {plan.size - 1}"):
        torch.ops.sp_compile.convert_layout(x, *route, 0, "", False)
    with pytest.raises(StaleRoute, match="split sizes int64"):
        torch.ops.sp_compile.convert_layout(x, *route[:4], route[4].int(), 0, "", False)
