"""The dense graph as the model wrote it, which runs where nothing is shared."""

from __future__ import annotations

import torch
import torch.fx

from sp_compile.capture.graphs import placeholders


def without_sites(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The dense graph as the model wrote it: every site marker replaced by the value it marks."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for old, new in zip(placeholders(module.graph), placeholders(graph), strict=True):
        new.meta = dict(old.meta)
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    for node in list(graph.nodes):
        node.meta.pop("unbacked_bindings", None)  # of Dynamo's own symbols
        if node.op == "call_function" and "_site" in str(node.target) and str(node.target).startswith("sp_compile"):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.lint()
    return torch.fx.GraphModule(module, graph, class_name="DenseGraph")
