"""Attention ops whose kernels know nothing but the forest: schema, fakes, autograd, and the way to the blocked implementation.

Such an op takes the semantic op's arguments and forest tensors of its own. The first of these stays on the CPU and begins with (T, smallest
column, largest column); the last is `padding_hides`. Calls whose padding, window or chunks hide an ancestor are computed by `blocked.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.kernels.attention import blocked
from sp_compile.kernels.attention.composed import empty_result, token_major
from sp_compile.ops.attention import Gradients, Mask, attention_gradients, check_inputs
from sp_compile.ops.numerics import accumulate_dtype, without_autocast

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor end, Tensor column, Tensor? key_valid, Tensor? segments, Tensor? bias, Tensor? sinks"
_OPTIONS = "float scale, int? window, int? chunk, float? softcap"
_GRADIENTS = "(Tensor, Tensor, Tensor, Tensor, Tensor)"
_GIVEN = 9  # of _TENSORS


def needs_blocked(described: Tensor, hides: Tensor, window: int | None, chunk: int | None) -> bool:
    """Whether padding, a window or chunks hide some ancestor, from `hides` [1] and the columns, both on the CPU; waits for no device."""
    if hides.item():
        return True
    _, low, high = described.flatten()[:3].tolist()
    if window is not None and high - low >= window:
        return True
    return chunk is not None and low // chunk != high // chunk


def define(
    name: str,
    forest_tensors: tuple[str, ...],
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., Gradients],
) -> tuple[Any, Any]:
    """Registers `sp_compile::{name}` and its backward op.

    Args:
        name: of the op.
        forest_tensors: names of the arguments behind the semantic op's, the last one for `padding_hides`.
        forward: (q, k, v, sinks, *forest tensors but the last, scale) -> out [1, H, T, Dv], token-major, and lse [1, H, T].
        backward: (grad, q, k, v, sinks, *forest tensors but the last, out, lse, scale) -> gradients of q, k, v (token-major), bias (none)
            and sinks.
    """
    tensors = f"{_TENSORS}, {', '.join(f'Tensor {item}' for item in forest_tensors)}"
    inputs = _GIVEN + len(forest_tensors)

    @without_autocast
    def run(*given: Any, scale: float, window: int | None, chunk: int | None, softcap: float | None) -> tuple[Tensor, Tensor]:
        q, k, v, end, column, key_valid, segments, bias, sinks = given[:_GIVEN]
        described, *others, hides = given[_GIVEN:]
        mask = Mask(end, column, key_valid, segments, bias, window, chunk, softcap)
        check_inputs(q, k, v, mask, sinks)
        unknown = [item for item in ("segments", "bias", "softcap") if getattr(mask, item) is not None]
        if unknown:
            raise InvalidInput(f"{name}: expected no {', '.join(unknown)}, which the kernel does not know; use attention_blocked")
        if needs_blocked(described, hides, window, chunk):
            out, lse = blocked.forward(q, k, v, mask, sinks, scale)
            return token_major(out), lse
        return forward(q, k, v, sinks, described, *others, scale)

    @without_autocast
    def run_backward(
        grad: Tensor, *given: Any, scale: float, window: int | None, chunk: int | None, softcap: float | None, bias_grad: bool
    ) -> Gradients:
        q, k, v, end, column, key_valid, segments, bias, sinks = given[:_GIVEN]
        described, *others, hides, out, lse = given[_GIVEN:]
        if needs_blocked(described, hides, window, chunk):
            mask = Mask(end, column, key_valid, segments, bias, window, chunk, softcap)
            d_q, d_k, d_v, d_bias, d_sinks = blocked.backward(grad, q, k, v, mask, sinks, out, lse, scale, bias_grad)
            return token_major(d_q), token_major(d_k), token_major(d_v), d_bias, d_sinks
        return backward(grad, q, k, v, sinks, described, *others, out, lse, scale)

    tags = (torch.Tag.needs_exact_strides,)
    op = torch.library.custom_op(
        f"sp_compile::{name}", run, mutates_args=(), schema=f"({tensors}, *, {_OPTIONS}) -> (Tensor, Tensor)", tags=tags
    )
    backward_op = torch.library.custom_op(
        f"sp_compile::{name}_backward",
        run_backward,
        mutates_args=(),
        schema=f"(Tensor grad, {tensors}, Tensor out, Tensor lse, *, {_OPTIONS}, bool bias_grad) -> {_GRADIENTS}",
        tags=tags,
    )
    op.register_fake(_fake)
    backward_op.register_fake(_backward_fake)

    def differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients = backward_op(token_major(grad), *ctx.saved_tensors, **ctx.options, bias_grad=ctx.needs_input_grad[7])
        return attention_gradients(ctx, gradients, inputs)

    op.register_autograd(differentiate, setup_context=_setup_context)
    return op, backward_op


def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return empty_result(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))


def _backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, bias_grad: bool, **options: Any) -> Gradients:
    sinks = rest[5]
    d_sinks = sinks.new_empty(sinks.shape) if sinks is not None else q.new_empty(0)
    return empty_result(q, q.shape[3]), empty_result(k, k.shape[3]), empty_result(v, v.shape[3]), q.new_empty(0), d_sinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.options = keyword_only_inputs
