"""Convolutions that work on each token by itself, held against values; others are no packed op, and the refusal says what to write."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.fx

from sp_compile.analysis.layouts import Kind
from tests.analysis.programs import Program, analysed, claimed_wrong, pairs, shared_wrong
from tests.analysis.test_rules import _hidden

Build = Callable[[Program], torch.fx.Node]


def _numbers(p: Program, *shape: int) -> torch.fx.Node:
    made = p.call(torch.arange, math.prod(shape), dtype=torch.float64)
    return p.call("view", p.call("cos", made), *shape)


def _channels_first(p: Program) -> torch.fx.Node:
    return p.call("transpose", _hidden(p), 1, 2)


def single(p: Program) -> torch.fx.Node:
    made = p.call(torch.conv1d, _channels_first(p), _numbers(p, 6, 4, 1), _numbers(p, 6))
    return p.call("transpose", made, 1, 2)


def single_in_groups(p: Program) -> torch.fx.Node:
    return p.call("transpose", p.call(torch.conv1d, _channels_first(p), _numbers(p, 4, 2, 1), groups=2), 1, 2)


def single_over_a_plane(p: Program) -> torch.fx.Node:
    made = p.call(torch.conv2d, p.call("unsqueeze", _channels_first(p), 2), _numbers(p, 3, 4, 1, 1))
    return p.call("transpose", p.call("squeeze", made, 2), 1, 2)


def within_tokens(p: Program) -> torch.fx.Node:
    parts = p.call("view", _hidden(p), -1, 1, 4)
    return p.call("view", p.call(torch.conv1d, parts, _numbers(p, 1, 1, 3), None, 1, 1), p.b, p.l, 4)


def two_columns(p: Program) -> torch.fx.Node:
    made = p.call(torch.conv1d, _channels_first(p), _numbers(p, 4, 4, 3), None, 1, 1)
    return p.call("transpose", made, 1, 2)


def single_with_zeros_around(p: Program) -> torch.fx.Node:
    return p.call("transpose", p.call(torch.conv1d, _channels_first(p), _numbers(p, 4, 4, 1), None, 1, 1), 1, 2)


def single_in_steps(p: Program) -> torch.fx.Node:
    return p.call("transpose", p.call(torch.conv1d, _channels_first(p), _numbers(p, 4, 4, 1), None, 2), 1, 2)


def single_transposed(p: Program) -> torch.fx.Node:
    return p.call("transpose", p.call(torch.conv_transpose1d, _channels_first(p), _numbers(p, 4, 4, 1)), 1, 2)


TOKENWISE: list[Build] = [single, single_in_groups, single_over_a_plane, within_tokens]
OTHERS: list[Build] = [two_columns, single_with_zeros_around, single_in_steps, single_transposed]


@pytest.mark.parametrize("build", [*TOKENWISE, *OTHERS])
def test_a_convolution_is_right(build: Build) -> None:
    p = Program()
    result = build(p)
    module = p.finish(result, p.call(torch.tanh, _hidden(p)))
    tried = pairs(2)
    assert not claimed_wrong(p, module, tried)
    assert not shared_wrong(p, module, [tried[0][0], tried[1][1]]).problems


@pytest.mark.parametrize("build", TOKENWISE)
def test_a_convolution_of_single_tokens_is_packed(build: Build) -> None:
    p = Program()
    result = build(p)
    found = analysed(p.finish(result), p.inputs(p.sample))
    layout = found.layout(result)
    assert layout is not None
    assert layout.reach.kind is Kind.TOKENS
    assert layout.reach.shared
    assert all(info.failure is None for info in found.nodes.values())


@pytest.mark.parametrize("build", OTHERS)
def test_must_not_pack_what_reads_other_tokens(build: Build) -> None:
    p = Program()
    result = build(p)
    found = analysed(p.finish(result), p.inputs(p.sample))
    why = next(info.failure for info in found.nodes.values() if info.failure is not None)
    assert "reads other ones" in why.text
    assert "[..., :L]" in why.advice
