"""`kda`: the body against the recurrence over full rows, the implementations against the body, the library, and bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.layout import Forest
from sp_compile.lowering import delta_rules
from sp_compile.ops.kda import kda_inputs
from sp_compile.ops.numerics import relative_error
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

OPTIONS: dict[str, Any] = {"scale": 0.3, "qk_l2norm": True, "chunk": 64}
NAMES = ("chunked", "chunked_replay")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def dense(inputs: Any, tokens: list[int], start: int | None, options: dict[str, Any] = OPTIONS) -> tuple[Tensor, Tensor]:
    """S <- S diag(exp(g)) (I - beta k k^T) + beta v k^T with S [V, K], as in the paper."""
    q, k, v, g, beta, _, _, initial, _ = inputs
    heads, rows, columns = v.shape[2], k.shape[3], v.shape[3]
    state = v.new_zeros(heads, columns, rows) if start is None else initial[start].mT
    one = torch.eye(rows, dtype=v.dtype)
    outs, states = [], []
    for t in tokens:
        query, key = q[0, t], k[0, t]
        if options["qk_l2norm"]:
            query, key = (value / (value.square().sum(-1, keepdim=True) + 1e-6).sqrt() for value in (query, key))
        strength = beta[0, t][:, None, None]
        erase = one - strength * key[:, :, None] * key[:, None, :]
        state = g[0, t].exp()[:, None, :] * state @ erase + strength * v[0, t][:, :, None] * key[:, None, :]
        outs.append(options["scale"] * (state @ query[:, :, None])[:, :, 0])
        states.append(state.mT)
    return torch.stack(outs), torch.stack(states)


CASE = Case(torch.ops.sp_compile.kda.default, kda_inputs, dense, OPTIONS, initial=7)
assert delta_rules.TABLES, "importing the tables registers the implementations"


@pytest.mark.parametrize("name", ["one_token", "several_roots", "strict_prefixes", "deep", "tokens_of_one", "one_branch"])
def test_equals_dense_rows(name: str) -> None:
    check_against_rows(CASE, forest(name), CASE.inputs(forest(name)))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2), st.booleans(), st.integers(1, 3))
def test_equals_dense_rows_random_forest(seed: int, states: int, final: bool, heads: int) -> None:
    tree = random_forest(seed, rows=5, length=12)
    check_against_rows(CASE, tree, CASE.inputs(tree, states=states, final=final, heads=heads, dims=(3, 4), seed=seed))


def test_equals_dense_rows_without_normalisation() -> None:
    options = OPTIONS | {"qk_l2norm": False}
    case = Case(CASE.op, kda_inputs, lambda *args: dense(*args, options), options, initial=7)
    tree = random_forest(3, rows=4, length=10)
    inputs = case.inputs(tree)
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
        check_against_body(CASE, tree, name, CASE.inputs(tree, states=2, final=True), dtype)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2), st.booleans(), st.sampled_from([3, 16, 48, 64]))
def test_implementation_equals_body_random_forest(name: str, seed: int, states: int, final: bool, chunk: int) -> None:
    tree = random_forest(seed, length=40)
    inputs = CASE.inputs(tree, states=states, final=final, seed=seed)
    check_against_body(CASE, tree, name, inputs, torch.float64, chunk=chunk)
    check_against_body(CASE, tree, name, inputs, torch.float32, chunk=chunk)


@pytest.mark.parametrize("name", NAMES)
def test_strong_decay_overflows_nowhere(name: str) -> None:
    """Rows that decay by exp(-1000) beside rows that stay: no factor and no gradient becomes infinite on the way."""
    tree = Forest.from_rows(fork(100, (40, 50)))
    inputs = list(CASE.inputs(tree))
    rates = torch.tensor([-1000.0, -30.0, -3.0, -0.5, -0.1, -1e-2, -1e-3, 0.0], dtype=torch.float64)
    inputs[3] = rates.expand(1, tree.num_tokens, 2, 8).clone().requires_grad_()
    check_against_body(CASE, tree, name, inputs, torch.float32)
    reset = inputs[3].detach().clone()
    reset[:, 50::7, :, ::2] = -torch.inf
    inputs[3] = reset.requires_grad_()
    check_against_body(CASE, tree, name, inputs, torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_repeated_keys_keep_their_accuracy(name: str) -> None:
    """Equal keys at high strength: powers of the system of a chunk have huge entries, its inverse has none above one."""
    tree = Forest.from_rows(fork(130, (5, 70)))
    inputs = list(CASE.inputs(tree))
    inputs[1] = inputs[1].detach()[:, :1].expand_as(inputs[1]).clone().requires_grad_()
    inputs[3] = torch.full_like(inputs[3], -0.1).requires_grad_()
    inputs[4] = torch.full_like(inputs[4], 0.8).requires_grad_()
    check_against_body(CASE, tree, name, inputs, torch.float32)


def library_arguments(inputs: Any) -> dict[str, Any]:
    names = ("query", "key", "value", "g", "beta")
    return dict(zip(names, inputs[:5], strict=True)) | {"use_qk_l2norm_in_kernel": True, "output_final_state": True}


@pytest.mark.parametrize("function", ["chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"])
@pytest.mark.parametrize("name", [None, "chunked"])
def test_equals_transformers_on_one_row(function: str, name: str | None) -> None:
    library = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    tree = Forest.from_rows([list(range(100))])
    inputs = CASE.inputs(tree, states=1, final=True, dtype=torch.float32)
    want = getattr(library, function)(**library_arguments(inputs), initial_state=inputs[7])
    got = CASE.run(tree, inputs, name, scale=inputs[0].shape[3] ** -0.5)
    assert max(relative_error(one, other) for one, other in zip(got, want, strict=True)) < 1e-6
    grads = [torch.autograd.grad(out, leaves(inputs), [torch.linspace(0, 1, x.numel()).view(x.shape) for x in out]) for out in (got, want)]
    assert max(relative_error(one, other) for one, other in zip(*grads, strict=True)) < 1e-5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prefix", [1, 5, 16, 17, 40, 64, 65])
def test_what_follows_a_prefix_moves_none_of_its_bits(name: str, prefix: int) -> None:
    for more in (1, 60):
        longer(CASE, name, prefix, more, dims=(16, 8))


@pytest.mark.parametrize("name", [None, "chunked"])
def test_what_follows_a_prefix_moves_none_of_its_bits_in_float64(name: str | None) -> None:
    for prefix in (1, 15, 16, 33):
        longer(CASE, name, prefix, 40, torch.float64, dims=(16, 8))


@pytest.mark.parametrize("name", NAMES)
def test_an_edited_sibling_moves_no_other_bits(name: str) -> None:
    siblings(CASE, name, Forest.from_rows(fork(50, (30, 70, 20))), 80, 150)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk", [16, 64])
def test_replay_has_the_bits_of_unshared_rows(chunk: int, dtype: torch.dtype) -> None:
    for rows in (fork(70, (1, 20, 64, 130)), short_nodes(), [*fork(40, (9, 30, 4)), list(range(20))]):
        flat_equal(CASE, "chunked_replay", Forest.from_rows(rows), unshared(rows), dtype, chunk=chunk)


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
    assert [tuple(value.shape) for value in out] == [(1, 0, 2, 12), (0, 2, 8, 12)]
    assert all((grad == 0).all() for grad in torch.autograd.grad(out, leaves(inputs), out))


@pytest.mark.parametrize("name", [None, "chunked"])
def test_wrong_inputs_are_refused(name: str | None) -> None:
    tree = random_forest(1, rows=3, length=6)
    inputs = list(CASE.inputs(tree, states=1, final=True))
    for place, value, text in (
        (0, inputs[0][:, :-1], "expected q and k"),
        (1, inputs[1].float(), "one floating-point dtype"),
        (2, inputs[2][:, :, :1], "as many heads of v"),
        (3, inputs[3][..., 0], "g must be floating point"),
        (4, inputs[4].long(), "beta must be floating point"),
        (5, inputs[5].int(), "prev must be int64"),
        (6, inputs[6][:-1], "end must be int64"),
        (7, inputs[7].float(), "initial must be torch.float64"),
        (8, torch.tensor([10**6]), "final must lie"),
        (5, inputs[5] - 5 * (inputs[5] < 0), "continues external state"),
    ):
        wrong = list(inputs)
        wrong[place] = value
        with pytest.raises(InvalidInput, match=text):
            CASE.run(tree, wrong, name)
    with pytest.raises(InvalidInput, match="chunk must be positive"):
        torch.ops.sp_compile.kda(*inputs, **(OPTIONS | {"chunk": 0}))
