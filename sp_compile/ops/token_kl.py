"""`sp_compile::token_kl`: divergence of two heads' distributions over the whole vocabulary, once per physical token.

With z, r the scores of a token under the head and under the reference (ops/heads.py), p = softmax(z), q = softmax(r),

    kl[t] = sum_c p[t, c] * (log p[t, c] - log q[t, c])

for every token that `index` names, 0 elsewhere; without an index for every token, values and reference being [..., H]. The sum runs over
differences of scores, so that distributions which are nearly equal lose no digits. A class without probability under p adds nothing; one
without probability under q alone makes the divergence infinite.
With g[t] the gradient of kl[t], the gradients of the scores are

    dz[t, c] = g[t] * p[t, c] * (log p[t, c] - log q[t, c] - kl[t])        dr[t, c] = g[t] * (q[t, c] - p[t, c])
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.heads import Gradients, Head, Softmax, check_values, masked_product, spans
from sp_compile.ops.numerics import accumulate_dtype, owned, without_autocast
from sp_compile.ops.rows import EXACT, check_index

ARGUMENTS = "Tensor? index, Tensor values, Tensor? weight, Tensor? bias, Tensor reference, Tensor? reference_weight, Tensor? reference_bias"
KEYWORDS = (
    "*, float scale, float? softcap, float temperature, "
    "float reference_scale, float? reference_softcap, float reference_temperature, int chunk_tokens, int chunk_classes"
)
_NAME = "token_kl"
_NEEDED = ("values", "weight", "bias", "reference", "reference_weight", "reference_bias")

Inputs = tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None]


def _heads(inputs: Inputs, options: dict[str, Any], tokens: Tensor | None = None) -> tuple[Head, Head]:
    index, values, weight, bias, reference, reference_weight, reference_bias = inputs
    values, reference = values.flatten(0, -2), reference.flatten(0, -2)
    if tokens is None:
        tokens = torch.arange(values.shape[0], device=values.device) if index is None else torch.unique(index[index >= 0])
    one, other = ([options[prefix + name] for name in ("scale", "softcap", "temperature")] for prefix in ("", "reference_"))
    return Head(values, tokens, weight, bias, *one), Head(reference, tokens, reference_weight, reference_bias, *other)


@without_autocast
def _forward(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    index, values, weight, bias, reference, reference_weight, reference_bias = inputs
    shape = values.shape[:-1]
    one, other = _heads(inputs, options)
    values, reference = one.values, other.values
    check_values(values, weight, bias, _NAME)
    check_values(reference, reference_weight, reference_bias, f"{_NAME}: reference")
    if index is not None:
        check_index(index, values.shape[0], _NAME)
    if one.dtype != other.dtype or one.classes != other.classes or values.shape[0] != reference.shape[0]:
        raise InvalidInput(
            f"{_NAME}: expected as many tokens and classes of values and of reference, both or none in float64; "
            f"got {values.shape[0]} and {reference.shape[0]}, {one.classes} and {other.classes}, {values.dtype} and {reference.dtype}"
        )
    kl, lse, reference_lse = (values.new_zeros(values.shape[0], dtype=one.dtype) for _ in range(3))
    hidden, other_hidden = one.hidden(), other.hidden()
    tokens, columns = spans(len(one.tokens), one.classes, options["chunk_tokens"], options["chunk_classes"], values.device)
    for rows in tokens:
        count = rows.stop - rows.start
        p, q = (Softmax.of(count, values, one.dtype, spread=False) for _ in range(2))
        gap = values.new_zeros(count, dtype=one.dtype)
        for span in columns:
            top, bases, total = p.top, (p.base, q.base), p.total
            share, distance = p.add(one.scores(hidden, rows, span))
            _, other_distance = q.add(other.scores(other_hidden, rows, span))
            moved = gap + masked_product(total, (bases[0] - p.base) - (bases[1] - q.base))
            gap = masked_product((top - p.base).exp(), moved) + masked_product(share, distance.sub_(other_distance)).sum(-1)
        used = one.tokens[rows]
        kl[used] = gap / p.total - (p.total.log() - q.total.log())
        lse[used], reference_lse[used] = p.lse, q.lse
    return kl.view(shape), lse.view(shape), reference_lse.view(shape)


@without_autocast
def _backward(grad: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
    *inputs, kl, lse, reference_lse = rest
    needed = [options.pop(f"need_{name}") for name in _NEEDED]
    shapes = [inputs[place].shape for place in (1, 4)]
    grad, kl, lse, reference_lse = (x.flatten() for x in (grad, kl, lse, reference_lse))
    # without an index, what is not wanted has no gradient
    one, other = _heads(tuple(inputs), options, grad.nonzero().squeeze(-1) if inputs[0] is None else None)
    hidden, other_hidden = one.hidden(), other.hidden()
    sums = Gradients.of(one, (needed[0], needed[1], needed[2]), hidden)
    other_sums = Gradients.of(other, (needed[3], needed[4], needed[5]), other_hidden)
    factor, kl, lse, reference_lse = (x[one.tokens, None] for x in (grad, kl, lse, reference_lse))
    tokens, columns = spans(len(one.tokens), one.classes, options["chunk_tokens"], options["chunk_classes"], grad.device)
    for span in columns:
        for rows in tokens:
            z, r = one.scores(hidden, rows, span), other.scores(other_hidden, rows, span)
            log_p, log_q = z - lse[rows], r - reference_lse[rows]
            p = log_p.exp()
            if any(needed[3:]):
                other_sums.add(other.times_slope((log_q.exp() - p).mul_(factor[rows]), r), rows, span)
            if any(needed[:3]):
                inner = log_p.sub_(log_q).sub_(kl[rows])
                sums.add(one.times_slope(masked_product(p, inner).mul_(factor[rows]), z), rows, span)
        sums.close(span)
        other_sums.close(span)
    found, other_found = list(sums.finish()), list(other_sums.finish())
    for whole, needs, shape in ((found, needed[0], shapes[0]), (other_found, needed[3], shapes[1])):
        whole[0] = whole[0].view(shape) if needs else whole[0]
    return (*found, *other_found)


token_kl = torch.library.custom_op(
    "sp_compile::token_kl", _forward, mutates_args=(), schema=f"({ARGUMENTS}, {KEYWORDS}) -> (Tensor, Tensor, Tensor)", tags=EXACT
)
token_kl_backward = torch.library.custom_op(
    "sp_compile::token_kl_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor grad, {ARGUMENTS}, Tensor kl, Tensor lse, Tensor reference_lse, {KEYWORDS}, "
    + ", ".join(f"bool need_{name}" for name in _NEEDED)
    + f") -> ({', '.join(['Tensor'] * len(_NEEDED))})",
    tags=EXACT,
)


@token_kl.register_fake
def _forward_fake(index: Tensor | None, values: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
    return tuple(values.new_empty(values.shape[:-1], dtype=accumulate_dtype(values.dtype)) for _ in range(3))


@token_kl_backward.register_fake
def _backward_fake(grad: Tensor, index: Tensor | None, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
    given = zip(rest, _NEEDED, strict=False)
    like = (rest[0], rest[0], rest[0], rest[3], rest[3], rest[3])
    shapes = [x.shape if x is not None and options[f"need_{name}"] else (0,) for x, name in given]
    return tuple(one.new_empty(shape) for one, shape in zip(like, shapes, strict=True))


def _setup_context(ctx: Any, inputs: Inputs, keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.options = keyword_only_inputs


def _autograd(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[1:7])
    options = {f"need_{name}": need for name, need in zip(_NEEDED, needed, strict=True)}
    found = torch.ops.sp_compile.token_kl_backward(owned(grad), *ctx.saved_tensors, **ctx.options, **options)
    return None, *(x if need else None for x, need in zip(found, needed, strict=True))


token_kl.register_autograd(_autograd, setup_context=_setup_context)
