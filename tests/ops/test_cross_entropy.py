"""Losses of rows against torch's own cross entropy on gathered logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops import cross_entropy
from sp_compile.ops.numerics import relative_error
from tests.ops.forests import random_forest, tensors

ops = torch.ops.sp_compile
CLASSES = 11


def case(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    tree = random_forest(seed)
    index = tensors(tree)[2]
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tree.num_tokens, CLASSES, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    # Two classes for most targets, so that many rows choose one entry of one token.
    target = torch.randint(0, 2, index.shape, generator=generator)
    target[0] = torch.randint(0, CLASSES, index.shape[1:], generator=generator)
    target[1, ::3] = -100
    return logits, index, target


def both(
    logits: Tensor, index: Tensor, target: Tensor, weight: Tensor | None, **options: Any
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """`(loss at kept positions, mean loss, gradient)` of the op and of torch on gathered logits."""
    keep = index >= 0
    loss, weights, _ = ops.cross_entropy_rows(logits, index, target, weight, **options)
    assert (loss[~keep] == 0).all()
    assert (weights[~keep] == 0).all()
    grad = torch.randn(loss.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(loss.dtype)
    (d_logits,) = torch.autograd.grad(loss, logits, grad)
    wide = logits.detach().to(torch.float64).requires_grad_()
    options64 = {"weight": None if weight is None else weight.double(), **options}
    want = F.cross_entropy(wide[index[keep]], target[keep], reduction="none", **options64)
    mean = F.cross_entropy(wide[index[keep]], target[keep], **options64)
    (d_want,) = torch.autograd.grad(want, wide, grad[keep].double())
    return (loss[keep], loss.double().sum() / weights.double().sum(), d_logits), (want, mean, d_want)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 4e-3)])
def test_equals_torch(smoothing: float, weighted: bool, dtype: torch.dtype, tolerance: float) -> None:
    weight = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64).to(dtype) if weighted else None
    for seed in range(3):
        got, want = both(*case(dtype, seed), weight, ignore_index=-100, label_smoothing=smoothing)
        for one, other in zip(got, want, strict=True):
            assert relative_error(one, other) < tolerance


def test_equals_torch_in_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cross_entropy._BLOCK_ELEMENTS, "cpu", 3 * CLASSES)
    got, want = both(*case(), None, ignore_index=-100, label_smoothing=0.1)
    for one, other in zip(got, want, strict=True):
        assert relative_error(one, other) < 1e-12


def test_half_types_are_rounded_as_torch_rounds_them() -> None:
    logits, index, target = case(torch.bfloat16)
    keep = index >= 0
    loss, *_ = ops.cross_entropy_rows(logits, index, target, None, ignore_index=-100, label_smoothing=0.0)
    assert torch.equal(loss[keep], F.cross_entropy(logits.float()[index[keep]], target[keep], reduction="none").bfloat16())


def test_gradient_of_many_rows_is_rounded_once() -> None:
    logits = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    index, target = torch.zeros(600, dtype=torch.int64), torch.zeros(600, dtype=torch.int64)
    loss, *_ = ops.cross_entropy_rows(logits, index, target, None, ignore_index=-100, label_smoothing=0.0)
    (grad,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))
    assert grad.tolist() == [[-300.0, 300.0]]


def test_infinite_logits_do_not_reach_ignored_positions() -> None:
    logits = torch.tensor([[0.0, -torch.inf]], dtype=torch.float64, requires_grad=True)
    index, target = torch.tensor([0, 0, -1]), torch.tensor([0, -100, 7])
    loss, weights, _ = ops.cross_entropy_rows(logits, index, target, None, ignore_index=-100, label_smoothing=0.0)
    assert loss.tolist() == [0.0, 0.0, 0.0]
    assert weights.tolist() == [1.0, 0.0, 0.0]
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert grad.tolist() == [[0.0, 0.0]]


def test_wrong_inputs_are_refused() -> None:
    logits, index, target = case()
    options = {"ignore_index": -100, "label_smoothing": 0.0}
    with pytest.raises(IndexError, match="out of bounds"):
        ops.cross_entropy_rows(logits, index, target + CLASSES, None, **options)
    with pytest.raises(IndexError, match="out of bounds"):
        ops.cross_entropy_rows(logits, index, target.masked_fill(target == -100, -1), None, **options)
    with pytest.raises(InvalidInput, match="one shape"):
        ops.cross_entropy_rows(logits, index, target[:1], None, **options)
    with pytest.raises(InvalidInput, match="weight"):
        ops.cross_entropy_rows(logits, index, target, torch.ones(3), **options)


def test_nothing_counts_without_tokens() -> None:
    logits = torch.zeros(0, CLASSES, requires_grad=True)
    index = torch.full((2, 3), -1)
    loss, weights, _ = ops.cross_entropy_rows(logits, index, index, None, ignore_index=-100, label_smoothing=0.1)
    assert loss.shape == weights.shape == (2, 3)
    assert torch.autograd.grad(loss.sum(), logits)[0].shape == logits.shape


def test_opcheck() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits, index, target = case(dtype)
        weight = torch.ones(CLASSES, dtype=dtype)
        torch.library.opcheck(
            ops.cross_entropy_rows.default, (logits, index, target, weight), {"ignore_index": -100, "label_smoothing": 0.1}
        )


def test_backward_op_makes_nothing_of_the_size_of_logits() -> None:
    classes = 1000
    logits = torch.randn(8, classes)
    index = torch.arange(12).remainder(8)
    grad, lse = torch.ones(12), logits.logsumexp(-1)
    made = ops.cross_entropy_rows_backward(grad, logits, index, index, None, lse, ignore_index=-100, label_smoothing=0.0)
    assert max(x.numel() for x in made) == 12


def test_replays_bit_for_bit() -> None:
    logits, index, target = case(torch.float32)
    grad, lse = torch.randn(index.shape), logits.logsumexp(-1)
    first = ops.cross_entropy_rows_backward(grad, logits, index, target, None, lse, ignore_index=-100, label_smoothing=0.1)
    for _ in range(3):
        again = ops.cross_entropy_rows_backward(grad, logits, index, target, None, lse, ignore_index=-100, label_smoothing=0.1)
        assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_in_float32_are_those_of_a_cast(dtype: torch.dtype) -> None:
    """The same bits as of logits that are cast first, whose cast rounds the gradient."""
    logits, index, target = case(dtype)
    options: dict[str, Any] = {"ignore_index": -100, "label_smoothing": 0.1}
    short, *_ = ops.cross_entropy_rows(logits, index, target, None, **options, dtype=torch.float32)
    wide, *_ = ops.cross_entropy_rows(logits.float(), index, target, None, **options)
    assert short.dtype == torch.float32
    assert torch.equal(short, wide)
    grad = torch.randn(short.shape, generator=torch.Generator().manual_seed(7))
    assert torch.equal(*(torch.autograd.grad(loss, logits, grad)[0] for loss in (short, wide)))
    arguments = (logits, index, target, None)
    torch.library.opcheck(ops.cross_entropy_rows.default, arguments, {**options, "dtype": torch.float32})
