"""What is switched on while Dynamo traces for this backend, from the start of a trace.

Who a trace is made for is not told when it starts; it is read off the frames of Dynamo's own `_compile`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from sp_compile.capture.data_sizes import switch_back, switch_on
from sp_compile.capture.polyfills import is_ours, take_told
from sp_compile.capture.shapes import expect_symbols, finish_restart

_state = threading.local()
_tokens: Callable[[], int | None] | None = None


class _Lasting(list[Any]):
    """Callbacks, of which those given here survive `torch._dynamo.reset()`: the first trace after it is like every other."""

    def __init__(self, items: list[Any], kept: Any) -> None:
        super().__init__(items)
        self.kept = kept
        self.append(kept)

    def clear(self) -> None:
        super().clear()
        self.append(self.kept)


def watch_traces(tokens: Callable[[], int | None]) -> None:
    """Has every later trace of Dynamo begin with `_begin` and end with `_end`. Any number of calls is like one.

    Args:
        tokens: tells T if the inputs of the call in progress are packed, else None.
    """
    global _tokens
    _tokens = tokens
    handler: Any = torch._dynamo.callback.callback_handler
    if not any(callback is _begin for callback in handler.start_callbacks):
        handler.start_callbacks = _Lasting(handler.start_callbacks, _begin)
        handler.end_callbacks = _Lasting(handler.end_callbacks, _end)


def packed_tokens() -> int | None:
    """T if the inputs of the call in progress are packed, else None."""
    return None if _tokens is None else _tokens()


def _begin(_: object = None) -> None:
    _end()
    take_told()  # of a trace that made no graph
    compiler, given = _trace()
    if is_ours(compiler):
        # over symbols, checking a cached fake costs more than making it
        _state.cached = torch._dynamo.config.fake_tensor_cache_enabled
        torch._dynamo.config.fake_tensor_cache_enabled = False
        if not _will_be_split():
            expect_symbols(given, packed_tokens())
        switch_on()


def _will_be_split() -> bool:
    """Whether DistributedDataParallel will cut the graph: its parts cannot be shared, and are compiled densely as without this package."""
    if not torch.distributed.is_available() or not torch._dynamo.config.optimize_ddp:
        return False
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    return ddp._get_active_ddp_module() is not None


def _end(_: object = None) -> None:
    switch_back()
    finish_restart()
    cached = getattr(_state, "cached", None)
    _state.cached = None
    if cached is not None:
        torch._dynamo.config.fake_tensor_cache_enabled = cached


def _trace() -> tuple[Any, Any]:
    """The compile function of the trace that begins, and the local variables of what it traces; None if they cannot be found."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_compile" and frame.f_globals.get("__name__") == "torch._dynamo.convert_frame":
            return frame.f_locals.get("compiler_fn"), frame.f_locals.get("locals")
        frame = frame.f_back
    return None, None
