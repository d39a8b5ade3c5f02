"""Reductions, scans, sorts and normalisations: packable along plain dimensions only."""

from __future__ import annotations

from typing import Any

import torch

from sp_compile.analysis.facts import Affine, Constant
from sp_compile.analysis.layouts import COLUMN, Axis, Dim, Kind, Layout
from sp_compile.analysis.rules.registry import Call, NotPackable, require_no_rows, require_plain, rule


def _asked_dims(call: Call, rank: int) -> list[int]:
    asked: Any = call.arg("dim")
    if asked is None:
        return list(range(rank))
    dims = asked if isinstance(asked, list | tuple) else [asked]
    return [int(d) % max(rank, 1) for d in dims] or list(range(rank))


@rule(
    "sum.default",
    "sum.dim_IntList",
    "mean.default",
    "mean.dim",
    "amax.default",
    "amin.default",
    "max.default",
    "min.default",
    "max.dim",
    "min.dim",
    "prod.default",
    "prod.dim_int",
    "var.default",
    "var.dim",
    "var.correction",
    "std.default",
    "std.dim",
    "std.correction",
    "var_mean.correction",
    "var_mean.default",
    "linalg_vector_norm.default",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "logsumexp.default",
    "any.default",
    "any.dim",
    "any.dims",
    "all.dim",
    "all.dims",
    "count_nonzero.default",
    "count_nonzero.dim_IntList",
    "median.default",
    "median.dim",
    "nansum.default",
    "aminmax.default",
    "std_mean.correction",
    "mode.default",
    "kthvalue.default",
    "nanmedian.default",
)
def reduce(call: Call) -> list[Layout]:
    base = call.layout_of(call.tensors[0])
    rank = len(base.dims)
    dims = _asked_dims(call, rank)
    touched = [d for d in dims if base.token_dim(d)]
    if touched:
        name = call.func._schema.name.split("::")[1]
        raise NotPackable(f"{name} over dimension {touched[0]} reduces over tokens")
    require_no_rows(call, call.tensors[0], dims, call.func._schema.name.split("::")[1])
    keepdim = bool(call.arg("keepdim", False))
    after: tuple[Dim, ...] = tuple(() if d in dims else old for d, old in enumerate(base.dims) if keepdim or d not in dims)
    return [call.result(after) for _ in call.outputs]


@rule(
    "_softmax.default",
    "_log_softmax.default",
    "softmax.int",
    "log_softmax.int",
    "cumprod.default",
    "logcumsumexp.default",
    "cummax.default",
    "cummin.default",
)
def along_dimension(call: Call) -> list[Layout]:
    base = call.layout_of(call.tensors[0])
    require_plain(call, call.tensors[0], [call.dim("dim", len(base.dims), -1)], call.func._schema.name.split("::")[1])
    return [call.result(base.dims) for _ in call.outputs]


@rule("renorm.default")
def renorm(call: Call) -> Layout:
    """Rescales each slice along one dimension by its norm over all the others."""
    base = call.layout_of(call.tensors[0])
    kept = call.dim("dim", len(base.dims))
    require_plain(call, call.tensors[0], [d for d in range(len(base.dims)) if d != kept], "renorm")
    return call.result(base.dims)


def cumsum(call: Call) -> Layout:
    """Along columns a running sum is still a function of the columns so far, rounded alike; only cheap entry values may run it densely."""
    base = call.layout_of(call.tensors[0])
    dim = call.dim("dim", len(base.dims))
    if not base.token_dim(dim):
        require_no_rows(call, call.tensors[0], [dim], "cumsum")
        return call.result(base.dims)
    known = base.dims[dim] == (Axis.COLUMNS,) and len(base.column_like) == 1 and base.reach.kind <= Kind.TOKENS
    counts = base.fact == Constant(1.0) and call.out.dtype in (torch.int32, torch.int64, torch.float32, torch.float64)
    fact = Affine(((dim, 1),), 1) if counts else None
    dense = Layout(base.dims, base.reach.join(COLUMN), entry=base.entry, fact=fact) if known else None
    raise NotPackable("cumsum runs along the columns", dense=dense)


def topk(call: Call) -> list[Layout]:
    base = call.layout_of(call.tensors[0])
    dim = call.dim("dim", len(base.dims), -1)
    require_plain(call, call.tensors[0], [dim], "topk")
    dims = tuple(call.symbols.dim(call.out.shape[dim]) if d == dim else old for d, old in enumerate(base.dims))
    return [call.result(dims) for _ in call.outputs]


@rule("native_layer_norm.default", "_fused_rms_norm.default", "rms_norm.default", "layer_norm.default")
def trailing_norm(call: Call) -> list[Layout]:
    base = call.layout_of(call.tensors[0])
    count = len(call.arg("normalized_shape"))
    require_plain(call, call.tensors[0], range(len(base.dims) - count, len(base.dims)), "a normalisation")
    result = []
    for output in call.outputs:
        lead = base.dims[: len(base.dims) - count]
        result.append(call.result((*lead, *(base.dims[len(lead) :] if output.shape[-1:] == call.tensors[0].shape[-1:] else ((),) * count))))
    return result


@rule("native_group_norm.default")
def group_norm(call: Call) -> list[Layout]:
    base = call.layout_of(call.tensors[0])
    require_plain(call, call.tensors[0], range(1, len(base.dims)), "group_norm")
    groups = call.arg("group")
    statistics: tuple[Dim, ...] = (base.dims[0], () if groups == 1 else (groups,))
    return [call.result(base.dims), call.result(statistics), call.result(statistics)]


@rule(
    "native_batch_norm.default",
    "_native_batch_norm_legit.default",
    "_native_batch_norm_legit_functional.default",
    "cudnn_batch_norm.default",
    "_batch_norm_with_update.default",
    "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit_no_training.default",
)
def batch_norm(call: Call) -> list[Layout]:
    base = call.layout_of(call.tensors[0])
    if base.has_tokens:
        raise NotPackable("batch normalisation mixes all tokens of the batch", advice="Use layer or RMS normalisation.")
    return [call.result(tuple(call.symbols.dim(s) for s in out.shape)) for out in call.outputs]


@rule(
    "bincount.default",
    "unique.default",
    "_unique2.default",
    "masked_select.default",
    "dot.default",
    "vdot.default",
    "trace.default",
    "is_nonzero.default",
    "equal.default",
)
def whole_tensor(call: Call) -> list[Layout]:
    """Ops that look at every element at once."""
    if any(call.layout_of(t).has_tokens for t in call.tensors):
        raise NotPackable(f"{call.func._schema.name.split('::')[1]} looks at all tokens at once")
    return [call.result(tuple(call.symbols.dim(s) for s in out.shape)) for out in call.outputs]


@rule("_local_scalar_dense.default")
def to_number(call: Call) -> list[Layout]:
    """A number read out of a tensor: only values that no token reaches may steer a packed graph."""
    layout = call.layout_of(call.tensors[0])
    if layout.reach.kind > Kind.UNIFORM and not isinstance(layout.fact, Constant):
        raise NotPackable("a number is read out of token values", advice="Keep the value as a tensor.")
    return []
