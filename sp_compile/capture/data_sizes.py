"""Sizes that depend on data: the tokens of one expert, `bincount`. Dynamo breaks the graph there, or gives up a whole loop over layers.

`torch._dynamo.config.capture_dynamic_output_shape_ops` has it go on. It is switched on while Dynamo traces for this backend, and only then;
a capture that cannot be shared so is repeated without it, so that what runs densely is what runs without this package.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
import torch.fx
from torch._dynamo.exc import Unsupported
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from sp_compile.capture.graphs import example_of

_state = threading.local()


def switch_on() -> None:
    """Has Dynamo go on where a size depends on data, until `switch_back`."""
    config, decide = torch._dynamo.config, ShapeEnv._make_data_dependent_error

    @functools.wraps(decide)
    def break_instead(*args: Any, **kwargs: Any) -> GuardOnDataDependentSymNode:
        return _Undecided(decide(*args, **kwargs))

    _state.before = (config.capture_dynamic_output_shape_ops, decide)
    config.capture_dynamic_output_shape_ops = True
    ShapeEnv._make_data_dependent_error = break_instead  # type: ignore[method-assign]


class _Undecided(GuardOnDataDependentSymNode, Unsupported):
    """A question about a size that depends on data. In a trace of ours it breaks the graph, where torch would have raised an error: the
    user did not ask for such sizes."""

    def __init__(self, error: GuardOnDataDependentSymNode) -> None:
        Unsupported.__init__(self, str(error), "a size depends on data")
        self.cond = error.cond


def switch_back(_: object = None) -> bool:
    """Undoes `switch_on`; whether it was on."""
    before = getattr(_state, "before", None)
    _state.before = None
    if before is not None:
        torch._dynamo.config.capture_dynamic_output_shape_ops = before[0]
        ShapeEnv._make_data_dependent_error = before[1]  # type: ignore[method-assign]
    return before is not None


def is_sized_by_data(value: Any) -> bool:
    """Whether a tensor has a size that is no function of the inputs' sizes."""
    if not isinstance(value, torch.Tensor):
        return isinstance(value, tuple | list) and any(map(is_sized_by_data, value))
    sizes: list[Any] = [size.node for size in tuple[Any, ...](value.shape) if isinstance(size, torch.SymInt)]
    return any(node.shape_env.is_unbacked_symint(symbol) for node in sizes for symbol in node.expr.free_symbols)


def holds_data_sizes(graph: torch.fx.Graph) -> bool:
    """Whether a captured graph went on at an op whose result's size depends on data."""
    checks = (torch.ops.aten._assert_scalar.default, torch.bincount)
    return any(node.target in checks or is_sized_by_data(example_of(node)) for node in graph.nodes)
