"""`causal_conv1d`: the body against a loop over full rows, the implementation against the body, and bits."""

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
from sp_compile.ops.causal_conv1d import causal_conv1d_inputs
from tests.determinism.replay import differing
from tests.ops.forests import forest, random_forest
from tests.ops.scans import (
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


def dense(inputs: Any, tokens: list[int], start: int | None, activation: str | None = "silu") -> tuple[Tensor, None]:
    x, weight, bias, _, halo = inputs
    width = weight.shape[1]
    before = x.new_zeros(width - 1, x.shape[2]) if start is None else halo[start]
    seen = torch.cat([before, x[0, tokens]])
    outs = []
    for t in range(len(tokens)):
        y = sum(weight[:, w] * seen[t + w] for w in range(width))
        y = y if bias is None else y + bias
        outs.append(y * torch.sigmoid(y) if activation else y)
    return torch.stack(outs), None


def make(prev: Tensor, end: Tensor, **changes: Any) -> Any:
    return causal_conv1d_inputs(prev, **changes)


def case(activation: str | None = "silu") -> Case:
    op = torch.ops.sp_compile.causal_conv1d.default
    return Case(op, make, lambda *args: dense(*args, activation), {"activation": activation}, initial=4)


@pytest.mark.parametrize("name", ["one_token", "several_roots", "strict_prefixes", "deep", "tokens_of_one", "one_branch"])
def test_equals_dense_rows(name: str) -> None:
    check_against_rows(case(), forest(name), case().inputs(forest(name)))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_equals_dense_rows_of_short_nodes(width: int, activation: str | None) -> None:
    """The halo of a token spans up to four nodes; prompts are shorter than the kernel."""
    for rows in (short_nodes(), fork(2, (1, 1, 5)), [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5]]):
        tree = Forest.from_rows(rows)
        for states in (0, 1):
            inputs = case().inputs(tree, width=width, states=states, channels=3)
            check_against_rows(case(activation), tree, inputs)
            check_against_body(case(activation), tree, "shifted", inputs, torch.float64)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2), st.booleans(), st.integers(1, 5))
def test_random_forest(seed: int, states: int, bias: bool, width: int) -> None:
    tree = random_forest(seed, rows=5, length=10)
    inputs = case().inputs(tree, states=states, bias=bias, width=width, seed=seed, channels=5)
    check_against_rows(case(), tree, inputs)
    check_against_body(case(), tree, "shifted", inputs, torch.float64)
    check_against_body(case(), tree, "shifted", inputs, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_implementation_equals_body(dtype: torch.dtype) -> None:
    for tree in (Forest.from_rows(fork(70, (1, 20, 64, 130))), Forest.from_rows(short_nodes()), forest("several_roots")):
        for states in (0, 2):
            check_against_body(case(), tree, "shifted", case().inputs(tree, states=states, channels=64), dtype)


def test_several_blocks_of_tokens() -> None:
    tree = Forest.from_rows(fork(90, (30, 50)))
    check_against_body(case(), tree, "shifted", case().inputs(tree, channels=2048), torch.float32)


@pytest.mark.parametrize("channels", [5, 64])
@pytest.mark.parametrize("prefix", [1, 2, 3, 17, 64])
def test_what_follows_a_prefix_moves_none_of_its_bits(prefix: int, channels: int) -> None:
    for more in (1, 60):
        longer(case(), "shifted", prefix, more, channels=channels)


def test_an_edited_sibling_moves_no_other_bits() -> None:
    siblings(case(), "shifted", Forest.from_rows(fork(50, (30, 70, 20))), 80, 150)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_has_the_bits_of_unshared_rows(dtype: torch.dtype) -> None:
    for rows in (fork(70, (1, 20, 64, 130)), short_nodes(), [*fork(40, (9, 30, 4)), list(range(20))]):
        flat_equal(case(), "shifted", Forest.from_rows(rows), unshared(rows), dtype)


def test_no_result_is_left_unwritten() -> None:
    tree = Forest.from_rows(fork(7, (1, 2, 13)))
    poisoned(case(), "shifted", tree, case().inputs(tree, states=1, dtype=torch.float32))


def test_repeats_bits() -> None:
    tree = Forest.from_rows(fork(70, (1, 20, 64, 130)))
    inputs = case().inputs(tree, dtype=torch.float32, states=1)
    assert differing(lambda: case().run(tree, inputs, "shifted"), leaves(inputs)) == []


@pytest.mark.parametrize("name", ["causal_conv1d", "causal_conv1d_shifted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    inputs = case().inputs(random_forest(1, rows=3, length=6), dtype=dtype, states=1)
    torch.library.opcheck(getattr(torch.ops.sp_compile, name).default, tuple(inputs), {"activation": "silu"})


@pytest.mark.parametrize("name", [None, "shifted"])
def test_strided_and_empty_inputs(name: str | None) -> None:
    tree = random_forest(2)
    inputs = list(case().inputs(tree))
    out = case().run(tree, inputs, name)[0]
    inputs[0] = inputs[0].detach().mT.contiguous().mT.requires_grad_()
    strided = case().run(tree, inputs, name)[0]
    assert strided.is_contiguous()
    assert torch.equal(out, strided)
    empty = case().inputs(Forest.from_rows([[]]), states=1)
    out = case().run(Forest.from_rows([[]]), empty, name)[0]
    assert out.shape == (1, 0, 12)
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), leaves(empty)))


@pytest.mark.parametrize("name", [None, "shifted"])
def test_wrong_inputs_are_refused(name: str | None) -> None:
    tree = random_forest(1, rows=3, length=6)
    inputs = list(case().inputs(tree, states=1))
    for place, value, text in (
        (0, inputs[0][0], "expected floating-point x"),
        (1, inputs[1][:-1], "weight must be"),
        (2, inputs[2][:-1], "bias must be"),
        (3, inputs[3][:-1], "prev must be int64"),
        (3, inputs[3] + 10, "depth-first preorder"),
        (3, inputs[3] - 5 * (inputs[3] < 0), "continues external state"),
        (4, inputs[4][:, :-1], "halo must be"),
    ):
        wrong = list(inputs)
        wrong[place] = value
        with pytest.raises(InvalidInput, match=text):
            case().run(tree, wrong, name)
    with pytest.raises(InvalidInput, match="activation must be"):
        case().run(tree, inputs, name, activation="gelu")
