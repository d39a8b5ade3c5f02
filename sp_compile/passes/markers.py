"""Calls that stand in a graph between two passes and may not be left in a finished one."""

from __future__ import annotations

from typing import Any, NoReturn

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


def shared_scan(kind: str, tensors: tuple[Tensor | None, ...], final: Tensor | None, options: dict[str, Any]) -> NoReturn:
    """A recurrence or causal convolution on physical tokens that does not know its tokens' predecessors yet.

    Args:
        kind: key of `dense_scans.KINDS`.
        tensors: the op's own tensors.
        final: tokens whose states are the result; None: the outputs are.
        options: keyword options of the op.
    """
    raise StageError("a scan marker was left in a finished graph: fork_states did not run")


WIDENED = "sp_compile_widened"
"""Key in the metadata of an operand of `shared_scan` that was converted for it to a wider dtype."""

MARKERS = frozenset({shared_attention, shared_scan})
