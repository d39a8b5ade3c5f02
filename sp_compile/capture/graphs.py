"""Reading a captured graph's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor

from sp_compile.ops.blocking import is_blocking


def placeholders(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def example_of(node: torch.fx.Node) -> Any:
    """The fake value Dynamo gave an input."""
    return node.meta.get("example_value", node.meta.get("val"))


def is_symbolic(size: object) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.expr.is_Integer


def size_name(size: int | torch.SymInt) -> int | str:
    """A static size as a number, a symbolic one as the text of its expression."""
    return str(size.node.expr) if isinstance(size, torch.SymInt) and is_symbolic(size) else int(size)


def static_token_inputs(graph: torch.fx.Graph) -> list[int]:
    """Inputs that may hold tokens: tensors of two or more dimensions that are neither parameters nor buffers."""
    found = []
    for number, node in enumerate(placeholders(graph)):
        value = example_of(node)
        if isinstance(value, torch.Tensor) and value.dim() >= 1 and not value.requires_grad and not is_module_state(node):
            found.append(number)
    return found


def blocking_number(node: torch.fx.Node, value: object) -> float | None:
    """What a buffer of one number holds, if as an attention score it hides a key: such as the `masked_bias` of GPT-2's first versions."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.requires_grad or not value.is_floating_point():
        return None
    if not is_module_state(node) or isinstance(value, FakeTensor):
        return None
    number = float(value.detach())
    return number if is_blocking(number) else None


def is_module_state(node: torch.fx.Node) -> bool:
    """Whether an input is a parameter or buffer of a module."""
    base = getattr(node, "_dynamo_source", None)
    while base is not None:
        if type(base).__name__ in (
            "UnspecializedParamBufferSource",
            "NNModuleSource",
            "UnspecializedNNModuleSource",
            "UnspecializedBuiltinNNModuleSource",
        ):
            return True
        base = getattr(base, "base", None)
    return False


def token_dims(sizes: Sequence[int], tokens: int) -> list[int]:
    """The dimensions of an input that run over T tokens: the first of that size, or the last two of a (query, key) matrix."""
    found = [dim for dim, size in enumerate(sizes) if size == tokens]
    rank = len(sizes)
    return [rank - 2, rank - 1] if rank >= 3 and found[-2:] == [rank - 2, rank - 1] and set(sizes[:-2]) <= {1} else found[:1]
