"""An additive attention mask that is a sum: the part that hides keys, and the part that bends scores (ALiBi, T5).

Apart, the mask keeps its structure (window, padding), and a bias stays as small as it is: one number per head and key for ALiBi. The sum
would be a number for every pair of tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from sp_compile.analysis.facts import MaskSpec, TwoValued, facing
from sp_compile.analysis.layouts import Axis, Dim, Kind, Layout, Span
from sp_compile.analysis.memory import storage_of
from sp_compile.capture.torch_spelling import spelled
from sp_compile.ops.blocking import is_blocking


def mask_and_bias(mode: Any, name: str | None, found: Mapping[torch.fx.Node, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The two parts of the sum that a graph node holds, or None if it is no sum of one mask and one bias.

    Args:
        mode: the running interpreter.
        name: the node.
        found: what is known about the nodes so far.
    """
    node = next((n for n in found if n.name == name), None)
    while node is not None and spelled(node).name in ("cast", "same") and _same_dtype(found, node, node.args[0]):
        node = node.args[0]  # type: ignore[assignment]  # _same_dtype is about nodes
    parts = _parts(node) if node is not None else []
    values = [found[part].value for part in parts if part in found and isinstance(found[part].value, torch.Tensor)]
    if len(parts) != 2 or len(values) != 2 or any(_overwritten(mode, value) for value in values):
        return None
    for mask, bias in (values, values[::-1]):
        if _is_structured(mode.layout_of(mask)) and not _hides(mode.layout_of(bias)) and _fits(mode.layout_of(bias), mode.symbols.rows_dim):
            return mask, bias
    return None


def _same_dtype(found: Mapping[torch.fx.Node, Any], after: torch.fx.Node, before: Any) -> bool:
    values = [found[node].value for node in (after, before) if isinstance(node, torch.fx.Node) and node in found]
    return len(values) == 2 and all(isinstance(v, torch.Tensor) for v in values) and values[0].dtype == values[1].dtype


def _parts(node: torch.fx.Node) -> list[torch.fx.Node]:
    plain = node.target in (operator.add, torch.add) if node.op == "call_function" else node.op == "call_method" and node.target == "add"
    if not plain or node.kwargs or len(node.args) != 2:
        return []
    return [part for part in node.args if isinstance(part, torch.fx.Node)]


def _overwritten(mode: Any, value: torch.Tensor) -> bool:
    """Whether something was written to the memory of a value after it was made."""
    known = mode.known.get(id(value))
    return known is None or mode.stored[storage_of(value)].version > known[2]


def _is_structured(layout: Layout) -> bool:
    """Whether a mask is known to the last pair; one that is carried as a matrix takes a bias along."""
    return _hides(layout) and (not isinstance(layout.fact, TwoValued) or layout.fact.exact)


def _hides(layout: Layout) -> bool:
    if isinstance(layout.fact, MaskSpec):
        return True
    fact = facing(layout.fact, is_blocking)
    return fact is not None and bool(fact.conditions)


def _fits(layout: Layout, rows: Dim) -> bool:
    """Whether a bias is [B, H, L, L], some of whose dimensions may be 1 or absent, and made of positions alone.

    One that is made of tokens may hide padding in a way that was not understood, so it stays a part of the mask.
    """
    rank = len(layout.dims)
    if not 2 <= rank <= 4 or layout.reach.kind > Kind.COLUMN:
        return False
    pairs = all(dim == () or (len(dim) == 1 and (dim[0] is Axis.COLUMNS or isinstance(dim[0], Span))) for dim in layout.dims[-2:])
    heads = rank < 3 or not layout.token_dim(rank - 3)
    return pairs and heads and (rank < 4 or layout.dims[0] in ((), rows))
