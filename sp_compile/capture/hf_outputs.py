"""transformers: the hooks that record router logits, hidden states and attentions.

They are installed by the first forward that asks for such an output, behind a lock, and Dynamo breaks the graph there. Under this
backend they are installed while tracing, by the library's own function called for real: the modules below have not been traced yet at
that point, so the trace sees the hooks, and the graph is the one a second forward would have given.
"""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import torch

from sp_compile.capture import versions
from sp_compile.capture.polyfills import Function, substitute

_MODULE = "transformers.utils.output_capturing"


def _hooks(original: types.FunctionType, raw: types.FunctionType) -> Function:
    @torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
    def install_hooks(address: int) -> bool:
        try:
            # Dynamo hands numbers to a function like this one, but on torch 2.11 no modules; the trace's caller holds the module
            raw(ctypes.cast(address, ctypes.py_object).value)
        except Exception:
            return False
        return True

    def maybe_install_capturing_hooks(model: Any) -> None:
        if not install_hooks(id(model)):
            raw(model)

    return maybe_install_capturing_hooks


def scan() -> None:
    """Substitutes the function that installs the hooks, if its module is imported."""
    if versions.is_tested("transformers"):
        substitute(getattr(sys.modules.get(_MODULE), "maybe_install_capturing_hooks", None), _hooks)
