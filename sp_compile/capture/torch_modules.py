"""torch.nn: Python code of its modules that would break the graph.

`nn.TransformerEncoder` and `nn.TransformerDecoder` look whether the mask they are given is the causal one, which reads a number out of a
tensor. It is a hint for speed alone, and the mask goes on being used; in a captured graph the masks are read anyway.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from sp_compile.capture.polyfills import substitute


def _build(original: types.FunctionType, raw: types.FunctionType) -> Callable[..., Any] | None:
    def detect_is_causal_mask(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    return detect_is_causal_mask


def scan() -> None:
    """Substitutes the functions of torch's modules."""
    substitute(getattr(sys.modules.get("torch.nn.modules.transformer"), "_detect_is_causal_mask", None), _build)
