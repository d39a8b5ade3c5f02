"""(Query, key) masks that the caller passes in: nothing in the graph says which pairs they hide, so their values are read.

What has to hold is that no query sees a later column. It is read off the first call, used in the proof, and looked at again in every
call; the elements at and before the diagonal may be anything, and are carried one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from sp_compile.analysis.facts import Atom, TwoValued
from sp_compile.analysis.layouts import Axis, Layout
from sp_compile.capture.graphs import example_of, is_module_state, is_symbolic, placeholders
from sp_compile.ops.blocking import BLOCKED

if TYPE_CHECKING:
    from sp_compile.analysis.interpret import Analysis

Reading = float | None
"""What stands above the diagonal throughout: 0.0, 1.0, `BLOCKED` for values that each hide a key, or None for anything else."""


def pair_inputs(graph: torch.fx.Graph) -> list[int]:
    """Numbers of the inputs that may be (query, key) masks: [..., L, L], no module state."""
    found = []
    for number, node in enumerate(placeholders(graph)):
        value = example_of(node)
        if isinstance(value, torch.Tensor) and value.dim() >= 2 and not value.requires_grad and not is_module_state(node):
            found += [number] if all(map(is_symbolic, value.shape[-2:])) else []
    return found


def read_later(value: torch.Tensor) -> Reading:
    """What [..., L, L] holds for keys in later columns than the query's."""
    if value.dim() < 2 or value.shape[-1] != value.shape[-2] or value.shape[-1] < 2 or value.dtype.is_complex or value.numel() == 0:
        return None
    value = value.detach()
    later = value.triu(1)
    if not bool(later.any()):
        return 0.0
    upto = torch.ones(value.shape[-2:], dtype=torch.bool, device=value.device).tril()
    if bool((later.masked_fill(upto, 1) == 1).all()):
        return 1.0
    if value.is_floating_point() and bool((later.masked_fill(upto, BLOCKED) <= BLOCKED).all()):
        return BLOCKED
    return None


def read_all(numbers: Iterable[int], values: Sequence[Any]) -> dict[int, Reading]:
    """The readings of some inputs, by number."""
    return {number: read_later(values[number]) for number in numbers}


def given_fact(name: str, layout: Layout, value: torch.Tensor) -> TwoValued | None:
    """What is known about the elements of a mask that was passed in, once its present values are read; None if that is no help."""
    rank = len(layout.dims)
    if rank < 2 or layout.dims[-2:] != ((Axis.COLUMNS,), (Axis.COLUMNS,)) or value.requires_grad:
        return None
    reading = read_later(value)
    if reading is None:
        return None
    condition = Atom(rank - 2, rank - 1, 0, given=name)
    return TwoValued(frozenset({condition}), None, reading, exact=False, loose=reading == BLOCKED)


def relied_inputs(analysis: Analysis) -> list[int]:
    """Numbers of the inputs whose values, and not the graph, hide later columns from some attention layer."""
    names = {name for info in analysis.nodes.values() if info.attention is not None for name in info.attention.mask.given}
    return [number for number, node in enumerate(placeholders(analysis.graph)) if node.name in names]
