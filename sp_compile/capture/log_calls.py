"""Calls of `logging.Logger` methods inside of a model.

Dynamo breaks the graph at each of them, and what follows, often the loss, is a region without token ids. Under this backend a message is
given while tracing, once per compilation, if it is made of constants alone, and never in the graph. Its method on Dynamo's variable of
loggers is the one place where every such call passes, those that libraries add to the class (`warning_once`) included; it hands the call
on to the original under any other backend.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from sp_compile.capture.polyfills import is_ours

_METHODS = frozenset(
    ("debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log", "info_once", "warning_once", "warning_advice")
)
_MARK = "_sp_compile_log_calls"


def _say(logger: Any, method: str, args: Any, kwargs: Any) -> None:
    try:
        values = [value.as_python_constant() for value in args]
        named = {name: value.as_python_constant() for name, value in kwargs.items()}
        getattr(logger, method)(*values, **named)
    except Exception:
        return  # a message about values of the call: there are none while tracing


def scan() -> None:
    """Puts the wrapper around Dynamo's method, once."""
    kind: Any = getattr(torch._dynamo.variables.misc, "LoggingLoggerVariable", None)
    if kind is None or hasattr(kind.call_method, _MARK):
        return
    original = kind.call_method

    @functools.wraps(original)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name not in _METHODS or not is_ours(tx.output.compiler_fn):
            return original(self, tx, name, args, kwargs)
        _say(self.value, name, args, kwargs)
        return torch._dynamo.variables.ConstantVariable.create(None)

    setattr(call_method, _MARK, True)
    kind.call_method = call_method
