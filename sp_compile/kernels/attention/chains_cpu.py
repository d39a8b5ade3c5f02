"""`sp_compile::attention_chains`: CPU attention composed of torch's own flash passes over first-child chains.

Each pass of `layout/chains.py` is one call of `aten._scaled_dot_product_flash_attention_for_cpu`; passes are merged by their
log-sum-exp, and each backward pass is given the merged out and merged lse (README.md). Restrictions that really hide something
(window, chunk, padding, documents), softcap and biases go to the blocked implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sp_compile.errors import InvalidInput
from sp_compile.kernels.attention import blocked
from sp_compile.layout.chains import CAUSAL
from sp_compile.ops.attention import Gradients, Mask, attention_gradients, check_inputs, gradient_fake, sink_gradient
from sp_compile.ops.numerics import accumulate_dtype, owned, without_autocast

# Runs of fewer tokens of chains up to this length are padded to the next power of two and batched: a call costs more than their arithmetic.
SHORT = 128
FEW = 256

SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor end, Tensor column, Tensor? key_valid, Tensor? segments, Tensor? bias, Tensor? sinks, "
    "Tensor passes, *, float scale, int? window, int? chunk, float? softcap) -> (Tensor, Tensor)"
)
BACKWARD_SCHEMA = (
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor end, Tensor column, Tensor? key_valid, Tensor? segments, Tensor? bias, "
    "Tensor? sinks, Tensor passes, Tensor out, Tensor lse, *, float scale, int? window, int? chunk, float? softcap, bool bias_grad) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Span:
    """`batch` consecutive ranges of `length` tokens from `start`."""

    start: int
    length: int
    batch: int = 1

    def read(self, x: Tensor) -> Tensor:
        """[1, H, T, ...] -> a view [batch, H, length, ...]."""
        part = x[:, :, self.start : self.start + self.batch * self.length]
        if self.batch == 1:
            return part
        chains: Tensor = part.unflatten(2, (self.batch, self.length))[0]
        return chains.transpose(0, 1)

    def write(self, x: Tensor, value: Tensor) -> None:
        """Inverse of `read`."""
        self.read(x).copy_(value)


@dataclass(frozen=True)
class Ragged:
    """Chains of differing lengths padded at their end to `slots.shape[1]`; a padding slot repeats the chain's last token.

    Causality keeps padding keys from every real query; padding queries are never written and get zero gradient.
    """

    slots: Tensor
    real: Tensor

    def read(self, x: Tensor) -> Tensor:
        """[1, H, T, ...] -> a copy [batch, H, slots, ...]."""
        slots, shape = self.slots.flatten(), tuple(self.slots.shape)
        if x.stride(2) > x.stride(1):
            # Tokens are outermost in memory: whole tokens are copied, several times faster than rows of every head.
            by_token: Tensor = x[0].transpose(0, 1).index_select(0, slots).unflatten(0, shape)
            return by_token.transpose(1, 2)
        by_head: Tensor = x[0].index_select(1, slots).unflatten(1, shape)
        return by_head.transpose(0, 1)

    def write(self, x: Tensor, value: Tensor) -> None:
        """Inverse of `read` for real slots."""
        x[0, :, self.slots[self.real]] = value.transpose(0, 1)[:, self.real]


@dataclass(frozen=True)
class Plan:
    """Causal work, which writes every token exactly once, and (queries, keys) of the cross passes in merge order."""

    causal: list[Span | Ragged]
    cross: list[tuple[Span, Span]]


def make_plan(passes: Tensor, tokens: int) -> Plan:
    """Reads the `attention_passes` tensor (int64 [passes, 6], CPU). Raises InvalidInput if its chains don't add up to `tokens`."""
    causal: list[Span | Ragged] = []
    cross: list[tuple[Span, Span]] = []
    short: dict[int, list[tuple[int, int]]] = {}
    total = 0
    for kind, q_start, q_len, k_start, k_len, batch in passes.tolist():
        if kind != CAUSAL:
            cross.append((Span(q_start, q_len), Span(k_start, k_len)))
            continue
        total += q_len * batch
        if q_len <= SHORT and q_len * batch < FEW:
            short.setdefault((q_len - 1).bit_length(), []).extend((q_start + i * q_len, q_len) for i in range(batch))
        else:
            causal.append(Span(q_start, q_len, batch))
    causal.extend(_ragged(chains) if len(chains) > 1 else Span(*chains[0]) for chains in short.values())
    if total != tokens:
        raise InvalidInput(f"attention_chains: passes describe {total} tokens, q has {tokens}; expected those of this batch's forest")
    return Plan(causal, cross)


def _ragged(chains: Sequence[tuple[int, int]]) -> Ragged:
    start, length = torch.tensor(chains).unbind(1)
    offset = torch.arange(int(length.max()))
    return Ragged(start[:, None] + torch.minimum(offset, length[:, None] - 1), offset < length[:, None])


def needs_blocked(mask: Mask) -> bool:
    """Whether some ancestor is hidden from some token, or scores are bent. Reads the mask's tensors."""
    if mask.softcap is not None or mask.bias is not None:
        return True
    if mask.end.shape[0] == 0:
        return False
    if mask.key_valid is not None and not bool(mask.key_valid.all()):
        return True
    if mask.segments is not None and bool((mask.segments != mask.segments[:, :1]).any()):
        return True
    low, high = (int(x) for x in mask.column.aminmax())
    if mask.window is not None and high - low >= mask.window:
        return True
    return mask.chunk is not None and low // mask.chunk != high // mask.chunk


def _widen(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype` with its last dim zero-padded to `dim`: the flash kernel wants equal head dims, zeros change no product."""
    x = x.to(dtype)
    x = pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, passes: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out [1, H, T, Dv] in q's dtype and merged lse [1, H, T]; half types are computed and merged in float32 and rounded once."""
    dtype, dim = accumulate_dtype(q.dtype), max(q.shape[3], v.shape[3])
    plan = make_plan(passes, q.shape[2])
    q_, k_, v_ = (_widen(x, dim, dtype) for x in (q, k, v))
    out = q.new_empty((*q.shape[:3], dim), dtype=dtype)
    lse = q.new_empty(q.shape[:3], dtype=dtype)
    for chains in plan.causal:
        part, part_lse = _flash(chains.read(q_), chains.read(k_), chains.read(v_), 0.0, True, scale=scale)
        chains.write(out, part)
        chains.write(lse, part_lse)
    for queries, keys in plan.cross:
        part, part_lse = _flash(queries.read(q_), keys.read(k_), keys.read(v_), 0.0, False, scale=scale)
        merged, merged_lse = queries.read(out), queries.read(lse)
        # sigmoid(b - a) = exp(b) / (exp(a) + exp(b)), the weight of the new part.
        merged.lerp_(part, torch.sigmoid(part_lse - merged_lse)[..., None])
        merged_lse.copy_(torch.logaddexp(merged_lse, part_lse))
    if sinks is not None:
        with_sink = torch.logaddexp(lse, sinks.to(dtype)[None, :, None])
        out *= (lse - with_sink).exp_()[..., None]
        lse = with_sink
    return out[..., : v.shape[3]].to(q.dtype).contiguous(), lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, passes: Tensor, out: Tensor, lse: Tensor, scale: float
) -> Gradients:
    """Every pass gets the merged out and merged lse, so that its probabilities are those of the whole softmax."""
    dtype, dim = accumulate_dtype(q.dtype), max(q.shape[3], v.shape[3])
    plan = make_plan(passes, q.shape[2])
    q_, k_, v_, grad_, out_ = (_widen(x, dim, dtype) for x in (q, k, v, grad, out))
    d_q, d_k, d_v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_, k_, v_))
    for chains in plan.causal:
        d_out = chains.read(grad_)
        if isinstance(chains, Ragged):
            d_out = d_out * chains.real[:, None, :, None]
        parts = _flash_backward(
            d_out, chains.read(q_), chains.read(k_), chains.read(v_), chains.read(out_), chains.read(lse), 0.0, True, scale=scale
        )
        for whole, part in zip((d_q, d_k, d_v), parts, strict=True):
            chains.write(whole, part)
    for queries, keys in plan.cross:
        d_out, part_out, part_lse = (queries.read(x) for x in (grad_, out_, lse))
        parts = _flash_backward(d_out, queries.read(q_), keys.read(k_), keys.read(v_), part_out, part_lse, 0.0, False, scale=scale)
        for whole, where, part in zip((d_q, d_k, d_v), (queries, keys, keys), parts, strict=True):
            where.read(whole).add_(part)
    d_sinks = sink_gradient(sinks, lse[0], (grad_[0] * out_[0]).sum(-1)) if sinks is not None else q.new_empty(0)
    narrow = (x[..., : like.shape[3]].to(like.dtype).contiguous() for x, like in ((d_q, q), (d_k, k), (d_v, v)))
    return (*narrow, q.new_empty(0), d_sinks)  # type: ignore[return-value]


@without_autocast
def _forward(
    q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor, key_valid: Tensor | None, segments: Tensor | None, bias: Tensor | None,
    sinks: Tensor | None, passes: Tensor, *, scale: float, window: int | None, chunk: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    mask = Mask(end, column, key_valid, segments, bias, window, chunk, softcap)
    check_inputs(q, k, v, mask, sinks)
    if needs_blocked(mask):
        return blocked.forward(q, k, v, mask, sinks, scale)
    return forward(q, k, v, sinks, passes, scale)


@without_autocast
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor, key_valid: Tensor | None, segments: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, passes: Tensor, out: Tensor, lse: Tensor,
    *, scale: float, window: int | None, chunk: int | None, softcap: float | None, bias_grad: bool,
) -> Gradients:  # fmt: skip
    mask = Mask(end, column, key_valid, segments, bias, window, chunk, softcap)
    if needs_blocked(mask):
        return blocked.backward(grad, q, k, v, mask, sinks, out, lse, scale, bias_grad)
    return backward(grad, q, k, v, sinks, passes, out, lse, scale)


attention_chains = torch.library.custom_op(
    "sp_compile::attention_chains", _forward, mutates_args=(), schema=SCHEMA, tags=(torch.Tag.needs_exact_strides,)
)
attention_chains_backward = torch.library.custom_op(
    "sp_compile::attention_chains_backward", _backward, mutates_args=(), schema=BACKWARD_SCHEMA, tags=(torch.Tag.needs_exact_strides,)
)


@attention_chains.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return blocked.forward_fake(q, v)


@attention_chains_backward.register_fake
def _backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, bias_grad: bool, **options: Any) -> Gradients:
    return gradient_fake(q, k, v, rest[4], rest[5], bias_grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.options = keyword_only_inputs


def _autograd(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.sp_compile.attention_chains_backward(
        owned(grad), *ctx.saved_tensors, **ctx.options, bias_grad=ctx.needs_input_grad[7]
    )
    return attention_gradients(ctx, gradients, 10)


attention_chains.register_autograd(_autograd, setup_context=_setup_context)
