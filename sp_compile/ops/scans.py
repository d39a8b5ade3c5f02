"""The recurrences and convolutions on physical tokens by kind, as the passes and the capture call them.

A kind's op takes the tensors of `dense_scans.KINDS` on [1, T], then the predecessors `prev`, for a recurrence the subtree ends `end`, an
external state, and for a recurrence the tokens whose states are wanted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.ops import causal_conv1d, gated_delta_rule, kda, linear_attention, linear_scan, selective_scan, ssd_scan  # noqa: F401  (register the ops)
from sp_compile.ops.dense_scans import KINDS, Given

FOREST = {kind: ("prev",) if kind == "causal_conv1d" else ("prev", "end") for kind in KINDS}
"""Forest tensors of each kind's op, after its own tensors."""


def op_of(kind: str) -> Any:
    """The overload of the op on physical tokens."""
    return getattr(torch.ops.sp_compile, kind).default


def arguments(kind: str, tensors: tuple[Any, ...], forest: tuple[Any, ...], final: Any) -> tuple[Any, ...]:
    """Positional arguments of the op, values or graph nodes, without an external state."""
    return (*tensors, *forest, None) if KINDS[kind].state is None else (*tensors, *forest, None, final)


def run(kind: str, given: Given, options: Given, prev: Tensor, end: Tensor, final: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Outputs and states of one row [1, L, ...] in the dense op's layout, from the op on physical tokens."""
    tensors = tuple(given.get(name) for name in KINDS[kind].tensors)
    if KINDS[kind].state is None:
        x, *others = tensors
        assert x is not None, "a convolution has an input"
        out = op_of(kind)(*arguments(kind, (x.transpose(1, 2).contiguous(), *others), (prev,), None), **options)
        return out.transpose(1, 2), None
    return op_of(kind)(*arguments(kind, tensors, (prev, end), final), **options)  # type: ignore[no-any-return]
