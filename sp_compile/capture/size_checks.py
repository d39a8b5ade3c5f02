"""Dynamo's own checks of sizes that depend on data, `_assert_scalar(sym_size(places, 0) >= 0)`, left out.

They say what holds of every result of the op, and would have it computed on rows as well as on physical tokens. A check that a count has
as many elements as there are experts stays where it counts: the op on physical tokens makes a result of that size or raises.
"""

from __future__ import annotations

import operator

import torch
import torch.fx

_SIZES = frozenset({torch.ops.aten.sym_size.int, torch.sym_constrain_range_for_size})
_NUMBERS = frozenset({operator.ge, operator.le, operator.eq, operator.gt, operator.lt})


def without_size_checks(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The module without such checks; the module itself if there are none."""
    found = {node.name for node in module.graph.nodes if node.target is torch.ops.aten._assert_scalar.default and _is_of_size(node.args[0])}
    if not found:
        return module
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for old, new in zip(module.graph.nodes, graph.nodes, strict=True):
        new.meta = dict(old.meta)
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    for node in reversed(list(graph.nodes)):
        spare = node.target in _NUMBERS or node.target in _SIZES
        if node.name in found or (spare and not node.users):
            graph.erase_node(node)
    graph.lint()
    return torch.fx.GraphModule(module, graph)


def _is_of_size(condition: object) -> bool:
    """Whether a condition compares the size of a tensor with a number."""
    if not isinstance(condition, torch.fx.Node) or condition.target not in _NUMBERS:
        return False
    sizes = condition.all_input_nodes
    numbers = all(isinstance(a, int) for a in condition.args if not isinstance(a, torch.fx.Node))
    return len(sizes) == 1 and sizes[0].target in _SIZES and numbers
