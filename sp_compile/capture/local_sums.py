"""`counts = zeros(n); counts.scatter_add_(0, experts, ones)` becomes `counts = zeros(n).scatter_add(0, experts, ones)`.

Memory that a graph makes and sums into at once is nobody else's: written as a new value, the sum may be had on rows and on tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

_FORMS: dict[Any, Any] = {
    "scatter_add_": "scatter_add",
    "index_add_": "index_add",
    torch.Tensor.scatter_add_: torch.scatter_add,
    torch.Tensor.index_add_: torch.index_add,
}
_FRESH = frozenset({torch.zeros, torch.zeros_like, torch.full, "new_zeros", "new_full"})


def functional_sums(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The module with such sums written as new values, where nothing reads the memory in between; the module itself if there are none."""
    found = {node.name for node in module.graph.nodes if node.target in _FORMS and _is_first_use(node)}
    if not found:
        return module
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for old, new in zip(module.graph.nodes, graph.nodes, strict=True):
        new.meta = dict(old.meta)
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
        if old.name in found:
            base = new.args[0]
            new.target = _FORMS[new.target]
            base.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
    graph.lint()
    return torch.fx.GraphModule(module, graph)


def _is_first_use(node: torch.fx.Node) -> bool:
    base = node.args[0] if node.args else None
    if not isinstance(base, torch.fx.Node) or base.op not in ("call_function", "call_method") or base.target not in _FRESH:
        return False
    order = {other: number for number, other in enumerate(node.graph.nodes)}
    return all(user is node or order[user] > order[node] for user in base.users) and list(node.all_input_nodes).count(base) == 1
