"""The reference against dense attention on the full rows, and the op's contract with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from sp_compile.errors import InvalidInput
from sp_compile.ops.attention import TOLERANCE, attention_inputs
from sp_compile.ops.numerics import relative_error
from tests.ops.forests import ROWS, dense_attention, forest, random_forest, tensors

attention = torch.ops.sp_compile.attention
PLAIN: dict[str, Any] = {"scale": 0.3, "window": None, "chunk": None, "softcap": None}


def compare_with_rows(tree: Any, inputs: list[Tensor | None], options: dict[str, Any], more: tuple[Tensor, ...] = (), **dense: Any) -> None:
    """Output of every row position and gradients of every float leaf, for random weights on the row positions."""
    index = tree.tensor("index", "cpu")
    leaves = [*(x for x in inputs if x is not None and x.is_leaf and x.requires_grad), *more]
    shared = attention(*inputs, **options)
    got, want = [], dense_attention(tree, *inputs[:3], **{k: v for k, v in options.items() if v is not None}, **dense)
    generator = torch.Generator().manual_seed(1)
    losses = shared.new_zeros(()), shared.new_zeros(())
    for row, expected in zip(index, want, strict=True):
        got.append(shared[0][:, row[row >= 0]])
        weight = torch.randn(expected.shape, generator=generator, dtype=expected.dtype)
        losses = losses[0] + (got[-1] * weight).sum(), losses[1] + (expected * weight).sum()
    for one, other in zip(got, want, strict=True):
        assert relative_error(one, other) < TOLERANCE[torch.float64]
    grads = [torch.autograd.grad(loss, leaves) for loss in losses]
    for one, other in zip(*grads, strict=True):
        assert relative_error(one, other) < TOLERANCE[torch.float64]


def make(tree: Any, **changed: Any) -> list[Tensor | None]:
    end, column, _ = tensors(tree)
    return attention_inputs(end, column, dtype=torch.float64, **changed)


@pytest.mark.parametrize("name", ROWS)
def test_equals_dense_rows(name: str) -> None:
    tree = forest(name)
    compare_with_rows(tree, make(tree, dims=(8, 8)), PLAIN)


@pytest.mark.parametrize("seed", range(8))
def test_equals_dense_rows_random_forest(seed: int) -> None:
    tree = random_forest(seed)
    compare_with_rows(tree, make(tree, heads=(6, 2), dims=(8, 5), seed=seed), PLAIN)


@pytest.mark.parametrize(
    "option", [{"window": 3}, {"window": 1}, {"chunk": 4}, {"softcap": 0.7}, {"window": 5, "softcap": 0.7, "chunk": 8}]
)
@pytest.mark.parametrize("sinks", [False, True])
def test_equals_dense_rows_with_options(option: dict[str, Any], sinks: bool) -> None:
    for seed in range(3):
        tree = random_forest(seed)
        inputs = make(tree, sinks=sinks, seed=seed)
        compare_with_rows(tree, inputs, PLAIN | option, sinks=inputs[8])


def test_equals_dense_rows_with_padding_and_segments() -> None:
    tree = random_forest(3)
    inputs = make(tree)
    generator = torch.Generator().manual_seed(5)
    key_valid = torch.rand(1, tree.num_tokens, generator=generator) < 0.7
    segments = torch.from_numpy(tree.column // 5)[None]
    inputs[5], inputs[6] = key_valid, segments
    compare_with_rows(tree, inputs, PLAIN, key_valid=key_valid, segments=segments)


def test_equals_dense_rows_with_column_bias() -> None:
    tree = random_forest(4)
    inputs = make(tree)
    slopes = torch.linspace(0.1, 0.4, 4, dtype=torch.float64)[:, None, None].requires_grad_()

    def alibi(one: Tensor, many: Tensor) -> Tensor:
        return slopes * (many[None, :] - one[:, None])

    column = inputs[4]
    assert column is not None
    inputs[7] = alibi(column, column)[None]
    compare_with_rows(tree, inputs, PLAIN, (slopes,), bias=alibi)


def test_bool_bias_hides_pairs() -> None:
    tree = random_forest(6)
    inputs = make(tree)
    column = inputs[4]
    assert column is not None
    windowed = attention(*inputs, **(PLAIN | {"window": 4}))
    inputs[7] = column[:, None] - column[None, :] < 4
    assert torch.equal(attention(*inputs, **PLAIN), windowed)
    inputs[7] = torch.zeros_like(inputs[7], dtype=torch.float64).masked_fill(~inputs[7], -torch.inf)
    assert relative_error(attention(*inputs, **PLAIN), windowed) < 1e-14


@pytest.mark.parametrize("sinks", [False, True])
def test_fully_masked_query_gives_zero_and_no_gradient(sinks: bool) -> None:
    tree = forest("one_branch")
    inputs = make(tree, sinks=sinks)
    inputs[5] = torch.arange(tree.num_tokens)[None] >= 3
    out = attention(*inputs, **PLAIN)
    assert (out[:, :, :3] == 0).all()
    grads = torch.autograd.grad(out.square().sum() + out.sum(), inputs[:3])
    assert all(grad.isfinite().all() for grad in grads)
    assert all((grad[:, :, :3] == 0).all() for grad in grads)
    assert all((grad[:, :, 3:].abs().amax((0, 1, 3)) > 0).all() for grad in grads[1:])


def test_gradients_pass_gradcheck() -> None:
    tree = random_forest(2, rows=3, length=4)
    inputs = make(tree, heads=(2, 1), dims=(3, 2), sinks=True)
    bias = torch.randn(1, 2, tree.num_tokens, tree.num_tokens, dtype=torch.float64, requires_grad=True)
    options = PLAIN | {"softcap": 1.5, "window": 4}
    leaves = [*inputs[:3], bias, inputs[8]]
    assert torch.autograd.gradcheck(lambda q, k, v, b, s: attention(q, k, v, *inputs[3:7], b, s, **options), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype) -> None:
    end, column, _ = tensors(random_forest(1))
    inputs = attention_inputs(end, column, dtype=dtype, sinks=True, dims=(8, 6))
    torch.library.opcheck(attention.default, tuple(inputs), PLAIN | {"window": 4, "softcap": 2.0})


def test_result_is_contiguous_for_strided_inputs() -> None:
    end, column, _ = tensors(random_forest(1))
    q, k, v, *rest = attention_inputs(end, column)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v) if x is not None]
    out = attention(*strided, *rest, **PLAIN)
    assert out.is_contiguous()
    assert torch.equal(out, attention(q, k, v, *rest, **PLAIN))


def test_nothing_is_guarded_on_the_number_of_tokens() -> None:
    env = ShapeEnv()
    end, column, _ = tensors(random_forest(1))
    real = [x.detach() for x in attention_inputs(end, column) if x is not None]
    with FakeTensorMode(shape_env=env) as mode:
        fakes = []
        for value, tokens in zip(real, (2, 2, 2, 0, 0), strict=True):
            sizes = [DimDynamic.DYNAMIC if dim == tokens else DimDynamic.STATIC for dim in range(value.dim())]
            fakes.append(mode.from_tensor(value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)))
        before = len(env.guards)
        out = attention(*fakes, None, None, None, None, **PLAIN)
        assert isinstance(out.shape[2], torch.SymInt)
        assert len(env.guards) == before


def test_without_tokens() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    inputs = attention_inputs(empty, empty, sinks=True)
    out = attention(*inputs, **PLAIN)
    grads = torch.autograd.grad(out.sum(), [inputs[0], inputs[1], inputs[2], inputs[8]])
    assert out.shape == (1, 4, 0, 16)
    assert (grads[3] == 0).all()


def test_wrong_inputs_are_refused() -> None:
    end, column, _ = tensors(random_forest(1))
    inputs = attention_inputs(end, column)
    q, k, v = inputs[:3]
    assert q is not None
    assert k is not None
    assert v is not None
    for wrong, text in (
        ([q[:, :3], k, v, *inputs[3:]], "multiple"),
        ([q[:, :, :-1], k, v, *inputs[3:]], "expected q"),
        ([q, k, v.double(), *inputs[3:]], "one floating-point dtype"),
        ([q, k, v, end.int(), *inputs[4:]], "end must be int64"),
        ([*inputs[:5], torch.ones(2, len(end)), *inputs[6:]], "key_valid"),
        ([*inputs[:8], torch.ones(3)], "sinks"),
    ):
        with pytest.raises(InvalidInput, match=text):
            attention(*wrong, **PLAIN)
    with pytest.raises(InvalidInput, match="window must be positive"):
        attention(*inputs, **(PLAIN | {"window": 0}))
