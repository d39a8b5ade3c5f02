"""Gives every attention its forest.

What: an attention marker becomes `sp_compile.attention`, which sees the ancestors of each token; the model's own mask travels as
window, chunk, key mask, documents or matrix.
Why it is sound: the marker stands only where the analysis proved that no later column is visible, and every ancestor holds the column
its row has there; so "visible in the row" is "ancestor and visible under the model's mask at (row, column, column)".

    before   out = shared_attention(q, k, v, None, None, None, None, scale=0.25, window=None, chunk=None, softcap=None)
    after    out = sp_compile.attention(q, k, v, forest_end, forest_column, None, None, None, None, scale=0.25, ...)

Refuses: nothing; what could not be proved was refused before.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.fx

from sp_compile.ops import attention as _attention  # noqa: F401  (registers sp_compile::attention)
from sp_compile.passes import markers
from sp_compile.passes.stage import Context, PassResult, Stage, forest_input, suffix_of


@dataclasses.dataclass(frozen=True)
class AddForestMasks:
    """The pass; see the module's docstring."""

    name: str = "add_forest_masks"
    requires: Stage = Stage.PACKED
    provides: Stage = Stage.MASKED

    def __call__(self, graph: torch.fx.Graph, context: Context) -> PassResult:
        found = [node for node in graph.nodes if node.target is markers.shared_attention]
        for node in found:
            q, k, v, *others = node.args
            node.target = torch.ops.sp_compile.attention.default
            node.args = (q, k, v, *(forest_input(graph, name + suffix_of(node)) for name in ("end", "column")), *others)
        return PassResult(graph, len(found))
