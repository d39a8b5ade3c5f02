"""Values counted along each row's path through a forest.

`sp_compile::path_segments`   document numbers of packed position ids: a token whose position is not its predecessor's plus one begins
a new document of its row. In the packed order a position also jumps where a branch begins, which is no border of a document.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput


def path_sums(values: Tensor, prev: Tensor) -> Tensor:
    """Inclusive sums along the path from the root: out[i] = values[i] + out[prev[i]].

    Doubles the reach in every step, so ceil(log2(T + 1)) gathers of T elements, whatever the tree looks like.

    Args:
        values: [T], integers.
        prev: int64 [T], the token before i in its rows, -1 for the first.
    """
    tokens = values.shape[0]
    # one more element, the empty path, that every first token points to
    total = torch.cat([values, values.new_zeros(1)])
    jump = torch.cat([torch.where(prev < 0, tokens, prev), prev.new_full((1,), tokens)])
    for _ in range(tokens.bit_length()):
        total = total + total[jump]
        jump = jump[jump]
    return total[:tokens]


def _path_segments(positions: Tensor, prev: Tensor) -> Tensor:
    if positions.dim() != 2 or positions.shape[0] != 1 or prev.shape != positions.shape[1:] or prev.dtype != torch.int64:
        raise InvalidInput(
            f"path_segments: expected positions [1, T] and prev int64 [T]; got {list(positions.shape)} and {prev.dtype} {list(prev.shape)}"
        )
    flat = positions[0]
    before = flat[prev.clamp(min=0)] if prev.numel() else flat
    jumps = (flat != before + 1) & (prev >= 0)
    return path_sums(jumps.to(torch.int64), prev)[None]


path_segments = torch.library.custom_op(
    "sp_compile::path_segments", _path_segments, mutates_args=(), schema="(Tensor positions, Tensor prev) -> Tensor"
)


@path_segments.register_fake
def _path_segments_fake(positions: Tensor, prev: Tensor) -> Tensor:
    return positions.new_empty(positions.shape, dtype=torch.int64)
