"""Selective activation checkpointing: the user's policy says per ATen op what backward recomputes.

The rewrite works on a flat graph whose nodes remember their checkpoint. Afterwards the nodes of one checkpoint become the body of torch's
own `tag_activation_checkpoint` again, so that AOTAutograd asks the policy as it would without this package. Where a node of the rewrite
stands between two halves of a body (its inputs come from one half, the other half reads it), each half is a body of its own.

    before   h = linear(x, w)   # tagged           after   pieces = tag_activation_checkpoint(checkpoint_0, x, w)
             y = relu(h)        # tagged                   y = pieces[0]
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils.checkpoint import CheckpointPolicy

POLICY = "sp_compile_policy"
"""Key of a node's `Selective` in its metadata."""

_SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)

_FUSED = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
          "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention")  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Selective:
    """One selective checkpoint of the captured graph.

    Attributes:
        number: unique in the process.
        context_fn: the user's function, which gives the contexts of forward and recomputation.
        options: the other keyword arguments of the checkpoint.
    """

    number: int
    context_fn: Callable[[], tuple[Any, Any]]
    options: dict[str, Any]

    def contexts(self) -> Callable[[], tuple[Any, Any]]:
        """The user's function, with a policy that takes this package's attention for the one that it stands for."""

        def make() -> tuple[Any, Any]:
            made = self.context_fn()
            for mode in made:
                policy = getattr(mode, "policy_fn", None)
                if callable(policy):
                    mode.policy_fn = functools.partial(_as_attention, policy)
            return made

        if hasattr(self.context_fn, "cache_hash"):
            make.cache_hash = self.context_fn.cache_hash  # type: ignore[attr-defined]
        return make


def _as_attention(policy: Callable[..., Any], context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """What the policy says of `op`; for an attention op of this package, whether it saves any of torch's fused ones."""
    said = policy(context, op, *args, **kwargs)
    if not (isinstance(op, torch._ops.OpOverload) and op.name().startswith("sp_compile::attention")) or said in _SAVES or said is True:
        return said
    for name in _FUSED:
        fused = getattr(torch.ops.aten, name).default
        found = policy(context, fused, *args, **kwargs)
        if found in _SAVES or found is True:
            return found
    return said


def outline(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph with its selective checkpoints as bodies of torch's op; the same module if it has none.

    Inputs keep their order and metadata.
    """
    home = _homes(module.graph)
    if not home:
        return module
    graph = torch.fx.Graph()
    held: dict[str, Any] = {}
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    for unit in _in_order(_Units(module.graph, home)):
        first = next(iter(unit))
        seen_outside = [node for node in unit if any(user not in unit for user in node.users)]
        if first in home and seen_outside:
            _outline_unit(graph, held, unit, seen_outside, home[first], env)
            continue
        for node in unit:
            env[node] = graph.node_copy(node, lambda n: env[n])
            if node.op == "get_attr":
                held[str(node.target)] = operator.attrgetter(str(node.target))(module)
    graph.lint()
    return torch.fx.GraphModule(held, graph, class_name=type(module).__name__)


def _homes(graph: torch.fx.Graph) -> dict[torch.fx.Node, Selective]:
    """The checkpoint of each node that goes into a body."""
    homes: dict[torch.fx.Node, Selective] = {}
    numbers: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if _is_number(node, numbers):
            numbers.add(node)
        elif _taken_from(node) in homes:
            homes[node] = homes[_taken_from(node)]
        elif POLICY in node.meta and node.op in ("call_function", "call_method"):
            homes[node] = node.meta[POLICY]
    return homes


def _taken_from(node: torch.fx.Node) -> Any:
    """The op with several results of which a node takes one; the tuple itself cannot leave a body."""
    return node.args[0] if node.op == "call_function" and node.target is operator.getitem else None


def _is_number(node: torch.fx.Node, numbers: set[torch.fx.Node]) -> bool:
    """Whether a node computes with sizes only; such nodes stay outside, so that bodies return tensors."""
    if node.op == "placeholder":
        return isinstance(node.meta.get("val"), torch.SymInt | int)
    return node.op == "call_function" and bool(node.all_input_nodes) and all(n in numbers for n in node.all_input_nodes)


class _Units:
    """A partition of a graph's nodes, one unit for each body and each other node, whose condensed graph has no cycle."""

    def __init__(self, graph: torch.fx.Graph, home: dict[torch.fx.Node, Selective]) -> None:
        self.members: list[dict[torch.fx.Node, None]] = []
        self.unit: dict[torch.fx.Node, int] = {}
        self.after: list[set[int]] = []
        latest: dict[Selective, int] = {}
        for node in graph.nodes:
            given = {self.unit[n] for n in node.all_input_nodes}
            chosen: int | None = latest.get(home[node]) if node in home else None
            if _taken_from(node) in home:
                chosen = self.unit[_taken_from(node)]
            if chosen is None or self._reaches(chosen, given - {chosen}):
                chosen = len(self.members)
                self.members.append({})
                self.after.append(set())
                if node in home:
                    latest[home[node]] = chosen
            self.members[chosen][node] = None
            self.unit[node] = chosen
            for other in given - {chosen}:
                self.after[other].add(chosen)

    def _reaches(self, start: int, goals: set[int]) -> bool:
        seen, pending = {start}, [start]
        while pending:
            for unit in self.after[pending.pop()]:
                if unit in goals:
                    return True
                if unit not in seen:
                    seen.add(unit)
                    pending.append(unit)
        return False


def _in_order(units: _Units) -> Iterator[dict[torch.fx.Node, None]]:
    """The units such that each follows those it reads, otherwise in the order of the graph."""
    waiting = [0] * len(units.members)
    for later in (unit for after in units.after for unit in after):
        waiting[later] += 1
    ready = [unit for unit, count in enumerate(waiting) if not count]
    while ready:
        chosen = heapq.heappop(ready)
        yield units.members[chosen]
        for later in units.after[chosen]:
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(ready, later)


def _outline_unit(
    graph: torch.fx.Graph,
    held: dict[str, Any],
    unit: dict[torch.fx.Node, None],
    results: list[torch.fx.Node],
    home: Selective,
    env: dict[torch.fx.Node, torch.fx.Node],
) -> None:
    """Adds one body, its call and its results to a graph."""
    given = list(dict.fromkeys(n for node in unit for n in node.all_input_nodes if n not in unit))
    body = torch.fx.Graph()
    inner: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in given:
        inner[node] = body.placeholder(node.name)
    for node in unit:
        inner[node] = body.node_copy(node, lambda n: inner[n])
    body.output(tuple(inner[node] for node in results))
    wrapped = torch.fx.GraphModule({}, body, class_name="Checkpointed")
    wrapped.meta["_checkpoint_context_fn"] = home.contexts()
    name = f"sp_compile_checkpoint_{len(held)}"
    held[name] = wrapped
    made = graph.call_function(tag_activation_checkpoint, (graph.get_attr(name), *(env[n] for n in given)), dict(home.options))
    for number, node in enumerate(results):
        env[node] = graph.call_function(operator.getitem, (made, number))
        env[node].meta = {key: value for key, value in node.meta.items() if key != POLICY}
