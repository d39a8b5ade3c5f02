"""Reading a captured graph's inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


_HELD = "sp_held_batch"
_MODULES = ("NNModuleSource", "UnspecializedNNModuleSource", "UnspecializedBuiltinNNModuleSource")


def is_module_state(node: torch.fx.Node) -> bool:
    """Whether an input is a parameter or buffer of a module, or another tensor that a module holds, unless it is the batch."""
    if node.meta.get(_HELD):
        return False
    return any(name in (*_MODULES, "UnspecializedParamBufferSource") for name in _sources(node))


def _sources(node: torch.fx.Node) -> Iterator[str]:
    base = getattr(node, "_dynamo_source", None)
    while base is not None:
        yield type(base).__name__
        base = getattr(base, "base", None)


def find_held_batch(graph: torch.fx.Graph) -> None:
    """Marks the token inputs of a module that keeps its batch as attributes, if no argument can be one."""

    def may_be_tokens(node: torch.fx.Node) -> bool:
        value = example_of(node)
        return isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point() and not value.is_complex()

    found = [node for node in placeholders(graph) if may_be_tokens(node)]
    if all(map(is_module_state, found)):
        for node in found:
            node.meta[_HELD] = "UnspecializedParamBufferSource" not in _sources(node)


def token_dims(sizes: Sequence[int], tokens: int) -> list[int]:
    """The dimensions of an input that run over T tokens: the first of that size, or the last two of a (query, key) matrix."""
    found = [dim for dim, size in enumerate(sizes) if size == tokens]
    rank = len(sizes)
    return [rank - 2, rank - 1] if rank >= 3 and found[-2:] == [rank - 2, rank - 1] and set(sizes[:-2]) <= {1} else found[:1]
