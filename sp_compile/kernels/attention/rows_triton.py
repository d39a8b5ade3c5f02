"""Merging passes of attention, and adding their gradients, row by row in one read and one write: CUDA, through Triton.

`chains_cuda.py` holds the same in plain torch, which is what these kernels are tested against. A row is one head of one token. `rows`
are distinct token numbers (int32), or None for the tokens from `first` on; so every element has one owner and no sum depends on order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _token(rows, first, n, HAS_ROWS: tl.constexpr):
    if HAS_ROWS:
        token = tl.load(rows + n).to(tl.int64)
    else:
        token = n + first
    return token


@triton.jit
def _merge(out, lse, new_lse, part, part_lse, rows, first, tokens, count, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
           LANES: tl.constexpr, HAS_ROWS: tl.constexpr):  # fmt: skip
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n, head = item // HEADS, item % HEADS
    real = n < count
    token = _token(rows, first, tl.where(real, n, 0), HAS_ROWS)
    one = tl.load(lse + head * tokens + token, mask=real, other=0.0)
    two = tl.load(part_lse + head * count + n, mask=real, other=0.0)
    weight = 1.0 / (1.0 + tl.exp(one - two))
    # log(exp(one) + exp(two)) without overflow. Not in place: each warp reads these values, and a faster one would have replaced them.
    top = tl.maximum(one, two)
    tl.store(new_lse + head * tokens + token, top + tl.log(1.0 + tl.exp(tl.minimum(one, two) - top)), mask=real)
    lane = tl.arange(0, LANES)
    inside = real[:, None] & (lane < D)[None, :]
    place = out + ((token * HEADS + head) * D)[:, None] + lane[None, :]
    old = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(part + (item * D)[:, None] + lane[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (old + weight[:, None] * (new - old)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add(whole, part, rows, first, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_ROWS: tl.constexpr):
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n, column = item // WIDTH, item % WIDTH
    real = n < count
    token = _token(rows, first, tl.where(real, n, 0), HAS_ROWS)
    place = whole + token * WIDTH + column
    total = tl.load(place, mask=real, other=0.0).to(tl.float32) + tl.load(part + item, mask=real, other=0.0).to(tl.float32)
    tl.store(place, total.to(whole.dtype.element_ty), mask=real)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | None, first: int) -> Tensor:
    """`out` [T, H, D] takes in `part` [n, H, D] in place; returns the merged `lse` [H, T], with `part_lse` [H, n]; all contiguous."""
    count, heads, dim = part.shape
    lanes = triton.next_power_of_2(dim)
    block = max(8, 2048 // lanes)  # in place: every thread needs elements of its own
    new_lse = lse.clone()
    with torch.cuda.device(out.device):
        _merge[(triton.cdiv(count * heads, block),)](
            out, lse, new_lse, part, part_lse, rows if rows is not None else lse, first, out.shape[0], count,
            HEADS=heads, D=dim, BLOCK=block, LANES=lanes, HAS_ROWS=rows is not None,
        )  # fmt: skip
    return new_lse


def add(whole: Tensor, part: Tensor, rows: Tensor | None, first: int) -> None:
    """In place: `whole` [T, ...] plus `part` [n, ...] at its tokens, summed in float32 and rounded once; both contiguous."""
    count, width = part.shape[0], part[0].numel()
    block = 1024
    with torch.cuda.device(whole.device):
        _add[(triton.cdiv(count * width, block),)](
            whole, part, rows if rows is not None else part, first, count, WIDTH=width, BLOCK=block, HAS_ROWS=rows is not None
        )
