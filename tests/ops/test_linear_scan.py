"""`linear_scan`: the body against the recurrence over full rows, the implementation against the body, and bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.layout import Forest
from sp_compile.lowering import scans as tables
from sp_compile.ops.linear_scan import linear_scan_inputs
from tests.determinism.replay import differing
from tests.ops.forests import forest, random_forest
from tests.ops.scans import (
    LENGTHS,
    Case,
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

assert tables.TOLERANCE, "importing the tables registers the implementations"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAME = "wavefront"


def dense(inputs: Any, tokens: list[int], start: int | None) -> tuple[Tensor, Tensor]:
    a, x, _, _, initial, _ = inputs
    h = x.new_zeros(x.shape[2]) if start is None else initial[start]
    states = []
    for t in tokens:
        h = torch.exp(a[0, t]) * h + x[0, t]
        states.append(h)
    return torch.stack(states), torch.stack(states)


CASE = Case(torch.ops.sp_compile.linear_scan.default, linear_scan_inputs, dense, initial=4)


@pytest.mark.parametrize("name", ["one_token", "several_roots", "strict_prefixes", "deep", "tokens_of_one", "one_branch", "ragged_star"])
def test_equals_dense_rows(name: str) -> None:
    inputs = CASE.inputs(forest(name), final=True)
    check_against_rows(CASE, forest(name), inputs)
    check_against_body(CASE, forest(name), NAME, inputs, torch.float64)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2), st.booleans())
def test_random_forest(seed: int, states: int, final: bool) -> None:
    tree = random_forest(seed, rows=6, length=12)
    inputs = CASE.inputs(tree, states=states, final=final, seed=seed)
    check_against_rows(CASE, tree, inputs)
    check_against_body(CASE, tree, NAME, inputs, torch.float64)
    check_against_body(CASE, tree, NAME, inputs, torch.float32)


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_dense_rows_at_segment_borders(length: int) -> None:
    tree = Forest.from_rows(fork(length, (1, 3)))
    inputs = CASE.inputs(tree, final=True, channels=2)
    check_against_rows(CASE, tree, inputs)
    check_against_body(CASE, tree, NAME, inputs, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_implementation_equals_body(dtype: torch.dtype) -> None:
    for tree in (Forest.from_rows(fork(70, (1, 20, 64, 130))), Forest.from_rows(short_nodes()), forest("several_roots")):
        for states in (0, 2):
            check_against_body(CASE, tree, NAME, CASE.inputs(tree, states=states, final=True), dtype)


@pytest.mark.parametrize("name", [None, NAME])
def test_reset_forgets_everything_before(name: str | None) -> None:
    """A log decay of minus infinity: the state is x alone, gradients are finite and none reaches what lies before."""
    tree = Forest.from_rows(fork(20, (5, 9)))
    inputs = list(CASE.inputs(tree, states=1))
    inputs[0] = inputs[0].detach().clone()
    inputs[0][:, 12] = -torch.inf
    inputs[0].requires_grad_()
    out = CASE.run(tree, inputs, name)[0]
    assert torch.equal(out[:, 12], inputs[1][:, 12])
    grads = torch.autograd.grad(out[:, 12:].sum(), leaves(inputs))
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert (grads[1][:, :12] == 0).all()
    assert (grads[2] == 0).all()


@pytest.mark.parametrize("prefix", [1, 2, 31, 32, 33, 64])
def test_what_follows_a_prefix_moves_none_of_its_bits(prefix: int) -> None:
    for more in (1, 60):
        longer(CASE, NAME, prefix, more, channels=13)


def test_an_edited_sibling_moves_no_other_bits() -> None:
    siblings(CASE, NAME, Forest.from_rows(fork(50, (30, 70, 20))), 80, 150)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_has_the_bits_of_unshared_rows(dtype: torch.dtype) -> None:
    for rows in (fork(70, (1, 20, 64, 130)), short_nodes(), [*fork(40, (9, 30, 4)), list(range(20))]):
        flat_equal(CASE, NAME, Forest.from_rows(rows), unshared(rows), dtype)


def test_no_result_is_left_unwritten() -> None:
    tree = Forest.from_rows(fork(70, (1, 20, 130)))
    poisoned(CASE, NAME, tree, CASE.inputs(tree, final=True, states=1, dtype=torch.float32))


def test_repeats_bits() -> None:
    tree = Forest.from_rows(fork(70, (1, 20, 64, 130)))
    inputs = CASE.inputs(tree, dtype=torch.float32, states=1, final=True)
    assert differing(lambda: CASE.run(tree, inputs, NAME), leaves(inputs)) == []


@pytest.mark.parametrize("name", ["linear_scan", "linear_scan_wavefront"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    inputs = CASE.inputs(random_forest(1, rows=3, length=6), dtype=dtype, states=1, final=True)
    torch.library.opcheck(getattr(torch.ops.sp_compile, name).default, tuple(inputs))


@pytest.mark.parametrize("name", ["linear_scan", "linear_scan_wavefront"])
def test_gradient_that_equals_its_source_has_memory_of_its_own(name: str) -> None:
    """A row of one token: the gradient of x is that of the result."""
    inputs = CASE.inputs(Forest.from_rows([[1]]))
    torch.library.opcheck(getattr(torch.ops.sp_compile, name).default, tuple(inputs))
    backward = getattr(torch.ops.sp_compile, name + "_backward").default
    grad = torch.ones(1, 1, 8, dtype=torch.float64)
    made = backward(grad, torch.empty(0, 8, dtype=torch.float64), *(x.detach() if isinstance(x, Tensor) else x for x in inputs))
    assert torch.equal(made[1], grad)
    assert made[1].data_ptr() != grad.data_ptr()


@pytest.mark.parametrize("name", [None, NAME])
def test_without_tokens(name: str | None) -> None:
    tree = Forest.from_rows([[]])
    inputs = CASE.inputs(tree, states=1, final=True)
    out = CASE.run(tree, inputs, name)
    assert [tuple(value.shape) for value in out] == [(1, 0, 8), (0, 8)]
    assert all((grad == 0).all() for grad in torch.autograd.grad(out, leaves(inputs), out))


@pytest.mark.parametrize("name", [None, NAME])
def test_wrong_inputs_are_refused(name: str | None) -> None:
    tree = random_forest(1, rows=3, length=6)
    inputs = list(CASE.inputs(tree, states=1, final=True))
    for place, value, text in (
        (0, inputs[0][:, :-1], "expected floating-point a and x"),
        (2, inputs[2][:-1], "prev must be int64"),
        (3, inputs[3].int(), "end must be int64"),
        (4, inputs[4][:, :-1], "initial must be"),
        (5, torch.tensor([-1]), "final must lie"),
    ):
        wrong = list(inputs)
        wrong[place] = value
        with pytest.raises(InvalidInput, match=text):
            CASE.run(tree, wrong, name)
