"""Emits a recurrence of the dense graph on physical tokens, as a marker that `fork_states` gives its forest."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from sp_compile.analysis.facts import Nonzero
from sp_compile.analysis.interpret import NodeInfo
from sp_compile.analysis.recurrences import ScanCall
from sp_compile.ops.dense_scans import KINDS
from sp_compile.passes import markers
from sp_compile.passes.stage import set_suffix

Operand = Callable[[str], "tuple[torch.fx.Node, torch.dtype]"]
"""The packed value of a node of the dense graph, and its dtype."""


def emit_scan(graph: torch.fx.Graph, call: ScanCall, packed: Operand, index: torch.fx.Node, suffix: str) -> torch.fx.Node:
    """Nodes that compute the call on packed operands; the last one is returned.

    Args:
        graph: the new graph; nodes are appended.
        call: what the analysis found.
        packed: gives operands.
        index: the [B, L] numbers of the rows' tokens, for the state after each row.
        suffix: of the forest's tensors, see `layout/refine.py`.
    """
    kind = KINDS[call.kind]
    tensors: list[Any] = []
    for argument, name in zip(kind.tensors, call.tensors, strict=True):
        value, dtype = (None, None) if name is None else packed(name)
        if value is not None and argument in kind.uniform and dtype != call.uniform:
            value = graph.call_method("to", (value, call.uniform))
            value.meta[markers.WIDENED] = True
        if value is not None and kind.tensors[argument] == "B C L":
            value = graph.call_method("transpose", (value, 1, 2))
        tensors.append(value)
    final = graph.call_method("select", (index, 1, -1)) if call.final else None
    made = graph.call_function(markers.shared_scan, (call.kind, tuple(tensors), final, dict(call.options)))
    set_suffix(made, suffix)
    if not call.final and kind.tensors[kind.result] == "B C L":
        made = graph.call_method("transpose", (made, 1, 2))
        made = graph.call_method("contiguous", (made,))
    # A state has the dtype of sums, perhaps of another marker's operands, see `fork_states`.
    return graph.call_method("to", (made, call.dtype)) if call.final or call.dtype != call.uniform else made


PADDING = re.compile(r"\b(attention|padding)_mask\b")
"""Names of arguments that say where a batch is padded."""


def padding_masks(order: Sequence[torch.fx.Node], infos: Mapping[torch.fx.Node, NodeInfo]) -> list[str]:
    """Where a model without attention says that its padding is: masks, called so by the caller, that zero what a recurrence reads.

    A product alone proves nothing, since a loss mask or a gate is one, too; and a name alone does not tell that the model heeds it.
    """
    named = {node.name for node in order if node.op == "placeholder" and PADDING.search(_source(node))}
    read: set[torch.fx.Node] = set()
    for node in reversed(order):
        if infos[node].scan is not None or node in read:
            read.update(node.all_input_nodes)
    found: dict[str, None] = {}
    for node in order:
        if node not in read or node.target not in (operator.mul, torch.mul, "mul", operator.imul, "mul_"):
            continue
        layouts = [infos[a].tensors[0] for a in node.all_input_nodes if infos[a].tensors]
        masks = [layout.fact.node for layout in layouts if isinstance(layout.fact, Nonzero)]
        if len(masks) == 1 and masks[0] in named and any(layout.has_tokens and not layout.entry for layout in layouts):
            found[masks[0]] = None
    return list(found)


def _source(node: torch.fx.Node) -> str:
    """How the caller names an input."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)
