"""From the tokens of one forest to those of a finer one, by number of row and column."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sp_compile.ops import rows as _rows  # noqa: F401  (registers sp_compile::unpack)
from sp_compile.ops.tokens import parse


def places(index: Tensor, row: Tensor, column: Tensor, offset: int, wraps: bool) -> Tensor:
    """The tokens of a coarser forest that tokens of a finer one read, `offset` columns ahead.

    Args:
        index: int64 [B, L], tokens of the coarser forest.
        row, column: int64 [T], a row and the column of each token of the finer one.
        offset: columns to look ahead.
        wraps: behind the last column stands the first.

    Returns:
        int64 [T], -1 where the row has no token there.
    """
    ahead = column + offset
    return index[row, ahead % index.shape[1] if wraps else ahead.clamp(max=index.shape[1] - 1)]


def regather(value: Tensor, where: Tensor, pattern: str) -> Tensor:
    """A packed value read at the tokens `where` [T], zeros where that is -1; `pattern` as in `ops/tokens.py`."""
    dims = parse(pattern)
    at = next(place for place, dim in enumerate(dims) if "L" in dim)
    plain = math.prod(int(f) for f in dims[at] if f not in ("B", "L"))
    tokens = value.shape[at] // plain if plain != 1 else value.shape[at]
    sizes = [tokens if f == "L" else 1 if f == "B" else int(f) for f in dims[at]]
    split = value.reshape([*value.shape[:at], *sizes, *value.shape[at + 1 :]])
    place = at + dims[at].index("L")
    taken: Tensor = torch.ops.sp_compile.unpack(split.movedim(place, 0).contiguous(), where)
    return taken.movedim(0, place).reshape([*value.shape[:at], plain * where.shape[0], *value.shape[at + 1 :]])
