"""`sp_compile::token_logprobs`: log-probabilities of the rows' targets, and entropies, from values held once per physical token.

With z the scores of a token (ops/heads.py) over V classes, position p at token t = index[p] with y = target[p] has

    logprob[p] = z[t, y] - lse[t]            lse[t] = log sum_c exp z[t, c]
    entropy[t] = lse[t] - sum_c q[t, c] z[t, c]      q[t, c] = exp(z[t, c] - lse[t])

A position whose index is -1 or whose target is `ignore_index` has logprob 0; a token where no position counts is not computed, and has
entropy 0 and lse 0. Each (token, class) pair is formed once, however many positions ask for it. Forward keeps lse and entropy; backward
forms the scores again, block by block. With g[p], h[t] the gradients of logprob[p], entropy[t], the gradient of the scores is

    dz[t, c] = sum over p at (t, c) of g[p]  -  q[t, c] * (sum over p at t of g[p]  +  h[t] * (z[t, c] - lse[t] + entropy[t]))

`index` None: the positions are the tokens, values [..., H] lead with the shape of target.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.heads import OPTIONS, Gradients, Head, Positions, Softmax, check_values, local, masked_product, spans
from sp_compile.ops.numerics import accumulate_dtype, owned, without_autocast
from sp_compile.ops.rows import EXACT, check_index, check_target

ARGUMENTS = "Tensor values, Tensor? index, Tensor target, Tensor? weight, Tensor? bias"
KEYWORDS = f"*, {OPTIONS}, int ignore_index, bool with_entropy, int chunk_tokens, int chunk_classes"

Inputs = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]
_NAME = "token_logprobs"


def _used(inputs: Inputs, scale: float, softcap: float | None, temperature: float, ignore_index: int) -> tuple[Head, Positions]:
    values, index, target, weight, bias = inputs
    flat, index = _flat(values, index, target)
    classes = flat.shape[1] if weight is None else weight.shape[0]
    positions = Positions.of(index, target, ignore_index, classes)
    return Head(flat, positions.tokens, weight, bias, scale, softcap, temperature), positions


def _flat(values: Tensor, index: Tensor | None, target: Tensor) -> tuple[Tensor, Tensor]:
    """Values [T, H] and the index of each target."""
    if index is not None:
        return values, index
    if values.shape[:-1] != target.shape:
        raise InvalidInput(f"{_NAME}: expected values [*target.shape, H]; got {list(values.shape)} and target {list(target.shape)}")
    return values.flatten(0, -2), torch.arange(target.numel(), device=target.device).view(target.shape)


@without_autocast
def _forward(
    values: Tensor, index: Tensor | None, target: Tensor, weight: Tensor | None, bias: Tensor | None,
    *, scale: float, softcap: float | None, temperature: float, ignore_index: int,
    with_entropy: bool, chunk_tokens: int, chunk_classes: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check(values, index, target, weight, bias, ignore_index)
    head, positions = _used((values, index, target, weight, bias), scale, softcap, temperature, ignore_index)
    dtype, count = head.dtype, head.values.shape[0]
    picked = values.new_zeros(len(positions.target), dtype=dtype)
    lse, entropy = values.new_zeros(count, dtype=dtype), values.new_zeros(count if with_entropy else 0, dtype=dtype)
    hidden = head.hidden()
    tokens, columns = spans(len(positions.tokens), head.classes, chunk_tokens, chunk_classes, values.device)
    for rows, pairs in zip(tokens, positions.within(tokens), strict=True):
        running = Softmax.of(rows.stop - rows.start, values, dtype, with_entropy)
        for span in columns:
            z = head.scores(hidden, rows, span)
            row, column, inside = local(positions, pairs, rows, span)
            picked[pairs] = torch.where(inside, z[row, column], picked[pairs])
            running.add(z)
        # Not z - lse: top + log(total) would be rounded at the size of the scores.
        row, log_total = positions.token[pairs] - rows.start, running.total.log()
        picked[pairs] -= running.top[row]
        picked[pairs] -= log_total[row]
        lse[positions.tokens[rows]] = running.lse
        if running.spread is not None:
            entropy[positions.tokens[rows]] = log_total - running.spread / running.total
    logprobs = values.new_zeros(target.numel(), dtype=dtype)
    logprobs[positions.kept] = picked[positions.pair]
    return logprobs.view(target.shape), _shaped(entropy, index, target), _shaped(lse, index, target)


def _shaped(per_token: Tensor, index: Tensor | None, target: Tensor) -> Tensor:
    return per_token.view(target.shape) if index is None and per_token.numel() else per_token


def _check(values: Tensor, index: Tensor | None, target: Tensor, weight: Tensor | None, bias: Tensor | None, ignore_index: int) -> None:
    if target.dtype != torch.int64 or (index is not None and index.shape != target.shape):
        raise InvalidInput(
            f"{_NAME}: expected int64 index and target of one shape; got {None if index is None else list(index.shape)}, "
            f"{target.dtype} {list(target.shape)}"
        )
    flat, index = _flat(values, index, target)
    check_values(flat, weight, bias, _NAME)
    check_index(index, flat.shape[0], _NAME)
    classes = flat.shape[1] if weight is None else weight.shape[0]
    check_target(target, (index >= 0) & (target != ignore_index), classes, _NAME)


@without_autocast
def _backward(
    grad: Tensor, grad_entropy: Tensor, values: Tensor, index: Tensor | None, target: Tensor, weight: Tensor | None, bias: Tensor | None,
    entropy: Tensor, lse: Tensor,
    *, scale: float, softcap: float | None, temperature: float, ignore_index: int,
    with_entropy: bool, chunk_tokens: int, chunk_classes: int,
    need_values: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    head, positions = _used((values, index, target, weight, bias), scale, softcap, temperature, ignore_index)
    hidden = head.hidden()
    sums = Gradients.of(head, (need_values, need_weight, need_bias), hidden)
    of_pair = positions.per_pair(grad.to(head.dtype))
    of_token = positions.per_token(of_pair)
    used = lse.flatten()[positions.tokens]
    if with_entropy:
        of_entropy, entropies = grad_entropy.flatten()[positions.tokens], entropy.flatten()[positions.tokens]
    tokens, columns = spans(len(positions.tokens), head.classes, chunk_tokens, chunk_classes, values.device)
    within = positions.within(tokens)
    for span in columns:
        for rows, pairs in zip(tokens, within, strict=True):
            z = head.scores(hidden, rows, span)
            logs = z - used[rows, None]
            if with_entropy:
                factor = of_token[rows, None] + masked_product(of_entropy[rows, None], logs + entropies[rows, None])
                grads = masked_product(logs.exp_(), factor).neg_()
            else:
                grads = logs.exp_().mul_(of_token[rows, None]).neg_()
            row, column, inside = local(positions, pairs, rows, span)
            # Each entry gets one term that is not zero, so the order of terms decides nothing.
            grads.index_put_((row, column), of_pair[pairs].masked_fill(~inside, 0), accumulate=True)
            sums.add(head.times_slope(grads, z), rows, span)
        sums.close(span)
    got, *rest = sums.finish()
    return (got.view(values.shape) if need_values else got, *rest)  # type: ignore[return-value]


token_logprobs = torch.library.custom_op(
    "sp_compile::token_logprobs", _forward, mutates_args=(), schema=f"({ARGUMENTS}, {KEYWORDS}) -> (Tensor, Tensor, Tensor)", tags=EXACT
)
token_logprobs_backward = torch.library.custom_op(
    "sp_compile::token_logprobs_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor grad, Tensor grad_entropy, {ARGUMENTS}, Tensor entropy, Tensor lse, {KEYWORDS}, "
    "bool need_values, bool need_weight, bool need_bias) -> (Tensor, Tensor, Tensor)",
    tags=EXACT,
)


@token_logprobs.register_fake
def _forward_fake(values: Tensor, index: Tensor | None, target: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulate_dtype(values.dtype)
    tokens = target.shape if index is None else values.shape[:1]
    entropy = values.new_empty(tokens if options["with_entropy"] else (0,), dtype=dtype)
    return values.new_empty(target.shape, dtype=dtype), entropy, values.new_empty(tokens, dtype=dtype)


@token_logprobs_backward.register_fake
def _backward_fake(
    grad: Tensor, grad_entropy: Tensor, values: Tensor, index: Tensor | None, target: Tensor, weight: Tensor | None, bias: Tensor | None,
    *rest: Tensor, need_values: bool, need_weight: bool, need_bias: bool, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    wanted = zip((values, weight, bias), (need_values, need_weight, need_bias), strict=True)
    return tuple(values.new_empty(x.shape if need and x is not None else (0,)) for x, need in wanted)


def _setup_context(ctx: Any, inputs: Inputs, keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1], output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.options = keyword_only_inputs


def _autograd(ctx: Any, grad: Tensor, grad_entropy: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    needed = [ctx.needs_input_grad[place] for place in (0, 3, 4)]
    options = dict(zip(("need_values", "need_weight", "need_bias"), needed, strict=True))
    found = torch.ops.sp_compile.token_logprobs_backward(owned(grad), owned(grad_entropy), *ctx.saved_tensors, **ctx.options, **options)
    values, weight, bias = (x if need else None for x, need in zip(found, needed, strict=True))
    return values, None, None, weight, bias


token_logprobs.register_autograd(_autograd, setup_context=_setup_context)


def token_logprobs_rows(
    values: Tensor, index: Tensor, target: Tensor, weight: Tensor | None, bias: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies per row position: what the op without an index gives for values gathered by the index."""
    logprobs, entropies, _ = torch.ops.sp_compile.token_logprobs(values, index, target, weight, bias, **options)
    if options["with_entropy"]:
        entropies = torch.ops.sp_compile.unpack(entropies, index.masked_fill(target == options["ignore_index"], -1))
    return logprobs, entropies
