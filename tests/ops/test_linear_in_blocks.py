"""A linear layer in blocks of a fixed number of rows: equal to the whole one, and a row's bits do not depend on the others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.linear_in_blocks import linear_in_blocks, router_linear


def layer(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x, weight, bias = (torch.randn(size, generator=generator, dtype=dtype) for size in ((1, count, 24), (6, 24), (6,)))
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


@pytest.mark.parametrize("count", [1, 31, 32, 63, 100])
@pytest.mark.parametrize("biased", [True, False])
def test_equals_a_linear_layer(count: int, biased: bool) -> None:
    x, weight, bias = layer(count)
    given = (x, weight, bias) if biased else (x, weight)
    wanted, found = F.linear(*given), router_linear(x, weight, bias if biased else None, 32)
    upstream = torch.sin(torch.arange(wanted.numel(), dtype=wanted.dtype)).view_as(wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for one, other in zip(torch.autograd.grad(found, given, upstream), torch.autograd.grad(wanted, given, upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, weight, bias = (value.detach() for value in layer(150, dtype))
    whole = linear_in_blocks(x[0], weight, bias, 64)
    for start, end in ((0, 7), (3, 150), (140, 150), (64, 65)):
        assert torch.equal(linear_in_blocks(x[0, start:end].contiguous(), weight, bias, 64), whole[start:end])


def test_autocast_casts_as_a_linear_layer() -> None:
    x, weight, bias = layer(40, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = router_linear(x, weight, bias, 32), F.linear(x, weight, bias)
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_replay() -> None:
    x, weight, bias = layer(100)
    runs = []
    for _ in range(3):
        out = linear_in_blocks(x, weight, bias, 32)
        runs.append([out, *torch.autograd.grad(out.square().sum(), (x, weight, bias))])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


def test_op_is_registered_right() -> None:
    torch.library.opcheck(linear_in_blocks, (*layer(40), 32))


def test_wrong_shapes_are_errors() -> None:
    x, weight, bias = layer(4)
    with pytest.raises(InvalidInput, match="linear_in_blocks"):
        linear_in_blocks(x, weight[:, :3], bias, 32)
