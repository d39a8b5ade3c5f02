"""Soundness of the rules: what is claimed about a value holds on real batches, and what is computed packed equals the dense graph.

Random programs are held against both; the cases below them are the smallest programs for mistakes that were made once.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sp_compile.analysis.facts import Affine
from sp_compile.analysis.layouts import Kind
from tests.analysis.programs import Program, analysed, claimed_wrong, pairs, shared_wrong
from tests.analysis.random_programs import FAMILIES, Pick, program

_ALL = slice(None)
_QUICK = settings(max_examples=3, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
_LONG = settings(_QUICK, max_examples=150)
_GROUPS = [
    ("pointwise", "creation", "products"),
    ("views", "products"),
    ("views", "indexing"),
    ("shifts", "creation", "indexing"),
    ("shifts", "pointwise", "products"),
    ("reductions", "views"),
    ("writes", "shifts", "views"),
    ("writes", "creation", "products"),
    tuple(FAMILIES),
]


def _check(pick: Pick, names: tuple[str, ...], steps: int, seed: int) -> None:
    made, module = program(pick, names, steps)
    tried = pairs(2, seed)
    batches = [tried[0][0], tried[0][1], tried[1][0]]
    try:
        for batch in batches:
            module(*made.inputs(batch))
    except (RuntimeError, IndexError):
        assume(False)  # fits the sizes of the sample only
    assert not claimed_wrong(made, module, tried), module.graph
    assert not shared_wrong(made, module, batches).problems, module.graph


@pytest.mark.parametrize("names", _GROUPS, ids="+".join)
@_QUICK
@given(data=st.data())
def test_random_programs(names: tuple[str, ...], data: st.DataObject) -> None:
    _check(lambda options: data.draw(st.sampled_from(list(options))), names, data.draw(st.integers(3, 7)), data.draw(st.integers(0, 99)))


@pytest.mark.slow
@pytest.mark.parametrize("names", _GROUPS, ids="+".join)
@_LONG
@given(seed=st.integers(0, 2**32))
def test_many_random_programs(names: tuple[str, ...], seed: int) -> None:
    drawn = random.Random(seed)
    _check(drawn.choice, names, drawn.choice([4, 6, 8, 10]), seed % 1000)


def test_random_programs_are_mostly_shared() -> None:
    """Else the comparison of packed with dense graphs would be empty."""
    refused = []
    for seed in range(6):
        made, module = program(random.Random(seed).choice, ("pointwise", "views"), 4)
        refused.append(shared_wrong(made, module, []).refusal)
    assert refused.count(None) >= 5, refused


# -- the smallest programs for mistakes --------------------------------------------------------------------------------------------

Build = Callable[[Program], torch.fx.Node]


def _hidden(p: Program, ids: torch.fx.Node | None = None) -> torch.fx.Node:
    return p.call(F.embedding, p.call(torch.remainder, ids, 8) if ids is not None else p.ids, p.words)


def _cut(p: Program, x: torch.fx.Node, *places: Any) -> torch.fx.Node:
    return p.call(operator.getitem, x, places)


def renorm(p: Program) -> torch.fx.Node:
    """Each of the slices along a plain dimension is rescaled by its norm over all tokens."""
    return p.call(torch.renorm, _hidden(p), 2, 2, 1.0)


def cumsum_across_rows(p: Program) -> torch.fx.Node:
    running = p.call("cumsum", p.call("view", p.ids, -1), 0)
    return _hidden(p, p.call("view", running, p.b, p.l))


def cumsum_along_joined_heads(p: Program) -> torch.fx.Node:
    """[B, 2 * L] with L inside: the second half has seen all of the first."""
    doubled = p.call("reshape", p.call("expand", p.call("unsqueeze", p.ids, 1), -1, 2, -1), p.b, -1)
    halves = p.call("view", p.call("cumsum", doubled, 1), p.b, 2, p.l)
    return _hidden(p, p.call("select", halves, 1, 1))


def counted_index_into_joined_rows(p: Program) -> torch.fx.Node:
    """x.view(-1)[arange(L)] is the first row, for every row."""
    first = _cut(p, p.call("view", p.mask, -1), p.call(torch.arange, p.l))
    return _hidden(p, p.call("add", p.ids, first))


def head_behind_zeros(p: Program) -> torch.fx.Node:
    """[0, x[2], x[0], x[1], ...][1:] starts with a later column, although the head starts with none."""
    zero = p.call(torch.zeros_like, _cut(p, p.ids, _ALL, slice(0, 1)))
    joined = p.call(torch.cat, [zero, _cut(p, p.ids, _ALL, slice(2, 3)), _cut(p, p.ids, _ALL, slice(0, -2))], 1)
    return _hidden(p, p.call(torch.cat, [_cut(p, joined, _ALL, slice(1, None)), zero], 1))


def write_seen_shifted(p: Program) -> torch.fx.Node:
    """A view of the later columns, made before tokens are written into its base."""
    base = p.call(torch.zeros_like, p.ids)
    later = _cut(p, base, _ALL, slice(1, None))
    p.call("copy_", base, p.ids)
    return _hidden(p, p.call(F.pad, later, (0, 1)))


def write_to_one_row(p: Program) -> torch.fx.Node:
    base = p.call("clone", p.ids)
    p.call(operator.setitem, base, 0, 1)
    return _hidden(p, base)


def fill_one_row(p: Program) -> torch.fx.Node:
    base = p.call("clone", p.ids)
    p.call("fill_", p.call("select", base, 0, 0), 1)
    return _hidden(p, base)


def write_through_other_order(p: Program) -> torch.fx.Node:
    base = p.call("new_zeros", p.ids, (p.size(p.b, p.l),))
    p.call("copy_", p.call("view", base, p.l, p.b), p.call("t", p.ids))
    return _hidden(p, p.call("view", base, p.b, p.l))


def write_seen_by_rows(p: Program) -> torch.fx.Node:
    """A value on rows shares memory with a packed one that is written."""
    x = p.call("clone", _hidden(p))
    rows = p.call("squeeze", x)
    p.call("add_", x, 1)
    return p.call("mul", rows, 2)


def pairwise_shift(p: Program) -> torch.fx.Node:
    """m[q + 1, k - 1] reads column q + 1: a shift of the keys does not make up for one of the queries."""
    x = p.call("unsqueeze", _hidden(p), 1)
    pair = p.call("add", p.call("unsqueeze", p.ids, 1), p.call("unsqueeze", p.ids, 2))
    bias = p.call("unsqueeze", p.call("double", p.call(F.pad, pair, (1, -1, -1, 1))), 1)
    later = p.call("logical_not", p.call("tril", p.call(torch.ones, p.l, p.l, dtype=torch.bool)))
    causal = p.call("masked_fill", p.call(torch.zeros, p.l, p.l, dtype=torch.float64), later, -1e9)
    return p.call(F.scaled_dot_product_attention, x, x, x, attn_mask=p.call("add", bias, causal))


def place_from_size(p: Program) -> torch.fx.Node:
    """L % 4 is a place in a plain dimension, not a size."""
    return p.call("select", _hidden(p), 2, p.call(operator.mod, p.l, 4))


def roll_from_size(p: Program) -> torch.fx.Node:
    return p.call(torch.roll, _hidden(p), p.l, 2)


def repeat_to_size(p: Program) -> torch.fx.Node:
    """Each of 4 numbers L times, read as L times 4."""
    table = p.call("repeat_interleave", p.call(torch.arange, 4), p.l)
    return p.call("add", _hidden(p), p.call("view", table, p.l, 4))


def size_as_number(p: Program) -> torch.fx.Node:
    return p.call(operator.truediv, _hidden(p), p.l)


def size_as_size_and_number(p: Program) -> torch.fx.Node:
    return p.call("add", _hidden(p), p.call(torch.full, (p.b, p.l, 1), p.l))


def key_by_way_of_memory(p: Program) -> torch.fx.Node:
    """`types` reaches the hidden state through a buffer that was made of `ids`."""
    base = p.call(torch.zeros_like, p.ids)
    p.call(operator.setitem, base, (_ALL, _ALL), p.types)
    return p.call("add", _hidden(p, p.call("cumsum", base, 1)), _hidden(p))


def pairs_returned(p: Program) -> torch.fx.Node:
    return p.call(torch.matmul, _hidden(p), p.call("transpose", _hidden(p), 1, 2))


def pairs_of_rows_returned(p: Program) -> torch.fx.Node:
    x = p.call("view", _hidden(p), -1, 4)
    return p.call(torch.matmul, x, p.call("t", x))


def sort_by_place(p: Program) -> torch.fx.Node:
    """One output of several, elementwise."""
    return p.call(operator.getitem, p.call(torch.frexp, _hidden(p)), 0)


def compared_with_infinity(p: Program) -> torch.fx.Node:
    far = p.call("lt", p.call(torch.arange, p.l), float("inf"))
    return p.call("masked_fill", _hidden(p), p.call("unsqueeze", far, -1), 0.5)


def table_of_few_positions(p: Program) -> torch.fx.Node:
    return p.call("add", _hidden(p), _cut(p, p.table, slice(None, p.l)))


def parts_written(p: Program) -> torch.fx.Node:
    """Keys put together from parts, as multi-head latent attention does."""
    x = _hidden(p)
    key = p.call("new_zeros", x, (p.b, p.l, 8))
    p.call("copy_", _cut(p, key, _ALL, _ALL, slice(0, 4)), x)
    p.call(operator.setitem, key, (Ellipsis, slice(4, 8)), p.call("mul", x, 2))
    return p.call(torch.sin, key)


_SHARED = "shared"
_CASES: list[tuple[Build, str]] = [
    (renorm, _SHARED),
    (cumsum_across_rows, _SHARED),
    (cumsum_along_joined_heads, _SHARED),
    (counted_index_into_joined_rows, _SHARED),
    (head_behind_zeros, _SHARED),
    (write_seen_shifted, _SHARED),
    (write_to_one_row, _SHARED),
    (fill_one_row, _SHARED),
    (write_through_other_order, _SHARED),
    (write_seen_by_rows, _SHARED),
    (pairwise_shift, "depends on later columns"),
    (place_from_size, _SHARED),
    (roll_from_size, _SHARED),
    (repeat_to_size, _SHARED),
    (size_as_number, _SHARED),
    (size_as_size_and_number, _SHARED),
    (key_by_way_of_memory, _SHARED),
    (pairs_returned, "a value of pairs of tokens is needed on rows"),
    (pairs_of_rows_returned, "a value of pairs of tokens is needed on rows"),
    (sort_by_place, _SHARED),
    (compared_with_infinity, _SHARED),
    (table_of_few_positions, _SHARED),
    (parts_written, _SHARED),
]


@pytest.mark.parametrize(("build", "expected"), _CASES, ids=lambda v: getattr(v, "__name__", None))
def test_case(build: Build, expected: str) -> None:
    """`shared` may mean that only what surrounds the case is packed; the result is right in any case."""
    made = Program()
    result = build(made)
    module = made.finish(result, made.call(torch.tanh, _hidden(made)))
    tried = pairs(2)
    assert not claimed_wrong(made, module, tried)
    outcome = shared_wrong(made, module, [tried[0][0], tried[1][1]])
    assert not outcome.problems
    assert (expected in outcome.refusal) if outcome.refusal is not None else expected == _SHARED


@pytest.mark.parametrize(
    "build", [renorm, counted_index_into_joined_rows, head_behind_zeros, write_seen_shifted, write_to_one_row, fill_one_row]
)
def test_case_is_not_claimed(build: Build) -> None:
    made = Program()
    result = build(made)
    module = made.finish(result)
    layout = analysed(module, made.inputs(made.sample)).layout(result)
    assert layout is not None
    assert not layout.reach.shared


@pytest.mark.parametrize("build", [size_as_number, parts_written, place_from_size, table_of_few_positions])
def test_case_is_claimed(build: Build) -> None:
    """The other side: no rule became so careful that it claims nothing."""
    made = Program()
    result = build(made)
    module = made.finish(result)
    layout = analysed(module, made.inputs(made.sample)).layout(result)
    assert layout is not None
    assert layout.reach.shared
    assert layout.reach.kind is Kind.TOKENS


def test_range_as_value_and_as_index() -> None:
    """arange(L) counts columns where it is a value; as an index into columns it only names them."""
    p = Program()
    columns = p.call(torch.arange, p.l)
    value = p.call("add", p.ids, columns)
    index = _cut(p, p.ids, _ALL, columns)
    found = analysed(p.finish(value, index), p.inputs(p.sample))
    assert found.layout(columns).fact == Affine(((0, 1),))  # type: ignore[union-attr]
    assert found.layout(value).reach.kind is Kind.TOKENS  # type: ignore[union-attr]
    assert found.nodes[columns].failure is not None, "physical tokens must not be counted instead"
    assert found.layout(index).reach.shared  # type: ignore[union-attr]


def test_range_over_rows_is_not_shared() -> None:
    p = Program()
    rows = p.call(torch.arange, p.b)
    value = p.call("add", p.ids, p.call("unsqueeze", rows, 1))
    found = analysed(p.finish(value), p.inputs(p.sample))
    assert found.layout(rows).is_rows  # type: ignore[union-attr]
    assert found.layout(value).is_rows  # type: ignore[union-attr]


_LIBRARY = torch.library.Library("sp_compile_tests", "FRAGMENT")
_LIBRARY.define("fill_with(Tensor(a!) target, Tensor source) -> ()")
_LIBRARY.define("fill_and_sum(Tensor(a!) target, Tensor source) -> Tensor")


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source.flip(1))


def _fill_and_sum(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    _fill(target, source)
    return source.flip(1).clone()


for _name, _body in (("fill_with", _fill), ("fill_and_sum", _fill_and_sum)):
    _LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")


@pytest.mark.parametrize("name", ["fill_with", "fill_and_sum"])
def test_an_unknown_op_that_writes(name: str) -> None:
    """Nothing is known about what it wrote, nor about what it returned."""
    p = Program()
    base = p.call(torch.zeros_like, p.ids)
    result = p.call(getattr(torch.ops.sp_compile_tests, name).default, base, p.ids)
    read = p.call("add", base, 1)
    outputs = [read, *([result] if name == "fill_and_sum" else []), _hidden(p)]
    module = p.finish(*outputs)
    found = analysed(module, p.inputs(p.sample))
    assert all(found.layout(node).is_rows for node in outputs[:-1])  # type: ignore[union-attr]
    assert not claimed_wrong(p, module, pairs(2))
    assert not shared_wrong(p, module, [batch for batch, _ in pairs(2)]).problems
