"""Implementations of the row conversions and of the loss of rows: so far each op's own body, which is deterministic and runs anywhere."""

from __future__ import annotations

import torch

from sp_compile.lowering.registry import Arguments, Implementation, register
from sp_compile.ops import cross_entropy, rows

__all__ = ["cross_entropy", "rows"]


def _anything(arguments: Arguments) -> str | None:
    return None


for _op in (
    torch.ops.sp_compile.unpack.default,
    torch.ops.sp_compile.take_tokens.default,
    torch.ops.sp_compile.cross_entropy_rows.default,
):
    register(_op, Implementation("reference", _op, _anything, deterministic=True))
