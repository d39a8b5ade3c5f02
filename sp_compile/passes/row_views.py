"""Values of rows that are not made: packed values with an index, and proofs that an op works token by token on them.

A row view stands for `unpack(values, index)`. Its values have the dimensions of the rows, with 1 for every token dimension but the last
and T for that one: rows [B, L - 1, V] are values [1, T, V] with an index [B, L - 1]. So an op that works token by token runs on the values
with the arguments it had.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy
import torch
import torch.fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from sp_compile.analysis.interpret import LayoutMode
from sp_compile.analysis.layouts import TOKENS, Axis, Dim, Kind, Layout, Span, Symbols, size_expr
from sp_compile.analysis.rules import Call
from sp_compile.analysis.state import preserved_global_state
from sp_compile.capture.checkpoint import copy_tags
from sp_compile.passes.stage import Source, input_of

Leads = tuple[tuple[int, int], ...]
"""The token dimensions of one tensor in order: (dimension, how many dimensions of the index are merged in it)."""

FEW = 16
"""Positions of a row, at most this many, that are cheaper to compute with as rows than in every token."""

_RESHAPES = frozenset(
    {"view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten", "squeeze", "unsqueeze", "clone", "alias"}
)
"""ATen ops that keep all elements in row-major order."""


@dataclasses.dataclass(frozen=True)
class RowView:
    """Rows that are not made.

    Attributes:
        values: the packed values; a tensor, or the several tensors of one op.
        index: int64, the physical token of every row position.
        leads: for each tensor, where the dimensions of the index are.
        detached: the rows were taken without grad mode from values that may have a gradient.
    """

    values: torch.fx.Node
    index: torch.fx.Node
    leads: tuple[Leads, ...]
    detached: bool = False

    @property
    def leading(self) -> bool:
        """Whether a single tensor's token dimensions come first."""
        return len(self.leads) == 1 and [dim for dim, _ in self.leads[0]] == list(range(len(self.leads[0])))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a rewritten graph as its fakes know them."""

    symbols: Symbols
    tokens: sympy.Symbol
    mode: FakeTensorMode

    @staticmethod
    def of(graph: torch.fx.Graph) -> Sizes:
        """Of a graph whose nodes have fresh fakes (`metadata.propagate`)."""
        found: dict[Source, sympy.Symbol] = {}
        mode: FakeTensorMode | None = None
        for node in graph.nodes:
            if node.op == "placeholder":
                value = node.meta["val"]
                if isinstance(value, torch.SymInt):
                    found[input_of(node).source] = value.node.expr
                elif mode is None and isinstance(value, torch.Tensor):
                    mode = getattr(value, "fake_mode", None)
        assert mode is not None, "a graph that unpacks has tensor inputs"
        return Sizes(Symbols(found[Source.ROWS], found[Source.COLUMNS]), found[Source.TOKENS], mode)

    def dense(self, value: object) -> bool:
        """Whether a tensor has a dimension that grows with rows, columns or tokens."""
        grows = {self.symbols.batch, self.symbols.columns, self.tokens}
        return isinstance(value, torch.Tensor) and any(size_expr(size).free_symbols & grows for size in value.shape)

    def long(self, index: torch.Tensor) -> bool:
        """Whether an index grows with the columns, as the tokens do."""
        return any(self.symbols.columns in size_expr(size).free_symbols for size in index.shape)

    def few(self, index: torch.Tensor) -> bool:
        """Whether an index selects so few positions of a row that computing on these rows is the cheaper form."""
        count = sympy.prod([sympy.Integer(1), *(size_expr(size) for size in index.shape)])
        count = sympy.cancel(count / self.symbols.batch) if self.symbols.batch in count.free_symbols else count
        return bool(count.is_Integer) and int(count) <= FEW

    def width(self, values: torch.fx.Node) -> int:
        """Elements of packed values per token; sizes that are not known count as 1."""
        return sum(math.prod(int(s) for s in map(size_expr, tensor.shape) if s.is_Integer) for tensor in _tensors(values.meta["val"]))

    def grouped(self, index: torch.Tensor, leads: Leads) -> list[sympy.Expr]:
        """The sizes of the rows' token dimensions."""
        sizes = iter(size_expr(size) for size in index.shape)
        return [sympy.prod([next(sizes) for _ in range(count)]) for _, count in leads]

    @contextlib.contextmanager
    def faked(self) -> Iterator[None]:
        with preserved_global_state(), torch.no_grad(), enable_python_dispatcher(), self.mode:
            yield


def same(left: sympy.Expr, right: sympy.Expr) -> bool:
    return bool(sympy.expand(left - right) == 0)


def values_of(value: Any) -> Any:
    """Nodes replaced by their fakes."""
    return torch.fx.map_arg(value, lambda node: node.meta["val"])


def run(op: str, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return getattr(args[0], target)(*args[1:], **kwargs) if op == "call_method" else target(*args, **kwargs)


class Builder:
    """Makes nodes before a given node, with fakes, and makes none of them twice.

    Attributes:
        place: the node before which nodes are made; it moves forward.
        epoch: number of the stretch of the graph between switches of grad mode or autocast; nodes are not reused across.
        grad: the grad mode at `place`.
        made: all of them, with their epochs.
        passed: pure nodes of the graph that something read before; `clean` drops those that nobody reads any more.
    """

    def __init__(self, graph: torch.fx.Graph, sizes: Sizes) -> None:
        self.graph, self.sizes = graph, sizes
        self.made: dict[torch.fx.Node, int] = {}
        self.passed: dict[torch.fx.Node, None] = {}
        self.known: dict[str, torch.fx.Node] = {}
        self.place: torch.fx.Node = next(iter(graph.nodes))
        self.epoch = 0
        self.grad = True

    def node(self, op: str, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        key = f"{self.epoch} {_checkpoint(self.place)} {op} {target} {args} {kwargs}"
        if key in self.known:
            return self.known[key]
        with self.sizes.faked():
            value = run(op, target, values_of(args), values_of(kwargs))
        with self.graph.inserting_before(self.place):
            made = self.graph.create_node(op, target, args, kwargs)
        made.meta["val"] = value
        if "stack_trace" in self.place.meta:
            made.meta["stack_trace"] = self.place.meta["stack_trace"]
        copy_tags(self.place, made)
        self.made[made] = self.epoch
        self.known[key] = made
        return made

    def method(self, name: str, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return self.node("call_method", name, *args, **kwargs)

    def function(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.fx.Node:
        return self.node("call_function", target, *args, **kwargs)

    def clean(self) -> None:
        """Lets nodes that are made alike be one, and drops those without users."""
        known: dict[str, torch.fx.Node] = {}
        ordered = [(node, self.made[node]) for node in self.graph.nodes if node in self.made]
        for node, epoch in ordered:
            first = known.setdefault(f"{epoch} {_checkpoint(node)} {node.op} {node.target} {node.args} {node.kwargs}", node)
            if first is not node:
                node.replace_all_uses_with(first)
        passed = [node for node in reversed(self.graph.nodes) if node in self.passed]
        for node in (*(node for node, _ in reversed(ordered)), *passed):
            if not node.users:
                self.graph.erase_node(node)

    # -- parts of a row view of one tensor --------------------------------------------------------------------------------------

    def index(self, view: RowView) -> torch.fx.Node:
        """The index with the rows' token dimensions."""
        index = view.index
        for place, (_, count) in enumerate(view.leads[0]):
            if count > 1:
                index = self.method("flatten", index, place, place + count - 1)
        return index

    def tokens_first(self, view: RowView) -> torch.fx.Node:
        """The values as [T, ...]."""
        values, leads = view.values, [dim for dim, _ in view.leads[0]]
        if not view.leading:
            values = self.method("permute", values, self._order(view))
        return self.method("flatten", values, 0, len(leads) - 1) if len(leads) > 1 else values

    def with_leads(self, view: RowView, count: int) -> torch.fx.Node:
        """The values of a leading view as [1, ..., T, ...] with `count` token dimensions."""
        if count == len(view.leads[0]):
            return view.values
        values = self.tokens_first(view)
        for _ in range(count - 1):
            values = self.method("unsqueeze", values, 0)
        return values

    def rows(self, view: RowView, contiguous: bool) -> torch.fx.Node:
        """The rows themselves."""
        rows = self.function(torch.ops.sp_compile.unpack.default, self.tokens_first(view), self.index(view))
        if view.leading:
            return rows
        order = self._order(view)
        rows = self.method("permute", rows, [order.index(dim) for dim in range(len(order))])
        return self.method("contiguous", rows) if contiguous else rows

    @staticmethod
    def _order(view: RowView) -> list[int]:
        leads = [dim for dim, _ in view.leads[0]]
        return [*leads, *(dim for dim in range(view.values.meta["val"].dim()) if dim not in leads)]


def _checkpoint(node: torch.fx.Node) -> Any:
    """The activation checkpoint in which a node is recomputed."""
    return node.meta.get("ac_graph_id")


@dataclasses.dataclass(frozen=True)
class _Label(Span):
    """A token dimension of the index; unlike other spans of the same size, which hold other tokens."""

    number: int


class _Trial(LayoutMode):
    """Judges one torch-level op by the analysis' rules and remembers what it was made of."""

    def __init__(self, symbols: Symbols) -> None:
        super().__init__(symbols)
        self.called: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace != "prim":  # questions, such as prim.device
            self.called.add(func._schema.name.split("::")[1])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _check_per_row(self, call: Call, results: list[Layout]) -> None:
        """Nothing: that asks for rows and columns, which need not be left in an index; `_leads` asks for every label instead."""


def local_form(node: torch.fx.Node, views: Mapping[torch.fx.Node, RowView], builder: Builder) -> RowView | None:
    """The node's rows as a view whose values are the node's op on the values of its operands, or None if that is not proved.

    The op runs on fakes twice. On rows, with the index dimensions labelled as tokens, the rules must find that it leaves them
    whole and in order; on values it must give the shape that follows from this.
    """
    view = next(iter(views.values()))
    labels = _labels(view, builder.sizes)
    if labels is None:
        return None
    trial = _Trial(builder.sizes.symbols)
    for operand, one in views.items():
        for tensor, given in zip(_tensors(operand.meta["val"]), one.leads, strict=True):
            trial.give(tensor, Layout(_dims(tensor, given, labels), TOKENS))
    args, kwargs = values_of(node.args), values_of(node.kwargs)
    dense = _attempt(builder.sizes, trial, node.op, node.target, args, kwargs)
    outputs, info = _tensors(dense), trial.info
    written = info.writes & {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
    if not outputs or len(outputs) != len(tree_leaves(dense)) or info.failure or info.numbers or trial.random or written:
        return None
    found = [_leads(trial.layout_of(output), labels) for output in outputs]
    leads = tuple(one for one in found if one is not None)
    if len(leads) != len(outputs):
        return None
    tokens = size_expr(_tensors(view.values.meta["val"])[0].shape[view.leads[0][-1][0]])
    wanted = [_packed_sizes(output, one, tokens) for output, one in zip(outputs, leads, strict=True)]
    values = _replay(node, views, wanted, builder, trial.called)
    return None if values is None else RowView(values, view.index, leads)


def _replay(
    node: torch.fx.Node, views: Mapping[torch.fx.Node, RowView], wanted: list[list[sympy.Expr]], builder: Builder, called: set[str]
) -> torch.fx.Node | None:
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: views[n].values if n in views else n)
    packed = _attempt(builder.sizes, None, node.op, node.target, values_of(args), values_of(kwargs))
    got = [[size_expr(size) for size in output.shape] for output in _tensors(packed)]
    if len(got) == len(wanted) and all(len(a) == len(b) and all(map(same, a, b)) for a, b in zip(got, wanted, strict=True)):
        return builder.node(node.op, node.target, *args, **kwargs)
    known = [int(size) if size.is_Integer else -1 for size in wanted[0]]
    if len(views) == len(wanted) == 1 and called <= _RESHAPES and known.count(-1) == 1:
        return builder.method("reshape", next(iter(views.values())).values, known)
    return None


def _attempt(sizes: Sizes, trial: LayoutMode | None, op: str, target: Any, args: Any, kwargs: Any) -> Any:
    """The op's result on fakes, or None if it does not run: sizes of rows do not fit values, for one."""
    try:
        with sizes.faked(), trial if trial is not None else contextlib.nullcontext():
            return run(op, target, args, kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
        return None


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _labels(view: RowView, sizes: Sizes) -> list[_Label] | None:
    """A label for each dimension of the index; None if one has size 1, which a view to other sizes would lose."""
    labels = [_Label(size_expr(size), number) for number, size in enumerate(view.index.meta["val"].shape)]
    return None if any(label.size == 1 for label in labels) else labels


def _dims(tensor: torch.Tensor, leads: Leads, labels: list[_Label]) -> tuple[Dim, ...]:
    left = iter(labels)
    marked = {dim: tuple(next(left) for _ in range(count)) for dim, count in leads}
    return tuple(marked.get(dim, () if size == 1 else (size,)) for dim, size in enumerate(map(_plain, tensor.shape)))


def _plain(size: int | torch.SymInt) -> Any:
    return int(size) if isinstance(size, int) else size.node.expr


def _leads(layout: Layout, labels: list[_Label]) -> Leads | None:
    """Where the labels went; None unless each is there once, in order and unmixed, and no token sees another."""
    if layout.is_rows or layout.head or not layout.reach.shared or layout.reach.kind is Kind.COLUMN:
        return None
    found: list[tuple[int, int]] = []
    left = list(labels)
    for place, dim in enumerate(layout.dims):
        if any(isinstance(factor, Axis | Span) for factor in dim):
            if list(dim) != left[: len(dim)]:
                return None
            found.append((place, len(dim)))
            left = left[len(dim) :]
    return None if left or not found else tuple(found)


def _packed_sizes(rows: torch.Tensor, leads: Leads, tokens: sympy.Expr) -> list[sympy.Expr]:
    wanted = [size_expr(size) for size in rows.shape]
    for dim, _ in leads:
        wanted[dim] = sympy.Integer(1)
    wanted[leads[-1][0]] = tokens
    return wanted


__all__ = ["Builder", "Leads", "RowView", "Sizes", "local_form", "run", "same", "values_of"]
