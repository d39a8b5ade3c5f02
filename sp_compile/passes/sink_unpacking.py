"""Moves the gathers from physical tokens to rows as late as possible.

What: an `unpack` moves behind the ops that follow it: cuts of rows and columns become cuts of its index, ops that work token by token run
on physical tokens, and picking a class or taking a cross entropy reads the physical logits directly.
Why it is sound: `f(unpack(v, i)) = unpack(f(v), i)` for every op whose result at a position reads that position alone, which the rules of
the analysis decide, op by op; a cut takes whole positions; every node stays in the grad mode and autocast it was in.

    before   rows = unpack(logits, index, 'B L _')                   # [B, L, V]
             logprobs = log_softmax(rows[:, :-1], -1)                # [B, L - 1, V]
             picked = gather(logprobs, -1, target)
    after    logprobs = log_softmax(logits, -1)                      # [1, T, V]
             cut = index[:, :-1]                                     # [B, L - 1]
             picked = sp_compile.take_tokens(flatten(logprobs, 0, 1), unsqueeze(cut, -1), target)

Leaves alone: values that are written in place afterwards, cuts taken without grad mode but used with it, and computation on selected
positions (`hidden[:, -1]`) that costs less on rows; those rows are unpacked where they were wanted, and nothing else is.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
import torch.fx

from sp_compile.analysis.interpret import NodeInfo
from sp_compile.ops import tokens
from sp_compile.passes import row_uses
from sp_compile.passes.metadata import propagate
from sp_compile.passes.row_views import Builder, Leads, RowView, Sizes, local_form, run, values_of
from sp_compile.passes.row_writes import without_writes
from sp_compile.passes.stage import Context, PassResult, Source, Stage, input_of, origin_of, set_origin


@dataclasses.dataclass(frozen=True)
class SinkUnpacking:
    """The pass; see the module's docstring."""

    name: str = "sink_unpacking"
    requires: Stage = Stage.COUNTED
    provides: Stage = Stage.SUNK

    def __call__(self, graph: torch.fx.Graph, context: Context) -> PassResult:
        if not any(node.target is tokens.unpack for node in graph.nodes):
            return PassResult(graph, 0)
        assert context.module is not None, "the runner sets the module"
        propagate(graph, context.module, context)
        return PassResult(graph, _Sink(graph, context).run())


class _Sink:
    def __init__(self, graph: torch.fx.Graph, context: Context) -> None:
        self.graph, self.context = graph, context
        self.info = {node.name: info for node, info in context.analysis.nodes.items()}
        self.inputs = [node.name for node in context.analysis.nodes if node.op == "placeholder"]
        self.read = {node.name: self._storages(node) for node in context.analysis.nodes}
        self.sizes = Sizes.of(graph)
        self.builder = Builder(graph, self.sizes)
        self.views: dict[torch.fx.Node, RowView] = {}
        self.epochs: dict[torch.fx.Node, int] = {}
        self.order = {node: number for number, node in enumerate(graph.nodes)}
        self.builder.grad = torch.is_grad_enabled()
        self.pure = without_writes(graph, self.sizes, self._lives_in, self.builder.grad)
        self.last_write: dict[int, int] = {}
        for node, number in self.order.items():
            info = self._info(node)
            if info is not None and node not in self.pure:
                self.last_write |= dict.fromkeys(_writes(info), number)
        self.changed = 0

    def run(self) -> int:
        # Autocast is switched for real on the way, so that trials see the dtypes of their place.
        with self.sizes.faked():
            for node in self.order:
                self.builder.place, self.epochs[node] = node, self.builder.epoch
                if node.target is tokens.unpack:
                    self._start(node)
                elif self._switches(node):
                    self._switch(node)
                else:
                    self._visit(node)
        self._finish()
        return self.changed

    # -- where rows begin ------------------------------------------------------------------------------------------------------

    def _start(self, node: torch.fx.Node) -> None:
        values, index, pattern = node.args
        assert isinstance(values, torch.fx.Node), "physical tokens are computed"
        assert isinstance(index, torch.fx.Node), "the index is an input"
        info, leads = self._info(values), _leads(tokens.parse(str(pattern)))
        if info is not None and leads is not None and not self._written_later(info, node):
            self.views[node] = RowView(values, index, (leads,))

    def _info(self, node: torch.fx.Node) -> NodeInfo | None:
        origin = origin_of(node)
        return self.info.get(origin.dense) if origin is not None else None

    def _lives_in(self, node: torch.fx.Node) -> set[int]:
        """The storages of a node's dense value."""
        if node.op == "placeholder":
            given = input_of(node)
            return self.info[self.inputs[int(given.key)]].storages if given.source is Source.ARGUMENT else set()
        info = self._info(node.args[0] if node.target is tokens.unpack and isinstance(node.args[0], torch.fx.Node) else node)
        return info.storages if info is not None else set()

    def _written_later(self, info: NodeInfo, node: torch.fx.Node) -> bool:
        return any(self.last_write.get(storage, -1) > self.order[node] for storage in info.storages)

    def _storages(self, node: torch.fx.Node) -> set[int]:
        """What a node of the captured graph reads."""
        return set().union(*(self.info[operand.name].storages for operand in node.all_input_nodes))

    def _switches(self, node: torch.fx.Node) -> bool:
        """Whether a node may change the state under which others run."""
        info = self._info(node)
        number = isinstance(node.meta.get("val"), int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)
        return info is not None and not info.tensors and not number and node.op in ("call_function", "call_method")

    def _switch(self, node: torch.fx.Node) -> None:
        self.builder.epoch += 1
        name = getattr(node.target, "__name__", "")
        if name == "_set_grad_enabled":
            self.builder.grad = node.args[0] is True
        elif "autocast" in name:
            node.meta["val"] = run(node.op, node.target, values_of(node.args), values_of(node.kwargs))

    # -- one use of rows -------------------------------------------------------------------------------------------------------

    def _visit(self, node: torch.fx.Node) -> None:
        origin, info = origin_of(node), self._info(node)
        views = {a: self.views[a] for a in node.all_input_nodes if a in self.views and not (self.views[a].detached and self.builder.grad)}
        if not views or origin is None or info is None or node.op not in ("call_function", "call_method"):
            return
        # A higher-order op may have a backward of its own, which need not be linear: of a sum of gradients it makes something else.
        if isinstance(node.target, torch._ops.HigherOrderOperator) or info.body is not None:
            return
        if info.writes & self.read[origin.dense] and node not in self.pure:
            return
        found = self._rewritten(node, views)
        if isinstance(found, RowView):
            if not self._written_later(info, node):
                self.views[node] = found
                self.changed += 1
        elif found is not None:
            self._replace(node, found)
            self.changed += 1

    def _rewritten(self, node: torch.fx.Node, views: dict[torch.fx.Node, RowView]) -> RowView | torch.fx.Node | None:
        """The node's rows as a view, or a node that computes them without rows of its operand, or None."""
        first = node.args[0] if node.args else None
        use = _USES.get(node.target if callable(node.target) else getattr(torch.Tensor, str(node.target), None))
        if use is not None and isinstance(first, torch.fx.Node) and first in views and isinstance(first.meta["val"], torch.Tensor):
            found = use(node, views[first], self.builder)
            if found is not None:
                return found
        return self._local(node, views)

    def _local(self, node: torch.fx.Node, views: dict[torch.fx.Node, RowView]) -> RowView | None:
        others = [a for a in node.all_input_nodes if a not in views]
        indices = {view.index for view in views.values()}
        several = not isinstance(node.meta.get("val"), torch.Tensor)
        if len(indices) > 1 or any(self.sizes.dense(other.meta.get("val")) for other in others):
            return None
        index = next(iter(indices)).meta["val"]
        long = self.sizes.long(index)
        if not long and (self.sizes.few(index) or any(isinstance(other.meta.get("val"), torch.Tensor) for other in others)):
            return None
        if several and any(user.target is not operator.getitem for user in node.users):
            return None
        found = local_form(node, views, self.builder)
        widest = max(self.sizes.width(view.values) for view in views.values())
        return None if found is None or (not long and self.sizes.width(found.values) > widest) else found

    # -- where rows end --------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Unpacks what is still used as rows, where it was made, and drops the rest."""
        started = {origin.dense for node, view in self.views.items() if node.target is tokens.unpack and (origin := origin_of(view.values))}
        self.context.unpacked[:] = [entry for entry in self.context.unpacked if entry.split(" for ")[0] not in started]
        needed: list[str] = []
        for node, view in reversed(self.views.items()):
            if not node.users:
                self.graph.erase_node(node)
            elif isinstance(node.meta["val"], torch.Tensor):
                self.builder.place, self.builder.epoch, self.builder.known = node, self.epochs[node], {}
                origin = origin_of(node) or origin_of(view.values)
                rows = self.builder.rows(view, node.meta["val"].is_contiguous())
                if origin is not None:
                    needed += [f"{origin.dense} for {self._dense_name(user)}" for user in node.users if user.op != "output"]
                self._replace(node, rows)
        self.builder.clean()
        self.context.unpacked += reversed(needed)

    @staticmethod
    def _dense_name(node: torch.fx.Node) -> str:
        origin = origin_of(node)
        return node.name if origin is None else origin.dense

    def _replace(self, node: torch.fx.Node, by: torch.fx.Node) -> None:
        origin = origin_of(node)
        if origin is not None:
            set_origin(by, origin)
        node.replace_all_uses_with(by)
        self.graph.erase_node(node)


def _writes(info: NodeInfo) -> set[int]:
    return info.writes.union(*(_writes(inner) for inner in info.body.nodes.values())) if info.body is not None else info.writes


def _leads(dims: list[list[str]]) -> Leads | None:
    """The token dimensions of a pattern; None if tokens share a dimension with others or columns come before rows."""
    marked = [(place, dim) for place, dim in enumerate(dims) if "B" in dim or "L" in dim]
    if [factor for _, dim in marked for factor in dim] != ["B", "L"]:
        return None
    return tuple((place, len(dim)) for place, dim in marked)


_USES: dict[Any, row_uses.Use] = {
    operator.getitem: row_uses.cut,
    torch.Tensor.narrow: row_uses.along_dimension,
    torch.narrow: row_uses.along_dimension,
    torch.Tensor.select: row_uses.along_dimension,
    torch.select: row_uses.along_dimension,
    torch.Tensor.index_select: row_uses.along_dimension,
    torch.index_select: row_uses.along_dimension,
    torch.Tensor.gather: row_uses.gather,
    torch.gather: row_uses.gather,
    torch.nn.functional.cross_entropy: row_uses.cross_entropy,
    torch.nn.functional.nll_loss: row_uses.nll_loss,
    torch.ops.sp_compile.token_logprobs: row_uses.token_logprobs,
    torch.ops.sp_compile.token_logprobs.default: row_uses.token_logprobs,
}
"""Uses of rows that are more than token by token."""
