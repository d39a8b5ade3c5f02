"""What the polyfills of kernels' functions have in common: which arguments are in force, and how a call is refused.

Unlike plain PyTorch, many of these functions cannot be traced (fla marks its own with `torch.compiler.disable`): a call that is left to the
original breaks the graph, and takes a marker on its result with it. So the reason is told while Dynamo traces.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from sp_compile.capture import traces
from sp_compile.capture.polyfills import Function, refuse, tell
from sp_compile.errors import CannotShare

Builder = Callable[[types.FunctionType, types.FunctionType], "Function | None"]
Default = dict[str, Any]


def key_of(original: types.FunctionType) -> str:
    """The name under which a function is registered for the dense ops."""
    return f"{original.__module__}.{original.__qualname__}"


def unknown(bound: dict[str, Any], known: tuple[str, ...], defaults: Default) -> str | None:
    """The first argument in force that is not known; a switch that is on by default is in force. Written for Dynamo to trace."""
    for name, value in bound.items():
        if name in known or value is None or value is False:
            continue
        if value is True or name not in defaults or defaults[name] is not value:
            return name
    return None


def refused(raw: Function, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> Any:
    """What the original gives, marked as refused. Written for Dynamo to trace."""
    _tell(reason)
    return refuse(raw(*args, **kwargs), reason)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _tell(reason: str) -> None:
    """Says so now, in case that the original cannot be traced; on packed values, it would then read several rows as one."""
    if traces.packed_tokens() is not None:
        raise CannotShare(reason, advice="Inside of sp_compile.share there is no dense run to fall back to")
    tell(reason)
    warnings.warn(f"shared_prefix: {reason}. It runs on rows.", stacklevel=2)


def gated(out: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """`out * silu(gate)` in float32, as the kernels form it, or in float64."""
    if gate is None:
        return out
    dtype = torch.promote_types(out.dtype, torch.float32)
    return (out.to(dtype) * F.silu(gate.to(dtype))).to(out.dtype)
