"""Finds attention that a model writes out itself, and marks it.

What: `softmax(q @ k^T * scale + mask) @ v`, in the spellings people use, gets an `attention_site` beside it. The analysis then sees one
attention op; the (query, key) matrices that it cannot share become dead code.
Why it is sound: the marker is an identity on the dense result, and it states only what was read off the graph. Every op between the two
products is recognised, nothing else writes to the memory of a value in between, and the mask is rebuilt from the model's own conditions;
whether that mask is causal is for the analysis to prove.

    before   scores = (q @ k.transpose(-2, -1) / 4).masked_fill(hidden, -inf)
             out = softmax(scores, -1) @ v
             y = proj(out)
    after    scores = (q @ k.transpose(-2, -1) / 4).masked_fill(hidden, -inf)
             out = softmax(scores, -1) @ v
             site = attention_site(out.permute(0, 2, 1, 3), q, k, v, logical_not(hidden), ..., scale=0.25, is_causal=False, ...)
             y = proj(site.permute(0, 2, 1, 3))

Leaves alone: anything with an unknown op between the products, with a size that is not [batch, heads, tokens, width],
[batch * heads, tokens, width] or [batch, groups, heads of a group, tokens, width], or whose result another marker already describes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from sp_compile.capture.graphs import blocking_number
from sp_compile.capture.torch_flex import write_out_flex
from sp_compile.capture.torch_products import NotAttention, Operand
from sp_compile.capture.torch_scores import Match, read_attention
from sp_compile.capture.torch_spelling import NUMBER, Writes, shape, spelled, tensor, written
from sp_compile.ops import sites as _sites  # noqa: F401  (registers the ops)

_SITE = torch.ops.sp_compile.attention_site.default
_SWAPS = (("transpose", (1, 2)), ("transpose", (2, 1)), ("permute", (0, 2, 1, 3)), ("permute", ((0, 2, 1, 3),)))


def mark_attention(module: GraphModule, values: Sequence[Any] = (), packed: bool = False) -> GraphModule:
    """A copy of a captured graph with a marker beside every attention found in it; the module itself if there is none.

    Placeholders keep their order, names, meta and source.

    Args:
        module: the captured graph.
        values: its inputs, in which buffers with a number for hidden scores are looked up. The analysis reads them, too, and watches them.
        packed: they are packed, so that the batch is one row.
    """
    module = write_out_flex(module, _needed, packed)
    if not any(spelled(node).name == "softmax" for node in module.graph.nodes):
        return module
    graph = Graph()
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    for old, new in zip(_placeholders(module.graph), _placeholders(graph), strict=True):
        new.meta = dict(old.meta)
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    for node, given in zip(_placeholders(graph), values, strict=False):
        number = blocking_number(node, given)
        if number is not None:
            node.meta[NUMBER] = number
    found = find_attention(graph, packed)
    if not found:
        return module
    replaced: dict[Node, Node] = {}
    for match in found:
        _insert(graph, match, replaced)
    graph.lint()
    return GraphModule(module, graph, class_name=type(module).__name__)


def _placeholders(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def find_attention(graph: Graph, packed: bool = False) -> list[Match]:
    """Every attention of a graph that is needed beside what markers already describe, in order."""
    writes = Writes(graph)
    needed = _needed(graph)
    found = []
    for node in graph.nodes:
        if node in needed:
            try:
                found.append(read_attention(node, writes, packed))
            except NotAttention:
                continue
    return found


def _needed(graph: Graph) -> set[Node]:
    """Nodes whose values are used once markers stand for what they mark."""
    todo = [n for n in graph.nodes if n.op == "output" or any(True for _ in written(n))]
    found: set[Node] = set()
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found.add(node)
        marker = "sp_compile" in str(node.target) and "attention_site" in str(node.target)
        todo += [n for n in node.all_input_nodes if not (marker and n is node.args[0] and n not in node.args[1:])]
    return found


@dataclasses.dataclass
class _Writer:
    """Adds calls after a node, on values as they are after earlier markers were put in."""

    graph: Graph
    match: Match
    replaced: dict[Node, Node]

    def method(self, node: Any, name: str, *args: Any) -> Node:
        made = self.graph.call_method(name, (self.replaced.get(node, node), *args))
        made.meta["stack_trace"] = self.match.out.meta.get("stack_trace")
        return made

    def function(self, function: Any, *args: Any, **kwargs: Any) -> Node:
        made = self.graph.call_function(function, tuple(self.replaced.get(a, a) if isinstance(a, Node) else a for a in args), kwargs)
        made.meta["stack_trace"] = self.match.out.meta.get("stack_trace")
        return made

    def four(self, node: Node, rank: int) -> Node:
        """[B * H, ...] as [B, H, ...]."""
        if rank == 4:
            return node
        return self.method(node, "unsqueeze", 1) if self.match.heads == 1 else self.method(node, "unflatten", 0, (-1, self.match.heads))

    def operand(self, operand: Operand, dtype: torch.dtype) -> Node:
        node = self.replaced.get(operand.node, operand.node)
        for name, args in operand.steps:
            node = self.method(node, name, *args)
        node = self.four(node, len(operand.sizes))
        value = tensor(operand.node)
        return node if value is not None and value.dtype == dtype else self.method(node, "to", dtype)

    def piece(self, node: Node) -> Node:
        """A part of the mask, broadcastable to [B, H, L, L]."""
        sizes, rank = shape(node), self.match.scores.ranks[node]
        if len(sizes) == 5:
            return self.method(node, "squeeze", 2) if sizes[2] == 1 else self.method(node, "flatten", 1, 2)
        if len(sizes) != 3 or rank != 3:
            return node
        return self.method(node, "unsqueeze", 1) if sizes[0] == 1 else self.four(node, 3)

    def mask(self) -> Node | None:
        """All masks in one: boolean, True for visible pairs, if nothing is added to the scores, else additive."""
        scores, visible, total = self.match.scores, None, None
        for node, shows, _ in scores.hidden:
            part = self.piece(node) if shows else self.method(self.piece(node), "logical_not")
            visible = part if visible is None else self.function(torch.logical_and, visible, part)
        for node, factor in scores.added:
            part = self.piece(node)
            part = part if factor == 1.0 else self.function(torch.mul, part, factor)
            total = part if total is None else self.function(torch.add, total, part)
        if visible is None or total is None:
            return visible if total is None else total
        return self.function(torch.add, self.function(torch.where, visible, 0.0, -math.inf), total)


def _insert(graph: Graph, match: Match, replaced: dict[Node, Node]) -> None:
    out, scores = match.out, match.scores
    value, first_user = tensor(out), list(out.users)
    assert value is not None, "attention is a tensor"
    dtype = scores.dtype if scores.dtype.itemsize > value.dtype.itemsize else value.dtype
    with graph.inserting_before(out.next):
        writer = _Writer(graph, match, replaced)
        q, k, v = (writer.operand(x, dtype) for x in (scores.q, scores.k, match.v))
        for name, by in scores.factors:
            q = writer.method(q, name, by)
        mask = writer.mask()
        four = writer.four(out, len(match.order)) if len(match.order) < 5 else out
        wide = four if dtype == value.dtype else writer.method(four, "to", dtype)
        axes = "bqgrd" if len(match.order) == 5 else "bqhd"
        there = [0, 2, 1, 3] if len(match.order) == 3 else [match.order.index(axis) for axis in axes]
        dense = wide if there == sorted(there) else writer.method(wide, "permute", *there)
        if len(axes) == 5:
            dense = writer.method(dense, "flatten", 2, 3)
        site = writer.function(
            _SITE, dense, q, k, v, mask, scores.sinks, None, scale=scores.inner * scores.outer, is_causal=False, window=None,
            softcap=scores.outer if scores.capped else None, dropout=scores.dropout, finite=scores.finite,
        )  # fmt: skip
        result = site if dtype == value.dtype else writer.method(site, "to", value.dtype)
        if len(axes) == 5:
            sizes = dict(zip(match.order, shape(out), strict=True))
            result = writer.method(result, "unflatten", 2, (int(sizes["g"]), int(sizes["r"])))
        if there != sorted(there):
            result = writer.method(result, "permute", *(there.index(axis) for axis in range(len(axes))))
        if len(match.order) == 3:
            result = writer.method(result, "flatten", 0, 1) if match.heads > 1 else writer.method(result, "squeeze", 1)
        if not all(_takes_any_strides(user) for user in first_user):
            result = writer.method(result, "contiguous")
    for user in first_user:
        user.replace_input_with(out, result)
    replaced[out] = result


def _takes_any_strides(user: Node) -> bool:
    if user.op != "call_method":
        return False
    return user.target in ("contiguous", "reshape") or (user.target, user.args[1:]) in _SWAPS
