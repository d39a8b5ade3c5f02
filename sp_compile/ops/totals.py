"""The reductions of `ops/multiplicity.py` where ranks of a context parallel group hold parts of the tokens: one result on all ranks.

Each function takes what its namesake there takes, and `over = (ranks, group)`. Every rank reduces its own tokens, in the dtype in which
one rank would sum, and the results are added up in the order of ranks and rounded once. Tokens of padding have the count 0. The gradient
of a result is that of a loss which all ranks compute alike (`ops/rank_values.py`); each rank hands it on to its own tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sp_compile.ops import layout_conversion, multiplicity, rank_values  # noqa: F401  (register the ops)
from sp_compile.ops.multiplicity import Dims, _all_dims, _elements, _is_float, _wide, weights

Over = tuple[int, str]


def over_ranks(x: Tensor, over: Over) -> Tensor:
    """The sum over the ranks."""
    total: Tensor = torch.ops.sp_compile.sum_over_ranks(x, *over)
    return total


def _summed(value: Tensor, count: Tensor, pattern: str, dims: Dims, keepdim: bool, over: Over) -> Tensor:
    wide = _wide(value.dtype)
    return over_ranks((value.to(wide) * weights(count, pattern).to(wide)).sum(_all_dims(value, dims), keepdim), over)


def _number(value: Tensor, count: Tensor, index: Tensor | None, pattern: str, dims: Dims, over: Over) -> int | Tensor:
    found = _elements(value, count, index, pattern, dims)
    return over_ranks(found, over) if isinstance(found, Tensor) else found


def _extremes(value: Tensor, name: str, over: Over) -> Tensor:
    """The elementwise greatest or least of all ranks."""
    gathered = torch.ops.sp_compile.gather_tokens(value[None], 0, *over)
    best: Tensor = getattr(torch, name)(gathered, 0)
    return best


def token_sum(
    value: Tensor, count: Tensor, pattern: str, dims: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None, *, over: Over
) -> Tensor:
    """The sum over all tokens."""
    if not _is_float(value.dtype):
        total = over_ranks(multiplicity.token_sum(value, count, pattern, dims, keepdim), over)
        return total if dtype is None else total.to(dtype)
    out = value.dtype if dtype is None else dtype
    return _summed(value.to(out), count, pattern, dims, keepdim, over).to(out)


def token_nansum(
    value: Tensor, count: Tensor, pattern: str, dims: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None, *, over: Over
) -> Tensor:
    """The sum over all tokens, NaN as zero."""
    kept = torch.where(value.isnan(), torch.zeros_like(value), value) if _is_float(value.dtype) else value
    return token_sum(kept, count, pattern, dims, keepdim, dtype, over=over)


def token_mean(
    value: Tensor, count: Tensor, index: Tensor | None, pattern: str, dims: Dims = None, keepdim: bool = False,
    dtype: torch.dtype | None = None, *, over: Over,
) -> Tensor:  # fmt: skip
    """The mean over all tokens."""
    out = value.dtype if dtype is None else dtype
    total = _summed(value.to(out), count, pattern, dims, keepdim, over)
    return (total / _number(value, count, index, pattern, dims, over)).to(out)


def token_var(
    value: Tensor, count: Tensor, index: Tensor | None, pattern: str, dims: Dims = None, correction: float = 1, keepdim: bool = False,
    *, over: Over,
) -> Tensor:  # fmt: skip
    """The variance over all tokens."""
    return _variance(value, count, index, pattern, dims, correction, keepdim, over).to(value.dtype)


def token_std(
    value: Tensor, count: Tensor, index: Tensor | None, pattern: str, dims: Dims = None, correction: float = 1, keepdim: bool = False,
    *, over: Over,
) -> Tensor:  # fmt: skip
    """The standard deviation over all tokens."""
    return _variance(value, count, index, pattern, dims, correction, keepdim, over).sqrt().to(value.dtype)


def _variance(
    value: Tensor, count: Tensor, index: Tensor | None, pattern: str, dims: Dims, correction: float, keepdim: bool, over: Over
) -> Tensor:
    n = _number(value, count, index, pattern, dims, over)
    mean = torch.ops.sp_compile.enter_tokens(_summed(value, count, pattern, dims, True, over) / n, *over)
    left = n - correction
    left = left.clamp(min=0) if isinstance(left, Tensor) else torch.sym_max(left, 0)
    return _summed((value.to(_wide(value.dtype)) - mean).square(), count, pattern, dims, keepdim, over) / left


def token_norm(
    value: Tensor, count: Tensor, pattern: str, order: float = 2.0, dims: Dims = None, keepdim: bool = False, *, over: Over
) -> Tensor:
    """The vector norm over all tokens."""
    if order == 0:
        return token_sum((value != 0).to(value.dtype), count, pattern, dims, keepdim, over=over)
    if math.isinf(order):
        return token_extreme(value.abs(), count, pattern, "amax" if order > 0 else "amin", dims, keepdim, over=over)
    own = multiplicity.token_norm(value.to(_wide(value.dtype)), count, pattern, order, dims, keepdim)
    fixed = own.detach()
    whole = over_ranks(fixed**order, over) ** (1 / order)
    # d whole / d own = (own / whole)^(order - 1), by a term that adds zero; a norm of zero passes nothing on, as on one rank.
    share = torch.where(whole > 0, fixed / torch.where(whole > 0, whole, 1), 0)
    moving = own * torch.where(fixed > 0, share ** (order - 1), 0)
    return (whole + _zero(moving)).to(value.dtype)


def _zero(moving: Tensor) -> Tensor:
    """Zeros with the gradient of `moving`."""
    finite = torch.where(moving.isfinite(), moving, 0)
    return finite - finite.detach()


def token_logsumexp(value: Tensor, count: Tensor, pattern: str, dims: Dims = None, keepdim: bool = False, *, over: Over) -> Tensor:
    """The logarithm of the sum of exponentials over all tokens."""
    wide, every, w = _wide(value.dtype), _all_dims(value, dims), weights(count, pattern)
    seen = torch.where(w > 0, value.detach(), -math.inf).to(wide)
    top = _extremes(torch.amax(seen, every, True), "amax", over)
    top = torch.where(top.isfinite(), top, 0)
    raised = torch.where(w > 0, value.to(wide) - top, -math.inf)
    total = over_ranks((raised.exp() * w.to(wide)).sum(every, keepdim), over)
    return (total.log() + (top if keepdim else top.squeeze(every))).to(value.dtype)


def token_count_nonzero(value: Tensor, count: Tensor, pattern: str, dims: Dims = None, *, over: Over) -> Tensor:
    """The number of elements of all tokens that are not zero, int64."""
    return token_sum(value != 0, count, pattern, dims, over=over)


def token_extreme(value: Tensor, count: Tensor, pattern: str, name: str, dims: Dims = None, keepdim: bool = False, *, over: Over) -> Tensor:
    """`amax`, `amin`, `any` or `all` of all tokens; values that are equally great or small share the gradient evenly."""
    every, real = _all_dims(value, dims), weights(count, pattern) > 0
    if name in ("any", "all"):
        hit = token_sum(value != 0 if name == "any" else value == 0, (count > 0).to(count.dtype), pattern, every, keepdim, over=over)
        found = hit > 0 if name == "any" else hit == 0
        return found.to(torch.uint8) if value.dtype == torch.uint8 else found
    seen = torch.where(real, value.detach(), _farthest(value.dtype, name))
    top = _extremes(getattr(torch, name)(seen, every, True), name, over)
    best = top if keepdim else top.squeeze(every)
    if not _is_float(value.dtype):
        return best
    equal = ((value.detach() == top) & real).to(value.dtype) * weights(count, pattern).to(value.dtype)
    share = equal / over_ranks(equal.sum(every, True), over).clamp(min=1)
    moving = torch.where(share > 0, value, 0) * share
    return torch.where(best.isfinite(), best + _zero(moving.sum(every, keepdim)), best)


def _farthest(dtype: torch.dtype, name: str) -> float | int | bool:
    """What no real value is exceeded by."""
    if dtype == torch.bool:
        return name == "amin"
    if dtype.is_floating_point:
        return -math.inf if name == "amax" else math.inf
    return torch.iinfo(dtype).min if name == "amax" else torch.iinfo(dtype).max


def token_histc(value: Tensor, count: Tensor, pattern: str, bins: int, dtype: torch.dtype, *, over: Over) -> Tensor:
    """How often each integer in [0, bins) occurs; counted in int64, given as `dtype`."""
    return over_ranks(multiplicity.token_histc(value, count, pattern, bins, torch.int64), over).to(dtype)


def token_bincount(value: Tensor, count: Tensor, pattern: str, given: Tensor | None = None, minlength: int = 0, *, over: Over) -> Tensor:
    """`torch.bincount` over all tokens; the greatest value of any rank decides how long."""
    value = torch.where(weights(count, pattern) > 0, value, 0)  # padding must not make it longer
    wide = None if given is None else given.to(torch.float64)
    total: Tensor = torch.ops.sp_compile.sum_counts(multiplicity.token_bincount(value, count, pattern, wide, minlength), *over)
    return total.to(torch.float32) if given is not None and given.dtype == torch.float32 else total


def scattered(name: str, base: Tensor, dim: int, places: Tensor, source: Tensor, *, over: Over, alpha: float = 1) -> Tensor:
    """`base.scatter_add(dim, places, source)`, or `index_add`, of all tokens; `base` counts once."""
    empty = torch.zeros_like(base)
    added = empty.scatter_add(dim, places, source) if name == "scatter_add" else empty.index_add(dim, places, source, alpha=alpha)
    return base + over_ranks(added, over)


def scattered_(name: str, base: Tensor, dim: int, places: Tensor, source: Tensor, *, over: Over, alpha: float = 1) -> Tensor:
    """`scattered` written to `base`, which every rank has."""
    empty = torch.zeros_like(base)
    added = empty.scatter_add(dim, places, source) if name == "scatter_add" else empty.index_add(dim, places, source, alpha=alpha)
    return base.add_(over_ranks(added, over))
