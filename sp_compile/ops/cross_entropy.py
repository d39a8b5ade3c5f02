"""`sp_compile::cross_entropy_rows`: the losses of every row from logits held once per physical token.

Equal to `F.cross_entropy(logits[index], target, weight, reduction="none", ...)`, with two differences of cost and none of meaning:
[rows, V] is never made, and the log-softmax of a token is formed once, in float32 at least, over blocks of tokens. With
w = weight[target] (1 without weights) and e = label_smoothing, position p with token t = index[p] and y = target[p] has

    loss[p] = (1 - e) * w * (lse[t] - x[t, y]) + e / V * sum_c weight[c] * (lse[t] - x[t, c])

and contributes `w` to the denominator of reduction="mean". A position whose target is `ignore_index`, or whose index is -1 (dropped
padding, whose target is not read), has loss 0 and weight 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.numerics import accumulate_dtype, owned
from sp_compile.ops.rows import EXACT, check_index, check_target, sum_by_key, sums_at_equal_keys

# Elements of the float32 copy of a block of logits (64 MiB).
_BLOCK_ELEMENTS = 1 << 24

ARGUMENTS = "Tensor logits, Tensor index, Tensor target, Tensor? weight, *, int ignore_index, float label_smoothing"


def _blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Consecutive spans of tokens and their logits in the accumulation dtype."""
    size = max(1, _BLOCK_ELEMENTS // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], size):
        span = slice(start, min(start + size, logits.shape[0]))
        yield span, logits[span].to(accumulate_dtype(logits.dtype))


def _positions(
    index: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Flat `(token, class, weight, counted)`; token 0, class 0 and weight 0 where the position does not count."""
    counted = ((index >= 0) & (target != ignore_index)).flatten()
    tokens, classes = (x.flatten().masked_fill(~counted, 0) for x in (index, target))
    weights = counted.to(dtype) if weight is None else weight.to(dtype)[classes] * counted
    return tokens, classes, weights, counted


def _forward(
    logits: Tensor, index: Tensor, target: Tensor, weight: Tensor | None, *, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    name = "cross_entropy_rows"
    if logits.dim() != 2 or not logits.is_floating_point() or index.shape != target.shape or target.dtype != torch.int64:
        raise InvalidInput(
            f"{name}: expected float logits [T, V], int64 index and target of one shape; got {logits.dtype} {list(logits.shape)}, "
            f"{list(index.shape)}, {target.dtype} {list(target.shape)}"
        )
    if weight is not None and weight.shape != logits.shape[1:]:
        raise InvalidInput(f"{name}: weight must be [{logits.shape[1]}]; got {list(weight.shape)}")
    check_index(index, logits.shape[0], name)
    check_target(target, (index >= 0) & (target != ignore_index), logits.shape[1], name)
    dtype = accumulate_dtype(logits.dtype)
    if logits.numel() == 0:
        return logits.new_zeros(index.shape), logits.new_zeros(index.shape, dtype=dtype)
    lse = logits.new_empty(logits.shape[0], dtype=dtype)
    smooth = logits.new_zeros(logits.shape[0], dtype=dtype)
    for span, block in _blocks(logits):
        lse[span] = torch.logsumexp(block, -1)
        if label_smoothing:
            logprobs = block.sub_(lse[span, None]) if block.data_ptr() != logits[span].data_ptr() else block - lse[span, None]
            smooth[span] = -(logprobs.sum(-1) if weight is None else logprobs @ weight.to(dtype))
    tokens, classes, weights, counted = _positions(index, target, weight, ignore_index, dtype)
    loss = (lse[tokens] - logits[tokens, classes].to(dtype)) * weights * (1 - label_smoothing)
    if label_smoothing:
        loss += smooth[tokens] * counted * (label_smoothing / logits.shape[1])
    # A logit of -inf makes an infinite loss, and inf * 0 at a position that does not count would be NaN.
    loss = loss.masked_fill(~counted, 0)
    return loss.view(index.shape).to(logits.dtype), weights.view(index.shape)


def _backward(
    grad: Tensor, logits: Tensor, index: Tensor, target: Tensor, weight: Tensor | None, *, ignore_index: int, label_smoothing: float
) -> Tensor:
    out = torch.zeros_like(logits, memory_format=torch.contiguous_format)
    if logits.numel() == 0 or index.numel() == 0:
        return out
    dtype, (count, vocabulary) = accumulate_dtype(logits.dtype), logits.shape
    tokens, classes, weights, counted = _positions(index, target, weight, ignore_index, dtype)
    grads = grad.flatten().to(dtype) * counted
    picked = grads * weights * (1 - label_smoothing)
    smoothed = grads * (label_smoothing / vocabulary)
    uniform = sum_by_key(smoothed, tokens, count)
    total = float(vocabulary) if weight is None else weight.to(dtype).sum()
    scale = sum_by_key(picked, tokens, count) + uniform * total
    class_weight = logits.new_ones(vocabulary, dtype=dtype) if weight is None else weight.to(dtype)
    lse = logits.new_empty(count, dtype=dtype)
    for span, block in _blocks(logits):
        lse[span] = torch.logsumexp(block, -1)
        block = (block - lse[span, None]).exp_().mul_(scale[span, None])
        if label_smoothing:
            block.addcmul_(uniform[span, None], class_weight, value=-1)
        out[span] = block
    # The chosen entries are formed again, whole, so that they too are rounded once. Positions with one key all write the same value.
    chosen = (logits[tokens, classes].to(dtype) - lse[tokens]).exp() * scale[tokens] - uniform[tokens] * class_weight[classes]
    chosen -= sums_at_equal_keys(picked, tokens * vocabulary + classes)
    return out.index_put_((tokens, classes), chosen.to(out.dtype))


cross_entropy_rows = torch.library.custom_op(
    "sp_compile::cross_entropy_rows", _forward, mutates_args=(), schema=f"({ARGUMENTS}) -> (Tensor, Tensor)", tags=EXACT
)
cross_entropy_rows_backward = torch.library.custom_op(
    "sp_compile::cross_entropy_rows_backward", _backward, mutates_args=(), schema=f"(Tensor grad, {ARGUMENTS}) -> Tensor", tags=EXACT
)


@cross_entropy_rows.register_fake
def _forward_fake(logits: Tensor, index: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return logits.new_empty(index.shape), logits.new_empty(index.shape, dtype=accumulate_dtype(logits.dtype))


@cross_entropy_rows_backward.register_fake
def _backward_fake(grad: Tensor, logits: Tensor, *rest: Any, **options: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)
    ctx.mark_non_differentiable(output[1])
    ctx.options = keyword_only_inputs


def _autograd(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return torch.ops.sp_compile.cross_entropy_rows_backward(owned(grad), *ctx.saved_tensors, **ctx.options), None, None, None


cross_entropy_rows.register_autograd(_autograd, setup_context=_setup_context)
