"""Queries that see no key, under masks that hide by finite scores.

Softmax over equal scores gives such a query every key of its row alike, later ones included; library code in its "eager" form does that
at left padding. No token that is shared may depend on later ones, so a call in which such a query is computed runs densely.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from sp_compile.analysis.refusals import source_line
from sp_compile.capture.graphs import placeholders
from sp_compile.errors import CannotShare
from sp_compile.ops.blocking import BLOCKED
from sp_compile.passes.stage import Context, FiniteMask


@dataclasses.dataclass(frozen=True)
class HiddenQueries:
    """Finds the queries that one mask leaves without a key.

    Attributes:
        graph: computes the mask from inputs of the captured graph.
        arguments: their numbers.
        mask: what kind of mask it is.
    """

    graph: torch.fx.GraphModule
    arguments: tuple[int, ...]
    mask: FiniteMask

    def why_not(self, values: Sequence[Any], kept: torch.Tensor) -> CannotShare | None:
        """Why this batch cannot be shared, if a query that is computed (bool [B, L], true if it is) sees no key."""
        if not bool((kept & self.find(values, *kept.shape)).any()):
            return None
        return CannotShare(
            "a query at padding sees no key under a mask of finite scores, so it sees all keys of its row, later ones included",
            node=self.mask.node.name,
            source=source_line(self.mask.node),
            advice="Give the first real token of a left-padded row the label -100, or use attention with bool masks (sdpa).",
        )

    def find(self, values: Sequence[Any], rows: int, columns: int) -> torch.Tensor:
        """bool [B, L] on the CPU: true where a query of the row sees no key."""
        with torch.no_grad():
            given = self.graph(*(values[number] for number in self.arguments))
            found = self._without_any(given) if self.mask.matrix else self._without_keys((given != 0).reshape(rows, -1).cpu())
            return torch.nn.functional.pad(found, (0, columns - found.shape[-1]))  # the last columns may ask nothing

    def _without_keys(self, visible: torch.Tensor) -> torch.Tensor:
        if self.mask.local:
            return ~visible  # a query that is a key itself sees itself; for the others this is more than need be
        seen = visible.to(torch.int32).cumsum(1)
        if self.mask.window is not None and self.mask.window < visible.shape[1]:
            seen[:, self.mask.window :] -= seen[:, : -self.mask.window].clone()
        return seen == 0

    def _without_any(self, mask: torch.Tensor) -> torch.Tensor:
        size = mask.shape[-1]
        later = torch.ones(size, size, dtype=torch.bool, device=mask.device).triu(1)
        shown = mask if mask.dtype == torch.bool else mask > BLOCKED
        found = ~(shown & ~later).any(-1)  # [.., L]
        return found.reshape(-1, *found.shape[-2:]).any(1).cpu() if found.dim() > 2 else found.cpu()


def find_hidden_queries(context: Context, module: torch.fx.GraphModule) -> list[HiddenQueries]:
    """What has to be looked at in every call of a rewritten graph.

    Raises:
        CannotShare: a mask is made of activations, so that it is known too late.
    """
    found: dict[FiniteMask, HiddenQueries] = {}
    numbers = {node: number for number, node in enumerate(placeholders(context.analysis.graph))}
    for mask in context.finite:
        if mask not in found:
            graph, arguments = cut_out(mask.node, numbers)
            known = [context.analysis.nodes[node].tensors for node in context.analysis.nodes if node is mask.node]
            if not all(layout.entry for layouts in known for layout in layouts):
                raise CannotShare(
                    "padding is hidden by a finite score and made of activations",
                    node=mask.node.name,
                    advice="Hide keys with -inf or a bool mask, or make the mask of the inputs.",
                )
            found[mask] = HiddenQueries(torch.fx.GraphModule(module, graph, class_name="FiniteMask"), arguments, mask)
    return list(found.values())


def cut_out(wanted: torch.fx.Node, numbers: dict[torch.fx.Node, int]) -> tuple[torch.fx.Graph, tuple[int, ...]]:
    """The part of a captured graph that a value depends on, and the numbers of the inputs it reads."""
    needed, todo = set[torch.fx.Node](), [wanted]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    graph, env = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    arguments = [node for node in numbers if node in needed]
    for node in arguments:
        env[node] = graph.placeholder(node.name)
    for node in wanted.graph.nodes:
        if node in needed and node not in numbers:
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(env[wanted])
    graph.lint()
    return graph, tuple(numbers[node] for node in arguments)
