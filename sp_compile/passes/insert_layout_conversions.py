"""Context parallelism: each rank computes its contiguous stretch of the pack, and tokens travel at attention, states at recurrences.

What: an attention on a rank's tokens becomes one of its share of all queries, in the layout that balances the ranks' work, against the
keys and values of all ranks. Queries are converted to that layout before it and results back behind it. A causal convolution gets the last
inputs before the rank's stretch on each path, a recurrence the states with which paths enter it (`ops/states_over_ranks.py`).
Why it is sound: everything else works token by token or is reduced (`reduce_over_ranks`); attention reads tokens by their numbers in the
whole pack, and keys gathered from the contiguous layout stand in the order of those numbers, so they need no conversion. What a rank
computes of a path depends on earlier tokens by its halo and its state alone.

    before   out = sp_compile.attention(q, k, v, forest_end, forest_column, None, None, None, None, scale=0.25, ...)
             pair = sp_compile.linear_scan(a, x, forest_prev, forest_end, None, None)
    after    moved = sp_compile.convert_layout(q, forest_rank_send, forest_rank_place, ..., forest_rank_splits, 2, group, False)
             keys = sp_compile.gather_tokens(k, 2, ranks, group)        # values alike
             local = sp_compile.query_attention(moved, keys, values, forest_rank_queries, forest_rank_end, ..., scale=0.25, ...)
             out = sp_compile.convert_layout(local, ..., 2, group, True)
             left = sp_compile.linear_scan(cat([a, a]), pad(x), forest_rank_prev, forest_end, start, forest_rank_final)[1]
             received = sp_compile.exchange_rows(left, forest_rank_state_send, forest_rank_state_splits, ..., group)
             pair = sp_compile.linear_scan(a, x, forest_rank_prev, forest_end, entering, None)    # from received, along chains

A value that two attentions read travels once, and of a conversion back and in again nothing is left. Where it sends less, a rank gets all
tokens of some heads instead (`swap_heads`), whose attention is that of the whole pack.
Refuses: heads that are no multiple of the ranks, if it has to be by heads; what mixes tokens otherwise `reduce_over_ranks` refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from sp_compile.capture.checkpoint import copy_tags
from sp_compile.layout.local_forest import PREFIX, chain_name, halo_names
from sp_compile.layout.rank_plans import most_links
from sp_compile.ops import head_exchange, layout_conversion, query_attention, scans  # noqa: F401  (register the ops)
from sp_compile.ops.dense_scans import KINDS
from sp_compile.ops.head_exchange import elements_sent
from sp_compile.ops.states_over_ranks import BESIDE, TABLES, SpreadScan
from sp_compile.passes.metadata import propagate
from sp_compile.passes.rank_states import refused
from sp_compile.passes.stage import (
    Context,
    PassResult,
    Stage,
    forest_input,
    input_of,
    origin_of,
    padding_of,
    set_origin,
    set_suffix,
    suffix_of,
)

_ROUTE = ("send", "place", "send_back", "place_back", "splits")
_TOKENS = 2
"""The dimension of tokens in every operand of attention."""


@dataclasses.dataclass(frozen=True)
class InsertLayoutConversions:
    """The pass; see the module's docstring.

    Attributes:
        ranks: C.
        group: name of the process group.
        exchange: what attention sends: "gather" (keys and values to everyone), "heads" (all tokens of some heads), or "auto", whichever
            sends less.
    """

    ranks: int
    group: str
    exchange: str = "gather"
    name: str = "insert_layout_conversions"
    requires: Stage = Stage.SUNK
    provides: Stage = Stage.SUNK

    def __call__(self, graph: torch.fx.Graph, context: Context) -> PassResult:
        assert context.module is not None, "the runner sets the module"
        propagate(graph, context.module, context)
        found = [node for node in graph.nodes if node.target is torch.ops.sp_compile.attention.default]
        mixers = [node for node in graph.nodes if node.target in _MIXERS]
        own = {given for node in found for given in node.args[3:5]} | {_prev_of(node) for node in mixers}
        gathered: dict[Any, torch.fx.Node] = {}
        for node in found:
            if self._by_heads(node, context):
                self._swap(graph, node, gathered)
            else:
                self._spread(graph, node, gathered)
        for node in mixers:
            if _MIXERS[node.target] in BESIDE:
                self._enter(graph, node)
            else:
                self._halo(graph, node)
        for node in [node for node in graph.nodes if _is_conversion(node, back=False)]:
            _cancel(graph, node)
        for node in own:
            if not node.users:
                graph.erase_node(node)
        return PassResult(graph, len(found) + len(mixers))

    def _halo(self, graph: torch.fx.Graph, node: torch.fx.Node) -> None:
        """Gives a convolution the inputs that precede the rank's stretch on each path."""
        x, weight, bias, _, _ = node.args
        width, call, ops = int(_value(weight).shape[1]), _maker(graph, node), torch.ops.sp_compile
        suffix = _suffix(_prev_of(node))
        halo = None
        if width > 1:
            table, send, splits, rows = (forest_input(graph, name + suffix) for name in halo_names(width).values())
            number = call(torch.ops.aten.sym_size.int, rows, 0)
            received = call(ops.exchange_rows.default, call(torch.ops.aten.select.int, x, 0, 0), send, splits, number, self.group)
            halo = call(ops.unpack.default, received, table)
        node.args = (x, weight, bias, forest_input(graph, PREFIX + "prev" + suffix), halo)

    def _enter(self, graph: torch.fx.Graph, node: torch.fx.Node) -> None:
        """Gives a recurrence the states with which paths enter the rank."""
        kind, links = _MIXERS[node.target], most_links(self.ranks)
        given = dict(zip(KINDS[kind].tensors, node.args, strict=False))
        like = {name: None if tensor is None else _value(tensor) for name, tensor in given.items()}
        suffix = _suffix(_prev_of(node))
        tables = {name: forest_input(graph, (chain_name(links) if name == "chain" else PREFIX + name) + suffix) for name in TABLES}
        _, end, _, final = node.args[len(given) :]
        assert final is None, "packed calls ask for no final states"
        spread = SpreadScan(kind, given, like, node.kwargs, {**tables, "end": end}, _maker(graph, node))
        entering = spread.entering(spread.exchanged(spread.leaving(), self.group), links)
        node.args = (*given.values(), tables["prev"], end, entering, None)

    def _by_heads(self, node: torch.fx.Node, context: Context) -> bool:
        """Which way an attention is spread.

        Raises:
            LayoutNotAccepted: by heads was asked for, and their number is no multiple of the ranks.
        """
        q, k, v = (_value(x) for x in node.args[:3])
        heads, key_heads = int(q.shape[1]), int(k.shape[1])
        fits = heads % self.ranks == 0 and key_heads % self.ranks == 0
        if self.exchange == "heads" and not fits:
            why = f"{heads} heads of queries and {key_heads} of keys over {self.ranks} ranks, where each rank has whole heads"
            raise refused(node, why, "Set context_attention to 'gather' or 'auto'.")
        sent = elements_sent(self.ranks, heads, key_heads, int(q.shape[3]), int(v.shape[3]))
        chosen = self.exchange == "heads" or (self.exchange == "auto" and fits and self.ranks > 1 and sent["heads"] < sent["gather"])
        text = ", ".join(f"{way} {number:g}" for way, number in sent.items())
        context.kernels["context_attention"] = f"{'heads' if chosen else 'gather'} (elements sent per token: {text})"
        return chosen

    def _swap(self, graph: torch.fx.Graph, node: torch.fx.Node, gathered: dict[Any, torch.fx.Node]) -> None:
        """Attention of all queries, for some of the heads."""
        q, k, v, _, _, key_valid, segments, _, sinks = node.args
        ops, made, once = torch.ops.sp_compile, _maker(graph, node), _once(graph, node, gathered)
        ways = (_TOKENS, 1, self.ranks, self.group)
        suffix = _suffix(node.args[3])
        end, column = (forest_input(graph, PREFIX + name + suffix) for name in ("end", "column"))
        moved = [once(ops.swap_heads.default, x, *ways, False) for x in (q, k, v)]
        flags = [None if x is None else once(ops.gather_tokens.default, x, 1, self.ranks, self.group) for x in (key_valid, segments)]
        own = None if sinks is None else once(ops.own_tokens.default, sinks, 0, self.ranks, self.group)
        number = made(torch.ops.aten.sym_size.int, end, 0)
        queries = made(torch.ops.aten.arange.default, number, dtype=torch.int64, device=_value(q).device)
        local = made(ops.query_attention.default, *moved, queries, end, column, *flags, own, **node.kwargs)
        self._replace(graph, node, made(ops.swap_heads.default, local, *ways, True))

    def _spread(self, graph: torch.fx.Graph, node: torch.fx.Node, gathered: dict[Any, torch.fx.Node]) -> None:
        """Attention of some of the queries, for all heads."""
        q, k, v, _, _, key_valid, segments, _, sinks = node.args
        ops, made, once = torch.ops.sp_compile, _maker(graph, node), _once(graph, node, gathered)
        suffix = _suffix(node.args[3])
        route = tuple(forest_input(graph, PREFIX + name + suffix) for name in _ROUTE)
        queries, end, column = (forest_input(graph, PREFIX + name + suffix) for name in ("queries", "end", "column"))
        moved = once(ops.convert_layout.default, q, *route, _TOKENS, self.group, False)
        keys, values = (once(ops.gather_tokens.default, x, _TOKENS, self.ranks, self.group) for x in (k, v))
        flags = [None if x is None else once(ops.gather_tokens.default, x, 1, self.ranks, self.group) for x in (key_valid, segments)]
        local = made(ops.query_attention.default, moved, keys, values, queries, end, column, *flags, sinks, **node.kwargs)
        self._replace(graph, node, made(ops.convert_layout.default, local, *route, _TOKENS, self.group, True))

    @staticmethod
    def _replace(graph: torch.fx.Graph, node: torch.fx.Node, result: torch.fx.Node) -> None:
        origin = origin_of(node)
        if origin is not None:
            set_origin(result, origin)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _maker(graph: torch.fx.Graph, node: torch.fx.Node) -> Callable[..., torch.fx.Node]:
    """Makes calls in front of a node."""

    def made(op: Any, *args: Any, **options: Any) -> torch.fx.Node:
        with graph.inserting_before(node):
            result = graph.call_function(op, args, options)
        copy_tags(node, result)
        set_suffix(result, suffix_of(node), padding_of(node))  # by which implementations find the tensors of its forest
        return result

    return made


def _once(graph: torch.fx.Graph, node: torch.fx.Node, known: dict[Any, torch.fx.Node]) -> Callable[..., torch.fx.Node]:
    """Makes calls in front of a node, each that was made before only once."""
    make = _maker(graph, node)

    def once(op: Any, value: Any, *args: Any) -> torch.fx.Node:
        key = (op, value, args)
        if key not in known:
            known[key] = make(op, value, *args)
        return known[key]

    return once


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _suffix(value: Any) -> str:
    """Which refined forest a forest tensor is of, as it is added to names."""
    _, mark, rest = str(input_of(value).key).partition("@")
    return mark + rest


def _prev_of(node: torch.fx.Node) -> Any:
    return node.args[len(KINDS[_MIXERS[node.target]].tensors)]


def _cancel(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Leaves out a conversion in, and the one back before it, if no more than dimensions changed places between the two."""
    chain: list[torch.fx.Node] = []
    value: Any = node.args[0]
    dim = _TOKENS
    while isinstance(value, torch.fx.Node) and value.op == "call_method" and value.target in ("transpose", "contiguous"):
        if value.target == "transpose":
            swapped: Any = value.args[1:]
            pair = [d % 4 for d in swapped]
            dim = pair[1 - pair.index(dim)] if dim in pair else dim
        chain.append(value)
        value = value.args[0]
    if not _is_conversion(value, back=True) or dim != _TOKENS or value.args[1:-1] != node.args[1:-1]:
        return
    made: Any = value.args[0]
    with graph.inserting_before(node):
        for step in reversed(chain):
            made = graph.call_method(str(step.target), (made, *step.args[1:]))
            copy_tags(step, made)
    node.replace_all_uses_with(made)
    for dead in (node, *chain, value):
        if not dead.users:
            graph.erase_node(dead)


def _is_conversion(node: Any, back: bool) -> bool:
    return isinstance(node, torch.fx.Node) and node.target is torch.ops.sp_compile.convert_layout.default and node.args[-1] is back


_MIXERS: dict[Any, str] = {scans.op_of(kind): kind for kind in scans.FOREST}
"""Convolutions and recurrences, with their kinds."""
