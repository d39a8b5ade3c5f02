"""Runs a captured graph once on fake tensors and records the token layout of every value.

Every torch-level node is executed; the ATen ops it dispatches to are judged by `rules/`. A torch function without a rule of its own is
thus judged by what it does, so that models nobody has seen work.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import sympy
import torch
import torch.fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from sp_compile.analysis import recurrences, sites
from sp_compile.analysis.custom_gradients import judge_backward
from sp_compile.analysis.inputs import GraphInputs
from sp_compile.analysis.layouts import Kind, Layout, Reach, Reason, Symbols
from sp_compile.analysis.memory import Storage, displaces, fills, returns_written, storage_of, written
from sp_compile.analysis.node_checks import check_numbers, check_symbols
from sp_compile.analysis.permutations import Part
from sp_compile.analysis.refusals import refusal, source_line
from sp_compile.analysis.rules import Call, NotPackable, judge
from sp_compile.analysis.rules.one_row import carry_rows
from sp_compile.analysis.rules.registry import Moves, draws_random, require_moved_only
from sp_compile.analysis.sizes import Use, uses
from sp_compile.analysis.state import preserved_global_state
from sp_compile.analysis.token_sums import TokenSum, run_call
from sp_compile.capture.graphs import placeholders


@dataclasses.dataclass
class NodeInfo:
    """What the analysis found about one torch-level node.

    Attributes:
        value: the node's fake result.
        layouts: one layout per tensor of the flattened result, None for everything else.
        failure: why the op has no packed form, or None.
        shapes, numbers: whether a B or L is used as a size, or as a number, by the node.
        writes: storages the node mutates.
        body: the analysis of a higher-order op's body.
        attention: what an attention layer computes, if it can be shared.
        scan: what a recurrence or causal convolution computes, if it can be shared.
        segments: node of the positions whose jumps, along each row, are counted by this node; for packed inputs.
        moves: by how many columns the node moves its operand, if that is all that is between it and a packed form.
        token_sum: the reduction over all tokens that this node is, if rows share what it reduces.
        once: whether it gives a gradient of its own to a value that all tokens share, so that it may not be computed twice.
    """

    value: Any = None
    layouts: list[Layout | None] = dataclasses.field(default_factory=list)
    failure: Reason | None = None
    shapes: bool = False
    numbers: bool = False
    writes: set[int] = dataclasses.field(default_factory=set)
    storages: set[int] = dataclasses.field(default_factory=set)
    body: Analysis | None = None
    attention: sites.AttentionCall | None = None
    segments: str | None = None
    scan: recurrences.ScanCall | None = None
    token_sum: TokenSum | None = None
    once: bool = False
    moves: Moves = dataclasses.field(default_factory=Moves)

    @property
    def tensors(self) -> list[Layout]:
        return [layout for layout in self.layouts if layout is not None]


@dataclasses.dataclass
class Analysis:
    """The layouts of one graph and what was learned on the way."""

    graph: torch.fx.Graph
    inputs: GraphInputs | None
    symbols: Symbols
    nodes: dict[torch.fx.Node, NodeInfo]
    random: Reason | None = None

    def layout(self, node: torch.fx.Node) -> Layout | None:
        """The layout of a node with a single tensor result."""
        found = self.nodes[node].layouts
        return found[0] if len(found) == 1 else None


ADVICE = "Do it after the last attention layer, where rows are apart anyway, or in a way that works on each token by itself."


class LayoutMode(TorchDispatchMode):
    """Attaches a layout to every tensor an ATen op makes."""

    def __init__(self, symbols: Symbols) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.symbols = symbols
        self.known: dict[int, tuple[Layout, int, int]] = {}
        self.alive: list[torch.Tensor] = []
        self.stored: dict[int, Storage] = {}
        self.info = NodeInfo()
        self.node: torch.fx.Node | None = None
        self.random: Reason | None = None
        self.chosen: set[sympy.Expr] = set()

    # -- layouts of tensors -------------------------------------------------------------------------------------------------

    def layout_of(self, tensor: torch.Tensor) -> Layout:
        if id(tensor) not in self.known:
            dims = tuple(self.symbols.dim(size) for size in tensor.shape)
            self.give(tensor, Layout(dims, Reach(Kind.UNIFORM), entry=not tensor.requires_grad))
        layout, storage, version = self.known[id(tensor)]
        state = self.stored[storage]
        return state.seen(layout) if state.version > version else layout

    def give(self, tensor: torch.Tensor, layout: Layout) -> None:
        storage = storage_of(tensor)
        state = self.stored.setdefault(storage, Storage())
        self.known[id(tensor)] = (layout, storage, state.version)
        self.alive.append(tensor)

    def rows(self, tensor: torch.Tensor, why: Reason, entry: bool) -> Layout:
        dims = tuple(self.symbols.dim(size) for size in tensor.shape)
        return Layout(dims, Reach(Kind.ROWS), entry=entry, why=why)

    def reason(self, text: str, op: object, advice: str = "") -> Reason:
        node = self.node
        return Reason(text, str(op), node.name if node is not None else "", source_line(node), advice)

    def fail(self, reason: Reason) -> None:
        if self.info.failure is None:
            self.info.failure = reason

    # -- one ATen op ---------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        self._note_sizes(func, args, kwargs)
        rule = judge(func)
        call = Call(func, args, kwargs, None, self.symbols, self.layout_of)
        before = [self.layout_of(t) for t in call.tensors]
        if rule is None and any(layout.has_tokens for layout in before) and not func._schema.is_mutable:
            decomposed = self._decompose(func, args, kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        call.output = func(*args, **kwargs)
        self._judge(call, rule, before)
        return call.output

    def _decompose(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # aten::size and its like are questions about metadata, which the dispatcher does not know as ops
        known = torch._C._dispatch_has_kernel(func.name())
        if not known or func.namespace not in ("aten", "prims") or torch.Tag.nondeterministic_seeded in func.tags:
            return NotImplemented
        table = torch._decomp.decomposition_table
        with self:
            if func in table:
                return table[func](*args, **kwargs)
            return func.decompose(*args, **kwargs)

    def _judge(self, call: Call, rule: Callable[[Call], Any] | None, before: list[Layout]) -> None:
        reach, entry, why = Reach(Kind.UNIFORM), True, None
        for layout in before:
            reach, entry, why = reach.join(layout.reach), entry and layout.entry, why or layout.why
        touches = any(layout.has_tokens or layout.reach.kind > Kind.COLUMN for layout in before)
        sized = any(self.symbols.mentions(size) for out in call.outputs for size in out.shape)
        if not call.outputs and rule is None and not written(call):
            return
        if draws_random(call) and (touches or sized):
            found = self.reason("random numbers are drawn per token, and rows that share a token would draw different ones", call.func,
                                "Set dropout to 0 (or call eval()), or draw the numbers outside of the model.")  # fmt: skip
            self.random = self.random or found
            self.fail(found)
            results: list[Layout] = [self.rows(out, found, False) for out in call.outputs]
        elif rule is None and not touches and not sized:
            dims = [tuple(self.symbols.dim(s) for s in out.shape) for out in call.outputs]
            results = [Layout(d, reach, entry=entry) for d in dims]
        else:
            results = self._results(call, rule, entry, why)
        if any(layout.rows_behind for layout in before):
            results = [layout.with_(rows_behind=True) for layout in results]
        self._store(call, results, touches)

    def _results(self, call: Call, rule: Callable[[Call], Any] | None, entry: bool, why: Reason | None) -> list[Layout]:
        try:
            if rule is None:
                raise NotPackable("there is no rule for this op", advice="Write the model without it, or register a rule.")
            given = rule(call)
            results = list(given) if isinstance(given, list | tuple) else [given]
            results = [layout.with_(why=layout.why or why) if layout.is_rows else layout for layout in results]
            require_moved_only(results)
            self._check_per_row(call, results)
        except NotPackable as refused:
            found = self.reason(refused.text, call.func, refused.advice or ADVICE)
            self.fail(why or found)
            known = refused.dense
            moves = refused.move is not None and known is not None and known.reach.kind <= Kind.TOKENS
            self.info.moves.note(refused.move if moves else None)
            if known is not None and (known.entry or (moves and not self.symbols.packed)):
                results = [known.with_(why=known.why or why or (found if known.is_rows else None)) for _ in call.outputs]
            else:
                results = [self.rows(out, why or found, entry) for out in call.outputs]
        return results

    def _check_per_row(self, call: Call, results: list[Layout]) -> None:
        for layout in results:
            axes = {axis.value for _, axis in layout.axes}
            if self.symbols.packed:
                if layout.reach.kind == Kind.TOKENS and not layout.has_tokens:
                    raise NotPackable("one value is made of all tokens at once, each of which stands for several rows")
                continue
            if layout.reach.kind == Kind.TOKENS and "B" not in axes and not layout.sorted:
                raise NotPackable("the tokens of one row are used for all rows")
            if layout.reach.kind == Kind.TOKENS and axes == {"B"} and not layout.has_spans:
                raise NotPackable("one value per row has no place among shared tokens", dense=layout if layout.entry else None)

    def _store(self, call: Call, results: list[Layout], touches: bool) -> None:
        outputs, targets = call.outputs, written(call)
        assert len(results) >= len(outputs), f"{call.func}: a layout for each output"
        if targets and returns_written(call, targets):
            for target, result in zip(targets, results, strict=False):
                self._write(call, target, result)
        else:
            for target in targets:
                known = self.layout_of(target)
                self._write(
                    call, target, self._unknown(call, target, "an op without a rule writes in place", known.entry) if touches else known
                )
        for out, layout in zip(outputs, results, strict=False):
            if targets and any(storage_of(out) == storage_of(target) for target in targets):
                layout = self.layout_of(next(target for target in targets if storage_of(out) == storage_of(target)))
            assert len(layout.dims) == out.dim(), f"{call.func}: {layout.dims} does not describe {tuple(out.shape)}"
            self.give(out, layout)
            self.stored[storage_of(out)].displaced |= displaces(call)

    def _write(self, call: Call, target: torch.Tensor, result: Layout) -> None:
        """Joins what is written into the memory behind a tensor."""
        base, state = self.layout_of(target), self.stored[storage_of(target)]
        if base.is_rows and not result.is_rows:
            result = self._unknown(call, target, "an op writes to a part of the rows or columns", result.entry and base.entry)
        elif not result.is_rows and result.dims != base.dims:
            result = self._unknown(call, target, "tokens are written into a value that has none there", result.entry and base.entry)
        elif state.displaced and result.reach.kind == Kind.TOKENS:
            result = self._unknown(
                call, target, "tokens are written into a value whose columns are also seen shifted", result.entry and base.entry
            )
        state.write(result)
        merged = (
            result if fills(target) else result.with_(reach=base.reach.join(result.reach), entry=base.entry and result.entry, fact=None)
        )
        self.give(target, merged.with_(dims=base.dims))
        self.info.writes.add(storage_of(target))

    def _unknown(self, call: Call, target: torch.Tensor, text: str, entry: bool) -> Layout:
        why = self.reason(text, call.func, "Write it without in-place ops.")
        self.fail(why)
        return self.rows(target, why, entry)

    def _note_sizes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = uses(func, args, kwargs, self.symbols)
        self.info.shapes |= bool(found & Use.SIZE)
        self.info.numbers |= bool(found & Use.NUMBER)
        if found & Use.PLACE:
            self.fail(self.reason("a place inside of a dimension is computed from the number of rows or columns", func))


class _Runner(torch.fx.Interpreter):
    """Executes torch-level nodes under a LayoutMode and keeps a NodeInfo for each."""

    def __init__(self, module: torch.fx.GraphModule, mode: LayoutMode, fake_mode: Any) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.mode = mode
        self.fake_mode = fake_mode
        self.found: dict[torch.fx.Node, NodeInfo] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        outer, outer_node = self.mode.info, self.mode.node
        info = self.mode.info = NodeInfo()
        self.mode.node = n
        try:
            info.value = super().run_node(n)
            check_symbols(self.mode, self.fake_mode, n.target)
            given = tree_leaves(torch.fx.map_arg((n.args, n.kwargs), lambda operand: self.env[operand]))
            check_numbers(self.mode, n.target, info, given)
            carry_rows(self.mode, n, given, tree_leaves(info.value))
        except GuardOnDataDependentSymNode:
            raise refusal(self.mode.reason("a value of a tensor is used as a size, or as one place in a dimension", n.target)) from None
        finally:
            self.mode.info, self.mode.node = outer, outer_node
        flat, _ = tree_flatten(info.value)
        info.layouts = [self.mode.layout_of(v).folded if isinstance(v, torch.Tensor) else None for v in flat]
        info.storages = {storage_of(v) for v in flat if isinstance(v, torch.Tensor)}
        self.mode.chosen |= {f.size for layout in info.tensors for dim in layout.dims for f in dim if isinstance(f, Part)}
        self.found[n] = info
        return info.value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = self.fetch_attr(target)
        return self.fake_mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in sites.RULES:
            return sites.apply(target, self.mode, self.n_args(), args, kwargs, self.found)
        if target in recurrences.RULES:
            return recurrences.apply(target, self.mode, self.n_args(), args, kwargs)
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self._higher_order(target, args, kwargs)
        return run_call(self, target, args, kwargs, super().call_function)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        return run_call(self, target, args, kwargs, super().call_method)

    def n_args(self) -> Callable[[Any], str | None]:
        """Maps a value back to the name of the node that holds it."""
        names = {id(value): node.name for node, value in self.env.items() if isinstance(value, torch.Tensor)}
        return lambda value: names.get(id(value))

    def _higher_order(self, target: Any, args: Any, kwargs: Any) -> Any:
        bodies = [a for a in args if isinstance(a, torch.fx.GraphModule)]
        if len(bodies) == 1 and args and args[0] is bodies[0] and str(target) in TRANSPARENT:
            inner = _Runner(bodies[0], self.mode, self.fake_mode)
            result = inner.run(*args[1:])
            self.mode.info.body = Analysis(bodies[0].graph, None, self.mode.symbols, inner.found)
            self.mode.info.writes.update(*(info.writes for info in inner.found.values()))
            return result
        if str(target) == "autograd_function_apply" and len(bodies) == 2:
            return self._custom_function(target, bodies[0], bodies[1], args[2:])
        return self._unshared(super().call_function(target, args, kwargs), self.mode.reason("a higher-order op has no rule", target))

    def _custom_function(self, target: Any, forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, args: Any) -> Any:
        """A function with a written backward is an op on tokens if both bodies are, and the backward is linear in the gradient."""
        inner = _Runner(forward, self.mode, self.fake_mode)
        results, saved = inner.run(*args)
        gradients = [torch.empty_like(result) for result in results]
        for result, gradient in zip(results, gradients, strict=True):
            self.mode.give(gradient, self.mode.layout_of(result).with_(fact=None, entry=False))
        outer = _Runner(backward, self.mode, self.fake_mode)
        given = outer.run(*gradients, *saved)
        infos = [*inner.found.values(), *outer.found.values()]
        why = next((info.failure for info in infos if info.failure), None)
        if why is None and any(info.writes or info.numbers or info.attention or info.scan or info.token_sum for info in infos):
            why = self.mode.reason("a function with a written backward writes in place, or counts rows or columns", target)
        pairs = [[self.mode.layout_of(v) if isinstance(v, torch.Tensor) else None for v in pair] for pair in zip(args, given, strict=False)]
        found = judge_backward(backward, len(gradients), pairs) if why is None else None
        if isinstance(found, str):
            why = self.mode.reason(found, target, "Use ops that torch differentiates.")
        self.mode.info.once = found is True
        return results if why is None else self._unshared(results, why)

    def _unshared(self, result: Any, why: Reason) -> Any:
        self.mode.fail(why)

        def mark(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                self.mode.give(value, self.mode.rows(value, why, False))
            return value

        return tree_map(mark, result)


TRANSPARENT = ("tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint")
"""Higher-order ops whose result is that of their body."""


def analyse(module: torch.fx.GraphModule, inputs: GraphInputs) -> Analysis:
    """Find the token layout of every value of a captured graph.

    Args:
        module: the Dynamo graph; not changed.
        inputs: its inputs as `read_inputs` describes them.

    Returns:
        One NodeInfo per node. Nothing is refused here: a value that cannot be shared is `ROWS` with a reason, and it is for the
        rewrite to decide whether anyone needs it shared.
    """
    mode = LayoutMode(inputs.symbols)
    for fake, layout in zip(inputs.fakes, inputs.layouts, strict=True):
        if layout is not None:
            mode.give(fake, layout)
    runner = _Runner(module, mode, inputs.mode)
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserved_global_state())
        stack.enter_context(torch.no_grad())
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(inputs.mode)
        stack.enter_context(mode)
        runner.run(*inputs.fakes)
    assert len(placeholders(module.graph)) == len(inputs.fakes), "every input has a fake value"
    return Analysis(module.graph, inputs, inputs.symbols, runner.found, random=mode.random)
