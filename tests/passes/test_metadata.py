"""Fake values of a rewritten graph lie where the call's tensors will lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from sp_compile.layout import flash_calls as _flash_calls  # noqa: F401  (registers a tensor of the host)
from sp_compile.ops.multiplicity import token_sum
from sp_compile.passes.metadata import Shapes
from sp_compile.passes.stage import Input, Source


def shapes_of(device: str) -> Shapes:
    """Of a graph with ids [B, L] and a parameter on a device that need not exist."""
    env = ShapeEnv(duck_shape=False)
    sizes = []
    for name, hint in (("b", 4), ("l", 30)):
        source = ConstantSource(name)
        sizes.append(env.create_symintnode(env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC), hint=hint, source=source))
    with FakeTensorMode(shape_env=env):
        fakes = [torch.empty(3, 3), torch.empty(sizes, dtype=torch.int64, device=device)]
    symbols = SimpleNamespace(batch=sizes[0].node.expr, columns=sizes[1].node.expr, packed=False)
    inputs: Any = SimpleNamespace(fakes=fakes, symbols=symbols)
    return Shapes(inputs)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_forest_tensors_are_on_the_device_of_the_tokens(device: str) -> None:
    shapes = shapes_of(device)
    assert shapes.value(Input(Source.FOREST, "count")).device == torch.device(device)
    assert shapes.value(Input(Source.FOREST, "index")).device == torch.device(device)
    assert shapes.value(Input(Source.FOREST, "flash_calls")).device == torch.device("cpu"), "the host reads it"
    assert shapes.value(Input(Source.HIDES, 1)).device == torch.device("cpu")


def test_sums_over_tokens_can_be_traced_on_a_gpu() -> None:
    shapes = shapes_of("cuda:0")
    count = shapes.value(Input(Source.FOREST, "count"))
    with shapes.mode:
        values = torch.empty((shapes.symbol("T"), 5), device="cuda:0")
        assert token_sum(values, count, "B*L _", [0], False, None).shape == (5,)
