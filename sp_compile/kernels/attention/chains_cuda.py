"""`sp_compile::attention_flash`: CUDA attention composed of torch's own variable-length flash kernels over first-child chains."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_compile.kernels.attention import composed, forest_ops
from sp_compile.kernels.attention.composed import Library, Sequences
from sp_compile.ops.attention import Gradients

LARGEST_HEAD = 256


def flash(q: Tensor, k: Tensor, v: Tensor, lengths: Sequences, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """See `Library.forward`."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, lengths.q, lengths.k, lengths.most_q, lengths.most_k, 0.0, causal, False, scale=scale
    )
    return out, lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Sequences, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Library.backward`."""
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is none of
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, lengths.q, lengths.k, lengths.most_q, lengths.most_k, 0.0, causal, seed, seed, scale=scale
    )
    return gradients


LIBRARY = Library(flash, flash_backward, splits=True)


def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, calls: Tensor, plan: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """See `composed.forward`."""
    return composed.forward(LIBRARY, q, k, v, sinks, calls, plan, scale)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, calls: Tensor, plan: Tensor, out: Tensor, lse: Tensor,
    scale: float,
) -> Gradients:  # fmt: skip
    """See `composed.backward`."""
    return composed.backward(LIBRARY, grad, q, k, v, sinks, calls, plan, out, lse, scale)


attention_flash, attention_flash_backward = forest_ops.define("attention_flash", ("calls", "plan", "hides"), forward, backward)
