"""Which implementations an op has, in order of preference, and which one a call gets.

An implementation is a torch op with the semantic op's arguments, followed by the forest tensors it needs besides. Selection reads
fake tensors only (device, dtype, shape), so it happens at compile time; everything that changes from batch to batch is a tensor input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sp_compile.errors import InvalidOption, NoImplementation, StageError

Arguments = Mapping[str, Any]
Supports = Callable[[Arguments], str | None]
PADDING_HIDES = "padding_hides"
"""The forest tensor of attention that says on the host whether padding hides any token. With `key_valid` it depends on a mask as well:
`select_kernels` then gives a graph input in its place, and `supports` finds the mask's number, or None, under "padding"."""

ForestNames = tuple[str, ...] | Callable[[Arguments], tuple[str, ...]]


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        name: unique within the op's table; what users write in `options={"kernels": {op: [name, ...]}}`.
        op: the overload to call, with the semantic op's positional arguments, then `forest_tensors`, then its keyword arguments.
        supports: given the arguments by schema name (tensors may be fake), None or a sentence saying why not.
        deterministic: equal inputs give equal bits, forward and backward, on every device that `supports` accepts.
        forest_tensors: names in the forest tensor registry; or a function that gives them for the arguments by schema name, of which it
            may read those that are no tensors.
        output: position of the semantic op's result among several outputs; None if `op` returns it alone.
    """

    name: str
    op: torch._ops.OpOverload
    supports: Supports
    deterministic: bool
    forest_tensors: ForestNames = ()
    output: int | None = None

    def forest_names(self, arguments: Arguments) -> tuple[str, ...]:
        """Names of the forest tensors that a call with these arguments needs, in the order in which `op` takes them."""
        return self.forest_tensors if isinstance(self.forest_tensors, tuple) else self.forest_tensors(arguments)


@dataclass(frozen=True)
class Selection:
    """The chosen implementation, and `(name, reason)` of those before it in the table."""

    implementation: Implementation
    rejected: tuple[tuple[str, str], ...]


_TABLES: dict[torch._ops.OpOverload, tuple[Implementation, ...]] = {}


def register(op: torch._ops.OpOverload, *implementations: Implementation) -> None:
    """Sets the table of a semantic op, best implementation first. Raises StageError for a second table or a repeated name."""
    names = [item.name for item in implementations]
    if op in _TABLES:
        raise StageError(f"lowering: {full_name(op)} has a table already ({', '.join(item.name for item in _TABLES[op])})")
    if len(set(names)) != len(names):
        raise StageError(f"lowering: names in the table of {full_name(op)} must differ; got {', '.join(names)}")
    _TABLES[op] = implementations


def semantic_ops() -> tuple[torch._ops.OpOverload, ...]:
    """Ops that have a table, in order of registration."""
    return tuple(_TABLES)


def implementations(op: torch._ops.OpOverload) -> tuple[Implementation, ...]:
    """The table of `op`, best first. Raises NoImplementation if there is none."""
    if op not in _TABLES:
        raise NoImplementation(
            f"{full_name(op)}: no table of implementations; expected one of {', '.join(full_name(known) for known in _TABLES)}"
        )
    return _TABLES[op]


def full_name(op: torch._ops.OpOverload) -> str:
    """`sp_compile::attention`."""
    return str(op._schema.name)


def option_name(op: torch._ops.OpOverload) -> str:
    """The name by which users speak of an op: `attention` for `sp_compile::attention`."""
    return full_name(op).split("::")[-1]


def bind(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by schema name, defaults filled in. Raises StageError for arguments that do not fit the schema."""
    schema = op._schema.arguments
    positional = [item for item in schema if not item.kwarg_only]
    known = {item.name for item in schema}
    if len(args) > len(positional) or not known.issuperset(kwargs):
        raise StageError(f"lowering: arguments do not fit {op._schema}")
    bound = {item.name: item.default_value for item in schema if item.has_default_value()}
    bound |= {item.name: value for item, value in zip(positional, args, strict=False)} | dict(kwargs)
    missing = known.difference(bound)
    if missing:
        raise StageError(f"lowering: {full_name(op)} lacks {', '.join(sorted(missing))}")
    return bound


def call(
    implementation: Implementation, semantic: torch._ops.OpOverload, bound: Arguments, forest: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(args, kwargs)` for `implementation.op`; values may be tensors or graph nodes.

    Args:
        bound: the semantic op's arguments, see `bind`.
        forest: values of the forest tensors, by registry name.
    """
    schema = semantic._schema.arguments
    args = [bound[item.name] for item in schema if not item.kwarg_only]
    args += [forest[name] for name in implementation.forest_names(bound)]
    return tuple(args), {item.name: bound[item.name] for item in schema if item.kwarg_only}


def select(
    op: torch._ops.OpOverload, arguments: Arguments, *, names: Sequence[str] | None = None, deterministic: bool | None = None
) -> Selection:
    """The first implementation that supports a call.

    Args:
        arguments: see `bind`; graph nodes replaced by their fake tensors.
        names: the user's list: only these, in this order. None: the whole table.
        deterministic: restrict to bit-reproducible ones; None: what `torch.are_deterministic_algorithms_enabled()` says.

    Raises:
        InvalidOption: `names` holds a name that the table lacks.
        NoImplementation: none supports the call; the text has each one's reason.
    """
    table = {item.name: item for item in implementations(op)}
    unknown = [name for name in names or () if name not in table]
    if unknown:
        raise InvalidOption(f"kernels[{option_name(op)!r}]: expected names among {', '.join(table)}; got {', '.join(unknown)}")
    strict = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    rejected: list[tuple[str, str]] = []
    for item in table.values() if names is None else (table[name] for name in names):
        banned = strict and not item.deterministic
        reason = "not deterministic, and deterministic algorithms are required" if banned else item.supports(arguments)
        if reason is None:
            return Selection(item, tuple(rejected))
        rejected.append((item.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected) or "the list of names is empty"
    raise NoImplementation(f"{full_name(op)}: no implementation supports this call ({reasons})")
