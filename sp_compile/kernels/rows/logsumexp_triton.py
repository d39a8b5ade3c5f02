"""log sum exp of each row in one read: CUDA, through Triton. The meaning is `torch.logsumexp(logits.float(), -1)`.

One program owns a row. Every lane keeps the largest of its own elements and the sum of their exponentials against it, and lanes are
brought together at the end: with lane maxima m_i and sums s_i, M = max_i m_i and lse = M + log sum_i s_i exp(m_i - M). Nothing depends
on the order of programs, so bits repeat. As in torch, an infinite maximum counts as 0: a row of -inf alone has lse -inf, a row with
+inf has +inf, and NaN stays NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def logsumexp_kernel(logits, lse, stride, classes, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, classes, BLOCK):
        x = tl.load(base + start + lane, mask=start + lane < classes, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, x, propagate_nan=tl.PropagateNan.ALL)
        finite = tl.where(tl.abs(new) == float("inf"), 0.0, new)
        total = total * tl.where(top == -float("inf"), 0.0, tl.exp(top - finite)) + tl.exp(x - finite)
        top = new
    whole = tl.max(top, axis=0)
    whole = tl.where(tl.abs(whole) == float("inf"), 0.0, whole)
    # A lane that saw nothing has an infinite maximum and a sum of 0; one that saw +inf has an infinite sum against 0.
    own = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    part = total * tl.where(top == -float("inf"), 0.0, tl.exp(own - whole))
    tl.store(lse + row, tl.log(tl.sum(part, axis=0)) + whole)


def logsumexp(logits: Tensor) -> Tensor:
    """float32 [T] of logits [T, V] whose classes are consecutive."""
    lse = logits.new_empty(logits.shape[0], dtype=torch.float32)
    if not lse.numel():
        return lse
    with torch.cuda.device_of(logits):
        logsumexp_kernel[(len(lse),)](logits, lse, logits.stride(0), logits.shape[1], BLOCK=BLOCK, num_warps=8)
    return lse
