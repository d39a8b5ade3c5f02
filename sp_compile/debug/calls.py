"""Which call of the user a compiled graph runs in: one model call may run many graphs."""

from __future__ import annotations

import os
import pathlib
import sys
import types
from collections.abc import MutableMapping
from typing import Any

import torch

_INTERNAL = tuple(str(pathlib.Path(file).parent) + os.sep for file in (torch.__file__, str(pathlib.Path(__file__).parent)))
"""Folders of torch and of this package."""

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


def returns_to_caller() -> bool:
    """Whether the compiled graph that runs belongs to the function that was compiled itself. Else more of that function's code runs after
    it, uncompiled or in another graph: behind a graph break, or around a function that was compiled on its own because of one. Where the
    stack does not tell, the answer is that more may follow."""
    traced = False
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        if not code.co_filename.startswith(_INTERNAL):
            if traced:
                return False
            traced = True
        frame = frame.f_back
    return True


def in_backward() -> bool:
    """Whether autograd is running in this thread: a graph that runs then is recomputed, and its forward was accounted for."""
    return bool(torch._C._current_graph_task_id() != -1)
