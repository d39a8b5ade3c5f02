"""Reductions of per-row values, against loops over rows in Python, and group-relative advantages."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.numerics import relative_error
from sp_compile.training import constant_length, group_advantages, group_mean, next_tokens, sequence_mean, token_logprobs, token_mean
from tests.training.rows import Rows, dense_logprobs, expanded, normal, random_rows, same_results

LENGTH = 7.0


def counted(values: Tensor, mask: Tensor) -> list[list[Tensor]]:
    return [[values[b, c] for c in range(values.shape[1]) if mask[b, c]] for b in range(values.shape[0])]


def mean(terms: list[Tensor], count: float) -> Tensor:
    return sum(terms, torch.zeros((), dtype=torch.float64)) / max(count, 1)


def by_token(values: Tensor, mask: Tensor, groups: list[int]) -> Tensor:
    every = [x for row in counted(values, mask) for x in row]
    return mean(every, len(every))


def by_sequence(values: Tensor, mask: Tensor, groups: list[int]) -> Tensor:
    return mean([mean(row, len(row)) for row in counted(values, mask)], len(values))


def by_group(values: Tensor, mask: Tensor, groups: list[int]) -> Tensor:
    rows = counted(values, mask)
    members = [[x for row, group in zip(rows, groups, strict=True) if group == name for x in row] for name in sorted(set(groups))]
    return mean([mean(group, len(group)) for group in members], len(members))


def by_constant(values: Tensor, mask: Tensor, groups: list[int]) -> Tensor:
    return mean([sum(row, torch.zeros((), dtype=torch.float64)) / LENGTH for row in counted(values, mask)], len(values))


REDUCTIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "token": (lambda x, m, g, **o: token_mean(x, m, **o), by_token),
    "sequence": (lambda x, m, g, **o: sequence_mean(x, m, **o), by_sequence),
    "group": (lambda x, m, g, **o: group_mean(x, m, torch.tensor(g, dtype=torch.int64), **o), by_group),
    "constant": (lambda x, m, g, **o: constant_length(x, m, LENGTH, **o), by_constant),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@settings(max_examples=25, deadline=None)
@given(rows=random_rows(), data=st.data())
def test_equals_a_loop_over_dense_rows(name: str, rows: Rows, data: st.DataObject) -> None:
    """From packed logits to the loss; groups in any order, rows and groups where nothing counts."""
    groups = data.draw(st.lists(st.sampled_from([-3, 4, 10**12]), min_size=len(rows.ids), max_size=len(rows.ids)))
    trained = torch.rand(rows.ids.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    targets = next_tokens(rows.ids, rows.keep, trained=trained)
    logits, mask = normal(rows.prefixes, 11, seed=1), targets != -100
    reduce, oracle = REDUCTIONS[name]
    found = reduce(token_logprobs(logits[rows.packed][None], targets, rows.forest), mask, groups)
    dense, _ = dense_logprobs(expanded(logits, rows), targets, mask)
    same_results([found], [oracle(dense, mask, groups) + 0 * logits.sum()], [logits])


@pytest.mark.parametrize("name", REDUCTIONS)
def test_what_does_not_count_is_never_read(name: str) -> None:
    values = normal(3, 4, seed=0)
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]])
    spoilt = values.detach().masked_fill(mask == 0, torch.nan).requires_grad_()
    reduce, oracle = REDUCTIONS[name]
    found = reduce(spoilt, mask, [1, 0, 1])
    assert relative_error(found, oracle(values, mask, [1, 0, 1])) < 1e-12
    (gradient,) = torch.autograd.grad(found, spoilt)
    assert not gradient[mask == 0].any()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 3)])
def test_nothing_counts(name: str, shape: tuple[int, int]) -> None:
    values = normal(*shape, seed=0)
    found = REDUCTIONS[name][0](values, torch.zeros(shape, dtype=torch.bool), list(range(shape[0])))
    assert float(found) == 0.0
    assert not torch.autograd.grad(found, values)[0].any()


@pytest.mark.parametrize("name", REDUCTIONS)
def test_parts_add_up_to_the_whole(name: str) -> None:
    """Micro-batches of different sizes, with the whole's denominator as a number or as a tensor."""
    values, groups = normal(6, 5, seed=0), [0, 0, 1, 1, 1, 2]
    mask = torch.rand(6, 5, generator=torch.Generator().manual_seed(1)) < 0.6
    reduce, whole = REDUCTIONS[name][0], {"token": int(mask.sum()), "group": 3}.get(name, 6)
    wanted = reduce(values, mask, groups)
    for denominator in (whole, torch.tensor(whole)):
        parts = [reduce(values[a:b], mask[a:b], groups[a:b], denominator=denominator) for a, b in ((0, 2), (2, 6))]
        assert relative_error(sum(parts), wanted) < 1e-12  # type: ignore[arg-type]


def test_reductions_differ() -> None:
    """Ragged rows in ragged groups tell all four apart."""
    values = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    mask = torch.arange(4) < torch.tensor([[1], [4], [2]])
    found = [float(reduce(values, mask, [0, 1, 1])) for reduce, _ in REDUCTIONS.values()]
    assert len({round(x, 6) for x in found}) == 4


@pytest.mark.parametrize("reduce", [token_mean, sequence_mean, functools.partial(constant_length, length=3)])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"values": torch.zeros(2, 3, dtype=torch.int64)}, "float"),
        ({"values": torch.zeros(6)}, r"\[B, C\]"),
        ({"mask": torch.ones(2, 3)}, "bools or integers"),
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, "mask"),
        ({"mask": None}, "mask"),
        ({"denominator": 0}, "denominator"),
        ({"denominator": math.inf}, "denominator"),
    ],
)
def test_wrong_inputs_are_refused(reduce: Callable[..., Tensor], changed: dict[str, Any], said: str) -> None:
    good = {"values": torch.zeros(2, 3), "mask": torch.ones(2, 3, dtype=torch.bool)}
    reduce(**good)
    with pytest.raises(InvalidInput, match=said):
        reduce(**(good | changed))


@pytest.mark.parametrize("groups", [torch.zeros(2), torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.bool), [0, 0]])
def test_wrong_groups_are_refused(groups: Any) -> None:
    with pytest.raises(InvalidInput, match="groups"):
        group_mean(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), groups)
    with pytest.raises(InvalidInput, match="groups"):
        group_advantages(torch.zeros(2), groups)


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(InvalidInput, match="length"):
        constant_length(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), 0)
    with pytest.raises(InvalidInput, match="epsilon"):
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), epsilon=-1.0)
    with pytest.raises(InvalidInput, match="rewards"):
        group_advantages(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(InvalidInput, match="groups"):
        group_advantages(torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64))


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from([3, -1, 10**12]), st.floats(-5, 5, width=16)), max_size=9),
    scale=st.booleans(),
    epsilon=st.sampled_from([1e-6, 1e-4, 0.0]),
)
def test_advantages_by_their_formula(rows: list[tuple[int, float]], scale: bool, epsilon: float) -> None:
    wanted = []
    for group, reward in rows:
        members = [r for g, r in rows if g == group]
        deviation = statistics.stdev(members) if len(members) > 1 else 0.0
        centred = reward - statistics.fmean(members)
        wanted.append((centred / (deviation + epsilon) if len(set(members)) > 1 else 0.0) if scale else centred)
    rewards = torch.tensor([r for _, r in rows], dtype=torch.float64)
    found = group_advantages(rewards, torch.tensor([g for g, _ in rows], dtype=torch.int64), scale=scale, epsilon=epsilon)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-10, atol=1e-9)


def test_advantages_are_constants_of_the_rewards_dtype() -> None:
    rewards = torch.tensor([1.0, 3.0, 2.0], requires_grad=True)
    found = group_advantages(rewards, torch.tensor([0, 0, 1]), epsilon=0.0)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert found.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 0.0])
