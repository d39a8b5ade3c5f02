"""Experts on sorted tokens: a sort by expert, gathers into that order, products of its groups, and the way back.

    ids, perm = sort(expert of each token)            # ascending: [sorted], place of each in the order of tokens
    x = hidden[perm // k]                             # [sorted, H]
    ends = cumsum(histc(ids), 0)                      # where the group of each expert ends
    y = grouped_mm(x, weight, ends)                   # row j is in the group of its own expert, however many tokens there are
    inverse[perm] = arange(len(perm)); y[inverse]     # [tokens, H]

On physical tokens `perm`, `inverse` and `ends` are other numbers, but every row of `y` is the same function of its own token.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from sp_compile.analysis.facts import Constant
from sp_compile.analysis.layouts import PLACES, Dim, Kind, Layout, covers_tokens
from sp_compile.analysis.permutations import Check, Count, Integers, Inverse, Part, Permuted, Place, Tally, per_token
from sp_compile.analysis.rules.indexing import gather, index, index_select, index_write, scatter
from sp_compile.analysis.rules.one_row import index_apart
from sp_compile.analysis.rules.pointwise import pointwise
from sp_compile.analysis.rules.reductions import along_dimension, reduce, topk, whole_tensor
from sp_compile.analysis.rules.reductions import cumsum as plain_cumsum
from sp_compile.analysis.rules.registry import CONTRACTS, Call, NotPackable, rule
from sp_compile.analysis.rules.selections import looked_up, written

# -- integers in a known range --------------------------------------------------------------------------------------------------------


@rule("topk.default")
def chosen(call: Call) -> list[Layout]:
    values, places = topk(call)
    return [values, _integers(call, places, call.outputs[1])]


@rule("argmax.default", "argmin.default")
def best(call: Call) -> list[Layout]:
    (found,) = reduce(call)
    return [_integers(call, found, call.out) if call.arg("dim") is not None else found]


def _integers(call: Call, layout: Layout, out: torch.Tensor) -> Layout:
    """The layout of places along a dimension of the operand."""
    base = call.tensors[0]
    size = base.shape[call.dim("dim", base.dim(), -1)] if base.dim() else 1
    return layout.with_(fact=Integers(size, id(out))) if isinstance(size, int) and not layout.is_rows else layout


# -- there ----------------------------------------------------------------------------------------------------------------------------


@rule("sort.default", "sort.stable", "argsort.default", "argsort.stable")
def sort(call: Call) -> list[Layout]:
    """All tokens by a value of theirs; or a permutation, whose sorted places are its inverse."""
    base = call.layout_of(call.tensors[0])
    down, out = bool(call.arg("descending", False)), call.outputs[-1]
    found: list[Layout] | None = None
    if len(base.dims) == 1 and not base.is_rows:
        (dim,) = base.dims
        only = dim[0] if len(dim) == 1 else None
        if isinstance(only, Permuted) and base.fact == Place(only.inner) and not down:
            found = [Layout((only.inner,), PLACES, fact=Count(only.inner)), Layout((only.inner,), PLACES, fact=Inverse(only))]
        elif covers_tokens(dim, call.symbols) and base.reach.kind is not Kind.PLACES:
            fact = base.fact if isinstance(base.fact, Integers) else None
            order = Permuted(dim, id(out), None if fact is None or down else fact.key)
            found = [Layout(((order,),), base.reach, fact=fact), Layout(((order,),), PLACES, fact=Place(dim))]
    if found is None:
        return along_dimension(call)
    return found if len(call.outputs) == 2 else found[1:]


@rule("floor_divide.default", "floor_divide.Scalar", "div.Tensor_mode", "div.Scalar_mode")
def whole_division(call: Call) -> list[Layout]:
    """`place // k`: the place of the token that the element, one of its k, belongs to."""
    base, by = call.layout_of(call.tensors[0]), call.args[1]
    rounded = call.func._schema.name.endswith("floor_divide") or call.arg("rounding_mode") is not None
    if isinstance(by, torch.Tensor):
        by = getattr(call.layout_of(by).fact, "value", None) if by.dim() == 0 else None
    known = isinstance(base.fact, Place) and rounded and not call.out.is_floating_point()
    if known and by == 1:
        return [base]
    if known and isinstance(base.fact, Place) and base.fact.factors[-1:] == (by,):
        return [base.with_(fact=Place(base.fact.factors[:-1]))]
    return pointwise(call)


@rule("index.Tensor", "_unsafe_index.Tensor")
def lookup(call: Call) -> Layout:
    """`x[places]`: what stands at each element's own place."""
    used = [(d, i) for d, i in enumerate(call.args[1]) if i is not None]
    if len(used) == 1:
        found = _taken(call.layout_of(call.args[0]), used[0][0], call.layout_of(used[0][1]), call.out)
        if found is not None:
            return found
    given = list(call.args[1])
    chosen = looked_up(call, call.layout_of(call.args[0]), given, _selected_size(call, given))
    after = index(call) if chosen is None else chosen
    return index_apart(call, call.layout_of(call.args[0]), [d for d, _ in used], after) if used else after


def _selected_size(call: Call, given: list[Any]) -> Any:
    """The size of the result along what a mask chooses."""
    first = next((d for d, i in enumerate(given) if i is not None), 0)
    return call.out.shape[first] if call.out.dim() > first else None


@rule("index_select.default")
def select(call: Call) -> Layout:
    base = call.layout_of(call.args[0])
    return _taken(base, call.dim("dim", len(base.dims)), call.layout_of(call.args[2]), call.out) or index_select(call)


@rule("gather.default")
def gathered(call: Call) -> Layout:
    """`gather(x, 0, places of every column)`."""
    base, places = call.layout_of(call.args[0]), call.layout_of(call.args[2])
    dim = call.dim("dim", len(base.dims))
    if base.dims and base.dims[:dim] == places.dims[:dim] and base.dims[dim + 1 :] == places.dims[dim + 1 :]:
        found = _taken(base, dim, places.with_(dims=(places.dims[dim],)), call.out)
        if found is not None:
            return found
    return gather(call)


def _taken(base: Layout, dim: int, places: Layout, out: torch.Tensor) -> Layout | None:
    """The layout of `base` looked up along a dimension by elements' own places, or None if that is not what the index holds."""
    if base.is_rows or places.reach.kind is not Kind.PLACES or any(base.token_dim(d) for d in range(len(base.dims)) if d != dim):
        return None
    stands = places.fact.factors if isinstance(places.fact, Place) else (places.fact.order,) if isinstance(places.fact, Inverse) else None
    if stands is None or base.dims[dim] != stands or isinstance(base.fact, Count | Tally):
        return None
    fact = base.fact if isinstance(base.fact, Integers | Place | Inverse) else None
    part = next((factor for factor in places.dims[0] if isinstance(factor, Part)), None) if places.dims else None
    reach = base.reach if part is None else base.reach.join(part.reach)
    whole = len(places.dims) == 1 and len(places.dims[0]) == 1 and isinstance(places.dims[0][0], Permuted)
    if isinstance(fact, Integers) and not whole:
        fact = dataclasses.replace(fact, key=id(out))  # not every element need be taken
    return Layout((*base.dims[:dim], *places.dims, *base.dims[dim + 1 :]), reach, fact=fact)


@rule("repeat_interleave.self_int")
def repeated(call: Call) -> Layout:
    """Each token k times in a row."""
    base, times = call.layout_of(call.tensors[0]), call.arg("repeats")
    asked = call.arg("dim")
    if not isinstance(times, int) or (asked is None and len(base.dims) != 1):
        if base.has_tokens or call.symbols.mentions(times):
            raise NotPackable("tokens are repeated")
        return call.result(tuple(call.symbols.dim(size) for size in call.out.shape))
    dim = call.dim("dim", len(base.dims), 0)
    grown: Dim = (*base.dims[dim], times) if base.token_dim(dim) and times != 1 else call.symbols.dim(call.out.shape[dim])
    dims = (*base.dims[:dim], base.dims[dim] if times == 1 else grown, *base.dims[dim + 1 :])
    return base.with_(dims=dims, entry=False, fact=base.fact if isinstance(base.fact, Integers | Place) else None)


# -- groups ---------------------------------------------------------------------------------------------------------------------------


@rule("histc.default")
def counts(call: Call) -> list[Layout]:
    """How many elements there are of each integer from 0 to bins - 1."""
    bins, low, high = (call.arg(name) for name in ("bins", "min", "max"))
    found = _tallied(call, call.layout_of(call.tensors[0]), bins) if low == 0 and high in (bins - 1, bins) else None
    return whole_tensor(call) if found is None else [found]


def _tallied(call: Call, base: Layout, bins: Any) -> Layout | None:
    elements = per_token(tuple(factor for dim in base.dims for factor in dim))
    known = isinstance(base.fact, Integers) and isinstance(bins, int) and base.fact.below <= bins
    if not known or not _all_tokens(call, base) or elements is None or base.reach.kind is Kind.PLACES:
        return None
    assert isinstance(base.fact, Integers), "checked above"
    return Layout(((bins,) if bins != 1 else (),), PLACES, fact=Tally(base.fact.key, elements, bins, base.reach))


@rule("all.default")
def holds(call: Call) -> list[Layout]:
    """What torch asserts of class numbers before it makes one-hot vectors of them."""
    base = call.layout_of(call.tensors[0])
    if base.is_rows or base.reach.kind is Kind.PLACES or not _all_tokens(call, base):
        return reduce(call)
    return [Layout((), PLACES, fact=Check())]


def _all_tokens(call: Call, layout: Layout) -> bool:
    """Whether each token is in a value equally often."""
    factors: list[Any] = []
    for factor in (factor for dim in layout.dims for factor in dim):
        factors += factor.inner if isinstance(factor, Permuted) else [factor]
    return covers_tokens(tuple(factors), call.symbols)


@rule("cumsum.default")
def ends(call: Call) -> Layout:
    base = call.layout_of(call.tensors[0])
    wide = call.out.dtype in (torch.int32, torch.int64)
    if isinstance(base.fact, Tally) and not base.fact.summed and wide:
        return base.with_(fact=dataclasses.replace(base.fact, summed=True))
    return plain_cumsum(call)


def grouped_product(call: Call) -> Layout:
    """[sorted, K] times the [K, N] of each row's own group, of [groups, K, N]; groups are told by where they end."""
    values, weight, offsets = (call.layout_of(tensor) for tensor in call.tensors[:3])
    if not any(layout.has_tokens or layout.reach.kind > Kind.COLUMN for layout in (values, weight, offsets)):
        return call.result(tuple(call.symbols.dim(size) for size in call.out.shape))
    order = values.dims[0][0] if len(values.dims) == 2 and len(values.dims[0]) == 1 else None
    if not isinstance(order, Permuted) or values.token_dim(1) or values.reach.kind is Kind.PLACES:
        raise NotPackable("a grouped matrix product of tokens that are not sorted by their group")
    if weight.has_tokens or weight.reach.kind > Kind.UNIFORM or len(weight.dims) != 3 or len(call.tensors) != 3:
        raise NotPackable("a grouped matrix product whose weights depend on tokens")
    ends = offsets.fact
    if not isinstance(ends, Tally) or not ends.summed or ends.key != order.key or ends.elements != per_token((order,)):
        raise NotPackable("the groups of a grouped matrix product are not proved to be those that its rows were sorted into",
                          advice="Sort by the chosen experts (of topk), and count them with histc over all experts.")  # fmt: skip
    return Layout((values.dims[0], weight.dims[2]), values.reach.join(weight.reach).join(ends.reach))


rule("_grouped_mm.default")(grouped_product)
CONTRACTS["transformers::grouped_mm_fallback"] = grouped_product


# -- and back -------------------------------------------------------------------------------------------------------------------------


@rule("index_put.default", "_unsafe_index_put.default")
def put(call: Call) -> Layout:
    """`out[places] = values`: every element to its own token."""
    base, used, values = call.layout_of(call.args[0]), call.args[1], call.layout_of(call.args[2])
    if len(used) == 1 and used[0] is not None:
        found = _placed(base, call.layout_of(used[0]), values, bool(call.arg("accumulate")))
        if found is not None:
            return found
    chosen = written(call, base, list(used), call.args[2])
    return index_write(call) if chosen is None else chosen


@rule("index_copy.default", "index_add.default")
def copied(call: Call) -> Layout:
    if call.arg("dim") == 0:
        added = call.func._schema.name.startswith("aten::index_add")
        found = _placed(call.layout("self"), call.layout("index"), call.layout("source"), added)
        if found is not None:
            return found
    return index_write(call)


@rule("scatter.src", "scatter_add.default")
def scattered(call: Call) -> Layout:
    base, places, values = (call.layout_of(call.args[i]) for i in (0, 2, 3))
    if base.fact == Constant(0.0) and values.fact == Constant(1.0) and call.func._schema.name.startswith("aten::scatter_add"):
        found = _tallied(call, places, call.args[0].shape[0] if call.args[0].dim() == 1 else None)
        if found is not None:
            return found
    if call.arg("dim") == 0 and places.dims and places.dims == values.dims and places.dims[1:] == base.dims[1:]:
        added = call.func._schema.name.startswith("aten::scatter_add")
        found = _placed(base, places.with_(dims=places.dims[:1]), values, added)
        if found is not None:
            return found
    return scatter(call)


def _placed(base: Layout, places: Layout, values: Layout, added: bool) -> Layout | None:
    """The layout of `base` after values went to their own places in its first dimension, or None if that is not proved."""
    if not isinstance(places.fact, Place) or places.reach.kind is not Kind.PLACES or len(places.dims) != 1 or not base.dims:
        return None
    order = places.dims[0][0] if len(places.dims[0]) == 1 else None
    stands = places.fact.factors
    if not isinstance(order, Permuted | Part) or base.dims[0] != stands or any(base.token_dim(d) for d in range(1, len(base.dims))):
        return None
    if values.is_rows or base.is_rows or base.reach.kind is Kind.PLACES:
        return None
    if isinstance(order, Part):
        alike = values.dims == (places.dims[0], *base.dims[1:]) and values.reach.kind is not Kind.PLACES
        return Layout(base.dims, base.reach.join(values.reach).join(order.reach)) if alike else None
    everything = order.inner == stands
    if isinstance(values.fact, Count) and len(base.dims) == 1:
        full = everything and not added and math.prod(_numbers(values.fact.factors)) == math.prod(_numbers(stands))
        return Layout(base.dims, PLACES, fact=Inverse(order)) if full else None
    if values.dims != (places.dims[0], *base.dims[1:]) or values.reach.kind is Kind.PLACES or not (everything or added):
        return None
    return Layout(base.dims, base.reach.join(values.reach) if added else values.reach)


def _numbers(factors: Dim) -> list[int]:
    return [factor for factor in factors if isinstance(factor, int)]
