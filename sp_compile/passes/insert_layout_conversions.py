"""Context parallelism: each rank computes its contiguous stretch of the pack, and tokens travel at attention, states at recurrences.

What: an attention on a rank's tokens becomes one of its share of all queries, in the layout that balances the ranks' work, against the
keys and values of all ranks. Queries are converted to that layout before it and results back behind it. A causal convolution gets the last
inputs before the rank's stretch on each path, a recurrence the states with which paths enter it (`ops/states_over_ranks.py`).
Why it is sound: everything else works token by token, which the pass checks; attention reads tokens by their numbers in the whole pack,
and keys gathered from the contiguous layout stand in the order of those numbers, so they need no conversion. What a rank computes of a
path depends on earlier tokens by its halo and its state alone.

    before   out = sp_compile.attention(q, k, v, forest_end, forest_column, None, None, None, None, scale=0.25, ...)
             pair = sp_compile.linear_scan(a, x, forest_prev, forest_end, None, None)
    after    moved = sp_compile.convert_layout(q, forest_rank_send, forest_rank_place, ..., forest_rank_splits, 2, group, False)
             keys = sp_compile.gather_tokens(k, 2, ranks, group)        # values alike
             local = sp_compile.query_attention(moved, keys, values, forest_rank_queries, forest_rank_end, ..., scale=0.25, ...)
             out = sp_compile.convert_layout(local, ..., 2, group, True)
             left = sp_compile.linear_scan(cat([a, a]), pad(x), forest_rank_prev, forest_end, start, forest_rank_final)[1]
             received = sp_compile.exchange_rows(left, forest_rank_state_send, forest_rank_state_splits, ..., group)
             pair = sp_compile.linear_scan(a, x, forest_rank_prev, forest_end, entering, None)    # from received, along chains

A value that two attentions read travels once, and of a conversion back and in again nothing is left.
Refuses: `LayoutNotAccepted`, naming the op, for what would need other ranks' tokens: reductions over tokens, segments of paths, position
biases and masks of the whole pack, rows of the batch, the number of tokens as a value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch.utils._pytree import tree_leaves

from sp_compile.analysis.refusals import source_line
from sp_compile.capture.checkpoint import copy_tags
from sp_compile.capture.graphs import placeholders
from sp_compile.errors import LayoutNotAccepted
from sp_compile.layout.local_forest import PREFIX, chain_name, halo_names
from sp_compile.layout.rank_plans import most_links
from sp_compile.ops import layout_conversion, paths, query_attention, scans  # noqa: F401  (register the ops)
from sp_compile.ops import tokens as tokens_ops
from sp_compile.ops.dense_scans import KINDS
from sp_compile.ops.states_over_ranks import BESIDE, TABLES, SpreadScan
from sp_compile.passes.metadata import propagate
from sp_compile.passes.stage import Context, PassResult, Source, Stage, forest_input, input_of, origin_of, set_origin

_ROUTE = ("send", "place", "send_back", "place_back", "splits")
_TOKENS = 2
"""The dimension of tokens in every operand of attention."""


@dataclasses.dataclass(frozen=True)
class InsertLayoutConversions:
    """The pass; see the module's docstring.

    Attributes:
        ranks: C.
        group: name of the process group.
    """

    ranks: int
    group: str
    name: str = "insert_layout_conversions"
    requires: Stage = Stage.SUNK
    provides: Stage = Stage.SUNK

    def __call__(self, graph: torch.fx.Graph, context: Context) -> PassResult:
        assert context.module is not None, "the runner sets the module"
        shapes = propagate(graph, context.module, context)
        _require_local(graph, context, shapes.symbol("T").node.expr)
        found = [node for node in graph.nodes if node.target is torch.ops.sp_compile.attention.default]
        mixers = [node for node in graph.nodes if node.target in _MIXERS]
        own = {given for node in found for given in node.args[3:5]} | {_prev_of(node) for node in mixers}
        gathered: dict[Any, torch.fx.Node] = {}
        for node in found:
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
        halo = None
        if width > 1:
            table, send, splits, rows = (forest_input(graph, name) for name in halo_names(width).values())
            number = call(torch.ops.aten.sym_size.int, rows, 0)
            received = call(ops.exchange_rows.default, call(torch.ops.aten.select.int, x, 0, 0), send, splits, number, self.group)
            halo = call(ops.unpack.default, received, table)
        node.args = (x, weight, bias, forest_input(graph, PREFIX + "prev"), halo)

    def _enter(self, graph: torch.fx.Graph, node: torch.fx.Node) -> None:
        """Gives a recurrence the states with which paths enter the rank."""
        kind, links = _MIXERS[node.target], most_links(self.ranks)
        given = dict(zip(KINDS[kind].tensors, node.args, strict=False))
        like = {name: None if tensor is None else _value(tensor) for name, tensor in given.items()}
        tables = {name: forest_input(graph, chain_name(links) if name == "chain" else PREFIX + name) for name in TABLES}
        _, end, _, final = node.args[len(given) :]
        assert final is None, "packed calls ask for no final states"
        spread = SpreadScan(kind, given, like, node.kwargs, {**tables, "end": end}, _maker(graph, node))
        entering = spread.entering(spread.exchanged(spread.leaving(), self.group), links)
        node.args = (*given.values(), tables["prev"], end, entering, None)

    def _spread(self, graph: torch.fx.Graph, node: torch.fx.Node, gathered: dict[Any, torch.fx.Node]) -> None:
        q, k, v, _, _, key_valid, segments, _, sinks = node.args
        ops, made = torch.ops.sp_compile, _maker(graph, node)

        def once(op: Any, value: Any, *args: Any) -> torch.fx.Node:
            key = (op, value, args)
            if key not in gathered:
                gathered[key] = made(op, value, *args)
            return gathered[key]

        route = tuple(forest_input(graph, PREFIX + name) for name in _ROUTE)
        queries, end, column = (forest_input(graph, PREFIX + name) for name in ("queries", "end", "column"))
        moved = once(ops.convert_layout.default, q, *route, _TOKENS, self.group, False)
        keys, values = (once(ops.gather_tokens.default, x, _TOKENS, self.ranks, self.group) for x in (k, v))
        flags = [None if x is None else once(ops.gather_tokens.default, x, 1, self.ranks, self.group) for x in (key_valid, segments)]
        local = made(ops.query_attention.default, moved, keys, values, queries, end, column, *flags, sinks, **node.kwargs)
        result = made(ops.convert_layout.default, local, *route, _TOKENS, self.group, True)
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
        return result

    return made


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


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


# -- what may stand in the graph of a rank ------------------------------------------------------------------------------------------

_MIXERS: dict[Any, str] = {scans.op_of(kind): kind for kind in scans.FOREST}
"""Convolutions and recurrences, with their kinds."""


def _require_local(graph: torch.fx.Graph, context: Context, tokens: Any) -> None:
    """Raises LayoutNotAccepted for the first node that needs more than a rank's own tokens and is no attention."""
    inputs = context.analysis.inputs
    assert inputs is not None, "the outermost graph has inputs"
    for number, layout in enumerate(inputs.layouts):
        if layout is not None and len(layout.columns_dims) == 2:
            node = placeholders(context.analysis.graph)[number]
            raise _refused(node, "a mask over (query, key) pairs is of one rank's tokens", "Let the compiled model make its mask.")
    by_name = {node.name: info for node, info in context.analysis.nodes.items()}
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and (node.users or node.is_impure()):
            origin = origin_of(node)
            info = by_name.get(origin.dense) if origin is not None else None
            _require_tokenwise(node, tokens, info is not None and info.numbers)
    for node in graph.find_nodes(op="placeholder"):
        _require_input(node)


def _require_input(node: torch.fx.Node) -> None:
    given = input_of(node)
    for user in node.users:
        if given.source is Source.ROWS or given.source is Source.HIDES:
            raise _refused(user, f"it reads {given.source.value} of the batch, which no rank has")
        if given.source is Source.FOREST:
            name = str(given.key)
            if not _reads_local(user, name):
                raise _refused(user, f"it follows paths of tokens ({name}), and paths cross the borders of ranks")


def _reads_local(node: torch.fx.Node, name: str) -> bool:
    """Whether a node makes of a forest tensor what a rank's own stretch has of it."""
    if name == "column":
        return True
    if node.target is torch.ops.sp_compile.attention.default:
        return name == "end"
    if node.target in _MIXERS:
        return name in ("prev", "end")
    # What is one number for every column is gathered by column: of the rows it takes no more than how many there are.
    pattern = node.args[-1] if node.target is tokens_ops.pack else "B"
    factors = [factor for dim in str(pattern).split(" ") for factor in dim.split("*")]
    return name in ("row", "index") and "B" not in factors and factors.count("L") == 1


def _require_tokenwise(node: torch.fx.Node, tokens: Any, counts: bool) -> None:
    if node.target is torch.ops.sp_compile.attention.default:
        if node.args[7] is not None:
            raise _refused(node, "a bias over (query, key) pairs is of one rank's tokens", "Use a window, or positions in q and k.")
        return
    if node.target in _MIXERS:
        return
    if node.target is torch.ops.sp_compile.path_segments.default:
        raise _refused(node, "it reads the tokens before its own, which may lie on another rank")
    if counts:
        raise _refused(node, "it uses the number of tokens, and a rank has a part of them")
    read = [value for operand in node.all_input_nodes for value in _tensors(operand)]
    made = list(_tensors(node))
    if made and any(_over(value, tokens) for value in read) and not any(_over(value, tokens) for value in made):
        raise _refused(
            node, "it reduces tokens, and a rank has a part of them", "Reduce outside of the model: over_ranks.total adds up ranks."
        )
    if any(sum(tokens in _symbols(size) for size in value.shape) > 1 for value in made):
        raise _refused(node, "it pairs tokens, and the other ranks' are missing")


def _tensors(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    return (value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor))


def _over(value: torch.Tensor, tokens: Any) -> bool:
    return any(tokens in _symbols(size) for size in value.shape)


def _symbols(size: Any) -> Any:
    return size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()


def _op_name(node: torch.fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))


_ADVICE = "Compile without context_parallel, or move the op out of the compiled model."


def _refused(node: torch.fx.Node, reason: str, advice: str = _ADVICE) -> LayoutNotAccepted:
    why = f"the op does not accept the contiguous layout over ranks: {reason}"
    return LayoutNotAccepted(why, op=_op_name(node), node=node.name, source=source_line(node), advice=advice)
