"""What is known about the elements of a value, as far as masks and positions need it.

Facts are elementwise statements that survive views: a dimension is named by its index in the value that carries the fact.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from sp_compile.analysis.permutations import Integers, Numbering
from sp_compile.ops.blocking import BLOCKED, is_blocking


@dataclasses.dataclass(frozen=True)
class Atom:
    """`column[left] - column[right] >= bound`, a condition on the column numbers along two dimensions.

    With `given`, that it decides is no property of the graph but was read in the values of that input, and has to be looked at again.
    """

    left: int
    right: int
    bound: int
    given: str | None = None

    def negated(self) -> Atom:
        return Atom(self.right, self.left, 1 - self.bound, self.given)


@dataclasses.dataclass(frozen=True)
class Valid:
    """The element of graph node `node` (one per token) is nonzero, read at the key column along `dim`; None before broadcasting.

    With `unless`, or the columns along `dim` and `unless` are one: a pad is hidden from all but itself.
    """

    node: str
    dim: int | None
    unless: int | None = None

    @property
    def dims(self) -> tuple[int | None, ...]:
        return (self.dim,) if self.unless is None else (self.dim, self.unless)


@dataclasses.dataclass(frozen=True)
class SameChunk:
    """The columns along two dimensions lie in one chunk of `size` columns."""

    left: int
    right: int
    size: int


Condition: TypeAlias = "Atom | Valid | SameChunk"


@dataclasses.dataclass(frozen=True)
class ChunkNumber:
    """The column number along a dimension, divided by a chunk's size and rounded down."""

    dim: int
    size: int


@dataclasses.dataclass(frozen=True)
class Affine:
    """An integer `constant + sum(coefficient * column number along dim)`; `batch` marks row numbers instead of columns."""

    coefficients: tuple[tuple[int, int], ...]
    constant: int = 0
    batch: bool = False


@dataclasses.dataclass(frozen=True)
class Constant:
    """Every element equals `value`."""

    value: float


@dataclasses.dataclass(frozen=True)
class TwoValued:
    """`if_false` wherever some condition fails; where all hold, `if_true` (None: anything).

    With `exact`, the conditions are the whole story: where all hold, the value *is* `if_true`. With `loose`, `if_false` stands for
    any value that blocks.
    """

    conditions: frozenset[Condition]
    if_true: float | None
    if_false: float
    exact: bool = True
    loose: bool = False


@dataclasses.dataclass(frozen=True)
class Nonzero:
    """Nonzero exactly where the token input `node` is nonzero (a padding mask and its casts)."""

    node: str


@dataclasses.dataclass(frozen=True)
class Triangle:
    """A constant square table: `lower` on and below the diagonal of its last two dimensions, `upper` above.

    With a window, `lower` fills only the diagonal and `window - 1` places to the left of it.
    """

    lower: float
    upper: float
    size: int
    cut: frozenset[int] = frozenset()
    window: int | None = None


@dataclasses.dataclass(frozen=True)
class MaskSpec:
    """A causal attention mask in structured form, as a library's mask function states it.

    Attributes:
        window: visible columns including the query's own, or None.
        chunk: attention stays inside chunks of this many columns, or None.
        padding: node of the [B, L] key mask (nonzero = real), or None.
        segments: node of the [B, L] document numbers, or None.
    """

    window: int | None = None
    chunk: int | None = None
    padding: str | None = None
    segments: str | None = None


Fact: TypeAlias = "Affine | ChunkNumber | Constant | TwoValued | Nonzero | Triangle | MaskSpec | Integers | Numbering"


def conditions_of(spec: MaskSpec, rank: int, boolean: bool) -> TwoValued:
    """A library's mask [..., query, key] of a rank as conditions, so that it can be combined with others."""
    query, key = rank - 2, rank - 1
    found: set[Condition] = {Atom(query, key, 0)}
    if spec.window is not None:
        found.add(Atom(key, query, 1 - spec.window))
    if spec.chunk is not None:
        found.add(SameChunk(query, key, spec.chunk))
    if spec.padding is not None:
        found.add(Valid(spec.padding, key))
    exact = spec.segments is None
    visible, hidden = (1.0, 0.0) if boolean else (0.0, BLOCKED)
    return TwoValued(frozenset(found), visible if exact else None, hidden, exact, loose=not boolean)


def map_constant(fact: Fact | None, function: Callable[[float], float]) -> Fact | None:
    """The fact after an elementwise function of one argument."""
    try:
        if isinstance(fact, Constant):
            return Constant(float(function(fact.value)))
        if isinstance(fact, TwoValued):
            if_true = None if fact.if_true is None else float(function(fact.if_true))
            found = {float(function(value)) for value in ((fact.if_false, BLOCKED, -math.inf) if fact.loose else (fact.if_false,))}
            if len(found) > 1 and not all(map(is_blocking, found)):
                return None
            return dataclasses.replace(fact, if_true=if_true, if_false=max(found), loose=len(found) > 1)
        if isinstance(fact, Triangle):
            return dataclasses.replace(fact, lower=float(function(fact.lower)), upper=float(function(fact.upper)))
    except (ValueError, OverflowError, ZeroDivisionError):
        return None
    return None


def held_as(fact: Fact | None, dtype: torch.dtype) -> Fact | None:
    """The fact once its values are held in a dtype: a boolean or integer one cuts fractions off."""
    if dtype == torch.bool:
        return map_constant(fact, lambda value: float(bool(value)))
    return fact if dtype.is_floating_point or dtype.is_complex else map_constant(fact, lambda value: float(int(value)))


def turned(fact: TwoValued) -> TwoValued | None:
    """The same fact told by the opposite condition, if there is one."""
    only = next(iter(fact.conditions)) if len(fact.conditions) == 1 else None
    if not fact.exact or fact.if_true is None or fact.loose or not isinstance(only, Atom):
        return None
    return TwoValued(frozenset({only.negated()}), fact.if_false, fact.if_true)


def facing(fact: Fact | None, wanted: Callable[[float], bool]) -> TwoValued | None:
    """A two-valued fact in the form whose value outside of the conditions is the wanted one, or None."""
    if isinstance(fact, Constant) and not wanted(fact.value):
        return None if fact.value != fact.value else TwoValued(frozenset(), fact.value, math.nan)
    if not isinstance(fact, TwoValued):
        return None
    return next((form for form in (fact, turned(fact)) if form is not None and wanted(form.if_false)), None)


def lift(facts: Sequence[Fact | None], function: Callable[..., float]) -> Fact | None:
    """The fact after an elementwise function of values that are known exactly, or None.

    With several sets of conditions the function must come to one value wherever any of them fails; values that block a mask count as one.
    """
    forms: list[list[TwoValued]] = []
    for fact in facts:
        if isinstance(fact, Constant):
            forms.append([TwoValued(frozenset(), fact.value, fact.value)])
        elif isinstance(fact, TwoValued) and fact.exact and fact.if_true is not None:
            forms.append([form for form in (fact, turned(fact)) if form is not None])
        else:
            return None
    for chosen in itertools.product(*forms):
        sets = sorted({form.conditions for form in chosen if form.conditions}, key=repr)
        values = {}
        for truth in itertools.product((True, False), repeat=len(sets)):
            known = dict(zip(sets, truth, strict=True))
            given = [form.if_true if known.get(form.conditions, True) else form.if_false for form in chosen]
            try:
                values[truth] = float(function(*given))
            except (ValueError, OverflowError, ZeroDivisionError):
                values[truth] = math.nan
        if any(math.isnan(value) for value in values.values()):
            return None
        first = values.pop((True,) * len(sets))
        others = set(values.values())
        if not others:
            return Constant(first)
        if len(others) == 1 or all(is_blocking(value) for value in others):
            loose = len(others) > 1 or any(form.loose for form in chosen)
            return TwoValued(frozenset().union(*sets), first, max(others), loose=loose and is_blocking(max(others)))
    return None


def conjunction(left: Fact | None, right: Fact | None) -> Fact | None:
    """The fact about `left & right`; conditions of a known side still bind when the other side is unknown."""
    exact = lift((left, right), lambda a, b: bool(a) and bool(b))
    known = [c for c in (facing(left, operator.not_), facing(right, operator.not_)) if c is not None and c.conditions]
    if exact is not None or not known:
        dual = _or_diagonal(opposite(left), opposite(right))
        return exact if dual is None or not dual.exact else opposite(dual)
    return TwoValued(frozenset().union(*(c.conditions for c in known)), None, 0.0, False)


def diagonal(one: int, other: int) -> TwoValued:
    """1 where the columns along two dimensions are one, else 0."""
    return TwoValued(frozenset({Atom(one, other, 0), Atom(other, one, 0)}), 1.0, 0.0)


def _beside_diagonal(fact: TwoValued, one: int, other: int) -> TwoValued:
    """The fact about `fact | diagonal(one, other)`, for one that is 0 wherever a condition fails: those the diagonal meets stay."""
    found: set[Condition] = set()
    for condition in fact.conditions:
        if isinstance(condition, Valid):
            if condition.unless is None and condition.dim in (one, other):
                found.add(dataclasses.replace(condition, unless=other if condition.dim == one else one))
            elif condition.unless is not None and set(condition.dims) == {one, other}:
                found.add(condition)
        elif {condition.left, condition.right} == {one, other} and (isinstance(condition, SameChunk) or condition.bound <= 1):
            # columns that are one differ by 0; `>= 1 or equal` is `>= 0`
            found.add(condition if isinstance(condition, SameChunk) else dataclasses.replace(condition, bound=min(condition.bound, 0)))
    exact = fact.exact and len(found) == len(fact.conditions)
    return TwoValued(frozenset(found), fact.if_true if exact else None, 0.0, exact)


def _or_diagonal(left: Fact | None, right: Fact | None) -> TwoValued | None:
    """The fact about `left | right` if one side is a diagonal, else None."""
    for side, other in ((left, right), (right, left)):
        atom = next((c for c in side.conditions if isinstance(c, Atom)), None) if isinstance(side, TwoValued) else None
        form = facing(other, operator.not_)
        if atom is not None and side == diagonal(atom.left, atom.right) and form is not None and form.conditions:
            return _beside_diagonal(form, atom.left, atom.right)
    return None


def disjunction(left: Fact | None, right: Fact | None) -> Fact | None:
    """The fact about `left | right`: true wherever a known side is, and only conditions that both sides demand still bind."""
    exact = lift((left, right), lambda a, b: bool(a) or bool(b))
    if exact is not None:
        return exact
    beside = _or_diagonal(left, right)
    if beside is not None:
        return beside
    a, b = facing(left, operator.not_), facing(right, operator.not_)
    if a is not None and b is not None and a.conditions & b.conditions:
        return TwoValued(a.conditions & b.conditions, None, 0.0, False)
    true = [c for c in (facing(left, bool), facing(right, bool)) if c is not None and c.conditions]
    return TwoValued(frozenset().union(*(c.conditions for c in true)), None, 1.0, False) if true else None


def added(left: Fact | None, right: Fact | None) -> Fact | None:
    """The fact about a sum of additive masks: blocked where either blocks."""
    for a, b in ((left, right), (right, left)):
        if isinstance(b, Constant) and a is not None:
            return map_constant(a, lambda value, c=b.value: value + c)  # type: ignore[misc]
    if isinstance(left, Affine) and isinstance(right, Affine) and not left.batch and not right.batch:
        return combine_affine(left, right, 1)
    exact = lift((left, right), operator.add)
    masks = [m for m in (facing(left, is_blocking), facing(right, is_blocking)) if m is not None and m.conditions]
    if exact is not None or not masks:
        return exact
    # minus infinity stays so, whatever finite number is added
    loose = any(m.loose or m.if_false != -math.inf for m in masks)
    return TwoValued(frozenset().union(*(m.conditions for m in masks)), None, -math.inf, False, loose=loose)


def multiplied(left: Fact | None, right: Fact | None) -> Fact | None:
    """The fact about a product of finite values: zero where either is."""
    exact = lift((left, right), operator.mul)
    zeros = [z for z in (facing(left, operator.not_), facing(right, operator.not_)) if z is not None and z.conditions]
    if exact is not None or not zeros:
        return exact
    return TwoValued(frozenset().union(*(z.conditions for z in zeros)), None, 0.0, False)


def selected(condition: Fact | None, if_true: Fact | None, if_false: Fact | None, boolean: bool) -> Fact | None:
    """The fact about `where(condition, if_true, if_false)`.

    Args:
        boolean: the result is boolean, hence hidden where it is 0; else hidden where it blocks.
    """
    exact = lift((condition, if_true, if_false), lambda c, a, b: a if c else b)
    if exact is not None:
        return exact

    for side, mask, other in ((if_true, condition, if_false), (if_false, opposite(condition), if_true)):
        if boolean and isinstance(side, Constant) and side.value:
            return disjunction(mask, other)

    def hides(value: float) -> bool:
        return value == 0.0 if boolean else is_blocking(value)

    # the condition hides pairs by itself
    for side, other, wanted in ((if_true, if_false, bool), (if_false, if_true, operator.not_)):
        form = facing(condition, wanted)
        if form is not None and form.conditions and isinstance(side, Constant) and hides(side.value):
            rest = facing(other, hides)
            more = rest.conditions if rest is not None else frozenset()
            return TwoValued(form.conditions | more, None, side.value, False, loose=bool(more) and not boolean)
    # both sides hide pairs, whatever the condition is
    a, b = facing(if_true, hides), facing(if_false, hides)
    for one, constant in ((a, if_false), (b, if_true)):
        if one is not None and one.conditions and isinstance(constant, Constant) and hides(constant.value):
            return TwoValued(one.conditions, None, max(one.if_false, constant.value), False, loose=not boolean)
    if a is not None and b is not None and a.conditions & b.conditions:
        return TwoValued(a.conditions & b.conditions, None, max(a.if_false, b.if_false), False, loose=not boolean)
    for side, mask, other in ((if_false, condition, if_true), (if_true, opposite(condition), if_false)):
        if boolean and isinstance(side, Constant) and not side.value:
            return conjunction(mask, other)
    return None


def opposite(fact: Fact | None) -> Fact | None:
    """The fact about `not fact`."""
    return map_constant(fact, lambda value: float(not value))


def equal(fact: Affine) -> TwoValued | None:
    """The condition `fact == 0`, if it says that two column numbers are one."""
    terms = dict(fact.coefficients)
    return diagonal(*terms) if sorted(terms.values()) == [-1, 1] and not fact.constant and not fact.batch else None


def combine_affine(left: Affine, right: Affine, sign: int) -> Affine:
    total: dict[int, int] = dict(left.coefficients)
    for dim, value in right.coefficients:
        total[dim] = total.get(dim, 0) + sign * value
    kept = tuple(sorted((d, c) for d, c in total.items() if c))
    return Affine(kept, left.constant + sign * right.constant)


def at_least(fact: Affine) -> TwoValued | None:
    """The condition `fact >= 0`, if it compares two column numbers."""
    terms = dict(fact.coefficients)
    if len(terms) == 2 and sorted(terms.values()) == [-1, 1]:
        left = next(d for d, c in terms.items() if c == 1)
        right = next(d for d, c in terms.items() if c == -1)
        return TwoValued(frozenset({Atom(left, right, -fact.constant)}), 1.0, 0.0)
    return None
