"""torch.autograd.Function inside of a captured graph: two bodies, a forward and a backward that somebody wrote.

A shared token's gradient is the sum over its rows, so the written backward is given that sum once where a dense run gives it each row's
gradient. That is the same only if it is linear in the gradient, and if it works on each token by itself. A value that holds no tokens,
such as an auxiliary loss that rides on the activations, may get a gradient that does not depend on theirs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import torch.fx

from sp_compile.analysis.layouts import Kind, Layout

_SUMS = frozenset(("add", "sub", "iadd", "isub"))
_PRODUCTS = frozenset(("mul", "imul", "matmul", "mm", "bmm", "linear", "einsum"))
_VIEWS = frozenset(("view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "flatten", "unflatten", "getitem"))
_CASTS = frozenset(("to", "type", "float", "half", "double", "bfloat16", "contiguous", "clone", "detach"))
_UNREAD = ("zeros_like", "ones_like", "empty_like")
_PLAIN = frozenset(("neg", "sum", "mean", "size", *_UNREAD)) | _VIEWS | _CASTS


def judge_backward(backward: torch.fx.GraphModule, gradients: int, results: Sequence[Sequence[Layout | None]]) -> bool | str:
    """Whether a written backward gives shared tokens the sum of their rows' gradients.

    Args:
        backward: its graph.
        gradients: how many of its inputs are gradients; they come first.
        results: layouts of what was given to the function and of the gradient that is returned for it, None for what is no tensor.

    Returns:
        Why it is not known to; or whether some value without tokens gets a gradient that does not depend on those that come in, which is
        right only where the function is computed once.
    """
    known = [(number, pair[0], pair[1]) for number, pair in enumerate(results) if len(pair) == 2 and pair[0] and pair[1]]
    if any(value.dims != gradient.dims for _, value, gradient in known):
        return "a written backward sums over tokens"
    common = {number for number, *both in known if all(not one.has_tokens and one.reach.kind is Kind.UNIFORM for one in both)}
    others = _not_linear(backward, gradients)
    if others is None or not others <= common:
        return "a written backward is not known to be linear in the gradient, which is summed over rows for shared tokens"
    return bool(others)


def _not_linear(backward: torch.fx.GraphModule, gradients: int) -> set[int] | None:
    """Places of the results that are not linear in the gradients but do not depend on them either; None if that is not known of some."""
    inputs = [node for node in backward.graph.nodes if node.op == "placeholder"]
    moved: set[torch.fx.Node] = set(inputs[:gradients])
    for node in backward.graph.nodes:
        given = [operand for operand in node.all_input_nodes if operand in moved]
        if node.op == "output":
            results = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
            return {n for n, found in enumerate(results) if isinstance(found, torch.fx.Node) and not _adds_up(found, moved)}
        if node.op == "placeholder" or not given:
            continue
        if not _is_linear_op(node, moved):
            return None
        if _name(node) not in ("size", *_UNREAD):
            moved.add(node)
    return None


def _adds_up(result: torch.fx.Node, moved: set[torch.fx.Node]) -> bool:
    return result in moved or _name(result) == "zeros_like"


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
