"""Sizes and numbers of a captured graph, written out again from their symbols."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
import torch.fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from sp_compile.analysis.interpret import Analysis
from sp_compile.errors import CannotShare

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


def _call(function: Callable[..., Any], *given: Any) -> Any:
    """A call on numbers, or a node that makes it where one of them is a node's."""
    proxy = next((value for value in given if isinstance(value, torch.fx.Proxy)), None)
    return function(*given) if proxy is None else proxy.tracer.create_proxy("call_function", function, given, {})


class _Written(PythonReferenceAnalysis):
    """Python's own functions of numbers; torch's table leaves those between whole numbers and fractions symbolic, or cannot trace them."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return _call(operator.truediv, a, b)

    @staticmethod
    def trunc_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _call(torch.sym_int, x)

    @staticmethod
    def floor_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _call(math.floor, x)

    @staticmethod
    def ceil_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _call(math.ceil, x)

    @staticmethod
    def round_to_int(x: Any, dtype: torch.dtype) -> Any:
        return _call(round, x)

    @staticmethod
    def round_decimal(x: Any, digits: Any) -> Any:
        return _call(round, x, digits)

    @staticmethod
    def floor(x: Any) -> Any:
        return _call(torch.sym_float, _call(math.floor, x))

    @staticmethod
    def ceil(x: Any) -> Any:
        return _call(torch.sym_float, _call(math.ceil, x))

    @staticmethod
    def reciprocal(x: Any) -> Any:
        return _call(operator.truediv, 1.0, x)


def write_number(value: Any, sizes: Mapping[sympy.Symbol, int | torch.fx.Node]) -> Any:
    """A number as a constant or as nodes of the graph that `sizes` belong to; tuples element by element.

    Raises:
        CannotShare: no code is known that computes it.
    """
    if isinstance(value, list | tuple):
        return tuple(write_number(item, sizes) for item in value)
    if not isinstance(value, _SYMBOLIC):
        return value
    expr = value.node.expr
    given = {symbol: sizes[symbol] for symbol in expr.free_symbols}
    graph = next((size.graph for size in given.values() if isinstance(size, torch.fx.Node)), torch.fx.Graph())
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    env = {symbol: torch.fx.Proxy(size, tracer) if isinstance(size, torch.fx.Node) else size for symbol, size in given.items()}
    try:
        result = sympy_interp(_Written, env, expr)
    except (AssertionError, AttributeError, KeyError, NotImplementedError, TypeError) as error:
        result = error
    if isinstance(result, torch.fx.Proxy):
        return result.node
    if not isinstance(result, bool | int | float):
        raise CannotShare(f"the number {expr} of sizes cannot be written as code", advice="Compute it outside of the model.")
    return result


def scaled_query(query: torch.fx.Node, scale: Any, sizes: Mapping[sympy.Symbol, int | torch.fx.Node]) -> tuple[torch.fx.Node, float]:
    """The query and the constant scale of an attention op, which takes no scale that is computed from sizes.

    Args:
        sizes: those of the rows, which the scale was computed from, and not of tokens.
    """
    number = write_number(scale, sizes)
    if isinstance(number, torch.fx.Node):
        return query.graph.call_function(operator.mul, (query, number)), 1.0
    return query, float(number)
