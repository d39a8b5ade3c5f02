"""From physical tokens to the rows of the batch, and the sums that lead back.

`sp_compile::unpack`       values [T, ...] -> one copy per row position; a token's gradient is the sum over its rows
`sp_compile::take_tokens`  values [T, V] -> one chosen entry per row position, without a [rows, V] intermediate

Every index is int64 of any shape holding physical tokens, -1 where the row has none (the result is zero there and sends no gradient).
Sums run in the order of row positions, in float32 at least, and are rounded once: a stable sort brings the terms of one sum together,
so no atomic addition decides the order on any device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.numerics import accumulate_dtype, owned

EXACT = (torch.Tag.needs_exact_strides,)


def sum_by_key(values: Tensor, keys: Tensor, count: int) -> Tensor:
    """[count, ...]: sums of `values` [n, ...] over equal `keys` (int64 [n] in [0, count]; terms with key `count` are left out)."""
    if keys.device.type == "cpu":
        # A sequential loop over the terms; the sort would only cost time.
        return values.new_zeros((count + 1, *values.shape[1:])).index_add_(0, keys, values)[:count]
    return sum_by_sorted_key(values, keys, count)


def sum_by_sorted_key(values: Tensor, keys: Tensor, count: int) -> Tensor:
    """`sum_by_key` without atomics and without reading a size back from the device."""
    if values.numel() == 0:
        return values.new_zeros((count, *values.shape[1:]))
    ordered, order = torch.sort(keys, stable=True)
    borders = torch.searchsorted(ordered, torch.arange(count + 2, device=keys.device))
    return torch.segment_reduce(values[order], "sum", offsets=borders, axis=0, unsafe=True, initial=0)[:count]


def sums_at_equal_keys(values: Tensor, keys: Tensor) -> Tensor:
    """[n]: for each term the sum of all terms of `values` [n] whose key (int64 [n]) equals its own, added in order."""
    _, group = torch.unique(keys, return_inverse=True) if keys.device.type == "cpu" else (None, _dense_ranks(keys))
    return sum_by_key(values, group, len(keys))[group]


def _dense_ranks(keys: Tensor) -> Tensor:
    """Like the inverse of `torch.unique`, without reading a size back from the device."""
    ordered, order = torch.sort(keys, stable=True)
    step = torch.cat([ordered.new_zeros(1), (ordered[1:] != ordered[:-1]).to(torch.int64)]).cumsum(0)
    return torch.empty_like(keys).scatter_(0, order, step)


def check_index(index: Tensor, tokens: int, name: str) -> None:
    """Raises InvalidInput unless `index` is int64 with values in [-1, tokens). Off the CPU values are asserted on the device."""
    if index.dtype != torch.int64:
        raise InvalidInput(f"{name}: index must be int64; got {index.dtype}")
    if index.numel() == 0:
        return
    inside = ((index >= -1) & (index < tokens)).all()
    if index.device.type != "cpu":
        torch._assert_async(inside, f"{name}: index outside [-1, {tokens})")
    elif not bool(inside):
        raise InvalidInput(f"{name}: index must lie in [-1, {tokens}); got [{int(index.min())}, {int(index.max())}]")


def _spread(mask: Tensor, dims: int) -> Tensor:
    return mask.view(mask.shape + (1,) * dims)


def _unpack(values: Tensor, index: Tensor) -> Tensor:
    if values.dim() == 0:
        raise InvalidInput("unpack: values must be [T, ...]; got a scalar")
    check_index(index, values.shape[0], "unpack")
    if values.shape[0] == 0:
        return values.new_zeros((*index.shape, *values.shape[1:]))
    # Not a view of a flat gather: what a model returns may be changed in place, which autograd does not allow for a view.
    out = values.new_empty((*index.shape, *values.shape[1:]))
    torch.index_select(values, 0, index.clamp(min=0).flatten(), out=out.view(-1, *values.shape[1:]))
    hidden = index < 0
    if index.device.type != "cpu":
        return out.masked_fill_(_spread(hidden, values.dim() - 1), 0)
    # Touches the hidden positions alone; to count them would stop other devices.
    out[hidden] = 0
    return out


def _unpack_backward(grad: Tensor, index: Tensor, tokens: int) -> Tensor:
    rest = grad.shape[index.dim() :]
    keys = torch.where(index < 0, tokens, index).flatten()
    return sum_by_key(grad.reshape(len(keys), *rest).to(accumulate_dtype(grad.dtype)), keys, tokens).to(grad.dtype)


def _take_tokens(values: Tensor, index: Tensor, target: Tensor) -> Tensor:
    if values.dim() != 2 or index.shape != target.shape:
        shapes = ", ".join(str(list(x.shape)) for x in (values, index, target))
        raise InvalidInput(f"take_tokens: expected values [T, V] and index, target of one shape; got {shapes}")
    check_index(index, values.shape[0], "take_tokens")
    check_target(target, index >= 0, values.shape[1], "take_tokens")
    if values.numel() == 0:
        return values.new_zeros(index.shape)
    hidden = index < 0
    out = values[index.clamp(min=0), target.masked_fill(hidden, 0)]
    return out.masked_fill_(hidden, 0)


def check_target(target: Tensor, counted: Tensor, classes: int, name: str) -> None:
    """Raises IndexError, as torch does, if a counted target lies outside [0, classes). Off the CPU it is asserted on the device."""
    if target.numel() == 0:
        return
    wrong = counted & ((target < 0) | (target >= classes))
    if target.device.type != "cpu":
        torch._assert_async(~wrong.any(), f"{name}: target outside [0, {classes})")
    elif bool(wrong.any()):
        raise IndexError(f"{name}: target {int(target[wrong][0])} is out of bounds for {classes} classes")


def _take_tokens_backward(grad: Tensor, index: Tensor, target: Tensor, tokens: int, classes: int) -> Tensor:
    out = grad.new_zeros((tokens, classes))
    if out.numel() == 0 or index.numel() == 0:
        return out
    hidden = (index < 0).flatten()
    rows, columns = index.flatten().masked_fill(hidden, 0), target.flatten().masked_fill(hidden, 0)
    terms = grad.flatten().to(accumulate_dtype(grad.dtype)).masked_fill(hidden, 0)
    # Positions with one key all write the same sum; a hidden position adds zero to entry (0, 0) and writes that entry's own sum.
    return out.index_put_((rows, columns), sums_at_equal_keys(terms, rows * classes + columns).to(grad.dtype))


unpack = torch.library.custom_op(
    "sp_compile::unpack", _unpack, mutates_args=(), schema="(Tensor values, Tensor index) -> Tensor", tags=EXACT
)
unpack_backward = torch.library.custom_op(
    "sp_compile::unpack_backward",
    _unpack_backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor index, SymInt tokens) -> Tensor",
    tags=EXACT,
)
take_tokens = torch.library.custom_op(
    "sp_compile::take_tokens", _take_tokens, mutates_args=(), schema="(Tensor values, Tensor index, Tensor target) -> Tensor", tags=EXACT
)
take_tokens_backward = torch.library.custom_op(
    "sp_compile::take_tokens_backward",
    _take_tokens_backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor index, Tensor target, SymInt tokens, SymInt classes) -> Tensor",
    tags=EXACT,
)


@unpack.register_fake
def _unpack_fake(values: Tensor, index: Tensor) -> Tensor:
    return values.new_empty((*index.shape, *values.shape[1:]))


@unpack_backward.register_fake
def _unpack_backward_fake(grad: Tensor, index: Tensor, tokens: int) -> Tensor:
    return grad.new_empty((tokens, *grad.shape[index.dim() :]))


@take_tokens.register_fake
def _take_tokens_fake(values: Tensor, index: Tensor, target: Tensor) -> Tensor:
    return values.new_empty(index.shape)


@take_tokens_backward.register_fake
def _take_tokens_backward_fake(grad: Tensor, index: Tensor, target: Tensor, tokens: int, classes: int) -> Tensor:
    return grad.new_empty((tokens, classes))


def _unpack_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    values, index = inputs
    ctx.save_for_backward(index)
    ctx.tokens = values.shape[0]


def _unpack_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (index,) = ctx.saved_tensors
    return torch.ops.sp_compile.unpack_backward(owned(grad), index, ctx.tokens), None


def _take_setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    values, index, target = inputs
    ctx.save_for_backward(index, target)
    ctx.tokens, ctx.classes = values.shape


def _take_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    index, target = ctx.saved_tensors
    return torch.ops.sp_compile.take_tokens_backward(owned(grad), index, target, ctx.tokens, ctx.classes), None, None


unpack.register_autograd(_unpack_autograd, setup_context=_unpack_setup)
take_tokens.register_autograd(_take_autograd, setup_context=_take_setup)
