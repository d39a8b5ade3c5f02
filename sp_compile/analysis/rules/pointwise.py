"""Elementwise ops: operands must line up token by token; facts about masks and positions are carried through."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from sp_compile.analysis.facts import (
    Affine,
    ChunkNumber,
    Constant,
    Fact,
    MaskSpec,
    Nonzero,
    SameChunk,
    Triangle,
    TwoValued,
    Valid,
    added,
    at_least,
    combine_affine,
    conditions_of,
    conjunction,
    disjunction,
    equal,
    held_as,
    lift,
    map_constant,
    multiplied,
    opposite,
    selected,
)
from sp_compile.analysis.layouts import COLUMN, UNIFORM, Layout
from sp_compile.analysis.moved_facts import renumber
from sp_compile.analysis.permutations import Integers, Numbering, Tally
from sp_compile.analysis.rules.registry import Call, NotPackable, broadcast, rule
from sp_compile.ops.blocking import is_blocking


@rule(
    "where.self",
    "where.ScalarOther",
    "where.ScalarSelf",
    "where.Scalar",
    "masked_fill.Scalar",
    "masked_fill.Tensor",
    "clamp.Tensor",
    "lerp.Tensor",
    "clone",
    "_to_copy",
    "detach",
    "alias",
    "lift_fresh_copy",
    "copy",
    "native_dropout_backward",
    "contiguous",
)
def pointwise(call: Call) -> list[Layout]:
    """out[b, l, ...] = f(a[b, l, ...], c[l], s, ...), where B and L as numbers stay logical."""
    rank = call.out.dim()
    dims = broadcast(call, call.tensors, rank)
    return [call.result(dims, fact=_fact(call, rank) if len(call.outputs) == 1 else None) for _ in call.outputs]


@rule("fill.Scalar", "fill.Tensor", "zero")
def fill(call: Call) -> Layout:
    """x[...] = number: the dims stay, the value is a constant."""
    value = call.arg("value", 0)
    base = call.layout_of(call.tensors[0])
    if isinstance(value, torch.Tensor):
        other = call.layout_of(value)
        return Layout(base.dims, UNIFORM.join(other.reach), entry=other.entry, fact=held_as(other.fact, call.out.dtype))
    fact = Constant(float(value)) if isinstance(value, int | float) else None
    return Layout(base.dims, UNIFORM, entry=True, fact=held_as(fact, call.out.dtype))


_COMPARISONS: dict[str, Callable[[float, float], float]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
_UNARY: dict[str, Callable[[float], float]] = {"neg": operator.neg, "logical_not": operator.not_, "bitwise_not": operator.not_}
_BINARY: dict[str, Callable[[float, float], float]] = {
    "sub": operator.sub, "div": operator.truediv, "rsub": lambda a, b: b - a, "maximum": max, "minimum": min,
    "logical_xor": lambda a, b: bool(a) != bool(b), **_COMPARISONS,
}  # fmt: skip


def _fact(call: Call, rank: int) -> Fact | None:
    name = call.func._schema.name.split("::")[1].rstrip("_")
    operands = [_aligned(call, value, rank) for value in call.args]
    boolean = call.out.dtype == torch.bool
    if name in ("clone", "detach", "alias", "lift_fresh_copy", "contiguous"):
        return operands[0]
    if name == "_to_copy":
        if isinstance(operands[0], MaskSpec) and call.tensors[0].is_floating_point() and call.out.is_floating_point():
            return operands[0]
        return _cast(call, _told(call, 0, operands[0]))
    if name == "copy":
        return operands[1]
    operands = [_told(call, index, fact) for index, fact in enumerate(operands)]
    operands = [_keyed(call, index, rank, fact) for index, fact in enumerate(operands)]
    if name in ("bitwise_and", "logical_and", "__and__"):
        return conjunction(operands[0], operands[1]) if boolean else None
    if name in ("bitwise_or", "logical_or", "__or__"):
        return disjunction(operands[0], operands[1]) if boolean else None
    if name == "masked_fill":
        return selected(operands[1], operands[2], operands[0], boolean)
    if name == "where" and len(operands) == 3:
        return selected(operands[0], operands[1], operands[2], boolean)
    if name in _UNARY and operands:
        if not boolean and name == "bitwise_not":
            return None
        if isinstance(operands[0], Affine) and name == "neg" and not operands[0].batch:
            return combine_affine(Affine(()), operands[0], -1)
        if isinstance(operands[0], Nonzero) and name == "logical_not":
            return _zero(call, rank)
        return map_constant(operands[0], _UNARY[name])
    if (name in _BINARY or name in ("add", "mul", "floor_divide")) and len(operands) >= 2:
        return _binary(call, name, operands[0], operands[1], rank)
    return None


def _binary(call: Call, name: str, left: Fact | None, right: Fact | None, rank: int) -> Fact | None:
    if name in ("div", "floor_divide") and (name == "floor_divide" or call.arg("rounding_mode") == "floor"):
        return _chunk_number(call, left, right)
    if call.arg("alpha", 1) not in (1, None) or call.arg("rounding_mode") is not None or name == "floor_divide":
        return None
    if isinstance(left, ChunkNumber) and isinstance(right, ChunkNumber) and left.size == right.size and left.dim != right.dim:
        first, last = min(left.dim, right.dim), max(left.dim, right.dim)
        same = TwoValued(frozenset({SameChunk(first, last, left.size)}), 1.0, 0.0)
        return same if name == "eq" else map_constant(same, operator.not_) if name == "ne" else None
    if isinstance(left, Nonzero) and isinstance(right, Constant) and right.value == 0:
        return left if name == "ne" else _zero(call, rank) if name == "eq" else None
    left, right = _masked_number(call, 0, left, rank), _masked_number(call, 1, right, rank)
    if (
        isinstance(left, Affine | Constant)
        and isinstance(right, Affine | Constant)
        and (isinstance(left, Affine) or isinstance(right, Affine))
    ):
        return _affine(name, left, right)
    if name == "add" or (name == "sub" and right is None):
        return added(left, right)
    if name == "mul":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, TwoValued) and not one.exact and isinstance(other, Constant) and other.value:
                return map_constant(one, lambda value, c=other.value: value * c)  # type: ignore[misc]
        finite = all(not t.is_floating_point() or call.layout_of(t).fact is not None for t in call.tensors)
        return multiplied(left, right) if finite else lift((left, right), operator.mul)
    for one, other in ((left, right), (right, left)):
        if name in _COMPARISONS and isinstance(one, TwoValued) and one.loose and isinstance(other, Constant) and is_blocking(other.value):
            return None
    function = _BINARY[name]
    if isinstance(right, Constant):
        return map_constant(left, lambda value: function(value, right.value))
    if isinstance(left, Constant):
        return map_constant(right, lambda value: function(left.value, value))
    return lift((left, right), function)


def _chunk_number(call: Call, left: Fact | None, right: Fact | None) -> Fact | None:
    """`column // size`."""
    counted = isinstance(left, Affine) and not left.batch and left.constant == 0 and [c for _, c in left.coefficients] == [1]
    whole = isinstance(right, Constant) and right.value.is_integer() and right.value > 0
    if not counted or not whole or call.out.is_floating_point():
        return None
    assert isinstance(left, Affine) and isinstance(right, Constant)  # noqa: PT018  (checked above)
    return ChunkNumber(left.coefficients[0][0], int(right.value))


def _masked_number(call: Call, index: int, fact: Fact | None, rank: int) -> Fact | None:
    """A padding mask in arithmetic: zero at padding, and an unknown number elsewhere."""
    if not isinstance(fact, Nonzero):
        return fact
    value = call.args[index]
    columns = call.layout_of(value).column_like_dims
    return TwoValued(frozenset({Valid(fact.node, columns[0] + rank - value.dim())}), None, 0.0, False) if len(columns) == 1 else None


def _zero(call: Call, rank: int) -> Fact | None:
    """Where a padding mask is zero: the opposite of a condition on the key."""
    value = call.tensors[0]
    fact, columns = call.layout_of(value).fact, call.layout_of(value).column_like_dims
    if not isinstance(fact, Nonzero) or len(columns) != 1:
        return None
    return TwoValued(frozenset({Valid(fact.node, columns[0] + rank - value.dim())}), 0.0, 1.0)


def _affine(name: str, left: Fact, right: Fact) -> Fact | None:
    sides: list[Affine] = []
    for side in (left, right):
        if isinstance(side, Constant):
            if not side.value.is_integer():
                return None
            side = Affine((), int(side.value))
        if not isinstance(side, Affine):
            return None
        sides.append(side)
    a, b = sides
    if a.batch or b.batch:
        other = b if a.batch else a
        return (a if a.batch else b) if name in ("add", "sub") and not other.coefficients and other.constant == 0 and a.batch else None
    if name == "add":
        return combine_affine(a, b, 1)
    if name == "sub":
        return combine_affine(a, b, -1)
    if name == "rsub":
        return combine_affine(b, a, -1)
    difference = combine_affine(a, b, -1)
    if name == "eq":
        return equal(difference)
    if name == "ne":
        return opposite(equal(difference))
    if name == "ge":
        return at_least(difference)
    if name == "gt":
        return at_least(combine_affine(difference, Affine((), 1), -1))
    difference = combine_affine(b, a, -1)
    if name == "le":
        return at_least(difference)
    if name == "lt":
        return at_least(combine_affine(difference, Affine((), 1), -1))
    return None


def _cast(call: Call, fact: Fact | None) -> Fact | None:
    dtype = call.out.dtype
    if isinstance(fact, Integers):
        return fact.held_as(dtype)
    if isinstance(fact, Numbering):
        wide = (torch.int32, torch.int64, *((torch.float32, torch.float64) if isinstance(fact, Tally) else ()))
        return fact if dtype in wide else None
    if isinstance(fact, Affine):
        return fact if not dtype.is_complex and dtype not in (torch.bool, torch.int8, torch.uint8, torch.float16, torch.bfloat16) else None
    if isinstance(fact, Nonzero):
        if call.tensors[0].dtype == torch.bool and dtype != torch.bool:
            return _keyed(call, 0, call.out.dim(), fact)
        before = call.tensors[0].dtype
        keeps = not before.is_floating_point and (dtype.is_floating_point or dtype.itemsize >= before.itemsize)
        return fact if dtype == torch.bool or keeps else None
    return held_as(fact, dtype)


def _aligned(call: Call, value: Any, rank: int) -> Fact | None:
    """The fact of an operand with its dimensions counted in the broadcast result."""
    if isinstance(value, bool | int | float):
        return Constant(float(value))
    if not isinstance(value, torch.Tensor):
        return None
    layout = call.layout_of(value)
    if isinstance(layout.fact, Triangle):
        return layout.fact
    shift = rank - value.dim()
    return renumber(layout.fact, {d: d + shift for d in range(value.dim())})


def _told(call: Call, index: int, fact: Fact | None) -> Fact | None:
    """A library's mask as the conditions it consists of."""
    value = call.args[index]
    if isinstance(fact, MaskSpec) and isinstance(value, torch.Tensor) and value.dim() == call.out.dim() >= 2:
        return conditions_of(fact, value.dim(), value.dtype == torch.bool)
    return None if isinstance(fact, MaskSpec) else fact


def _keyed(call: Call, index: int, rank: int, fact: Fact | None) -> Fact | None:
    """A boolean padding mask becomes a condition on the key along its column dimension."""
    value = call.args[index]
    if isinstance(fact, Nonzero) and isinstance(value, torch.Tensor) and value.dtype == torch.bool:
        columns = call.layout_of(value).column_like_dims
        if len(columns) == 1:
            return TwoValued(frozenset({Valid(fact.node, columns[0] + rank - value.dim())}), 1.0, 0.0)
    return fact


@rule("tril", "triu")
def triangle(call: Call) -> Layout:
    """Keeps the lower or upper triangle of the last two dimensions: a pairwise mask if both are columns."""
    base = call.layout_of(call.tensors[0])
    offset, lower = call.arg("diagonal", 0), call.func._schema.name.rstrip("_").endswith("tril")
    if not (base.token_dim(-1) or base.token_dim(-2)):
        return call.result(base.dims, fact=_table(call, base, lower))
    rank = len(base.dims)
    if not base.is_pairs:
        raise NotPackable("a triangle of something that is not a (query, key) matrix")
    fact: Fact | None = None
    if isinstance(offset, int):
        # tril keeps key - query <= offset; triu keeps key - query >= offset
        kept = (
            at_least(Affine(((rank - 2, 1), (rank - 1, -1)), offset))
            if lower
            else at_least(Affine(((rank - 2, -1), (rank - 1, 1)), -offset))
        )
        fact = lift((kept, base.fact), lambda keep, value: value if keep else 0.0)
        if fact is None and not call.out.is_floating_point():
            fact = multiplied(kept, base.fact)
    # the packed form compares dense columns, which a triangle of physical tokens would not
    dense = Layout(base.dims, base.reach.join(COLUMN), entry=base.entry, fact=fact)
    raise NotPackable("a triangle is cut by physical position", dense=dense)


def _table(call: Call, base: Layout, lower: bool) -> Fact | None:
    """A causal table made from a constant one of fixed size."""
    size = call.out.shape[-1]
    if not isinstance(base.fact, Constant) or not isinstance(size, int) or call.out.shape[-2] != size or size < 2:
        return None
    if lower and call.arg("diagonal", 0) == 0:
        return Triangle(base.fact.value, 0.0, size)
    return Triangle(0.0, base.fact.value, size) if not lower and call.arg("diagonal", 0) == 1 else None
