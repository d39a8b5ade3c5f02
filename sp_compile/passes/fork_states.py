"""Lets every recurrence and causal convolution start each branch from its parent's state.

What: a scan marker becomes the op on physical tokens, which gets each token's predecessor; a branch then continues the state, or the last
few inputs, of the token that it branches from.
Why it is sound: along each root-to-leaf path the predecessors are the tokens of a row in order, so the recurrence runs over what it runs
over in the row, and a value depends on nothing behind it.

    before   out = shared_scan('ssd_scan', (x, dt, A, B, C, D, dt_bias), None, {'chunk': 64, ...})
    after    pair = sp_compile.ssd_scan(x, dt, A, B, C, D, dt_bias, forest_prev, forest_end, None, None, chunk=64, ...)
             out = pair[0]

Refuses: nothing; what could not be proved was refused before.
"""

from __future__ import annotations

import dataclasses
import operator

import torch.fx

from sp_compile.ops import scans
from sp_compile.ops.dense_scans import KINDS
from sp_compile.passes import markers
from sp_compile.passes.stage import Context, PassResult, Stage, forest_input, origin_of, set_origin, suffix_of


@dataclasses.dataclass(frozen=True)
class ForkStates:
    """The pass; see the module's docstring."""

    name: str = "fork_states"
    requires: Stage = Stage.MASKED
    provides: Stage = Stage.FORKED

    def __call__(self, graph: torch.fx.Graph, context: Context) -> PassResult:
        found = [node for node in graph.nodes if node.target is markers.shared_scan]
        for node in found:
            kind, tensors, final, options = node.args
            forest = tuple(forest_input(graph, name + suffix_of(node)) for name in scans.FOREST[kind])
            node.target = scans.op_of(kind)
            node.args, node.kwargs = scans.arguments(kind, tensors, forest, final), options
            if KINDS[kind].state is not None:
                self._pick(graph, node, 0 if final is None else 1)
        return PassResult(graph, len(found))

    @staticmethod
    def _pick(graph: torch.fx.Graph, node: torch.fx.Node, output: int) -> None:
        with graph.inserting_after(node):
            result = graph.call_function(operator.getitem, (node, output))
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)
        origin = origin_of(node)
        if origin is not None:
            set_origin(result, origin)
