"""States that enter ranks, without processes: what ranks send each other is handed over in one, so that any forest and number will do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sp_compile.layout import Forest
from sp_compile.layout.local_forest import PREFIX, LocalForest, chain_name
from sp_compile.layout.rank_plans import RankPlan, most_links, plan_rank, take_local
from sp_compile.lowering import delta_rules, registry, scans  # noqa: F401  (the tables)
from sp_compile.ops.dense_scans import KINDS
from sp_compile.ops.numerics import relative_error
from sp_compile.ops.states_over_ranks import BESIDE, TABLES, SpreadScan
from tests.distributed import cases

FORESTS = st.lists(st.lists(st.integers(0, 1), max_size=14), min_size=1, max_size=8).map(Forest.from_rows)


class OneRank:
    """What a rank computes, by an implementation of the table."""

    def __init__(self, kind: str, name: str, values: cases.Tensors, parameters: cases.Tensors, plan: RankPlan) -> None:
        self.plan, self.name, self.forest = plan, name, LocalForest.of(plan)
        local = cases.recurrent(kind, {key: take_local(value, plan, 1.0) for key, value in values.items()}, parameters)
        tensors = dict.fromkeys(KINDS[kind].tensors) | local
        names = [chain_name(most_links(plan.ranks)) if name == "chain" else PREFIX + name for name in TABLES]
        tables = dict(zip([*TABLES, "end"], self.forest.tensors([*names, "end"], "cpu"), strict=True))
        self.scan = SpreadScan(kind, tensors, tensors, cases.SCANS[kind][2], tables, self.call)

    def call(self, op: Any, *args: Any, **options: Any) -> Any:
        if op not in registry.semantic_ops() or op._schema.name == "sp_compile::unpack":
            return op(*args, **options)
        bound = registry.bind(op, args, options)
        item = next(item for item in registry.implementations(op) if item.name == self.name)
        names = item.forest_names(bound)
        given, keywords = registry.call(item, op, bound, dict(zip(names, self.forest.tensors(names, "cpu"), strict=True)))
        return item.op(*given, **keywords)

    def sent(self, leaving: Tensor) -> list[Tensor]:
        """Rows to each rank."""
        fetch = self.plan.states[0]
        return list(leaving[torch.from_numpy(fetch.send)].split(fetch.send_sizes))


def spread(kind: str, name: str, values: cases.Tensors, parameters: cases.Tensors, tree: Forest, ranks: int) -> Tensor:
    """[1, T', ...] results of all ranks side by side."""
    each = [OneRank(kind, name, values, parameters, plan_rank(tree, ranks, rank)) for rank in range(ranks)]
    sent = [one.sent(one.scan.leaving()) for one in each]
    received = [torch.cat([rows[rank] for rows in sent]) for rank in range(ranks)]
    return torch.cat(
        [one.scan.outputs(one.scan.entering(rows, most_links(ranks))) for one, rows in zip(each, received, strict=True)], 1
    )  # fmt: skip


def check(kind: str, name: str, tree: Forest, ranks: int, dtype: torch.dtype = torch.float64, error: float = 1e-10) -> None:
    """Results and gradients of all ranks against the op's body on the whole pack in float64."""
    found = []
    for run in (dtype, torch.float64):
        values, parameters = cases.inputs(kind, tree.num_tokens, dtype)
        values, parameters = ({key: value.to(run).requires_grad_() for key, value in of.items()} for of in (values, parameters))
        out = spread(kind, name, values, parameters, tree, ranks) if not found else cases.whole(kind, values, parameters, tree)
        out = out[:, : tree.num_tokens]
        weight = cases.made(99, *out.shape).to(run)
        leaves = {**values, **parameters}
        found.append({"out": out} | dict(zip(leaves, torch.autograd.grad((out * weight).sum(), list(leaves.values())), strict=True)))
    for key, want in found[1].items():
        assert relative_error(found[0][key], want) <= error, (kind, key, ranks)


def names(kind: str) -> list[str]:
    op = getattr(torch.ops.sp_compile, kind).default
    return [item.name for item in registry.implementations(op)]


def _quick(kind: str, name: str) -> bool:
    return name in ("chunked", "wavefront") or (kind, name) == ("kda", "chunked_replay")


@pytest.mark.parametrize(
    ("kind", "name"),
    [pytest.param(kind, name, marks=[] if _quick(kind, name) else pytest.mark.slow) for kind in BESIDE for name in names(kind)],
)
@settings(max_examples=4, deadline=None)
@given(tree=FORESTS.filter(lambda tree: tree.num_tokens > 0), ranks=st.integers(1, 6))
def test_any_forest_over_any_number_of_ranks(kind: str, name: str, tree: Forest, ranks: int) -> None:
    check(kind, name, tree, ranks)


def row(*numbers: tuple[int, int]) -> list[int]:
    return [token for start, count in numbers for token in range(start, start + count)]


LONG = {
    "chunks across borders": [row((0, 150), (1000 * b, 20 + 70 * b)) for b in range(3)],
    "deep": [row((0, 30 * n), (1000 + n, 1), (2000 + n, 9)) for n in range(1, 7)],
    "a forest": [row((500 * r, 40), (4000 + 90 * b + 500 * r, 33)) for r in range(3) for b in range(2)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("kind", BESIDE)
def test_nodes_longer_than_chunks_and_ranks(kind: str, name: str) -> None:
    for ranks in (2, 3, 4, 8):
        check(kind, names(kind)[0], Forest.from_rows(LONG[name]), ranks)
        if len(names(kind)) > 2:
            check(kind, names(kind)[1], Forest.from_rows(LONG[name]), ranks)


@pytest.mark.parametrize("kind", BESIDE)
def test_float32_is_as_near_as_on_one_rank(kind: str) -> None:
    check(kind, names(kind)[0], Forest.from_rows(LONG["deep"]), 4, torch.float32, 5e-5)


def test_one_node_of_all_ranks_is_composed_of_the_longest_chains() -> None:
    tree = Forest.from_rows([range(48)])
    for ranks in (2, 3, 4, 5, 6, 8):
        links = max(plan_rank(tree, ranks, rank).states[1].shape[1] for rank in range(ranks))
        assert links == ranks - 1 <= most_links(ranks) < 2 * max(links, 1)
        check("gated_delta_rule", "chunked", tree, ranks)


def test_nothing_is_kept_of_no_state() -> None:
    """A path that begins in the rank has nothing to keep, whose factor could be infinite."""
    tree = Forest.from_rows([[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]])
    values, parameters = cases.inputs("linear_scan", tree.num_tokens, torch.float64)
    own, kept = OneRank("linear_scan", "wavefront", values, parameters, plan_rank(tree, 2, 0)).scan.leaving().chunk(2, 1)
    assert bool((own != 0).all())
    assert not kept.any()
