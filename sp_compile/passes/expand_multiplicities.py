"""A reduction over all tokens counts each physical token as many times as rows pass through it.

What: `sum`, `mean`, counts, norms and scattered sums over the rows of a packed value read the packed value itself, weighted by the
forest's `count`; the rows are not made.
Why it is sound: the rows hold the value of physical token i exactly `count[i]` times (positions that were dropped hold zero, and are
dropped only if what is reduced is zero there); the analysis proved that all tokens are reduced, each equally often.

    before   load = unpack(experts, index, 'B*L _')                  # [B * L, 2]
             counts = histc(load, 8, 0, 7)
             used = mean(unpack(probs, index, 'B*L _'), 0)           # [8]
    after    counts = token_histc(experts, count, 'B*L _', 8)
             used = token_mean(probs, count, index, 'B*L _', [0], False, None)

Leaves alone: reductions per row, reductions of rows that are no packed value, and functions without a weighted form; those see rows.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
import torch.fx

from sp_compile.analysis import token_sums
from sp_compile.analysis.facts import Constant
from sp_compile.analysis.interpret import NodeInfo
from sp_compile.analysis.layouts import Kind, Layout
from sp_compile.analysis.permutations import Integers
from sp_compile.analysis.token_sums import TokenSum
from sp_compile.capture.checkpoint import copy_tags
from sp_compile.capture.graphs import placeholders
from sp_compile.errors import CannotShare, InvalidOption
from sp_compile.ops import multiplicity, tokens
from sp_compile.passes import zeros
from sp_compile.passes.stage import Context, PassResult, Source, Stage, forest_input, input_of, origin_of, set_origin


@dataclasses.dataclass(frozen=True)
class ExpandMultiplicities:
    """The pass; see the module's docstring.

    Attributes:
        count_padding: whether row padding counts; None: as in the dense graph.
    """

    count_padding: bool | None = None
    name: str = "expand_multiplicities"
    requires: Stage = Stage.FORKED
    provides: Stage = Stage.COUNTED

    def __call__(self, graph: torch.fx.Graph, context: Context) -> PassResult:
        expand = _Expand(graph, context, self.count_padding)
        changed = sum(expand.visit(node) for node in list(graph.nodes))
        if self.count_padding is not None and not changed:
            raise InvalidOption("option count_padding is set, but the graph has no reduction over tokens that are shared")
        expand.clean()
        left = next((node for node in graph.nodes if node.target is tokens.unpack), None) if context.analysis.symbols.packed else None
        if left is not None:
            raise CannotShare("a reduction over packed tokens has no form that counts rows", node=next(iter(left.users)).name)
        return PassResult(graph, changed)


@dataclasses.dataclass(frozen=True)
class _Packed:
    """A rows value that is one packed value, or holds its elements in another order."""

    values: torch.fx.Node
    index: torch.fx.Node
    pattern: str
    rows: torch.fx.Node


_ORDERED = frozenset({"float", "double", "int", "long", "to", "view", "reshape", "flatten", "contiguous", "detach", "clone"})
_SPARE = frozenset({operator.getitem, torch.flatten, torch.ones_like, torch.full_like, torch.ones})


class _Expand:
    def __init__(self, graph: torch.fx.Graph, context: Context, count_padding: bool | None) -> None:
        self.graph, self.context, self.count_padding = graph, context, count_padding
        self.info = {node.name: info for node, info in context.analysis.nodes.items()}
        self.numbers = {node.name: number for number, node in enumerate(placeholders(context.analysis.graph))}
        self.counts: dict[torch.fx.Node, torch.fx.Node] = {}
        self.before: torch.fx.Node | None = None

    # -- what there is ---------------------------------------------------------------------------------------------------------

    def _of(self, node: torch.fx.Node) -> NodeInfo | None:
        """What the analysis knows of the value that a node computes."""
        if node.op == "placeholder":
            given = input_of(node)
            names = list(self.numbers)
            return self.info[names[int(given.key)]] if given.source is Source.ARGUMENT else None
        origin = origin_of(node)
        return self.info.get(origin.dense) if origin is not None else None

    def _layout(self, node: torch.fx.Node) -> Layout | None:
        info = self._of(node)
        return info.layouts[0] if info is not None and len(info.layouts) == 1 else None

    def _packed(self, node: Any, ordered: bool = True) -> _Packed | None:
        """The packed value behind a rows value; without `ordered`, sorting and regrouping of its elements may stand between."""
        while isinstance(node, torch.fx.Node):
            if node.target is tokens.unpack:
                values, index, pattern = node.args
                assert isinstance(values, torch.fx.Node), "physical tokens are computed"
                assert isinstance(index, torch.fx.Node), "the index is an input"
                return _Packed(values, index, str(pattern), node) if _forest_index(index) is not None else None
            if ordered:
                return None
            sort = node.target is operator.getitem and node.args[1] == 0 and _is_sort(node.args[0])
            if sort:
                node = node.args[0].args[0]  # type: ignore[union-attr]
            elif node.op == "call_method" and node.target in _ORDERED:
                node = node.args[0]
            else:
                return None
        return None

    # -- one reduction ---------------------------------------------------------------------------------------------------------

    def visit(self, node: torch.fx.Node) -> int:
        origin = origin_of(node)
        info = self._of(node) if origin is not None and not origin.packed and node.op != "placeholder" else None
        if info is None or info.token_sum is None:
            return 0
        found = token_sums.read(node.target, node.args, node.kwargs, lambda _: 0)
        if found is None:
            return 0
        call = dataclasses.replace(found, dims=info.token_sum.dims)
        self.before = node
        zero = self._scatter(node, call) if call.name in token_sums.SCATTERS else self._reduce(node, call)
        if zero is None:
            return 0
        hidden = zeros.masks(zero, self._layout) if isinstance(zero, torch.fx.Node) else frozenset[str]()
        self.context.counted.append(frozenset(self.numbers[name] for name in hidden if name in self.numbers))
        if self.count_padding is False:
            self.context.counted[-1] |= {self._mask_number()}
        return 1

    def _call(self, target: Any, *args: Any) -> torch.fx.Node:
        assert self.before is not None, "inside of a visit"
        with self.graph.inserting_before(self.before):
            made = self.graph.call_function(target, args)
        if "stack_trace" in self.before.meta:
            made.meta["stack_trace"] = self.before.meta["stack_trace"]
        copy_tags(self.before, made)
        return made

    def _reduce(self, node: torch.fx.Node, call: TokenSum) -> torch.fx.Node | int | None:
        """Replaces a reduction; returns what has to be zero at dropped padding (0: nothing may be dropped), or None if it stays."""
        counts = call.name in ("histc", "bincount")
        operand = self._packed(call.operand, ordered=not counts)
        if operand is None:
            return None
        made = self._counted(node, call, operand) if counts else self._summed(call, operand)
        if made is None:
            return None
        self._replace(node, made, operand)
        if call.name == "bincount" and call.given.get("weights") is not None:
            return self._packed(call.given["weights"]).values  # type: ignore[union-attr]
        vanishing = ("sum", "nansum", "mean", "count_nonzero")
        finite_norm = call.name in ("norm", "vector_norm") and token_sums.order_of(call) not in (float("inf"), float("-inf"))
        return operand.values if call.name in vanishing or finite_norm else 0

    def _counted(self, node: torch.fx.Node, call: TokenSum, operand: _Packed) -> torch.fx.Node | None:
        count = self._count(operand.index)
        if call.name == "histc":
            fact = getattr(self._layout(operand.values), "fact", None)
            bins, low, high = (call.given.get(key, default) for key, default in (("bins", 100), ("min", 0), ("max", 0)))
            if not isinstance(fact, Integers) or fact.below > bins or low != 0 or high not in (bins - 1, bins):
                return None
            return self._call(multiplicity.token_histc, operand.values, count, operand.pattern, bins, self._dtype(node))
        given, minlength = call.given.get("weights"), call.given.get("minlength", 0)
        if given is None:
            flat = self._call(torch.flatten, operand.values)
            pattern = operand.pattern if " " not in operand.pattern else None
            return None if pattern is None else self._call(multiplicity.token_bincount, flat, count, pattern, None, minlength)
        weights = self._packed(given)
        if weights is None or weights.index is not operand.index or weights.pattern != operand.pattern or " " in operand.pattern:
            return None
        return self._call(multiplicity.token_bincount, operand.values, count, operand.pattern, weights.values, minlength)

    def _summed(self, call: TokenSum, operand: _Packed) -> torch.fx.Node | None:
        values, pattern, given = operand.values, operand.pattern, call.given
        dims, keepdim, dtype = list(call.dims), given.get("keepdim", False), given.get("dtype")
        count = self._count(operand.index)
        index = None if self.context.analysis.symbols.packed or self.count_padding is False else operand.index
        if call.name in ("sum", "nansum"):
            return self._call(getattr(multiplicity, f"token_{call.name}"), values, count, pattern, dims, keepdim, dtype)
        if call.name == "mean":
            return self._call(multiplicity.token_mean, values, count, index, pattern, dims, keepdim, dtype)
        if call.name in ("var", "std"):
            form = getattr(multiplicity, f"token_{call.name}")
            return self._call(form, values, count, index, pattern, dims, token_sums.correction_of(call), keepdim)
        if call.name in ("norm", "vector_norm"):
            order = token_sums.order_of(call)
            return None if order < 0 else self._call(multiplicity.token_norm, values, count, pattern, order, dims, keepdim)
        if call.name == "logsumexp":
            return self._call(multiplicity.token_logsumexp, values, count, pattern, dims, keepdim)
        if call.name == "count_nonzero":
            return self._call(multiplicity.token_count_nonzero, values, count, pattern, dims)
        if call.name in ("amax", "amin", "any", "all", "max", "min"):
            name = {"max": "amax", "min": "amin"}.get(call.name, call.name)
            return self._call(multiplicity.token_extreme, values, count, pattern, name, dims, keepdim)
        return None

    def _scatter(self, node: torch.fx.Node, call: TokenSum) -> torch.fx.Node | int | None:
        places, added, zero = self._packed(call.operand), self._packed(call.given["src"]), None
        if places is None:
            return None
        src = call.given["src"]
        layout = self._layout(src) if isinstance(src, torch.fx.Node) else None
        constant = layout.fact.value if layout is not None and isinstance(layout.fact, Constant) else None
        if added is not None and added.index is places.index and (call.name == "index_add" or added.pattern == places.pattern):
            source: Any = added.values
            pattern = added.pattern
        elif constant is not None and layout is not None and (call.name == "scatter_add" or len(layout.dims) == 1):
            source, pattern = constant, places.pattern
        elif call.name == "scatter_add" and isinstance(src, torch.fx.Node) and self._is_key(src, layout, places):
            row, column = (forest_input(self.graph, self._named(places.index, name)) for name in ("row", "column"))
            source, pattern = self._call(tokens.pack, src, row, column, places.index, places.pattern), places.pattern
            zero = src
        else:
            return None
        weighted = self._call(multiplicity.weighted, source, places.values, self._count(places.index), pattern, self._dtype(node))
        base, dim = call.given["base"], call.given["dim"]
        rows = (places.rows, *((added.rows,) if added is not None else ()))
        more = {"alpha": call.given["alpha"]} if "alpha" in call.given else {}
        node.args, node.kwargs = (base, dim, places.values, weighted), more
        for one in rows:
            self._forget(one, node)
        return zero or (source if isinstance(source, torch.fx.Node) else 0)

    def _is_key(self, node: torch.fx.Node, layout: Layout | None, like: _Packed) -> bool:
        """Whether a rows value is made of inputs alone in which rows agree that share a token, and stands in the order of the places."""
        wanted = self._layout(like.values)
        if layout is None or wanted is None or layout.dims != wanted.dims or not layout.reach.shared:
            return False
        todo, seen = [node], set[torch.fx.Node]()
        while todo:
            one = todo.pop()
            if one in seen:
                continue
            seen.add(one)
            todo += one.all_input_nodes
            if one.op == "placeholder":
                given, of = input_of(one), self._layout(one)
                token = given.source is Source.ARGUMENT and (of is None or of.has_tokens or of.reach.kind > Kind.UNIFORM)
                if given.source is Source.FOREST or (token and given.key not in self.context.keys):
                    return False
        return True

    def _dtype(self, node: torch.fx.Node) -> torch.dtype:
        info = self._of(node)
        assert info is not None, "checked by the caller"
        found: torch.dtype = info.value.dtype
        return found

    # -- counts ----------------------------------------------------------------------------------------------------------------

    def _count(self, index: torch.fx.Node) -> torch.fx.Node:
        if index in self.counts:
            return self.counts[index]
        count, row, column = (forest_input(self.graph, self._named(index, name)) for name in ("count", "row", "column"))
        if self.count_padding is False:
            first = next(node for node in self.graph.nodes if node.op != "placeholder")
            mask = next(
                n for n in placeholders(self.graph) if input_of(n).source is Source.ARGUMENT and input_of(n).key == self._mask_number()
            )
            with self.graph.inserting_before(first):
                packed = self.graph.call_function(tokens.pack, (mask, row, column, index, "B L"))
                kept = self.graph.call_method("ne", (self.graph.call_method("view", (packed, -1)), 0))
                count = self.graph.call_function(operator.mul, (count, kept))
        self.counts[index] = count
        return count

    @staticmethod
    def _named(index: torch.fx.Node, name: str) -> str:
        """The name of another tensor of the index' forest."""
        full = _forest_index(index)
        assert full is not None, "asked of a forest's index"
        return str(input_of(full).key).replace("index", name, 1)

    def _mask_number(self) -> int:
        found = {number for number in self.context.padding if number is not None}
        if len(found) != 1 or self.context.analysis.symbols.packed:
            raise InvalidOption("option count_padding=False needs one padding mask [B, L] that every attention layer uses")
        return next(iter(found))

    # -- bookkeeping -----------------------------------------------------------------------------------------------------------

    def _replace(self, node: torch.fx.Node, made: torch.fx.Node, operand: _Packed) -> None:
        origin = origin_of(node)
        assert origin is not None, "checked by the caller"
        set_origin(made, origin)
        node.replace_all_uses_with(made)
        self._forget(operand.rows, node)
        self.graph.erase_node(node)

    def _forget(self, rows: torch.fx.Node, user: torch.fx.Node) -> None:
        """The account of expanded values without this one."""
        values, origin = rows.args[0], origin_of(user)
        started = origin_of(values) if isinstance(values, torch.fx.Node) else None
        if started is None or origin is None:
            return
        self.context.unpacked[:] = [entry for entry in self.context.unpacked if entry != f"{started.dense} for {origin.dense}"]

    def clean(self) -> None:
        """Drops rows that nobody reads any more."""
        for node in reversed(list(self.graph.nodes)):
            rows = node.target is tokens.unpack or _is_sort(node) or node.target in _SPARE
            if not node.users and (rows or (node.op == "call_method" and node.target in _ORDERED)):
                origin = origin_of(node.args[0]) if node.target is tokens.unpack else None
                self.graph.erase_node(node)
                if origin is not None:
                    self.context.unpacked[:] = [entry for entry in self.context.unpacked if entry.split(" for ")[0] != origin.dense]


def _forest_index(index: torch.fx.Node) -> torch.fx.Node | None:
    """The input behind the index of a whole forest; one without the last columns is cut out of it."""
    full = index.args[0] if index.target is operator.getitem and origin_of(index) is None else index
    return full if isinstance(full, torch.fx.Node) and full.op == "placeholder" and input_of(full).source is Source.FOREST else None


def _is_sort(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and (
        node.target in (torch.sort, torch.Tensor.sort) or (node.op == "call_method" and node.target == "sort")
    )
