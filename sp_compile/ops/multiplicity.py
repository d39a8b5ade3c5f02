"""Reductions over tokens in which each physical token counts as often as rows pass through it.

Every function takes a packed value, `count` (int64 [T]) and the value's pattern (`ops/tokens.py`): the dimensions of the dense value, of
which those that hold tokens are all reduced. With w the count of each element's token,

    sum            sum_i w_i x_i                     norm(p)        (sum_i w_i |x_i|^p)^(1/p)
    mean           sum_i w_i x_i / n                 logsumexp      log sum_i w_i exp(x_i)
    var            sum_i w_i (x_i - mean)^2 / (n - correction)

where n is the number of elements of the dense value, or `sum_i w_i` where no `index` [B, L] says how many there are. Integers are summed
in int64, float32 and float64 in float64, half types in float32; each result is rounded once. `any`, `all` and `count_nonzero` follow from
these; of greatest and least values only the gradient is weighted, which dense values that are equal share evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sp_compile.ops.tokens import parse

Dims = Sequence[int] | None


def weights(count: Tensor, pattern: str) -> Tensor:
    """The counts laid out like a packed value of this pattern, with size 1 where it has no tokens."""
    tokens = count.shape[0]
    shape: list[int] = []
    full: list[int] = []
    dims: list[int] = []
    for dim in parse(pattern):
        if "L" not in dim and "B" not in dim:
            shape, full, dims = [*shape, 1], [*full, 1], [*dims, 1]
            continue
        plain = [1 if f in ("B", "L") else int(f) for f in dim]
        shape += [tokens if f == "L" else 1 for f in dim]
        full += [tokens if f == "L" else size for f, size in zip(dim, plain, strict=True)]
        dims.append(math.prod(plain) * (tokens if "L" in dim else 1))
    return count.view(shape).expand(full).reshape(dims)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point


def _all_dims(value: Tensor, dims: Dims) -> list[int]:
    return list(range(value.dim())) if dims is None else [d % value.dim() for d in dims]


def _elements(value: Tensor, count: Tensor, index: Tensor | None, pattern: str, dims: Dims) -> int | Tensor:
    """n: how many elements of the dense value are reduced to one."""
    plain: int = 1
    for place, dim in enumerate(parse(pattern)):
        if place in _all_dims(value, dims):
            named = "B" in dim or "L" in dim
            plain = plain * (math.prod(int(f) for f in dim if f not in ("B", "L")) if named else value.shape[place])
    return plain * (index.shape[0] * index.shape[1] if index is not None else count.sum())


def token_sum(
    value: Tensor, count: Tensor, pattern: str, dims: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """`value.sum(dims, keepdim, dtype=dtype)` of the dense value."""
    every, w = _all_dims(value, dims), weights(count, pattern)
    if not _is_float(value.dtype):
        total = (value.to(torch.int64) * w).sum(every, keepdim)
        return total if dtype is None else total.to(dtype)
    out = value.dtype if dtype is None else dtype
    wide = _wide(out)
    return (value.to(out).to(wide) * w.to(wide)).sum(every, keepdim).to(out)


def token_nansum(
    value: Tensor, count: Tensor, pattern: str, dims: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """`value.nansum(...)` of the dense value."""
    kept = torch.where(value.isnan(), torch.zeros_like(value), value) if _is_float(value.dtype) else value
    return token_sum(kept, count, pattern, dims, keepdim, dtype)


def token_mean(
    value: Tensor,
    count: Tensor,
    index: Tensor | None,
    pattern: str,
    dims: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`value.mean(dims, keepdim, dtype=dtype)` of the dense value."""
    out = value.dtype if dtype is None else dtype
    wide = _wide(out)
    total = (value.to(out).to(wide) * weights(count, pattern).to(wide)).sum(_all_dims(value, dims), keepdim)
    return (total / _elements(value, count, index, pattern, dims)).to(out)


def _moments(
    value: Tensor, count: Tensor, index: Tensor | None, pattern: str, dims: Dims, correction: float, keepdim: bool
) -> tuple[Tensor, Tensor]:
    every, wide = _all_dims(value, dims), _wide(value.dtype)
    w, x, n = weights(count, pattern).to(wide), value.to(wide), _elements(value, count, index, pattern, dims)
    mean = (x * w).sum(every, keepdim=True) / n
    left = n - correction
    left = left.clamp(min=0) if isinstance(left, Tensor) else torch.sym_max(left, 0)
    var = ((x - mean).square() * w).sum(every, keepdim) / left
    return var, mean if keepdim else mean.squeeze(every)


def token_var(
    value: Tensor, count: Tensor, index: Tensor | None, pattern: str, dims: Dims = None, correction: float = 1, keepdim: bool = False
) -> Tensor:
    """`value.var(dims, correction=correction, keepdim=keepdim)` of the dense value."""
    return _moments(value, count, index, pattern, dims, correction, keepdim)[0].to(value.dtype)


def token_std(
    value: Tensor, count: Tensor, index: Tensor | None, pattern: str, dims: Dims = None, correction: float = 1, keepdim: bool = False
) -> Tensor:
    """`value.std(dims, correction=correction, keepdim=keepdim)` of the dense value."""
    return _moments(value, count, index, pattern, dims, correction, keepdim)[0].sqrt().to(value.dtype)


def token_norm(value: Tensor, count: Tensor, pattern: str, order: float = 2.0, dims: Dims = None, keepdim: bool = False) -> Tensor:
    """The vector norm of the dense value, `torch.linalg.vector_norm(value, order, dims, keepdim)`."""
    every, wide = _all_dims(value, dims), _wide(value.dtype)
    if order == 0:
        return token_sum((value != 0).to(value.dtype), count, pattern, every, keepdim)
    if math.isinf(order):
        return token_extreme(value.abs(), count, pattern, "amax" if order > 0 else "amin", every, keepdim)
    scaled = value.to(wide) * weights(count, pattern).to(wide) ** (1 / order)
    found: Tensor = torch.linalg.vector_norm(scaled, order, every, keepdim)
    return found.to(value.dtype)


def token_logsumexp(value: Tensor, count: Tensor, pattern: str, dims: Dims = None, keepdim: bool = False) -> Tensor:
    """`value.logsumexp(dims, keepdim)` of the dense value."""
    wide = _wide(value.dtype)
    raised = value.to(wide) + weights(count, pattern).to(wide).log()
    return torch.logsumexp(raised, _all_dims(value, dims), keepdim).to(value.dtype)


def token_count_nonzero(value: Tensor, count: Tensor, pattern: str, dims: Dims = None) -> Tensor:
    """`value.count_nonzero(dims)` of the dense value, int64."""
    return token_sum(value != 0, count, pattern, dims)


def token_extreme(value: Tensor, count: Tensor, pattern: str, name: str, dims: Dims = None, keepdim: bool = False) -> Tensor:
    """`amax`, `amin`, `any` or `all` of the dense value."""
    every = _all_dims(value, dims)
    if name in ("any", "all"):
        hit = token_sum(value != 0 if name == "any" else value == 0, (count > 0).to(count.dtype), pattern, every, keepdim)
        found = hit > 0 if name == "any" else hit == 0
        return found.to(torch.uint8) if value.dtype == torch.uint8 else found
    best: Tensor = getattr(torch, name)(value.detach(), every, keepdim)
    if not _is_float(value.dtype):
        return best
    top: Tensor = getattr(torch, name)(value.detach(), every, True)
    share = (value == top).to(value.dtype) * weights(count, pattern).to(value.dtype)
    share = share / share.sum(every, True)
    moving = torch.where(share > 0, value, 0) * share
    moving = torch.where(moving.isfinite(), moving, 0).sum(every, keepdim)
    # adds zero to the value and passes the gradient on
    return torch.where(best.isfinite(), best + (moving - moving.detach()), best)


def token_histc(value: Tensor, count: Tensor, pattern: str, bins: int, dtype: torch.dtype) -> Tensor:
    """`histc` of a dense value of integers in [0, bins), bin i for the integer i; counted in int64, given as `dtype`."""
    w = weights(count, pattern).expand(value.shape).reshape(-1)
    return w.new_zeros(bins).index_add(0, value.reshape(-1).to(torch.int64), w).to(dtype)


def token_bincount(value: Tensor, count: Tensor, pattern: str, given: Tensor | None = None, minlength: int = 0) -> Tensor:
    """`torch.bincount(value, given, minlength)` of the dense value [n] and its weights."""
    w = weights(count, pattern).to(torch.float64)  # exact up to 2^53
    if given is None:
        return torch.bincount(value, w, minlength).to(torch.int64)
    kept = given.dtype if given.dtype == torch.float32 else torch.float64
    return torch.bincount(value, w * given, minlength).to(kept)


def weighted(source: Tensor | float, like: Tensor, count: Tensor, pattern: str, dtype: torch.dtype) -> Tensor:
    """What a scattered sum adds: `source`, packed or one number, times the counts, in the shape of a packed value of this pattern."""
    w = weights(count, pattern)
    if isinstance(source, Tensor):
        wide = _wide(dtype) if _is_float(dtype) else torch.int64
        return (source.to(wide) * w.to(wide)).to(dtype)
    return (w * int(source) if float(source).is_integer() else w.to(torch.float64) * source).to(dtype).expand(like.shape)
