"""Bodies of selective checkpoints, put together again from a flat graph."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import pytest
import torch
import torch.fx
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import sp_compile.ops.attention  # noqa: F401  (registers the op)
from sp_compile.capture.selective import POLICY, Selective, outline


def contexts() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


def split(x: torch.Tensor) -> torch.Tensor:
    low, high = torch.chunk(x, 2, dim=-1)
    return low.sin() + (high.exp() @ low.t().cos()).sum(-1, keepdim=True)


def traced(marks: str) -> torch.fx.GraphModule:
    """`split` with its ops in order given to checkpoint a or b, or to none (-)."""
    module = torch.fx.symbolic_trace(split)
    made = {name: Selective(number, contexts, {"use_reentrant": False}) for number, name in enumerate("ab")}
    ops = [node for node in module.graph.nodes if node.op.startswith("call_") and node.target is not operator.getitem]
    for node, mark in zip(ops, marks, strict=True):
        if mark in made:
            node.meta[POLICY] = made[mark]
    return module


def calls(module: torch.fx.GraphModule) -> int:
    return sum(str(node.target) == "tag_activation_checkpoint" for node in module.graph.nodes)


def check(marks: str) -> torch.fx.GraphModule:
    module = traced(marks)
    outlined = outline(module)
    values = []
    for run in (split, outlined):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        result = run(x)
        result.square().sum().backward()
        values.append((result, x.grad))
    torch.testing.assert_close(values[1], values[0])
    return outlined


OPS = 8


@pytest.mark.parametrize("marks", ["".join(marks) for marks in itertools.islice(itertools.product("-ab", repeat=OPS), 0, None, 311)])
def test_any_partition_computes_the_same(marks: str) -> None:
    check(marks)


def test_one_checkpoint_is_one_body() -> None:
    assert calls(check("a" * OPS)) == 1


def test_an_op_between_two_halves_makes_two_bodies() -> None:
    outlined = check("aaa-aaaa")
    assert calls(outlined) == 2


def test_nothing_to_outline_is_the_same_module() -> None:
    module = traced("-" * OPS)
    assert outline(module) is module


def test_the_policy_is_asked_for_torch_attention_too() -> None:
    """A list that names torch's attention saves this package's; one that does not, does not."""
    attention = torch.ops.sp_compile.attention.default
    for named, expected in ((torch.ops.aten._scaled_dot_product_flash_attention.default, CheckpointPolicy.MUST_SAVE),
                            (torch.ops.aten.mm.default, CheckpointPolicy.PREFER_RECOMPUTE)):  # fmt: skip
        made = Selective(0, lambda named=named: create_selective_checkpoint_contexts([named]), {}).contexts()()
        assert made[0].policy_fn(None, attention) == expected
