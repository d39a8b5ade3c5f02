"""`sp_compile::cross_entropy_rows`: the losses of every row from logits held once per physical token.

Equal to `F.cross_entropy(logits[index], target, weight, reduction="none", ...)`, with two differences of cost and none of meaning:
[rows, V] is never made, and the log-softmax of a token is formed once, in float32 at least, over blocks of tokens. With
w = weight[target] (1 without weights) and e = label_smoothing, position p with token t = index[p] and y = target[p] has

    loss[p] = (1 - e) * w * (lse[t] - x[t, y]) + e / V * sum_c weight[c] * (lse[t] - x[t, c])

and contributes `w` to the denominator of reduction="mean". A position whose target is `ignore_index`, or whose index is -1 (dropped
padding, whose target is not read), has loss 0 and weight 0.

`dtype` is that of the losses, by default that of the logits: 16-bit logits with losses in float32 are what a model computes that casts
its logits first, without the copy. The op returns the losses, the weights `w`, and lse [T], which backward reads again. With g[p] the
gradient of loss[p], the gradient is

    dx[t, c] = s[t] * exp(x[t, c] - lse[t]) - u[t] * weight[c] - sum over p at (t, c) of (1 - e) * w * g[p]
    u[t] = e / V * sum over p at t of g[p]        s[t] = (1 - e) * sum over p at t of w * g[p]  +  u[t] * sum_c weight[c]

The backward op returns s, u and the entries that some position chose, whole; the rest is a loop over [T, V] in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.numerics import accumulate_dtype, owned
from sp_compile.ops.rows import EXACT, check_index, check_target, sum_by_key, sums_at_equal_keys

# Elements of the float32 copy of a block of logits: on a CPU 1 MiB, which stays in cache between the steps of a block and is memory
# that the allocator reuses; elsewhere 64 MiB, since every step of a block is a launch.
_BLOCK_ELEMENTS = {"cpu": 1 << 18}
_LARGE_BLOCK = 1 << 24

ARGUMENTS = "Tensor logits, Tensor index, Tensor target, Tensor? weight"
OPTIONS = "*, int ignore_index, float label_smoothing, ScalarType? dtype=None"


def _blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Consecutive spans of tokens and their logits in the accumulation dtype."""
    size = max(1, _BLOCK_ELEMENTS.get(logits.device.type, _LARGE_BLOCK) // max(1, logits.shape[1]))
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


def _log_sums(logits: Tensor, weight: Tensor | None, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """lse [T], and with label smoothing the weighted sum of lse - x over classes [T], else zeros."""
    dtype = accumulate_dtype(logits.dtype)
    lse = logits.new_empty(logits.shape[0], dtype=dtype)
    smooth = logits.new_zeros(logits.shape[0], dtype=dtype)
    for span, block in _blocks(logits):
        lse[span] = torch.logsumexp(block, -1)
        if label_smoothing:
            logprobs = block.sub_(lse[span, None]) if block.data_ptr() != logits[span].data_ptr() else block - lse[span, None]
            smooth[span] = -(logprobs.sum(-1) if weight is None else logprobs @ weight.to(dtype))
    return lse, smooth


LogSums = Callable[[Tensor, Tensor | None, float], tuple[Tensor, Tensor]]


def forward(
    log_sums: LogSums, logits: Tensor, index: Tensor, target: Tensor, weight: Tensor | None,
    *, ignore_index: int, label_smoothing: float, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The op, with `log_sums` to reduce the logits of each token. See the module's docstring."""
    name, result = "cross_entropy_rows", dtype or logits.dtype
    if logits.dim() != 2 or not logits.is_floating_point() or index.shape != target.shape or target.dtype != torch.int64:
        raise InvalidInput(
            f"{name}: expected float logits [T, V], int64 index and target of one shape; got {logits.dtype} {list(logits.shape)}, "
            f"{list(index.shape)}, {target.dtype} {list(target.shape)}"
        )
    if weight is not None and weight.shape != logits.shape[1:]:
        raise InvalidInput(f"{name}: weight must be [{logits.shape[1]}]; got {list(weight.shape)}")
    check_index(index, logits.shape[0], name)
    check_target(target, (index >= 0) & (target != ignore_index), logits.shape[1], name)
    wide = accumulate_dtype(logits.dtype)
    if logits.numel() == 0:
        empty = [logits.new_zeros(shape, dtype=wide) for shape in (index.shape, logits.shape[:1])]
        return logits.new_zeros(index.shape, dtype=result), empty[0], empty[1]
    lse, smooth = log_sums(logits, weight, label_smoothing)
    tokens, classes, weights, counted = _positions(index, target, weight, ignore_index, wide)
    loss = (lse[tokens] - logits[tokens, classes].to(wide)) * weights * (1 - label_smoothing)
    if label_smoothing:
        loss += smooth[tokens] * counted * (label_smoothing / logits.shape[1])
    # A logit of -inf makes an infinite loss, and inf * 0 at a position that does not count would be NaN.
    loss = loss.masked_fill(~counted, 0)
    return loss.view(index.shape).to(result), weights.view(index.shape), lse


def _forward(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return forward(_log_sums, *inputs, **options)


def _backward(
    grad: Tensor, logits: Tensor, index: Tensor, target: Tensor, weight: Tensor | None, lse: Tensor,
    *, ignore_index: int, label_smoothing: float, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    wide, (count, vocabulary) = accumulate_dtype(logits.dtype), logits.shape
    tokens, classes, weights, counted = _positions(index, target, weight, ignore_index, wide)
    grads = grad.flatten().to(wide).masked_fill(~counted, 0)
    picked = grads * weights * (1 - label_smoothing)
    smoothed = grads * (label_smoothing / vocabulary)
    uniform = sum_by_key(smoothed, tokens, count)
    total = float(vocabulary) if weight is None else weight.to(wide).sum()
    scale = sum_by_key(picked, tokens, count) + uniform * total
    class_weight = logits.new_ones(vocabulary, dtype=wide) if weight is None else weight.to(wide)
    # The chosen entries are formed again, whole, so that they too are rounded once. Positions with one key all write the same value.
    chosen = (logits[tokens, classes].to(wide) - lse[tokens]).exp() * scale[tokens] - uniform[tokens] * class_weight[classes]
    chosen -= sums_at_equal_keys(picked, tokens * vocabulary + classes)
    return scale, uniform, tokens, classes, chosen.to(logits.dtype)


cross_entropy_rows = torch.library.custom_op(
    "sp_compile::cross_entropy_rows", _forward, mutates_args=(), schema=f"({ARGUMENTS}, {OPTIONS}) -> (Tensor, Tensor, Tensor)", tags=EXACT
)
cross_entropy_rows_backward = torch.library.custom_op(
    "sp_compile::cross_entropy_rows_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor grad, {ARGUMENTS}, Tensor lse, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=EXACT,
)


def forward_fake(logits: Tensor, index: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide = accumulate_dtype(logits.dtype)
    loss = logits.new_empty(index.shape, dtype=options.get("dtype") or logits.dtype)
    return loss, logits.new_empty(index.shape, dtype=wide), logits.new_empty(logits.shape[0], dtype=wide)


@cross_entropy_rows_backward.register_fake
def _backward_fake(grad: Tensor, logits: Tensor, index: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
    per_token = [logits.new_empty(logits.shape[0], dtype=accumulate_dtype(logits.dtype)) for _ in range(2)]
    keys = [index.new_empty(index.numel()) for _ in range(2)]
    return *per_token, *keys, logits.new_empty(index.numel())


def setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[2])
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.options = keyword_only_inputs


def autograd(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    logits, _, _, weight, lse = ctx.saved_tensors
    if logits.shape[0] == 0:
        return torch.zeros_like(logits), None, None, None
    scale, uniform, tokens, classes, chosen = torch.ops.sp_compile.cross_entropy_rows_backward(
        owned(grad), *ctx.saved_tensors, **ctx.options
    )
    # Not part of the op: a compiler makes one loop of this and writes it over logits that nobody reads again.
    whole = (logits.to(lse.dtype) - lse[:, None]).exp() * scale[:, None]
    if ctx.options["label_smoothing"]:
        whole = whole - (uniform[:, None] if weight is None else uniform[:, None] * weight.to(lse.dtype))
    return whole.to(logits.dtype).index_put((tokens, classes), chosen), None, None, None


cross_entropy_rows.register_fake(forward_fake)
cross_entropy_rows.register_autograd(autograd, setup_context=setup_context)
