"""torch.autograd.Function inside of a captured graph: two bodies, a forward and a backward that somebody wrote.

A shared token's gradient is the sum over its rows, so the written backward is given that sum once where a dense run gives it each row's
gradient. That is the same only if it is linear in the gradient, and if it works on each token by itself.
"""

from __future__ import annotations

import operator

import torch
import torch.fx

_SUMS = frozenset(("add", "sub", "iadd", "isub"))
_PRODUCTS = frozenset(("mul", "imul", "matmul", "mm", "bmm", "linear", "einsum"))
_VIEWS = frozenset(("view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "flatten", "unflatten", "getitem"))
_CASTS = frozenset(("to", "type", "float", "half", "double", "bfloat16", "contiguous", "clone", "detach"))
_PLAIN = frozenset(("neg", "sum", "mean", "size", "zeros_like", "empty_like")) | _VIEWS | _CASTS


def is_linear(backward: torch.fx.GraphModule, gradients: int) -> bool:
    """Whether a written backward is known to be linear in its first inputs, the gradients.

    Args:
        backward: its graph.
        gradients: how many of its inputs are gradients.
    """
    inputs = [node for node in backward.graph.nodes if node.op == "placeholder"]
    moved: set[torch.fx.Node] = set(inputs[:gradients])
    for node in backward.graph.nodes:
        given = [operand for operand in node.all_input_nodes if operand in moved]
        if node.op == "output":
            return all(operand in moved or _name(operand) == "zeros_like" for operand in node.all_input_nodes)
        if node.op == "placeholder" or not given:
            continue
        if not _is_linear_op(node, moved):
            return False
        if _name(node) not in ("size", "zeros_like", "empty_like"):
            moved.add(node)
    return False


def _name(node: torch.fx.Node) -> str:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return str(name).strip("_")


def _is_linear_op(node: torch.fx.Node, moved: set[torch.fx.Node]) -> bool:
    name = _name(node)
    if node.op not in ("call_function", "call_method") or "out" in node.kwargs:
        return False
    operands = list(node.args)
    with_gradient = [i for i, a in enumerate(operands) if isinstance(a, torch.fx.Node) and a in moved]
    if len(with_gradient) != sum(operand in moved for operand in (*node.args, *node.kwargs.values()) if isinstance(operand, torch.fx.Node)):
        return False
    if name in _SUMS:
        return with_gradient == [0, 1] and not node.kwargs
    if name in _PRODUCTS:
        return len(with_gradient) == 1
    if name in ("div", "truediv", "true_divide"):
        return with_gradient == [0] and "rounding_mode" not in node.kwargs
    if name == "where":
        return 0 not in with_gradient and all(i in with_gradient or operands[i] in (0, 0.0) for i in (1, 2))
    if name == "masked_fill":
        return with_gradient == [0] and len(operands) == 3 and operands[2] in (0, 0.0)
    return name in _PLAIN and with_gradient == [0] and node.target is not operator.setitem
