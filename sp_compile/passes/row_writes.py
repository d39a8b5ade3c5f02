"""In-place ops on rows that nobody sees become ops that make new values, so that they can move to physical tokens.

`rows /= temperature` may be written as `rows = rows / temperature` if no view of the rows, nor what they are a view of, is read afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from sp_compile.analysis.layouts import size_expr
from sp_compile.ops import tokens
from sp_compile.passes.row_views import Sizes, run, same, values_of

_OPERATORS: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ipow: operator.pow,
}
_METHODS = frozenset(
    {"add_", "sub_", "mul_", "div_", "pow_", "neg_", "exp_", "clamp_", "clamp_min_", "clamp_max_", "masked_fill_", "nan_to_num_"}
)


def without_writes(graph: torch.fx.Graph, sizes: Sizes, storages: Callable[[torch.fx.Node], set[int]], grad: bool) -> set[torch.fx.Node]:
    """Rewrites what can be and returns it.

    Args:
        graph: with fakes; changed in place.
        storages: what a node's dense value lives in.
        grad: the grad mode in which the graph begins. Without grad mode a write keeps the operand's gradient, a new value does not.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    rows: set[torch.fx.Node] = set()
    done: set[torch.fx.Node] = set()
    for node in order:
        if node.target is tokens.unpack or any(operand in rows for operand in node.all_input_nodes):
            rows.add(node)
        if getattr(node.target, "__name__", "") == "_set_grad_enabled":
            grad = node.args[0] is True
        form = _new_form(node)
        operand = node.args[0] if node.args else None
        if form is None or operand not in rows or not grad or not _keeps_type(node, form, sizes):
            continue
        written = storages(node)
        names = [other for other in order if order[other] < order[node] and storages(other) & written]
        inside = all(name.op in ("call_function", "call_method") for name in names)
        if inside and all(order[user] <= order[node] for name in names if name is not operand for user in name.users):
            node.target = form
            operand.replace_all_uses_with(node, delete_user_cb=lambda user, last=order[node]: order[user] > last)
            done.add(node)
    return done


def _new_form(node: torch.fx.Node) -> Any:
    if node.op == "call_function":
        return _OPERATORS.get(node.target)
    return str(node.target)[:-1] if node.op == "call_method" and node.target in _METHODS else None


def _keeps_type(node: torch.fx.Node, form: Any, sizes: Sizes) -> bool:
    """Whether the new value has the old one's dtype and shape."""
    old = node.meta["val"]
    with sizes.faked():
        new = run(node.op, form, values_of(node.args), values_of(node.kwargs))
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor) or old.dtype != new.dtype or old.dim() != new.dim():
        return False
    return all(same(size_expr(a), size_expr(b)) for a, b in zip(old.shape, new.shape, strict=True))
