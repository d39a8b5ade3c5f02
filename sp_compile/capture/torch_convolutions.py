"""Finds causal depthwise convolutions that a model writes with torch's own conv1d, and puts one op in their place.

What: `conv1d(x, w, b, padding=W-1, groups=C)` cut to its first L columns, or `conv1d(pad(x, (W-1, 0)), w, b, groups=C)`.
Why it is sound: either form gives column l the W columns of x that end there, zeros before the first; `dense_causal_conv1d` is the same.
Nothing writes to the memory of a value between the nodes that are replaced.

    before   y = conv1d(x, w, b, (1,), (3,), (1,), 64)
             out = y[..., :L]
    after    y = conv1d(x, w, b, (1,), (3,), (1,), 64)          # dead
             out = dense_causal_conv1d(x, w.squeeze(1), b, activation=None, dtype=torch.float32, library='torch.conv1d')

Leaves alone: strides, dilations, other groups, results that keep more than the first L columns, anything written in place; these run on
rows, or are refused where a mixer follows.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from sp_compile.capture.graphs import placeholders
from sp_compile.capture.torch_spelling import Writes, shape, tensor
from sp_compile.ops.dense_scans import Given, register_library

LIBRARY = "torch.conv1d"
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DEFAULTS: Given = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_PADS = (F.pad, torch._C._nn.pad)
_DENSE = torch.ops.sp_compile.dense_causal_conv1d.default


def _dense(given: Given, final: bool) -> torch.Tensor:
    x, weight = given["x"], given["weight"]
    return F.conv1d(x, weight.unsqueeze(1), given["bias"], padding=weight.shape[1] - 1, groups=x.shape[1])[..., : x.shape[2]]


register_library(LIBRARY, _dense)


def mark_convolutions(module: GraphModule) -> GraphModule:
    """A copy of a captured graph with an op in the place of every causal convolution; the module itself if there is none."""
    if not any(node.target is torch.conv1d for node in module.graph.nodes):
        return module
    graph = Graph()
    output = graph.graph_copy(module.graph, {})
    graph.output(output)
    for old, new in zip(placeholders(module.graph), placeholders(graph), strict=True):
        new.meta = dict(old.meta)
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    writes = Writes(graph)
    changed = [_replace(graph, node, writes) for node in list(graph.nodes) if node.target is torch.conv1d]
    if not any(changed):
        return module
    graph.lint()
    return GraphModule(module, graph, class_name=type(module).__name__)


def _replace(graph: Graph, conv: Node, writes: Writes) -> bool:
    given = _DEFAULTS | dict(zip(_NAMES, conv.args, strict=False)) | dict(conv.kwargs)
    x, weight = given["input"], given["weight"]
    value, kernel = tensor(x), tensor(weight)
    if value is None or kernel is None or value.dim() != 3 or kernel.dim() != 3 or kernel.shape[1] != 1:
        return False
    width = kernel.shape[2]
    plain = all(_one(given[name]) == 1 for name in ("stride", "dilation")) and given["groups"] == kernel.shape[0] == value.shape[1]
    if not plain or not isinstance(width, int) or width < 1:
        return False
    padding = _one(given["padding"])
    if padding == width - 1 and padding > 0:
        shared = len(conv.users) > 1 and bool(writes.writers([conv]))
        read = [x, weight, *([given["bias"]] if isinstance(given["bias"], Node) else [])]
        cuts = [user for user in conv.users if _keeps_first(user, x) and not shared]
        cuts = [cut for cut in cuts if not any(writes.between(node, conv, cut) for node in (conv, *read))]
        for cut in cuts:
            _insert(graph, cut, x, weight, given["bias"])
        return bool(cuts)
    source, turned = _padded(x, width - 1) if padding == 0 else (None, None)
    if source is None:
        return False
    first = turned if turned is not None else x
    if source is not x and any(writes.between(node, first, conv) for node in (x, first, source)):
        return False
    if turned is not None:
        with graph.inserting_before(conv):
            source = graph.call_method("transpose", (source, 1, 2))
    _insert(graph, conv, source, weight, given["bias"])
    return True


def _one(value: Any) -> Any:
    """The single number of `3` or `(3,)`."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _keeps_first(user: Node, x: Node) -> bool:
    """Whether a node takes the first L columns of a convolution's result, L those of `x`."""
    kept, wanted = shape(user), shape(x)
    if user.op == "call_method" and user.target == "narrow" and not user.kwargs:
        return user.args[1:3] in ((2, 0), (-1, 0)) and len(kept) == 3 and _same(kept[2], wanted[2])
    if user.op != "call_function" or user.target is not operator.getitem or not isinstance(user.args[1], tuple):
        return False
    *others, last = user.args[1]
    whole = slice(None, None, None)
    if others not in ([...], [whole, whole]) or not isinstance(last, slice) or last.start not in (None, 0) or last.step not in (None, 1):
        return False
    return len(kept) == 3 and _same(kept[2], wanted[2])


def _padded(node: Any, before: int) -> tuple[Node | None, Node | None]:
    """What was padded by `before` zero columns in front and none behind, and the pad itself if columns and channels were swapped after it.

    (None, None) if the node is something else; the node itself for a width of one.
    """
    if not isinstance(node, Node):
        return None, None
    if before == 0:
        return node, None
    if _swaps(node) and isinstance(node.args[0], Node):
        source = _unpadded(node.args[0], (0, 0, before, 0))
        return (None, None) if source is None else (source, node.args[0])
    return _unpadded(node, (before, 0)), None


def _swaps(node: Node) -> bool:
    """Whether a node is `x.transpose(1, 2)` of [B, L, C], however it is written."""
    if node.op != "call_method" or node.kwargs:
        return False
    if node.target == "transpose":
        return node.args[1:] in ((1, 2), (2, 1), (-1, -2), (-2, -1), (1, -1), (-1, 1))
    return node.target == "permute" and node.args[1:] in ((0, 2, 1), ((0, 2, 1),), ([0, 2, 1],))


def _unpadded(node: Node, wanted: tuple[int, ...]) -> Node | None:
    """What a node pads with zeros by exactly the wanted numbers, or None."""
    if node.target not in _PADS:
        return None
    given: dict[str, Any] = dict(zip(("input", "pad", "mode", "value"), node.args, strict=False)) | dict(node.kwargs)
    fits = tuple(given.get("pad", ())) == wanted and given.get("mode", "constant") == "constant"
    source = given.get("input")
    return source if fits and given.get("value") in (None, 0, 0.0) and isinstance(source, Node) else None


def _same(one: Any, other: Any) -> bool:
    left, right = (size.node.expr if isinstance(size, torch.SymInt) else size for size in (one, other))
    return bool(left == right)


def _insert(graph: Graph, node: Node, x: Node, weight: Node, bias: Node | None) -> None:
    value = tensor(node)
    assert value is not None, "a convolution is a tensor"
    with graph.inserting_before(node):
        flat = graph.call_method("squeeze", (weight, 1))
        made = graph.call_function(_DENSE, (x, flat, bias), {"activation": None, "dtype": value.dtype, "library": LIBRARY})
    for new in (flat, made):
        new.meta["stack_trace"] = node.meta.get("stack_trace")
    made.meta["example_value"] = value
    node.replace_all_uses_with(made)
