"""Attention through flash-attn-4: block-sparse, composed over chains, or block-sparse forward with another backward.

The package's block-sparse backward is not reproducible; ours always is, the composed one where deterministic algorithms are on, and
forward always is.
"""

from __future__ import annotations

from torch import Tensor

from sp_compile.kernels.attention import composed, fa4, fa4_ordered, forest_ops
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


def _blocks_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shape: Tensor, blocks: Tensor, of_backward: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return fa4.blocks_forward(q, k, v, sinks, shape, blocks, scale)


def _auto_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shape: Tensor, blocks: Tensor, queries: Tensor, order: Tensor,
    out: Tensor, lse: Tensor, scale: float,
) -> Gradients:  # fmt: skip
    if fa4_ordered.long_nodes(shape, q.shape[2]):
        return fa4.blocks_backward(grad, q, k, v, sinks, shape, blocks, queries, out, lse, scale)
    return fa4_ordered.backward(grad, q, k, v, sinks, shape, blocks, order, out, lse, scale)


def _auto_ordered_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shape: Tensor, blocks: Tensor, order: Tensor, calls: Tensor,
    plan: Tensor, out: Tensor, lse: Tensor, scale: float,
) -> Gradients:  # fmt: skip
    if q.shape[3] > fa4_ordered.NARROW and fa4_ordered.long_nodes(shape, q.shape[2]):
        return composed.backward(fa4.LIBRARY, grad, q, k, v, sinks, calls, plan, out, lse, scale)
    return fa4_ordered.backward(grad, q, k, v, sinks, shape, blocks, order, out, lse, scale)


def _auto_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shape: Tensor, blocks: Tensor, queries: Tensor, order: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return fa4.blocks_forward(q, k, v, sinks, shape, blocks, scale)


def _auto_ordered_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shape: Tensor, blocks: Tensor, order: Tensor, calls: Tensor, plan: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return fa4.blocks_forward(q, k, v, sinks, shape, blocks, scale)


def _mixed_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shape: Tensor, blocks: Tensor, calls: Tensor, plan: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return fa4.blocks_forward(q, k, v, sinks, shape, blocks, scale)


def _mixed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shape: Tensor, blocks: Tensor, calls: Tensor, plan: Tensor,
    out: Tensor, lse: Tensor, scale: float,
) -> Gradients:  # fmt: skip
    return composed.backward(fa4.LIBRARY, grad, q, k, v, sinks, calls, plan, out, lse, scale)


attention_fa4_auto, attention_fa4_auto_backward = forest_ops.define(
    "attention_fa4_auto", ("shape", "blocks", "queries", "order", "hides"), _auto_forward, _auto_backward
)
attention_fa4_auto_ordered, attention_fa4_auto_ordered_backward = forest_ops.define(
    "attention_fa4_auto_ordered",
    ("shape", "blocks", "order", "calls", "plan", "hides"),
    _auto_ordered_forward,
    _auto_ordered_backward,
)
attention_fa4_blocks, attention_fa4_blocks_backward = forest_ops.define(
    "attention_fa4_blocks", ("shape", "blocks", "queries", "hides"), _blocks_forward, fa4.blocks_backward
)
attention_fa4_ordered, attention_fa4_ordered_backward = forest_ops.define(
    "attention_fa4_ordered", ("shape", "blocks", "order", "hides"), _blocks_forward, fa4_ordered.backward
)
attention_fa4_mixed, attention_fa4_mixed_backward = forest_ops.define(
    "attention_fa4_mixed", ("shape", "blocks", "calls", "plan", "hides"), _mixed_forward, _mixed_backward
)
attention_fa4_chains, attention_fa4_chains_backward = forest_ops.define(
    "attention_fa4_chains", ("calls", "plan", "hides"), _chains_forward, _chains_backward
)
