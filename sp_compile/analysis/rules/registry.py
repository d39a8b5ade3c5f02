"""The rule registry and what a rule sees.

A rule receives a `Call` and returns the layout of each output tensor. It raises `NotPackable` when the op cannot be computed on
physical tokens; the op then runs on full rows, and `NotPackable.dense` says what is still known about its result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from sp_compile.analysis.layouts import COLUMN, ROWS, UNIFORM, Dim, Dims, Kind, Layout, Reach, Symbols
from sp_compile.analysis.permutations import Numbering

Rule = Callable[["Call"], "Layout | Sequence[Layout]"]
_R = TypeVar("_R", bound=Rule)


@dataclasses.dataclass(frozen=True)
class Move:
    """Element j of the result is element j + `by` of the operand's columns; if it `wraps`, the first columns follow the last."""

    by: int
    wraps: bool = False


@dataclasses.dataclass
class Moves:
    """What the failed ops of one node move altogether; nothing is known if one of them did something else."""

    total: Move | None = None
    spoiled: bool = False

    def note(self, move: Move | None) -> None:
        """Records one failed op; None for one that does not only move columns."""
        self.spoiled |= move is None
        before = self.total or Move(0)
        self.total = None if self.spoiled or move is None else Move(before.by + move.by, before.wraps or move.wraps)


class NotPackable(Exception):
    """The op has no packed form here.

    Args:
        text: why, one sentence.
        dense: the layout of the outputs when the op runs on full rows, if more than "rows" is known.
        advice: what a user can do.
        move: by how many columns the op only moves values, so that they may be gathered; `dense` then holds for activations, too.
    """

    def __init__(self, text: str, dense: Layout | None = None, advice: str = "", move: Move | None = None) -> None:
        super().__init__(text)
        self.move = move
        self.text = text
        self.dense = dense
        self.advice = advice


@dataclasses.dataclass
class Call:
    """One ATen op as the interpreter met it: real arguments (fake tensors), outputs, and the layouts of the tensors."""

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    symbols: Symbols
    raw_layout_of: Callable[[torch.Tensor], Layout]

    def layout_of(self, tensor: torch.Tensor) -> Layout:
        """The layout of an argument; only slices look at the head of a joined axis by itself."""
        return self.raw_layout_of(tensor).folded

    def arg(self, name: str, default: Any = None) -> Any:
        """The argument called `name` in the op's schema."""
        for position, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                if name in self.kwargs:
                    return self.kwargs[name]
                if not argument.kwarg_only and position < len(self.args):
                    return self.args[position]
                return argument.default_value if argument.has_default_value() else default
        return default

    def layout(self, name: str) -> Layout:
        return self.layout_of(self.arg(name))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor among the arguments, lists included, in order."""
        found: list[torch.Tensor] = []

        def visit(value: Any) -> None:
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, list | tuple):
                for item in value:
                    visit(item)

        for value in (*self.args, *self.kwargs.values()):
            visit(value)
        return found

    @property
    def outputs(self) -> list[torch.Tensor]:
        items = self.output if isinstance(self.output, list | tuple) else [self.output]
        return [item for item in items if isinstance(item, torch.Tensor)]

    @property
    def out(self) -> torch.Tensor:
        return self.outputs[0]

    def joined(self) -> tuple[Reach, bool]:
        """The reach of all tensor arguments together, and whether all of them are cheap entry values."""
        reach, entry = UNIFORM, True
        for tensor in self.tensors:
            layout = self.layout_of(tensor)
            reach = reach.join(layout.reach)
            entry = entry and layout.entry
        return reach, entry

    def result(self, dims: Dims, **changes: Any) -> Layout:
        """A layout with these dims that depends on every argument."""
        reach, entry = self.joined()
        return Layout(dims, reach, entry=entry, **changes)

    def dim(self, name: str = "dim", rank: int | None = None, default: int | None = None) -> int:
        """A dimension argument, counted from 0."""
        value = self.arg(name, default)
        if rank is None:
            rank = self.tensors[0].dim()
        return int(value) % max(rank, 1)


RULES: dict[torch._ops.OpOverload, Rule] = {}

CONTRACTS: dict[str, Rule] = {}
"""Rules for libraries' own ops by name, "namespace::op": the libraries need not be imported. What such an op does is taken from them."""


def rule(*overloads: str) -> Callable[[_R], _R]:
    """Register a rule for ATen overloads given as `"add.Tensor"`; names this torch does not have are skipped.

    Raises:
        ValueError: an overload already has a rule.
    """

    def register(function: _R) -> _R:
        for name in overloads:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if op is None:
                continue
            if op in RULES:
                raise ValueError(f"{op} already has a rule ({RULES[op].__name__}); one rule per overload")
            RULES[op] = function
        return function

    return register


def functional_form(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """`add_.Tensor` -> `add.Tensor`: in-place ops are judged by their functional rule."""
    name = func._schema.name.split("::")[1]
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, func._overloadname, None) if packet is not None else None


def judge(func: torch._ops.OpOverload) -> Rule | None:
    """The rule for an overload: its own, its functional form's, or the elementwise rule if torch tags it pointwise."""
    from sp_compile.analysis.rules.pointwise import pointwise

    if func._schema.name in CONTRACTS:
        return CONTRACTS[func._schema.name]
    for candidate in (func, functional_form(func)):
        if candidate is None:
            continue
        if candidate in RULES:
            return RULES[candidate]
        if torch.Tag.pointwise in candidate.tags and func.namespace in ("aten", "prims"):
            return pointwise
    return None


def broadcast(call: Call, tensors: Sequence[torch.Tensor], rank: int | None = None) -> Dims:
    """The dims of an elementwise result; every operand's token axes must line up.

    Raises:
        NotPackable: two operands carry different tokens in one dimension.
    """
    rank = max((t.dim() for t in tensors), default=0) if rank is None else rank
    result: list[Dim] = []
    for place in range(rank):
        found: Dim | None = None
        for tensor in tensors:
            index = place - (rank - tensor.dim())
            if index < 0:
                continue
            dim = call.layout_of(tensor).dims[index]
            if dim == () or dim == found:
                continue
            if found is None:
                found = dim
            else:
                merged = _same_tokens(found, dim)
                if merged is None:
                    raise NotPackable(f"operands carry different tokens along one dimension ({_show(found)} and {_show(dim)})")
                found = merged
        result.append(found or ())
    return tuple(result)


def _same_tokens(a: Dim, b: Dim) -> Dim | None:
    """Two factorisations of one size, where plain sizes may be split differently: the finer one."""
    plain_a, plain_b = all(isinstance(f, int) for f in a), all(isinstance(f, int) for f in b)
    return a if plain_a and plain_b else None


def _show(dim: Dim) -> str:
    return "x".join(str(f) for f in dim) or "1"


def require_plain(call: Call, tensor: torch.Tensor, dims: Sequence[int], what: str) -> None:
    """Refuse an op that works along token axes."""
    layout = call.layout_of(tensor)
    for dim in dims:
        if layout.token_dim(dim):
            raise NotPackable(f"{what} along dimension {dim} runs over tokens")
    require_no_rows(call, tensor, dims, what)


def require_no_rows(call: Call, tensor: torch.Tensor, dims: Sequence[int], what: str) -> None:
    """Refuse an op that works along what may be the batch dimension of packed values, where the rows cannot be told apart."""
    layout = call.layout_of(tensor)
    if not call.symbols.packed or not layout.has_tokens:
        return
    for dim in dims:
        if layout.may_be_rows(dim):
            raise NotPackable(f"{what} along dimension {dim} of size 1 may run over the rows, which are one in a packed call")


def require_moved_only(results: Sequence[Layout]) -> None:
    """Refuse an op that makes values of numbers that are others on physical tokens than on rows."""
    if any(layout.reach.kind is Kind.PLACES and not isinstance(layout.fact, Numbering) for layout in results):
        raise NotPackable(
            "a number made of all tokens at once (a count, or where a sorted token stands) is used as a value",
            advice="It may bring sorted tokens back, end the groups of a grouped matrix product, or be asserted.",
        )


def draws_random(call: Call) -> bool:
    """Whether the op draws random numbers; a fused attention with dropout 0 is tagged so, but does not."""
    return torch.Tag.nondeterministic_seeded in call.func.tags and call.arg("dropout_p") != 0.0


def uniform_entry(dims: Dims, reach: Reach = UNIFORM) -> Layout:
    return Layout(dims, reach, entry=True)


__all__ = ["COLUMN", "ROWS", "RULES", "Call", "NotPackable", "Rule", "broadcast", "judge", "require_no_rows", "require_plain", "rule"]
