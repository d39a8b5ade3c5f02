"""Ops that put elements in another order along a dimension; a roll to the left lets every token read ahead."""

from __future__ import annotations

from sp_compile.analysis.layouts import COLUMN, Axis, Layout
from sp_compile.analysis.rules.registry import Call, Move, NotPackable, require_no_rows, rule


@rule("flip.default", "roll.default", "rot90.default")
def reorder(call: Call) -> Layout:
    base = call.layout_of(call.tensors[0])
    asked = call.arg("dims", [])
    touched = [int(d) % len(base.dims) for d in asked] if asked else list(range(len(base.dims)))
    if any(base.token_dim(d) for d in touched):
        name = call.func._schema.name.split("::")[1]
        text = f"{name} moves tokens along dimension {next(d for d in touched if base.token_dim(d))}"
        by = _rolled(call, base, touched) if name == "roll" else None
        if by is None:
            raise NotPackable(text)
        # what wraps around to the last columns stands in the first ones, which every row that agrees so far has in common
        raise NotPackable(text, dense=base.with_(reach=base.moved(by).join(COLUMN), fact=None), move=Move(by, wraps=True))
    require_no_rows(call, call.tensors[0], touched, call.func._schema.name.split("::")[1])
    return call.result(base.dims)


def _rolled(call: Call, base: Layout, touched: list[int]) -> int | None:
    """By how many columns a `roll` looks ahead, or None if it does not only do that."""
    shifts = call.arg("shifts")
    by = [-s for s in shifts] if isinstance(shifts, list | tuple) else [-shifts]
    alone = len(touched) == len(by) == 1 and base.dims[touched[0]] == (Axis.COLUMNS,) and len(base.column_like) == 1
    return by[0] if alone and isinstance(by[0], int) and by[0] >= 0 and not base.is_rows and not base.head else None
