"""`sp_compile::attention_flash`: CUDA attention composed of torch's own variable-length flash kernels over first-child chains.

One causal call over all chains, then one call per depth of branching nodes (`layout/flash_calls.py`), merged by their log-sum-exp; each
backward call is given the merged out and merged lse (README.md). What is launched is read from a tensor that stays on the CPU, so a call
waits for no device. Padding, windows and chunks that hide something go to the blocked implementation.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sp_compile.errors import InvalidInput
from sp_compile.kernels.attention import blocked
from sp_compile.layout.flash_calls import CALL, CROSS, PART
from sp_compile.ops.attention import Gradients, Mask, attention_gradients, check_inputs, sink_gradient
from sp_compile.ops.numerics import accumulate_dtype

LARGEST_HEAD = 256

SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor end, Tensor column, Tensor? key_valid, Tensor? segments, Tensor? bias, Tensor? sinks, "
    "Tensor calls, Tensor plan, Tensor hides, *, float scale, int? window, int? chunk, float? softcap) -> (Tensor, Tensor)"
)
BACKWARD_SCHEMA = (
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor end, Tensor column, Tensor? key_valid, Tensor? segments, Tensor? bias, "
    "Tensor? sinks, Tensor calls, Tensor plan, Tensor hides, Tensor out, Tensor lse, *, float scale, int? window, int? chunk, "
    "float? softcap, bool bias_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True)
class Sequences:
    """Lengths of a flash call: cumulated, int32 [n + 1] on the device, and the most of one, on the host.

    `spare` holds `q` and `k` of the same sequences and an empty one.
    """

    q: Tensor
    k: Tensor
    most_q: int
    most_k: int
    spare: tuple[Tensor, Tensor]

    def with_spare(self, heads: int, processors: int) -> Sequences:
        """With the empty sequence, if fewer waves of blocks result.

        The reproducible backward kernel cuts the keys of every sequence and head between ceil(processors / (sequences * heads)) blocks. One
        block fills a processor, so blocks beyond a multiple of the processors cost as much as another multiple.
        """
        real = self.q.shape[0] - 1

        def time(sequences: int) -> float:
            splits = -(-processors // (sequences * heads))
            return -(-real * heads * splits // processors) / splits

        return dataclasses.replace(self, q=self.spare[0], k=self.spare[1]) if time(real + 1) < time(real) else self


def flash(q: Tensor, k: Tensor, v: Tensor, lengths: Sequences, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out [n, Hq, D] and lse float32 [Hq, n] of q [n, Hq, D], k and v [m, Hkv, D]. The one place where forward calls the kernel."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, lengths.q, lengths.k, lengths.most_q, lengths.most_k, 0.0, causal, False, scale=scale
    )
    return out, lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Sequences, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v. The one place where backward calls the kernel; it is reproducible where deterministic algorithms are on."""
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is none of
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, lengths.q, lengths.k, lengths.most_q, lengths.most_k, 0.0, causal, seed, seed, scale=scale
    )
    return gradients


@dataclass(frozen=True)
class Tokens:
    """Token numbers of one side of a call: `rows`, distinct, or the `count` tokens from `first` on."""

    first: int
    count: int
    rows: Tensor | None

    def read(self, x: Tensor) -> Tensor:
        """[T, ...] -> [count, ...], a view where tokens are consecutive."""
        return x.narrow(0, self.first, self.count) if self.rows is None else x.index_select(0, self.rows)

    def read_lse(self, lse: Tensor) -> Tensor:
        """[H, T] -> contiguous [H, count]."""
        return lse.narrow(1, self.first, self.count).contiguous() if self.rows is None else lse.index_select(1, self.rows)


@dataclass(frozen=True)
class Call:
    """One flash call."""

    kind: int
    lengths: Sequences
    queries: Tokens
    keys: Tokens


def make_calls(calls: Tensor, plan: Tensor, tokens: int) -> list[Call]:
    """Reads `flash_calls` (CPU) and cuts `flash_plan` (device).

    Raises:
        InvalidInput: the tensors are those of a forest with another number of tokens.
    """
    (described, *_), *rows = calls.tolist()
    if described != tokens:
        raise InvalidInput(f"attention_flash: calls describe {described} tokens, q has {tokens}; expected those of this batch's forest")
    made = []
    for row in rows:
        given = dict(zip(CALL, row, strict=True))
        n, at = given["sequences"], given["lengths"]
        # With one query a sequence the kernel takes a shortcut that lays lse out in another order.
        spare = plan[at : at + n + 2], plan[at + n + 2 : at + 2 * n + 4]
        lengths = Sequences(spare[0][:-1], spare[1][:-1], max(given["max_q"], 2), max(given["max_k"], 2), spare)
        sides = []
        for side in "qk":
            count, numbers = given[f"{side}_len"], given[f"{side}_tokens"]
            sides.append(Tokens(given[f"{side}_start"], count, plan[numbers : numbers + count] if numbers >= 0 else None))
        made.append(Call(given["kind"], lengths, *sides))
    return made


def needs_blocked(calls: Tensor, hides: Tensor, window: int | None, chunk: int | None) -> bool:
    """Whether padding, a window or chunks hide some ancestor, from `hides` [1] and the columns, both on the CPU; waits for no device."""
    if hides.item():
        return True
    _, low, high = calls[0, :3].tolist()
    if window is not None and high - low >= window:
        return True
    return chunk is not None and low // chunk != high // chunk


def merge_rows(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, where: Tokens) -> Tensor:
    """`out` [T, H, D] takes in a pass over further keys in place, float32 in between; returns the merged lse [H, T]."""
    kernels = _triton(out)
    if kernels is not None:
        merged_lse: Tensor = kernels.merge(out, lse, part.contiguous(), part_lse.contiguous(), where.rows, where.first)
        return merged_lse
    dtype = accumulate_dtype(out.dtype)
    old, old_lse = where.read(out).to(dtype), where.read_lse(lse)
    # sigmoid(b - a) = exp(b) / (exp(a) + exp(b)), the weight of the new part.
    merged = torch.lerp(old, part.to(dtype), torch.sigmoid(part_lse - old_lse).t()[..., None]).to(out.dtype)
    rows = slice(where.first, where.first + where.count) if where.rows is None else where.rows.long()
    lse = lse.clone()
    out[rows], lse[:, rows] = merged, torch.logaddexp(old_lse, part_lse)
    return lse


def add_rows(whole: Tensor, part: Tensor, where: Tokens) -> None:
    """In place: `whole` [T, ...] plus `part` at its tokens, which are distinct: one owner per row, no order to depend on."""
    kernels = _triton(whole)
    if kernels is not None:
        kernels.add(whole, part.contiguous(), where.rows, where.first)
        return
    rows = slice(where.first, where.first + where.count) if where.rows is None else where.rows.long()
    dtype = accumulate_dtype(whole.dtype)
    whole[rows] = (where.read(whole).to(dtype) + part.to(dtype)).to(whole.dtype)


@functools.cache
def processors(device: torch.device) -> int:
    """Of the device; 1 of a CPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def _triton(x: Tensor) -> Any:
    if not x.is_cuda:
        return None
    try:
        return importlib.import_module("sp_compile.kernels.attention.rows_triton")
    except ImportError:
        return None


def token_major(x: Tensor) -> Tensor:
    """[1, H, T, D] with the strides of a contiguous [1, T, H, D], as flash kernels read and write."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _tokens_first(x: Tensor, dim: int) -> Tensor:
    """[1, H, T, d] -> [T, H, dim], padded with zeros, which change no product; 16-byte loads must be possible."""
    x = x[0].transpose(0, 1)
    if x.shape[-1] < dim:
        return pad(x, (0, dim - x.shape[-1]))
    aligned = x.stride(2) == 1 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _result(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """[T, H, d] -> [1, H, T, dim] in token-major memory of its own, no view of another tensor."""
    x = x[..., :dim].to(dtype).contiguous()
    tokens, heads, _ = x.shape
    made = x.new_empty(0)
    return made.set_(x.untyped_storage(), x.storage_offset(), (1, heads, tokens, dim), (tokens * heads * dim, dim, heads * dim, 1))


def _padded(q: Tensor, v: Tensor) -> int:
    return -(-max(q.shape[3], v.shape[3]) // 8) * 8


def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, calls: Tensor, plan: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out [1, H, T, Dv] and merged lse [1, H, T] in the accumulation dtype."""
    dim, tokens = _padded(q, v), q.shape[2]
    made = make_calls(calls, plan, tokens)
    if not made:
        return fake_result(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))
    q_, k_, v_ = (_tokens_first(x, dim) for x in (q, k, v))
    causal, cross = made[0], [call for call in made if call.kind == CROSS]
    out, lse = flash(q_, k_, v_, causal.lengths, True, scale)
    lse = lse.contiguous()
    # One rounding more is that of the pass itself; with several, the sum is kept in float32.
    out = out.to(accumulate_dtype(q.dtype) if len(cross) > 1 or sinks is not None else q.dtype).contiguous()
    for call in cross:
        part, part_lse = flash(call.queries.read(q_), call.keys.read(k_), call.keys.read(v_), call.lengths, False, scale)
        lse = merge_rows(out, lse, part, part_lse, call.queries)
    if sinks is not None:
        with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out *= (lse - with_sink).exp_().t()[..., None]
        lse = with_sink
    return _result(out, v.shape[3], q.dtype), lse[None]


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, calls: Tensor, plan: Tensor, out: Tensor, lse: Tensor,
    scale: float,
) -> Gradients:  # fmt: skip
    """Every call gets the merged out and merged lse, so that its probabilities are those of the whole softmax."""
    dim, tokens = _padded(q, v), q.shape[2]
    made = make_calls(calls, plan, tokens)
    if not made:
        d_sinks = torch.zeros_like(sinks) if sinks is not None else q.new_empty(0)
        return (*(fake_result(x, x.shape[3]) for x in (q, k, v)), q.new_empty(0), d_sinks)  # type: ignore[return-value]
    q_, k_, v_, grad_, out_ = (_tokens_first(x, dim) for x in (q, k, v, grad, out))

    def gradients(call: Call) -> tuple[Tensor, Tensor, Tensor]:
        do, queries, o = (call.queries.read(x) for x in (grad_, q_, out_))
        keys, values = (call.keys.read(x) for x in (k_, v_))
        lengths = call.lengths.with_spare(q.shape[1], processors(q.device)) if strict else call.lengths
        return flash_backward(do, queries, keys, values, o, call.queries.read_lse(lse[0]), lengths, call.kind != CROSS, scale)

    strict = torch.are_deterministic_algorithms_enabled()
    cross = [call for call in made if call.kind == CROSS]
    # Parts cost copies and end one after the other; only a reproducible kernel is better off with them.
    chains = [call for call in made if call.kind == PART] if strict else []
    # Sums of more than two terms are kept in float32 and rounded once.
    dtype = accumulate_dtype(q.dtype) if len(cross) > 1 else q.dtype
    if chains:
        whole = [x.new_empty(x.shape, dtype=dtype) for x in (q_, k_, v_)]
        for call in chains:
            for total, part in zip(whole, gradients(call), strict=True):
                call.queries.read(total).copy_(part)
    else:
        whole = [part.to(dtype).contiguous() for part in gradients(made[0])]
    for call in cross:
        for total, part, where in zip(whole, gradients(call), (call.queries, call.keys, call.keys), strict=True):
            add_rows(total, part, where)
    d_q, d_k, d_v = (_result(x, like.shape[3], like.dtype) for x, like in zip(whole, (q, k, v), strict=True))
    d_sinks = sink_gradient(sinks, lse[0], (grad_.to(lse.dtype) * out_.to(lse.dtype)).sum(-1).t()) if sinks is not None else q.new_empty(0)
    return d_q, d_k, d_v, q.new_empty(0), d_sinks


def _forward(
    q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor, key_valid: Tensor | None, segments: Tensor | None, bias: Tensor | None,
    sinks: Tensor | None, calls: Tensor, plan: Tensor, hides: Tensor,
    *, scale: float, window: int | None, chunk: int | None, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    mask = Mask(end, column, key_valid, segments, bias, window, chunk, softcap)
    check_inputs(q, k, v, mask, sinks)
    _check_mask(mask)
    if needs_blocked(calls, hides, window, chunk):
        out, lse = blocked.forward(q, k, v, mask, sinks, scale)
        return token_major(out), lse
    return forward(q, k, v, sinks, calls, plan, scale)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor, key_valid: Tensor | None, segments: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, calls: Tensor, plan: Tensor, hides: Tensor, out: Tensor, lse: Tensor,
    *, scale: float, window: int | None, chunk: int | None, softcap: float | None, bias_grad: bool,
) -> Gradients:  # fmt: skip
    if needs_blocked(calls, hides, window, chunk):
        mask = Mask(end, column, key_valid, segments, bias, window, chunk, softcap)
        d_q, d_k, d_v, d_bias, d_sinks = blocked.backward(grad, q, k, v, mask, sinks, out, lse, scale, bias_grad)
        return token_major(d_q), token_major(d_k), token_major(d_v), d_bias, d_sinks
    return backward(grad, q, k, v, sinks, calls, plan, out, lse, scale)


def _check_mask(mask: Mask) -> None:
    given = [name for name in ("segments", "bias", "softcap") if getattr(mask, name) is not None]
    if given:
        raise InvalidInput(f"attention_flash: expected no {', '.join(given)}, which the kernel does not know; use attention_blocked")


attention_flash = torch.library.custom_op(
    "sp_compile::attention_flash", _forward, mutates_args=(), schema=SCHEMA, tags=(torch.Tag.needs_exact_strides,)
)
attention_flash_backward = torch.library.custom_op(
    "sp_compile::attention_flash_backward", _backward, mutates_args=(), schema=BACKWARD_SCHEMA, tags=(torch.Tag.needs_exact_strides,)
)


def fake_result(like: Tensor, dim: int) -> Tensor:
    """An unwritten [1, H, T, dim] in token-major memory, in the dtype of `like` [1, H, T, ...]."""
    _, heads, tokens, _ = like.shape
    return like.new_empty_strided((1, heads, tokens, dim), (tokens * heads * dim, dim, heads * dim, 1))


@attention_flash.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return fake_result(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))


@attention_flash_backward.register_fake
def _backward_fake(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, bias_grad: bool, **options: Any) -> Gradients:
    sinks = rest[5]
    d_sinks = sinks.new_empty(sinks.shape) if sinks is not None else q.new_empty(0)
    return fake_result(q, q.shape[3]), fake_result(k, k.shape[3]), fake_result(v, v.shape[3]), q.new_empty(0), d_sinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.options = keyword_only_inputs


def _autograd(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.sp_compile.attention_flash_backward(
        token_major(grad), *ctx.saved_tensors, **ctx.options, bias_grad=ctx.needs_input_grad[7]
    )
    return attention_gradients(ctx, gradients, 12)


attention_flash.register_autograd(_autograd, setup_context=_setup_context)
