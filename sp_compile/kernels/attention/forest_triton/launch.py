"""From tensors to launches. Everything a launch depends on is read from a tensor on the host; nothing waits for the device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sp_compile.errors import InvalidInput
from sp_compile.kernels.attention.composed import heads_first, tokens_first
from sp_compile.kernels.attention.forest_triton import backward, forward
from sp_compile.kernels.attention.forest_triton.variants import Variant, choose, lanes
from sp_compile.layout.attention_tiles import ALIGN, SHAPE, sections
from sp_compile.ops.attention import Gradients, sink_gradient

_PREPARE_ROWS = 32


@functools.lru_cache(maxsize=64)
def _places(shape: tuple[int, ...]) -> dict[str, int]:
    """Where the sections of the tiles start, in units of `ALIGN`."""
    return {name: place // ALIGN for name, (place, _) in sections(list(shape)).items()}


@dataclass(frozen=True)
class Call:
    """What is the same for every kernel of a call.

    Attributes:
        end: the section of that name, or one in which padding is hidden too.
        hidden: whether it is.
    """

    shape: dict[str, int]
    places: dict[str, int]
    tiles: Tensor
    end: Tensor
    hidden: bool
    scale: float
    softcap: float | None

    @staticmethod
    def read(shape: Tensor, tiles: Tensor, tokens: int, key_valid: Tensor | None, scale: float, softcap: float | None) -> Call:
        """Raises InvalidInput for tiles of another number of tokens, and for numbers that the kernels do not know."""
        numbers = tuple(shape[0].tolist())
        given = dict(zip(SHAPE, numbers, strict=True))
        if given["tokens"] != tokens:
            described = given["tokens"]
            raise InvalidInput(f"attention: tiles describe {described} tokens, q has {tokens}; expected those of this batch's forest")
        if not scale > 0:
            raise InvalidInput(f"attention: the Triton kernels need a positive scale, got {scale}; use attention_blocked")
        end = tiles
        if key_valid is not None:
            padded = given["blocks"] * given["block"]
            valid = torch.nn.functional.pad(key_valid[0].to(torch.int32), (0, padded - tokens))
            end = torch.where(valid != 0, tiles[:padded], 0)
        return Call(given, _places(numbers), tiles, end, key_valid is not None, scale, softcap)

    def sections(self, owners: str) -> tuple[int, ...]:
        """Where the kernel that owns "query" or "key" blocks finds its lists."""
        items = "key" if owners == "query" else "query"
        names = (f"{owners}_order", f"{items}_full_at", f"{items}_full", f"{items}_part_at", f"{items}_part", "column", "low")
        return tuple(self.places[name] for name in names)

    def options(self, variant: Variant, precision: str) -> dict[str, Any]:
        return {
            "BLOCK": self.shape["block"], "QUERIES": variant.queries, "KEYS": variant.keys, "STAGES": variant.stages,
            "MASK_ALL": self.hidden, "CUT": bool(self.shape["cut"]), "CAPPED": self.softcap is not None, "PRECISION": precision,
            "DESC": variant.descriptors, "WARP_SPECIALIZE": variant.specialize, "num_warps": variant.warps,
        }  # fmt: skip

    @property
    def numbers(self) -> tuple[float, float]:
        return self.scale, 1.0 if self.softcap is None else self.softcap

    def grid(self, tokens: int, heads: int) -> tuple[int]:
        return (self.shape["blocks"] * self.shape["block"] // tokens * heads,)


def _width(dim: int) -> int:
    """A head dim filled up: loads of 16 bytes, and products of at least 16 terms."""
    return max(16, -(-dim // 8) * 8)


def _strides(x: Tensor) -> tuple[int, int]:
    """Of [T, H, D], in units of 8 elements."""
    return x.stride(0) // 8, x.stride(1) // 8


def _operand(x: Tensor, rows: int, descriptors: bool) -> tuple[Any, Any]:
    """[T, H, D] as the kernels read its first and its other lanes."""
    if not descriptors:
        return x, x
    tokens, heads, dim = x.shape
    if x.stride(1) != dim:
        x = x.contiguous()
    flat = x.as_strided((tokens, heads * dim), (x.stride(0), 1))
    one, two = lanes(dim)
    first = TensorDescriptor.from_tensor(flat, [rows, one])
    return first, TensorDescriptor.from_tensor(flat, [rows, two]) if two else first


def _dims(dim: int, v_dim: int) -> dict[str, int]:
    return {"D": dim, "D1": lanes(dim)[0], "D2": lanes(dim)[1], "DV": v_dim, "V1": lanes(v_dim)[0], "V2": lanes(v_dim)[1]}


def precision(dtype: torch.dtype) -> str:
    """What products of float32 are made of; other dtypes have one way only."""
    return "ieee" if dtype == torch.float32 else "tf32"


@functools.lru_cache(maxsize=64)
def _device(index: int) -> tuple[int, tuple[int, int]]:
    properties: Any = torch.cuda.get_device_properties(index)
    return int(properties.shared_memory_per_block_optin), (properties.major, properties.minor)


def pick(kernel: str, q: Tensor, dim: int, v_dim: int) -> Variant:
    """The variant for tensors like `q`; those on the CPU are for Triton's interpreter."""
    shared, capability = _device(q.device.index) if q.is_cuda else (227 * 1024, (9, 0))
    return choose(kernel, dim, v_dim, q.element_size(), shared, capability)


def run_forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, variant: Variant | None = None) -> tuple[Tensor, Tensor]:
    """out [1, H, T, Dv], token-major, and float32 lse [1, H, T] of at least one token."""
    dim, v_dim = _width(q.shape[3]), _width(v.shape[3])
    q_, k_, v_ = tokens_first(q, dim), tokens_first(k, dim), tokens_first(v, v_dim)
    tokens, heads, _ = q_.shape
    chosen = variant or pick("forward", q, dim, v_dim)
    out = q.new_empty((tokens, heads, v_dim))
    lse = q.new_empty((heads, tokens), dtype=torch.float32)
    q1, q2 = _operand(q_, chosen.queries, chosen.descriptors)
    k1, k2 = _operand(k_, chosen.keys, chosen.descriptors)
    v1, v2 = _operand(v_, chosen.keys, chosen.descriptors)
    with torch.cuda.device_of(q):
        forward.forward[call.grid(chosen.queries, heads)](
            q1, q2, k1, k2, v1, v2, out, lse, sinks if sinks is not None else lse, call.end, call.tiles, *call.sections("query"), tokens,
            *_strides(q_), *_strides(k_), *_strides(v_), *call.numbers, HEADS=heads, GROUP=heads // k_.shape[1], **_dims(dim, v_dim),
            SINKS=sinks is not None, **call.options(chosen, precision(q.dtype)),
        )  # fmt: skip
    return heads_first(out, v.shape[3], q.dtype), lse[None]


@dataclass(frozen=True)
class Prepared:
    """What both kernels of backward read: operands [T, H, D] with filled up head dims, and lse2 and delta of `backward.prepare`."""

    call: Call
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    lse2: Tensor
    delta: Tensor

    @staticmethod
    def make(call: Call, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Prepared:
        dim, v_dim = _width(q.shape[3]), _width(v.shape[3])
        q_, k_, v_, g_, o_ = tokens_first(q, dim), tokens_first(k, dim), *(tokens_first(x, v_dim) for x in (v, grad, out))
        tokens, heads, _ = q_.shape
        padded = call.shape["blocks"] * call.shape["block"]
        lse2, delta = (q.new_empty((heads, padded), dtype=torch.float32) for _ in range(2))
        rows = min(_PREPARE_ROWS, call.shape["block"])
        dims = _dims(dim, v_dim)
        with torch.cuda.device_of(q):
            backward.prepare[(padded // rows, heads)](
                o_, g_, lse.contiguous(), lse2, delta, tokens, padded, *_strides(o_), *_strides(g_),
                DV=v_dim, V1=dims["V1"], V2=dims["V2"], ROWS=rows, num_warps=4,
            )  # fmt: skip
        return Prepared(call, q_, k_, v_, g_, lse2, delta)

    def gradients(self, owners: str, variant: Variant | None = None) -> list[Tensor]:
        """Those whose tiles the "key" blocks own, of k and v, or the "query" blocks, of q; [T, H, D]."""
        q, k, v, call = self.q, self.k, self.v, self.call
        tokens, heads, dim = q.shape
        groups, v_dim = v.shape[1:]
        results = [x.new_empty(x.shape) for x in ((k, v) if owners == "key" else (q,))]
        chosen = variant or pick(f"{owners}_gradients", q, dim, v_dim)
        kernel, rows, owned = (
            (backward.key_gradients, chosen.keys, groups) if owners == "key" else (backward.query_gradients, chosen.queries, heads)
        )
        at_q = [y for x in (q, self.grad) for y in _operand(x, chosen.queries, chosen.descriptors)]
        at_k = [y for x in (k, v) for y in _operand(x, chosen.keys, chosen.descriptors)]
        with torch.cuda.device_of(q):
            kernel[call.grid(rows, owned)](
                *at_q[:2], *at_k, *at_q[2:], *results, self.lse2, self.delta, call.end, call.tiles, *call.sections(owners), tokens,
                self.lse2.shape[1], *(y for x in (q, k, v, self.grad) for y in _strides(x)), *call.numbers, HEADS=heads,
                GROUP=heads // groups, **_dims(dim, v_dim), **call.options(chosen, precision(q.dtype)),
            )  # fmt: skip
        return results


def run_backward(
    call: Call, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor,
    variants: tuple[Variant | None, Variant | None] = (None, None),
) -> Gradients:  # fmt: skip
    """Gradients of q, k, v, token-major, bias (none) and sinks, of at least one token; `variants` of the kernels for keys and queries."""
    ready = Prepared.make(call, grad, q, k, v, out, lse)
    (d_k, d_v), (d_q,) = (ready.gradients(*how) for how in zip(("key", "query"), variants, strict=True))
    d_sinks = sink_gradient(sinks, lse[0], ready.delta[:, : q.shape[2]]) if sinks is not None else q.new_empty(0)
    d_q, d_k, d_v = (heads_first(x, like.shape[3], like.dtype) for x, like in zip((d_q, d_k, d_v), (q, k, v), strict=True))
    return d_q, d_k, d_v, q.new_empty(0), d_sinks
