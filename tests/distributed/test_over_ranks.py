"""Attention, convolution and recurrences over ranks: outputs, gradients and counts are those of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sp_compile.layout.rank_plans import plan_rank
from sp_compile.ops.numerics import relative_error
from tests.distributed import cases, processes


@pytest.fixture(scope="module", params=[1, 2, 4])
def found(request: pytest.FixtureRequest) -> list[Any]:
    """All cases of each rank; one rank needs no process group."""
    ranks = request.param
    return processes.results(ranks, cases.all_cases)


def joined(parts: list[torch.Tensor], like: torch.Tensor, name: str) -> torch.Tensor:
    """Ranks' results as one: stretches of tokens side by side without padding, the sum of parameters' gradients, the loss of any rank."""
    if name == "loss":
        assert all(torch.equal(part, parts[0]) for part in parts), "the loss has other bits on another rank"
        return parts[0]
    if like.dim() > 1 and like.shape[0] == 1:
        return torch.cat(parts, 1)[:, : like.shape[1]]
    return torch.stack(parts).sum(0)


def test_ranks_equal_one(found: list[Any]) -> None:
    for case in found[0]:
        name, kind, _ = case
        wanted = cases.on_one(name, kind, torch.float64)
        assert set(found[0][case]) == set(wanted)
        for key, value in wanted.items():
            got = joined([rank[case][key] for rank in found], value, key)
            assert got.shape == value.shape
            assert relative_error(got, value) <= 1e-10, (case, key, len(found))


def test_queries_move() -> None:
    """Without it, results would not show whether conversions are right."""
    moved = [
        plan_rank(cases.forest(name), ranks, rank).into.crossing for name in ("star", "deep") for ranks in (2, 4) for rank in range(ranks)
    ]
    assert all(moved)


def test_padding_gets_no_gradient(found: list[Any]) -> None:
    """Its own objective is zero, and no real token reads it."""
    for case in found[0]:
        tokens = cases.forest(case[0]).num_tokens
        values, _ = cases.inputs(case[1], tokens, torch.float64)
        for key in (f"d_{name}" for name in values):
            if key in found[0][case]:
                assert not torch.cat([rank[case][key] for rank in found], 1)[:, tokens:].any(), (case, key)


def test_replay_is_bit_equal() -> None:
    assert processes.results(2, cases.replays) == [[], []]


def test_counts_are_reduced_once_and_exactly() -> None:
    tree = cases.forest("several")
    wanted = [0] * 5
    for token, count in enumerate(tree.count.tolist()):
        wanted[token * 7 % 5] += count * (2**24 + 1)
    assert [got.tolist() for got in processes.results(2, cases.counts)] == [wanted] * 2
