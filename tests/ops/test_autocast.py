"""Autocast is the caller's: an op computes in the dtypes it is given, forward and backward, wherever it is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sp_compile.lowering import registry
from sp_compile.lowering.registry import Implementation
from tests.determinism.replay import same_bits
from tests.determinism.test_replay import CASES, EVERY, NAMES, tree


@pytest.mark.parametrize(("op", "item"), EVERY, ids=NAMES)
def test_same_bits_under_autocast(op: torch._ops.OpOverload, item: Implementation) -> None:
    forest = tree()
    cases = [case for case in CASES[registry.option_name(op)](forest) if item.supports(case) is None]
    if not cases:
        pytest.skip("needs another device")
    for case in cases:
        args, kwargs = registry.call(item, op, case, {name: forest.tensor(name, "cpu") for name in item.forest_names(case)})
        leaves = [value for value in case.values() if isinstance(value, Tensor) and value.requires_grad]
        plain, under = (_results(item, args, kwargs, leaves, autocast) for autocast in (False, True))
        assert all(same_bits(one, other) for one, other in zip(plain, under, strict=True))


def _results(item: Implementation, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Tensor], autocast: bool) -> list[Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = item.op(*args, **kwargs)
        outputs = [x for x in (out if isinstance(out, tuple | list) else [out]) if x.requires_grad]
        generator = torch.Generator().manual_seed(3)
        grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in outputs]
        return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, leaves, grads)]
