"""Attention of a forest composed of calls of a library's variable-length flash kernels, merged by their log-sum-exp.

One causal call over all chains, then one per depth of branching nodes (`layout/flash_calls.py`); each backward call is given the merged out
and merged lse (README.md). What is launched is read from a tensor that stays on the CPU, so a call waits for no device.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sp_compile.errors import InvalidInput
from sp_compile.layout.flash_calls import CALL, CROSS, PART
from sp_compile.ops.attention import Gradients, sink_gradient
from sp_compile.ops.numerics import accumulate_dtype


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


@dataclass(frozen=True)
class Library:
    """Variable-length kernels of one library.

    Attributes:
        forward: (q, k, v, lengths, causal, scale) -> out [n, Hq, Dv] and lse float32 [Hq, n] of q [n, Hq, D], k and v [m, Hkv, ...].
        backward: (grad, q, k, v, out, lse, lengths, causal, scale) -> gradients of q, k, v; reproducible where deterministic algorithms
            are on.
        splits: a reproducible backward shares out the processors to sequences and heads alike: heavy ones are better off in calls of their
            own, and an empty one may help.
        head_dims: those that the kernels are given, ascending; what is missing is filled up with zeros. Empty: any multiple of 8.
        apart: head dims of Q and K and of V that may differ, where every query head has keys of its own.
    """

    forward: Callable[[Tensor, Tensor, Tensor, Sequences, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Sequences, bool, float], tuple[Tensor, Tensor, Tensor]]
    splits: bool
    head_dims: tuple[int, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()

    def dims(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
        """Head dims of q, k and of v that the kernels are given."""
        given = q.shape[3], v.shape[3]
        if given in self.apart and q.shape[1] == k.shape[1]:
            return given
        known = self.head_dims or (-(-max(given) // 8) * 8,)
        return (next(dim for dim in known if dim >= max(given)),) * 2


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
        raise InvalidInput(f"attention: calls describe {described} tokens, q has {tokens}; expected those of this batch's forest")
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


def empty_result(like: Tensor, dim: int) -> Tensor:
    """An unwritten [1, H, T, dim] in token-major memory, in the dtype of `like` [1, H, T, ...]."""
    _, heads, tokens, _ = like.shape
    return like.new_empty_strided((1, heads, tokens, dim), (tokens * heads * dim, dim, heads * dim, 1))


def tokens_first(x: Tensor, dim: int) -> Tensor:
    """[1, H, T, d] -> [T, H, dim], padded with zeros, which change no product; 16-byte loads must be possible."""
    x = x[0].transpose(0, 1)
    if x.shape[-1] < dim:
        return pad(x, (0, dim - x.shape[-1]))
    aligned = x.stride(2) == 1 and x.stride(0) % 8 == 0 and x.stride(1) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def heads_first(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """[T, H, d] -> [1, H, T, dim] in token-major memory of its own, no view of another tensor."""
    x = x[..., :dim].to(dtype).contiguous()
    tokens, heads, _ = x.shape
    made = x.new_empty(0)
    return made.set_(x.untyped_storage(), x.storage_offset(), (1, heads, tokens, dim), (tokens * heads * dim, dim, heads * dim, 1))


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """`out` [T, H, D] in float32 or wider and lse [H, T] with one more logit a head, without a value."""
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out * (lse - with_sink).exp_().t()[..., None], with_sink


def gradient_of_sinks(sinks: Tensor | None, lse: Tensor, grad: Tensor, out: Tensor) -> Tensor:
    """[H] for lse [H, T] with the sinks in it, grad and out [T, H, D]; an empty tensor without sinks."""
    if sinks is None:
        return out.new_empty(0)
    return sink_gradient(sinks, lse, (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t())


def of_no_tokens(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Gradients:
    """Gradients where there is nothing to launch a kernel for."""
    d_sinks = torch.zeros_like(sinks) if sinks is not None else q.new_empty(0)
    d_q, d_k, d_v = (empty_result(x, x.shape[3]) for x in (q, k, v))
    return d_q, d_k, d_v, q.new_empty(0), d_sinks


def forward(
    library: Library, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, calls: Tensor, plan: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """out [1, H, T, Dv] and merged lse [1, H, T] in the accumulation dtype."""
    made = make_calls(calls, plan, q.shape[2])
    if not made:
        return empty_result(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))
    dim, v_dim = library.dims(q, k, v)
    q_, k_, v_ = tokens_first(q, dim), tokens_first(k, dim), tokens_first(v, v_dim)
    causal, cross = made[0], [call for call in made if call.kind == CROSS]
    out, lse = library.forward(q_, k_, v_, causal.lengths, True, scale)
    lse = lse.contiguous()
    # One rounding more is that of the pass itself; with several, the sum is kept in float32.
    out = out.to(accumulate_dtype(q.dtype) if len(cross) > 1 or sinks is not None else q.dtype).contiguous()
    for call in cross:
        part, part_lse = library.forward(call.queries.read(q_), call.keys.read(k_), call.keys.read(v_), call.lengths, False, scale)
        lse = merge_rows(out, lse, part, part_lse, call.queries)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return heads_first(out, v.shape[3], q.dtype), lse[None]


def backward(
    library: Library, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, calls: Tensor, plan: Tensor, out: Tensor,
    lse: Tensor, scale: float,
) -> Gradients:  # fmt: skip
    """Every call gets the merged out and merged lse, so that its probabilities are those of the whole softmax."""
    made = make_calls(calls, plan, q.shape[2])
    if not made:
        return of_no_tokens(q, k, v, sinks)
    dim, v_dim = library.dims(q, k, v)
    q_, k_ = (tokens_first(x, dim) for x in (q, k))
    v_, grad_, out_ = (tokens_first(x, v_dim) for x in (v, grad, out))
    # Splitting costs copies, and calls end one after the other; only a reproducible kernel is better off with it.
    split = library.splits and torch.are_deterministic_algorithms_enabled()

    def gradients(call: Call) -> tuple[Tensor, Tensor, Tensor]:
        do, queries, o = (call.queries.read(x) for x in (grad_, q_, out_))
        keys, values = (call.keys.read(x) for x in (k_, v_))
        lengths = call.lengths.with_spare(q.shape[1], processors(q.device)) if split else call.lengths
        return library.backward(do, queries, keys, values, o, call.queries.read_lse(lse[0]), lengths, call.kind != CROSS, scale)

    cross = [call for call in made if call.kind == CROSS]
    chains = [call for call in made if call.kind == PART] if split else []
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
    d_q, d_k, d_v = (heads_first(x, like.shape[3], like.dtype) for x, like in zip(whole, (q, k, v), strict=True))
    return d_q, d_k, d_v, q.new_empty(0), gradient_of_sinks(sinks, lse[0], grad_, out_)
