"""Random programs: each step applies one op, of a family or of any, to earlier values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.fx
import torch.nn.functional as F

from tests.analysis.programs import Program

_T = TypeVar("_T")
Pick = Callable[[Sequence[Any]], Any]
Step = Callable[["Writer"], torch.fx.Node]
FAMILIES: dict[str, list[Step]] = {}
_ALL = slice(None)


class Writer:
    """Writes one program; `pick` chooses."""

    def __init__(self, pick: Pick) -> None:
        self.program = Program()
        self.pick = pick
        p = self.program
        self.pool: list[torch.fx.Node] = [p.ids, p.mask, p.types, p.weights, p.per_row, p.table]
        self.pool.append(p.call(F.embedding, p.ids, p.words))
        self.hidden = self.pool[-1]

    def value(self, node: torch.fx.Node) -> torch.Tensor:
        found: torch.Tensor = self.program.values[node]
        return found

    def any(self, good: Callable[[torch.Tensor], bool] = lambda t: True) -> torch.fx.Node:
        """An earlier tensor, a recent one more often."""
        found = [n for n in self.pool if good(self.value(n))]
        if not found:
            raise ValueError("no earlier value fits")
        return self.pick([*found, *found[-3:], *found[-1:] * 2])

    def floating(self) -> torch.fx.Node:
        return self.any(lambda t: t.is_floating_point())

    def integer(self) -> torch.fx.Node:
        return self.any(lambda t: t.dtype == torch.int64)

    def boolean(self) -> torch.fx.Node:
        return self.any(lambda t: t.dtype == torch.bool)

    def like(self, node: torch.fx.Node) -> torch.fx.Node:
        """An earlier value of the same shape and dtype."""
        wanted = self.value(node)
        return self.any(lambda t: t.shape == wanted.shape and t.dtype == wanted.dtype)

    def dim(self, node: torch.fx.Node) -> int:
        rank = self.value(node).dim()
        if not rank:
            raise ValueError("a scalar has no dimension")
        return self.pick(range(-1, rank))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return self.program.call(target, *args, **kwargs)

    def step(self, steps: Sequence[Step]) -> None:
        """One more value, if the chosen step fits what is there."""
        before, known = list(self.program.graph.nodes), len(self.pool)
        try:
            made = self.pick(steps)(self)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            del self.pool[known:]
            self._undo(before)
            return
        value = self.program.values[made]
        if isinstance(value, torch.Tensor) and 0 < value.numel() < 3000 and value.dim() <= 5:
            self.pool.append(made)

    def _undo(self, before: list[torch.fx.Node]) -> None:
        kept = set(before)
        for node in reversed(list(self.program.graph.nodes)):
            # a write that has happened on the sample has to stay
            if node not in kept and not node.users and not _writes(node):
                self.program.graph.erase_node(node)


def _writes(node: torch.fx.Node) -> bool:
    return node.target is operator.setitem or (isinstance(node.target, str) and node.target.endswith("_"))


def family(name: str) -> Callable[[Step], Step]:
    def register(step: Step) -> Step:
        FAMILIES.setdefault(name, []).append(step)
        return step

    return register


def program(pick: Pick, names: Sequence[str], steps: int) -> tuple[Program, torch.fx.GraphModule]:
    """A program of at most `steps` values; returns the last of them, another one, and something that can always be shared."""
    writer = Writer(pick)
    chosen = [step for name in names for step in FAMILIES[name]]
    for _ in range(steps):
        writer.step(chosen)
    outputs = [writer.pool[-1], pick(writer.pool[6:]), writer.call(torch.tanh, writer.hidden)]
    return writer.program, writer.program.finish(*outputs)


# -- pointwise ---------------------------------------------------------------------------------------------------------------------


@family("pointwise")
def unary(w: Writer) -> torch.fx.Node:
    return w.call(w.pick([torch.sin, torch.neg, torch.tanh, torch.abs, torch.sigmoid, torch.relu]), w.floating())


@family("pointwise")
def number(w: Writer) -> torch.fx.Node:
    op = w.pick([operator.add, operator.sub, operator.mul, operator.lt, operator.ge, operator.eq, operator.ne, operator.gt, operator.le])
    return w.call(op, w.any(lambda t: t.dtype != torch.bool), w.pick([0, 1, 2, w.program.b, w.program.l]))


@family("pointwise")
def binary(w: Writer) -> torch.fx.Node:
    op = w.pick([torch.add, torch.mul, torch.sub, torch.maximum, torch.lt, torch.ge, torch.eq, torch.le])
    return w.call(op, w.any(), w.any())


@family("pointwise")
def logic(w: Writer) -> torch.fx.Node:
    op = w.pick([torch.logical_and, torch.logical_or, torch.bitwise_and, torch.bitwise_or, torch.logical_not])
    args = [w.boolean()] if op is torch.logical_not else [w.boolean(), w.boolean()]
    return w.call(op, *args)


@family("pointwise")
def select_values(w: Writer) -> torch.fx.Node:
    return w.call(torch.where, w.boolean(), w.pick([w.floating(), 0.0, -torch.inf, 1.0]), w.pick([w.floating(), 0.0, -1e9]))


@family("pointwise")
def fill_masked(w: Writer) -> torch.fx.Node:
    return w.call("masked_fill", w.floating(), w.boolean(), w.pick([0.0, -1e9, 2.0]))


@family("pointwise")
def cast(w: Writer) -> torch.fx.Node:
    return w.call("to", w.any(), w.pick([torch.float64, torch.int64, torch.bool]))


# -- views -------------------------------------------------------------------------------------------------------------------------


@family("views")
def reshape(w: Writer) -> torch.fx.Node:
    p, x = w.program, w.any()
    b, n = p.b, p.l
    bl, twice = p.size(b, n), p.size(n, 2)
    shapes = [
        [b, n, -1],
        [bl, -1],
        [n, b, -1],
        [b, -1, n],
        [-1],
        [b, -1],
        [n, -1],
        [b, n, 2, -1],
        [b, 2, -1],
        [b, n],
        [n, b],
        [bl],
        [b, 1, n],
        [b, n, 1],
        [b, 2, n, -1],
        [-1, 2],
        [b, twice],
        [b, n, 4],
        [n, bl],
        [1, b, n, -1],
        [b, twice, -1],
    ]
    return w.call(w.pick(["reshape", "view"]), x, w.pick(shapes))


@family("views")
def flatten(w: Writer) -> torch.fx.Node:
    x = w.any(lambda t: t.dim() > 1)
    start = w.pick(range(w.value(x).dim() - 1))
    return w.call("flatten", x, start, start + 1)


@family("views")
def transpose(w: Writer) -> torch.fx.Node:
    x = w.any()
    return w.call("transpose", x, w.dim(x), w.dim(x))


@family("views")
def one_more(w: Writer) -> torch.fx.Node:
    x = w.any()
    return w.call("unsqueeze", x, w.dim(x))


@family("views")
def one_less(w: Writer) -> torch.fx.Node:
    x = w.any()
    return w.call("squeeze", x, *w.pick([[], [w.dim(x)]]))


@family("views")
def expand(w: Writer) -> torch.fx.Node:
    p, x = w.program, w.any(lambda t: 1 in t.shape)
    at = w.pick([d for d, size in enumerate(w.value(x).shape) if size == 1])
    return w.call("expand", x, [w.pick([p.b, p.l, 2]) if d == at else -1 for d in range(w.value(x).dim())])


@family("views")
def repeat(w: Writer) -> torch.fx.Node:
    p, x = w.program, w.any()
    return w.call("repeat", x, [w.pick([1, 1, 2, p.b, p.l]) for _ in range(w.value(x).dim())])


@family("views")
def chunk(w: Writer) -> torch.fx.Node:
    x = w.any()
    parts = w.call("chunk", x, 2, w.dim(x))
    return w.call(operator.getitem, parts, w.pick([0, 1]))


@family("views")
def table(w: Writer) -> torch.fx.Node:
    p = w.program
    return w.call(operator.getitem, w.any(), w.pick([slice(None, p.l), (slice(0, p.l), slice(0, p.l)), (Ellipsis, slice(None, p.l))]))


# -- cuts and joins of columns -----------------------------------------------------------------------------------------------------


def _cuts() -> list[Any]:
    cuts = [
        slice(1, None),
        slice(None, -1),
        slice(None, 2),
        slice(0, 1),
        slice(1, 2),
        slice(2, 3),
        slice(None, None, 2),
        slice(-1, None),
        0,
        -1,
        1,
    ]
    return [place for cut in cuts for place in ((_ALL, cut), (Ellipsis, cut), (_ALL, _ALL, cut), cut)]


@family("shifts")
def cut(w: Writer) -> torch.fx.Node:
    return w.call(operator.getitem, w.any(), w.pick(_cuts()))


@family("shifts")
def cat(w: Writer) -> torch.fx.Node:
    x = w.any(lambda t: t.dim() > 0)
    return w.call(torch.cat, [x, w.any(), *w.pick([[], [w.any()]])], w.dim(x))


@family("shifts")
def cat_columns(w: Writer) -> torch.fx.Node:
    """Pieces of one value along its columns."""
    x = w.any(lambda t: t.dim() == 2)
    pieces = [
        w.call(
            operator.getitem, x, (_ALL, w.pick([slice(0, 1), slice(1, 2), slice(2, 3), slice(1, None), slice(None, -1), slice(None, -2)]))
        )
        for _ in range(w.pick([2, 3]))
    ]
    return w.call(torch.cat, w.pick([pieces, [w.call(torch.zeros_like, pieces[0]), *pieces[1:]]]), 1)


@family("shifts")
def pad(w: Writer) -> torch.fx.Node:
    amounts = [(1, 0), (0, 1), (1, -1), (-1, 1), (0, 0, 1, -1), (0, 0, -1, 1), (1, -1, -1, 1), (-1, 1, 1, -1), (-1, 0), (2, -2)]
    return w.call(F.pad, w.any(), w.pick(amounts))


@family("shifts")
def move(w: Writer) -> torch.fx.Node:
    x = w.any()
    return w.pick(
        [lambda: w.call("flip", x, [w.dim(x)]), lambda: w.call(torch.roll, x, 1, w.dim(x)), lambda: w.call(torch.diff, x, dim=w.dim(x))]
    )()


# -- reductions and scans ----------------------------------------------------------------------------------------------------------


@family("reductions")
def reduce(w: Writer) -> torch.fx.Node:
    op = w.pick([torch.sum, torch.mean, torch.amax, torch.argmax, torch.logsumexp, torch.var, torch.norm, torch.prod])
    x = w.floating()
    return w.call(op, x, dim=w.dim(x), keepdim=w.pick([True, False]))


@family("reductions")
def reduce_all(w: Writer) -> torch.fx.Node:
    return w.call(w.pick([torch.sum, torch.max, torch.any, torch.count_nonzero]), w.any())


@family("reductions")
def scan(w: Writer) -> torch.fx.Node:
    x = w.any()
    return w.call(w.pick([torch.cumsum, torch.cumprod, torch.softmax, torch.log_softmax, torch.argsort, torch.logcumsumexp]), x, w.dim(x))


@family("reductions")
def count(w: Writer) -> torch.fx.Node:
    x = w.integer()
    return w.call(torch.cumsum, x, w.dim(x))


@family("reductions")
def several(w: Writer) -> torch.fx.Node:
    x = w.floating()
    op = w.pick(
        [
            lambda: w.call(torch.sort, x, w.dim(x)),
            lambda: w.call(torch.topk, x, 2, w.dim(x)),
            lambda: w.call(torch.cummax, x, w.dim(x)),
            lambda: w.call(torch.max, x, w.dim(x)),
        ]
    )
    return w.call(operator.getitem, op(), 0)


@family("reductions")
def normalise(w: Writer) -> torch.fx.Node:
    p, x = w.program, w.floating()
    return w.pick(
        [
            lambda: w.call(F.layer_norm, x, (4,), p.scale),
            lambda: w.call(F.rms_norm, x, (4,)),
            lambda: w.call(F.normalize, x, dim=w.dim(x)),
            lambda: w.call(torch.renorm, x, 2, w.dim(x), 1.0),
            lambda: w.call(F.group_norm, x, 2),
        ]
    )()


@family("reductions")
def counts(w: Writer) -> torch.fx.Node:
    return w.call(w.pick([torch.trace, torch.histc]), w.any())


# -- products ----------------------------------------------------------------------------------------------------------------------


@family("products")
def linear(w: Writer) -> torch.fx.Node:
    return w.call(F.linear, w.floating(), w.program.matrix, w.pick([None, w.program.scale]))


@family("products")
def matmul(w: Writer) -> torch.fx.Node:
    x = w.floating()
    return w.call(torch.matmul, x, w.pick([w.floating(), w.call("transpose", w.floating(), -1, -2)]))


@family("products")
def einsum(w: Writer) -> torch.fx.Node:
    return w.call(
        torch.einsum, w.pick(["bld,bmd->blm", "bld,de->ble", "bld,bld->bl", "bld,cd->blc", "bld,bmd->bmd"]), w.floating(), w.floating()
    )


@family("products")
def attention(w: Writer) -> torch.fx.Node:
    p = w.program
    heads = [w.call("transpose", w.call("view", w.floating(), p.b, p.l, 2, 2), 1, 2) for _ in range(3)]
    mixed = w.call(F.scaled_dot_product_attention, *heads, is_causal=True)
    return w.call("reshape", w.call("transpose", mixed, 1, 2), p.b, p.l, 4)


@family("products")
def masked_attention(w: Writer) -> torch.fx.Node:
    """Under a causal mask made finer by any earlier pairwise value."""
    p = w.program
    causal = w.call("tril", w.call(torch.ones, p.l, p.l, dtype=torch.bool))
    extra = w.any(lambda t: t.dtype == torch.bool and t.dim() >= 1)
    x = w.call("unsqueeze", w.any(lambda t: t.is_floating_point() and t.dim() == 3), 1)
    mask = w.call(torch.logical_and, causal, extra)
    mask = w.call("unsqueeze", mask, 1) if w.value(mask).dim() == 3 else mask
    mask = w.call(torch.logical_or, mask, w.call(torch.eye, p.l, dtype=torch.bool)) if w.pick([True, False]) else mask
    if bool((~w.value(mask)).all(-1).any()):
        raise ValueError("a row without keys is NaN")
    return w.call("squeeze", w.call(F.scaled_dot_product_attention, x, x, x, attn_mask=mask), 1)


# -- indexing ----------------------------------------------------------------------------------------------------------------------


def _small(w: Writer) -> torch.fx.Node:
    return w.call(torch.remainder, w.integer(), 4)


@family("indexing")
def embedding(w: Writer) -> torch.fx.Node:
    return w.call(F.embedding, _small(w), w.program.words)


@family("indexing")
def one_hot(w: Writer) -> torch.fx.Node:
    return w.call(F.one_hot, _small(w), 4)


@family("indexing")
def lookup(w: Writer) -> torch.fx.Node:
    x, i = w.any(), _small(w)
    return w.call(operator.getitem, x, w.pick([i, (_ALL, i), (Ellipsis, i), (_ALL, _ALL, i)]))


@family("indexing")
def counted(w: Writer) -> torch.fx.Node:
    p, x = w.program, w.any()
    columns, rows = w.call(torch.arange, p.l), w.call(torch.arange, p.b)
    return w.call(
        operator.getitem, x, w.pick([(_ALL, columns), columns, rows, (w.call("unsqueeze", rows, 1), columns), (_ALL, columns, columns)])
    )


@family("indexing")
def gather(w: Writer) -> torch.fx.Node:
    x = w.any()
    return w.call(torch.gather, x, w.dim(x), _small(w))


@family("indexing")
def take(w: Writer) -> torch.fx.Node:
    x = w.any()
    return w.pick(
        [
            lambda: w.call(torch.index_select, x, w.dim(x), _small(w)),
            lambda: w.call(torch.gather, x, -1, w.call(torch.zeros_like, _small(w))),
        ]
    )()


@family("indexing")
def scatter(w: Writer) -> torch.fx.Node:
    x = w.floating()
    i = _small(w)
    return w.pick([lambda: w.call("scatter", x, w.dim(x), i, 1.0), lambda: w.call("scatter_add", x, w.dim(x), i, w.floating())])()


# -- made from sizes ---------------------------------------------------------------------------------------------------------------


@family("creation")
def made(w: Writer) -> torch.fx.Node:
    p = w.program
    sizes = w.pick([[p.b, p.l], [p.l, p.l], [p.l], [p.b, p.l, 4], [p.size(p.b, p.l)], [4], [p.b, 1]])
    return w.pick(
        [
            lambda: w.call(torch.ones, *sizes),
            lambda: w.call(torch.zeros, *sizes, dtype=torch.int64),
            lambda: w.call(torch.full, sizes, w.pick([2, 0.5, p.l])),
            lambda: w.call(torch.ones, *sizes, dtype=torch.bool),
        ]
    )()


@family("creation")
def ranges(w: Writer) -> torch.fx.Node:
    p = w.program
    return w.pick(
        [
            lambda: w.call(torch.arange, p.l),
            lambda: w.call(torch.arange, p.b),
            lambda: w.call(torch.arange, 1, w.call(operator.add, p.l, 1)),
            lambda: w.call(torch.arange, 4),
            lambda: w.call(torch.arange, p.size(p.b, p.l)),
            lambda: w.call(torch.arange, p.l, 0, -1),
            lambda: w.call(torch.linspace, 0, 1, p.l),
            lambda: w.call(torch.eye, p.l),
        ]
    )()


@family("creation")
def like(w: Writer) -> torch.fx.Node:
    return w.call(w.pick([torch.zeros_like, torch.ones_like]), w.any())


@family("creation")
def triangle(w: Writer) -> torch.fx.Node:
    return w.call(w.pick([torch.tril, torch.triu]), w.any(lambda t: t.dim() >= 2), w.pick([0, 1, -1, -2]))


@family("creation")
def pairs_of(w: Writer) -> torch.fx.Node:
    """A condition on (query, key)."""
    x, y = w.any(lambda t: 1 <= t.dim() <= 2), w.any(lambda t: 1 <= t.dim() <= 2)
    return w.call(w.pick([torch.le, torch.eq, torch.sub, torch.mul, torch.gt]), w.call("unsqueeze", x, -1), w.call("unsqueeze", y, -2))


# -- in place ----------------------------------------------------------------------------------------------------------------------


def _buffer(w: Writer) -> torch.fx.Node:
    """Memory that may be written: no input, no parameter."""
    inputs = {
        w.value(n).untyped_storage().data_ptr()
        for n in w.program.values
        if n.op == "placeholder" and isinstance(w.program.values[n], torch.Tensor)
    }
    fresh = [n for n in w.pool if w.value(n).untyped_storage().data_ptr() not in inputs and n is not w.hidden]
    return w.pick([*fresh, w.call("clone", w.any()), w.call(torch.zeros_like, w.any())])


@family("writes")
def write(w: Writer) -> torch.fx.Node:
    x = _buffer(w)
    w.pool.append(x)
    w.call(w.pick(["add_", "copy_", "mul_", "sub_"]), x, w.pick([w.like(x), w.any()]))
    return x


@family("writes")
def write_number(w: Writer) -> torch.fx.Node:
    x = _buffer(w)
    return w.call(w.pick(["fill_", "add_"]), x, w.pick([1, w.program.l]))


@family("writes")
def write_part(w: Writer) -> torch.fx.Node:
    x = _buffer(w)
    w.pool.append(x)
    place = w.pick([*_cuts(), (_ALL, _ALL), _ALL])
    part = w.call(operator.getitem, x, place)
    w.call(operator.setitem, x, place, w.pick([1, 0, w.like(part)]))
    return x


@family("writes")
def write_view(w: Writer) -> torch.fx.Node:
    x = _buffer(w)
    view = w.pick(
        [
            lambda: w.call(operator.getitem, x, w.pick(_cuts())),
            lambda: w.call("transpose", x, w.dim(x), w.dim(x)),
            lambda: w.call("view", x, -1),
            lambda: w.call("view", x, w.program.l, w.program.b),
        ]
    )()
    w.pool.append(view)
    w.call(w.pick(["copy_", "add_"]), *w.pick([[view, w.like(view)], [x, w.like(x)]]))
    return w.pick([x, view])
