"""Row conversions: values, sums over rows, dropped positions, order of addition."""

from __future__ import annotations

import pytest
import torch

from sp_compile.errors import InvalidInput
from sp_compile.ops import rows
from tests.ops.forests import random_forest, tensors

ops = torch.ops.sp_compile


def case(seed: int = 0, dtype: torch.dtype = torch.float64, width: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    tree = random_forest(seed)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tree.num_tokens, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return values, tensors(tree)[2]


def test_unpack_gathers_and_drops() -> None:
    values, index = case()
    out = ops.unpack(values, index)
    assert out.shape == (*index.shape, 5)
    assert (out[index < 0] == 0).all()
    assert torch.equal(out[index >= 0], values[index[index >= 0]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
def test_unpack_takes_integers(dtype: torch.dtype) -> None:
    _, index = case()
    values = torch.arange(int(index.max()) + 1).remainder(2).to(dtype)
    out = ops.unpack(values, index)
    assert out.dtype == dtype
    assert torch.equal(out[index >= 0], values[index[index >= 0]])


def test_unpack_gradient_is_the_sum_over_rows() -> None:
    values, index = case()
    assert torch.autograd.gradcheck(ops.unpack, (values, index))
    (count,) = torch.autograd.grad(ops.unpack(values, index).sum(), values)
    assert torch.equal(count[:, 0], torch.bincount(index[index >= 0], minlength=len(values)).double())


def test_unpack_rounds_a_sum_once() -> None:
    # 256 + 1 is not a bfloat16 number, so adding ones in bfloat16 would stop at 256.
    index = torch.zeros(1000, 1, dtype=torch.int64)
    grad = ops.unpack_backward(torch.ones(1000, 1, 2, dtype=torch.bfloat16), index, 1)
    assert torch.equal(grad, torch.full((1, 2), 1000, dtype=torch.bfloat16))


def test_sorted_sum_equals_sequential_sum_in_bits() -> None:
    values, index = case(dtype=torch.float32)
    grad = torch.randn(index.numel(), 5) * torch.logspace(-4, 4, index.numel())[:, None]
    keys = torch.where(index < 0, len(values), index).flatten()
    assert torch.equal(rows.sum_by_sorted_key(grad, keys, len(values)), rows.sum_by_key(grad, keys, len(values)))
    assert torch.equal(rows._dense_ranks(keys), torch.unique(keys, return_inverse=True)[1])


def test_take_tokens_picks_and_drops() -> None:
    values, index = case(width=7)
    target = torch.randint(0, 7, index.shape, generator=torch.Generator().manual_seed(0))
    target[index < 0] = -100
    out = ops.take_tokens(values, index, target)
    keep = index >= 0
    assert torch.equal(out[keep], values[index[keep], target[keep]])
    assert (out[~keep] == 0).all()
    assert torch.autograd.gradcheck(lambda x: ops.take_tokens(x, index, target), (values,))


def test_take_tokens_sums_equal_choices_once_rounded() -> None:
    index = torch.zeros(1000, dtype=torch.int64)
    index[::4] = -1
    target = torch.zeros(1000, dtype=torch.int64)
    grad = ops.take_tokens_backward(torch.ones(1000, dtype=torch.bfloat16), index, target, 2, 3)
    assert grad[0, 0] == 752  # 750 rounded to bfloat16
    assert grad.count_nonzero() == 1


def test_out_of_range_is_refused() -> None:
    values, index = case()
    with pytest.raises(InvalidInput, match=r"must lie in \[-1, "):
        ops.unpack(values, index + len(values))
    with pytest.raises(InvalidInput, match="must lie"):
        ops.unpack(values, index - 1)
    with pytest.raises(InvalidInput, match="int64"):
        ops.unpack(values, index.int())
    with pytest.raises(InvalidInput, match="one shape"):
        ops.take_tokens(values, index, index[:1])
    with pytest.raises(IndexError, match="target 5"):
        ops.take_tokens(values, index, torch.full_like(index, 5))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 4)])
def test_without_tokens_or_positions(shape: tuple[int, ...]) -> None:
    values = torch.zeros(0, 3, requires_grad=True)
    index = torch.full(shape, -1)
    out = ops.unpack(values, index)
    assert out.shape == (*shape, 3)
    assert torch.autograd.grad(out.sum(), values)[0].shape == (0, 3)
    taken = ops.take_tokens(values, index, index)
    assert taken.shape == shape
    assert torch.autograd.grad(taken.sum(), values)[0].shape == (0, 3)


def test_opcheck() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        values, index = case(dtype=dtype)
        torch.library.opcheck(ops.unpack.default, (values, index))
        torch.library.opcheck(ops.take_tokens.default, (values, index, index.remainder(5)))


def test_replays_bit_for_bit() -> None:
    values, index = case(dtype=torch.float32)
    grad = torch.randn(*index.shape, 5)
    first = ops.unpack_backward(grad, index, len(values))
    assert all(torch.equal(first, ops.unpack_backward(grad, index, len(values))) for _ in range(3))
