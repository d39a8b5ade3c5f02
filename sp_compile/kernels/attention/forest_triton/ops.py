"""`sp_compile::attention_triton` and its backward op. Triton is imported when a call runs, not before.

Arguments are the semantic op's, and behind them the forest's two tensors of tiles (`layout/attention_tiles.py`) and `padding_hides`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.kernels.attention.composed import empty_result, of_no_tokens, token_major
from sp_compile.ops.attention import Gradients, Mask, attention_gradients, check_inputs

_GIVEN = (
    "Tensor q, Tensor k, Tensor v, Tensor end, Tensor column, Tensor? key_valid, Tensor? segments, Tensor? bias, Tensor? sinks, "
    "Tensor shape, Tensor tiles, Tensor hides"
)
_OPTIONS = "float scale, int? window, int? chunk, float? softcap"
SCHEMA = f"({_GIVEN}, *, {_OPTIONS}) -> (Tensor, Tensor)"
BACKWARD_SCHEMA = (
    f"(Tensor grad, {_GIVEN}, Tensor out, Tensor lse, *, {_OPTIONS}, bool bias_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_INPUTS = 12  # of _GIVEN


def _kernels() -> Any:
    return importlib.import_module("sp_compile.kernels.attention.forest_triton.launch")


def _call(q: Tensor, key_valid: Tensor | None, shape: Tensor, tiles: Tensor, hides: Tensor, scale: float, softcap: float | None) -> Any:
    hidden = key_valid if hides.item() else None
    return _kernels().Call.read(shape, tiles, q.shape[2], hidden, scale, softcap)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor, key_valid: Tensor | None, segments: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, shape: Tensor, tiles: Tensor, hides: Tensor,
    *, scale: float, window: int | None, chunk: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_inputs(q, k, v, Mask(end, column, key_valid, segments, bias, window, chunk, softcap), sinks)
    unknown = [name for name, value in (("segments", segments), ("bias", bias)) if value is not None]
    if unknown:
        raise InvalidInput(f"attention_triton: expected no {', '.join(unknown)}, which the kernel does not know; use attention_blocked")
    if not q.shape[2]:
        return empty_result(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    call = _call(q, key_valid, shape, tiles, hides, scale, softcap)
    out, lse = _kernels().run_forward(call, q, k, v, sinks)
    return out, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor, key_valid: Tensor | None, segments: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, shape: Tensor, tiles: Tensor, hides: Tensor, out: Tensor, lse: Tensor,
    *, scale: float, window: int | None, chunk: int | None, softcap: float | None, bias_grad: bool,
) -> Gradients:  # fmt: skip
    if not q.shape[2]:
        return of_no_tokens(q, k, v, sinks)
    call = _call(q, key_valid, shape, tiles, hides, scale, softcap)
    gradients: Gradients = _kernels().run_backward(call, grad, q, k, v, sinks, out, lse)
    return gradients


_TAGS = (torch.Tag.needs_exact_strides,)
attention_triton = torch.library.custom_op("sp_compile::attention_triton", _forward, mutates_args=(), schema=SCHEMA, tags=_TAGS)
attention_triton_backward = torch.library.custom_op(
    "sp_compile::attention_triton_backward", _backward, mutates_args=(), schema=BACKWARD_SCHEMA, tags=_TAGS
)


@attention_triton.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return empty_result(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@attention_triton_backward.register_fake
def _backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, bias_grad: bool, **options: Any) -> Gradients:
    sinks = rest[5]
    d_sinks = sinks.new_empty(sinks.shape) if sinks is not None else q.new_empty(0)
    return empty_result(q, q.shape[3]), empty_result(k, k.shape[3]), empty_result(v, v.shape[3]), q.new_empty(0), d_sinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.options = keyword_only_inputs


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = attention_triton_backward(token_major(grad), *ctx.saved_tensors, **ctx.options, bias_grad=ctx.needs_input_grad[7])
    return attention_gradients(ctx, gradients, _INPUTS)


attention_triton.register_autograd(_differentiate, setup_context=_setup_context)
