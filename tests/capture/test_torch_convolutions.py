"""Causal depthwise convolutions written with torch's conv1d are found in every common spelling, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sp_compile.capture.graphs import placeholders
from sp_compile.capture.torch_convolutions import mark_convolutions
from tests.capture.recording import captured

Form = Callable[[nn.Conv1d, Tensor], Tensor]
CAUSAL: dict[str, tuple[int, Form]] = {
    "cut with an ellipsis": (3, lambda conv, x: conv(x)[..., : x.shape[-1]]),
    "cut with slices": (3, lambda conv, x: conv(x)[:, :, : x.shape[2]]),
    "chomped": (3, lambda conv, x: conv(x)[:, :, :-3].contiguous()),
    "padded before": (0, lambda conv, x: conv(F.pad(x, (3, 0)))),
    "narrowed": (3, lambda conv, x: conv(x).narrow(2, 0, x.shape[2])),
    "padded before it is turned": (0, lambda conv, x: conv(F.pad(x.transpose(1, 2), (0, 0, 3, 0)).transpose(1, 2))),
    "cut after it is turned": (3, lambda conv, x: conv(x).mT[:, : x.shape[2]]),
    "chomped after it is turned": (3, lambda conv, x: conv(x).transpose(1, 2)[:, :-3]),
    "cut in the middle after it is turned": (3, lambda conv, x: conv(x).permute(0, 2, 1)[..., : x.shape[2], :]),
    "turned twice": (3, lambda conv, x: torch.transpose(conv(x).mT, 1, 2)[..., : x.shape[2]]),
    "an activation before the cut": (3, lambda conv, x: F.silu(conv(x))[..., : x.shape[2]]),
    "an activation, then turned": (3, lambda conv, x: F.gelu(conv(x), approximate="tanh").sigmoid().mT[:, : x.shape[2]]),
    "turned, then an activation": (3, lambda conv, x: torch.relu(conv(x).mT)[:, :-3, :]),
    "narrowed by a function": (3, lambda conv, x: torch.narrow(conv(x), dim=-1, start=0, length=x.shape[2])),
    "narrowed after it is turned": (3, lambda conv, x: conv(x).mT.narrow(1, 0, x.shape[2])),
    "padded before it is turned by mT": (0, lambda conv, x: conv(F.pad(x.mT, (0, 0, 3, 0)).mT)),
    "written as a function": (0, lambda conv, x: F.conv1d(F.pad(x, [3, 0]), conv.weight, conv.bias, groups=6)),
}
IN_PLACE: dict[str, tuple[int, Form]] = {
    "an activation before the cut": (3, lambda conv, x: F.silu(conv(x), inplace=True)[..., : x.shape[-1]]),
    "an activation between others": (3, lambda conv, x: _after(F.silu(conv(x)), torch.relu_)[..., : x.shape[-1]]),
    "an activation by position": (3, lambda conv, x: F.relu(conv(x), True)[..., : x.shape[-1]]),
    "the turned result before the cut": (3, lambda conv, x: _after(conv(x).mT, lambda y: y.mul_(2))[:, : x.shape[-1]]),
    "an activation that is cut twice": (3, lambda conv, x: _cut_twice(F.silu(conv(x)), x.shape[-1])),
    "the turned result, which is cut twice": (3, lambda conv, x: _cut_twice(conv(x).mT.mT, x.shape[-1])),
    "the result before the cut": (3, lambda conv, x: _after(conv(x), lambda y: y.mul_(2))[..., : x.shape[-1]]),
    "another cut of the result": (3, lambda conv, x: _cut_twice(conv(x), x.shape[-1])),
    "the padded input": (0, lambda conv, x: conv(_after(F.pad(x, (3, 0)), lambda p: p.mul_(2)))),
    "the zeros in front": (0, lambda conv, x: conv(_after(F.pad(x, (3, 0)), lambda p: p[..., :3].fill_(7)))),
    "the input after it was padded": (0, lambda conv, x: _pad_then_write(conv, x + 1)),
    "the input before the cut": (3, lambda conv, x: _write_then_cut(conv, x + 1)),
}


def _after(value: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    write(value)
    return value


def _cut_twice(y: Tensor, length: int) -> Tensor:
    first = y[..., :length]
    first.add_(1)
    return first + y[..., :length]


def _pad_then_write(conv: nn.Conv1d, x: Tensor) -> Tensor:
    padded = F.pad(x, (3, 0))
    x.mul_(2)
    return conv(padded) + x


def _write_then_cut(conv: nn.Conv1d, x: Tensor) -> Tensor:
    y = conv(x)
    x.mul_(2)
    return y[..., : x.shape[-1]] + x


OTHER: dict[str, tuple[int, Form]] = {
    "looks ahead": (3, lambda conv, x: conv(x)[..., 3:]),
    "keeps its tail": (3, lambda conv, x: conv(x)[..., : x.shape[-1] + 1]),
    "centred": (2, lambda conv, x: conv(x)[..., : x.shape[-1]]),
    "padded behind": (0, lambda conv, x: conv(F.pad(x, (0, 3)))),
    "padded with ones": (0, lambda conv, x: conv(F.pad(x, (3, 0), value=1.0))),
    "strided": (3, lambda conv, x: F.conv1d(x, conv.weight, conv.bias, 2, 3, 1, 6)[..., : x.shape[-1]]),
    "dilated": (3, lambda conv, x: F.conv1d(x, conv.weight, conv.bias, 1, 3, 2, 6)[..., : x.shape[-1]]),
    "channels are cut": (3, lambda conv, x: conv(x)[:, :4]),
    "columns of another value": (3, lambda conv, x: conv(x)[..., : x.shape[-1] - 1]),
    "a cut of what stands in the columns' place": (3, lambda conv, x: conv(x).mT[..., : x.shape[1]]),
    "the last columns after it is turned": (3, lambda conv, x: conv(x).mT[:, 3:]),
    "a norm before the cut": (3, lambda conv, x: conv(x).softmax(-1)[..., : x.shape[-1]]),
    "every second column": (3, lambda conv, x: conv(x)[..., : x.shape[-1] : 2]),
}


def _without_gradient(function: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return function()


def _cast(function: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return function()


MODES: dict[str, tuple[int, Form]] = {
    "without its gradient": (3, lambda conv, x: _without_gradient(lambda: conv(x))[..., : x.shape[-1]]),
    "without the gradient of an activation": (3, lambda conv, x: _without_gradient(lambda: F.silu(conv(x)))[..., : x.shape[-1]]),
    "of values padded without gradient": (0, lambda conv, x: conv(_without_gradient(lambda: F.pad(x, (3, 0))))),
    "cast": (3, lambda conv, x: _cast(lambda: conv(x))[..., : x.shape[-1]]),
}


def _ops(graph: torch.fx.GraphModule) -> int:
    return sum(node.target is torch.ops.sp_compile.dense_causal_conv1d.default for node in graph.graph.nodes)


def _run(padding: int, form: Form, bias: bool = True) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule, list[Tensor], Tensor]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    conv = nn.Conv1d(6, 6, 4, groups=6, padding=padding, bias=bias, dtype=torch.float64)
    x = torch.randn(2, 6, 9, dtype=torch.float64)
    graph, want = captured(lambda x: form(conv, x), x)
    return graph, mark_convolutions(graph), [x, conv.weight, *([conv.bias] if bias else [])], want


@pytest.mark.parametrize(("name", "bias"), [(name, bias) for name in CAUSAL for bias in (True, False)])
def test_a_causal_convolution_is_one_op(name: str, bias: bool) -> None:
    padding, form = CAUSAL[name]
    graph, marked, tensors, want = _run(padding, form, bias)
    assert _ops(marked) == 1
    assert _ops(graph) == 0, "the captured graph itself is left alone"
    by_shape = {tuple(t.shape): t.detach() for t in tensors}
    given = []
    for node in placeholders(marked.graph):
        fake = node.meta["example_value"]
        given.append(by_shape[tuple(int(s) for s in fake.shape)] if isinstance(fake, Tensor) else int(fake))
    (found,) = marked(*given)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OTHER)
def test_must_not_mark_anything_else(name: str) -> None:
    padding, form = OTHER[name]
    graph, marked, _, _ = _run(padding, form)
    assert marked is graph


@pytest.mark.parametrize("name", MODES)
def test_must_not_move_a_convolution_to_another_mode(name: str) -> None:
    padding, form = MODES[name]
    graph, marked, _, _ = _run(padding, form)
    assert marked is graph


@pytest.mark.parametrize("name", IN_PLACE)
def test_must_not_mark_what_is_written_to(name: str) -> None:
    padding, form = IN_PLACE[name]
    with torch.no_grad():
        graph, marked, _, _ = _run(padding, form)
    assert marked is graph


def test_writes_behind_the_cut_do_no_harm() -> None:
    _, marked, _, _ = _run(3, lambda conv, x: conv(x)[..., : x.shape[-1]].mul_(2))
    assert _ops(marked) == 1


def test_must_not_mark_a_convolution_over_channels() -> None:
    torch._dynamo.reset()
    conv = nn.Conv1d(6, 6, 4, padding=3)
    graph, _ = captured(lambda x: conv(x)[..., : x.shape[-1]], torch.randn(2, 6, 9))
    assert mark_convolutions(graph) is graph
