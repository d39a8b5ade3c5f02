"""The last pass: every sp op becomes a concrete implementation.

What: each semantic op is replaced by the first implementation of its table that supports the call, with the forest tensors it needs.
Why it is sound: every implementation computes the op's meaning (three-way tests); the choice reads shapes and dtypes only.

    before   out = sp_compile.attention(q, k, v, forest_end, forest_column, None, None, None, None, scale=0.25, ...)
    after    pair = sp_compile.attention_chains(q, k, v, forest_end, ..., forest_attention_passes, scale=0.25, ...)
             out = pair[0]

Refuses: `NoImplementation` if no entry supports a call under the current determinism policy.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch.fx

from sp_compile.errors import InvalidOption
from sp_compile.lowering import attention, delta_rules, registry, rows, scans  # noqa: F401  (the tables)
from sp_compile.passes.metadata import propagate
from sp_compile.passes.stage import Context, PassResult, Stage, forest_input, hides_input, mark_lowered, padding_of, suffix_of


@dataclasses.dataclass(frozen=True)
class SelectKernels:
    """The pass; see the module's docstring. `kernels` are the user's preferred names, for every op that has them."""

    kernels: tuple[str, ...] = ()
    name: str = "select_kernels"
    requires: Stage = Stage.SUNK
    provides: Stage = Stage.LOWERED

    def __call__(self, graph: torch.fx.Graph, context: Context) -> PassResult:
        assert context.module is not None, "the runner sets the module"
        names = {item.name for op in registry.semantic_ops() for item in registry.implementations(op)}
        unknown = [name for name in self.kernels if name not in names]
        if unknown:
            raise InvalidOption(f"option kernels names {unknown}; known implementations are {sorted(names)}")
        propagate(graph, context.module, context)
        known = set(registry.semantic_ops())
        found = [node for node in graph.nodes if node.target in known]
        for node in found:
            self._lower(graph, node, context)
        return PassResult(graph, len(found))

    def _lower(self, graph: torch.fx.Graph, node: torch.fx.Node, context: Context) -> None:
        op: Any = node.target
        bound = registry.bind(op, node.args, node.kwargs)
        fakes = {name: value.meta["val"] if isinstance(value, torch.fx.Node) else value for name, value in bound.items()}
        fakes["padding"] = padding_of(node)
        table = [item.name for item in registry.implementations(op)]
        preferred = [name for name in self.kernels if name in table]
        chosen = registry.select(op, fakes, names=preferred + [n for n in table if n not in preferred] if preferred else None)
        item = chosen.implementation
        masked = bound.get("key_valid") is not None
        forest = {
            name: hides_input(graph, fakes["padding"])
            if name == registry.PADDING_HIDES and masked
            else forest_input(graph, name + suffix_of(node))
            for name in item.forest_names(bound)
        }
        args, kwargs = registry.call(item, op, bound, forest)
        mark_lowered(node)
        why = "; ".join(f"not {name}: {reason}" for name, reason in chosen.rejected)
        context.kernels[registry.option_name(op)] = item.name + (f" ({why})" if why else "")
        node.target, node.args, node.kwargs = item.op, args, kwargs
        if item.output is not None:
            with graph.inserting_after(node):
                result = graph.call_function(operator.getitem, (node, item.output))
            node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)
            result.meta["val"] = node.meta.get("val")
            mark_lowered(result)
