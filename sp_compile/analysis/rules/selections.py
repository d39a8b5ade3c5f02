"""Some of the tokens: what a mask chooses, is computed by itself, and goes back to where it came from.

    token, slot = torch.where(experts == 3)           # [chosen]: the place of each token, and which of its k slots
    y = expert(hidden[token]) * weights[token, slot, None]
    out.index_add_(0, token, y)                       # or out[token] += y, or out[mask] = ...

On physical tokens other numbers of them are chosen, but a token is chosen in all of its rows or in none, and every row of `y` is a
function of its own token. How many there are may not be used.
"""

from __future__ import annotations

from typing import Any

import torch

from sp_compile.analysis.layouts import PLACES, Dim, Kind, Layout
from sp_compile.analysis.permutations import Coordinates, Integers, Part, Place
from sp_compile.analysis.rules.reductions import whole_tensor
from sp_compile.analysis.rules.registry import Call, rule


def _chosen(mask: torch.Tensor, layout: Layout, size: int | torch.SymInt) -> Part | None:
    """The factor of what a mask chooses, or None if it is no mask of tokens that rows share."""
    if not layout.has_tokens or layout.is_rows or layout.reach.kind is Kind.PLACES or not layout.reach.shared or layout.has_spans:
        return None
    if not isinstance(size, torch.SymInt) or not size.node.expr.is_Symbol:
        return None
    return Part(tuple(factor for dim in layout.dims for factor in dim), id(mask), size.node.expr, layout.reach)


@rule("nonzero.default", "argwhere.default")
def nonzero(call: Call) -> list[Layout]:
    """[chosen, dimensions of the mask]"""
    mask = call.tensors[0]
    base = call.layout_of(mask)
    part = _chosen(mask, base, call.out.shape[0])
    if part is None:
        return whole_tensor(call)
    fact = Place(base.dims[0]) if len(base.dims) == 1 else Coordinates(base.dims)
    return [Layout(((part,), () if len(base.dims) == 1 else (len(base.dims),)), PLACES, fact=fact)]


@rule("nonzero_numpy.default")
def nonzero_by_dimension(call: Call) -> list[Layout]:
    mask = call.tensors[0]
    base = call.layout_of(mask)
    part = _chosen(mask, base, call.out.shape[0])
    if part is None:
        return whole_tensor(call)
    together = Layout(((part,), (len(base.dims),)), PLACES, fact=Coordinates(base.dims))
    return [coordinate(together, number, out) for number, out in enumerate(call.outputs)]


def coordinate(places: Layout, dim: int, out: torch.Tensor) -> Layout:
    """One column of what `nonzero` gives."""
    (part,), fact = places.dims[0], places.fact
    assert isinstance(part, Part), "made by nonzero"
    assert isinstance(fact, Coordinates), "made by nonzero"
    along = fact.dims[dim]
    if all(isinstance(factor, int) for factor in along):
        size = along[0] if along else 1
        assert isinstance(size, int), "checked above"
        return Layout(((part,),), part.reach, fact=Integers(size, id(out)))
    return Layout(((part,),), PLACES, fact=Place(along))


def looked_up(call: Call, base: Layout, given: list[Any], size: int | torch.SymInt | None = None) -> Layout | None:
    """The layout of `base[given]`, where the indices are a mask of tokens or the places of chosen tokens, and numbers of theirs.

    Args:
        call: to ask for layouts.
        base: of what is indexed.
        given: one index per dimension from the first, None for a whole dimension.
        size: of the result's dimension of chosen elements, where a mask is among the indices.

    Returns:
        None if that is not what the indices hold.
    """
    used = [(d, index) for d, index in enumerate(given) if index is not None]
    if base.is_rows or base.reach.kind is Kind.PLACES or not used:
        return None
    masks = [(d, index) for d, index in used if index.dtype in (torch.bool, torch.uint8)]
    part: Part | None
    if masks:
        (first, mask), rest = masks[0], len(used) - 1
        layout = call.layout_of(mask)
        after = first + mask.dim()
        part = None if rest or size is None else _chosen(mask, layout, size)
        if part is None or base.dims[first:after] != layout.dims:
            return None
        dims: tuple[Dim, ...] = (*base.dims[:first], (part,), *base.dims[after:])
    else:
        layouts = {d: call.layout_of(index) for d, index in used}
        parts = {layout.dims for layout in layouts.values()}
        shape = next(iter(parts))
        part = shape[0][0] if len(parts) == 1 and len(shape) == 1 and len(shape[0]) == 1 and isinstance(shape[0][0], Part) else None
        if part is None or not all(_fits(base.dims[d], layout) for d, layout in layouts.items()):
            return None
        first, together = used[0][0], [d for d, _ in used] == list(range(used[0][0], used[0][0] + len(used)))
        left = [dim for d, dim in enumerate(base.dims) if d not in layouts]
        at = first if together else 0
        dims = (*left[:at], (part,), *left[at:])
    result = Layout(dims, base.reach.join(part.reach))
    alone = sum(result.token_dim(d) for d in range(len(dims))) == 1
    return result if alone else None


def _fits(dim: Dim, index: Layout) -> bool:
    """Whether an index holds the own token's places in a dimension, or numbers for one without tokens."""
    if index.reach.kind is Kind.PLACES:
        return isinstance(index.fact, Place) and index.fact.factors == dim
    return index.reach.shared and all(isinstance(factor, int) for factor in dim)


def written(call: Call, base: Layout, given: list[Any], values: torch.Tensor) -> Layout | None:
    """The layout of `base` after `base[given] = values` or `+= values`, or None if chosen tokens do not get values of their own."""
    found = call.layout_of(values)
    if found.is_rows or found.reach.kind is Kind.PLACES:
        return None
    size = next((size for size in values.shape if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol), None)
    if found.has_tokens:
        sizes = [factor.size for dim in found.dims for factor in dim if isinstance(factor, Part)]
        size = next((s for s in values.shape if isinstance(s, torch.SymInt) and s.node.expr in sizes), None)
    target = looked_up(call, base, given, size)
    if target is None:
        if found.has_tokens or not _masked(call, base, given):
            return None
        return Layout(base.dims, base.reach.join(found.reach).join(next(call.layout_of(i).reach for i in given if i is not None)))
    places = target.dims[len(target.dims) - len(found.dims) :] if len(found.dims) <= len(target.dims) else ()
    lined = len(places) == len(found.dims) and all(
        old == () or old == new or _plain(old, new) for old, new in zip(found.dims, places, strict=True)
    )
    return Layout(base.dims, target.reach.join(found.reach)) if lined else None


def _plain(old: Dim, new: Dim) -> bool:
    return all(isinstance(factor, int) for factor in (*old, *new))


def _masked(call: Call, base: Layout, given: list[Any]) -> bool:
    """Whether one value is written wherever a mask of all tokens chooses."""
    used = [(d, index) for d, index in enumerate(given) if index is not None]
    if len(used) != 1 or used[0][1].dtype not in (torch.bool, torch.uint8):
        return False
    at, mask = used[0][0], call.layout_of(used[0][1])
    return not mask.is_rows and mask.reach.kind <= Kind.TOKENS and base.dims[at : at + len(mask.dims)] == mask.dims
