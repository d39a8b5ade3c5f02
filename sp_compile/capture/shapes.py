"""Symbolic rows and columns without any user flag: a static capture is repeated with the token inputs marked dynamic.

Dynamo captures the first call with static sizes, in which 4 rows and 4 heads look alike. Where a traced function's arguments tell rows
and columns they are marked before it is traced (`expect_symbols`). Else raising Dynamo's own restart exception from the backend makes it
trace again; the marks are taken off the user's tensors by the next capture. Two dimensions of one size would get one symbol ("duck
shaping"), so that is switched off for these traces.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.fx
import torch.fx.experimental._config as fx_config
from torch._dynamo.symbolic_convert import InstructionTranslator

from sp_compile.capture.data_sizes import holds_data_sizes, switch_back, switch_on
from sp_compile.capture.graphs import example_of, is_module_state, is_symbolic, placeholders, static_token_inputs, token_dims
from sp_compile.errors import UnsupportedVersion

_MARKS = ("_dynamo_weak_dynamic_indices", "_dynamo_dynamic_indices", "_has_dynamo_dim_marking")
_LENGTHS = r".*\.seq_lengths\[[01]\]$"
_state = threading.local()


def ensure_symbolic(graph: torch.fx.Graph, values: Sequence[Any], again: bool = False, tokens: int | None = None) -> bool:
    """Returns if the capture is symbolic or cannot be; else restarts Dynamo's trace once.

    A call with one row, or one column, or a second static capture in a row, stays static.

    Args:
        graph: the captured graph.
        values: its inputs.
        again: trace again even if the capture is symbolic (new polyfills were installed after it began).
        tokens: T if the inputs are packed, else None.

    Returns:
        Whether the capture went on where a size depends on data, because this backend asked for it (`data_sizes`). If it is of no use
        so, `capture_broken` repeats it.
    """
    last = finish_restart()
    was_restart = last is not None and not last.expected
    early = last.chosen if last is not None and last.expected else []
    goes_on = switch_back()
    if tokens is not None:
        _ensure_symbolic_tokens(graph, values, again, tokens, was_restart)
        return goes_on and holds_data_sizes(graph)
    symbolic = any(is_symbolic(example_of(node)) for node in placeholders(graph))
    alike = any(_rows_and_columns_alike(example_of(node)) for node in placeholders(graph))
    marked = {
        n: values[n]
        for n in static_token_inputs(graph)
        if isinstance(values[n], torch.Tensor) and not isinstance(values[n], torch.nn.Parameter)
    }
    fixed = _fixed_tokens(graph, marked)
    if was_restart or (not fixed and (not symbolic or not (again or alike))):
        _state.last = last
        return goes_on and holds_data_sizes(graph)
    if symbolic and not fixed:
        raise _retrace(early, "capture again with polyfills, or with one symbol per size", goes_on=goes_on)
    rows, columns = fixed[0].shape
    chosen: list[tuple[torch.Tensor, Sequence[int]]] = [
        (t, [d for d, size in enumerate(t.shape) if size > 1 and size in (rows, columns)]) for t in marked.values()
    ]
    chosen += [(t, dims) for t, dims in early if not any(t is other for other, _ in chosen)]
    raise _retrace(chosen, "capture rows and columns as symbols", _holds_numbers(graph), goes_on)


def capture_broken() -> Exception:
    """The exception by which a capture that went on where a size depends on data is repeated up to there."""
    last: _Restart | None = getattr(_state, "last", None)
    return _retrace(last.chosen if last else [], "capture up to sizes that depend on data", last.numbers if last else False)


def _ensure_symbolic_tokens(graph: torch.fx.Graph, values: Sequence[Any], again: bool, tokens: int, was_restart: bool) -> None:
    """The same for inputs that are packed: one row of T tokens."""
    chosen: list[tuple[torch.Tensor, list[int]]] = []
    fixed = False
    for number, node in enumerate(placeholders(graph)):
        example, value = example_of(node), values[number]
        if isinstance(example, torch.Tensor) and isinstance(value, torch.Tensor) and not is_module_state(node):
            dims = token_dims(value.shape, tokens) if tokens > 1 else []
            chosen.append((value, dims))
            fixed = fixed or any(not is_symbolic(example.shape[dim]) for dim in dims)
    if not was_restart and (fixed or again):
        # whatever was marked before the first trace is among them
        raise _retrace(chosen, "capture the number of tokens as a symbol", _holds_numbers(graph))


def _holds_numbers(graph: torch.fx.Graph) -> bool:
    """Whether sizes are also numbers on objects: a BlockMask has the number of columns, to which flex_attention would tie the symbol."""
    return any(node.target is torch.ops.higher_order.flex_attention for node in graph.nodes)


@dataclasses.dataclass(frozen=True)
class _Restart:
    """A trace that was started again, and what to put back after it.

    Attributes:
        chosen: dimensions that were marked as dynamic.
        numbers: lengths of block masks were, too.
        kept: the marks that the tensors had before.
        duck, sources: settings of torch before.
        expected: the trace is a first one, marked before it began.
    """

    chosen: Sequence[tuple[torch.Tensor, Sequence[int]]]
    numbers: bool
    kept: list[tuple[torch.Tensor, dict[str, Any]]]
    duck: bool
    sources: str
    expected: bool = False


def _retrace(chosen: Sequence[tuple[torch.Tensor, Sequence[int]]], reason: str, numbers: bool = False, goes_on: bool = False) -> Exception:
    """Marks dimensions, and the lengths of block masks if asked, as dynamic until the next capture; gives the exception that starts it."""
    _mark(chosen, numbers)
    if goes_on:
        switch_on()
    return _restart(reason)


def _mark(chosen: Sequence[tuple[torch.Tensor, Sequence[int]]], numbers: bool, expected: bool = False) -> None:
    handler: Any = torch._dynamo.callback.callback_handler
    if finish_restart not in handler.end_callbacks:
        # a trace that never reaches the backend must not leave marks or settings behind
        handler.register_end_callback(finish_restart)
    kept: list[tuple[torch.Tensor, dict[str, Any]]] = []
    for tensor, dims in chosen:
        kept.append((tensor, {name: copy.copy(getattr(tensor, name)) for name in _MARKS if hasattr(tensor, name)}))
        for dim in dims:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    sources = torch.compiler.config.dynamic_sources
    _state.pending = _Restart(chosen, numbers, kept, fx_config.use_duck_shape, sources, expected)
    fx_config.use_duck_shape = False
    if numbers:
        torch.compiler.config.dynamic_sources = ",".join(filter(None, (sources, _LENGTHS)))


def expect_symbols(arguments: Any, tokens: int | None = None) -> None:
    """Marks rows and columns of a function's arguments as dynamic before it is traced, which saves a trace with numbers for them.

    Only where the token inputs are plain to see: two-dimensional tensors of integers, all of one shape, of more than one row and column.

    Args:
        arguments: the traced function's local variables by name, in any nesting of dictionaries, lists and tuples.
        tokens: T if the inputs are packed, else None.
    """
    tensors: list[torch.Tensor] = []
    _gather(arguments, tensors, 3)
    if tokens is not None:
        found = [(t, token_dims(t.shape, tokens)) for t in tensors if tokens > 1]
    else:
        tensors = [t for t in tensors if not t.requires_grad]
        shapes = {t.shape for t in tensors if t.dim() == 2 and not t.is_floating_point() and not t.is_complex()}
        rows_columns = next(iter(shapes)) if len(shapes) == 1 else ()
        known = rows_columns if rows_columns and min(rows_columns) > 1 else ()
        found = [(t, [d for d, size in enumerate(t.shape) if size > 1 and size in known]) for t in tensors]
    if any(dims for _, dims in found):
        _mark([(t, dims) for t, dims in found if dims], numbers=False, expected=True)


def _gather(value: Any, found: list[torch.Tensor], depth: int) -> None:
    """Plain tensors that are no parameters, each once."""
    if type(value) is torch.Tensor:
        if not any(value is other for other in found):
            found.append(value)
    elif depth and isinstance(value, dict | list | tuple) and len(value) <= 64:
        for item in value.values() if isinstance(value, dict) else value:
            _gather(item, found, depth - 1)


def _fixed_tokens(graph: torch.fx.Graph, given: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """Token inputs of more than one row and column, one of whose sizes is a number in the graph.

    A second capture of one function has symbols for the sizes that changed since the first, and numbers for the others. Beside a token
    input with symbols, only inputs of its very sizes count.
    """
    examples = [example_of(node) for node in placeholders(graph)]
    tokens = {n: t for n, t in given.items() if t.dim() == 2 and not t.is_floating_point() and min(t.shape) > 1}
    known = next((t.shape for n, t in tokens.items() if any(map(is_symbolic, examples[n].shape))), None)
    return [t for n, t in tokens.items() if not all(map(is_symbolic, examples[n].shape)) and known in (None, t.shape)]


def _rows_and_columns_alike(value: Any) -> bool:
    """A square batch whose two sizes got one symbol."""
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.is_floating_point() or not all(map(is_symbolic, value.shape)):
        return False
    first, second = (cast(torch.SymInt, size).node.expr for size in value.shape)
    return bool(first == second)


def _restart(reason: str) -> Exception:
    restart = getattr(torch._dynamo.exc, "TensorifyScalarRestartAnalysis", None)
    if restart is None:
        finish_restart()
        raise UnsupportedVersion(
            f"torch {torch.__version__} has no trace restart that a backend can raise; pass dynamic=True to torch.compile"
        )
    # the second trace may take another path: what the first one learned about graph breaks does not hold for it
    log = getattr(InstructionTranslator.current_tx(), "speculation_log", None)
    if log is not None:
        log.clear()
    made: Exception = restart(restart_reason=f"shared_prefix: {reason}")
    return made


def finish_restart(_: object = None) -> _Restart | None:
    """Takes the marks and settings of a restarted capture off again; None if there was none."""
    _state.last = None
    last: _Restart | None = getattr(_state, "pending", None)
    if last is None:
        return None
    _state.pending = None
    fx_config.use_duck_shape = last.duck
    torch.compiler.config.dynamic_sources = last.sources
    for tensor, before in last.kept:
        for name in _MARKS:
            if name in before:
                setattr(tensor, name, before[name])
            elif hasattr(tensor, name):
                delattr(tensor, name)
    return last
