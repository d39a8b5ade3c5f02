"""flash-attn-4 (`flash_attn.cute`): whether it can be used here, its variable-length functions, and its block-sparse ones.

Its public functions compute gradients from their own out and log-sum-exp. Composition needs others (README.md), so the functions behind
them are called, after a look at their signatures. Nothing of the package is imported before a call on a supported device asks for it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from sp_compile.errors import InvalidInput
from sp_compile.kernels.attention.composed import (
    Library,
    Sequences,
    add_sinks,
    empty_result,
    gradient_of_sinks,
    heads_first,
    of_no_tokens,
    tokens_first,
)  # fmt: skip
from sp_compile.layout.mask_blocks import BLOCK, LISTS, SHAPE
from sp_compile.ops.attention import Gradients
from sp_compile.ops.numerics import accumulate_dtype

PACKAGE = "flash-attn-4"
OLDEST = "4.0.0b36"
CAPABILITY = (9, 0)
# Tested ones. On Hopper some others do not compile, such as 16 where heads share no keys.
HEAD_DIMS = (64, 96, 128, 192, 256)
LARGEST_HEAD = HEAD_DIMS[-1]
LARGEST_BLOCK_HEAD = 128
"""Larger heads need other blocks than `BLOCK` x `BLOCK`."""

# Sequences are called longer than they are, where they fit one of the kernels' blocks: each kernel then has one variant.
_LONG = 512

_FORWARD = {
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    *("softmax_scale", "causal", "mask_mod", "block_sparse_tensors", "aux_tensors", "return_lse"),
}
_BACKWARD = (_FORWARD - {"return_lse"}) | {"out", "dout", "lse", "deterministic"}
_BLOCKS = {"mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx", "block_size"}


def version() -> str | None:
    """Of the installed package; None without it. Imports nothing."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def unusable() -> str | None:
    """Why the package cannot be used, None if it can. Imports it only in a version that is new enough."""
    found = version()
    if found is None:
        return f"needs the package {PACKAGE} (>= {OLDEST}), which is not installed"
    if TorchVersion(found) < OLDEST:
        return f"needs {PACKAGE} >= {OLDEST}, found {found}"
    return _broken(found)


@functools.cache
def _broken(found: str) -> str | None:
    try:
        known = functions()
    except Exception as error:  # whatever its own dependencies raise
        return f"{PACKAGE} {found} cannot be imported: {type(error).__name__}: {error}"
    wanted = {"forward": _FORWARD, "backward": _BACKWARD, "blocks": _BLOCKS}
    for name, parameters in wanted.items():
        missing = parameters.difference(inspect.signature(known[name]).parameters)
        if missing:
            return f"{PACKAGE} {found} has another interface: its {name} function does not know {', '.join(sorted(missing))}"
    return None


@functools.cache
def functions() -> dict[str, Any]:
    """The package's forward and backward functions, its class of block lists, and our mask function."""
    interface = importlib.import_module("flash_attn.cute.interface")
    sparsity = importlib.import_module("flash_attn.cute.block_sparsity")
    mask = importlib.import_module("sp_compile.kernels.attention.fa4_mask")
    return {
        "forward": interface._flash_attn_fwd,
        "backward": interface._flash_attn_bwd,
        "blocks": sparsity.BlockSparseTensorsTorch,
        "mask": mask.forest_mask,
    }


def _lengths(lengths: Sequences) -> dict[str, Any]:
    return {
        "cu_seqlens_q": lengths.q,
        "cu_seqlens_k": lengths.k,
        "max_seqlen_q": max(lengths.most_q, _LONG),
        "max_seqlen_k": max(lengths.most_k, _LONG),
    }


def varlen(q: Tensor, k: Tensor, v: Tensor, lengths: Sequences, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """See `Library.forward`."""
    with torch.cuda.device_of(q):
        out, lse, *_ = functions()["forward"](q, k, v, softmax_scale=scale, causal=causal, return_lse=True, **_lengths(lengths))
    return out, lse


def varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Sequences, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Library.backward`."""
    with torch.cuda.device_of(q):
        d_q, d_k, d_v, *_ = functions()["backward"](
            q, k, v, out, grad, lse, softmax_scale=scale, causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(), **_lengths(lengths),
        )  # fmt: skip
    return d_q, d_k, d_v


LIBRARY = Library(varlen, varlen_backward, splits=False, head_dims=HEAD_DIMS, apart=((192, 128),))


def described(shape: Tensor, tokens: int) -> dict[str, int]:
    """`mask_shape` by name.

    Raises:
        InvalidInput: it is that of a forest with another number of tokens.
    """
    given = dict(zip(SHAPE, shape[0].tolist(), strict=True))
    if given["tokens"] != tokens:
        found = given["tokens"]
        raise InvalidInput(f"attention: blocks describe {found} tokens, q has {tokens}; expected those of this batch's forest")
    return given


def _blocks(shape: Tensor, blocks: Tensor, tokens: int, queries: Tensor | None = None) -> dict[str, Any]:
    """Arguments of the package's functions: lists of keys (forward), views of `mask_blocks`, or those of `mask_queries` (backward)."""
    given = described(shape, tokens)
    rows = given["blocks"]
    names, given_lists, at = (LISTS[:2], blocks, rows * BLOCK) if queries is None else (LISTS[2:], queries, 0)
    lists: list[Tensor] = []
    for name in names:
        width, items = given[name], at + rows
        lists += given_lists[at:items].view(1, 1, rows), given_lists[items : items + rows * width].view(1, 1, rows, width)
        at = items + rows * width
    known = functions()
    return {
        "mask_mod": known["mask"],
        "block_sparse_tensors": known["blocks"](
            mask_block_cnt=lists[0], mask_block_idx=lists[1], full_block_cnt=lists[2], full_block_idx=lists[3], block_size=(BLOCK, BLOCK)
        ),
        "aux_tensors": [blocks[: rows * BLOCK]],
    }


def blocks_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shape: Tensor, blocks: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """out [1, H, T, Dv] and lse [1, H, T] by the block-sparse kernel, given `mask_shape` and `mask_blocks`."""
    tokens = q.shape[2]
    if not tokens:
        return empty_result(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))
    dim, v_dim = LIBRARY.dims(q, k, v)
    q_, k_, v_ = tokens_first(q, dim)[None], tokens_first(k, dim)[None], tokens_first(v, v_dim)[None]
    with torch.cuda.device_of(q):
        out, lse, *_ = functions()["forward"](q_, k_, v_, softmax_scale=scale, return_lse=True, **_blocks(shape, blocks, tokens))
    out, lse = out[0], lse[0]
    if sinks is not None:
        out, lse = add_sinks(out.to(lse.dtype), lse, sinks)
    return heads_first(out, v.shape[3], q.dtype), lse[None]


def blocks_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shape: Tensor, blocks: Tensor, queries: Tensor, out: Tensor,
    lse: Tensor, scale: float,
) -> Gradients:  # fmt: skip
    """Gradients by the block-sparse kernel, which adds up those of queries in changing order."""
    tokens = q.shape[2]
    if not tokens:
        return of_no_tokens(q, k, v, sinks)
    dim, v_dim = LIBRARY.dims(q, k, v)
    q_, k_ = (tokens_first(x, dim) for x in (q, k))
    v_, grad_, out_ = (tokens_first(x, v_dim) for x in (v, grad, out))
    with torch.cuda.device_of(q):
        found = functions()["backward"](
            q_[None], k_[None], v_[None], out_[None], grad_[None], lse, softmax_scale=scale, **_blocks(shape, blocks, tokens, queries)
        )
    d_q, d_k, d_v = (heads_first(x[0], like.shape[3], like.dtype) for x, like in zip(found[:3], (q, k, v), strict=True))
    return d_q, d_k, d_v, q.new_empty(0), gradient_of_sinks(sinks, lse[0], grad_, out_)
