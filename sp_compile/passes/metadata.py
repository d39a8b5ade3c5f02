"""Fresh shapes on a rewritten graph: the captured `example_value`s describe the dense graph and are stale after a rewrite."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, cast

import sympy
import torch
import torch.fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_leaves

from sp_compile.analysis.inputs import GraphInputs
from sp_compile.analysis.state import preserved_global_state
from sp_compile.errors import StageError
from sp_compile.layout.tensors import device_of, symbolic_shape
from sp_compile.ops.dense_scans import KINDS
from sp_compile.ops.numerics import accumulate_dtype
from sp_compile.passes import markers
from sp_compile.passes.stage import Context, Input, Source, input_of, origin_of

_TOKENS_HINT = 1009
_KEY = "val_of"


class Shapes:
    """Fake inputs of a rewritten graph over the symbols T, B, L and whatever else is dynamic."""

    def __init__(self, inputs: GraphInputs) -> None:
        self.inputs = inputs
        self.env = ShapeEnv(duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # over symbols, checking a cached result costs more than computing it
        self.symbols: dict[str, torch.SymInt] = {}
        self.given: dict[Input, Any] = {}
        # what the first call fits, such as a table of positions that is cut to L, has to fit here
        sizes = [
            s for fake in inputs.fakes for s in (fake.shape if isinstance(fake, torch.Tensor) else [fake]) if isinstance(s, torch.SymInt)
        ]
        sized = (f for f in inputs.fakes if isinstance(f, torch.Tensor) and any(isinstance(s, torch.SymInt) for s in f.shape))
        self.device: torch.device = next((fake.device for fake in sized), torch.device("cpu"))
        self.hints: dict[str, int] = {self.name(s.node.expr): int(s.node.hint) for s in sizes}

    def symbol(self, name: str) -> torch.SymInt:
        if name not in self.symbols:
            source = ConstantSource(f"sp_{name}")
            hint = self.hints.get(name, _TOKENS_HINT if name.startswith("T") else 13)
            made = self.env.create_symintnode(
                self.env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC), hint=hint, source=source
            )
            assert isinstance(made, torch.SymInt), "a dynamic symbol is never specialised"
            self.symbols[name] = made
        return self.symbols[name]

    def value(self, given: Input) -> Any:
        """The fake of an input of the rewritten graph, always the same one."""
        if given not in self.given:
            self.given[given] = self._made(given)
        return self.given[given]

    def _made(self, given: Input) -> Any:
        if given.source is Source.TOKENS:
            return self.symbol("T")
        if given.source in (Source.ROWS, Source.COLUMNS):
            return self.symbol("B" if given.source is Source.ROWS else "L")
        if given.source is Source.SIZE:
            size = self.inputs.fakes[int(given.key)]
            return self.symbol(self.name(size.node.expr)) if isinstance(size, torch.SymInt) else size
        if given.source is Source.HIDES:
            with self.mode:
                return torch.empty(1, dtype=torch.int64)
        if given.source is Source.FOREST:
            shape, dtype = symbolic_shape(str(given.key))
            sizes = [self.symbol(s) if isinstance(s, str) else s for s in shape]
            with self.mode:
                return torch.empty(sizes, dtype=dtype, device=device_of(str(given.key), self.device))
        fake = self.inputs.fakes[int(given.key)]
        if not isinstance(fake, torch.Tensor):
            return fake
        with self.mode:
            sizes = [self.symbol(self.name(s.node.expr)) if isinstance(s, torch.SymInt) else s for s in fake.shape]
            if any(isinstance(s, torch.SymInt) for s in sizes):
                return torch.empty(sizes, dtype=fake.dtype, device=fake.device)
            made = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device=fake.device)
            return made.requires_grad_(fake.requires_grad)

    def name(self, expr: sympy.Expr) -> str:
        symbols = self.inputs.symbols
        columns = "T" if symbols.packed else "L"
        return "B" if expr == symbols.batch else columns if expr == symbols.columns else str(expr)


class _Propagate(torch.fx.Interpreter):
    """Interprets a graph in place, so that metadata lands on its own nodes."""

    def __init__(self, graph: torch.fx.Graph, module: torch.fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(module)
        self.graph, self.mode, self.kept = graph, mode, 0

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = self.fetch_attr(target)
        return self.mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is markers.shared_attention:
            q, _, v = args[:3]
            return q.new_empty((*q.shape[:-1], v.shape[-1]))
        if target is markers.shared_scan:
            return _scan(*args)
        return super().call_function(target, args, kwargs)

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op not in ("call_function", "call_method"):
            value = n.meta["val"] = super().run_node(n)
            return value
        operands: Any = torch.fx.map_arg((n.args, n.kwargs), lambda operand: cast(Any, _Same(self.env[operand])))
        made_of = (n.target, *_switches(), operands)
        value = n.meta.get("val")
        if n.meta.get(_KEY) == made_of and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
            self.kept += 1
            return value
        value = super().run_node(n)
        n.meta["val"], n.meta[_KEY] = value, made_of
        return value


@dataclasses.dataclass(frozen=True, eq=False)
class _Same:
    """A value that equals nothing but the very same object, and keeps it alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _switches() -> tuple[Any, ...]:
    """The state of torch that a node's result depends on besides its operands."""
    cast = (f(device) for device in ("cpu", "cuda") for f in (torch.is_autocast_enabled, torch.get_autocast_dtype))
    return (torch.is_grad_enabled(), *cast)


def _scan(kind: str, tensors: tuple[Any, ...], final: Any, options: dict[str, Any]) -> Any:
    """The fake result of a scan marker; a convolution's tensors are channel-last already."""
    known = KINDS[kind]
    given = dict(zip(known.tensors, tensors, strict=True))
    like = given[known.result]
    if final is None or known.state is None:
        return like.new_empty(like.shape)
    return like.new_empty((final.shape[0], *known.state(given)[1:]), dtype=accumulate_dtype(like.dtype))


def propagate(graph: torch.fx.Graph, module: torch.fx.GraphModule, context: Context) -> Shapes:
    """Set `meta["val"]` of every node to a fake value over T, B and L, and check that packed nodes have the shapes the analysis promised.

    What an earlier call found out is kept, in `context` and on the nodes: nodes with the operands they had then are not run again.

    Returns:
        The symbols in which the values are written.

    Raises:
        StageError: a node has another shape. A defect of the package, found before anything runs.
    """
    inputs = context.analysis.inputs
    assert inputs is not None, "the outermost graph has inputs"
    shapes = context.shapes if isinstance(context.shapes, Shapes) and context.shapes.inputs is inputs else Shapes(inputs)
    values = [shapes.value(input_of(node)) for node in graph.nodes if node.op == "placeholder"]
    with contextlib.ExitStack() as stack:
        for manager in (preserved_global_state(), torch.no_grad(), enable_python_dispatcher(), shapes.mode):
            stack.enter_context(manager)
        runner = _Propagate(graph, module, shapes.mode)
        runner.run(*values)
    fixed = [name for name, symbol in shapes.symbols.items() if name in "TBL" and symbol.node.expr in shapes.env.replacements]
    if fixed and runner.kept:  # trials of a pass may have fixed it, in the same environment
        context.shapes = None
        for node in graph.nodes:
            node.meta.pop(_KEY, None)
        return propagate(graph, module, context)
    if fixed:
        raise StageError(f"the rewritten graph works for one size of {fixed} only")
    _check(graph, context, shapes)
    context.shapes = shapes
    return shapes


def _check(graph: torch.fx.Graph, context: Context, shapes: Shapes) -> None:
    by_name = {node.name: info for node, info in context.analysis.nodes.items()}
    symbols = context.analysis.symbols
    t, b, length = (shapes.symbol(n).node.expr for n in ("T", "B", "L"))
    expected: dict[tuple[Any, ...], sympy.Expr] = {}

    def differ(wanted: sympy.Expr, got: sympy.Expr, known: set[Any]) -> bool:
        return wanted != got and not (wanted - got).free_symbols - known and sympy.simplify(wanted - got) != 0

    for node in graph.nodes:
        origin = origin_of(node)
        if origin is None or not isinstance(node.meta.get("val"), torch.Tensor) or origin.dense not in by_name:
            continue
        dense = by_name[origin.dense].value
        if not isinstance(dense, torch.Tensor):
            continue
        tokens = shapes.symbol(f"T@{origin.ahead}-{origin.cut}").node.expr + origin.cut if origin.ahead or origin.cut else t
        small = {symbols.batch: 1, symbols.columns: tokens} if origin.packed else {symbols.batch: b, symbols.columns: length}
        wanted = []
        for size in map(_expr, dense.shape):
            if (size, origin.packed, tokens) not in expected:
                expected[size, origin.packed, tokens] = size.subs(small, simultaneous=True)
            wanted.append(expected[size, origin.packed, tokens])
        got = [_expr(size) for size in node.meta["val"].shape]
        known = {t, b, length, *tokens.free_symbols}
        if len(wanted) != len(got) or any(differ(a, c, known) for a, c in zip(wanted, got, strict=True)):
            raise StageError(f"node {node.name} should be {wanted}, but is {got} (from dense node {origin.dense})")


def _expr(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
