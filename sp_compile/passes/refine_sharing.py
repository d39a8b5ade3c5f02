"""Values that look ahead are computed on the forest refined by as many columns as they look.

What: decides for each value that reads k columns ahead, or lives on the first L - c columns, on which forest it is computed: two rows
share column l of the forest refined by k if they agree through column l + k. Labels, `roll`, `ids[:, 1:]` and the inputs of multi-token
prediction are of this kind, and so is what attention makes of them.
Why it is sound: the analysis knows how far each value reads; rows that agree as far hold the same value. Attention at column l reads what
its keys at earlier columns read, which is less far ahead. A value of the plain forest is the same in every refinement, so it is gathered.

    before   e = embedding(roll(ids, -1, 1))                         # [B, L, H], reads one column ahead
             x = linear(cat([hidden, e], -1))
    after    e = embedding(pack(roll(ids, -1, 1), row@1-0, column@1-0, index@1-0, 'B L'))
             h = regather(hidden, places(index, row@1-0, column@1-0, 0, False), 'B L _')
             x = linear(cat([h, e], -1))                             # [1, T@1-0, H]

Leaves alone: values that look ahead and meet no parameters (picked log-probabilities), which are cheap on rows, and all that is written
in place. This pass changes no node: `share_prefixes` writes the graph that it decided on.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import ClassVar

import sympy
import torch
import torch.fx

from sp_compile.analysis.interpret import NodeInfo
from sp_compile.analysis.layouts import Kind, Layout, Span, Symbols
from sp_compile.errors import CannotShare
from sp_compile.ops import refined
from sp_compile.passes.forms import Form, pattern_of, scatterable
from sp_compile.passes.stage import Context, PassResult, Stage, forest_input


@dataclasses.dataclass(frozen=True)
class RefineSharing:
    """The pass; see the module's docstring."""

    name: str = "refine_sharing"
    requires: Stage = Stage.CAPTURED
    provides: Stage = Stage.CAPTURED

    def __call__(self, graph: torch.fx.Graph, context: Context) -> PassResult:
        infos, symbols = context.analysis.nodes, context.analysis.symbols
        context.refine = not symbols.packed
        found = [own_world(info.tensors, symbols) for info in infos.values() if info.attention is not None]
        return PassResult(graph, sum(world is not World.PACKED for world in found))


@dataclasses.dataclass(frozen=True)
class World:
    """Where a value is computed: on rows, or on the tokens of a forest.

    Attributes:
        value: "rows", or "packed" for a forest.
        ahead: k of the forest refined by k.
        cut: how many of the last columns are left out.
    """

    value: str
    ahead: int = 0
    cut: int = 0

    ROWS: ClassVar[World]
    PACKED: ClassVar[World]

    @property
    def suffix(self) -> str:
        """What is added to the names of forest tensors."""
        return f"@{self.ahead}-{self.cut}" if self.ahead or self.cut else ""


World.ROWS, World.PACKED = World("rows"), World("packed")


def forest_world(ahead: int, cut: int) -> World:
    return World("packed", ahead, cut) if ahead or cut else World.PACKED


def own_world(layouts: Sequence[Layout], symbols: Symbols) -> World | None:
    """The coarsest forest on which values are shared, or None if there is none."""
    ahead, cuts = 0, set[int]()
    for layout in layouts:
        ahead = max(ahead, layout.reach.shift)
        for factor in layout.column_like:
            cut = symbols.columns - factor.size if isinstance(factor, Span) else sympy.Integer(0)
            if not cut.is_Integer or cut < 0:
                return None
            cuts.add(int(cut))
    return forest_world(ahead, cuts.pop() if cuts else 0) if len(cuts) <= 1 else None


@dataclasses.dataclass(frozen=True)
class Forested:
    """The nodes that describe one forest in a graph: row, column [T] and index [B, L - cut], T, and T + cut, which stands for L."""

    row: torch.fx.Node
    column: torch.fx.Node
    index: torch.fx.Node
    tokens: torch.fx.Node
    columns: torch.fx.Node


def add_forest(graph: torch.fx.Graph, world: World) -> Forested:
    """Appends the nodes of a refined forest."""
    row, column, index = (forest_input(graph, f"{name}{world.suffix}") for name in ("row", "column", "index"))
    if world.cut:
        index = graph.call_function(operator.getitem, (index, (slice(None), slice(None, -world.cut))))
    count = graph.call_method("size", (row, 0))
    columns = graph.call_function(operator.add, (count, world.cut)) if world.cut else count
    return Forested(row, column, index, count, columns)


class Forests:
    """The forests that a graph computes on; refined ones are made when they are first asked for, and noted in `refined`."""

    def __init__(self, graph: torch.fx.Graph, plain: Forested, refined: list[tuple[int, int]]) -> None:
        self.graph, self.refined = graph, refined
        self.known = {World.PACKED: plain}

    def of(self, world: World) -> Forested:
        if world not in self.known:
            self.known[world] = add_forest(self.graph, world)
            self.refined.append((world.ahead, world.cut))
        return self.known[world]

    def regather(self, value: torch.fx.Node, layout: Layout | None, home: World, world: World, offset: int, wraps: bool) -> torch.fx.Node:
        """Appends the value of a coarser forest, `offset` columns ahead, at the tokens of a finer one."""
        if layout is None or not scatterable(layout):
            raise CannotShare("a value that is not one per token crosses to a refined forest", node=value.name)
        source, target = self.of(home), self.of(world)
        where = self.graph.call_function(refined.places, (source.index, target.row, target.column, offset, wraps))
        return self.graph.call_function(refined.regather, (value, where, pattern_of(layout.dims)))


class Homes:
    """On which forest each node of a graph is computed.

    A node that looks ahead has a home of its own if it, or what it is made of, is attention or meets a parameter, and nothing that looks
    further joins it there (labels do); others run wherever they are wanted. What only moves columns is had by gathering what it moves.
    """

    def __init__(
        self,
        order: Sequence[torch.fx.Node],
        infos: Mapping[torch.fx.Node, NodeInfo],
        forms: Mapping[torch.fx.Node, Form],
        symbols: Symbols,
    ) -> None:
        self.infos, self.forms = infos, forms
        self.own: dict[torch.fx.Node, World | None] = {}
        self.deep: dict[torch.fx.Node, World] = {}
        for node in order:
            self.own[node] = own_world(infos[node].tensors, symbols)
            if self._has_home(node):
                self.deep[node] = self.own[node] or World.PACKED

    def _operands(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        return [a for a in node.all_input_nodes if self.infos[a].tensors]

    def _has_home(self, node: torch.fx.Node) -> bool:
        info, world = self.infos[node], self.own[node]
        if self.forms[node] is not Form.DIRECT or world in (None, World.PACKED) or all(t.entry for t in info.tensors):
            return False
        operands = self._operands(node)
        inherits = any(self.deep.get(a) == world for a in operands)
        ahead = any(self.forms[a] is not Form.MOVED and self._looks_ahead(a) for a in operands)
        return info.attention is not None or info.scan is not None or inherits or (ahead and any(map(self._is_weight, operands)))

    def _looks_ahead(self, node: torch.fx.Node) -> bool:
        return any(t.reach.kind is Kind.TOKENS and t.reach.shift > 0 for t in self.infos[node].tensors)

    def _is_weight(self, node: torch.fx.Node) -> bool:
        info = self.infos[node]
        plain = all(not t.has_tokens and t.reach.kind is Kind.UNIFORM for t in info.tensors)
        return plain and isinstance(info.value, torch.Tensor) and info.value.is_floating_point() and info.value.dim() >= 2

    def _follows(self, node: torch.fx.Node) -> bool:
        """Whether a node's value belongs to the forest on which it is used: places of sorted tokens, or what reads no tokens."""
        return any(t.sorted for t in self.infos[node].tensors) or all(t.reach.kind <= Kind.COLUMN for t in self.infos[node].tensors)

    def source(self, node: torch.fx.Node) -> tuple[torch.fx.Node, int, bool]:
        """What a node moves: the node that computes it, by how many columns, and whether columns wrap around."""
        offset, wraps = 0, False
        while self.forms[node] is Form.MOVED:
            move = self.infos[node].moves.total
            assert move is not None, "a moved node has a move"
            offset, wraps = offset + move.by, wraps or move.wraps
            node = node.args[0]  # type: ignore[assignment]
        return node, offset, wraps

    def of(self, node: torch.fx.Node) -> World:
        """The forest on which a node's value is, seen from the rows."""
        return self.deep.get(node, World.PACKED)

    def on_rows(self, node: torch.fx.Node) -> bool:
        """Whether a node's rows are computed on rows although it could be packed."""
        return self.own[node] is not World.PACKED and node not in self.deep

    def elsewhere(self, node: torch.fx.Node, world: World) -> tuple[torch.fx.Node, World] | None:
        """The node and forest that a node's value on the forest `world` is gathered from; None if it is computed there.

        Raises:
            CannotShare: it can be had on no forest of these columns.
        """
        base, _, _ = self.source(node)
        own = self.own[base]
        lacks = own is None or own.cut != world.cut or own.ahead > world.ahead
        if own is None or (lacks and base is node and own is not World.PACKED):
            raise CannotShare("a value is needed on other columns than it has", op=str(base.target), node=base.name)
        home = self.deep.get(base, own)
        if base is node and node not in self.deep and (own is not World.PACKED or self._follows(node)):
            home = world
        return None if base is node and home == world else (base, home)
