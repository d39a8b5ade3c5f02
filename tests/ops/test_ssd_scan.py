"""`ssd_scan`: the body against the recurrence over full rows, the implementations against the body, and bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.kernels.scan.chunks import sum_by_product
from sp_compile.layout import Forest
from sp_compile.lowering import scans as tables
from sp_compile.ops.numerics import relative_error
from sp_compile.ops.ssd_scan import ssd_scan_inputs
from tests.determinism.replay import differing
from tests.ops.forests import forest, random_forest
from tests.ops.scans import (
    LENGTHS,
    Case,
    cast,
    check_against_body,
    check_against_rows,
    flat_equal,
    fork,
    leaves,
    longer,
    poisoned,
    short_nodes,
    siblings,
    unshared,
)

OPTIONS: dict[str, Any] = {"dt_softplus": True, "dt_min": 0.05, "dt_max": 2.5, "chunk": 64}
NAMES = ("chunked", "chunked_replay")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def dense(inputs: Any, tokens: list[int], start: int | None, options: dict[str, Any] = OPTIONS) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C, D, bias, _, _, initial, _ = inputs
    heads, dim, size = x.shape[2], x.shape[3], B.shape[3]
    h = x.new_zeros(heads, dim, size) if start is None else initial[start]
    outs, states = [], []
    for t in tokens:
        step = dt[0, t] if bias is None else dt[0, t] + bias
        if options["dt_softplus"]:
            step = torch.nn.functional.softplus(step)
        step = step.clamp(options["dt_min"], options["dt_max"])
        key, query = (value[0, t].repeat_interleave(heads // B.shape[2], 0) for value in (B, C))
        h = torch.exp(step * A)[:, None, None] * h + (step[:, None] * x[0, t])[:, :, None] * key[:, None, :]
        y = (h * query[:, None, :]).sum(-1)
        if D is not None:
            y = y + (D if D.dim() == 2 else D[:, None]) * x[0, t]
        outs.append(y)
        states.append(h)
    return torch.stack(outs), torch.stack(states)


CASE = Case(torch.ops.sp_compile.ssd_scan.default, ssd_scan_inputs, dense, OPTIONS)
assert tables.TOLERANCE, "importing the tables registers the implementations"


@pytest.mark.parametrize("name", ["one_token", "several_roots", "strict_prefixes", "deep", "tokens_of_one", "one_branch"])
def test_equals_dense_rows(name: str) -> None:
    check_against_rows(CASE, forest(name), CASE.inputs(forest(name)))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2), st.booleans(), st.integers(0, 2))
def test_equals_dense_rows_random_forest(seed: int, states: int, final: bool, skip: int) -> None:
    tree = random_forest(seed, rows=5, length=12)
    check_against_rows(CASE, tree, CASE.inputs(tree, states=states, final=final, skip=skip, bias=skip != 1, seed=seed))


def test_equals_dense_rows_without_softplus() -> None:
    options = {"dt_softplus": False, "dt_min": 0.0, "dt_max": torch.inf, "chunk": 64}
    case = Case(CASE.op, ssd_scan_inputs, lambda *args: dense(*args, options), options)
    tree = random_forest(3, rows=4, length=10)
    inputs = list(case.inputs(tree))
    inputs[1] = inputs[1].detach().abs().requires_grad_()
    check_against_rows(case, tree, inputs)
    for name in NAMES:
        check_against_body(case, tree, name, inputs, torch.float32)


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_dense_rows_at_chunk_borders(length: int) -> None:
    tree = Forest.from_rows(fork(length, (1, 3)))
    inputs = CASE.inputs(tree, final=True, heads=2, dims=(3, 2))
    check_against_rows(CASE, tree, inputs)
    for name in NAMES:
        check_against_body(CASE, tree, name, inputs, torch.float64)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_implementation_equals_body(name: str, dtype: torch.dtype) -> None:
    for tree in (Forest.from_rows(fork(70, (1, 20, 64, 130))), Forest.from_rows(short_nodes()), forest("several_roots")):
        inputs = CASE.inputs(tree, states=2, final=True)
        check_against_body(CASE, tree, name, inputs, dtype)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2), st.booleans(), st.sampled_from([3, 16, 64]))
def test_implementation_equals_body_random_forest(name: str, seed: int, states: int, final: bool, chunk: int) -> None:
    tree = random_forest(seed, length=40)
    inputs = CASE.inputs(tree, states=states, final=final, skip=seed % 3, bias=seed % 2 == 0, seed=seed)
    check_against_body(CASE, tree, name, inputs, torch.float64, chunk=chunk)
    check_against_body(CASE, tree, name, inputs, torch.float32, chunk=chunk)


@pytest.mark.parametrize("name", NAMES)
def test_strong_decay_overflows_nowhere(name: str) -> None:
    """A decay of exp(-2000) per token: what a chunk's start has left is zero, and no gradient becomes infinite on the way."""
    tree = Forest.from_rows(fork(100, (40, 50)))
    inputs = list(CASE.inputs(tree))
    inputs[2] = torch.tensor([-1000.0, -30.0, -1e-3, 0.0], dtype=torch.float64, requires_grad=True)
    check_against_body(CASE, tree, name, inputs, torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_of_a_rate_is_no_rounding_where_decay_is_strong(name: str) -> None:
    """What a rate of -30 changes is e^-30 of the values around it; sums in which those cancel would leave their rounding instead."""
    tree = Forest.from_rows([list(range(90))])
    inputs = list(CASE.inputs(tree))
    inputs[2] = torch.full((4,), -30.0, dtype=torch.float64, requires_grad=True)
    rounded = cast(inputs, torch.float32, CASE.initial)
    exact = cast(rounded, torch.float64, CASE.initial)
    out = CASE.run(tree, rounded, name, dt_min=1.0)[0]
    (got,) = torch.autograd.grad(out.square().sum(), rounded[2])
    # Not the op's body: in float64 it has rounding of this size itself.
    (want,) = torch.autograd.grad(dense(exact, list(range(90)), None, OPTIONS | {"dt_min": 1.0})[0].square().sum(), exact[2])
    assert 0 < want.abs().max() < 1e-6
    assert relative_error(got, want) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_states_that_grow_are_right_too(name: str) -> None:
    """Nothing clamps a decay to at most one: without limits, steps and rates of any sign have a meaning."""
    tree = Forest.from_rows(fork(70, (20, 5)))
    inputs = list(CASE.inputs(tree))
    inputs[1] = (inputs[1].detach() * 0.1).requires_grad_()
    options = {"dt_softplus": False, "dt_min": -torch.inf, "dt_max": torch.inf}
    check_against_body(CASE, tree, name, inputs, torch.float64, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prefix", [1, 5, 16, 17, 40, 64, 65])
def test_what_follows_a_prefix_moves_none_of_its_bits(name: str, prefix: int) -> None:
    for more in (1, 60):
        longer(CASE, name, prefix, more, dims=(16, 8))


@pytest.mark.parametrize("name", NAMES)
def test_an_edited_sibling_moves_no_other_bits(name: str) -> None:
    siblings(CASE, name, Forest.from_rows(fork(50, (30, 70, 20))), 80, 150)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [16, 64])
def test_replay_has_the_bits_of_unshared_rows(chunk: int, dtype: torch.dtype) -> None:
    for rows in (fork(70, (1, 20, 64, 130)), short_nodes(), [*fork(40, (9, 30, 4)), list(range(20))]):
        flat_equal(CASE, "chunked_replay", Forest.from_rows(rows), unshared(rows), dtype, chunk=chunk)


def test_replay_has_the_bits_of_unshared_rows_with_left_padding() -> None:
    tokens = torch.arange(60).repeat(4, 1)
    tokens[:, 50:] += 100 * torch.arange(4)[:, None]
    keep = torch.arange(60)[None] >= torch.tensor([[7], [7], [21], [21]])
    tree = Forest.from_tokens(tokens, keep=keep)
    flat = Forest.from_tokens(tokens, torch.arange(4), keep=keep)
    flat_equal(CASE, "chunked_replay", tree, flat, chunk=16)


def test_exact_grid_has_not_the_bits_of_unshared_rows() -> None:
    """What the replay grid is for; and the test above can fail."""
    rows = fork(70, (20, 64, 130))
    with pytest.raises(AssertionError):
        flat_equal(CASE, "chunked", Forest.from_rows(rows), unshared(rows))


@pytest.mark.parametrize("name", NAMES)
def test_no_result_is_left_unwritten(name: str) -> None:
    tree = Forest.from_rows(fork(70, (1, 20, 130)))
    poisoned(CASE, name, tree, CASE.inputs(tree, final=True, states=1, dtype=torch.float32))


@pytest.mark.parametrize("name", NAMES)
def test_repeats_bits(name: str) -> None:
    tree = Forest.from_rows(fork(70, (1, 20, 64, 130)))
    inputs = CASE.inputs(tree, dtype=torch.float32, states=1, final=True)
    assert differing(lambda: CASE.run(tree, inputs, name), leaves(inputs)) == []


@pytest.mark.parametrize("name", [None, *NAMES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(name: str | None, dtype: torch.dtype) -> None:
    tree = random_forest(1, rows=3, length=6)
    inputs = list(CASE.inputs(tree, dtype=dtype, states=1, final=True))
    op = CASE.op
    if name is not None:
        op = CASE.item(name).op
        inputs.append(tree.tensor(CASE.item(name).forest_names(OPTIONS)[0], "cpu"))
    torch.library.opcheck(op, tuple(inputs), OPTIONS)


@pytest.mark.parametrize("name", [None, *NAMES])
def test_without_tokens(name: str | None) -> None:
    tree = Forest.from_rows([[]])
    inputs = CASE.inputs(tree, states=1, final=True)
    out = CASE.run(tree, inputs, name)
    assert [tuple(value.shape) for value in out] == [(1, 0, 4, 6), (0, 4, 6, 5)]
    assert all((grad == 0).all() for grad in torch.autograd.grad(out, leaves(inputs), out))


@pytest.mark.parametrize("name", [None, "chunked"])
def test_wrong_inputs_are_refused(name: str | None) -> None:
    tree = random_forest(1, rows=3, length=6)
    inputs = list(CASE.inputs(tree, states=1, final=True))
    for place, value, text in (
        (0, inputs[0][:, :-1], "dt must be|expected"),
        (2, inputs[2][:-1], "A must be"),
        (3, inputs[3][:, :, :0], "B must be|multiple|C must be"),
        (4, inputs[4].long(), "C must be floating point"),
        (5, inputs[5][:-1], "D must be"),
        (7, inputs[7].int(), "prev must be int64"),
        (8, inputs[8][:-1], "end must be int64"),
        (9, inputs[9].float(), "initial must be torch.float64"),
        (10, torch.tensor([10**6]), "final must lie"),
        (7, inputs[7] - 5 * (inputs[7] < 0), "continues external state"),
    ):
        wrong = list(inputs)
        wrong[place] = value
        with pytest.raises(InvalidInput, match=text):
            CASE.run(tree, wrong, name)


def test_plan_of_another_forest_is_refused() -> None:
    tree, other = Forest.from_rows([[1, 2, 3]]), Forest.from_rows([[1, 2, 3, 4]])
    item = CASE.item("chunked")
    with pytest.raises(InvalidInput, match="writes 3 tokens"):
        item.op(*CASE.inputs(tree), other.tensor(item.forest_names(OPTIONS)[0], "cpu"), **OPTIONS)


def test_running_sums_by_product_are_running_sums() -> None:
    values = torch.randn(3, 17, 4, dtype=torch.float64)
    assert relative_error(sum_by_product(values), values.cumsum(1)) < 1e-14
