"""One name for the many spellings of an op in a captured torch-level graph, and what in-place ops do to the names of values.

`x @ y`, `torch.matmul(x, y)`, `x.matmul(y)` and `torch.bmm(x, y)` are all `Spelled("matmul", {"input": x, "other": y})`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterator
from typing import Any, TypeAlias

import sympy
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

Shape: TypeAlias = "tuple[sympy.Expr, ...]"

NUMBER = "sp_compile_number"
"""Key, in the meta of an input, of the number that it holds."""

_PARAMETERS = {
    "matmul": "input other", "bmm": "input other", "baddbmm": "input batch1 batch2", "softmax": "input dim dtype", "tanh": "input",
    "add": "input other", "sub": "input other", "subtract": "input other", "mul": "input other", "multiply": "input other",
    "div": "input other", "divide": "input other", "true_divide": "input other", "masked_fill": "input mask value",
    "where": "condition input other", "dropout": "input p training inplace", "to": "input dtype", "type": "input dtype",
    "type_as": "input other", "view": "input", "reshape": "input", "flatten": "input", "unflatten": "input", "expand": "input",
    "unsqueeze": "input", "contiguous": "input", "clone": "input", "detach": "input", "nan_to_num": "input nan",
    "amax": "input dim keepdim", "max": "input dim keepdim",
    "cat": "tensors dim", "concat": "tensors dim", "concatenate": "tensors dim", "getitem": "input index",
    "float": "input", "half": "input", "double": "input", "bfloat16": "input", "tensor": "value", "full": "size value",
    "full_like": "input value", "new_full": "input size value", "new_tensor": "input value", "scalar_tensor": "value",
    "transpose": "input", "permute": "input", "swapaxes": "input", "swapdims": "input", "getattr": "input name",
}  # fmt: skip
_SAME = {
    "bmm": "matmul", "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "concat": "cat", "concatenate": "cat",
    "float": "cast", "half": "cast", "double": "cast", "bfloat16": "cast", "to": "cast", "type": "cast", "type_as": "cast",
    "view": "regroup", "reshape": "regroup", "flatten": "regroup", "unflatten": "regroup", "contiguous": "same", "clone": "same",
    "swapaxes": "transpose", "swapdims": "transpose",
}  # fmt: skip
_OPERATORS = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "matmul": "matmul", "getitem": "getitem"}
_KEYWORDS = {"self": "input", "mat2": "other", "fill_value": "value", "axis": "dim", "exponent": "other", "tensor": "input"}

_NAMES: dict[Any, tuple[str, str]] = {}
for _name, _text in _PARAMETERS.items():
    if hasattr(torch, _name) and callable(getattr(torch, _name)) and _name not in ("float", "half", "double", "bfloat16"):
        _NAMES[getattr(torch, _name)] = (_name, _text)
for _name, _same in _OPERATORS.items():
    for _function in (getattr(operator, _name), getattr(operator, f"i{_name}", None)):
        if _function is not None:
            _NAMES[_function] = (_same, _PARAMETERS[_same])
_NAMES[F.softmax] = ("softmax", "input dim _stacklevel dtype")
_NAMES[F.dropout] = ("dropout", _PARAMETERS["dropout"])
_NAMES[torch.einsum] = ("einsum", "equation")
_NAMES[F.tanh] = ("tanh", "input")
_NAMES[getattr] = ("getattr", _PARAMETERS["getattr"])

_IN_PLACE = {getattr(operator, f"i{n}") for n in ("add", "sub", "mul", "truediv", "matmul", "and", "or", "xor", "floordiv", "mod", "pow")}
_IN_PLACE |= {operator.iand, operator.ior, operator.setitem}


@dataclasses.dataclass(frozen=True)
class Spelled:
    """An op under its one name, with its arguments by name."""

    name: str
    given: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name)


UNKNOWN = Spelled("", {})


def spelled(node: Any) -> Spelled:
    """The op of a node, or `UNKNOWN`. Arguments beyond the ones a matcher reads are kept under their own keywords, or as `rest`."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return UNKNOWN
    args = node.args
    if node.op == "call_method":
        name = str(node.target).removesuffix("_")
        text = _PARAMETERS.get(name, "")
        if not text or name in ("tensor", "full", "cat", "getattr", "getitem"):
            return UNKNOWN
        if name == "where":
            text = "input condition other"
    elif node.target in _NAMES:
        name, text = _NAMES[node.target]
    else:
        return UNKNOWN
    names = text.split()
    given = dict(zip(names, args, strict=False))
    given.update({_KEYWORDS.get(k, k): v for k, v in node.kwargs.items()})
    if len(args) > len(names):
        given["rest"] = args[len(names) :]
    return Spelled(_SAME.get(name, name), given)


def example(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, Node) else None


def tensor(node: Any) -> torch.Tensor | None:
    value = example(node)
    return value if isinstance(value, torch.Tensor) else None


def shape(node: Any) -> Shape:
    """Sizes as expressions: comparing them adds no guard, unlike comparing symbolic integers. Empty if the node is no tensor."""
    value = tensor(node)
    if value is None:
        return ()
    return tuple(s.node.expr if isinstance(s, torch.SymInt) else sympy.Integer(s) for s in value.shape)


def constant(value: Any) -> float | None:
    """The number that a literal, or a tensor filled with one literal, holds."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, Node) and NUMBER in value.meta:
        return float(value.meta[NUMBER])
    call = spelled(value)
    if call.name in ("tensor", "full", "full_like", "new_full", "new_tensor", "scalar_tensor"):
        return constant(call["value"]) if not isinstance(call["value"], Node) else None
    if call.name in ("cast", "same", "detach"):
        return constant(call["input"]) if isinstance(call["input"], Node) else None
    return None


def _storages(value: Any) -> set[int]:
    found: set[int] = set()
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            with contextlib.suppress(NotImplementedError):  # values inside of vmap have none
                found.add(leaf.untyped_storage()._cdata)
    return found


def storages(node: Node) -> set[int]:
    return _storages(example(node))


class Writes:
    """Where a graph writes in place, and which node holds the value of a tensor at a given place."""

    def __init__(self, graph: Graph) -> None:
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.writes: list[tuple[Node, set[int]]] = []
        self.root: dict[Node, Node] = {}
        self.versions: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            for target in written(node):
                self.writes.append((node, storages(target)))
                same = example(node) is not None and shape(node) == shape(target) and storages(node) == storages(target)
                if same and target is node.args[0]:
                    root = self.root.get(target, target)
                    self.root[node] = root
                    self.versions.setdefault(root, []).append(node)

    def latest(self, node: Any, user: Node) -> Any:
        """The node that last wrote the tensor that `user` reads as `node`: `x.mul_(2); f(x)` reads the result of `mul_`."""
        if not isinstance(node, Node):
            return node
        root = self.root.get(node, node)
        before = [n for n in self.versions.get(root, ()) if self.place[n] < self.place[user]]
        return before[-1] if before else root

    def between(self, node: Node, after: Node, before: Node) -> bool:
        """Whether anything writes to the memory of `node` later than `after` and earlier than `before`."""
        memory = storages(node)
        return any(memory & where and self.place[after] < self.place[n] < self.place[before] for n, where in self.writes)

    def writers(self, nodes: list[Node]) -> set[Node]:
        """Every node that writes to the memory of any of `nodes`."""
        memory: set[int] = set().union(*(storages(n) for n in nodes))
        return {n for n, where in self.writes if memory & where}


def written(node: Node) -> Iterator[Node]:
    """The operands that a node changes."""
    if node.op not in ("call_function", "call_method"):
        return
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    first = node.args[0] if node.args else node.kwargs.get("input")
    in_place = node.target in _IN_PLACE if node.op == "call_function" else str(name) == "__setitem__" or str(name).startswith("__i")
    in_place = in_place or (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("inplace") is True
    in_place = in_place or spelled(node)["inplace"] is True
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        yield from node.all_input_nodes
        return
    if in_place and isinstance(first, Node):
        yield first
    out = node.kwargs.get("out")
    yield from (n for n in (out if isinstance(out, list | tuple) else [out]) if isinstance(n, Node))
