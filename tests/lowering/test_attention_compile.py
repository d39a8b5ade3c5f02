"""Ops under torch.compile: one graph for any number of tokens, values and gradients as in eager mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from sp_compile.layout import Forest
from sp_compile.lowering.attention import TABLE
from sp_compile.lowering.rows import cross_entropy, rows
from sp_compile.ops.attention import attention_inputs
from sp_compile.ops.numerics import relative_error

ops = torch.ops.sp_compile
OPTIONS: dict[str, Any] = {"scale": 0.25, "window": None, "chunk": None, "softcap": None}
assert rows is not None
assert cross_entropy is not None


def star(prompt: int, completion: int) -> Forest:
    return Forest.from_rows([[*range(prompt), *range(1000 * b, 1000 * b + completion)] for b in range(1, 4)])


def model(name: str) -> Any:
    """Attention, a row loss and both row conversions, with something around them for a compiler to fuse."""
    implementation = next(item for item in TABLE if item.name == name)

    def step(
        q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor, sinks: Tensor, passes: Tensor, index: Tensor, target: Tensor
    ) -> Tensor:
        extra = (passes,) if implementation.forest_tensors else ()
        result = implementation.op(torch.sin(q), k * 2, v, end, column, None, None, None, sinks, *extra, **OPTIONS)
        out = result if implementation.output is None else result[implementation.output]
        hidden = out.transpose(1, 2).flatten(2)[0] * 1.5
        loss, weight, _ = ops.cross_entropy_rows(hidden, index, target, None, ignore_index=-100, label_smoothing=0.1)
        unpacked = ops.unpack(hidden.relu(), index)
        return loss.sum() / weight.sum() + unpacked.square().mean() + ops.take_tokens(hidden, index, target).sum().tanh()

    return step


def arguments(tree: Forest) -> tuple[list[Tensor], list[Tensor]]:
    """All arguments of a step, and those of them that want a gradient."""
    end, column, index, passes = tree.tensors(("end", "column", "index", "attention_passes"), "cpu")
    q, k, v, *_, sinks = attention_inputs(end, column, sinks=True)
    assert q is not None
    assert k is not None
    assert v is not None
    assert sinks is not None
    return [q, k, v, end, column, sinks, passes, index, index.clamp(min=0).remainder(64)], [q, k, v, sinks]


def compare(compiled: Any, eager: Any, tree: Forest) -> None:
    args, leaves = arguments(tree)
    for x, dim in zip(args, (2, 2, 2, 0, 0, None, 0, 1, 1), strict=True):
        if dim is not None:
            torch._dynamo.maybe_mark_dynamic(x, dim)
    got, want = compiled(*args), eager(*args)
    assert relative_error(got, want) < 1e-6
    for one, other in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
        assert relative_error(one, other) < 1e-5


@pytest.mark.parametrize(
    "name",
    [item.name for item in TABLE if item.name != "chains_cuda" and not item.name.startswith("triton") and not item.name.startswith("fa4")],
)
def test_one_graph_for_any_number_of_tokens(name: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = model(name)
    compiled = torch.compile(step, backend=counter, dynamic=True, fullgraph=True)
    compare(compiled, step, star(5, 3))
    # Dynamo calls the backend again while it specialises the Python float; what counts is that no later size does.
    first = counter.frame_count
    for prompt, completion in ((9, 4), (64, 8), (30, 31), (2, 128), (128, 2)):
        compare(compiled, step, star(prompt, completion))
    assert counter.frame_count == first <= 2


@pytest.mark.slow
def test_inductor() -> None:
    torch._dynamo.reset()
    step = model("chains")
    compiled = torch.compile(step, backend="inductor", dynamic=True, fullgraph=True)
    for prompt, completion in ((5, 3), (40, 17)):
        compare(compiled, step, star(prompt, completion))


def test_backward_reuses_the_forward() -> None:
    """The compiled backward holds no forward op: out and lse are saved."""

    graphs: list[str] = []

    def backward(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return nop(graph, _)

    args, leaves = arguments(star(9, 4))
    loss = aot_function(model("chains"), fw_compiler=nop, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition)(*args)
    torch.autograd.grad(loss, leaves)
    assert graphs[0].count("attention_chains_backward") >= 1
    assert "attention_chains.default" not in graphs[0]
