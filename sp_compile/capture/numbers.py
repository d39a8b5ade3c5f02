"""Python floats that Dynamo turned into inputs (`dynamic=True`): `eps` and scales become `f64[]` inputs read by `.item()`.

They never change in practice, and no kernel takes a symbolic epsilon. The copy that is analysed gets their present values as constants;
the caller checks on every call that they still hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from sp_compile.capture.graphs import example_of, placeholders


def freeze_numbers(module: torch.fx.GraphModule, values: Sequence[Any]) -> tuple[torch.fx.GraphModule, dict[int, float]]:
    """The graph with float inputs written in, and the values by input number; the same module if there are none."""
    found: dict[int, float] = {}
    for number, node in enumerate(placeholders(module.graph)):
        example = example_of(node)
        scalar = isinstance(example, torch.Tensor) and example.dim() == 0 and example.dtype == torch.float64
        if scalar and node.users and all(user.op == "call_method" and user.target == "item" for user in node.users):
            found[number] = float(values[number])
    if not found:
        return module, {}
    graph = torch.fx.Graph()
    env: dict[torch.fx.Node, Any] = {}
    numbers = {node: i for i, node in enumerate(placeholders(module.graph))}
    for node in module.graph.nodes:
        source = node.args[0] if node.op == "call_method" and node.target == "item" else None
        if isinstance(source, torch.fx.Node) and numbers.get(source) in found:
            env[node] = found[numbers[source]]
        elif node.op == "output":
            graph.output(torch.fx.map_arg(node.args[0], lambda n: env[n]))
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
            if hasattr(node, "_dynamo_source"):
                env[node]._dynamo_source = node._dynamo_source
    graph.lint()
    return torch.fx.GraphModule(module, graph), found


def unchanged(numbers: dict[int, float], values: Sequence[Any]) -> bool:
    return all(float(values[number]) == value for number, value in numbers.items())
