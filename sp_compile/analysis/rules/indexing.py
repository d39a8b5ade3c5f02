"""Gathers and scatters: packable when the indexed dimension is plain; indexing by token position is not."""

from __future__ import annotations

from typing import Any

import torch

from sp_compile.analysis.facts import Affine
from sp_compile.analysis.layouts import Axis, Dim, Kind, Layout, Span
from sp_compile.analysis.rules.registry import Call, NotPackable, broadcast, require_no_rows, require_plain, rule


def gather(call: Call) -> Layout:
    base, index = call.layout_of(call.args[0]), call.layout_of(call.args[2])
    dim = call.dim("dim", len(base.dims))
    require_plain(call, call.args[0], [dim], "gather")
    dims = _together(base, index, dim)
    return call.result(dims)


@rule("scatter.value", "scatter_reduce.two", "scatter.reduce")
def scatter(call: Call) -> Layout:
    base, index = call.layout_of(call.args[0]), call.layout_of(call.args[2])
    dim = call.dim("dim", len(base.dims))
    for tensor in (call.args[0], *(t for t in call.tensors[1:] if t.dim() == len(base.dims))):
        require_plain(call, tensor, [dim], "scatter")
    _together(base, index, dim)
    return call.result(base.dims)


def _together(base: Layout, index: Layout, dim: int) -> tuple[Dim, ...]:
    result: list[Dim] = []
    for place, wanted in enumerate(index.dims):
        if place != dim and wanted != base.dims[place]:
            raise NotPackable("an index selects from other tokens than its own")
        result.append(wanted)
    return tuple(result)


def index_select(call: Call) -> Layout:
    base, index = call.layout_of(call.args[0]), call.layout_of(call.args[2])
    dim = call.dim("dim", len(base.dims))
    require_plain(call, call.args[0], [dim], "index_select")
    return call.result((*base.dims[:dim], index.dims[0] if index.dims else (), *base.dims[dim + 1 :]))


def index(call: Call) -> Layout:
    """`table[i]` with plain table dimensions is elementwise in i; `x[rows, columns]` by counted numbers is a view of full rows."""
    base = call.layout_of(call.args[0])
    indices: list[Any] = list(call.args[1])
    indices += [None] * (len(base.dims) - len(indices))
    used = [d for d, i in enumerate(indices) if i is not None]
    if any(indices[d].dtype in (torch.bool, torch.uint8) for d in used):
        if any(call.layout_of(indices[d]).has_tokens for d in used) or any(base.token_dim(d) for d in used):
            raise NotPackable("a boolean mask selects tokens, so the result's size depends on the data")
        raise NotPackable("a boolean mask index has a data-dependent size")
    shape = broadcast(call, [indices[d] for d in used])
    dims = _placed(base, used, shape)
    if not any(base.token_dim(d) for d in used):
        require_no_rows(call, call.args[0], used, "an index")
        return call.result(dims)
    layouts = [call.layout_of(indices[d]) for d in used]
    wanted = {
        d: Affine(((_only_axis(layout), 1),), 0, batch=base.dims[d] == (Axis.BATCH,)) for d, layout in zip(used, layouts, strict=True)
    }
    alone = all(len(base.dims[d]) == 1 and isinstance(base.dims[d][0], Axis | Span) for d in used)
    counted = alone and all(layout.fact == wanted[d] for d, layout in zip(used, layouts, strict=True))
    if counted:
        raise NotPackable(
            "rows and columns are indexed by number", dense=Layout(dims, base.reach, entry=base.entry, fact=_counted_fact(base, dims))
        )
    raise NotPackable("tokens are looked up by an index")


def _only_axis(layout: Layout) -> int:
    dims = [d for d, _ in layout.axes]
    return dims[0] if len(dims) == 1 else -1


def _counted_fact(base: Layout, dims: tuple[Dim, ...]) -> Affine | None:
    """Column numbers looked up by column number are column numbers along the new column dimension."""
    places = [d for d, dim in enumerate(dims) if dim == (Axis.COLUMNS,)]
    if isinstance(base.fact, Affine) and not base.fact.batch and len(base.fact.coefficients) == 1 and len(places) == 1:
        return Affine(((places[0], base.fact.coefficients[0][1]),), base.fact.constant)
    return None


def _placed(base: Layout, used: list[int], shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Advanced indices go where the first of them was if they are neighbours, else to the front."""
    rest_before = [base.dims[d] for d in range(used[0])]
    rest_after = [base.dims[d] for d in range(used[0], len(base.dims)) if d not in used]
    if used == list(range(used[0], used[0] + len(used))):
        return (*rest_before, *shape, *rest_after)
    return (*shape, *rest_before, *rest_after)


@rule(
    "index_fill.int_Scalar",
    "masked_scatter.default",
)
def index_write(call: Call) -> Layout:
    base = call.layout_of(call.args[0])
    if any(call.layout_of(t).has_tokens or call.layout_of(t).reach.kind > Kind.UNIFORM for t in call.tensors):
        raise NotPackable("tokens are written to indexed places", advice="Write with where() or masked_fill(), which work token by token.")
    return call.result(base.dims)


@rule("one_hot.default")
def one_hot(call: Call) -> Layout:
    base = call.layout_of(call.args[0])
    return call.result((*base.dims, call.symbols.dim(call.out.shape[-1])))


@rule("repeat_interleave.Tensor", "repeat_interleave.self_Tensor")
def repeat_interleave(call: Call) -> Layout:
    if any(call.layout_of(t).has_tokens for t in call.tensors) or any(call.symbols.mentions(size) for size in call.out.shape):
        raise NotPackable("tokens are repeated")
    return call.result(tuple(call.symbols.dim(s) for s in call.out.shape))
