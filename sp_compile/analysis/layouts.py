"""The token-layout lattice: what is known about one value of the dense graph.

A layout has two parts. The *dims* say where the tokens are: each dimension is a row-major product of factors, a factor being
the batch (`B`), the columns (`L`), a shifted or padded column axis (`Columns`), or a plain size. The *reach* says which columns
of its own row an element may depend on; two rows that agree that far hold the same value.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeAlias

import sympy
import torch

from sp_compile.analysis.facts import Fact
from sp_compile.analysis.permutations import Numbering, Part, Permuted


class Axis(enum.Enum):
    """A token factor of a dimension."""

    BATCH = "B"
    COLUMNS = "L"

    def __repr__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True)
class Span:
    """A column-like axis whose length is not L, such as labels padded by one or `ids[:, 1:]`."""

    size: sympy.Expr

    def __repr__(self) -> str:
        return f"<{self.size}>"


Factor: TypeAlias = "Axis | Span | Permuted | Part | int | sympy.Expr"
Dim: TypeAlias = tuple[Factor, ...]
Dims: TypeAlias = tuple[Dim, ...]


class Kind(enum.IntEnum):
    """The order of the lattice, coarsest sharing first."""

    UNIFORM = 0  # does not depend on tokens
    COLUMN = 1  # depends on the column number alone
    TOKENS = 2  # depends on the row's tokens through column l + shift
    PLACES = 3  # tells where sorted tokens stand: other numbers on physical tokens, and no values of them
    ROWS = 4  # nothing is known: one value per row and column


@dataclasses.dataclass(frozen=True)
class Reach:
    """Which columns of its row an element at column l may read: those through l + shift."""

    kind: Kind
    shift: int = 0

    def join(self, other: Reach) -> Reach:
        kind = max(self.kind, other.kind)
        shifts = [r.shift for r in (self, other) if r.kind == Kind.TOKENS]
        return Reach(kind, max(shifts) if kind == Kind.TOKENS else 0)

    def moved(self, by: int) -> Reach:
        """The reach after element j became element j - by."""
        return Reach(self.kind, self.shift + by) if self.kind == Kind.TOKENS else self

    @property
    def shared(self) -> bool:
        """Whether rows that agree through column l hold equal values there."""
        return self.kind in (Kind.UNIFORM, Kind.COLUMN) or (self.kind == Kind.TOKENS and self.shift <= 0)


UNIFORM = Reach(Kind.UNIFORM)
COLUMN = Reach(Kind.COLUMN)
TOKENS = Reach(Kind.TOKENS)
PLACES = Reach(Kind.PLACES)
ROWS = Reach(Kind.ROWS)


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a value could not be proved shared: the op that ended the proof."""

    text: str
    op: str = ""
    node: str = ""
    source: str = ""
    advice: str = ""


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is known about one tensor.

    Attributes:
        dims: the factors of every dimension, row-major.
        reach: which columns an element may depend on.
        entry: computable from the graph's inputs without any token-by-parameter arithmetic, hence cheap to run densely.
        why: for `ROWS`, the reason; else None.
        fact: what is known about the elements themselves (column numbers, constants, masks), or None.
        head: the first elements of a joined column axis that reach further than the rest: (how many, their shift), in order.
        rows_behind: of packed values, whether the batch, which is one there, may stand behind the tokens, or be merged into them so.
    """

    dims: Dims
    reach: Reach
    entry: bool = False
    why: Reason | None = None
    fact: Fact | None = None
    head: tuple[tuple[int, int], ...] = ()
    rows_behind: bool = False

    @property
    def folded(self) -> Layout:
        """The layout with its head counted like the rest of the axis."""
        if not self.head:
            return self
        shifts = [shift for _, shift in self.head]
        return dataclasses.replace(self, reach=self.reach.join(Reach(Kind.TOKENS, max(shifts))), head=())

    @property
    def is_rows(self) -> bool:
        return self.reach.kind == Kind.ROWS

    @property
    def packable(self) -> bool:
        """Whether an op on physical tokens may give this value."""
        return not self.has_spans and (self.reach.shared or (self.reach.kind is Kind.PLACES and isinstance(self.fact, Numbering)))

    @property
    def sorted(self) -> bool:
        """Whether the value belongs to tokens in another order, or to some of them: others on rows than on physical tokens."""
        return self.reach.kind is Kind.PLACES or any(isinstance(f, Permuted | Part) for dim in self.dims for f in dim)

    @property
    def axes(self) -> list[tuple[int, Axis]]:
        return [(i, f) for i, dim in enumerate(self.dims) for f in dim if isinstance(f, Axis)]

    @property
    def has_tokens(self) -> bool:
        return any(isinstance(f, Axis | Span | Permuted | Part) for dim in self.dims for f in dim)

    @property
    def has_spans(self) -> bool:
        return any(isinstance(f, Span) for f in self.factors)

    @property
    def factors(self) -> list[Factor]:
        """All factors, those of a changed order included."""
        found: list[Factor] = []
        for factor in (factor for dim in self.dims for factor in dim):
            found += plain_factors(factor) if isinstance(factor, Permuted | Part) else [factor]
        return found

    def lacks_last_columns(self, symbols: Symbols) -> bool:
        """Whether each shifted or padded column axis has the batch's columns but for a number of the last ones."""
        cuts = [symbols.columns - f.size for f in self.factors if isinstance(f, Span)]
        return all(cut.is_Integer and cut > 0 for cut in cuts)

    @property
    def columns_dims(self) -> list[int]:
        """Dimensions that carry a column axis, in order; two of them make a pairwise value (query, key)."""
        return [i for i, axis in self.axes if axis is Axis.COLUMNS]

    @property
    def column_like_dims(self) -> list[int]:
        """Dimensions that carry a column axis, shifted and padded ones included, in order."""
        return [i for i, dim in enumerate(self.dims) for f in dim if f is Axis.COLUMNS or isinstance(f, Span)]

    @property
    def is_pairs(self) -> bool:
        """Whether the last two dimensions are the same columns, (query, key), and no other one has any."""
        rank = len(self.dims)
        alone = rank >= 2 and self.dims[-1] == self.dims[-2] and len(self.dims[-1]) == 1
        return alone and self.column_like_dims == [rank - 2, rank - 1]

    @property
    def column_like(self) -> list[Factor]:
        """The column axes, shifted and padded ones included."""
        return [f for f in self.factors if f is Axis.COLUMNS or isinstance(f, Span)]

    def moved(self, by: int) -> Reach:
        """The reach after element j became element j - by of one column axis; moving one axis back leaves what others read."""
        return self.reach.moved(by if len(self.column_like) == 1 else max(by, 0))

    def token_dim(self, index: int) -> bool:
        return any(isinstance(f, Axis | Span | Permuted | Part) for f in self.dims[index])

    def may_be_rows(self, index: int) -> bool:
        """Of packed values with tokens: whether a dimension of size 1 may be the batch. Only one behind all tokens can be told from it."""
        last = max((i for i in range(len(self.dims)) if self.token_dim(i)), default=-1)
        return self.dims[index] == () and (self.rows_behind or index < last)

    def with_(self, **changes: Any) -> Layout:
        return dataclasses.replace(self, **changes)


def plain_factors(factor: Permuted | Part) -> list[Factor]:
    found: list[Factor] = []
    for inner in factor.inner:
        found += plain_factors(inner) if isinstance(inner, Permuted | Part) else [inner]
    return found


def rows(why: Reason, *, entry: bool = False) -> Layout:
    return Layout((), ROWS, entry=entry, why=why)


@dataclasses.dataclass(frozen=True)
class Symbols:
    """The two symbols of the analysed graph: rows B and columns L.

    `packed` says that the caller holds packed values: the batch dimension of every token value is one, and L columns are T tokens.
    """

    batch: sympy.Symbol
    columns: sympy.Symbol
    packed: bool = False

    @property
    def rows_dim(self) -> Dim:
        """The batch dimension of a value with one entry per token."""
        return () if self.packed else (Axis.BATCH,)

    def mentions(self, value: object) -> bool:
        """Whether a size or number depends on B or L."""
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return bool(value.node.expr.free_symbols & {self.batch, self.columns})
        return False

    def dim(self, size: int | torch.SymInt) -> Dim:
        """The factors of a dimension known by its size alone; a size that is no product of B, L and constants is a Span."""
        if isinstance(size, int):
            return () if size == 1 else (size,)
        expr = size.node.expr
        if not expr.free_symbols & {self.batch, self.columns}:
            return () if expr == 1 else (as_size(expr),)
        rest: sympy.Expr = expr
        found: list[Factor] = []
        for symbol, axis in ((self.batch, Axis.BATCH), (self.columns, Axis.COLUMNS)):
            quotient = sympy.cancel(rest / symbol)
            if sympy.fraction(quotient)[1] == 1 and not quotient.has(symbol) and rest.has(symbol):
                found.append(axis)
                rest = quotient
        if found == [Axis.BATCH] and rest.free_symbols == {self.columns} and rest.is_polynomial(self.columns):
            times = rest.coeff(self.columns, 1)
            span = sympy.cancel(rest / times) if times != 0 else rest
            if times.is_Integer and (span - self.columns).is_Integer:
                return (*found, Span(span), *(() if times == 1 else (int(times),)))
        if rest.free_symbols & {self.batch, self.columns}:
            return (Span(expr),)
        return (*found, *(() if rest == 1 else (as_size(rest),)))

    def expr(self, factor: Factor) -> sympy.Expr:
        if factor is Axis.BATCH:
            return self.batch
        if factor is Axis.COLUMNS:
            return self.columns
        if isinstance(factor, Span):
            return factor.size
        if isinstance(factor, Permuted):
            return self.size(factor.inner)
        if isinstance(factor, Part):
            return factor.size
        return sympy.sympify(factor)

    def size(self, dim: Dim) -> sympy.Expr:
        result: sympy.Expr = sympy.Integer(1)
        for factor in dim:
            result = result * self.expr(factor)
        return result


def covers_tokens(dim: Dim, symbols: Symbols) -> bool:
    """Whether a dimension holds every token of the batch, a number of times each."""
    axes = [factor for factor in dim if not isinstance(factor, int)]
    if not symbols.packed:
        axes = [Axis.COLUMNS if isinstance(factor, Span) else factor for factor in axes]
    wanted = [Axis.COLUMNS] if symbols.packed else [Axis.BATCH, Axis.COLUMNS]
    return sorted(map(repr, axes)) == sorted(map(repr, wanted))


def as_size(expr: sympy.Expr) -> int | sympy.Expr:
    return int(expr) if expr.is_Integer else expr


def size_expr(size: int | torch.SymInt) -> sympy.Expr:
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr


def regroup(dims: Dims, sizes: list[int | torch.SymInt], symbols: Symbols) -> Dims | None:
    """The dims of a row-major view to `sizes`, or None if a token factor would be cut or would change its place.

    `[(B), (L), (64)]` viewed as `[B * L, 4, 16]` gives `[(B, L), (4), (16)]`; `[(L), (B)]` viewed as `[B, L]` gives None, since
    rows would be mixed.
    """
    todo: list[Factor] = [factor for dim in dims for factor in dim]
    result: list[Dim] = []
    for size in sizes:
        remaining = size_expr(size)
        taken: list[Factor] = []
        while remaining != 1:
            if not todo:
                return None
            factor = todo.pop(0)
            value = symbols.expr(factor)
            quotient = sympy.cancel(remaining / value)
            if sympy.fraction(quotient)[1] == 1:
                taken.append(factor)
                remaining = quotient
                continue
            if isinstance(factor, int) and remaining.is_Integer and factor % int(remaining) == 0:
                taken.append(int(remaining))
                todo.insert(0, factor // int(remaining))
                remaining = sympy.Integer(1)
                continue
            return None
        result.append(merge_sizes(tuple(taken)))
    return None if todo else tuple(result)


def merge_sizes(dim: Dim) -> Dim:
    """Neighbouring plain sizes multiplied together, so that equal dims compare equal."""
    result: list[Factor] = []
    for factor in dim:
        if result and isinstance(factor, int) and isinstance(result[-1], int):
            result[-1] = result[-1] * factor
        else:
            result.append(factor)
    return tuple(result)
