"""Fresh shapes on a rewritten graph: the captured `example_value`s describe the dense graph and are stale after a rewrite."""

from __future__ import annotations

import contextlib
from typing import Any

import sympy
import torch
import torch.fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from sp_compile.analysis.inputs import GraphInputs
from sp_compile.analysis.state import preserved_global_state
from sp_compile.errors import StageError
from sp_compile.layout.tensors import device_of, symbolic_shape
from sp_compile.ops.dense_scans import KINDS
from sp_compile.ops.numerics import accumulate_dtype
from sp_compile.passes import markers
from sp_compile.passes.stage import Context, Input, Source, input_of, origin_of

_TOKENS_HINT = 1009


class Shapes:
    """Fake inputs of a rewritten graph over the symbols T, B, L and whatever else is dynamic."""

    def __init__(self, inputs: GraphInputs) -> None:
        self.inputs = inputs
        self.env = ShapeEnv(duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # over symbols, checking a cached result costs more than computing it
        self.symbols: dict[str, torch.SymInt] = {}
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
        self.graph, self.mode = graph, mode

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
        value = super().run_node(n)
        n.meta["val"] = value
        return value


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

    Returns:
        The symbols in which the values are written.

    Raises:
        StageError: a node has another shape. A defect of the package, found before anything runs.
    """
    inputs = context.analysis.inputs
    assert inputs is not None, "the outermost graph has inputs"
    shapes = Shapes(inputs)
    values = [shapes.value(input_of(node)) for node in graph.nodes if node.op == "placeholder"]
    with contextlib.ExitStack() as stack:
        for manager in (preserved_global_state(), torch.no_grad(), enable_python_dispatcher(), shapes.mode):
            stack.enter_context(manager)
        _Propagate(graph, module, shapes.mode).run(*values)
    fixed = [name for name, symbol in shapes.symbols.items() if name in "TBL" and symbol.node.expr in shapes.env.replacements]
    if fixed:
        raise StageError(f"the rewritten graph works for one size of {fixed} only")
    _check(graph, context, shapes)
    return shapes


def _check(graph: torch.fx.Graph, context: Context, shapes: Shapes) -> None:
    by_name = {node.name: info for node, info in context.analysis.nodes.items()}
    symbols = context.analysis.symbols
    t, b, length = (shapes.symbol(n).node.expr for n in ("T", "B", "L"))
    for node in graph.nodes:
        origin = origin_of(node)
        if origin is None or not isinstance(node.meta.get("val"), torch.Tensor) or origin.dense not in by_name:
            continue
        dense = by_name[origin.dense].value
        if not isinstance(dense, torch.Tensor):
            continue
        tokens = shapes.symbol(f"T@{origin.ahead}-{origin.cut}").node.expr + origin.cut if origin.ahead or origin.cut else t
        small = {symbols.batch: 1, symbols.columns: tokens} if origin.packed else {symbols.batch: b, symbols.columns: length}
        wanted = [_expr(size).subs(small, simultaneous=True) for size in dense.shape]
        got = [_expr(size) for size in node.meta["val"].shape]
        if len(wanted) != len(got) or any(
            sympy.simplify(a - c) != 0
            for a, c in zip(wanted, got, strict=True)
            if not (a - c).free_symbols - {t, b, length, *tokens.free_symbols}
        ):
            raise StageError(f"node {node.name} should be {wanted}, but is {got} (from dense node {origin.dense})")


def _expr(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
