"""Which call of the user a compiled graph runs in: one model call may run many graphs."""

from __future__ import annotations

import sys
import types
from collections.abc import MutableMapping
from typing import Any

import torch

_MODULE_CALL, _WRAPPED_CALL = torch.nn.Module._call_impl.__code__, torch.nn.Module._wrapped_call_impl.__code__


def space() -> MutableMapping[str, Any] | None:
    """The namespace of the running call: of the outermost frame on the stack that calls a module or a compiled function, None without one.

    What is put there under a new key lives as long as the call, however the call ends. The address or number of a frame would not do: the
    next call gets the same.
    """
    found: types.FrameType | None = None
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if (
            code is _WRAPPED_CALL
            or code is _MODULE_CALL
            or (code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"))
        ):
            found = frame
        frame = frame.f_back
    # A frame keeps keys that are no variables of its function: specified by PEP 667, and true before it.
    return None if found is None else found.f_locals


def in_backward() -> bool:
    """Whether autograd is running in this thread: a graph that runs then is recomputed, and its forward was accounted for."""
    return bool(torch._C._current_graph_task_id() != -1)
