"""Activation checkpointing: bodies of `tag_activation_checkpoint` and other transparent wrappers are written into the outer graph.

Nodes of a checkpointed body get the tags that torch's own higher-order op would put on what they trace to, so that AOTAutograd's
partitioner recomputes them in backward; sharing thus sees one flat graph and the memory behaviour stays.

A selective checkpoint decides per ATen op, which such a graph does not have. Its nodes are tagged with its policy, and
`selective.outline` puts them into a body of torch's op again once the rewrite is done.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch._higher_order_ops.wrap import uid
from torch.utils.checkpoint import CheckpointPolicy

from sp_compile.capture.selective import POLICY, Selective

TAGS = ("recompute", "ac_graph_id", POLICY)
_WRAPPERS = ("tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint")


def copy_tags(source: torch.fx.Node, target: torch.fx.Node) -> None:
    """Give a node the checkpoint tags of the node it stands for."""
    for tag in TAGS:
        if tag in source.meta:
            target.meta[tag] = source.meta[tag]


def inline_checkpoints(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph without transparent wrappers; the same module if it has none."""
    if not any(_body(module, node) is not None for node in module.graph.nodes):
        return module
    flat = torch.fx.GraphModule(module, torch.fx.Graph())
    writer = _Writer(flat)
    env: dict[torch.fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "output":
            flat.graph.output(torch.fx.map_arg(node.args[0], lambda n: env[n]))
        else:
            env[node] = writer.write(module, node, lambda n: env[n], {})
            if node.op == "placeholder":
                env[node].meta = dict(node.meta)
                if hasattr(node, "_dynamo_source"):
                    env[node]._dynamo_source = node._dynamo_source
    flat.graph.lint()
    flat.recompile()
    return flat


def _body(module: torch.fx.GraphModule, node: torch.fx.Node) -> torch.fx.GraphModule | None:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator) or str(node.target) not in _WRAPPERS:
        return None
    first = node.args[0] if node.args else None
    if not isinstance(first, torch.fx.Node) or first.op != "get_attr":
        return None
    body = getattr(module, str(first.target), None)
    return body if isinstance(body, torch.fx.GraphModule) else None


class _Writer:
    def __init__(self, flat: torch.fx.GraphModule) -> None:
        self.flat = flat
        self.attributes = 0

    def write(self, owner: torch.fx.GraphModule, node: torch.fx.Node, at: Callable[[torch.fx.Node], Any], tags: dict[str, Any]) -> Any:
        """Copy one node; a wrapper becomes the nodes of its body, and its value a tuple of nodes."""
        body = _body(owner, node)
        if body is not None:
            return self._inline(body, node, at, tags)
        if node.op == "call_function" and node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
            base = at(node.args[0])
            if isinstance(base, tuple):
                return base[int(node.args[1])]  # type: ignore[arg-type]
        if node.op == "get_attr":
            value = getattr(owner, str(node.target), None)
            if isinstance(value, torch.fx.GraphModule) and all(_body(owner, user) is value for user in node.users):
                return None
            if owner is not self.flat:
                name = f"{node.target}_{self.attributes}" if hasattr(self.flat, str(node.target)) else str(node.target)
                self.attributes += 1
                setattr(self.flat, name, value)
                return self.flat.graph.get_attr(name)
        made = self.flat.graph.node_copy(node, at)
        made.meta.update(tags)
        return made

    def _inline(self, body: torch.fx.GraphModule, node: torch.fx.Node, at: Callable[[torch.fx.Node], Any], outer: dict[str, Any]) -> Any:
        if str(node.target) == "wrap":
            tags = outer
        elif "_checkpoint_context_fn" in body.meta:
            tags = {POLICY: Selective(next(uid), body.meta["_checkpoint_context_fn"], dict(node.kwargs))}
        else:
            tags = {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": next(uid)}
        inputs = [torch.fx.map_arg(a, at) for a in node.args[1:]]
        env: dict[torch.fx.Node, Any] = {}
        given = iter(inputs)
        result: Any = None
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                env[inner] = next(given)
            elif inner.op == "output":
                result = torch.fx.map_arg(inner.args[0], lambda n: env[n])
            else:
                env[inner] = self.write(body, inner, lambda n: env[n], tags)
        return tuple(result) if isinstance(result, list | tuple) else result
