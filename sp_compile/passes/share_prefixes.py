"""Turns the dense graph on [B, L] into one on [1, T] physical tokens.

What: every value that is provably equal in all rows through its token is computed once per physical token.
Why it is sound: the analysis gives each value its token axes and its reach; a node is copied into the packed graph only if its op was
judged packable and all its operands are packed the same way. Values that only depend on inputs may be computed on rows and gathered
at the entry. Anything else runs on rows, behind an `unpack` of what it reads; a mixer (attention) never does.

    before   hidden = embedding(ids, w)                              # [B, L, H]
             q = linear(hidden, wq).view(B, L, -1, 16).transpose(1, 2)
             out = scaled_dot_product_attention(q, k, v, is_causal=True)
    after    ids_packed = pack(ids, row, column, index, 'B L')       # [1, T]
             hidden = embedding(ids_packed, w)                       # [1, T, H]
             q = linear(hidden, wq).view(1, T, -1, 16).transpose(1, 2)
             out = shared_attention(q, k, v, ...)                    # no forest yet
             logits_rows = unpack(logits, index, 'B L _')            # what the caller sees

Refuses: a mixer whose operands are not shared, random numbers per token, a gradient per row, a graph that shares nothing.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

import sympy
import torch
import torch.fx

from sp_compile.analysis import recurrences
from sp_compile.analysis.facts import Nonzero
from sp_compile.analysis.interpret import Analysis, NodeInfo
from sp_compile.analysis.layouts import Kind, Reason
from sp_compile.analysis.refusals import refusal, source_line
from sp_compile.analysis.sites import MIXERS
from sp_compile.capture.checkpoint import copy_tags
from sp_compile.capture.graphs import placeholders
from sp_compile.errors import CannotShare, NothingToShare
from sp_compile.ops import paths as _paths  # noqa: F401  (registers sp_compile::path_segments)
from sp_compile.ops import tokens
from sp_compile.passes import markers
from sp_compile.passes.forms import Form, find_forms, inputs_read, pattern_of, scatterable
from sp_compile.passes.numbers import has_unbacked, is_number, scaled_query, write_number
from sp_compile.passes.reasons import why_not
from sp_compile.passes.refine_sharing import Forested, Forests, Homes, World
from sp_compile.passes.shared_scans import emit_scan, padding_masks
from sp_compile.passes.stage import (
    Context,
    FiniteMask,
    Input,
    Origin,
    PassResult,
    Source,
    Stage,
    forest_input,
    set_input,
    set_origin,
    set_suffix,
)


@dataclasses.dataclass(frozen=True)
class SharePrefixes:
    """The pass; see the module's docstring."""

    name: str = "share_prefixes"
    requires: Stage = Stage.CAPTURED
    provides: Stage = Stage.PACKED

    def __call__(self, graph: torch.fx.Graph, context: Context) -> PassResult:
        analysis = context.analysis
        if analysis.random is not None:
            raise refusal(analysis.random)
        rewrite = _Rewrite(graph, analysis, context)
        rewrite.find_needs()
        if not rewrite.shares_anything():
            raise NothingToShare("the graph computes nothing that rows with a common prefix could share")
        result = rewrite.emit()
        context.keys = sorted(rewrite.keys)
        return PassResult(result, rewrite.packed_count)


class _Rewrite:
    def __init__(self, graph: torch.fx.Graph, analysis: Analysis, context: Context) -> None:
        self.graph, self.analysis, self.context = graph, analysis, context
        self.info = analysis.nodes
        self.order = list(graph.nodes)
        self.by_name = {node.name: node for node in self.order}
        self.numbers = {node: i for i, node in enumerate(placeholders(graph))}
        self.packed = analysis.symbols.packed
        self.forms = find_forms(self.order, self.info, self.packed, context.refine)
        self.homes = Homes(self.order, self.info, self.forms, analysis.symbols)
        self.depends = inputs_read(self.order, self.info, self.numbers)
        self.needs: dict[torch.fx.Node, set[World]] = {}
        self.made: dict[tuple[torch.fx.Node, World], torch.fx.Node] = {}
        self.turned: dict[tuple[torch.fx.Node, World, int], torch.fx.Node] = {}
        self.epoch = 0
        self.keys: set[int] = set()
        self.new = torch.fx.Graph()
        self.sizes: dict[sympy.Symbol, torch.fx.Node] = {}
        self.packed_count = 0

    # -- which worlds are needed -----------------------------------------------------------------------------------------------

    def find_needs(self) -> None:
        inputs = set().union(*(self.info[node].storages for node in self.numbers), set())
        changed = True
        while changed:
            changed = False
            live: dict[World, set[int]] = collections.defaultdict(set)
            for node, worlds in self.needs.items():
                for world in worlds:
                    if world is World.ROWS or self.forms[node] is Form.DIRECT:  # else what is read on tokens is the memory of the rows
                        live[world] |= self.info[node].storages
            for node in reversed(self.order):
                wanted = set(self.needs.get(node, ()))
                if self._is_root(node) or self.info[node].writes & inputs:
                    wanted.add(World.ROWS)
                wanted |= {world for world, memory in live.items() if self.info[node].writes & memory}
                for world in wanted:
                    changed |= self._want(node, world)

    def _is_root(self, node: torch.fx.Node) -> bool:
        info = self.info[node]
        return node.op == "output" or (
            node.op in ("call_function", "call_method") and not info.tensors and not info.writes and not is_number(info.value)
        )

    def _want(self, node: torch.fx.Node, world: World) -> bool:
        """Records a need and what follows from it; True if anything was new."""
        have = self.needs.setdefault(node, set())
        if world in have and node.op != "output":
            return False
        fresh = world not in have
        have.add(world)
        for other, other_world in self._follows(node, world):
            fresh |= self._want(other, other_world)
        return fresh

    def _follows(self, node: torch.fx.Node, world: World) -> Iterable[tuple[torch.fx.Node, World]]:
        info, form = self.info[node], self.forms[node]
        tensors = [a for a in node.all_input_nodes if self._is_value(a)]
        if node.op == "output" and self.packed:
            for a in tensors:
                if any(t.sorted for t in self.info[a].tensors):
                    raise refusal(Reason("sorted tokens, or counts of them, leave a packed call", str(a.target), a.name, source_line(a)))
            return [(a, World.PACKED) for a in tensors]
        if world is World.ROWS:
            if self._runs_on_rows(node):
                if info.scan is not None and info.scan.final:
                    return [(self.by_name[name], World.PACKED) for name in info.scan.names]
                if node.target in MIXERS or node.target in recurrences.RULES or info.attention is not None:
                    raise refusal(why_not(node, self.info, self.forms))
                return [(a, World.ROWS) for a in tensors]
            return [(node, self.homes.of(node))]
        if form is Form.COMMON or form is Form.GATHER:
            return [(node, World.ROWS)]
        if form is Form.NONE:
            raise refusal(why_not(node, self.info, self.forms))
        elsewhere = self.homes.elsewhere(node, world)
        if elsewhere is not None:
            return [elsewhere]
        if info.attention is not None:
            return [(self.by_name[name], world) for name in self._attention_names(info)]
        if info.scan is not None:
            return [(self.by_name[name], world) for name in info.scan.names]
        if info.segments is not None:
            return [(self.by_name[info.segments], World.PACKED)]
        return [(a, world) for a in tensors]

    def _is_value(self, node: torch.fx.Node) -> bool:
        """Whether a node holds something to be computed, not a size that is written out from its symbols."""
        return not is_number(self.info[node].value) or has_unbacked(self.info[node].value, self.analysis)

    def _runs_on_rows(self, node: torch.fx.Node) -> bool:
        form, layouts = self.forms[node], self.info[node].tensors
        if self.packed and form is Form.DIRECT:
            return False
        cheap = all(t.entry or t.reach.kind <= Kind.COLUMN for t in layouts)
        # what is sorted cannot be unpacked: rows that are wanted in sorted order have to be sorted themselves
        return form is not Form.DIRECT or cheap or any(t.sorted for t in layouts) or self.homes.on_rows(node)

    def _attention_names(self, info: NodeInfo) -> list[str]:
        call = info.attention
        assert call is not None, "asked of attention nodes only"
        names = [call.q, call.k, call.v, call.sinks, call.bias, call.mask.padding, call.mask.segments, call.mask.matrix]
        return [name for name in names if name is not None]

    def shares_anything(self) -> bool:
        direct = [node for node, worlds in self.needs.items() if worlds - {World.ROWS} and self.forms[node] is Form.DIRECT]
        return self.packed or any(not t.entry for node in direct for t in self.info[node].tensors)

    # -- the new graph -----------------------------------------------------------------------------------------------------------

    def emit(self) -> torch.fx.Graph:
        symbols = self.analysis.symbols
        self.tokens = self._placeholder("T", Input(Source.TOKENS))
        self.sizes[symbols.batch] = self._placeholder("B", Input(Source.ROWS))
        self.sizes[symbols.columns] = self._placeholder("L", Input(Source.COLUMNS))
        for node, number in self.numbers.items():
            value = self.info[node].value
            if isinstance(value, torch.SymInt):
                if value.node.expr.is_Symbol and value.node.expr not in self.sizes:
                    self.sizes[value.node.expr] = self._placeholder(node.name, Input(Source.SIZE, number))
            elif self.needs.get(node):
                world = World.PACKED if self.forms[node] is Form.DIRECT else World.ROWS
                self.made[node, world] = self._placeholder(node.name, Input(Source.ARGUMENT, number))
        self.row, self.column, self.index = (self._placeholder(f"forest_{n}", Input(Source.FOREST, n)) for n in ("row", "column", "index"))
        self.forests = Forests(self.new, Forested(self.row, self.column, self.index, self.tokens, self.tokens), self.context.refined)
        for node in self.order:
            if node.op in ("placeholder", "output"):
                continue
            worlds = self.needs.get(node, set())
            if self.info[node].once and len(worlds - ({World.ROWS} if not self._runs_on_rows(node) else set())) > 1:
                text = "a function that gives a gradient of its own to a value of all tokens is needed both on rows and on tokens"
                raise refusal(Reason(text, str(node.target), node.name, source_line(node)))
            if World.ROWS in worlds and self._runs_on_rows(node):
                self._copy(node, World.ROWS)
            for world in sorted(worlds - {World.ROWS}, key=lambda one: one.suffix) if self.forms[node] is Form.DIRECT else ():
                if self.homes.elsewhere(node, world) is None:
                    self._copy(node, world)
                    self.packed_count += 1
            if worlds and (self.info[node].writes or not self.info[node].tensors):
                self.epoch += 1
        output = next(node for node in self.order if node.op == "output")
        if self.context.trailing and not self.context.padding:
            self.context.padding += [self.numbers.get(self.by_name[name]) for name in padding_masks(self.order, self.info)]
        home = World.PACKED if self.packed else World.ROWS
        self.new.output(torch.fx.map_arg(output.args[0], lambda n: self._at(n, home, output)))
        return self.new

    def _placeholder(self, name: str, given: Input) -> torch.fx.Node:
        made = self.new.placeholder(name)
        set_input(made, given)
        return made

    def _copy(self, node: torch.fx.Node, world: World) -> None:
        info = self.info[node]
        last = next(iter(reversed(self.new.nodes)))
        if world is not World.ROWS and info.attention is not None:
            made = self._attention(node, info, world)
        elif info.scan is not None:
            made = self._scan(node, info.scan, World.PACKED if world is World.ROWS else world)
        elif world is World.PACKED and info.segments is not None:
            made = self._segments(node, info.segments)
        else:
            args = torch.fx.map_arg(node.args, lambda n: self._operand(n, world, node))
            kwargs = torch.fx.map_arg(node.kwargs, lambda n: self._operand(n, world, node))
            made = self.new.create_node(node.op, node.target, args, kwargs, self._name(node, world))
        while last is not made:
            last = last.next
            self._describe(last, node)
        set_origin(made, Origin(node.name, world is not World.ROWS, world.ahead, world.cut))
        self.made[node, world] = made

    @staticmethod
    def _describe(made: torch.fx.Node, node: torch.fx.Node) -> None:
        if "stack_trace" in node.meta:
            made.meta["stack_trace"] = node.meta["stack_trace"]
        copy_tags(node, made)

    def _name(self, node: torch.fx.Node, world: World) -> str:
        both = {World.ROWS, World.PACKED} <= self.needs[node] and self.forms[node] is Form.DIRECT and self._runs_on_rows(node)
        return f"{node.name}_packed" if both and world is World.PACKED else node.name

    def _operand(self, operand: torch.fx.Node, world: World, user: torch.fx.Node) -> Any:
        if not self._is_value(operand):
            info = self.info[user]
            return self._number(operand, world if info.shapes or not info.numbers else World.ROWS)
        return self._at(operand, world, user)

    def _at(self, node: torch.fx.Node, world: World, user: torch.fx.Node) -> Any:
        """A node's value in one world, converted where it was computed in the other."""
        if not self._is_value(node):
            return self._number(node, world)
        if world is World.ROWS:
            if self._runs_on_rows(node):
                return self.made[node, World.ROWS]
            return self._converted(node, World.ROWS, user)
        form = self.forms[node]
        if form is Form.COMMON:
            return self.made[node, World.ROWS]
        if form is Form.GATHER:
            return self._converted(node, world, user)
        elsewhere = self.homes.elsewhere(node, world)
        return self.made[node, world] if elsewhere is None else self._regathered(node, elsewhere, world, user)

    def _converted(self, node: torch.fx.Node, world: World, user: torch.fx.Node) -> torch.fx.Node:
        key = (node, world, self.epoch)
        if key in self.turned:
            return self.turned[key]
        layout = self.analysis.layout(node)
        if layout is None:
            raise CannotShare("a value of several tensors crosses between rows and tokens", op=str(node.target), node=node.name)
        if world is World.ROWS and self.packed and self.info[user].token_sum is None:
            raise refusal(Reason("an op needs the rows of values that are packed", str(user.target), user.name, source_line(user)))
        if world is World.ROWS and not self.packed and not scatterable(layout):
            text, advice = "a value of pairs of tokens is needed on rows", "Return none from the model."
            raise refusal(Reason(text, str(node.target), node.name, source_line(node), advice))
        pattern = pattern_of(layout.dims)
        if world is not World.ROWS:
            self.keys |= self.depends[node]
            self.context.ahead_keys |= self.depends[node] if layout.reach.shift > 0 else frozenset()
            forest = self.forests.of(world)
            index = self.index if world.cut and not layout.has_spans else forest.index  # for its columns: those of the value
            made = self.new.call_function(tokens.pack, (self.made[node, World.ROWS], forest.row, forest.column, index, pattern))
        else:
            if user.op != "output":
                self.context.unpacked.append(f"{node.name} for {user.name}")
            home = self.homes.of(node)
            made = self.new.call_function(tokens.unpack, (self.made[node, home], self.forests.of(home).index, pattern))
        copy_tags(user, made)
        made.name = self.new._graph_namespace.create_name(f"{node.name}_{world.value}", made)
        self.turned[key] = made
        return made

    def _number(self, node: torch.fx.Node, world: World) -> Any:
        """A size or number written out from its symbols, physical in the packed world."""
        sizes: dict[sympy.Symbol, int | torch.fx.Node] = dict(self.sizes)
        if world is not World.ROWS:
            sizes |= {self.analysis.symbols.batch: 1, self.analysis.symbols.columns: self.forests.of(world).columns}
        return write_number(self.info[node].value, sizes)

    def _regathered(self, node: torch.fx.Node, source: tuple[torch.fx.Node, World], world: World, user: torch.fx.Node) -> torch.fx.Node:
        """A node's value on one forest, gathered from another one."""
        key = (node, world, self.epoch)
        if key not in self.turned:
            _, offset, wraps = self.homes.source(node)
            if offset:
                self.context.padding.append(None)  # what stands ahead of the last token is read
            self.turned[key] = self.forests.regather(self.made[source], self.analysis.layout(source[0]), source[1], world, offset, wraps)
            copy_tags(user, self.turned[key])
        return self.turned[key]

    def _attention(self, node: torch.fx.Node, info: NodeInfo, world: World) -> torch.fx.Node:
        call = info.attention
        assert call is not None, "asked of attention nodes only"

        def packed(name: str | None) -> Any:
            return None if name is None else self._at(self.by_name[name], world, node)

        written = set[int]().union(*(other.writes for other in self.info.values()))
        for name in (call.mask.padding, call.mask.segments, call.mask.matrix if call.mask.finite else None):
            if name is not None and self.info[self.by_name[name]].storages & written:
                why = Reason("what an attention mask was made of is changed in place", str(node.target), node.name, source_line(node))
                raise refusal(dataclasses.replace(why, advice="Clone it before the change."))
        padding = packed(call.mask.padding)
        if padding is not None:
            padding = self.new.call_method("ne", (padding, 0))
            padding = self.new.call_method("reshape", (padding, 1, self.forests.of(world).tokens))
        self.context.padding.append(self._padding_input(call.mask.padding or call.mask.alone))
        matrix, bias = (self._four_dimensions(packed(name), name) for name in (call.mask.matrix, call.bias))
        if matrix is not None and bias is not None:
            raise CannotShare("attention with both an opaque mask and a bias", op=str(node.target), node=node.name)
        windows = [w for w in (call.window, call.mask.window) if w is not None]
        hides = call.mask.padding if call.mask.told else call.mask.matrix
        if call.mask.finite and hides is not None:
            local = call.mask.chunk is not None or call.mask.segments is not None
            self.context.finite.append(FiniteMask(self.by_name[hides], not call.mask.told, min(windows, default=None), local))
        q, k, v = (self._cast(packed(name), name, call.dtype) for name in (call.q, call.k, call.v))
        q, scale = scaled_query(q, call.scale, self.sizes)
        made = self.new.call_function(
            markers.shared_attention,
            (q, k, v, padding, packed(call.mask.segments), matrix if matrix is not None else bias, packed(call.sinks)),
            {"scale": scale, "window": min(windows) if windows else None, "chunk": call.mask.chunk, "softcap": call.softcap},
        )
        set_suffix(made, world.suffix, self._padding_input(call.mask.padding))
        made = self.new.call_method("contiguous", (self.new.call_method("transpose", (made, 1, 2)),))
        return self.new.call_method("transpose", (made, 1, 2)) if call.heads_first else made

    def _scan(self, node: torch.fx.Node, call: recurrences.ScanCall, world: World) -> torch.fx.Node:
        self.context.trailing = True
        if call.final:
            self.context.padding.append(None)  # the state after the last column has read every pad

        def packed(name: str) -> tuple[torch.fx.Node, torch.dtype]:
            return self._at(self.by_name[name], world, node), self.info[self.by_name[name]].value.dtype

        return emit_scan(self.new, call, packed, self.index, world.suffix)

    def _segments(self, node: torch.fx.Node, positions: str) -> torch.fx.Node:
        """Document numbers counted along each row's path; in the packed order a position may jump where a branch begins."""
        given = self._at(self.by_name[positions], World.PACKED, node)
        return self.new.call_function(torch.ops.sp_compile.path_segments.default, (given, forest_input(self.new, "prev")))

    def _cast(self, value: torch.fx.Node, name: str, dtype: torch.dtype) -> torch.fx.Node:
        """Autocast casts inside of torch's attention; the op on physical tokens takes one dtype."""
        return value if self.info[self.by_name[name]].value.dtype == dtype else self.new.call_method("to", (value, dtype))

    def _four_dimensions(self, value: Any, name: str | None) -> Any:
        """[T, T] and [H, T, T] as the op takes them; a mask's leading dimensions broadcast."""
        layout = self.analysis.layout(self.by_name[name]) if name is not None else None
        for _ in range(4 - len(layout.dims) if layout is not None else 0):
            value = self.new.call_method("unsqueeze", (value, 0))
        return value

    def _padding_input(self, name: str | None) -> int | None:
        layout = self.analysis.layout(self.by_name[name]) if name is not None else None
        return self.numbers.get(self.by_name[layout.fact.node]) if layout is not None and isinstance(layout.fact, Nonzero) else None
