"""Which graph inputs hold tokens, and which symbols are the rows B and the columns L."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from sp_compile.analysis.facts import Constant, Nonzero, Triangle
from sp_compile.analysis.given_masks import given_fact
from sp_compile.analysis.layouts import COLUMN, TOKENS, UNIFORM, Layout, Symbols
from sp_compile.capture.graphs import blocking_number, example_of, is_module_state, is_symbolic, placeholders
from sp_compile.errors import CannotShare, NothingToShare

LARGEST_TABLE = 1 << 26
"""Constant tables above this many elements are not read to see whether they are triangular."""


@dataclasses.dataclass(frozen=True)
class TokenSizes:
    """Where B and L can be read at run time: (input number, dimension) of the token input, and of every dimension tied to it."""

    batch: tuple[int, int]
    columns: tuple[int, int]
    batch_ties: tuple[tuple[int, int], ...]
    columns_ties: tuple[tuple[int, int], ...]


Stamp = tuple[int, int]
"""Address and version of a constant table when its values were read; a version of -1 is not known and never trusted."""


@dataclasses.dataclass
class GraphInputs:
    """The inputs of one analysed graph: fake values over B and L, their layouts, and how to read the sizes."""

    mode: FakeTensorMode
    symbols: Symbols
    fakes: list[Any]
    layouts: list[Layout | None]
    token_sizes: TokenSizes | None
    constants_read: dict[int, Stamp]

    @property
    def sizes(self) -> TokenSizes:
        """Where to read B and L; packed inputs have none, their sizes are those of the forest."""
        assert self.token_sizes is not None, "asked of dense inputs only"
        return self.token_sizes


def constants_hold(inputs: GraphInputs, values: Sequence[Any]) -> bool:
    """Whether constant tables still hold what the analysis read in them; they are read again only if they were written to or replaced."""
    for number, stamp in inputs.constants_read.items():
        now = stamp_of(values[number])
        if now == stamp and now[1] >= 0:
            continue
        layout = inputs.layouts[number]
        if layout is None or not _still(values[number], layout):
            return False
        inputs.constants_read[number] = now
    return True


def _still(value: torch.Tensor, layout: Layout) -> bool:
    if isinstance(layout.fact, Constant):
        return bool((value == layout.fact.value).all())
    return read_triangle(value) == layout.fact


def stamp_of(value: torch.Tensor) -> Stamp:
    return value.data_ptr(), -1 if value.is_inference() else value._version


def find_token_input(graph: torch.fx.Graph) -> int:
    """The number of the input that holds the token ids: an integer [B, L] input, preferably one that indexes an embedding.

    Raises:
        NothingToShare: the ids are those of one row or one column.
        CannotShare: there is none.
    """
    nodes = placeholders(graph)
    found: list[int] = []
    for number, node in enumerate(nodes):
        value = example_of(node)
        if (
            isinstance(value, torch.Tensor)
            and value.dim() == 2
            and not value.dtype.is_floating_point
            and all(map(is_symbolic, value.shape))
        ):
            found.append(number)
    if not found:
        given = [example_of(node) for node in nodes if not is_module_state(node)]
        if any(is_single(value) for value in given):
            raise NothingToShare("one row, or one or two columns, which torch takes for constants, have next to nothing to share")
        fixed = [value for value in given if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point()]
        if any(is_symbolic(value.shape[0]) and int(value.shape[1]) > 2 for value in fixed if not is_symbolic(value.shape[1])):
            raise fixed_columns()
        raise no_token_input()
    embedded = [n for n in found if any("embedding" in str(user.target) for user in nodes[n].users)]
    return (embedded or found)[0]


def is_single(value: object) -> bool:
    """Whether a value looks like token ids of no or one row or column, or of two columns: one may be cut off for labels, and then the
    other is a constant too."""
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or value.is_floating_point():
        return False
    rows, columns = value.shape
    return (not is_symbolic(rows) and int(rows) <= 1) or (not is_symbolic(columns) and int(columns) <= 2)


def fixed_columns() -> CannotShare:
    return CannotShare(
        "the number of columns is a constant of this graph: something in the model runs once per column or branches on their number",
        advice="Write a loop over columns with ops on whole tensors, a recurrence with a scan function of a library that is known "
        "(transformers, mamba_ssm, causal_conv1d, fla), and keep sizes out of Python conditions.",
    )


def no_token_input() -> CannotShare:
    return CannotShare(
        "the graph has no integer [rows, columns] input to find prefixes in",
        advice="A region after a graph break, a part cut off by DistributedDataParallel (set torch._dynamo.config.optimize_ddp = False), "
        "or a model called with inputs_embeds, has none; remove the break or pass input_ids.",
    )


def static_refusal(graph: torch.fx.Graph, values: Sequence[Any]) -> tuple[CannotShare, bool]:
    """Why a graph without symbolic sizes cannot be shared, and whether that is worth a warning.

    One row, or one column, has nothing to share; that is no mistake of the user's.
    """
    given = [value for node, value in zip(placeholders(graph), values, strict=True) if not is_module_state(node)]
    wide = [
        value
        for value in given
        if isinstance(value, torch.Tensor) and value.dim() >= 2 and min(value.shape[:2]) > 1 and not is_single(value)
    ]
    if any(value.dim() == 2 and not value.is_floating_point() for value in wide):
        advice = "Leave the dynamic argument of torch.compile at its default, and mark no size of the token inputs as static."
        return CannotShare("rows and columns are static in this graph", advice=advice), True
    if any(value.dim() >= 3 and value.is_floating_point() for value in wide):
        return no_token_input(), True
    if not any(isinstance(value, torch.Tensor) and value.dim() > 1 for value in given) and any(map(_may_be_tokens, values)):
        return CannotShare(
            "token ids that a module holds as a buffer are a constant of the graph", advice="Pass them as an argument."
        ), True
    return CannotShare("rows and columns are static in this graph (one row, one column, or no token input)"), False


def _may_be_tokens(value: object) -> bool:
    integer = isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)
    return integer and value.dim() == 2 and min(value.shape) > 1  # type: ignore[attr-defined]


def read_inputs(graph: torch.fx.Graph, values: Sequence[Any]) -> GraphInputs:
    """Give every graph input a fake value whose token sizes are the two symbols B and L, and its layout.

    Dynamo gives every input its own symbols. Dimensions whose sizes equal B or L now are tied to them; the caller checks on every
    call that the ties still hold. Treating a coincidence as a tie is sound: the value then becomes part of what rows must agree in.

    Args:
        graph: the captured graph.
        values: the real inputs of the first call, in order.
    """
    nodes = placeholders(graph)
    ids = find_token_input(graph)
    shape = example_of(nodes[ids]).shape
    rows, columns = (int(s) for s in values[ids].shape)
    if rows == columns and _expr(shape[0]) == _expr(shape[1]):
        raise CannotShare(
            f"rows and columns have one size ({rows}) and one symbol, so they cannot be told apart", advice="Pass dynamic=True."
        )
    env = ShapeEnv(duck_shape=False, specialize_zero_one=True)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    mode.cache_enabled = False  # its keys cost more than what it saves in a graph whose sizes are all symbols
    made: dict[Any, torch.SymInt] = {}
    ties: dict[str, list[tuple[int, int]]] = {"B": [], "L": []}
    batch, length = make_symbol(env, "B", max(rows, 2)), make_symbol(env, "L", max(columns, 2))
    made[_expr(shape[0])], made[_expr(shape[1])] = batch, length

    def size_of(number: int, dim: int, size: int | torch.SymInt, real: int) -> int | torch.SymInt:
        if not is_symbolic(size):
            return int(size)
        expr = _expr(size)
        if expr not in made:
            if real == rows and (real != columns or dim == 0):
                made[expr] = batch
            elif real == columns:
                made[expr] = length
            elif expr.is_Symbol:
                made[expr] = make_symbol(env, str(expr), max(real, 2))
            else:
                raise CannotShare(f"input {nodes[number].name} has the computed size {expr} in dimension {dim}")
        chosen = made[expr]
        for name, value in (("B", batch), ("L", length)):
            if chosen is value and number >= 0:
                ties[name].append((number, dim))
        return chosen

    tensors: dict[int, list[int | torch.SymInt]] = {}
    for number, node in enumerate(nodes):
        example = example_of(node)
        if isinstance(example, torch.Tensor):
            tensors[number] = [size_of(number, d, s, int(values[number].shape[d])) for d, s in enumerate(example.shape)]
    symbols = Symbols(batch.node.expr, length.node.expr)
    fakes: list[Any] = []
    layouts: list[Layout | None] = []
    read: dict[int, Stamp] = {}
    for number, node in enumerate(nodes):
        example = example_of(node)
        if number in tensors:
            fake = make_fake(mode, example, values[number], tensors[number])
            layout = _layout(node, fake, values[number], symbols)
            if isinstance(layout.fact, Triangle | Constant):
                read[number] = stamp_of(values[number])
            fakes.append(fake)
            layouts.append(layout)
        elif isinstance(example, torch.SymInt):
            fakes.append(made[_expr(example)] if _expr(example) in made else other_size(env, made, example, values[number]))
            layouts.append(None)
        else:
            fakes.append(example if not isinstance(example, torch.SymFloat) else values[number])
            layouts.append(None)
    sizes = TokenSizes((ids, 0), (ids, 1), tuple(ties["B"]), tuple(ties["L"]))
    return GraphInputs(mode, symbols, fakes, layouts, sizes, read)


@dataclasses.dataclass(frozen=True)
class Coincidences:
    """Which symbolic sizes of a graph's inputs equal the number of rows, or that of columns, in one call: `read_inputs` ties sizes by it.

    What cannot be proved under one set of coincidences may be under another one.
    """

    graph: torch.fx.Graph
    found: tuple[tuple[bool, bool], ...]

    @staticmethod
    def of(graph: torch.fx.Graph, values: Sequence[Any]) -> Coincidences:
        return Coincidences(graph, _coincidences(graph, values))

    def hold(self, values: Sequence[Any]) -> bool:
        return _coincidences(self.graph, values) == self.found


def _coincidences(graph: torch.fx.Graph, values: Sequence[Any]) -> tuple[tuple[bool, bool], ...]:
    nodes = placeholders(graph)
    try:
        rows, columns = values[find_token_input(graph)].shape
    except CannotShare:
        return ()
    found = [(example_of(node), value) for node, value in zip(nodes, values, strict=True) if isinstance(value, torch.Tensor)]
    pairs = [pair for example, value in found for pair in zip(example.shape, value.shape, strict=True)]
    return tuple((real == rows, real == columns) for size, real in pairs if is_symbolic(size))


def _expr(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def make_symbol(env: ShapeEnv, name: str, hint: int) -> torch.SymInt:
    source = ConstantSource(f"sp_{name}")
    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    made = env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(made, torch.SymInt), "a dynamic symbol is never specialised"
    return made


def other_size(env: ShapeEnv, made: dict[Any, torch.SymInt], example: torch.SymInt, value: Any) -> torch.SymInt | int:
    if not is_symbolic(example):
        return int(example)
    hint = value.node.hint if isinstance(value, torch.SymInt) else int(value)
    made[_expr(example)] = make_symbol(env, str(_expr(example)), max(int(hint), 2))
    return made[_expr(example)]


def make_fake(mode: FakeTensorMode, example: torch.Tensor, value: torch.Tensor, sizes: list[int | torch.SymInt]) -> torch.Tensor:
    with mode:
        if any(isinstance(size, torch.SymInt) for size in sizes):
            fake = torch.empty(sizes, dtype=value.dtype, device=value.device)
        else:
            fake = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
        fake.requires_grad_(value.requires_grad)
    return fake


def _layout(node: torch.fx.Node, fake: torch.Tensor, value: torch.Tensor, symbols: Symbols) -> Layout:
    dims = tuple(symbols.dim(size) for size in fake.shape)
    layout = Layout(dims, UNIFORM, entry=not value.requires_grad)
    if not layout.has_tokens:
        return layout.with_(fact=read_constant(node, value))
    if value.requires_grad:
        raise CannotShare(
            f"input {node.name} {list(fake.shape)} has one value per row and requires grad",
            node=node.name,
            advice="Its gradient is per row and cannot be shared: pass token ids, or remove the graph break before this region.",
        )
    if all(axis.value == "L" for _, axis in layout.axes):
        return layout.with_(reach=COLUMN, entry=True, fact=given_fact(node.name, layout, value))
    if len(layout.columns_dims) == 2:
        return layout.with_(reach=TOKENS, entry=True, fact=given_fact(node.name, layout, value))
    fact = Nonzero(node.name) if len(dims) == 2 and [a.value for _, a in layout.axes] == ["B", "L"] else None
    return layout.with_(reach=TOKENS, entry=True, fact=fact)


def read_constant(node: torch.fx.Node, value: torch.Tensor) -> Triangle | Constant | None:
    """What a constant input holds, if it serves to mask attention."""
    number = blocking_number(node, value)
    return Constant(number) if number is not None else read_triangle(value)


def read_triangle(value: torch.Tensor) -> Triangle | None:
    """A constant causal table such as `tril(ones(N, N))` registered as a buffer, or the band of a sliding window."""
    if value.dim() < 2 or value.shape[-1] != value.shape[-2] or value.shape[-1] < 2 or value.requires_grad:
        return None
    if value.numel() > LARGEST_TABLE or value.numel() != value.shape[-1] ** 2 or value.dtype.is_complex:
        return None
    table = value.detach().reshape(value.shape[-1], value.shape[-1])
    lower, upper = table[0, 0].item(), table[0, 1].item()
    others = (table[:, 0] != lower).nonzero()
    window = int(others[0]) if len(others) else None
    kept = torch.ones_like(table, dtype=torch.bool).tril()
    if window is not None:
        kept = kept.triu(1 - window)
    expected = torch.where(kept, torch.full_like(table, lower), torch.full_like(table, upper))
    if lower == upper or not torch.equal(table, expected):
        return None
    return Triangle(float(lower), float(upper), int(table.shape[0]), window=window)
