"""Finds causal depthwise convolutions that a model writes with torch's own conv1d, and puts one op in their place.

What: `conv1d(x, w, b, padding=W-1, groups=C)` cut to its first L columns, or `conv1d(pad(x, (W-1, 0)), w, b, groups=C)`. Between the
convolution and the cut may be transpositions and activations, which are put behind it.
Why it is sound: either form gives column l the W columns of x that end there, zeros before the first; `dense_causal_conv1d` is the same.
Nothing writes to the memory of a value between the nodes that are replaced.

    before   y = conv1d(x, w, b, (1,), (3,), (1,), 64)
             out = y[..., :L]
    after    y = conv1d(x, w, b, (1,), (3,), (1,), 64)          # dead
             out = dense_causal_conv1d(x, w.squeeze(1), b, activation=None, dtype=torch.float32, library='torch.conv1d')

Leaves alone: strides, dilations, other groups, results that keep more than the first L columns, anything written in place or computed in
part without gradients or under another autocast; these run on rows, or are refused where a mixer follows.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from sp_compile.capture.graphs import placeholders
from sp_compile.capture.torch_spelling import Writes, shape, spelled, tensor
from sp_compile.ops.dense_scans import Given, register_library

LIBRARY = "torch.conv1d"
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DEFAULTS: Given = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_PADS = (F.pad, torch._C._nn.pad)
_ACTIVATIONS = {
    F.silu: "silu", F.gelu: "gelu", torch._C._nn.gelu: "gelu", F.relu: "relu", torch.relu: "relu", torch.sigmoid: "sigmoid",
    F.sigmoid: "sigmoid", torch.tanh: "tanh", F.tanh: "tanh",
}  # fmt: skip
_LONGEST = 4
"""Ops between a convolution and its cut; more are not looked through."""
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
        read = [x, weight, *([given["bias"]] if isinstance(given["bias"], Node) else [])]
        cuts = [(cut, way) for cut, way in _cuts(conv, x, ()) if _unwritten(writes, read, (conv, *way), cut)]
        for cut, way in cuts:
            _insert(graph, cut, x, weight, given["bias"], way)
        return bool(cuts)
    source, turned = _padded(x, width - 1) if padding == 0 else (None, None)
    if source is None:
        return False
    first = turned if turned is not None else x
    if source is not x and not _one_mode(first, conv):
        return False
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


def _cuts(node: Node, x: Node, way: tuple[Node, ...]) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """Each node that takes the first L columns of a convolution's result, L those of `x`, and the nodes from the convolution to it."""
    columns = 1 if sum(map(_swaps, way)) % 2 else 2
    for user in node.users:
        if _keeps_first(user, columns, shape(x)[2]):
            yield user, way
        elif len(way) < _LONGEST and user.args[:1] == (node,) and (_swaps(user) or _activates(user)):
            yield from _cuts(user, x, (*way, user))


def _unwritten(writes: Writes, read: list[Node], way: tuple[Node, ...], cut: Node) -> bool:
    """Whether nothing is written in place that the cut, or another reader of what is on the way to it, would see."""
    shared = any(len(node.users) > 1 and writes.writers([node]) for node in way)
    return not shared and _one_mode(way[0], cut) and not any(writes.between(node, way[0], cut) for node in (*way, *read))


def _one_mode(first: Node, last: Node) -> bool:
    """Whether neither autograd nor autocast is switched between two nodes, so that one may run in the other's place."""
    node = first
    while node is not last:
        if getattr(node.target, "__name__", "") in ("_set_grad_enabled", "_enter_autocast", "_exit_autocast"):
            return False
        node = node.next
    return True


def _keeps_first(user: Node, dim: int, columns: Any) -> bool:
    """Whether a node takes the first so many columns, which are along a dimension, of a value of three, and all of the others."""
    kept = shape(user)
    if len(kept) != 3 or not _same(kept[dim], columns):
        return False
    if user.target in ("narrow", torch.narrow):
        given = dict(zip(("input", "dim", "start"), user.args, strict=False)) | dict(user.kwargs)
        return bool(given.get("dim") in (dim, dim - 3) and given.get("start") == 0)
    places: Any = user.args[1] if user.target is operator.getitem else ()
    if not isinstance(places, tuple) or not all(place is ... or isinstance(place, slice) for place in places):
        return False
    if ... in places:
        at = places.index(...)
        places = (*places[:at], *[slice(None)] * (4 - len(places)), *places[at + 1 :])
    if len(places) <= dim or any(place != slice(None) for d, place in enumerate(places) if d != dim):
        return False
    return bool(places[dim].start in (None, 0) and places[dim].step in (None, 1))


def _activates(node: Node) -> bool:
    """Whether a node does the same to every element by itself, whatever the value's shape."""
    name = node.target if isinstance(node.target, str) else _ACTIVATIONS.get(node.target, "")
    alone = len(node.args) == 1 and not node.kwargs.get("inplace")
    return alone and node.op in ("call_function", "call_method") and name in _ACTIVATIONS.values()


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
    if node.target is getattr:
        return node.args[1:] == ("mT",) and len(shape(node)) == 3
    call = spelled(node)
    if call.name not in ("transpose", "permute") or node.kwargs:
        return False
    if call.name == "transpose":
        return node.args[1:] in ((1, 2), (2, 1), (-1, -2), (-2, -1), (1, -1), (-1, 1))
    return node.args[1:] in ((0, 2, 1), ((0, 2, 1),), ([0, 2, 1],))


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


def _insert(graph: Graph, node: Node, x: Node, weight: Node, bias: Node | None, way: tuple[Node, ...] = ()) -> None:
    """Puts a causal convolution, and behind it the ops of `way`, in the place of a node."""
    value = tensor(node)
    assert value is not None, "a convolution is a tensor"
    turned = sum(map(_swaps, way)) % 2
    with graph.inserting_before(node):
        flat = graph.call_method("squeeze", (weight, 1))
        made = graph.call_function(_DENSE, (x, flat, bias), {"activation": None, "dtype": value.dtype, "library": LIBRARY})
        result = made
        made.meta["example_value"] = value = value.transpose(1, 2) if turned else value
        for step in way:
            result = graph.create_node(step.op, step.target, (result, *step.args[1:]), step.kwargs)
            result.meta["example_value"] = value = value.transpose(1, 2) if _swaps(step) else value
            result.meta["stack_trace"] = step.meta.get("stack_trace")
    for new in (flat, made):
        new.meta["stack_trace"] = node.meta.get("stack_trace")
    node.replace_all_uses_with(result)
