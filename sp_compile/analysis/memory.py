"""What is known about memory that several tensors share, and which memory an op writes."""

from __future__ import annotations

import dataclasses

import sympy
import torch

from sp_compile.analysis.layouts import UNIFORM, Layout, Reach, Reason, size_expr
from sp_compile.analysis.rules import Call


@dataclasses.dataclass
class Storage:
    """The memory of a tensor and its views.

    Attributes:
        version: how often it was written.
        reach, entry, why: joined over everything that was written.
        rows_behind: as of a layout, joined likewise.
        displaced: whether some view counts its columns from a later one, so that a column has two numbers.
    """

    version: int = 0
    reach: Reach = UNIFORM
    entry: bool = True
    why: Reason | None = None
    rows_behind: bool = False
    displaced: bool = False

    def seen(self, layout: Layout) -> Layout:
        """What is left of a layout that was known before the last write."""
        reach = layout.reach.join(self.reach)
        behind = layout.rows_behind or self.rows_behind
        return layout.with_(reach=reach, entry=layout.entry and self.entry, why=layout.why or self.why, fact=None, rows_behind=behind)

    def write(self, layout: Layout) -> None:
        self.version += 1
        self.rows_behind |= layout.rows_behind
        self.reach, self.entry, self.why = self.reach.join(layout.reach), self.entry and layout.entry, self.why or layout.why


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def written(call: Call) -> list[torch.Tensor]:
    """The arguments that an op writes in place."""
    found = []
    for position, argument in enumerate(call.func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = call.kwargs.get(argument.name, call.args[position] if position < len(call.args) else None)
            found += [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, torch.Tensor)]
    return found


def returns_written(call: Call, targets: list[torch.Tensor]) -> bool:
    """Whether the op's results are the written tensors, one by one."""
    outputs = call.outputs
    return len(outputs) == len(targets) and all(
        storage_of(o) == storage_of(t) and o.shape == t.shape for o, t in zip(outputs, targets, strict=True)
    )


def displaces(call: Call) -> bool:
    """Whether an op makes a view whose column 0 is a later column of its base."""
    if call.func._schema.name != "aten::slice" or call.arg("start") in (None, 0):
        return False
    base = call.layout_of(call.tensors[0])
    return not base.is_rows and base.token_dim(call.dim("dim", len(base.dims), 0))


def fills(target: torch.Tensor) -> bool:
    """Whether a tensor is all of its memory."""
    spare = size_expr(target.untyped_storage().nbytes()) - size_expr(target.numel()) * target.element_size()
    return bool(sympy.expand(spare) == 0)
