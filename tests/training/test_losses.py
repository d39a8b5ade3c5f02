"""Policy-gradient and preference losses, against their formulas written with loops in float64, from packed values to gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.numerics import relative_error
from sp_compile.training import (
    constant_length,
    dpo_loss,
    grpo_loss,
    gspo_loss,
    next_tokens,
    ppo_loss,
    sequence_logprobs,
    token_logprobs,
    token_mean,
)
from tests.training.rows import Rows, dense_logprobs, expanded, normal, random_rows, same_results

CLASSES = 11
ZERO = torch.zeros((), dtype=torch.float64)


class Case:
    """Random rows with log-probabilities from packed values, from dense ones, and of an older policy and a reference."""

    def __init__(self, rows: Rows) -> None:
        self.logits = normal(rows.prefixes, CLASSES, seed=1)
        trained = torch.rand(rows.ids.shape, generator=torch.Generator().manual_seed(0)) < 0.8
        self.targets = next_tokens(rows.ids, rows.keep, trained=trained)
        self.mask = self.targets != -100
        self.found = token_logprobs(self.logits[rows.packed][None], self.targets, rows.forest)
        self.dense = dense_logprobs(expanded(self.logits, rows), self.targets, self.mask)[0]
        self.old, self.reference = (self.dense.detach() + 0.4 * normal(*rows.ids.shape, seed=n).detach() for n in (2, 3))
        self.advantages = normal(len(rows.ids), seed=4).detach()
        # What does not count may hold anything.
        for other in (self.old, self.reference):
            other.masked_fill_(~self.mask, torch.nan)

    @property
    def places(self) -> list[tuple[int, int]]:
        return [(int(b), int(c)) for b, c in self.mask.nonzero()]

    def same(self, loss: Tensor, wanted: Tensor) -> None:
        same_results([loss], [wanted + 0 * self.logits.sum()], [self.logits])


def surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """`-min(r A, clip(r) A)`, written case by case."""
    a = float(advantage)
    bounded = ratio if 1 - low <= float(ratio) <= 1 + high else ZERO + (1 - low if float(ratio) < 1 else 1 + high)
    chosen = ratio if float(ratio) * a <= float(bounded) * a else bounded
    if dual is not None and a < 0 and float(chosen) > dual:
        chosen = ZERO + dual
    return -chosen * a


@settings(max_examples=25, deadline=None)
@given(
    rows=random_rows(),
    clip=st.sampled_from([(0.2, 0.2), (0.2, 0.28), (1.0, 0.0), (0.05, 3.0)]),
    dual=st.sampled_from([None, 1.1, 3.0]),
    per_token=st.booleans(),
)
def test_ppo(rows: Rows, clip: tuple[float, float], dual: float | None, per_token: bool) -> None:
    case = Case(rows)
    spread = normal(*rows.ids.shape, seed=5).detach() if per_token else case.advantages[:, None].expand(rows.ids.shape)
    given = spread.masked_fill(~case.mask, torch.nan) if per_token else case.advantages
    loss, metrics = ppo_loss(case.found, case.old, given, case.mask, clip_low=clip[0], clip_high=clip[1], dual_clip=dual)
    ratios = {p: torch.exp(case.dense[p] - case.old[p]) for p in case.places}
    count = max(len(ratios), 1)
    case.same(loss, sum((surrogate(r, spread[p], *clip, dual) for p, r in ratios.items()), ZERO) / count)
    low = [p for p, r in ratios.items() if spread[p] < 0 and r < 1 - clip[0]]
    high = [p for p, r in ratios.items() if spread[p] > 0 and r > 1 + clip[1]]
    wanted = {
        "clip_fraction": (len(low) + len(high)) / count,
        "clip_fraction_low": len(low) / count,
        "clip_fraction_high": len(high) / count,
        "dual_clip_fraction": sum(dual is not None and bool(spread[p] < 0) and bool(r > dual) for p, r in ratios.items()) / count,
        "approx_kl": sum(float(r) - 1 - math.log(float(r)) for r in ratios.values()) / count,
    }
    assert {name: float(x) for name, x in metrics.items()} == pytest.approx(wanted, abs=1e-10)
    assert not any(x.requires_grad for x in metrics.values())


KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": lambda p, q: p - q,
    "k2": lambda p, q: (p - q) ** 2 / 2,
    "k3": lambda p, q: torch.exp(q) / torch.exp(p) - torch.log(torch.exp(q) / torch.exp(p)) - 1,
}


@settings(max_examples=25, deadline=None)
@given(rows=random_rows(), kl=st.sampled_from(sorted(KL)), beta=st.sampled_from([0.0, 0.04, 1.0]), on_policy=st.booleans())
def test_grpo(rows: Rows, kl: Any, beta: float, on_policy: bool) -> None:
    case = Case(rows)
    old = None if on_policy else case.old
    options: dict[str, Any] = {"old_logprobs": old, "reference_logprobs": case.reference, "beta": beta, "kl": kl}
    loss, metrics = grpo_loss(case.found, case.advantages, case.mask, **options)
    before = case.dense.detach() if old is None else old
    total, divergences = ZERO, []
    for b in range(len(rows.ids)):
        places = [p for p in case.places if p[0] == b]
        terms = [surrogate(torch.exp(case.dense[p] - before[p]), case.advantages[b], 0.2, 0.2) for p in places]
        kls = [KL[kl](case.dense[p], case.reference[p]) for p in places]
        divergences += [float(x) for x in kls]
        total = total + (sum(terms, ZERO) + beta * sum(kls, ZERO)) / max(len(places), 1)
    case.same(loss, total / len(rows.ids))
    assert float(metrics["kl"]) == pytest.approx(sum(divergences) / max(len(divergences), 1), abs=1e-10)
    assert not any(x.requires_grad for x in metrics.values())
    if on_policy:
        assert float(metrics["clip_fraction"]) == 0.0


@settings(max_examples=15, deadline=None)
@given(rows=random_rows())
def test_dr_grpo_is_a_sum_over_a_constant(rows: Rows) -> None:
    case = Case(rows)
    reduce = functools.partial(constant_length, length=16)
    loss, metrics = grpo_loss(case.found, case.advantages, case.mask, old_logprobs=case.old, reduce=reduce)
    terms = [surrogate(torch.exp(case.dense[p] - case.old[p]), case.advantages[p[0]], 0.2, 0.2) for p in case.places]
    case.same(loss, sum(terms, ZERO) / 16 / len(rows.ids))
    assert "kl" not in metrics


@settings(max_examples=25, deadline=None)
@given(rows=random_rows(), clip=st.sampled_from([(3e-4, 4e-4), (0.2, 0.3)]))
def test_gspo(rows: Rows, clip: tuple[float, float]) -> None:
    case = Case(rows)
    loss, metrics = gspo_loss(case.found, case.old, case.advantages, case.mask, clip_low=clip[0], clip_high=clip[1])
    total, rowwise, clipped = ZERO, 0, 0
    for b in range(len(rows.ids)):
        places = [p for p in case.places if p[0] == b]
        if places:
            ratio = torch.exp(sum((case.dense[p] - case.old[p] for p in places), ZERO) / len(places))
            total = total + surrogate(ratio, case.advantages[b], *clip)
            rowwise += 1
            clipped += bool((case.advantages[b] < 0 and ratio < 1 - clip[0]) or (case.advantages[b] > 0 and ratio > 1 + clip[1]))
    case.same(loss, total / len(rows.ids))
    assert float(metrics["clip_fraction"]) == pytest.approx(clipped / max(rowwise, 1), abs=1e-10)


@settings(max_examples=25, deadline=None)
@given(rows=random_rows(), beta=st.sampled_from([0.1, 2.0]), smoothing=st.sampled_from([0.0, 0.1, 0.5]), mean=st.booleans())
def test_dpo(rows: Rows, beta: float, smoothing: float, mean: bool) -> None:
    """Rows 0, 2, ... are chosen, rows 1, 3, ... rejected."""
    case = Case(rows)
    pairs = len(rows.ids) // 2
    given = [sequence_logprobs(x, case.mask, mean=mean) for x in (case.found, case.reference)]
    chosen, rejected = ([x[n : 2 * pairs : 2] for x in given] for n in (0, 1))
    loss, metrics = dpo_loss(chosen[0], rejected[0], chosen[1], rejected[1], beta=beta, label_smoothing=smoothing)
    total, margins = ZERO, []
    for pair in range(pairs):
        rewards = []
        for b in (2 * pair, 2 * pair + 1):
            places = [p for p in case.places if p[0] == b]
            ratio = sum((case.dense[p] - case.reference[p] for p in places), ZERO)
            rewards.append(beta * ratio / (max(len(places), 1) if mean else 1))
        h = rewards[0] - rewards[1]
        margins.append(float(h))
        total = total - (1 - smoothing) * torch.log(1 / (1 + torch.exp(-h))) - smoothing * torch.log(1 / (1 + torch.exp(h)))
    case.same(loss, total / max(pairs, 1))
    assert float(metrics["reward_margin"]) == pytest.approx(sum(margins) / max(pairs, 1), abs=1e-9)
    assert float(metrics["reward_chosen"] - metrics["reward_rejected"]) == pytest.approx(float(metrics["reward_margin"]), abs=1e-9)
    assert float(metrics["accuracy"]) == pytest.approx(sum(m > 0 for m in margins) / max(pairs, 1))


def test_gradient_where_nothing_counts_is_zero_even_if_values_are_infinite() -> None:
    logprobs = torch.tensor([[-0.5, 0.0], [-900.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-0.6, -torch.inf], [0.0, -1000.0]], dtype=torch.float64)
    mask, advantages = torch.tensor([[1, 0], [0, 0]]), torch.ones(2, dtype=torch.float64)
    for loss in (
        ppo_loss(logprobs, old, advantages, mask),
        grpo_loss(logprobs, advantages, mask, old_logprobs=old, reference_logprobs=old, beta=0.1),
        gspo_loss(logprobs, old, advantages, mask, clip_low=0.5, clip_high=0.5),
    ):
        (gradient,) = torch.autograd.grad(loss.value, logprobs)
        assert gradient.isfinite().all()
        assert gradient[0, 0] != 0
        assert not gradient[mask == 0].any()
        assert all(x.isfinite() for x in loss.metrics.values())


def test_constants_get_no_gradient() -> None:
    tensors = [normal(2, 3, seed=n) for n in range(4)]
    mask = torch.ones(2, 3, dtype=torch.bool)
    logprobs, old, reference, advantages = tensors
    value = grpo_loss(logprobs, advantages, mask, old_logprobs=old, reference_logprobs=reference, beta=1.0).value
    assert [g is not None for g in torch.autograd.grad(value, tensors, allow_unused=True)] == [True, False, False, False]
    value = dpo_loss(*(x[0] for x in tensors)).value
    assert [g is not None for g in torch.autograd.grad(value, tensors, allow_unused=True)] == [True, True, False, False]


def test_parts_add_up_to_the_whole() -> None:
    logprobs, old = normal(6, 5, seed=0), normal(6, 5, seed=1)
    mask = torch.rand(6, 5, generator=torch.Generator().manual_seed(1)) < 0.6
    advantages = normal(6, seed=2)
    wanted = gspo_loss(logprobs, old, advantages, mask).value
    parts = [gspo_loss(logprobs[s], old[s], advantages[s], mask[s], denominator=6).value for s in (slice(0, 2), slice(2, 6))]
    assert relative_error(sum(parts), wanted) < 1e-12  # type: ignore[arg-type]
    four = [normal(6, seed=n) for n in range(4)]
    halves = [dpo_loss(*(x[s] for x in four), denominator=6).value for s in (slice(0, 2), slice(2, 6))]
    assert relative_error(sum(halves), dpo_loss(*four).value) < 1e-12  # type: ignore[arg-type]
    reduce = functools.partial(token_mean, denominator=int(mask.sum()))
    shares = [ppo_loss(logprobs[s], old[s], advantages[s], mask[s], reduce=reduce).value for s in (slice(0, 2), slice(2, 6))]
    assert relative_error(sum(shares), ppo_loss(logprobs, old, advantages, mask).value) < 1e-12  # type: ignore[arg-type]


def test_no_rows() -> None:
    empty, mask = normal(0, 3, seed=0), torch.ones(0, 3, dtype=torch.bool)
    none = torch.zeros(0, dtype=torch.float64)
    for loss in (
        ppo_loss(empty, empty, none, mask),
        grpo_loss(empty, none, mask),
        gspo_loss(empty, empty, none, mask),
        dpo_loss(*[none] * 4),
    ):
        assert float(loss.value) == 0.0
        assert all(float(x) == 0.0 for x in loss.metrics.values())


BAD: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": torch.zeros(2, 3, dtype=torch.int64)}, "logprobs"),
    ({"old_logprobs": torch.zeros(2, 2)}, "old_logprobs"),
    ({"mask": torch.ones(2, 3)}, "bools or integers"),
    ({"mask": torch.ones(3, 2, dtype=torch.bool)}, "mask"),
    ({"advantages": torch.zeros(3)}, "advantages"),
    ({"advantages": torch.zeros(2, dtype=torch.int64)}, "advantages"),
    ({"clip_low": 1.5}, "clip_low"),
    ({"clip_low": -0.1}, "clip_low"),
    ({"clip_high": math.nan}, "clip_high"),
]


@pytest.mark.parametrize("function", [ppo_loss, grpo_loss, gspo_loss])
@pytest.mark.parametrize(("changed", "said"), BAD)
def test_wrong_inputs_are_refused(function: Callable[..., Any], changed: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {"logprobs": torch.zeros(2, 3), "old_logprobs": torch.zeros(2, 3)}
    good |= {"advantages": torch.zeros(2), "mask": torch.ones(2, 3, dtype=torch.bool)}
    function(**good)
    with pytest.raises(InvalidInput, match=said):
        function(**(good | changed))


def test_wrong_options_are_refused() -> None:
    values, mask, rows = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2)
    with pytest.raises(InvalidInput, match="dual_clip"):
        ppo_loss(values, values, rows, mask, dual_clip=1.0)
    with pytest.raises(InvalidInput, match="reference_logprobs"):
        grpo_loss(values, rows, mask, beta=0.1)
    with pytest.raises(InvalidInput, match="beta"):
        grpo_loss(values, rows, mask, reference_logprobs=values, beta=-0.1)
    with pytest.raises(InvalidInput, match="kl"):
        grpo_loss(values, rows, mask, reference_logprobs=values, kl="k4")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="one per row"):
        gspo_loss(values, values, values, mask)
    with pytest.raises(InvalidInput, match="sequence_logprobs"):
        dpo_loss(values, values, values, values)
    with pytest.raises(InvalidInput, match="rejected"):
        dpo_loss(rows, torch.zeros(3), rows, rows)
    with pytest.raises(InvalidInput, match="beta"):
        dpo_loss(rows, rows, rows, rows, beta=0)
    with pytest.raises(InvalidInput, match="label_smoothing"):
        dpo_loss(rows, rows, rows, rows, label_smoothing=0.6)
    with pytest.raises(InvalidInput, match="mask"):
        sequence_logprobs(values, mask.float())


def test_losses_per_token_and_wrong_reductions() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, old = (torch.randn(3, 5, generator=generator) for _ in range(2))
    mask, advantages = torch.arange(5).expand(3, 5) < torch.tensor([[5], [2], [0]]), torch.tensor([1.0, -1.0, 0.5])
    for loss, name in ((ppo_loss(logprobs, old, advantages, mask, reduce=None), "ppo"), (
        grpo_loss(logprobs, advantages, mask, old_logprobs=old, reduce=None), "grpo")):  # fmt: skip
        assert loss.value.shape == mask.shape, name
        assert not loss.value[~mask].any()
        whole = ppo_loss(logprobs, old, advantages, mask, reduce=token_mean).value
        torch.testing.assert_close(loss.value.sum() / mask.sum(), whole)
    with pytest.raises(InvalidInput, match="reduce"):
        grpo_loss(logprobs, advantages, mask, reduce="mean")  # type: ignore[arg-type]
