"""The lattice of layouts, held against element tracking on small tensors."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from sp_compile.analysis.layouts import (
    COLUMN,
    ROWS,
    TOKENS,
    UNIFORM,
    Axis,
    Dim,
    Dims,
    Kind,
    Layout,
    Reach,
    Span,
    Symbols,
    merge_sizes,
    regroup,
)

B, L = 3, 5
_ENV = ShapeEnv(duck_shape=False)


def _size(name: str, hint: int) -> torch.SymInt:
    source = ConstantSource(name)
    made = _ENV.create_symintnode(_ENV.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC), hint=hint, source=source)
    assert isinstance(made, torch.SymInt)
    return made


ROWS_SIZE, COLUMNS_SIZE, OTHER_SIZE = _size("b", B), _size("l", L), _size("o", 7)
SYMBOLS = Symbols(ROWS_SIZE.node.expr, COLUMNS_SIZE.node.expr)
BATCH, COLUMNS = Axis.BATCH, Axis.COLUMNS
_REAL = {SYMBOLS.batch: B, SYMBOLS.columns: L}

reaches = st.builds(Reach, st.sampled_from(list(Kind)), st.just(0)) | st.builds(Reach, st.just(Kind.TOKENS), st.integers(-3, 3))


def _product(dim: Dim) -> int | torch.SymInt:
    result: Any = 1
    for factor in dim:
        result = result * {BATCH: ROWS_SIZE, COLUMNS: COLUMNS_SIZE}.get(factor, factor)  # type: ignore[call-overload]
    return result


def _marked(dims: Dims) -> dict[str, torch.Tensor]:
    """For the row and the column of each element of a value with these dims, a tensor of that value's shape."""
    factors = [f for dim in dims for f in dim]
    sizes = [B if f is BATCH else L if f is COLUMNS else int(f) for f in factors]  # type: ignore[arg-type]
    shape = [math.prod(B if f is BATCH else L if f is COLUMNS else int(f) for f in dim) for dim in dims]  # type: ignore[arg-type]
    found = {}
    for axis in (BATCH, COLUMNS):
        where = factors.index(axis)
        counted = torch.arange(sizes[where]).reshape([-1 if i == where else 1 for i in range(len(sizes))])
        found[axis.value] = counted.expand(sizes).reshape(shape)
    return found


@st.composite
def cut_into_dims(draw: Any, factors: list[Any]) -> Dims:
    """The factors in order, cut into dimensions at random, with size-1 dimensions strewn in."""
    dims: list[Dim] = [()]
    for factor in factors:
        if draw(st.booleans()):
            dims.append(())
        dims[-1] = (*dims[-1], factor)
    if draw(st.booleans()):
        dims.insert(draw(st.integers(0, len(dims))), ())
    return tuple(merge_sizes(dim) for dim in dims)


@st.composite
def views(draw: Any) -> tuple[Dims, list[int | torch.SymInt]]:
    """Dims, and sizes of which most are those of a view of a value with these dims."""
    factors: list[Any] = draw(st.permutations([BATCH, COLUMNS, *draw(st.lists(st.sampled_from([2, 3, 4]), max_size=2))]))
    dims = draw(cut_into_dims(factors))
    other = draw(st.just(factors) | st.permutations(factors))
    split = [part for f in other for part in ((2, f // 2) if f == 4 and draw(st.booleans()) else (f,))]
    return dims, [_product(dim) for dim in draw(cut_into_dims(split))]


@settings(max_examples=120, deadline=None)
@given(views())
def test_regroup_says_where_every_element_goes(case: tuple[Dims, list[int | torch.SymInt]]) -> None:
    dims, sizes = case
    found = regroup(dims, sizes, SYMBOLS)
    real = [int(s.node.expr.subs(_REAL)) if isinstance(s, torch.SymInt) else s for s in sizes]
    tracked = {axis: marks.reshape(real) for axis, marks in _marked(dims).items()}
    if found is None:
        return
    assert [SYMBOLS.size(dim) for dim in found] == [s.node.expr if isinstance(s, torch.SymInt) else s for s in sizes]
    for axis, marks in _marked(found).items():
        assert torch.equal(marks, tracked[axis]), (dims, sizes, found)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_regroup_finds_every_view_that_keeps_the_factors(data: st.DataObject) -> None:
    factors = data.draw(st.permutations([BATCH, COLUMNS, 4, 3]))
    before, after = data.draw(cut_into_dims(factors)), data.draw(cut_into_dims(factors))
    assert regroup(before, [_product(dim) for dim in after], SYMBOLS) == after


def test_regroup_merges_and_splits_plain_sizes() -> None:
    n = COLUMNS_SIZE
    assert regroup(((BATCH,), (COLUMNS,), (64,)), [ROWS_SIZE * n, 4, 16], SYMBOLS) == ((BATCH, COLUMNS), (4,), (16,))
    assert regroup(((BATCH,), (COLUMNS,), (4,), (16,)), [ROWS_SIZE, n, 64], SYMBOLS) == ((BATCH,), (COLUMNS,), (64,))
    assert regroup(((BATCH,), (COLUMNS,), (4,)), [ROWS_SIZE, 2 * n, 2], SYMBOLS) == ((BATCH,), (COLUMNS, 2), (2,))


@pytest.mark.parametrize(
    ("dims", "sizes"),
    [
        (((COLUMNS,), (BATCH,)), [ROWS_SIZE, COLUMNS_SIZE]),
        (((COLUMNS, BATCH),), [ROWS_SIZE, COLUMNS_SIZE]),
        (((BATCH,), (COLUMNS,), (4,)), [ROWS_SIZE, 4, COLUMNS_SIZE]),
        (((BATCH,), (4,), (COLUMNS,)), [ROWS_SIZE, 2 * COLUMNS_SIZE, 2]),
        (((BATCH,), (Span(SYMBOLS.columns * 2),)), [ROWS_SIZE, 2, COLUMNS_SIZE]),
        (((BATCH,), (Span(sympy.Integer(1)),)), [ROWS_SIZE]),
        (((BATCH,), (COLUMNS,)), [ROWS_SIZE]),
        (((BATCH,), (COLUMNS,), (6,)), [ROWS_SIZE, COLUMNS_SIZE, 4]),
    ],
)
def test_regroup_refuses_what_moves_or_cuts_tokens(dims: Dims, sizes: list[Any]) -> None:
    assert regroup(dims, sizes, SYMBOLS) is None


# -- reaches -----------------------------------------------------------------------------------------------------------------------


@given(reaches, reaches, reaches)
def test_join_is_a_semilattice(a: Reach, b: Reach, c: Reach) -> None:
    assert a.join(b) == b.join(a)
    assert a.join(b.join(c)) == a.join(b).join(c)
    assert a.join(a) == a
    assert UNIFORM.join(a) == a
    assert ROWS.join(a) == ROWS


@given(reaches, reaches, reaches)
def test_join_is_monotone_and_above_its_arguments(a: Reach, b: Reach, c: Reach) -> None:
    def below(x: Reach, y: Reach) -> bool:
        return x.join(y) == y

    assert below(a, a.join(b))
    assert below(a.join(c), a.join(b).join(c))
    assert not a.join(b).shared or (a.shared and b.shared)


@given(reaches, st.integers(-3, 3), st.integers(-3, 3))
def test_moves_add_up_and_keep_the_order(a: Reach, one: int, two: int) -> None:
    assert a.moved(one).moved(two) == a.moved(one + two)
    assert a.join(TOKENS).moved(one) == a.moved(one).join(TOKENS.moved(one)) or a.kind < Kind.TOKENS


def test_shared_means_no_later_column() -> None:
    assert [r.shared for r in (UNIFORM, COLUMN, TOKENS, Reach(Kind.TOKENS, -1), Reach(Kind.TOKENS, 1), ROWS)] == [
        True,
        True,
        True,
        True,
        False,
        False,
    ]


def test_moving_one_of_two_column_axes_back_proves_nothing() -> None:
    pair = Layout(((BATCH,), (COLUMNS,), (COLUMNS,)), TOKENS)
    assert pair.moved(-1) == TOKENS
    assert pair.moved(1) == Reach(Kind.TOKENS, 1)
    assert Layout(((BATCH,), (Span(SYMBOLS.columns + 1),)), TOKENS).moved(-1) == Reach(Kind.TOKENS, -1)


def test_folding_counts_the_head() -> None:
    dims: Dims = ((BATCH,), (COLUMNS,))
    ahead = Layout(dims, Reach(Kind.TOKENS, -1), head=((1, 2), (1, 0)))
    assert ahead.folded == Layout(dims, Reach(Kind.TOKENS, 2))
    assert not ahead.folded.reach.shared


# -- symbols -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "dim"),
    [
        (1, ()),
        (7, (7,)),
        (ROWS_SIZE, (BATCH,)),
        (COLUMNS_SIZE, (COLUMNS,)),
        (ROWS_SIZE * COLUMNS_SIZE, (BATCH, COLUMNS)),
        (ROWS_SIZE * COLUMNS_SIZE * 4, (BATCH, COLUMNS, 4)),
        (COLUMNS_SIZE * 2, (COLUMNS, 2)),
        (COLUMNS_SIZE - 1, (Span(SYMBOLS.columns - 1),)),
        (ROWS_SIZE + COLUMNS_SIZE, (Span(SYMBOLS.batch + SYMBOLS.columns),)),
        (COLUMNS_SIZE * COLUMNS_SIZE, (Span(SYMBOLS.columns**2),)),
        (COLUMNS_SIZE // 2, (Span((COLUMNS_SIZE // 2).node.expr),)),
        (OTHER_SIZE, (OTHER_SIZE.node.expr,)),
    ],
)
def test_dim_of_a_size(size: Any, dim: Dim) -> None:
    assert SYMBOLS.dim(size) == dim
    assert SYMBOLS.size(dim) == (size if isinstance(size, int) else size.node.expr)


def test_mentions() -> None:
    assert SYMBOLS.mentions(COLUMNS_SIZE - 1)
    assert SYMBOLS.mentions(ROWS_SIZE / 2)
    assert SYMBOLS.mentions(COLUMNS_SIZE > 100)
    assert not any(map(SYMBOLS.mentions, (3, 1.5, None, OTHER_SIZE, "L")))


def test_what_a_layout_says_about_its_axes() -> None:
    layout = Layout(((BATCH, COLUMNS), (4,), (Span(SYMBOLS.columns - 1),)), TOKENS)
    assert layout.axes == [(0, BATCH), (0, COLUMNS)]
    assert layout.columns_dims == [0]
    assert layout.column_like == [COLUMNS, Span(SYMBOLS.columns - 1)]
    assert [layout.token_dim(d) for d in range(3)] == [True, False, True]
    assert layout.has_tokens
    assert layout.has_spans
    assert not Layout(((4,), ()), UNIFORM).has_tokens


def test_neighbouring_plain_sizes_compare_equal() -> None:
    for sizes in itertools.permutations((2, 3, 4)):
        assert merge_sizes((*sizes, COLUMNS, 2, 2)) == (24, COLUMNS, 4)
