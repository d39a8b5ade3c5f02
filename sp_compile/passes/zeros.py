"""Which values are zero wherever a padding mask is, as far as the graph says so by itself: a product with the mask, for one."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from sp_compile.analysis.facts import Nonzero
from sp_compile.analysis.layouts import Layout
from sp_compile.ops import tokens

LayoutOf = Callable[[torch.fx.Node], "Layout | None"]

_NONE: frozenset[str] = frozenset()
_SAME = frozenset(
    {
        "view", "reshape", "expand", "expand_as", "view_as", "reshape_as", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous",
        "clone", "detach", "to", "float", "double", "half", "bfloat16", "int", "long", "bool", "type", "type_as", "transpose",
        "permute", "movedim", "swapaxes", "repeat_interleave", "neg", "abs", "square", "sqrt", "relu", "sum", "mean", "broadcast_to",
        "pack", "unpack",
    }
)  # fmt: skip
"""Ops that keep a token's zeros zero; a `sum` or `mean` that still has tokens runs over other dimensions."""
_PRODUCTS = frozenset({"mul", "bitwise_and", "logical_and", "and_", "__and__", "mul_"})
_QUOTIENTS = frozenset({"truediv", "div", "true_divide", "floor_divide", "floordiv"})
_NOT = frozenset({"logical_not", "bitwise_not", "invert", "__invert__"})


def masks(node: Any, layout_of: LayoutOf) -> frozenset[str]:
    """The token inputs, by name, at whose zeros a value is zero.

    Args:
        node: of a rewritten graph; its operands at the same token decide.
        layout_of: the analysis' layout of what a node computes, or None.
    """
    if not isinstance(node, torch.fx.Node):
        return _NONE
    layout = layout_of(node)
    if layout is None and node.target not in (tokens.pack, tokens.unpack):
        return _NONE
    if layout is not None and (not layout.has_tokens or layout.is_rows):
        return _NONE
    if layout is not None and isinstance(layout.fact, Nonzero):
        return frozenset({layout.fact.node})
    name, args = _name(node), node.args
    if name in _PRODUCTS:
        return _NONE.union(*(masks(a, layout_of) for a in args))
    if name == "getitem" and _keeps_places(args[1]):
        return masks(args[0], layout_of)
    if name == "where" and len(args) == 3 and args[2] in (0, 0.0, False):
        return masks(args[0], layout_of)
    if name in ("masked_fill", "masked_fill_") and len(args) == 3:
        hidden = _hidden(args[1], layout_of) if args[2] in (0, 0.0, False) else _NONE
        return hidden | masks(args[0], layout_of)
    if name in _SAME or name in _QUOTIENTS:
        return masks(args[0], layout_of) if args else _NONE
    if name in ("ne", "gt") and len(args) == 2 and args[1] in (0, 0.0, False):
        return masks(args[0], layout_of)
    return _NONE


def _hidden(node: Any, layout_of: LayoutOf) -> frozenset[str]:
    """The inputs at whose zeros a condition holds."""
    if not isinstance(node, torch.fx.Node):
        return _NONE
    name, args = _name(node), node.args
    if name in _NOT or (name == "eq" and len(args) == 2 and args[1] in (0, 0.0, False)):
        return masks(args[0], layout_of)
    if name in _SAME or (name == "getitem" and _keeps_places(args[1])):
        return _hidden(args[0], layout_of)
    return _NONE


def _keeps_places(item: Any) -> bool:
    items = item if isinstance(item, tuple) else (item,)
    return all(i is None or i is Ellipsis or (isinstance(i, slice) and i == slice(None)) for i in items)


def _name(node: torch.fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    if node.target in (tokens.pack, tokens.unpack):
        return "pack"
    if node.target is operator.getitem:
        return "getitem"
    module = getattr(node.target, "__module__", "") or ""
    known = module.startswith(("torch", "_operator")) or isinstance(node.target, type(torch.mul))
    return str(getattr(node.target, "__name__", "")) if known else ""
