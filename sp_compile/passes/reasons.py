"""Why a value stays on rows."""

from __future__ import annotations

from collections.abc import Mapping

import torch.fx

from sp_compile.analysis.layouts import Kind, Reason
from sp_compile.passes.forms import Form, Infos


def why_not(node: torch.fx.Node, infos: Infos, forms: Mapping[torch.fx.Node, Form]) -> Reason:
    """Why a node of the dense graph cannot be had on physical tokens."""
    info = infos[node]
    for layout in info.tensors:
        if layout.why is not None:
            return layout.why
    if info.failure is not None:
        return info.failure
    for operand in node.all_input_nodes:
        if forms[operand] is Form.NONE and infos[operand].tensors:
            return why_not(operand, infos, forms)
    if any(t.reach.kind == Kind.TOKENS and t.reach.shift > 0 for t in info.tensors):
        return Reason("a value looks ahead of its own column", str(node.target), node.name)
    if info.shapes and info.numbers:
        return Reason("one call uses B or L both as a size and as a number", str(node.target), node.name, advice="Split it into two calls.")
    return Reason("a value could not be brought to physical tokens", str(node.target), node.name)
