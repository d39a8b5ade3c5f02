"""Of packed values, which dimensions of size 1 may be the rows: programs that name their dimensions, and the shapes of known models."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sp_compile.analysis.interpret import Analysis, analyse
from sp_compile.analysis.packed_inputs import read_packed_inputs
from tests.capture.recording import GRAPHS, recording

TOKENS, WIDTH = 7, 4


def packed_analysis(function: Callable[[Tensor], Any], x: Tensor, tokens: int) -> Analysis:
    """What is found about a function of packed values, given one of them whose dimension `tokens` runs over the tokens."""
    torch._dynamo.reset()
    GRAPHS.clear()
    torch._dynamo.mark_dynamic(x, tokens)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(function, backend=recording, fullgraph=True)(x)
    (graph,) = GRAPHS
    values = [x if isinstance(node.meta["example_value"], Tensor) else TOKENS for node in graph.graph.find_nodes(op="placeholder")]
    return analyse(graph, read_packed_inputs(graph.graph, values, TOKENS))


def refusal(function: Callable[[Tensor], Any], shape: tuple[int, ...] = (1, TOKENS, WIDTH)) -> str:
    found = packed_analysis(function, torch.randn(shape), shape.index(TOKENS))
    return "; ".join(info.failure.text for info in found.nodes.values() if info.failure is not None)


def router(x: Tensor, groups: int = 1) -> Tensor:
    """The group-limited choice of DeepSeek-V3 and what came after it."""
    scores = x.view(-1, x.shape[-1]).sigmoid()
    of_groups = scores.view(-1, groups, WIDTH // groups).topk(2, dim=-1)[0].sum(-1)
    chosen = of_groups.topk(1, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(of_groups).scatter_(1, chosen, 1)
    mask = mask.unsqueeze(-1).expand(-1, groups, WIDTH // groups).reshape(-1, WIDTH)
    return scores.masked_fill(~mask.bool(), 0.0).topk(2, dim=-1)[0].view(x.shape[0], x.shape[1], 2)


OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "a router with one group": router,
    "a router behind another": lambda x: router(router(x).repeat_interleave(2, -1)),
    "one group of channels": lambda x: x.unflatten(-1, (1, WIDTH)).softmax(-2),
    "a dimension put in": lambda x: x[:, :, None].sum(2),
    "a kept mean": lambda x: x.mean(-1, keepdim=True).softmax(-1),
    "the best of all": lambda x: x.topk(1)[0].sum(-1),
    "an outer product per token": lambda x: x.view(-1, WIDTH, 1) @ x.view(-1, 1, WIDTH),
    "channels joined to one": lambda x: torch.cat([x.sum(-1, keepdim=True), x.sum(-1, keepdim=True)], -1).sum(-1),
}
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "the batch": lambda x: x.sum(0),
    "tokens first": lambda x: x.transpose(0, 1).sum(1),
    "tokens first, flat": lambda x: x.transpose(0, 1).reshape(-1, WIDTH).view(-1, 1, WIDTH).softmax(1),
    "tokens first by an equation": lambda x: torch.einsum("bld->lbd", x).topk(1, dim=1)[0],
    "a router on tokens first": lambda x: router(x.transpose(0, 1)),
    "rows stacked": lambda x: torch.stack([x[b] for b in range(x.shape[0])], 1).sum(1),
    "rows unbound": lambda x: torch.stack(x.unbind(0), 1).sum(1),
    "rows squeezed": lambda x: x.squeeze(0).view(-1, 1, WIDTH).sum(1),
    "rows split": lambda x: torch.cat([row.view(-1, 1, WIDTH) for row in x.split(1)], 1).sum(1),
    "rows narrowed": lambda x: torch.cat([x.narrow(0, b, 1).view(-1, 1, WIDTH) for b in range(x.shape[0])], 1).sum(1),
    "rows sliced": lambda x: torch.cat([x[b : b + 1].view(-1, 1, WIDTH) for b in range(x.shape[0])], 1).sum(1),
    "rows sliced behind dots": lambda x: torch.cat([x[b : b + 1, ...].view(-1, 1, WIDTH) for b in range(x.shape[0])], 1).sum(1),
    "rows written": lambda x: _written(x).sum(1),
    "rows written into memory that is seen twice": lambda x: _seen_twice(x).sum(1),
    "rows looked up": lambda x: x[torch.zeros(1, dtype=torch.int64)],
    "rows moved by an index": lambda x: _chosen(x).sum(1),
    "rows repeated": lambda x: x.repeat(2, 1, 1).sum(0),
    "rows joined": lambda x: torch.cat([x, x], 0).sum(0),
    "rows padded": lambda x: torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)).sum(0),
    "a product over rows": lambda x: x.permute(1, 2, 0) @ x.permute(1, 0, 2),
    "rows behind a product": lambda x: (x.permute(1, 0, 2) @ x.permute(1, 2, 0)).sum(1),
    "rows in a normalisation": lambda x: torch.nn.functional.layer_norm(x.transpose(0, 1), (1, WIDTH)),
}  # fmt: skip


def _written(x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[1], x.shape[0], WIDTH)
    for row in range(x.shape[0]):
        out[:, row] = x[row]
    return out


def _chosen(x: Tensor) -> Tensor:
    token, slot = torch.where(x.view(-1, WIDTH) > 0)
    return x.permute(2, 0, 1)[slot, :, token]


def _seen_twice(x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[1], x.shape[0], WIDTH)
    view = out.view(-1, x.shape[0], 2, 2)
    out.copy_(x.transpose(0, 1))
    return view


@pytest.mark.parametrize("name", OWN)
def test_a_size_of_one_behind_the_tokens_is_the_models_own(name: str) -> None:
    assert refusal(OWN[name]) == ""


@pytest.mark.parametrize("name", ROWS)
def test_what_may_run_over_rows_stays_refused(name: str) -> None:
    assert re.search("may run over the rows|may be the rows", refusal(ROWS[name]))


@pytest.mark.parametrize("shape", [(TOKENS, 1, WIDTH), (TOKENS, WIDTH), (1, TOKENS, 1, WIDTH)])
def test_inputs_that_are_not_rows_first_prove_nothing(shape: tuple[int, ...]) -> None:
    """Tokens first, or flattened by who knows whom."""
    assert "may run over the rows" in refusal(lambda x: x.reshape(-1, 1, WIDTH).softmax(1), shape)
    assert refusal(lambda x: x.reshape(-1, 1, WIDTH).softmax(-1), shape) == ""


Dims = tuple[tuple[str, ...], ...]
"""The names of a value's dimensions, `B` the rows and `L` the columns; several for merged ones, none for a size of one."""


@dataclasses.dataclass
class Step:
    """One op on a value with named dimensions, for any number of rows."""

    after: Dims
    run: Callable[[Tensor, dict[str, int]], Tensor]
    reduced: tuple[str, ...] | None = None


def _view(dims: Dims) -> Step:
    return Step(dims, lambda y, sizes: y.reshape([math.prod([sizes[name] for name in dim]) for dim in dims]))


def _row_by_row(dims: Dims, at: int, to: int) -> Step:
    rest = [dim for d, dim in enumerate(dims) if d != at]
    return Step((*rest[:to], ("B",), *rest[to:]), lambda y, sizes: torch.stack([y.select(at, b) for b in range(sizes["B"])], to))


def _slice_by_slice(dims: Dims, at: int, to: int) -> Step:
    rest = [dim for d, dim in enumerate(dims) if d != at]
    after: Dims = (*rest[:to], ("B",), *rest[to:])

    def run(y: Tensor, sizes: dict[str, int]) -> Tensor:
        shape = [1 if d == to else math.prod([sizes[name] for name in dim]) for d, dim in enumerate(after)]
        whole = (slice(None),) * at
        return torch.cat([y[(*whole, slice(b, b + 1))].reshape(shape) for b in range(sizes["B"])], to)

    return Step(after, run)


@st.composite
def programs(draw: Any) -> list[Step]:
    dims: Dims = (("B",), ("L",), ("D",))
    steps: list[Step] = []
    for _ in range(draw(st.integers(2, 6))):
        kind = draw(st.sampled_from(["swap", "one", "merge", "split", "rows", "slices", "softmax", "sum"]))
        at = draw(st.integers(0, len(dims) - 1))
        to = draw(st.integers(0, len(dims) - 1))
        step = None
        if kind == "swap":
            order = list(dims)
            order[at], order[to] = order[to], order[at]
            step = Step(tuple(order), lambda y, _, at=at, to=to: y.transpose(at, to))
        elif kind == "one":
            step = _view((*dims[:at], (), *dims[at:])) if draw(st.booleans()) else Step(
                (*dims[:at], (), *dims[at:]), lambda y, _, at=at: y.unsqueeze(at))  # fmt: skip
        elif kind == "merge" and at + 1 < len(dims):
            step = _view((*dims[:at], (*dims[at], *dims[at + 1]), *dims[at + 2 :]))
        elif kind == "split" and len(dims[at]) > 1:
            step = _view((*dims[:at], dims[at][:1], dims[at][1:], *dims[at + 1 :]))
        elif kind == "rows" and dims[at] == ("B",):
            step = _row_by_row(dims, at, to)
        elif kind == "slices" and dims[at] == ("B",):
            step = _slice_by_slice(dims, at, to)
        elif kind == "softmax" and "L" not in dims[at]:
            step = Step(dims, lambda y, _, at=at: y.softmax(at), dims[at])
        elif kind == "sum" and "L" not in dims[at]:
            step = Step((*dims[:at], (), *dims[at + 1 :]), lambda y, _, at=at: y.sum(at, keepdim=True), dims[at])
        if step is not None:
            steps.append(step)
            dims = step.after
            if step.reduced is not None and "B" in step.reduced:
                break
    return steps


def _run(steps: list[Step]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        sizes = {"B": x.shape[0], "L": x.shape[1], "D": WIDTH}
        for step in steps:
            x = step.run(x, sizes)
        return x

    return run


@settings(max_examples=60, deadline=None)
@given(programs())
def test_no_program_reduces_over_rows(steps: list[Step]) -> None:
    """Nor is one refused whose reductions are over channels, or over ones that were put in behind tokens that stayed where they were."""
    reduced = [step.reduced for step in steps if step.reduced is not None]
    found = refusal(_run(steps))
    if any("B" in names for names in reduced):
        assert found, [step.after for step in steps]
    elif all("D" in names for names in reduced):
        assert not found, (found, [step.after for step in steps])
