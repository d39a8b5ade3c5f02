"""`selective_scan`: the body against the recurrence over full rows, the implementation against the body, and bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.kernels.scan import selective_scan as implementation
from sp_compile.layout import Forest
from sp_compile.lowering import scans as tables
from sp_compile.ops.selective_scan import selective_scan_inputs
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


def dense(inputs: Any, tokens: list[int], start: int | None, delta_softplus: bool = True) -> tuple[Tensor, Tensor]:
    u, delta, A, B, C, D, bias, _, _, initial, _ = inputs
    share = u.shape[2] // B.shape[2]
    h = u.new_zeros(A.shape) if start is None else initial[start]
    outs, states = [], []
    for t in tokens:
        step = delta[0, t] if bias is None else delta[0, t] + bias
        if delta_softplus:
            step = torch.nn.functional.softplus(step)
        key, query = (value[0, t].repeat_interleave(share, 0) for value in (B, C))
        h = torch.exp(step[:, None] * A) * h + (step * u[0, t])[:, None] * key
        y = (h * query).sum(-1)
        outs.append(y if D is None else y + D * u[0, t])
        states.append(h)
    return torch.stack(outs), torch.stack(states)


CASE = Case(torch.ops.sp_compile.selective_scan.default, selective_scan_inputs, dense, {"delta_softplus": True, "chunk": 64})


@pytest.mark.parametrize("name", ["one_token", "several_roots", "strict_prefixes", "deep", "tokens_of_one", "one_branch"])
def test_equals_dense_rows(name: str) -> None:
    check_against_rows(CASE, forest(name), CASE.inputs(forest(name), groups=2))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2), st.booleans(), st.booleans())
def test_random_forest(seed: int, states: int, final: bool, skip: bool) -> None:
    tree = random_forest(seed, rows=5, length=12)
    inputs = CASE.inputs(tree, states=states, final=final, skip=skip, bias=seed % 2 == 0, groups=1 + seed % 2, seed=seed)
    check_against_rows(CASE, tree, inputs)
    check_against_body(CASE, tree, NAME, inputs, torch.float64)
    check_against_body(CASE, tree, NAME, inputs, torch.float32)


def test_equals_dense_rows_without_softplus() -> None:
    case = Case(CASE.op, selective_scan_inputs, lambda *args: dense(*args, False), {"delta_softplus": False})
    tree = random_forest(3, rows=4, length=10)
    inputs = list(case.inputs(tree, bias=False))
    inputs[1] = inputs[1].detach().abs().requires_grad_()
    check_against_rows(case, tree, inputs)
    check_against_body(case, tree, NAME, inputs, torch.float32)


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_dense_rows_at_segment_borders(length: int) -> None:
    tree = Forest.from_rows(fork(length, (1, 3)))
    inputs = CASE.inputs(tree, final=True, channels=2, size=2)
    check_against_rows(CASE, tree, inputs)
    check_against_body(CASE, tree, NAME, inputs, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_implementation_equals_body(dtype: torch.dtype) -> None:
    for tree in (Forest.from_rows(fork(70, (1, 20, 64, 130))), Forest.from_rows(short_nodes()), forest("several_roots")):
        for states in (0, 2):
            check_against_body(CASE, tree, NAME, CASE.inputs(tree, states=states, final=True, groups=2), dtype)


@pytest.mark.parametrize("budget", [1, 100, 1000])
def test_slices_of_channels_change_nothing(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Forest.from_rows(fork(70, (1, 20, 64)))
    inputs = CASE.inputs(tree, dtype=torch.float32, states=1, final=True, channels=12, groups=2)
    whole = CASE.run(tree, inputs, NAME)
    monkeypatch.setattr(implementation, "BUDGET", budget)
    assert all(torch.equal(one, other) for one, other in zip(whole, CASE.run(tree, inputs, NAME), strict=True))
    check_against_body(CASE, tree, NAME, inputs, torch.float32)


def test_nothing_of_the_size_of_all_states_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Forest.from_rows(fork(300, (100, 100)))
    inputs = CASE.inputs(tree, dtype=torch.float32, channels=16, size=16)
    monkeypatch.setattr(implementation, "BUDGET", 4096)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    values = tuple(value.detach() if isinstance(value, Tensor) else value for value in inputs)
    grads = torch.ones_like(values[0]), torch.zeros(0, 16, 16)
    # Below the custom op, which the mode would see as one call.
    with torch.no_grad(), Watch():
        implementation.forward(*values, delta_softplus=True)
        implementation.backward(grads, values, {"delta_softplus": True})
    assert 0 < largest <= 16 * tree.num_tokens


def test_strong_decay_overflows_nowhere() -> None:
    tree = Forest.from_rows(fork(100, (40, 50)))
    inputs = list(CASE.inputs(tree))
    inputs[2] = (inputs[2].detach() * torch.tensor([1e4, 1.0, 1e-4, 0.0], dtype=torch.float64)).requires_grad_()
    check_against_body(CASE, tree, NAME, inputs, torch.float32)


@pytest.mark.parametrize("prefix", [1, 2, 31, 32, 33, 64])
def test_what_follows_a_prefix_moves_none_of_its_bits(prefix: int) -> None:
    for more in (1, 60):
        longer(CASE, NAME, prefix, more, channels=13, size=16)


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


@pytest.mark.parametrize("name", ["selective_scan", "selective_scan_wavefront"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    inputs = CASE.inputs(random_forest(1, rows=3, length=6), dtype=dtype, states=1, final=True)
    torch.library.opcheck(getattr(torch.ops.sp_compile, name).default, tuple(inputs), {"delta_softplus": True})


@pytest.mark.parametrize("name", [None, NAME])
def test_without_tokens(name: str | None) -> None:
    tree = Forest.from_rows([[]])
    inputs = CASE.inputs(tree, states=1, final=True)
    out = CASE.run(tree, inputs, name)
    assert [tuple(value.shape) for value in out] == [(1, 0, 8), (0, 8, 4)]
    assert all((grad == 0).all() for grad in torch.autograd.grad(out, leaves(inputs), out))


@pytest.mark.parametrize("name", [None, NAME])
def test_wrong_inputs_are_refused(name: str | None) -> None:
    tree = random_forest(1, rows=3, length=6)
    inputs = list(CASE.inputs(tree, states=1, final=True, groups=2))
    for place, value, text in (
        (1, inputs[1][:, :-1], "delta must be"),
        (2, inputs[2][:-1], "A must be"),
        (3, inputs[3][:, :, :1], "C must be"),
        (6, inputs[6][:-1], "delta_bias must be"),
        (7, inputs[7][:-1], "prev must be int64"),
        (9, inputs[9][:, :-1], "initial must be"),
        (10, torch.tensor([[1]]), "final must be int64"),
    ):
        wrong = list(inputs)
        wrong[place] = value
        with pytest.raises(InvalidInput, match=text):
            CASE.run(tree, wrong, name)
