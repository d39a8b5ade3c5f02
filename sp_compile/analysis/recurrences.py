"""Rules for the dense scans: recurrences and causal convolutions captured as one op (see `ops/dense_scans.py`).

Token l of such an op reads columns through l of its own row, so its result is shared wherever its operands are. The state after the last
column is one value per row: it belongs to the rows, and is read off the tokens in which the rows end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from sp_compile.analysis.layouts import Axis, Dim, Kind, Layout, Reach, Span, Symbols
from sp_compile.ops.dense_scans import KINDS, ScanKind


@dataclasses.dataclass(frozen=True)
class ScanCall:
    """A recurrence as the rewrite sees it.

    Attributes:
        kind: key of `dense_scans.KINDS`.
        tensors: names of the dense graph's nodes, in the kind's order; None for an absent one.
        options: keyword options of the op on physical tokens.
        uniform: dtype in which the op takes the tensors of `ScanKind.uniform`.
        dtype: of the result.
        final: the result is the state after each row's last column.
    """

    kind: str
    tensors: tuple[str | None, ...]
    options: tuple[tuple[str, Any], ...]
    uniform: torch.dtype
    dtype: torch.dtype
    final: bool

    @property
    def names(self) -> list[str]:
        """The operands that are there."""
        return [name for name in self.tensors if name is not None]


RULES: dict[Any, tuple[ScanKind, bool]] = {}
"""Packets and overloads of the dense scans: kind, and whether the op gives the final state."""
for _kind in KINDS.values():
    for _op, _final in ((_kind.dense, False), *(((_kind.dense_state, True),) if _kind.state is not None else ())):
        RULES[_op] = RULES[_op.overloadpacket] = (_kind, _final)


def apply(target: Any, mode: Any, name_of: Callable[[Any], str | None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Run a dense scan on fake tensors: its value has the right shape, its layout is what the rule says."""
    kind, final = RULES[target]
    given: dict[str, Any] = dict.fromkeys(kind.tensors)
    given |= dict(zip(kind.tensors, args, strict=False))
    given |= kwargs
    shape = kind.state(given) if final and kind.state is not None else given[kind.result].shape
    value: torch.Tensor = given[kind.result].new_empty(shape, dtype=given["dtype"])
    mode.info.failure, mode.info.shapes, mode.info.numbers = None, False, False
    mode.give(value, _layout(kind, final, given, mode, name_of, value))
    return value


def _layout(
    kind: ScanKind, final: bool, given: dict[str, Any], mode: Any, name_of: Callable[[Any], str | None], value: torch.Tensor
) -> Layout:
    reach, sizes = Reach(Kind.UNIFORM), dict[str, Any]()
    columns = _columns(mode.layout_of(given[kind.result]), kind)
    for name, pattern in kind.tensors.items():
        if given[name] is None:
            continue
        layout = mode.layout_of(given[name])
        refused = _refusal(kind, name, pattern, layout, mode.symbols, columns, final) or _sizes(kind, name, pattern, given[name], sizes)
        if refused is not None:
            why = layout.why or mode.reason(refused, f"sp_compile::{kind.name}")
            mode.fail(why)
            return mode.rows(value, why, False)  # type: ignore[no-any-return]
        reach = reach.join(layout.reach)
    if kind.divides is not None and sizes[kind.divides[0]] % sizes[kind.divides[1]]:
        why = mode.reason(
            f"{sizes[kind.divides[1]]} groups do not divide the {sizes[kind.divides[0]]} heads of a {_title(kind)}", kind.name
        )
        mode.fail(why)
        return mode.rows(value, why, False)  # type: ignore[no-any-return]
    types = [given[name].dtype for name in kind.uniform]
    common: torch.dtype = types[0] if final else given["dtype"]  # a state has the dtype of sums, whatever the values have
    for dtype in types:
        common = torch.promote_types(common, dtype)
    mode.info.scan = ScanCall(
        kind.name,
        tuple(None if given[name] is None else name_of(given[name]) for name in kind.tensors),
        tuple((name, option) for name, option in given.items() if name not in (*kind.tensors, "dtype", "library")),
        common,
        given["dtype"],
        final,
    )
    if final:
        if mode.symbols.packed:
            why = mode.reason("the state after the last token is asked for, and packed values end with several rows", kind.name)
            mode.fail(why)
            return mode.rows(value, why, False)  # type: ignore[no-any-return]
        why = mode.reason("the state after a row's last column is one value per row", f"sp_compile::{kind.name}")
        return mode.rows(value, why, False)  # type: ignore[no-any-return]
    dims = list(mode.layout_of(given[kind.result]).dims)
    return Layout(tuple(dims), reach if reach.kind > Kind.COLUMN else Reach(Kind.COLUMN))


def _title(kind: ScanKind) -> str:
    return kind.name.replace("_", " ")


def _alternatives(pattern: str) -> list[list[str]]:
    return [one.split(" ") for one in pattern.lstrip("?").split("|")]


def _columns(layout: Layout, kind: ScanKind) -> Dim:
    """The column dimension of the operand that has the result's shape: all columns, or all but the last ones."""
    (letters, *_) = _alternatives(kind.tensors[kind.result])
    found = layout.dims[letters.index("L")] if len(layout.dims) == len(letters) else ()
    return found if len(found) == 1 and isinstance(found[0], Span) else (Axis.COLUMNS,)


def _refusal(kind: ScanKind, name: str, pattern: str, layout: Layout, symbols: Symbols, columns: Dim, final: bool) -> str | None:
    """Why an operand cannot be had on physical tokens, or None. One that looks ahead is had on a refined forest."""
    what = f"{name} of a {_title(kind)}"
    if layout.is_rows:
        return f"the {what} is not shared"
    (letters, *_) = _alternatives(pattern)
    if "L" not in letters:
        return f"the {what} differs from token to token" if layout.has_tokens or layout.reach.kind > Kind.UNIFORM else None
    whole = symbols.packed or final
    if layout.reach.kind > Kind.TOKENS or (whole and (not layout.reach.shared or columns != (Axis.COLUMNS,))):
        return f"the {what} looks ahead of its own column"
    places: dict[str, Dim] = {"B": symbols.rows_dim, "L": columns}
    fits = len(layout.dims) == len(letters) and all(
        dim == places[letter] if letter in places else not layout.token_dim(index)
        for index, (dim, letter) in enumerate(zip(layout.dims, letters, strict=True))
    )
    return None if fits else f"the {what} is not [{', '.join(letters)}] in rows B and columns L, but {list(layout.dims)}"


def _sizes(kind: ScanKind, name: str, pattern: str, value: torch.Tensor, known: dict[str, Any]) -> str | None:
    """Why an operand's sizes do not fit those of the operands before, or None; adds its own to `known`. Libraries may broadcast some."""
    for letters in _alternatives(pattern):
        here = {letter: size for letter, size in zip(letters, value.shape, strict=False) if letter not in ("B", "L")}
        if len(letters) == value.dim() and all(isinstance(size, int) and known.get(letter, size) == size for letter, size in here.items()):
            known.update(here)
            return None
    wanted = " or ".join(f"[{', '.join(str(known.get(letter, letter)) for letter in letters)}]" for letters in _alternatives(pattern))
    return f"the {name} of a {_title(kind)} is {list(value.shape)} where {wanted} is known"
