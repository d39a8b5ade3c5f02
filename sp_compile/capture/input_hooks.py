"""Forward hooks that make a frozen embedding's output require grad, as adapter libraries put on models for reentrant checkpoints.

    def hook(module, input, output): output.requires_grad_(True)

Dynamo breaks the graph there, and every layer behind the break has no token ids. A compiled checkpoint needs no such input, and the
gradient of a value that nobody holds is seen by nobody, so under this backend the hook does nothing. Any forward hook with this very code
is meant, whoever wrote it: transformers and peft each make one per model, inside of a method.
"""

from __future__ import annotations

import gc
import types
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from sp_compile.capture.polyfills import Function, substitute

_seen: list[int] = [-1]
"""The number of hooks ever registered in the process, at the last look."""


def _pattern(module: Any, input: Any, output: Any) -> None:
    output.requires_grad_(True)


def _same_code(function: Any) -> bool:
    if not isinstance(function, types.FunctionType) or function.__closure__ is not None:
        return False
    found, wanted = function.__code__, _pattern.__code__
    shape = ("co_code", "co_names", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_nlocals")
    alike = all(getattr(found, name) == getattr(wanted, name) for name in shape)
    return alike and found.co_consts[-1:] == wanted.co_consts[-1:]


def _build(original: types.FunctionType, raw: types.FunctionType) -> Function:
    def nothing(module: Any, input: Any, output: Any) -> None:
        return None

    return nothing


def scan() -> None:
    """Substitutes such hooks of all modules that exist. They must be known before the outermost frame is traced, and no list of models
    exists at that point; the garbage collector's is walked, if a hook was registered since the last time."""
    count = int(RemovableHandle.next_id)
    if count == _seen[0]:
        return
    _seen[0] = count
    for found in gc.get_objects():
        if issubclass(type(found), torch.nn.Module):
            for hook in tuple(vars(found).get("_forward_hooks", {}).values()):
                if _same_code(hook):
                    substitute(hook, _build)
