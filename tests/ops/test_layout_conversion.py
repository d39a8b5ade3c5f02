"""The ops of context parallelism as torch ops, on a grid of one member, where no process group is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sp_compile.errors import InvalidInput
from sp_compile.ops import layout_conversion, query_attention  # noqa: F401  (register the ops)
from sp_compile.ops.numerics import relative_error
from tests.ops import forests

OPS = torch.ops.sp_compile


def attention_inputs(tokens: torch.Tensor, sinks: bool = False) -> tuple[Any, ...]:
    tree = forests.forest("deep")
    end, column, _ = forests.tensors(tree)

    def value(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    q = value(1, 4, len(tokens), 6)
    return q, value(1, 2, len(end), 6), value(1, 2, len(end), 5), tokens, end, column, None, None, value(4) if sinks else None


OPTIONS: dict[str, Any] = {"scale": 0.4, "window": None, "chunk": None, "softcap": None}


def samples() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    turn = torch.tensor([2, 0, 1])
    back = torch.argsort(turn)
    still, splits = torch.arange(3), torch.tensor([[3], [3]])
    x = torch.randn(2, 3, 4, requires_grad=True)
    rows = torch.tensor([1, 1, 0])
    return {
        "convert": (OPS.convert_layout, (x, turn, still, still, back, splits, 1, "", False), {}),
        "gather": (OPS.gather_tokens, (x, 1, 1, ""), {}),
        "exchange": (OPS.exchange_rows, (x, rows, splits, 3, ""), {}),
        "total": (OPS.sum_over_ranks, (x, 1, ""), {}),
        "attention": (OPS.query_attention, attention_inputs(torch.tensor([9, 0, 30, 4]), sinks=True), OPTIONS),
    }


@pytest.mark.parametrize("name", ["convert", "gather", "exchange", "total", "attention"])
def test_opcheck(name: str) -> None:
    torch.manual_seed(0)
    op, args, options = samples()[name]
    if name == "exchange":
        args = (torch.randn(2, 4, requires_grad=True), *args[1:])
    torch.library.opcheck(op.default, args, options)


def test_some_queries_are_rows_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, in blocks of any size, gradients included."""
    torch.manual_seed(0)
    monkeypatch.setattr(query_attention, "BUDGET", 4 * 40 * 3)
    tokens = torch.randperm(forests.forest("deep").num_tokens)
    args = attention_inputs(tokens, sinks=True)
    q, k, v, _, end, column, _, _, sinks = args
    for options in (OPTIONS, {"scale": 0.3, "window": 5, "chunk": None, "softcap": 3.0}, {**OPTIONS, "chunk": 4}):
        out = OPS.query_attention(*args, **options)
        whole = OPS.attention(q[:, :, torch.argsort(tokens)], k, v, end, column, None, None, None, sinks, **options)[:, :, tokens]
        assert relative_error(out, whole) <= 1e-12
        grad = torch.randn_like(out)
        leaves = [q, k, v, sinks]
        for got, want in zip(torch.autograd.grad(out, leaves, grad), torch.autograd.grad(whole, leaves, grad), strict=True):
            assert relative_error(got, want) <= 1e-12


def test_exchanged_row_collects_the_gradients_of_its_readers() -> None:
    x = torch.zeros(2, 1, requires_grad=True)
    OPS.exchange_rows(x, torch.tensor([1, 1, 0]), torch.tensor([[3], [3]]), 3, "").backward(torch.tensor([[1.0], [2.0], [4.0]]))
    assert x.grad is not None
    assert x.grad.tolist() == [[4.0], [3.0]]


def test_wrong_inputs() -> None:
    q, k, v, tokens, end, *rest = attention_inputs(torch.tensor([1, 2]))
    for given, said in (
        ((q[0], k, v, tokens, end), "expected q"),
        ((q, k, v, tokens[:1], end), "queries must be"),
        ((q, k, v, tokens, end[1:]), "end must be"),
        ((q[..., 1:], k, v, tokens, end), "equal head dim"),
        ((q.float(), k, v, tokens, end), "one floating-point dtype"),
    ):
        with pytest.raises(InvalidInput, match=said):
            OPS.query_attention(*given, *rest, **OPTIONS)
