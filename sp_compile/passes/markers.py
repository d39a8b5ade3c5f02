"""Calls that stand in a graph between two passes and may not be left in a finished one."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from sp_compile.errors import StageError


def shared_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_valid: Tensor | None,
    segments: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    *,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
) -> NoReturn:
    """Causal attention on physical tokens that has not been given its forest yet."""
    raise StageError("an attention marker was left in a finished graph: add_forest_masks did not run")


MARKERS = frozenset({shared_attention})
