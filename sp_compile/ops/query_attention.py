"""`sp_compile::query_attention`: `sp_compile::attention` for some of the queries, those that a rank of a context parallel group holds.

q [1, Hq, Q, D] are the queries of tokens `queries` int64 [Q], in any order; k [1, Hkv, T, D] and v [1, Hkv, T, Dv] are all keys and values.
Everything else is as in `ops/attention.py`, of all T tokens, and the result is [1, Hq, Q, Dv]. The gradients of k, v and sinks are those
of these queries alone. Scores are formed for a block of queries at a time, so memory is linear in T.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.attention import Mask, fold_heads, sink_gradient, softmax_with_sink
from sp_compile.ops.numerics import accumulate_dtype, owned, without_autocast

INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor queries, Tensor end, Tensor column, Tensor? key_valid, Tensor? segments, Tensor? sinks, "
    "*, float scale, int? window, int? chunk, float? softcap"
)
EXACT = (torch.Tag.needs_exact_strides,)
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]

# Elements of the scores of one block.
BUDGET = 1 << 22


def check_inputs(q: Tensor, k: Tensor, v: Tensor, queries: Tensor, mask: Mask) -> None:
    """Raises InvalidInput for shapes and dtypes outside the contract. For real tensors only."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or q.shape[0] != 1 or k.shape[0] != 1 or k.shape[:3] != v.shape[:3]:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise InvalidInput(f"query_attention: expected q [1, Hq, Q, D], k [1, Hkv, T, D], v [1, Hkv, T, Dv]; got {shapes}")
    if k.shape[3] != q.shape[3] or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InvalidInput(
            f"query_attention: heads of q {list(q.shape)} must be a multiple of those of k {list(k.shape)}, with equal head dim"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise InvalidInput(f"query_attention: q, k and v must have one floating-point dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if queries.shape != (q.shape[2],) or queries.dtype != torch.int64:
        raise InvalidInput(f"query_attention: queries must be int64 [{q.shape[2]}]; got {queries.dtype} {list(queries.shape)}")
    for name, value in (("end", mask.end), ("column", mask.column)):
        if value.shape != (k.shape[2],) or value.dtype != torch.int64:
            raise InvalidInput(f"query_attention: {name} must be int64 [{k.shape[2]}]; got {value.dtype} {list(value.shape)}")
    for name, optional in (("key_valid", mask.key_valid), ("segments", mask.segments)):
        if optional is not None and optional.shape != (1, k.shape[2]):
            raise InvalidInput(f"query_attention: {name} must be [1, {k.shape[2]}]; got {list(optional.shape)}")


def _blocks(q: Tensor, queries: Tensor, keys: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Queries a block at a time: their places, their tokens, and the keys that they might see."""
    size = max(1, BUDGET // max(q.shape[1] * keys, 1))
    for start in range(0, q.shape[2], size):
        tokens = queries[start : start + size]
        # Elsewhere than on the CPU the largest query is not read back: the mask hides what lies behind it.
        reach = int(tokens.max()) + 1 if queries.device.type == "cpu" else keys
        yield slice(start, start + size), tokens, torch.arange(reach, device=queries.device)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return (torch.bmm(fold_heads(q, k.shape[0]), k.mT) * scale).view(q.shape[0], q.shape[1], k.shape[1])


def _mask(end: Tensor, column: Tensor, key_valid: Tensor | None, segments: Tensor | None, options: dict[str, Any]) -> Mask:
    return Mask(end, column, key_valid, segments, None, options["window"], options["chunk"], options["softcap"])


@without_autocast
def _query_attention(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, end: Tensor, column: Tensor, key_valid: Tensor | None, segments: Tensor | None,
    sinks: Tensor | None, **options: Any,
) -> Tensor:  # fmt: skip
    mask = _mask(end, column, key_valid, segments, options)
    check_inputs(q, k, v, queries, mask)
    dtype = accumulate_dtype(q.dtype)
    k_, v_ = k[0].to(dtype), v[0].to(dtype)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    for place, tokens, keys in _blocks(q, queries, k.shape[2]):
        seen = len(keys)
        scores, _ = mask.bend(_scores(q[0, :, place].to(dtype), k_[:, :seen], options["scale"]), tokens, keys)
        weights, _ = softmax_with_sink(scores, sinks)
        values = torch.bmm(fold_heads(weights, k.shape[1]), v_[:, :seen])
        out[0, :, place] = values.view(q.shape[1], len(tokens), v.shape[3]).to(q.dtype)
    return out


@without_autocast
def _query_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, queries: Tensor, end: Tensor, column: Tensor, key_valid: Tensor | None,
    segments: Tensor | None, sinks: Tensor | None, **options: Any,
) -> Gradients:  # fmt: skip
    mask = _mask(end, column, key_valid, segments, options)
    dtype, groups = accumulate_dtype(q.dtype), k.shape[1]
    k_, v_ = k[0].to(dtype), v[0].to(dtype)
    d_q = q.new_empty(q.shape)
    d_k, d_v = torch.zeros_like(k_), torch.zeros_like(v_)
    d_sinks = None if sinks is None else sinks.new_zeros(sinks.shape, dtype=dtype)
    for place, tokens, keys in _blocks(q, queries, k.shape[2]):
        seen = len(keys)
        q_, grad_ = q[0, :, place].to(dtype), grad[0, :, place].to(dtype)
        scores, slope = mask.bend(_scores(q_, k_[:, :seen], options["scale"]), tokens, keys)
        weights, lse = softmax_with_sink(scores, sinks)
        d_v[:, :seen] += torch.bmm(fold_heads(weights, groups).mT, fold_heads(grad_, groups))
        d_weights = torch.bmm(fold_heads(grad_, groups), v_[:, :seen].mT).view_as(weights)
        inner = (d_weights * weights).sum(-1)
        d_scores = weights * (d_weights - inner[..., None])
        if slope is not None:
            d_scores = d_scores * slope
        folded = fold_heads(d_scores, groups)
        d_q[0, :, place] = (torch.bmm(folded, k_[:, :seen]) * options["scale"]).view(q_.shape).to(q.dtype)
        d_k[:, :seen] += torch.bmm(folded.mT, fold_heads(q_, groups)) * options["scale"]
        if sinks is not None and d_sinks is not None:
            d_sinks += sink_gradient(sinks.to(dtype), lse, inner)
    made = q.new_empty(0) if sinks is None or d_sinks is None else d_sinks.to(sinks.dtype)
    return d_q, d_k[None].to(q.dtype), d_v[None].to(q.dtype), made


query_attention = torch.library.custom_op(
    "sp_compile::query_attention", _query_attention, mutates_args=(), schema=f"({INPUTS}) -> Tensor", tags=EXACT
)
query_attention_backward = torch.library.custom_op(
    "sp_compile::query_attention_backward",
    _query_attention_backward,
    mutates_args=(),
    schema=f"(Tensor grad, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=EXACT,
)


@query_attention.register_fake
def _query_attention_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


@query_attention_backward.register_fake
def _query_attention_backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Gradients:
    sinks = rest[5]
    d_sinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_sinks


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = keyword_only_inputs


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    d_q, d_k, d_v, d_sinks = torch.ops.sp_compile.query_attention_backward(owned(grad), *ctx.saved_tensors, **ctx.options)
    needs = ctx.needs_input_grad
    # k and v come from all ranks: their gradients are sent even where this rank's own inputs need none.
    return d_q if needs[0] else None, d_k, d_v, None, None, None, None, None, d_sinks if needs[8] else None


query_attention.register_autograd(_autograd, setup_context=_setup)
