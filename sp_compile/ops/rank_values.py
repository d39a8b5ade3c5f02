"""Values that every rank of a context parallel group holds, and how gradients pass between them and the values of a rank's tokens.

The gradient of a value of a rank's tokens is whole: no other rank has it. A value that all ranks hold has one of two kinds of gradient.
A *part* is what a rank's own tokens give, and the sum over the ranks is the gradient: so it is for parameters. What a loss is made of,
behind a sum over ranks, is computed alike on all of them, and each of them has the *whole* gradient. Where kinds meet stands an op.

`sp_compile::sum_over_ranks` (`ops/layout_conversion.py`)   from tokens to whole: the sum of all ranks; the gradient is passed on
`sp_compile::all_tokens`     from tokens to whole: the values of all ranks side by side; the gradient is that of the own ones
`sp_compile::enter_tokens`   from whole to tokens: the same value; the gradient is the sum of all ranks'
`sp_compile::once_over_ranks`  from parts to whole: the same value; the gradient is a C-th, as each rank will give as much
`sp_compile::own_tokens`     the calling rank's C-th of a dimension; its gradient is placed among zeros (`place_own`), which is a part
`sp_compile::sum_counts`     `sum_over_ranks` of counts [n] where n may be another number on each rank: the longest, without gradient
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sp_compile.ops import layout_conversion
from sp_compile.ops.layout_conversion import EXACT
from sp_compile.ops.numerics import owned
from sp_compile.ops.refined import regather
from sp_compile.ops.tokens import parse


def own_rank(group: str) -> int:
    """The calling process' number in a group that is given by its name."""
    from torch.distributed import distributed_c10d

    resolve: Any = getattr(distributed_c10d, "_resolve_process_group")  # noqa: B009  (torch does not export it)
    return int(resolve(group).rank())


# -- all_tokens ---------------------------------------------------------------------------------------------------------------------


def _all_tokens(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    gathered: Tensor = torch.ops.sp_compile.gather_tokens(x, dim, ranks, group)
    return gathered


def _own_tokens(grad: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    size = grad.shape[dim] // ranks
    return grad.narrow(dim, own_rank(group) * size if ranks > 1 else 0, size).clone(memory_format=torch.contiguous_format)


all_tokens = torch.library.custom_op(
    "sp_compile::all_tokens", _all_tokens, mutates_args=(), schema="(Tensor x, int dim, int ranks, str group) -> Tensor", tags=EXACT
)
own_tokens = torch.library.custom_op(
    "sp_compile::own_tokens", _own_tokens, mutates_args=(), schema="(Tensor grad, int dim, int ranks, str group) -> Tensor", tags=EXACT
)


@all_tokens.register_fake
def _all_tokens_fake(x: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return x.new_empty([size * ranks if d == dim % x.dim() else size for d, size in enumerate(x.shape)])


@own_tokens.register_fake
def _own_tokens_fake(grad: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    return grad.new_empty([size // ranks if d == dim % grad.dim() else size for d, size in enumerate(grad.shape)])


def _place_own(part: Tensor, dim: int, ranks: int, group: str) -> Tensor:
    whole = part.new_zeros([s * ranks if d == dim % part.dim() else s for d, s in enumerate(part.shape)])
    whole.narrow(dim, own_rank(group) * part.shape[dim] if ranks > 1 else 0, part.shape[dim]).copy_(part)
    return whole


place_own = torch.library.custom_op(
    "sp_compile::place_own", _place_own, mutates_args=(), schema="(Tensor part, int dim, int ranks, str group) -> Tensor", tags=EXACT
)
place_own.register_fake(_all_tokens_fake)


def _all_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dim, ctx.ranks, ctx.group = inputs[1:]


def _all_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.sp_compile.own_tokens(owned(grad), ctx.dim, ctx.ranks, ctx.group), None, None, None


def _own_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.sp_compile.place_own(owned(grad), ctx.dim, ctx.ranks, ctx.group), None, None, None


all_tokens.register_autograd(_all_autograd, setup_context=_all_setup)
own_tokens.register_autograd(_own_autograd, setup_context=_all_setup)


# -- between parts and wholes -------------------------------------------------------------------------------------------------------


def _same(x: Tensor, *_: Any) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _same_fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


enter_tokens = torch.library.custom_op(
    "sp_compile::enter_tokens", _same, mutates_args=(), schema="(Tensor x, int ranks, str group) -> Tensor", tags=EXACT
)
enter_tokens.register_fake(_same_fake)
once_over_ranks = torch.library.custom_op(
    "sp_compile::once_over_ranks", _same, mutates_args=(), schema="(Tensor x, int ranks) -> Tensor", tags=EXACT
)
once_over_ranks.register_fake(_same_fake)


def _enter_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.ranks, ctx.group = inputs[1:]


def _enter_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.sp_compile.sum_over_ranks(owned(grad), ctx.ranks, ctx.group), None, None


def _once_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.ranks = inputs[1]


def _once_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad / ctx.ranks, None


enter_tokens.register_autograd(_enter_autograd, setup_context=_enter_setup)
once_over_ranks.register_autograd(_once_autograd, setup_context=_once_setup)


# -- counts of unknown length -------------------------------------------------------------------------------------------------------


def _sum_counts(counts: Tensor, ranks: int, group: str) -> Tensor:
    lengths = layout_conversion._all_gather(counts.new_tensor([counts.shape[0]], dtype=torch.int64), ranks, group)
    padded = counts.new_zeros(int(lengths.max()))
    padded[: counts.shape[0]] = counts
    total: Tensor = torch.ops.sp_compile.sum_over_ranks(padded, ranks, group)
    return total


sum_counts = torch.library.custom_op(
    "sp_compile::sum_counts", _sum_counts, mutates_args=(), schema="(Tensor counts, int ranks, str group) -> Tensor", tags=EXACT
)


@sum_counts.register_fake
def _sum_counts_fake(counts: Tensor, ranks: int, group: str) -> Tensor:
    if isinstance(counts.shape[0], int):
        return counts.new_empty(counts.shape)
    return counts.new_empty([torch.library.get_ctx().new_dynamic_size()])


# -- values of another forest -------------------------------------------------------------------------------------------------------


def fetched(value: Tensor, table: Tensor, send: Tensor, splits: Tensor, received: int, group: str, pattern: str) -> Tensor:
    """`refined.regather` of tokens that other ranks have: one exchange, and the values at the received rows `table` [S], zeros at -1.

    Args:
        value: of the rank's tokens of the coarser forest.
        send, splits, received: see `sp_compile::exchange_rows`.
        pattern: of the value, as in `ops/tokens.py`.
    """
    dims = parse(pattern)
    at = next(place for place, dim in enumerate(dims) if "L" in dim)
    plain = math.prod(int(f) for f in dims[at] if f not in ("B", "L"))
    sizes = [value.shape[at] // plain if f == "L" else 1 if f == "B" else int(f) for f in dims[at]]
    place = at + dims[at].index("L")
    first = value.reshape([*value.shape[:at], *sizes, *value.shape[at + 1 :]]).movedim(place, 0).contiguous()
    sent = first.to(torch.uint8) if first.dtype == torch.bool else first
    rows = torch.ops.sp_compile.exchange_rows(sent, send, splits, received, group).to(value.dtype)
    whole = rows.movedim(0, place).reshape([*value.shape[:at], plain * received, *value.shape[at + 1 :]])
    return regather(whole, table, pattern)
