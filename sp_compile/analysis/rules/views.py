"""Layout-only ops: a view is packable if every token factor keeps its place."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import Max, Min

from sp_compile.analysis.facts import Affine, Atom, ChunkNumber, Constant, MaskSpec, Nonzero, Triangle, TwoValued, Valid
from sp_compile.analysis.layouts import COLUMN, Axis, Dim, Kind, Layout, Reach, Span, regroup, size_expr
from sp_compile.analysis.moved_facts import cut, renumber
from sp_compile.analysis.permutations import Coordinates, Integers, Whole, narrowed
from sp_compile.analysis.rules.one_row import apart, goes_behind, grows
from sp_compile.analysis.rules.registry import Call, Move, NotPackable, rule
from sp_compile.analysis.rules.selections import coordinate

_ZEROS = "Zeros in front of a causal convolution are known as F.pad(x, (W - 1, 0))."


def _kept(dims_before: tuple[Dim, ...], dims_after: tuple[Dim, ...]) -> dict[int, int]:
    """Where each whole dimension went in a row-major view, counted by the factors before it."""

    def starts(dims: tuple[Dim, ...]) -> dict[tuple[Any, ...], list[int]]:
        found: dict[tuple[Any, ...], list[int]] = {}
        so_far: tuple[Any, ...] = ()
        for index, dim in enumerate(dims):
            if dim:
                found.setdefault((so_far, dim), []).append(index)
            so_far = (*so_far, *dim)
        return found

    before, after = starts(dims_before), starts(dims_after)
    return {old: after[key][0] for key, indices in before.items() if key in after for old in indices}


@rule("view.default", "_unsafe_view.default", "reshape.default", "_reshape_alias.default", "view_copy.default")
def view(call: Call) -> Layout:
    """Row-major regrouping of factors: `[(B), (L), (64)] -> [(B, L), (64)]`."""
    base = call.layout_of(call.tensors[0])
    dims = regroup(base.dims, list(call.out.shape), call.symbols)
    if dims is None:
        raise NotPackable(f"a view from {_text(base)} to {_sizes(call.out)} cuts or reorders tokens")
    table = isinstance(base.fact, Triangle | MaskSpec) and dims[-2:] == base.dims[-2:]
    table = table and (isinstance(base.fact, MaskSpec) or not any(dims[:-2]))
    return base.with_(dims=dims, fact=base.fact if table else renumber(base.fact, _kept(base.dims, dims)))


@rule("permute.default", "permute_copy.default")
def permute(call: Call) -> Layout:
    base = call.layout_of(call.tensors[0])
    order = [int(d) % len(base.dims) for d in call.arg("dims")]
    return _reorder(call, base, order)


@rule("transpose.int", "transpose_copy.int", "swapaxes.default")
def transpose(call: Call) -> Layout:
    base = call.layout_of(call.tensors[0])
    rank = max(len(base.dims), 1)
    order = list(range(len(base.dims)))
    a, b = int(call.args[1]) % rank, int(call.args[2]) % rank
    if order:
        order[a], order[b] = order[b], order[a]
    return _reorder(call, base, order)


@rule("t.default", "t_copy.default", "numpy_T.default", "mT.default")
def matrix_transpose(call: Call) -> Layout:
    base = call.layout_of(call.tensors[0])
    order = list(range(len(base.dims)))
    order[-2:] = reversed(order[-2:])
    return _reorder(call, base, order)


def _reorder(call: Call, base: Layout, order: list[int]) -> Layout:
    places = {old: new for new, old in enumerate(order)}
    pairs = isinstance(base.fact, MaskSpec) and order[-2:] == [len(order) - 2, len(order) - 1]
    fact = base.fact if pairs else renumber(base.fact, places)
    return base.with_(dims=tuple(base.dims[d] for d in order), fact=fact, rows_behind=goes_behind(call, base, order))


@rule("unsqueeze.default", "unsqueeze_copy.default")
def unsqueeze(call: Call) -> Layout:
    base = call.layout_of(call.tensors[0])
    at = int(call.arg("dim")) % (len(base.dims) + 1)
    places = {d: d if d < at else d + 1 for d in range(len(base.dims))}
    pairs = isinstance(base.fact, Triangle | MaskSpec) and at < len(base.dims) - 1
    fact = base.fact if pairs else renumber(base.fact, places)
    return base.with_(dims=(*base.dims[:at], (), *base.dims[at:]), fact=fact)


@rule("squeeze.default", "squeeze.dim", "squeeze.dims", "squeeze_copy.default")
def squeeze(call: Call) -> Layout:
    base = call.layout_of(call.tensors[0])
    rank = len(base.dims)
    asked = call.arg("dim")
    if asked is None:
        gone = {d for d in range(rank) if base.dims[d] == ()}
        # a token dimension of packed size 1 would vanish, too
        if any(base.token_dim(d) for d in range(rank)):
            raise NotPackable(
                "squeeze() without a dimension would drop the batch axis of the packed form", advice="Name the dimension to squeeze."
            )
    else:
        wanted = asked if isinstance(asked, list | tuple) else [asked]
        gone = {int(d) % rank for d in wanted if base.dims[int(d) % rank] == ()}
        if any(base.token_dim(int(d) % rank) for d in wanted):
            raise NotPackable("squeeze of a token dimension")
        base = next((found for d in gone if (found := apart(call, base, d)).rows_behind), base)
    keep = [d for d in range(rank) if d not in gone]
    table = isinstance(base.fact, Triangle | MaskSpec) and keep[-2:] == [rank - 2, rank - 1]
    fact = base.fact if table else renumber(base.fact, {d: i for i, d in enumerate(keep)})
    return base.with_(dims=tuple(base.dims[d] for d in keep), fact=fact)


@rule("expand.default", "expand_copy.default", "broadcast_to.default")
def expand(call: Call) -> Layout:
    base = call.layout_of(call.tensors[0])
    out = call.out
    lead = out.dim() - len(base.dims)
    dims: list[Dim] = []
    for place, size in enumerate(out.shape):
        old = base.dims[place - lead] if place >= lead else ()
        dims.append(old if old else call.symbols.dim(size))
    after = base.with_(dims=tuple(dims))
    if after.has_spans and not base.has_spans and (call.symbols.packed or not after.lacks_last_columns(call.symbols)):
        raise NotPackable("expands to a size that is neither B, L nor a product of them")
    pairs = isinstance(base.fact, Triangle | MaskSpec)
    fact = base.fact if pairs else renumber(base.fact, {d: d + lead for d in range(len(base.dims))})
    after = after.with_(fact=fact)
    if isinstance(base.fact, Nonzero) and len(base.column_like_dims) == 1 < len(after.column_like_dims):
        # the one of them that the padding mask was about can be told from here on by the condition only
        boolean = out.dtype == torch.bool
        condition = Valid(base.fact.node, base.column_like_dims[0] + lead)
        return after.with_(fact=TwoValued(frozenset({condition}), 1.0 if boolean else None, 0.0, boolean))
    return after


@rule("repeat.default")
def repeat(call: Call) -> Layout:
    """Tiles; a token dimension may not be tiled, and a new batch or column dimension is an expansion."""
    base = call.layout_of(call.tensors[0])
    lead = call.out.dim() - len(base.dims)
    dims: list[Dim] = []
    for place, times in enumerate(call.arg("repeats")):
        old = base.dims[place - lead] if place >= lead else ()
        if times == 1:
            dims.append(old)
        elif old == ():
            grows(call, call.tensors[:1] if place >= lead else [], place - lead)
            dims.append(call.symbols.dim(call.out.shape[place]))
        elif call.symbols.dim(times) == (Axis.BATCH,) and not base.token_dim(place - lead):
            # row-major: the new rows come first, each with all of the old dimension
            dims.append((Axis.BATCH, *old))
        elif base.token_dim(place - lead) or call.symbols.mentions(times):
            raise NotPackable("repeats a token dimension")
        else:
            dims.append(call.symbols.dim(call.out.shape[place]))
    once = all(times == 1 or old == () for times, old in zip(call.arg("repeats")[lead:], base.dims, strict=True))
    moved = renumber(base.fact, {d: d + lead for d in range(len(base.dims))}) if once else None
    return base.with_(dims=tuple(dims), fact=base.fact if isinstance(base.fact, Constant) else moved)


@rule("slice.Tensor", "slice_copy.Tensor")
def slice_(call: Call) -> Layout:
    """A slice of a plain dimension, the whole of a token dimension, or (for cheap entry values) a shifted part of the columns."""
    base = call.raw_layout_of(call.tensors[0])
    dim = call.dim("dim", len(base.dims), 0)
    start, step = call.arg("start"), call.arg("step", 1)
    source = call.tensors[0]
    before, after = size_expr(source.shape[dim]), size_expr(call.out.shape[dim])
    if base.token_dim(dim):
        if before == after and step == 1:
            return base
        return _column_slice(call, base, dim, start, step)
    if call.symbols.mentions(call.out.shape[dim]):
        return _table(call, base, dim, start, step)
    whole = before == after
    base = base if whole and call.arg("end") in (None, sys.maxsize) else apart(call, base, dim)
    if call.symbols.mentions(start) or call.symbols.mentions(call.arg("end")):
        raise NotPackable("a plain dimension is cut at a place computed from the number of rows or columns", dense=base if whole else None)
    dims = tuple(call.symbols.dim(call.out.shape[d]) if d == dim and not whole else old for d, old in enumerate(base.dims))
    keeps = base.fact if whole or not _mentions_dim(base.fact, dim) else narrowed(base.fact, call.out)
    return base.with_(dims=dims, fact=keeps)


def _mentions_dim(fact: Any, dim: int) -> bool:
    if isinstance(fact, Affine):
        return any(d == dim for d, _ in fact.coefficients)
    if isinstance(fact, TwoValued):
        return any(dim in (c.dims if isinstance(c, Valid) else (c.left, c.right)) for c in fact.conditions)
    return isinstance(fact, Triangle | Integers | Whole) or (isinstance(fact, ChunkNumber) and fact.dim == dim)


def _column_slice(call: Call, base: Layout, dim: int, start: Any, step: int) -> Layout:
    text = "a part of the columns is cut out" if base.dims[dim] != (Axis.BATCH,) else "a part of the rows is cut out"
    plain_columns = len(base.dims[dim]) == 1 and not isinstance(base.dims[dim][0], int) and base.dims[dim][0] is not Axis.BATCH
    if step != 1 or not plain_columns or not (start is None or isinstance(start, int)) or (isinstance(start, int) and start < 0):
        raise NotPackable(text)
    size = size_expr(call.out.shape[dim])
    factor = Axis.COLUMNS if size == call.symbols.columns else Span(size)
    dims = tuple(((factor,) if d == dim else old) for d, old in enumerate(base.dims))
    head, reach = _cut_head(base, int(start or 0))
    dense = base.with_(dims=dims, reach=reach, fact=cut(base.fact, dim, int(start or 0)), head=head)
    raise NotPackable(text, dense=dense, move=None if base.head else Move(int(start or 0)))


def _cut_head(base: Layout, start: int) -> tuple[tuple[tuple[int, int], ...], Reach]:
    """The head and reach after the first `start` elements of the axis are gone."""
    left, head = start, []
    for count, shift in base.head:
        gone = min(left, count)
        left -= gone
        if count > gone:
            head.append((count - gone, shift + start))
    return tuple(head), base.moved(start)


def _columns_of(size: sympy.Expr, columns: sympy.Symbol) -> Dim | None:
    """The columns that a size is the number of: all L, or all but a number of the last ones; None if it is none.

    It may be so on one side of its minima and maxima: `n - max(0, n - L)` for tables of n rows. On the other side the values do not fit
    what they meet, or they are no [B, L] any more when they are gathered, which is guarded.
    """
    limits = size.atoms(sympy.Max, sympy.Min, Max, Min)
    choices = itertools.product(*(limit.args for limit in limits))
    sizes = [sympy.expand(size.xreplace(dict(zip(limits, c, strict=True)))) for c in choices]
    lacking = [columns - one for one in sizes if (columns - one).is_Integer and columns - one >= 0]
    return None if not lacking else (Axis.COLUMNS,) if 0 in lacking else (Span(columns - lacking[0]),)


def _table(call: Call, base: Layout, dim: int, start: Any, step: int) -> Layout:
    """`table[:L]`: the rows of a constant table by column number; `table[n - L:]` is one, too, of as many columns as the batch has."""
    text = "a table is cut to the number of columns"
    columns = _columns_of(size_expr(call.out.shape[dim]), call.symbols.columns)
    if step != 1 or base.reach.kind > Kind.COLUMN or columns is None:
        raise NotPackable(text)
    dims = tuple((columns if d == dim else old) for d, old in enumerate(base.dims))
    fact: Any = base.fact if isinstance(base.fact, Constant) else None
    if isinstance(base.fact, Triangle) and start in (0, None):
        cut = base.fact.cut | {dim - len(base.dims)}
        fact = dataclasses.replace(base.fact, cut=cut)
        if cut == {-1, -2}:
            query, key = len(base.dims) - 2, len(base.dims) - 1
            width = base.fact.window
            band = {Atom(query, key, 0)} | ({Atom(key, query, 1 - width)} if width is not None else set())
            fact = TwoValued(frozenset(band), base.fact.lower, base.fact.upper)
    elif isinstance(base.fact, Affine) and not base.fact.coefficients:
        fact = None
    raise NotPackable(text, dense=Layout(dims, base.reach.join(COLUMN), entry=True, fact=fact))


@rule("select.int", "select_copy.int")
def select(call: Call) -> Layout:
    base = call.layout_of(call.tensors[0])
    dim = call.dim("dim", len(base.dims))
    if isinstance(base.fact, Coordinates) and dim == 1:
        return coordinate(base, int(call.arg("index")), call.out)
    if base.token_dim(dim):
        raise NotPackable("one row or column is selected")
    base = apart(call, base, dim)
    keep = [d for d in range(len(base.dims)) if d != dim]
    table = isinstance(base.fact, Triangle | MaskSpec) and dim < len(base.dims) - 2
    kept = narrowed(base.fact, call.out) if _mentions_dim(base.fact, dim) else renumber(base.fact, {d: i for i, d in enumerate(keep)})
    return base.with_(dims=tuple(base.dims[d] for d in keep), fact=base.fact if table else kept)


@rule("split.Tensor", "split_with_sizes.default", "unsafe_split.Tensor", "unsafe_split_with_sizes.default", "split_with_sizes_copy.default")
def split(call: Call) -> list[Layout]:
    base = call.layout_of(call.tensors[0])
    dim = call.dim("dim", len(base.dims), 0)
    if base.token_dim(dim):
        raise NotPackable("tokens are split into parts")
    base = apart(call, base, dim)
    facts = [narrowed(base.fact, out) if _mentions_dim(base.fact, dim) else base.fact for out in call.outputs]
    return [base.with_(dims=tuple(call.symbols.dim(out.shape[dim]) if d == dim else old for d, old in enumerate(base.dims)), fact=fact)
            for out, fact in zip(call.outputs, facts, strict=True)]  # fmt: skip


@rule("unbind.int", "unbind_copy.int")
def unbind(call: Call) -> list[Layout]:
    base = call.layout_of(call.tensors[0])
    if isinstance(base.fact, Coordinates) and call.dim("dim", len(base.dims)) == 1:
        return [coordinate(base, number, out) for number, out in enumerate(call.outputs)]
    layout = select(call)
    return [layout.with_(fact=narrowed(layout.fact, out) or layout.fact) for out in call.outputs]


@rule("cat.default", "concat.default", "_cat.default")
def cat(call: Call) -> Layout:
    """Joins plain dimensions; along columns it makes a shifted axis, known for cheap entry values only."""
    tensors = [t for t in call.args[0] if not (t.dim() == 1 and t.shape[0] == 0)]
    dim = call.dim("dim", call.out.dim(), 0)
    tensors = [t for t in tensors if t.dim() == 1 or size_expr(t.shape[dim]) != 0]
    if len(tensors) == 1:
        return call.layout_of(tensors[0])
    if not tensors:
        return call.result(tuple(call.symbols.dim(s) for s in call.out.shape))
    rank = call.out.dim()
    grows(call, tensors, dim)
    layouts = [call.layout_of(t) for t in tensors]
    others = _line_up(layouts, dim)
    if not any(layout.token_dim(dim) for layout in layouts) and not call.symbols.mentions(call.out.shape[dim]):
        dims = tuple(call.symbols.dim(call.out.shape[d]) if d == dim else others[d] for d in range(rank))
        return call.result(dims)
    same = {layout.dims[dim] for layout in layouts}
    if len(same) == 1 and layouts[0].token_dim(dim) and not any(layout.has_spans or layout.is_rows or layout.sorted for layout in layouts):
        # one after the other: a new slowest factor of the dimension
        dims = tuple((len(tensors), *layouts[0].dims[dim]) if d == dim else others[d] for d in range(rank))
        if len([f for d in dims for f in d if f is Axis.COLUMNS]) == 1 and not call.symbols.packed:
            return call.result(dims)
    advice = _ZEROS if any(layout.fact == Constant(0.0) for layout in layouts) else ""
    raise NotPackable("tokens are joined to tokens", dense=_joined_columns(call, tensors, layouts, others, dim), advice=advice)


def _line_up(layouts: list[Layout], dim: int) -> list[Dim]:
    result: list[Dim] = []
    for place in range(len(layouts[0].dims)):
        found = {layout.dims[place] for layout in layouts} if place != dim else {()}
        if len(found) > 1:
            raise NotPackable("joined values carry different tokens")
        result.append(next(iter(found)))
    return result


def _joined_columns(call: Call, tensors: list[torch.Tensor], layouts: list[Layout], others: list[Dim], dim: int) -> Layout | None:
    """Part i starts at offset o_i, so its element j lands at j + o_i and reaches o_i columns less far ahead.

    Parts of fixed length before the last are kept apart as the head, so that a later slice can drop them exactly.
    """
    reach, offset = Reach(Kind.COLUMN), sympy.Integer(0)
    head: list[tuple[int, int]] = []
    for number, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
        if any(f is Axis.BATCH or isinstance(f, int) for f in layout.dims[dim] if layout.token_dim(dim)):
            return None
        size = size_expr(tensor.shape[dim])
        part = layout.moved(-int(offset)) if offset.is_Integer else layout.moved(0)
        if number < len(tensors) - 1 and size.is_Integer and offset.is_Integer and len(layout.column_like) <= 1 and part.kind != Kind.ROWS:
            # what reads no tokens reads none ahead
            head.append((int(size), part.shift))
            reach = reach if part.kind == Kind.TOKENS else reach.join(part)
        else:
            reach = reach.join(part)
        offset = offset + size
    if reach.kind != Kind.TOKENS:
        tokens = [layout.reach.kind == Kind.TOKENS for layout in layouts]
        reach, head = reach.join(Reach(Kind.TOKENS, max(shift for _, shift in head)) if any(tokens) and head else reach), []
    factor = Axis.COLUMNS if offset == call.symbols.columns else Span(offset)
    dims = tuple(((factor,) if d == dim else others[d]) for d in range(call.out.dim()))
    return Layout(dims, reach, entry=call.joined()[1], head=tuple(head))


@rule("stack.default")
def stack(call: Call) -> Layout:
    layouts = [call.layout_of(t) for t in call.args[0]]
    dims = _line_up(layouts, -1)
    at = int(call.arg("dim", 0)) % call.out.dim()
    return call.result((*dims[:at], () if len(layouts) == 1 else (len(layouts),), *dims[at:]))


@rule("constant_pad_nd.default")
def pad(call: Call) -> Layout:
    """Pads plain dimensions; padding the columns shifts them, known for cheap entry values only."""
    base = call.layout_of(call.tensors[0])
    amounts = list(call.arg("pad"))
    dims = list(base.dims)
    reach, span = base.reach, False
    for back in range(len(amounts) // 2):
        before, after = amounts[2 * back], amounts[2 * back + 1]
        dim = len(dims) - 1 - back
        if before == 0 and after == 0:
            continue
        if not base.token_dim(dim):
            grows(call, call.tensors[:1], dim)
            dims[dim] = call.symbols.dim(call.out.shape[dim])
            continue
        if base.dims[dim] not in ((Axis.COLUMNS,),) and not (len(base.dims[dim]) == 1 and isinstance(base.dims[dim][0], Span)):
            raise NotPackable("rows are padded")
        if not isinstance(before, int):
            raise NotPackable("the columns are padded by a size that depends on the batch")
        size = size_expr(call.out.shape[dim])
        dims[dim] = (Axis.COLUMNS,) if size == call.symbols.columns else (Span(size),)
        reach, span = base.with_(reach=reach).moved(-before), True
    layout = base.with_(dims=tuple(dims), reach=reach, fact=None)
    if span:
        raise NotPackable("the columns are padded or shifted", dense=layout.with_(reach=layout.reach.join(COLUMN)))
    return layout


def _text(layout: Layout) -> str:
    return "[" + ", ".join("x".join(map(str, d)) or "1" for d in layout.dims) + "]"


def _sizes(tensor: torch.Tensor) -> str:
    return "[" + ", ".join(str(s) for s in tensor.shape) + "]"
