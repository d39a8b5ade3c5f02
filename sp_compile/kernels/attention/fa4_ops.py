"""Attention through flash-attn-4: block-sparse, composed over chains, or block-sparse forward with composed backward.

The block-sparse backward is not reproducible; the composed one is where deterministic algorithms are on, and forward always is.
"""

from __future__ import annotations

from torch import Tensor

from sp_compile.kernels.attention import composed, fa4, forest_ops
from sp_compile.ops.attention import Gradients


def _chains_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, calls: Tensor, plan: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return composed.forward(fa4.LIBRARY, q, k, v, sinks, calls, plan, scale)


def _chains_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, calls: Tensor, plan: Tensor, out: Tensor, lse: Tensor,
    scale: float,
) -> Gradients:  # fmt: skip
    return composed.backward(fa4.LIBRARY, grad, q, k, v, sinks, calls, plan, out, lse, scale)


def _mixed_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shape: Tensor, blocks: Tensor, calls: Tensor, plan: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return fa4.blocks_forward(q, k, v, sinks, shape, blocks, scale)


def _mixed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shape: Tensor, blocks: Tensor, calls: Tensor, plan: Tensor,
    out: Tensor, lse: Tensor, scale: float,
) -> Gradients:  # fmt: skip
    return composed.backward(fa4.LIBRARY, grad, q, k, v, sinks, calls, plan, out, lse, scale)


attention_fa4_blocks, attention_fa4_blocks_backward = forest_ops.define(
    "attention_fa4_blocks", ("shape", "blocks", "hides"), fa4.blocks_forward, fa4.blocks_backward
)
attention_fa4_mixed, attention_fa4_mixed_backward = forest_ops.define(
    "attention_fa4_mixed", ("shape", "blocks", "calls", "plan", "hides"), _mixed_forward, _mixed_backward
)
attention_fa4_chains, attention_fa4_chains_backward = forest_ops.define(
    "attention_fa4_chains", ("calls", "plan", "hides"), _chains_forward, _chains_backward
)
