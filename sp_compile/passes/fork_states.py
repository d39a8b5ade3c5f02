"""Lets every recurrence and causal convolution start each branch from its parent's state.

What: a scan marker becomes the op on physical tokens, which gets each token's predecessor; a branch then continues the state, or the last
few inputs, of the token that it branches from.
Why it is sound: along each root-to-leaf path the predecessors are the tokens of a row in order, so the recurrence runs over what it runs
over in the row, and a value depends on nothing behind it.

    before   out = shared_scan('ssd_scan', (x, dt, A, B, C, D, dt_bias), None, {'chunk': 64, ...})
    after    pair = sp_compile.ssd_scan(x, dt, A, B, C, D, dt_bias, forest_prev, forest_end, None, None, chunk=64, ...)
             out = pair[0]

Outputs and final states of one recurrence are two markers, and come from one op.

Refuses: nothing; what could not be proved was refused before.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, cast

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
        groups: dict[object, list[torch.fx.Node]] = {}
        for node in graph.nodes:
            if node.target is markers.shared_scan:
                groups.setdefault(_key(node), []).append(node)
        for group in groups.values():
            together = group[0].args[2] is None  # then what comes first has its operands in the wider dtype
            for part in [group] if together else [[node] for node in group]:
                self._fork(graph, part)
        return PassResult(graph, sum(map(len, groups.values())))

    @staticmethod
    def _fork(graph: torch.fx.Graph, group: list[torch.fx.Node]) -> None:
        """One op for the markers of one recurrence, which want its outputs, its states or both."""
        node = group[0]
        kind, tensors, own, options = _call(node)
        asked = next((final for _, _, final, _ in map(_call, group) if final is not None), None)
        if asked is not None and asked is not own:
            node.prepend(asked)  # it reads an input only, see `shared_scans`
        with graph.inserting_before(node):
            forest = tuple(forest_input(graph, name + suffix_of(node)) for name in scans.FOREST[kind])
            made = graph.call_function(scans.op_of(kind), scans.arguments(kind, tensors, forest, asked), options)
        made.meta = dict(node.meta)
        for one in group:
            result = made
            if KINDS[kind].state is not None:
                with graph.inserting_before(one):
                    result = graph.call_function(operator.getitem, (made, 0 if one.args[2] is None else 1))
                origin = origin_of(one)
                if origin is not None:
                    set_origin(result, origin)
            one.replace_all_uses_with(result)
            graph.erase_node(one)


def _call(node: torch.fx.Node) -> tuple[str, tuple[Any, ...], torch.fx.Node | None, dict[str, Any]]:
    """The arguments of a marker, see `markers.shared_scan`."""
    kind, tensors, final, options = cast("tuple[Any, ...]", node.args)
    return kind, tensors, final, options


def _key(node: torch.fx.Node) -> object:
    """Equal for markers that one op can serve: the same recurrence on the same values and forest."""
    kind, tensors, final, options = _call(node)
    if KINDS[kind].state is None or (final is not None and not _is_last(final)):
        return node
    return kind, tuple(map(_value, tensors)), tuple(options.items()), suffix_of(node)


def _is_last(final: torch.fx.Node) -> bool:
    """Whether `final` is one call on an input, which may stand anywhere."""
    return final.op == "call_method" and all(given.op == "placeholder" for given in final.all_input_nodes)


def _value(tensor: torch.fx.Node | None) -> object:
    """Equal for equal values: what a marker widens is made anew for each of them."""
    return tensor.args[0] if tensor is not None and markers.WIDENED in tensor.meta else tensor
