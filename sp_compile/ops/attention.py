"""`sp_compile::attention`: causal attention over the ancestors of each token of a forest.

The body is quadratic plain PyTorch. It is the meaning of the op, the oracle of its implementations (in float64) and the last
entry of the lowering table. Query i sees key k exactly if

    k <= i < end[k]                            k is an ancestor of i, or an earlier token of its node, or i itself
    key_valid[k]                               the model's padding mask
    segments[i] == segments[k]                 documents packed into one row
    column[i] - column[k] < window             sliding window, the token itself included
    column[i] // chunk == column[k] // chunk   chunked attention
    bias[..., i, k]                            a bool bias, True is visible; a float bias of -inf hides

Scores are `softcap * tanh(scale * q.k / softcap) + bias`; a sink is one more logit per head that holds no value. A query that sees
no key gives zeros and sends no gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.numerics import accumulate_dtype, owned, without_autocast

SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor end, Tensor column, Tensor? key_valid, Tensor? segments, Tensor? bias, Tensor? sinks, "
    "*, float scale, int? window, int? chunk, float? softcap) -> Tensor"
)
BACKWARD_SCHEMA = (
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor end, Tensor column, Tensor? key_valid, Tensor? segments, Tensor? bias, "
    "Tensor? sinks, *, float scale, int? window, int? chunk, float? softcap, bool bias_grad) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)

# Relative Frobenius error of an implementation against this op in float64. float32: two roundings per product and a softmax over
# some thousand terms; float64: the same, and no implementation may fall back to float32; half types: inputs and result are rounded
# once each, everything between is float32.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Mask:
    """Everything besides q, k and v that decides which pairs are visible and how a score is bent. Shapes as in the op."""

    end: Tensor
    column: Tensor
    key_valid: Tensor | None
    segments: Tensor | None
    bias: Tensor | None
    window: int | None
    chunk: int | None
    softcap: float | None

    def allow(self, queries: Tensor, keys: Tensor) -> Tensor:
        """bool [1|H, len(queries), len(keys)] of visible pairs of the given token numbers (int64), the bool bias included."""
        one, many = queries[:, None], keys[None, :]
        seen = (many <= one) & (one < self.end[keys][None, :])
        if self.key_valid is not None:
            seen = seen & self.key_valid[0, keys][None, :].bool()
        if self.segments is not None:
            seen = seen & (self.segments[0, queries][:, None] == self.segments[0, keys][None, :])
        column_q, column_k = self.column[queries][:, None], self.column[keys][None, :]
        if self.window is not None:
            seen = seen & (column_q - column_k < self.window)
        if self.chunk is not None:
            seen = seen & (column_q // self.chunk == column_k // self.chunk)
        seen = seen[None]
        if self.bias is not None and self.bias.dtype == torch.bool:
            seen = seen & bias_block(self.bias, queries, keys)
        return seen

    def bend(self, scores: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor | None]:
        """Softcap, bias and mask applied to `scale * q.k` [H, queries, keys]; also d(bent)/d(score), or None where that is 1."""
        slope = None
        if self.softcap is not None:
            tanh = torch.tanh(scores / self.softcap)
            scores, slope = tanh * self.softcap, 1 - tanh * tanh
        if self.bias is not None and self.bias.dtype != torch.bool:
            scores = scores + bias_block(self.bias, queries, keys).to(scores.dtype)
        return scores.masked_fill(~self.allow(queries, keys), -math.inf), slope


def bias_block(bias: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """The part of a bias broadcastable to [1, H, T, T] that meets the given tokens, as [1|H, 1|queries, 1|keys]."""
    full = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)[0]
    if full.shape[-2] != 1:
        full = full[:, queries]
    if full.shape[-1] != 1:
        full = full[:, :, keys]
    return full


def softmax_with_sink(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities [H, queries, keys] and log-sum-exp [H, queries] (sink included); a row of -inf gives zeros and lse -inf."""
    top = scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
    if sinks is not None:
        top = torch.maximum(top, sinks.to(scores.dtype)[:, None])
    top = top.masked_fill(top == -math.inf, 0)
    weights = (scores - top[..., None]).exp_()
    total = weights.sum(-1)
    if sinks is not None:
        total = total + (sinks.to(scores.dtype)[:, None] - top).exp()
    weights /= total.masked_fill(total == 0, 1)[..., None]
    return weights, total.log() + top


def fold_heads(q: Tensor, kv_heads: int) -> Tensor:
    """[Hq, n, D] -> [Hkv, Hq / Hkv * n, D]: queries that share a key/value head become rows of one matrix product."""
    return q.reshape(kv_heads, q.shape[0] // kv_heads * q.shape[1], q.shape[2])


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """scale * q.k [Hq, n, m] for q [Hq, n, D] and k [Hkv, m, D]."""
    return (torch.bmm(fold_heads(q, k.shape[0]), k.mT) * scale).view(q.shape[0], q.shape[1], k.shape[1])


def check_inputs(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor | None) -> None:
    """Raises InvalidInput for shapes and dtypes outside the contract. For real tensors only: it would guard on symbolic sizes."""
    tokens = q.shape[2] if q.dim() == 4 else -1
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or q.shape[0] != 1 or k.shape[:3] != v.shape[:3] or k.shape[2] != tokens:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise InvalidInput(f"attention: expected q [1, Hq, T, D], k [1, Hkv, T, D], v [1, Hkv, T, Dv]; got {shapes}")
    if k.shape[0] != 1 or k.shape[3] != q.shape[3] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InvalidInput(f"attention: heads of q {list(q.shape)} must be a multiple of those of k {list(k.shape)}, with equal head dim")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise InvalidInput(f"attention: q, k and v must have one floating-point dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    for name, value in (("end", mask.end), ("column", mask.column)):
        if value.shape != (tokens,) or value.dtype != torch.int64:
            raise InvalidInput(f"attention: {name} must be int64 [{tokens}]; got {value.dtype} {list(value.shape)}")
    for name, optional in (("key_valid", mask.key_valid), ("segments", mask.segments)):
        if optional is not None and optional.shape != (1, tokens):
            raise InvalidInput(f"attention: {name} must be [1, {tokens}]; got {list(optional.shape)}")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise InvalidInput(f"attention: sinks must be [{q.shape[1]}]; got {list(sinks.shape)}")
    for name, size in (("window", mask.window), ("chunk", mask.chunk), ("softcap", mask.softcap)):
        if size is not None and size <= 0:
            raise InvalidInput(f"attention: {name} must be positive or None; got {size}")


@without_autocast
def _attention(
    q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor, key_valid: Tensor | None, segments: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, *, scale: float, window: int | None, chunk: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    mask = Mask(end, column, key_valid, segments, bias, window, chunk, softcap)
    check_inputs(q, k, v, mask, sinks)
    dtype = accumulate_dtype(q.dtype)
    tokens = torch.arange(q.shape[2], device=q.device)
    scores, _ = mask.bend(_scores(q[0].to(dtype), k[0].to(dtype), scale), tokens, tokens)
    weights, _ = softmax_with_sink(scores, sinks)
    out = torch.bmm(fold_heads(weights, k.shape[1]), v[0].to(dtype))
    return out.view(1, q.shape[1], q.shape[2], v.shape[3]).to(q.dtype).contiguous()


@without_autocast
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor, key_valid: Tensor | None, segments: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, *, scale: float, window: int | None, chunk: int | None, softcap: float | None,
    bias_grad: bool,
) -> Gradients:  # fmt: skip
    mask = Mask(end, column, key_valid, segments, bias, window, chunk, softcap)
    dtype = accumulate_dtype(q.dtype)
    tokens = torch.arange(q.shape[2], device=q.device)
    heads, groups = q.shape[1], k.shape[1]
    q_, k_, v_, grad_ = (x[0].to(dtype) for x in (q, k, v, grad))
    scores, slope = mask.bend(_scores(q_, k_, scale), tokens, tokens)
    weights, lse = softmax_with_sink(scores, sinks)
    folded = fold_heads(weights, groups)
    d_v = torch.bmm(folded.mT, fold_heads(grad_, groups))
    d_weights = torch.bmm(fold_heads(grad_, groups), v_.mT).view_as(weights)
    inner = (d_weights * weights).sum(-1)
    d_scores = weights * (d_weights - inner[..., None])
    d_bias = d_scores[None].sum_to_size(bias.shape).to(bias.dtype) if bias is not None and bias_grad else q.new_empty(0)
    if slope is not None:
        d_scores = d_scores * slope
    d_q = torch.bmm(fold_heads(d_scores, groups), k_) * scale
    d_k = torch.bmm(fold_heads(d_scores, groups).mT, fold_heads(q_, groups)) * scale
    d_sinks = sink_gradient(sinks, lse, inner) if sinks is not None else q.new_empty(0)
    d_q = d_q.view(1, heads, q.shape[2], q.shape[3])
    return d_q.to(q.dtype), d_k[None].to(q.dtype), d_v[None].to(q.dtype), d_bias, d_sinks


def sink_gradient(sinks: Tensor, lse: Tensor, inner: Tensor) -> Tensor:
    """[H] gradient of the sinks for lse [H, T] with the sink included and inner [H, T] = sum over v of grad * out."""
    return -((sinks.to(lse.dtype)[:, None] - lse).exp() * inner).sum(-1).to(sinks.dtype)


def gradient_fake(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, bias_grad: bool) -> Gradients:
    """Contiguous outputs of every backward op of attention; an absent gradient is an empty tensor of shape [0]."""
    d_bias = bias.new_empty(bias.shape) if bias is not None and bias_grad else q.new_empty(0)
    d_sinks = sinks.new_empty(sinks.shape) if sinks is not None else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_bias, d_sinks


def attention_gradients(ctx: Any, gradients: Gradients, inputs: int) -> tuple[Tensor | None, ...]:
    """Backward op's outputs laid out as the gradients of the op's `inputs` positional inputs, q k v first, bias and sinks 8th and 9th."""
    d_q, d_k, d_v, d_bias, d_sinks = gradients
    needs = ctx.needs_input_grad
    head = (d_q if needs[0] else None, d_k if needs[1] else None, d_v if needs[2] else None, None, None, None, None)
    tail = (d_bias if needs[7] else None, d_sinks if needs[8] else None)
    return head + tail + (None,) * (inputs - 9)


attention = torch.library.custom_op(
    "sp_compile::attention", _attention, mutates_args=(), schema=SCHEMA, tags=(torch.Tag.needs_exact_strides,)
)
attention_backward = torch.library.custom_op(
    "sp_compile::attention_backward", _attention_backward, mutates_args=(), schema=BACKWARD_SCHEMA, tags=(torch.Tag.needs_exact_strides,)
)


@attention.register_fake
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


@attention_backward.register_fake
def _attention_backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, bias_grad: bool, **options: Any) -> Gradients:
    return gradient_fake(q, k, v, rest[4], rest[5], bias_grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = keyword_only_inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.sp_compile.attention_backward(owned(grad), *ctx.saved_tensors, **ctx.options, bias_grad=ctx.needs_input_grad[7])
    return attention_gradients(ctx, gradients, 9)


attention.register_autograd(_backward, setup_context=_setup_context)


def attention_inputs(
    end: Tensor,
    column: Tensor,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    sinks: bool = False,
    seed: int = 0,
) -> list[Tensor | None]:
    """Random positional inputs `[q, k, v, end, column, None, None, None, sinks]` on the forest given by `end` and `column`.

    Args:
        heads: query and key/value heads.
        dims: head dims of q, k and of v.
        sinks: adds one sink logit per query head.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = end.shape[0]
    q_heads, kv_heads = heads
    shapes: list[tuple[int, ...]] = [(1, q_heads, tokens, dims[0]), (1, kv_heads, tokens, dims[0]), (1, kv_heads, tokens, dims[1])]
    shapes.append((q_heads,))
    # Made in float64 first, so that every dtype rounds the same values.
    made = [torch.randn(s, generator=generator, dtype=torch.float64).to(end.device, dtype).requires_grad_() for s in shapes]
    return [*made[:3], end, column, None, None, None, made[3] if sinks else None]
