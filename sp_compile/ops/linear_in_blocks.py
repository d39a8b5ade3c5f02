"""`sp_compile::linear_in_blocks`: a linear layer computed in blocks of a fixed number of rows.

Equal to `F.linear(x, weight, bias)` but for rounding. How a matrix product is cut into tiles, and hence how its sums are rounded, is
chosen by its shape. Here every product has the same one, [rows, K] times [K, N], so that a row's result has the same bits however many
other rows there are. Whole blocks are views of `x` and of the result; the last one is filled up with zeros in memory of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.rows import EXACT


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or rows < 1:
        raise InvalidInput(
            "linear_in_blocks: expected x [..., K], weight [N, K] and rows of at least 1, "
            f"got {list(x.shape)}, {list(weight.shape)}, {rows}"
        )
    flat, turned = x.reshape(-1, x.shape[-1]), weight.t()
    out = x.new_empty(flat.shape[0], weight.shape[0])
    whole = flat.shape[0] - flat.shape[0] % rows
    for start in range(0, whole, rows):
        torch.mm(flat[start : start + rows], turned, out=out[start : start + rows])
    if whole < flat.shape[0]:
        last = flat.new_zeros(rows, flat.shape[1])
        last[: flat.shape[0] - whole] = flat[whole:]
        out[whole:] = (last @ turned)[: flat.shape[0] - whole]
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], weight.shape[0])


linear_in_blocks = torch.library.custom_op(
    "sp_compile::linear_in_blocks",
    _forward,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, int rows) -> Tensor",
    tags=EXACT,
)


@linear_in_blocks.register_fake
def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.biased = bias is not None


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    flat = grad.reshape(-1, grad.shape[-1])
    d_x = grad @ weight if ctx.needs_input_grad[0] else None
    d_weight = flat.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
    return d_x, d_weight, flat.sum(0) if ctx.biased and ctx.needs_input_grad[2] else None, None


linear_in_blocks.register_autograd(_autograd, setup_context=_setup_context)


def router_linear(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """`F.linear(x, weight, bias)` in blocks, cast as a linear layer is under autocast.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N] or None.
        rows: of each block.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    found: Tensor = torch.ops.sp_compile.linear_in_blocks(x, weight, bias, rows)
    return found
