"""Ops that make values out of sizes: constants, ranges, random numbers."""

from __future__ import annotations

from typing import Any

import torch

from sp_compile.analysis.facts import Affine, Constant, Fact, diagonal, held_as
from sp_compile.analysis.layouts import COLUMN, PLACES, ROWS, UNIFORM, Axis, Dims, Kind, Layout, Reason, Span, covers_tokens, size_expr
from sp_compile.analysis.permutations import Count
from sp_compile.analysis.rules.registry import Call, NotPackable, rule


def _dims(call: Call, tensor: torch.Tensor) -> Dims:
    return tuple(call.symbols.dim(size) for size in tensor.shape)


def _made(call: Call, fact: Fact | None) -> Layout:
    dims = _dims(call, call.out)
    layout = Layout(dims, UNIFORM, entry=True, fact=fact)
    if layout.has_spans and (call.symbols.packed or not layout.lacks_last_columns(call.symbols)):
        raise NotPackable("a tensor is made with a size that is neither B, L nor a product of them", dense=layout)
    return layout


@rule("full.default", "full_like.default", "new_full.default")
def full(call: Call) -> Layout:
    value: Any = call.arg("fill_value")
    return _made(call, held_as(Constant(float(value)), call.out.dtype) if isinstance(value, bool | int | float) else None)


@rule("ones.default", "ones_like.default", "new_ones.default")
def ones(call: Call) -> Layout:
    return _made(call, Constant(1.0))


@rule("zeros.default", "zeros_like.default", "new_zeros.default")
def zeros(call: Call) -> Layout:
    return _made(call, Constant(0.0))


@rule(
    "empty.memory_format",
    "empty_like.default",
    "new_empty.default",
    "empty_strided.default",
    "new_empty_strided.default",
    "empty_permuted.default",
)
def empty(call: Call) -> Layout:
    return _made(call, None)


@rule("scalar_tensor.default")
def scalar(call: Call) -> Layout:
    value: Any = call.arg("s")
    return Layout((), UNIFORM, entry=True, fact=Constant(float(value)) if isinstance(value, bool | int | float) else None)


@rule("arange.default", "arange.start", "arange.start_step")
def arange(call: Call) -> Layout:
    """`arange(L)` counts columns, `arange(B)` counts rows; any other range is plain if its length is."""
    out = call.out
    if not call.symbols.mentions(out.shape[0]):
        if any(call.symbols.mentions(call.arg(name)) for name in ("start", "end", "step")):
            raise NotPackable("a range is cut out of the column numbers")
        return Layout(_dims(call, out), UNIFORM, entry=True)
    start, step = call.arg("start", 0), call.arg("step", 1)
    size = size_expr(out.shape[0])
    known = isinstance(start, int) and step == 1 and not out.is_floating_point()
    if size == call.symbols.columns:
        fact = Affine(((0, 1),), start) if known else None
        raise NotPackable("a range numbers physical tokens, not columns", dense=Layout(((Axis.COLUMNS,),), COLUMN, entry=True, fact=fact))
    if size == call.symbols.batch:
        why = Reason("arange(B) numbers the rows, so its values differ between rows")
        fact = Affine(((0, 1),), start, batch=True) if known else None
        raise NotPackable(why.text, dense=Layout(((Axis.BATCH,),), ROWS, entry=True, why=why, fact=fact))
    if covers_tokens(call.symbols.dim(out.shape[0]), call.symbols) and (start, step) == (0, 1) and not out.is_floating_point():
        factors = call.symbols.dim(out.shape[0])
        return Layout((factors,), PLACES, fact=Count(factors))
    cut = Layout(((Span(size),),), COLUMN, entry=True)
    if known and cut.lacks_last_columns(call.symbols) and not call.symbols.packed:
        cut = cut.with_(fact=Affine(((0, 1),), start))
    raise NotPackable("a range over a mixture of rows and columns", dense=cut if not _rows(call) else None)


def _rows(call: Call) -> bool:
    return call.symbols.batch in size_expr(call.out.shape[0]).free_symbols


@rule("eye.default", "eye.m")
def eye(call: Call) -> Layout:
    dims = _dims(call, call.out)
    if not any(call.symbols.mentions(s) for s in call.out.shape):
        return Layout(dims, UNIFORM, entry=True)
    known = Layout(dims, COLUMN, entry=True, fact=held_as(diagonal(0, 1), call.out.dtype))
    raise NotPackable("an identity matrix over tokens", dense=known if known.is_pairs and known.lacks_last_columns(call.symbols) else None)


@rule("embedding.default")
def embedding(call: Call) -> Layout:
    weight, indices = call.layout_of(call.args[0]), call.layout_of(call.args[1])
    if weight.has_tokens or weight.reach.kind > Kind.UNIFORM:
        raise NotPackable("an embedding table that depends on tokens")
    if call.arg("scale_grad_by_freq"):
        raise NotPackable("scale_grad_by_freq counts how often a token occurs in the batch", advice="Set scale_grad_by_freq=False.")
    reach, _ = call.joined()
    return Layout((*indices.dims, weight.dims[-1]), reach, entry=False)
