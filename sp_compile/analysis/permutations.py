"""Tokens in another order, or some of them: what a sort over all tokens or a mask of them gives, and the numbers that lead there and back.

Experts are computed on sorted tokens. The sort gives other places, and other counts per expert, on physical tokens than on rows: such
numbers (`Numbering`) may only be used to move values there and back, and to say where a group ends. What is computed on the way for one
token depends on that token alone, so it is the same in both. A mask chooses a shared token in all of its rows or in none.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, TypeAlias

import sympy
import torch

if TYPE_CHECKING:
    from sp_compile.analysis.layouts import Reach

Factors: TypeAlias = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Permuted:
    """A factor: all elements of `inner`, tokens included, in another order.

    Attributes:
        inner: the factors whose row-major order was changed.
        name: tells one order from another.
        key: the values (see `Integers`) that ascend in this order, or None.
    """

    inner: Factors
    name: int
    key: int | None = None

    def __repr__(self) -> str:
        return f"sorted({'x'.join(map(str, self.inner))})"


@dataclasses.dataclass(frozen=True)
class Part:
    """A factor: those elements of `inner`, tokens included, that a mask chooses, in their order.

    Attributes:
        inner: the factors of the mask, row-major.
        mask: tells one mask from another.
        size: the symbol of their number, which is one on rows and another one on physical tokens.
        reach: of the mask.
    """

    inner: Factors
    mask: int
    size: sympy.Expr
    reach: Reach

    def __repr__(self) -> str:
        return f"chosen({'x'.join(map(str, self.inner))})"


@dataclasses.dataclass(frozen=True)
class Integers:
    """Every element is an integer in [0, below).

    Attributes:
        key: names a value that each element is equal to at its own token, each element of that value occurring equally often. Views and
            permutations keep it; a part of a value has another one.
    """

    below: int
    key: int

    def held_as(self, dtype: torch.dtype) -> Integers | None:
        whole = 2 / torch.finfo(dtype).eps if dtype.is_floating_point else 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
        return self if not dtype.is_complex and self.below <= whole else None


@dataclasses.dataclass(frozen=True)
class Numbering:
    """Numbers that are others on physical tokens than on rows."""


@dataclasses.dataclass(frozen=True)
class Place(Numbering):
    """Every element is the place of its own token element in the row-major order of `factors`."""

    factors: Factors


@dataclasses.dataclass(frozen=True)
class Inverse(Numbering):
    """Every element is the place of its own token element in a permuted order."""

    order: Permuted


@dataclasses.dataclass(frozen=True)
class Whole(Numbering):
    """A statement about a value of one dimension as a whole; a part of it, or another shape, does not have it."""


@dataclasses.dataclass(frozen=True)
class Coordinates(Whole):
    """Every row is the place of a chosen element along each of a mask's dimensions."""

    dims: tuple[Factors, ...]


@dataclasses.dataclass(frozen=True)
class Count(Whole):
    """0, 1, 2, ... up to the number of elements of `factors`, in whatever order they stand."""

    factors: Factors


@dataclasses.dataclass(frozen=True)
class Tally(Whole):
    """How often each of the integers from 0 to bins - 1 occurs.

    Attributes:
        key: the values that were counted.
        elements: how many of them there are per token.
        bins: more than the greatest of them.
        reach: of the values.
        summed: each number includes those before it, so it tells where the group of sorted elements ends.
    """

    key: int
    elements: int
    bins: int
    reach: Reach
    summed: bool = False


@dataclasses.dataclass(frozen=True)
class Check(Numbering):
    """Whether something holds of every token that is computed. It may be asserted; as a value it would leave dropped padding out."""


def per_token(factors: Factors) -> int | None:
    """The number of elements per token of a dimension of all tokens, or None if factors other than tokens and numbers are in it."""
    sizes = [factor for factor in factors if isinstance(factor, int)]
    inner = [factor.inner for factor in factors if isinstance(factor, Permuted)]
    if inner:
        within = per_token(inner[0])
        return None if within is None or len(sizes) + 1 != len(factors) else within * math.prod(sizes)
    return math.prod(sizes)


def narrowed(fact: Any, part: torch.Tensor) -> Integers | None:
    """What is left of a fact in a part of the value."""
    return Integers(fact.below, id(part)) if isinstance(fact, Integers) else None
