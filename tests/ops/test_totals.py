"""Reductions over tokens that several ranks hold: results and gradients are those of one rank, on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_compile.ops import multiplicity, totals
from tests.distributed import simulated

OPS = torch.ops.sp_compile
TOKENS, WIDTH = 11, 3


def values(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Values [1, T, 3] and counts [T] of tokens."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((1, TOKENS, WIDTH), generator=generator, dtype=torch.float64)
    x[0, 4] = x[0, 7] = 2.5  # the greatest, twice
    return x.to(dtype), torch.randint(1, 4, (TOKENS,), generator=generator)


def parts(x: Tensor, count: Tensor, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """What each rank holds; padding has the count 0 and values that would show, and the last of 8 ranks has nothing else."""
    size = 2 * -(-TOKENS // (2 * ranks))
    padding = ranks * size - TOKENS
    shown = torch.full((1, padding, WIDTH), 9e3 if x.dtype.is_floating_point else 1).to(x.dtype)
    whole, counts = torch.cat([x, shown], 1), torch.cat([count, count.new_zeros(padding)])
    return [(whole[:, r * size : (r + 1) * size], counts[r * size : (r + 1) * size]) for r in range(ranks)]


def over_ranks(x: Tensor, count: Tensor, ranks: int, use: Callable[..., Tensor]) -> tuple[list[Tensor], Tensor]:
    """`use(values, count, over)` on every rank, and the gradient of all tokens under a loss that all ranks compute alike."""
    group = simulated.Group(ranks)
    mine = [(part.clone().requires_grad_(part.dtype.is_floating_point), counted) for part, counted in parts(x, count, ranks)]

    def work(rank: int) -> Tensor:
        part, counted = mine[rank]
        out = use(part, counted, (ranks, group.group_name))
        if out.requires_grad:
            _loss(out).backward()
        return out.detach()

    with simulated.standing_in(group):
        outs = simulated.together(group, work)
    grads = [torch.zeros_like(part) if part.grad is None else part.grad for part, _ in mine]
    whole = torch.cat(grads, 1)
    assert not whole[:, TOKENS:].any(), "padding got a gradient"
    return outs, whole[:, :TOKENS]


def _loss(out: Tensor) -> Tensor:
    return (out * torch.sin(1 + torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)).sum()


EVERY, COLUMN = [0, 1, 2], [0, 1]
CASES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "sum": ("token_sum", ("B L _", COLUMN)),
    "sum of all": ("token_sum", ("B L _", None)),
    "nansum": ("token_nansum", ("B L _", COLUMN, True)),
    "mean": ("token_mean", (None, "B L _", COLUMN)),
    "mean of rows": ("token_mean", (torch.zeros(5, 9), "B L _", EVERY)),
    "var": ("token_var", (None, "B L _", COLUMN, 1, True)),
    "std": ("token_std", (None, "B L _", EVERY, 0)),
    "norm": ("token_norm", ("B L _", 2.0, COLUMN)),
    "norm 3": ("token_norm", ("B L _", 3.0, EVERY)),
    "norm inf": ("token_norm", ("B L _", math.inf, COLUMN)),
    "norm 0": ("token_norm", ("B L _", 0, COLUMN)),
    "logsumexp": ("token_logsumexp", ("B L _", COLUMN)),
    "logsumexp kept": ("token_logsumexp", ("B L _", EVERY, True)),
    "count": ("token_count_nonzero", ("B L _", COLUMN)),
    "amax": ("token_extreme", ("B L _", "amax", COLUMN)),
    "amin": ("token_extreme", ("B L _", "amin", EVERY, True)),
    "any": ("token_extreme", ("B L _", "any", COLUMN)),
    "all": ("token_extreme", ("B L _", "all", COLUMN)),
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_what_one_has(case: str, ranks: int) -> None:
    name, given = CASES[case]
    x, count = values()
    whole = x.clone().requires_grad_()
    wanted = getattr(multiplicity, name)(whole, count, *given)
    if wanted.requires_grad:
        _loss(wanted).backward()
    outs, gradient = over_ranks(x, count, ranks, lambda part, counted, over: getattr(totals, name)(part, counted, *given, over=over))
    for out in outs:
        assert out.dtype == wanted.dtype
        assert torch.equal(out, outs[0]), "other bits on another rank"
        torch.testing.assert_close(out, wanted.detach(), rtol=1e-12, atol=1e-12)
    if whole.grad is not None:
        torch.testing.assert_close(gradient, whole.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.uint8])
def test_padding_is_neither_greatest_nor_least(name: str, dtype: torch.dtype) -> None:
    x = torch.full((1, TOKENS, WIDTH), 7).to(dtype)
    outs, _ = over_ranks(
        x, values()[1], 8, lambda part, counted, over: totals.token_extreme(part.detach(), counted, "B L _", name, COLUMN, over=over)
    )
    assert [out.tolist() for out in outs] == [[7] * WIDTH] * 8


def test_a_norm_of_zeros_passes_no_gradient_on() -> None:
    outs, gradient = over_ranks(
        torch.zeros(1, TOKENS, WIDTH),
        values()[1],
        2,
        lambda part, counted, over: totals.token_norm(part[:, :5], counted[:5], "B L _", over=over),
    )
    assert [float(out) for out in outs] == [0.0, 0.0]
    assert not gradient.any()


@pytest.mark.parametrize("weighed", [False, True])
def test_counts_are_exact_and_as_long_as_the_longest(weighed: bool) -> None:
    """The greatest number lies on one rank; counts beyond 2^24 are exact in integers."""
    number = torch.arange(TOKENS)[None, :, None].expand(1, TOKENS, WIDTH) // 2
    count = values()[1] * (2**24 + 1)

    def use(part: Tensor, counted: Tensor, over: Any) -> Tensor:
        flat = part.flatten()
        return totals.token_bincount(flat, counted, f"B*L*{WIDTH}", torch.ones(len(flat)) if weighed else None, over=over)

    outs, _ = over_ranks(number, count, 4, use)
    wanted = multiplicity.token_bincount(number.flatten(), count, f"B*L*{WIDTH}", torch.ones(TOKENS * WIDTH) if weighed else None)
    assert all(out.dtype == wanted.dtype and torch.equal(out, wanted) for out in outs)
    wanted = multiplicity.token_bincount(number.flatten(), count, f"B*L*{WIDTH}")
    outs, _ = over_ranks(
        number, count, 4, lambda part, counted, over: totals.token_histc(part, counted, "B L _", 9, torch.int64, over=over)
    )
    assert all(torch.equal(out[: len(wanted)], wanted) and not out[len(wanted) :].any() for out in outs)


def test_a_value_of_all_ranks_that_tokens_use_gets_the_sum_of_their_gradients() -> None:
    """x - mean(x): its gradient needs what all tokens give to the mean."""
    x, count = values()
    whole = x.clone().requires_grad_()
    centred = whole - multiplicity.token_mean(whole, count, None, "B L _", COLUMN)
    (torch.sin(centred) * centred).sum().backward()

    def use(part: Tensor, counted: Tensor, over: Any) -> Tensor:
        mean = OPS.enter_tokens(totals.token_mean(part, counted, None, "B L _", COLUMN, over=over), *over)
        moved = (part - mean) * (counted > 0)[:, None]
        return totals.over_ranks((torch.sin(moved) * moved).sum(), over) / math.sin(1)  # undoes the weight of the loss

    _, gradient = over_ranks(x, count, 3, use)
    assert whole.grad is not None
    torch.testing.assert_close(gradient, whole.grad, rtol=1e-12, atol=1e-12)


def _scattered(part: Tensor, counted: Tensor, over: Any) -> Tensor:
    base = torch.full((4,), 100)
    places = (part[0, :, 0].abs() * 10).to(torch.int64) % 4
    out = totals.scattered("index_add", base, 0, places, counted, over=over)
    kept = totals.scattered_("scatter_add", base, 0, places, counted, over=over)
    assert kept is base
    return torch.stack([out, base])


def test_what_is_added_to_counts_once() -> None:
    x, count = values()
    places = (x[0, :, 0].abs() * 10).to(torch.int64) % 4
    wanted = torch.full((4,), 100).index_add(0, places, count)
    outs, _ = over_ranks(x, count, 4, lambda part, counted, over: _scattered(part.detach(), counted, over))
    assert all(torch.equal(out, torch.stack([wanted, wanted])) for out in outs)


def test_replay_is_bit_equal() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        x, count = values(torch.float32)

        def use(part: Tensor, counted: Tensor, over: Any) -> Tensor:
            mean = OPS.enter_tokens(totals.token_mean(part, counted, None, "B L _", COLUMN, over=over), *over)
            seen = OPS.all_tokens(part - mean, 1, *over)[:, :TOKENS]
            return OPS.once_over_ranks(seen.exp().sum((0, 1)), over[0]) * OPS.sum_counts(counted[:WIDTH], *over)

        runs = [over_ranks(x, count, 2, lambda *given: use(*given)) for _ in range(3)]
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip([*run[0], run[1]], [*runs[0][0], runs[0][1]], strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["all_tokens", "own_tokens", "enter_tokens", "once_over_ranks", "sum_counts"])
def test_opcheck(name: str) -> None:
    x = torch.randn(2, 3, 4, requires_grad=name != "own_tokens")
    arguments: dict[str, tuple[Any, ...]] = {
        "all_tokens": (x, 1, 1, ""), "own_tokens": (x, 1, 1, ""), "enter_tokens": (x, 1, ""), "once_over_ranks": (x, 1),
        "sum_counts": (torch.tensor([3, 1]), 1, ""),
    }  # fmt: skip
    torch.library.opcheck(getattr(OPS, name).default, arguments[name])


def test_gathered_values_hand_gradients_to_their_own_rank() -> None:
    x, count = values()
    outs, gradient = over_ranks(x, count, 2, lambda part, counted, over: OPS.all_tokens(part, 1, *over)[:, :TOKENS])
    assert all(torch.equal(out, x) for out in outs)
    weight = torch.sin(1 + torch.arange(x.numel(), dtype=x.dtype)).view(x.shape)
    torch.testing.assert_close(gradient, weight)
