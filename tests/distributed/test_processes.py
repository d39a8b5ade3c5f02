"""Whole rows over gloo: gradients compose with averaging over data parallel ranks, and faults of one rank are heard by all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sp_compile.ops.numerics import relative_error
from tests.distributed import processes, rows_on_ranks


def check(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got["gradients"].keys() == wanted["gradients"].keys()
    whole = max(float(g.norm()) for g in wanted["gradients"].values())
    for name, want in wanted["gradients"].items():
        assert float((got["gradients"][name] - want).norm()) <= 1e-9 * max(float(want.norm()), 1e-3 * whole), name


@pytest.mark.parametrize(
    ("ranks", "replicas", "kind", "inner"),
    [
        (2, 1, "loop", "eager"),
        pytest.param(2, 1, "fine", "aot_eager", marks=pytest.mark.slow),
        pytest.param(4, 2, "sorted", "aot_eager", marks=pytest.mark.slow),
        pytest.param(2, 1, "sorted", "inductor", marks=pytest.mark.slow),
    ],
)
def test_gradients_compose_with_averaging(ranks: int, replicas: int, kind: str, inner: str) -> None:
    """The loss times the number of context parallel ranks, averaged over all ranks, is the mean over replicas."""
    found = processes.results(ranks, rows_on_ranks.step, kind, inner, replicas)
    wanted = rows_on_ranks.dense(kind, list(range(replicas)))
    size = ranks // replicas
    for number, got in enumerate(found):
        check(got, wanted)
        own = rows_on_ranks.dense(kind, [number // size])
        assert relative_error(got["loss"], own["loss"]) <= 1e-12
        assert all(torch.equal(value, own["buffers"][name]) for name, value in got["buffers"].items())
        assert torch.equal(got["loss"], found[number // size * size]["loss"])


@pytest.mark.slow
def test_gradients_compose_with_fully_sharded_parameters() -> None:
    found = processes.results(2, rows_on_ranks.fully_sharded, "fine")
    wanted = rows_on_ranks.dense("fine", [0])
    for got in found:
        check(got, wanted)
        assert relative_error(got["loss"], wanted["loss"]) <= 1e-12


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("ids", "another one than rank 0's on rank 1"),
        pytest.param("rows", "another one than rank 0's on rank 1", marks=pytest.mark.slow),
        pytest.param("raises", "rank 1: MemoryError: no room", marks=pytest.mark.slow),
    ],
)
def test_a_fault_of_one_rank_is_an_error_on_all(fault: str, said: str) -> None:
    found = processes.run(2, rows_on_ranks.faulty, fault)
    assert [(fine, value[0]) for fine, value in found] == [(False, "RanksDisagree")] * 2, found
    assert len({value[1] for _, value in found}) == 1
    assert said in found[0][1][1]
