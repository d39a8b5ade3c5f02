"""What travels between the ranks of a context parallel group, as ops with gradients.

`sp_compile::convert_layout`   every row to its rank and place in another layout of the pack: one all-to-all. The gradient goes the way back
`sp_compile::gather_tokens`    the values of all ranks, in the order of ranks. The gradient is the sum of all ranks' gradients
`sp_compile::exchange_rows`    chosen rows of other ranks. The gradient of a row is the sum over those who read it
`sp_compile::sum_over_ranks`   the sum, on every rank; its gradient is that of one rank, see there

Sums of ranks are formed in the order of ranks, in float32 at least, and rounded once, so that they do not depend on how a library reduces.
Split sizes are an int64 tensor [2, members] on the CPU (rows sent, rows received): reading them waits for no device. A group is given by
its name; every rank must call the same ops in the same order, forward and backward. One member sends nothing and needs no group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput, StaleRoute
from sp_compile.ops.numerics import accumulate_dtype, owned
from sp_compile.ops.rows import sum_by_key

EXACT = (torch.Tag.needs_exact_strides,)


def _functional() -> Any:
    # Not at import: builds of torch without distributed have no such ops.
    import torch.distributed._functional_collectives

    return torch.ops._c10d_functional


def _all_to_all(rows: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
    """[sum of receive, ...]: `send[g]` rows to member g, `receive[g]` rows from it, in order."""
    if len(send) == 1:
        return rows
    ops = _functional()
    received: Tensor = ops.wait_tensor(ops.all_to_all_single(rows.contiguous(), receive, send, group))
    return received


def _all_gather(rows: Tensor, ranks: int, group: str) -> Tensor:
    """[ranks * n, ...] for rows [n, ...] of every rank."""
    if ranks == 1:
        return rows
    ops = _functional()
    # Not every library sends bools.
    sent = rows.contiguous().view(torch.uint8) if rows.dtype == torch.bool else rows.contiguous()
    gathered: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(sent, ranks, group))
    return gathered.view(rows.dtype)


def _ordered_sum(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the first dimension, first to last, rounded to `dtype` at the end."""
    exact = not dtype.is_floating_point
    total = parts[0].to(dtype if exact else accumulate_dtype(dtype), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def read_splits(splits: Tensor, op: str) -> tuple[list[int], list[int]]:
    """Rows to send to, and to receive from, each member. Raises StaleRoute unless `splits` is int64 [2, members] on the CPU."""
    if splits.device.type != "cpu" or splits.dtype != torch.int64 or splits.dim() != 2 or splits.shape[0] != 2:
        given = f"{splits.dtype} {list(splits.shape)} on {splits.device}"
        raise StaleRoute(f"{op}: expected split sizes int64 [2, members] on the CPU, as plans hold them; got {given}")
    send, receive = splits.tolist()
    return send, receive


def _check_rows(op: str, what: str, given: int, wanted: int) -> None:
    if given != wanted:
        raise StaleRoute(f"{op}: the plan is for {wanted} {what}, the values have {given}; make the plan of this batch")


# -- convert_layout -----------------------------------------------------------------------------------------------------------------


def _convert_layout(
    x: Tensor, send: Tensor, place: Tensor, send_back: Tensor, place_back: Tensor, splits: Tensor, dim: int, group: str, inverse: bool
) -> Tensor:
    sizes = read_splits(splits, "convert_layout")
    if inverse:
        send, place, sizes = send_back, place_back, sizes[::-1]
    _check_rows("convert_layout", "rows", x.shape[dim], send.shape[0])
    _check_rows("convert_layout", "rows to send", send.shape[0], sum(sizes[0]))
    _check_rows("convert_layout", "rows to receive", place.shape[0], sum(sizes[1]))
    rows = x.movedim(dim, 0).index_select(0, send)
    return _all_to_all(rows, *sizes, group).index_select(0, place).movedim(0, dim).contiguous()


convert_layout = torch.library.custom_op(
    "sp_compile::convert_layout",
    _convert_layout,
    mutates_args=(),
    schema="(Tensor x, Tensor send, Tensor place, Tensor send_back, Tensor place_back, Tensor splits, int dim, str group, "
    "bool inverse) -> Tensor",
    tags=EXACT,
)


@convert_layout.register_fake
def _convert_layout_fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def _convert_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:6])
    ctx.dim, ctx.group, ctx.inverse = inputs[6:]


def _convert_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    back = torch.ops.sp_compile.convert_layout(owned(grad), *ctx.saved_tensors, ctx.dim, ctx.group, not ctx.inverse)
    return (back, *[None] * 8)


convert_layout.register_autograd(_convert_autograd, setup_context=_convert_setup)


# -- gather_tokens ------------------------------------------------------------------------------------------------------------------


def _gather_tokens(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    gathered = _all_gather(x.movedim(dim, 0), ranks, group).movedim(0, dim)
    return gathered.clone(memory_format=torch.contiguous_format)


def _gather_tokens_backward(grad: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    rows = grad.movedim(dim, 0)
    if rows.shape[0] % ranks:
        raise InvalidInput(f"gather_tokens: expected a multiple of {ranks} tokens, got {rows.shape[0]}")
    size = rows.shape[0] // ranks
    parts = _all_to_all(rows, [size] * ranks, [size] * ranks, group).reshape(ranks, size, *rows.shape[1:])
    return _ordered_sum(parts, grad.dtype).movedim(0, dim).clone(memory_format=torch.contiguous_format)


gather_tokens = torch.library.custom_op(
    "sp_compile::gather_tokens",
    _gather_tokens,
    mutates_args=(),
    schema="(Tensor x, int dim, int ranks, str group) -> Tensor",
    tags=EXACT,
)
gather_tokens_backward = torch.library.custom_op(
    "sp_compile::gather_tokens_backward",
    _gather_tokens_backward,
    mutates_args=(),
    schema="(Tensor grad, int dim, int ranks, str group) -> Tensor",
    tags=EXACT,
)


@gather_tokens.register_fake
def _gather_tokens_fake(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return x.new_empty([size * ranks if d == dim % x.dim() else size for d, size in enumerate(x.shape)])


@gather_tokens_backward.register_fake
def _gather_tokens_backward_fake(grad: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return grad.new_empty([size // ranks if d == dim % grad.dim() else size for d, size in enumerate(grad.shape)])


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dim, ctx.ranks, ctx.group = inputs[1:]


def _gather_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.sp_compile.gather_tokens_backward(owned(grad), ctx.dim, ctx.ranks, ctx.group), None, None, None


gather_tokens.register_autograd(_gather_autograd, setup_context=_gather_setup)


# -- exchange_rows ------------------------------------------------------------------------------------------------------------------


def _exchange_rows(x: Tensor, send: Tensor, splits: Tensor, received: int, group: str) -> Tensor:
    out, back = read_splits(splits, "exchange_rows")
    _check_rows("exchange_rows", "rows to send", send.shape[0], sum(out))
    _check_rows("exchange_rows", "rows to receive", received, sum(back))
    return _all_to_all(x.index_select(0, send), out, back, group)


def _exchange_rows_backward(grad: Tensor, send: Tensor, splits: Tensor, rows: int, group: str) -> Tensor:
    out, back = read_splits(splits, "exchange_rows")
    terms = _all_to_all(grad, back, out, group)
    return sum_by_key(terms.to(accumulate_dtype(grad.dtype)), send, rows).to(grad.dtype)


exchange_rows = torch.library.custom_op(
    "sp_compile::exchange_rows",
    _exchange_rows,
    mutates_args=(),
    schema="(Tensor x, Tensor send, Tensor splits, SymInt received, str group) -> Tensor",
    tags=EXACT,
)
exchange_rows_backward = torch.library.custom_op(
    "sp_compile::exchange_rows_backward",
    _exchange_rows_backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor send, Tensor splits, SymInt rows, str group) -> Tensor",
    tags=EXACT,
)


@exchange_rows.register_fake
def _exchange_rows_fake(x: Tensor, send: Tensor, splits: Tensor, received: int, group: str) -> Tensor:
    return x.new_empty((received, *x.shape[1:]))


@exchange_rows_backward.register_fake
def _exchange_rows_backward_fake(grad: Tensor, send: Tensor, splits: Tensor, rows: int, group: str) -> Tensor:
    return grad.new_empty((rows, *grad.shape[1:]))


def _exchange_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])
    ctx.rows, ctx.group = inputs[0].shape[0], inputs[4]


def _exchange_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    back = torch.ops.sp_compile.exchange_rows_backward(owned(grad), *ctx.saved_tensors, ctx.rows, ctx.group)
    return back, None, None, None, None


exchange_rows.register_autograd(_exchange_autograd, setup_context=_exchange_setup)


# -- sum_over_ranks -----------------------------------------------------------------------------------------------------------------


def _sum_over_ranks(x: Tensor, ranks: int, group: str) -> Tensor:
    return _ordered_sum(_all_gather(x[None], ranks, group), x.dtype)


sum_over_ranks = torch.library.custom_op(
    "sp_compile::sum_over_ranks", _sum_over_ranks, mutates_args=(), schema="(Tensor x, int ranks, str group) -> Tensor", tags=EXACT
)


@sum_over_ranks.register_fake
def _sum_over_ranks_fake(x: Tensor, ranks: int, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _sum_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad, None, None


sum_over_ranks.register_autograd(_sum_autograd)
