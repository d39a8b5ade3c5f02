"""`linear_attention`: the body against the recurrence over full rows, the implementations against the body, the library, and bits."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.layout import Forest
from sp_compile.lowering import delta_rules
from sp_compile.ops.linear_attention import linear_attention_inputs
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

OPTIONS: dict[str, Any] = {"scale": 0.3, "chunk": 64}
NAMES = ("chunked", "chunked_replay")
DECAYS = ("g", "decay", None)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def dense(inputs: Any, tokens: list[int], start: int | None) -> tuple[Tensor, Tensor]:
    q, k, v, g, decay, _, _, initial, _ = inputs
    state = v.new_zeros(v.shape[2], k.shape[3], v.shape[3]) if start is None else initial[start]
    outs, states = [], []
    for t in tokens:
        rate = g[0, t] if g is not None else decay if decay is not None else v.new_zeros(v.shape[2])
        state = rate.exp()[:, None, None] * state + torch.einsum("hk,hv->hkv", k[0, t], v[0, t])
        outs.append(OPTIONS["scale"] * torch.einsum("hk,hkv->hv", q[0, t], state))
        states.append(state)
    return torch.stack(outs), torch.stack(states)


def case(decays: str | None) -> Case:
    make = functools.partial(linear_attention_inputs, decays=decays)
    return Case(torch.ops.sp_compile.linear_attention.default, make, dense, OPTIONS, initial=7)


CASE = case("g")
assert delta_rules.TABLES, "importing the tables registers the implementations"


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("name", ["one_token", "several_roots", "strict_prefixes", "deep", "tokens_of_one", "one_branch"])
def test_equals_dense_rows(name: str, decays: str | None) -> None:
    check_against_rows(case(decays), forest(name), case(decays).inputs(forest(name)))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2), st.booleans(), st.integers(1, 3), st.sampled_from(DECAYS))
def test_equals_dense_rows_random_forest(seed: int, states: int, final: bool, heads: int, decays: str | None) -> None:
    tree = random_forest(seed, rows=5, length=12)
    inputs = case(decays).inputs(tree, states=states, final=final, heads=heads, dims=(3, 4), seed=seed)
    check_against_rows(case(decays), tree, inputs)


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_dense_rows_at_chunk_borders(length: int) -> None:
    tree = Forest.from_rows(fork(length, (1, 3)))
    inputs = CASE.inputs(tree, final=True, heads=2, dims=(3, 2))
    check_against_rows(CASE, tree, inputs)
    for name in NAMES:
        check_against_body(CASE, tree, name, inputs, torch.float64)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("decays", DECAYS)
def test_implementation_equals_body(name: str, dtype: torch.dtype, decays: str | None) -> None:
    for tree in (Forest.from_rows(fork(70, (1, 20, 64, 130))), Forest.from_rows(short_nodes()), forest("several_roots")):
        check_against_body(case(decays), tree, name, case(decays).inputs(tree, states=2, final=True), dtype)


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
    """Decays of exp(-1000) and of zero: nothing is left, and no gradient becomes infinite on the way."""
    tree = Forest.from_rows(fork(100, (40, 50)))
    inputs = list(CASE.inputs(tree, heads=4))
    inputs[3] = torch.tensor([-1000.0, -30.0, -1e-3, 0.0], dtype=torch.float64).expand(1, tree.num_tokens, 4).clone().requires_grad_()
    check_against_body(CASE, tree, name, inputs, torch.float32)
    reset = inputs[3].detach().clone()
    reset[:, 50::7] = -torch.inf
    inputs[3] = reset.requires_grad_()
    check_against_body(CASE, tree, name, inputs, torch.float32)


@pytest.mark.parametrize("name", [None, *NAMES])
def test_equals_transformers_lightning_attention(name: str | None) -> None:
    """MiniMax: the decay of head h is exp(-slope_h) per token, and nothing scales the queries."""
    library = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = library.MiniMaxConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, block_size=16, num_hidden_layers=2, layer_types=["linear_attention"] * 2
    )
    torch.manual_seed(0)
    layer = library.MiniMaxLightningAttention(config, 1)
    hidden = torch.randn(1, 90, 32)
    want = layer(hidden, None, None)[0]
    q, k, v = layer.act_fn(layer.qkv_proj(hidden)).view(1, 90, 4, 24).split(8, 3)
    tree = Forest.from_rows([list(range(90))])
    prev, end = tree.tensor("prev", "cpu"), tree.tensor("end", "cpu")
    inputs = [q.contiguous(), k.contiguous(), v.contiguous(), None, -layer.slope_rate.flatten(), prev, end, None, None]
    mixed = CASE.run(tree, inputs, name, scale=1.0)[0].flatten(2)
    got = layer.out_proj(layer.output_gate(hidden).sigmoid() * layer.norm(mixed))
    assert relative_error(got, want) < 1e-6
    weights = list(layer.parameters())
    grads = [torch.autograd.grad(out.square().sum(), weights) for out in (got, want)]
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
    for decays in DECAYS:
        poisoned(case(decays), name, tree, case(decays).inputs(tree, final=True, states=1, dtype=torch.float32))


@pytest.mark.parametrize("name", NAMES)
def test_repeats_bits(name: str) -> None:
    tree = Forest.from_rows(fork(70, (1, 20, 64, 130)))
    for decays in DECAYS:
        inputs = case(decays).inputs(tree, dtype=torch.float32, states=1, final=True)
        assert differing(lambda inputs=inputs: CASE.run(tree, inputs, name), leaves(inputs)) == []


@pytest.mark.parametrize("name", [None, *NAMES])
@pytest.mark.parametrize("decays", DECAYS)
def test_opcheck(name: str | None, decays: str | None) -> None:
    tree = random_forest(1, rows=3, length=6)
    inputs = list(case(decays).inputs(tree, dtype=torch.bfloat16, states=1, final=True))
    op = CASE.op
    if name is not None:
        op = CASE.item(name).op
        inputs.append(tree.tensor(CASE.item(name).forest_names(OPTIONS)[0], "cpu"))
    torch.library.opcheck(op, tuple(inputs), OPTIONS)


@pytest.mark.parametrize("name", [None, *NAMES])
def test_without_tokens(name: str | None) -> None:
    tree = Forest.from_rows([[]])
    for decays in DECAYS:
        inputs = case(decays).inputs(tree, states=1, final=True)
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
        (3, inputs[3][..., None], "g must be floating point"),
        (4, torch.zeros(2), "expected g or decay or neither"),
        (4, torch.zeros(3), "decay must be floating point"),
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
