"""`sp_compile::attention_blocked`: masked softmax over blocks of queries, any device, every option, memory linear in the tokens.

A block of consecutive queries [a, b) can only see keys k < b with end[k] > a, and, under a window or chunks, only keys in the last
columns. Those keys are gathered once per block; the exact mask is then applied to that small rectangle.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sp_compile.ops.attention import (
    Gradients,
    Mask,
    attention_gradients,
    check_inputs,
    fold_heads,
    gradient_fake,
    sink_gradient,
    softmax_with_sink,
)
from sp_compile.ops.numerics import accumulate_dtype, owned, without_autocast

BLOCK = 128

SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor end, Tensor column, Tensor? key_valid, Tensor? segments, Tensor? bias, Tensor? sinks, "
    "*, float scale, int? window, int? chunk, float? softcap) -> (Tensor, Tensor)"
)
BACKWARD_SCHEMA = (
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor end, Tensor column, Tensor? key_valid, Tensor? segments, Tensor? bias, "
    "Tensor? sinks, Tensor out, Tensor lse, *, float scale, int? window, int? chunk, float? softcap, bool bias_grad) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def visible_blocks(mask: Mask, block: int = BLOCK) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """`(queries, keys, span)` per block: int64 token numbers, and the span of queries. Every visible pair is in exactly one block."""
    tokens = mask.end.shape[0]
    numbers = torch.arange(tokens, device=mask.end.device)
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        near = mask.end[:stop] > start
        lowest = mask.column[start:stop].min()
        if mask.window is not None:
            near &= mask.column[:stop] > lowest - mask.window
        if mask.chunk is not None:
            near &= mask.column[:stop] >= lowest // mask.chunk * mask.chunk
        yield numbers[start:stop], near.nonzero()[:, 0], slice(start, stop)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """out [1, H, T, Dv] in q's dtype and lse [1, H, T] in the accumulation dtype, sink included; -inf where nothing is visible."""
    dtype = accumulate_dtype(q.dtype)
    heads, groups, tokens = q.shape[1], k.shape[1], q.shape[2]
    out = q.new_empty((1, heads, tokens, v.shape[3]))
    lse = q.new_empty((1, heads, tokens), dtype=dtype)
    for queries, keys, span in visible_blocks(mask):
        k_, v_ = k[0, :, keys].to(dtype), v[0, :, keys].to(dtype)
        scores = torch.bmm(fold_heads(q[0, :, span].to(dtype), groups), k_.mT) * scale
        scores, _ = mask.bend(scores.view(heads, len(queries), len(keys)), queries, keys)
        weights, lse[0, :, span] = softmax_with_sink(scores, sinks)
        out[0, :, span] = torch.bmm(fold_heads(weights, groups), v_).view(heads, len(queries), -1)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor | None, out: Tensor, lse: Tensor, scale: float, bias_grad: bool
) -> Gradients:
    """Gradients of q, k, v, bias, sinks (the last two empty where absent). Probabilities are rebuilt from `lse`, nothing else is."""
    dtype = accumulate_dtype(q.dtype)
    heads, groups = q.shape[1], k.shape[1]
    d_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    d_k, d_v = (torch.zeros_like(x[0], dtype=dtype, memory_format=torch.contiguous_format) for x in (k, v))
    bias = mask.bias if bias_grad else None
    d_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None else None
    inner = (grad[0].to(dtype) * out[0].to(dtype)).sum(-1)
    # exp(-inf - 0) is the zero that a row without keys needs; exp(-inf + inf) would be NaN.
    safe = lse[0].masked_fill(lse[0] == -torch.inf, 0)
    for queries, keys, span in visible_blocks(mask):
        k_, v_ = k[0, :, keys].to(dtype), v[0, :, keys].to(dtype)
        folded_q, folded_grad = (fold_heads(x[0, :, span].to(dtype), groups) for x in (q, grad))
        scores, slope = mask.bend((torch.bmm(folded_q, k_.mT) * scale).view(heads, len(queries), len(keys)), queries, keys)
        weights = (scores - safe[:, span, None]).exp_()
        # The keys of a block are distinct, so this is a plain addition and not a scatter whose order could vary.
        d_v[:, keys] = d_v[:, keys] + torch.bmm(fold_heads(weights, groups).mT, folded_grad)
        d_scores = weights * (torch.bmm(folded_grad, v_.mT).view_as(weights) - inner[:, span, None])
        if d_bias is not None:
            _add_bias_gradient(d_bias, d_scores, queries, keys)
        if slope is not None:
            d_scores = d_scores * slope
        folded = fold_heads(d_scores, groups)
        d_q[0, :, span] = (torch.bmm(folded, k_) * scale).view(heads, len(queries), -1)
        d_k[:, keys] = d_k[:, keys] + torch.bmm(folded.mT, folded_q) * scale
    d_sinks = sink_gradient(sinks, lse[0], inner) if sinks is not None else q.new_empty(0)
    final_bias = d_bias.to(bias.dtype) if d_bias is not None and bias is not None else q.new_empty(0)
    return d_q, d_k[None].to(k.dtype), d_v[None].to(v.dtype), final_bias, d_sinks


def _add_bias_gradient(d_bias: Tensor, d_scores: Tensor, queries: Tensor, keys: Tensor) -> None:
    full = d_bias.view((1,) * (4 - d_bias.dim()) + d_bias.shape)[0]
    rows = queries if full.shape[1] != 1 else queries.new_zeros(1)
    columns = keys if full.shape[2] != 1 else keys.new_zeros(1)
    for dim, size in enumerate((full.shape[0], len(rows), len(columns))):
        if size == 1:
            d_scores = d_scores.sum(dim, keepdim=True)
    full[:, rows[:, None], columns[None, :]] = full[:, rows[:, None], columns[None, :]] + d_scores


@without_autocast
def _forward(
    q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor, key_valid: Tensor | None, segments: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, *, scale: float, window: int | None, chunk: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    mask = Mask(end, column, key_valid, segments, bias, window, chunk, softcap)
    check_inputs(q, k, v, mask, sinks)
    return forward(q, k, v, mask, sinks, scale)


@without_autocast
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor, key_valid: Tensor | None, segments: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, out: Tensor, lse: Tensor,
    *, scale: float, window: int | None, chunk: int | None, softcap: float | None, bias_grad: bool,
) -> Gradients:  # fmt: skip
    mask = Mask(end, column, key_valid, segments, bias, window, chunk, softcap)
    return backward(grad, q, k, v, mask, sinks, out, lse, scale, bias_grad)


attention_blocked = torch.library.custom_op(
    "sp_compile::attention_blocked", _forward, mutates_args=(), schema=SCHEMA, tags=(torch.Tag.needs_exact_strides,)
)
attention_blocked_backward = torch.library.custom_op(
    "sp_compile::attention_blocked_backward", _backward, mutates_args=(), schema=BACKWARD_SCHEMA, tags=(torch.Tag.needs_exact_strides,)
)


def forward_fake(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs `(out, lse)` of every implementation that keeps its log-sum-exp."""
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))


@attention_blocked.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return forward_fake(q, v)


@attention_blocked_backward.register_fake
def _backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, bias_grad: bool, **options: Any) -> Gradients:
    return gradient_fake(q, k, v, rest[4], rest[5], bias_grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.options = keyword_only_inputs


def _autograd(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.sp_compile.attention_blocked_backward(
        owned(grad), *ctx.saved_tensors, **ctx.options, bias_grad=ctx.needs_input_grad[7]
    )
    return attention_gradients(ctx, gradients, 9)


attention_blocked.register_autograd(_autograd, setup_context=_setup_context)
