"""What is left of a fact after a view: dimensions that moved, and columns that were cut off."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sp_compile.analysis.facts import Affine, Atom, ChunkNumber, Condition, Constant, Fact, Nonzero, SameChunk, Triangle, TwoValued, Valid
from sp_compile.analysis.permutations import Whole


def renumber(fact: Fact | None, places: Mapping[int, int]) -> Fact | None:
    """The fact after a view that moved dimension d to `places[d]`; a fact about a dimension that is gone is dropped."""
    if isinstance(fact, Affine):
        if any(d not in places for d, _ in fact.coefficients):
            return None
        return dataclasses.replace(fact, coefficients=tuple(sorted((places[d], c) for d, c in fact.coefficients)))
    if isinstance(fact, TwoValued):
        moved: set[Condition] = set()
        for condition in fact.conditions:
            if isinstance(condition, Atom):
                if condition.left not in places or condition.right not in places:
                    return None
                moved.add(dataclasses.replace(condition, left=places[condition.left], right=places[condition.right]))
            elif isinstance(condition, SameChunk):
                if condition.left not in places or condition.right not in places:
                    return None
                moved.add(SameChunk(places[condition.left], places[condition.right], condition.size))
            elif not set(condition.dims) <= set(places):
                return None
            else:
                moved.add(Valid(condition.node, *(places[d] for d in condition.dims if d is not None)))
        return dataclasses.replace(fact, conditions=frozenset(moved))
    if isinstance(fact, ChunkNumber):
        return ChunkNumber(places[fact.dim], fact.size) if fact.dim in places else None
    if isinstance(fact, Triangle) or (isinstance(fact, Whole) and dict(places) != {0: 0}):
        return None
    return fact


def cut(fact: Fact | None, dim: int, start: int) -> Fact | None:
    """The fact after the first `start` columns along a dimension were cut off, and any number of the last ones."""
    if isinstance(fact, Constant) or (isinstance(fact, Nonzero) and not start):
        return fact
    if isinstance(fact, Affine) and not fact.batch:
        return dataclasses.replace(fact, constant=fact.constant + dict(fact.coefficients).get(dim, 0) * start)
    if not isinstance(fact, TwoValued):
        return None
    kept: set[Condition] = set()
    for condition in fact.conditions:
        if isinstance(condition, Atom):
            by = start * ((condition.left == dim) - (condition.right == dim))
            kept.add(dataclasses.replace(condition, bound=condition.bound - by))
        elif not start or dim not in (condition.dims if isinstance(condition, Valid) else (condition.left, condition.right)):
            kept.add(condition)
    if len(kept) == len(fact.conditions):
        return dataclasses.replace(fact, conditions=frozenset(kept))
    return TwoValued(frozenset(kept), None, fact.if_false, False, fact.loose) if kept else None
