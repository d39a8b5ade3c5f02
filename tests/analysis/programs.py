"""Straight-line programs on [B, L] token ids, written as graphs by hand, and what the analysis claims about them held against values."""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map

from sp_compile.analysis.facts import Affine, Atom, Constant, Fact, Nonzero, TwoValued, is_blocking
from sp_compile.analysis.inputs import read_inputs
from sp_compile.analysis.interpret import Analysis, analyse
from sp_compile.analysis.layouts import Axis, Kind, Layout, Span, Symbols
from sp_compile.analysis.permutations import Integers
from sp_compile.errors import CannotShare
from sp_compile.options import Options
from sp_compile.region import Region, without_sites

WORDS, WIDTH = 5, 4
TOKEN_INPUTS = ("ids", "mask", "types", "weights")
INPUTS = (*TOKEN_INPUTS, "per_row")


@dataclasses.dataclass
class Batch:
    """Inputs of one call, by name; `per_row` has one number per row."""

    ids: Tensor
    mask: Tensor
    types: Tensor
    weights: Tensor
    per_row: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in INPUTS]

    def agreement(self, other: Batch) -> Tensor:
        """[B, B'] how many leading columns of row b here and row b' there are equal in every token input; -1 if `per_row` differs."""
        equal = torch.stack([getattr(self, n)[:, None] == getattr(other, n)[None] for n in TOKEN_INPUTS]).all(0)
        length = equal.to(torch.int64).cumprod(-1).sum(-1)
        return torch.where(self.per_row[:, None] == other.per_row[None], length, -1)


def random_batch(rows: int, columns: int, seed: int) -> Batch:
    """Rows that share prefixes of several lengths; few words, so that rows often agree by chance, too."""
    g = torch.Generator().manual_seed(seed)

    def draw(high: int) -> Tensor:
        return torch.randint(0, high, (rows, columns), generator=g)

    batch = Batch(draw(WORDS), draw(2), draw(2), draw(3).double(), torch.randint(0, 2, (rows,), generator=g))
    for row in range(1, rows):
        source = int(torch.randint(0, row, (), generator=g))
        shared = int(torch.randint(0, columns + 1, (), generator=g))
        for name in TOKEN_INPUTS:
            getattr(batch, name)[row, :shared] = getattr(batch, name)[source, :shared]
        batch.per_row[row] = batch.per_row[source]
    return batch


def changed_batch(batch: Batch, seed: int) -> Batch:
    """The same rows, each with other tokens from some column on; the last row is wholly another."""
    rows, columns = batch.ids.shape
    other = random_batch(rows, columns, seed + 1000)
    g = torch.Generator().manual_seed(seed)
    keep = torch.randint(0, columns + 1, (rows, 1), generator=g)
    keep[-1] = 0
    early = torch.arange(columns)[None] < keep
    made = {name: torch.where(early, getattr(batch, name), getattr(other, name)) for name in TOKEN_INPUTS}
    return Batch(per_row=batch.per_row.clone(), **made)


class Program:
    """A graph with SymInt inputs B and L, the inputs of a `Batch` and a few parameters; runs on a sample while it is written."""

    def __init__(self, rows: int = 3, columns: int = 5) -> None:
        self.graph = torch.fx.Graph()
        self.sample = random_batch(rows, columns, 0)
        g = torch.Generator().manual_seed(1)
        self.parameters = {
            "words": torch.randn(8, WIDTH, generator=g, dtype=torch.float64).requires_grad_(),
            "matrix": torch.randn(WIDTH, WIDTH, generator=g, dtype=torch.float64).requires_grad_(),
            "scale": torch.randn(WIDTH, generator=g, dtype=torch.float64).requires_grad_(),
            "table": torch.randn(16, WIDTH, generator=g, dtype=torch.float64),
        }
        self.values: dict[torch.fx.Node, Any] = {}
        env = ShapeEnv(duck_shape=False)
        mode = FakeTensorMode(shape_env=env)
        self.b, self.l = (self._size(env, name, hint) for name, hint in (("s0", rows), ("s1", columns)))
        b, length = (node.meta["example_value"] for node in (self.b, self.l))
        for name in INPUTS:
            real = getattr(self.sample, name)
            with mode:
                fake = torch.empty([b, length][: real.dim()], dtype=real.dtype)
            setattr(self, name, self._placeholder(name, fake, real))
        for name, value in self.parameters.items():
            setattr(self, name, self._placeholder(name, value, value))

    def __getattr__(self, name: str) -> torch.fx.Node:
        raise AttributeError(name)

    def _size(self, env: ShapeEnv, name: str, hint: int) -> torch.fx.Node:
        source = ConstantSource(name)
        made = env.create_symintnode(env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC), hint=hint, source=source)
        return self._placeholder(name, made, hint)

    def _placeholder(self, name: str, example: Any, real: Any) -> torch.fx.Node:
        node = self.graph.placeholder(name)
        node.meta["example_value"] = example
        self.values[node] = real
        return node

    def call(self, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """Adds a call; raises what the call raises on the sample, and then adds nothing."""
        real_args, real_kwargs = (torch.fx.map_arg(given, lambda n: self.values[n]) for given in (args, kwargs))
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = (
                getattr(real_args[0], target)(*real_args[1:], **real_kwargs)
                if isinstance(target, str)
                else target(*real_args, **real_kwargs)
            )
        op = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(op, target, args, kwargs)
        self.values[node] = value
        return node

    def size(self, *factors: torch.fx.Node | int) -> torch.fx.Node | int:
        result = factors[0]
        for factor in factors[1:]:
            result = self.call(operator.mul, result, factor)
        return result

    def finish(self, *outputs: torch.fx.Node) -> torch.fx.GraphModule:
        self.graph.output(tuple(outputs))
        self.graph.lint()
        return torch.fx.GraphModule(torch.nn.Module(), self.graph)

    def inputs(self, batch: Batch) -> list[Any]:
        rows, columns = batch.ids.shape
        return [rows, columns, *(t.clone() for t in batch.tensors), *self.parameters.values()]


class _Record(torch.fx.Interpreter):
    """Keeps a copy of what every node gave when it ran."""

    def run(self, *args: Any) -> Any:
        self.kept: dict[torch.fx.Node, list[Tensor]] = {}
        return super().run(*args)

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        self.kept[n] = [leaf.detach().clone() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        return value


def analysed(module: torch.fx.GraphModule, values: Sequence[Any]) -> Analysis:
    return analyse(module, read_inputs(module.graph, values))


def claimed_wrong(program: Program, module: torch.fx.GraphModule, batches: Sequence[tuple[Batch, Batch]]) -> list[str]:
    """Every claim of the analysis that some pair of batches contradicts; the batches of a pair have one shape."""
    try:
        found = analysed(module, program.inputs(program.sample))
    except CannotShare:
        return []
    wrong: list[str] = []
    for pair in batches:
        runs = []
        for batch in pair:
            record = _Record(module)
            with torch.no_grad():
                record.run(*program.inputs(batch))
            runs.append(record.kept)
        rows, columns = pair[0].ids.shape
        sizes = {found.symbols.batch: rows, found.symbols.columns: columns}
        named = {node.name: runs[0][node] for node in runs[0]}
        summed = _of_all_tokens(found)
        for node, info in found.nodes.items():
            if node.op == "output":
                continue
            for number, layout in enumerate(info.tensors):
                given = [run[node][number] for run in runs]
                problem = _reach_wrong(layout, given, pair, found.symbols, sizes, node in summed) or _fact_wrong(layout, given[0], named)
                if problem:
                    wrong.append(f"{node.format_node()}: {problem}; claimed {layout.dims} {layout.reach} {layout.fact}")
    return wrong


def _of_all_tokens(found: Analysis) -> set[torch.fx.Node]:
    """Nodes that depend on a sum over all tokens: one value for all rows of a batch, and another one for another batch."""
    summed: set[torch.fx.Node] = set()
    for node, info in found.nodes.items():
        if info.token_sum is not None or summed & set(node.all_input_nodes):
            summed.add(node)
    return summed


def _factors(layout: Layout, value: Tensor, symbols: Symbols, sizes: dict[Any, int]) -> tuple[Tensor, list[Any]] | str:
    """The value with one dimension per factor."""
    factors = [f for dim in layout.dims for f in (dim or (1,))]
    shape = [int(symbols.expr(f).subs(sizes)) for f in factors]
    wanted = [int(symbols.size(dim).subs(sizes)) for dim in layout.dims]
    return (value.reshape(shape), factors) if wanted == list(value.shape) else f"sizes {list(value.shape)} are not {wanted}"


def _reach_wrong(
    layout: Layout, given: list[Tensor], pair: tuple[Batch, Batch], symbols: Symbols, sizes: dict[Any, int], summed: bool
) -> str | None:
    """What contradicts a reach; of what depends on a sum over the batch, only the rows of one batch are compared."""
    if layout.is_rows or layout.sorted:  # of sorted tokens nothing is claimed about rows; what comes of them is
        return None
    split = [_factors(layout, value, symbols, sizes) for value in given]
    if isinstance(split[0], str):
        return None if layout.has_spans else split[0]
    factors = split[0][1]
    values = [one[0] for one in split if not isinstance(one, str)]
    batch = [i for i, f in enumerate(factors) if f is Axis.BATCH]
    columns = [i for i, f in enumerate(factors) if f is Axis.COLUMNS or isinstance(f, Span)]
    if layout.reach.kind < Kind.TOKENS:
        if not summed and not _same(values[0], values[1]):
            return "depends on tokens"
        across = [values[0].select(i, 0).unsqueeze(i).expand_as(values[0]) for i in batch]
        return next(("differs between rows" for one in across if not _same(one, values[0])), None)
    if len(batch) > 1:
        return None
    if not batch:
        return "depends on tokens of no row"
    order = [*batch, *columns, *(i for i in range(len(factors)) if i not in (*batch, *columns))]
    moved = [
        value.permute(order).flatten(1 + len(columns)) if value.dim() > 1 + len(columns) else value.permute(order).unsqueeze(-1)
        for value in values
    ]
    length = pair[0].ids.shape[1]
    places = (
        torch.stack(torch.meshgrid(*(torch.arange(s) for s in moved[0].shape[1:-1]), indexing="ij")).amax(0)
        if columns
        else torch.tensor(length)
    )
    others = () if summed else ((pair[0], pair[1], moved[0], moved[1]),)
    for left, right, x, y in ((pair[0], pair[0], moved[0], moved[0]), *others):
        agree = left.agreement(right)
        reads = (places + layout.reach.shift + 1).clamp(0, length)
        must = reads <= agree.reshape(*agree.shape, *(1,) * places.dim())
        # torch 2.11 does not broadcast with equal_nan
        one, other = torch.broadcast_tensors(x[:, None].double(), y[None].double())
        differs = ~torch.isclose(one, other, rtol=1e-9, atol=1e-9, equal_nan=True).all(-1)
        if bool((must & differs).any()):
            where = (must & differs).nonzero()[0].tolist()
            return f"rows {where[:2]} agree through column {places.tolist()}+shift but differ at {where[2:]}"
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.isclose(a.double(), b.double(), rtol=1e-9, atol=1e-9, equal_nan=True).all())


def _fact_wrong(layout: Layout, value: Tensor, named: dict[str, list[Tensor]]) -> str | None:
    expected = _expected(layout, layout.fact, value, named)
    if expected is None:
        return None
    where, wanted = expected
    got, wanted = value.double(), wanted.double().expand(value.shape)
    where = where.expand(value.shape)
    blocked = torch.tensor([is_blocking(v) for v in wanted.flatten().tolist()]).reshape(wanted.shape) & (got <= -1e4)
    fine = torch.isclose(got, wanted, equal_nan=True) | blocked | ~where
    return None if bool(fine.all()) else "contradicts its fact"


def _along(dim: int, value: Tensor) -> Tensor:
    return torch.arange(value.shape[dim]).reshape([-1 if d == dim else 1 for d in range(value.dim())])


def _expected(layout: Layout, fact: Fact | None, value: Tensor, named: dict[str, list[Tensor]]) -> tuple[Tensor, Tensor] | None:
    """Where a fact says anything, and what."""
    everywhere = torch.ones([1] * value.dim(), dtype=torch.bool)
    if isinstance(fact, Constant):
        return everywhere, torch.full([1] * value.dim(), fact.value, dtype=torch.float64)
    if isinstance(fact, Integers):
        return everywhere, value.clamp(0, fact.below - 1).round()
    if isinstance(fact, Affine):
        total = torch.full([1] * value.dim(), fact.constant)
        for dim, coefficient in fact.coefficients:
            total = total + coefficient * _along(dim, value)
        return everywhere, total
    if isinstance(fact, TwoValued):
        holds = everywhere
        for condition in fact.conditions:
            if isinstance(condition, Atom):
                holds = holds & (_along(condition.left, value) - _along(condition.right, value) >= condition.bound)
            elif condition.dim is None:
                return None
            else:
                holds = holds & _placed(named[condition.node][0] != 0, layout, value, condition.dim)
        said = ~holds if fact.if_true is None else everywhere
        return said.expand(value.shape), torch.where(holds, 0.0 if fact.if_true is None else fact.if_true, fact.if_false).double()
    if isinstance(fact, Nonzero):
        wanted = _flags(named[fact.node][0] != 0, layout, value)
        fine = wanted is None or bool(((value != 0) == wanted).all())
        return None if fine else (everywhere, torch.full_like(value.double(), torch.nan))
    return None


def _flags(flags: Tensor, layout: Layout, value: Tensor) -> Tensor | None:
    """[B, L] flags brought to a value with one factor B and one L, wherever they stand."""
    factors = [(f, d) for d, dim in enumerate(layout.dims) for f in dim]
    axes = [f for f, _ in factors if isinstance(f, Axis)]
    if len(axes) != 2 or any(not isinstance(f, Axis | int) for f, _ in factors):
        return None
    sizes = {Axis.BATCH: flags.shape[0], Axis.COLUMNS: flags.shape[1]}
    shape = [sizes[f] if isinstance(f, Axis) else 1 for f, _ in factors]
    full = [sizes[f] if isinstance(f, Axis) else int(f) for f, _ in factors]  # type: ignore[arg-type]
    ordered = flags if axes[0] is Axis.BATCH else flags.t()
    return ordered.reshape(shape).expand(full).reshape(value.shape)


def _placed(flags: Tensor, layout: Layout, value: Tensor, dim: int) -> Tensor:
    """[B, L] flags along the value's row dimension and `dim`."""
    rows = next(i for i, d in enumerate(layout.dims) if d == (Axis.BATCH,))
    shape = [1] * value.dim()
    shape[rows], shape[dim] = flags.shape
    return flags.reshape(shape) if rows < dim else flags.t().reshape(shape)


@dataclasses.dataclass
class Outcome:
    """What the backend did with a program: a refusal, or errors against the dense graph."""

    refusal: str | None
    problems: list[str]


def shared_wrong(program: Program, module: torch.fx.GraphModule, batches: Sequence[Batch]) -> Outcome:
    """Runs the program through the whole backend and densely, on several batches, and compares results and gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        region = Region(module, without_sites(module), Options(inner="eager", min_sharing=1.0))
        region.variant_for(program.inputs(program.sample))
    refusal = region.variants[0].refusal
    if refusal is not None:
        internal = [str(refusal)] if "internal error" in str(refusal) else []
        return Outcome(str(refusal), internal)
    problems: list[str] = []
    for batch in batches:
        dense = _results(program, module, module, batch)
        packed = _results(program, module, region, batch)
        for name, (wanted, got) in enumerate(zip(dense, packed, strict=True)):
            if wanted.shape != got.shape or wanted.dtype != got.dtype or not _same(wanted, got):
                problems.append(f"result {name} of {[str(n) for n in module.graph.output_node().args[0]]}")
    return Outcome(None, problems)


def _results(program: Program, module: torch.fx.GraphModule, call: Callable[..., Any], batch: Batch) -> list[Tensor]:
    """Outputs, then the gradients of a weighted sum of the float ones."""
    outputs = [leaf for leaf in tree_leaves(call(*program.inputs(batch))) if isinstance(leaf, Tensor)]
    learned = [p for p in program.parameters.values() if p.requires_grad]
    total = torch.zeros((), dtype=torch.float64)
    for leaf in outputs:
        if leaf.requires_grad:
            total = total + (leaf * (1 + 0.1 * torch.sin(torch.arange(leaf.numel(), dtype=torch.float64)).reshape(leaf.shape))).sum()
    gradients = torch.autograd.grad(total, learned, allow_unused=True) if total.requires_grad else [None] * len(learned)
    return [*(o.detach() for o in outputs), *(g if g is not None else torch.zeros_like(p) for g, p in zip(gradients, learned, strict=True))]


def pairs(count: int = 3, seed: int = 0) -> list[tuple[Batch, Batch]]:
    """Pairs of batches for `claimed_wrong`."""
    shapes: Iterator[tuple[int, int]] = iter([(3, 5), (3, 6), (3, 7)] * count)
    made = [random_batch(*next(shapes), seed + n) for n in range(count)]
    return [(batch, changed_batch(batch, seed + n)) for n, batch in enumerate(made)]


__all__ = ["Batch", "Outcome", "Program", "analysed", "changed_batch", "claimed_wrong", "pairs", "random_batch", "shared_wrong", "tree_map"]
