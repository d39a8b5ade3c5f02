"""Sizes and numbers of a captured graph, written out again from their symbols."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
import torch.fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import OptimizedPythonReferenceAnalysis

from sp_compile.analysis.interpret import Analysis

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_number(value: Any) -> bool:
    """Whether a node holds a number, or a tuple of numbers such as a torch.Size."""
    if isinstance(value, list | tuple):
        return all(is_number(item) for item in value)
    return isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)


def has_unbacked(value: Any, analysis: Analysis) -> bool:
    """Numbers read out of tensors are no function of the sizes and have to be computed."""
    if isinstance(value, list | tuple):
        return any(has_unbacked(item, analysis) for item in value)
    if not isinstance(value, _SYMBOLIC):
        return False
    assert analysis.inputs is not None, "the outermost graph has inputs"
    env = analysis.inputs.mode.shape_env
    assert env is not None, "the analysis runs with symbols"
    return any(env.is_unbacked_symint(symbol) or symbol.name.startswith("zuf") for symbol in value.node.expr.free_symbols)


def write_number(value: Any, sizes: Mapping[sympy.Symbol, int | torch.fx.Node]) -> Any:
    """A number as a constant or as nodes of the graph that `sizes` belong to; tuples element by element."""
    if isinstance(value, list | tuple):
        return tuple(write_number(item, sizes) for item in value)
    if not isinstance(value, _SYMBOLIC):
        return value
    expr = value.node.expr
    given = {symbol: sizes[symbol] for symbol in expr.free_symbols}
    env = {symbol: torch.fx.Proxy(size) if isinstance(size, torch.fx.Node) else size for symbol, size in given.items()}
    result = sympy_interp(OptimizedPythonReferenceAnalysis, env, expr)
    return result.node if isinstance(result, torch.fx.Proxy) else result
