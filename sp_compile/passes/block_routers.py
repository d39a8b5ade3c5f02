"""The logits of a router are computed in blocks of a fixed number of tokens, so that they have the same bits in every batch.

What: a product of shared tokens with a matrix, whose result chooses among its columns (a top-k over experts) and by that what later layers
compute, becomes `ops/linear_in_blocks.py`. Only with the option `router_blocks`.
Why it is sound: it is the same product. How it is rounded no longer depends on the number of tokens, so that a near tie between two
experts is decided alike in whatever batch a token stands.

    before   logits = linear(tokens, gate)                           # [T, experts]
             weights, chosen = logits.softmax(-1).topk(2, -1)
    after    logits = router_linear(tokens, gate, None, 1024)

Refuses nothing; that no router was found is said in the account's `kernels`.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F

from sp_compile.capture.checkpoint import copy_tags
from sp_compile.ops.linear_in_blocks import router_linear
from sp_compile.passes.stage import Context, PassResult, Stage, origin_of, set_origin

_LINEAR = frozenset({F.linear, torch._C._nn.linear})
_MATMUL = frozenset({torch.matmul, torch.mm, operator.matmul, torch.Tensor.matmul, torch.Tensor.mm, "matmul", "mm"})
_OTHER_PRODUCTS = frozenset({"addmm", "bmm", "baddbmm", "einsum", "grouped_mm", "attention", "scaled_dot_product_attention"})
_CHOICES = frozenset({"topk", "argmax", "argsort", "sort", "max"})
_PER_TOKEN = frozenset(
    ("softmax", "log_softmax", "sigmoid", "softplus", "tanh", "exp", "sqrt", "float", "double", "half", "bfloat16", "to", "type_as", "view",
     "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "add", "iadd", "sub", "isub", "mul", "imul", "div", "truediv", "clamp",
     "masked_fill", "where", "getitem", "contiguous", "detach", "clone", "sum", "expand", "repeat_interleave")
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BlockRouters:
    """The pass; see the module's docstring.

    Attributes:
        rows: tokens in a block.
    """

    rows: int
    name: str = "block_routers"
    requires: Stage = Stage.COUNTED
    provides: Stage = Stage.COUNTED

    def __call__(self, graph: torch.fx.Graph, context: Context) -> PassResult:
        dims = {node.name: info.value.dim() for node, info in context.analysis.nodes.items() if isinstance(info.value, torch.Tensor)}
        found = 0
        for node in list(graph.nodes):
            call = self._read(node)
            if call is None or not _is_router(node):
                continue
            x, weight, bias, turned = call
            origin, held = origin_of(node), origin_of(weight)
            if origin is None or not origin.packed or (held is not None and held.packed) or _rank(weight, dims) not in (2, None):
                continue
            with graph.inserting_before(node):
                weight = graph.call_method("t", (weight,)) if turned else weight
                made = graph.call_function(router_linear, (x, weight, bias, self.rows))
            made.meta.update({key: value for key, value in node.meta.items() if key == "stack_trace"})
            copy_tags(node, made)
            set_origin(made, origin)
            node.replace_all_uses_with(made)
            graph.erase_node(node)
            found += 1
        text = f"blocks of {self.rows} tokens for {found} {'router' if found == 1 else 'routers'}"
        context.kernels["router_blocks"] = text if found else "no router found: no product of tokens leads to a top-k over its columns"
        return PassResult(graph, found)

    @staticmethod
    def _read(node: torch.fx.Node) -> tuple[Any, torch.fx.Node, Any, bool] | None:
        """Tokens, matrix, bias, and whether the matrix is [K, N]; None if the node is no product that can be cut into blocks."""
        if node.target in _LINEAR:
            given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
            x, weight, bias = given.get("input"), given.get("weight"), given.get("bias")
            turned = False
        elif node.op in ("call_function", "call_method") and node.target in _MATMUL and len(node.args) == 2 and not node.kwargs:
            (x, weight), bias, turned = node.args, None, True
        else:
            return None
        return (x, weight, bias, turned) if isinstance(x, torch.fx.Node) and isinstance(weight, torch.fx.Node) else None


def _rank(node: torch.fx.Node, dims: dict[str, int]) -> int | None:
    origin = origin_of(node)
    return dims.get(origin.dense if origin is not None else node.name)


def _name(node: torch.fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[-1]
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return name.strip("_")


def _is_product(node: torch.fx.Node) -> bool:
    name = _name(node)
    return node.target in _LINEAR or node.target in _MATMUL or name in _OTHER_PRODUCTS or "grouped_mm" in name or "attention" in name


def _is_router(node: torch.fx.Node) -> bool:
    """Whether a choice is made by the result, with nothing but per-token arithmetic between, and a product or a mixer comes after it."""
    todo, seen = list(node.users), set[torch.fx.Node]()
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if _name(one) in _CHOICES and _leads_to_product(one):
            return True
        if _name(one) in _PER_TOKEN:
            todo += one.users
    return False


def _leads_to_product(node: torch.fx.Node) -> bool:
    todo, seen = list(node.users), set[torch.fx.Node]()
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if _is_product(one):
            return True
        todo += one.users
    return False
