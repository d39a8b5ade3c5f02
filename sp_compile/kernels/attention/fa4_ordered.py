"""flash-attn-4's block-sparse backward with dQ added up in a fixed order: reproducible, in one launch for any forest.

The package has such a kernel for Blackwell only; its kernel for Hopper raises. `fa4_ordered_kernel.py` makes one of it as a subclass. The
package's interface makes its kernels from the class that it finds under a name of its own, where the subclass is put before the first use,
for good: other kernels than those with our mask are the package's own.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from typing import Any

import torch
from torch import Tensor

from sp_compile.kernels.attention import fa4
from sp_compile.kernels.attention.composed import gradient_of_sinks, heads_first, of_no_tokens, tokens_first
from sp_compile.layout.mask_blocks import BLOCK, ORDER
from sp_compile.ops.attention import Gradients

FITTED = ("4.0.0b36",)
"""Versions whose kernel the subclass was fitted to: it takes part in that kernel's synchronisation, which no signature shows."""

NARROW = 64
"""Head dims up to this have no faster reproducible backward."""
LONG = 1024
"""Tokens of a mean node from which on another backward is faster: of the package, or composed (README.md has the times)."""

_BLOCKS = {"dq_write_order", "dq_write_order_full", "spt"}
_KERNEL = {"deterministic", "mask_mod", "q_subtile_factor", "tile_m"}
_WORK = {"TileSchedulerCls", "blocksparse_tensors"}
_METHODS = {
    "load": _WORK,
    "mma": _WORK | {"AttentionMaskCls"},
    "dQaccum_store": _WORK | {"mdQaccum", "sdQaccum", "block_info", "SeqlenInfoCls", "mdQ_semaphore"},
}
_NAME = "FlashAttentionBackwardSm90"
_installing = threading.Lock()


def unusable() -> str | None:
    """Why it cannot be used, None if it can."""
    reason = fa4.unusable()
    return _broken(fa4.version()) if reason is None else reason


@functools.cache
def _broken(found: str | None) -> str | None:
    if found not in FITTED:
        return f"is fitted to {fa4.PACKAGE} {', '.join(FITTED)}, found {found}"
    try:
        known = functions()
    except Exception as error:  # whatever its own dependencies raise
        return f"{fa4.PACKAGE} {found} has another interface: {type(error).__name__}: {error}"
    kernel = known["kernel"]
    wanted = {"blocks": (known["blocks"], _BLOCKS), "__init__": (kernel, _KERNEL)}
    wanted |= {name: (getattr(kernel, name, None), parameters) for name, parameters in _METHODS.items()}
    for name, (function, parameters) in wanted.items():
        missing = parameters.difference(inspect.signature(function).parameters if function else ())
        if missing:
            return f"{fa4.PACKAGE} {found} has another interface: its {name} does not know {', '.join(sorted(missing))}"
    return None


@functools.cache
def functions() -> dict[str, Any]:
    """Those of the package, the mask that asks for our kernel, and the package's kernel."""
    kernel = getattr(importlib.import_module("flash_attn.cute.flash_bwd_sm90"), _NAME)
    ordered = importlib.import_module("sp_compile.kernels.attention.fa4_ordered_kernel")
    return fa4.functions() | {"mask": ordered.ordered_mask, "kernel": kernel}


@functools.cache
def install() -> None:
    """Lets the package make our kernel where it is given our mask."""
    interface = importlib.import_module("flash_attn.cute.interface")
    ordered = importlib.import_module("sp_compile.kernels.attention.fa4_ordered_kernel")
    with _installing:
        if getattr(interface, _NAME) is ordered.OrderedBackwardSm90.__base__:
            setattr(interface, _NAME, ordered.OrderedBackwardSm90)


def long_nodes(shape: Tensor, tokens: int) -> bool:
    """Whether a mean node, given `mask_shape`, has so many tokens that our order of sums costs time."""
    return tokens >= LONG * fa4.described(shape, tokens)["nodes"]


def _lists(shape: Tensor, blocks: Tensor, order: Tensor, tokens: int) -> dict[str, Any]:
    """Arguments of the package's function: `mask_order` in the places of lists, where our kernel reads it (`find_work`)."""
    given = fa4.described(shape, tokens)
    rows, known = given["blocks"], functions()
    block, middle, stop, last_turn, turn = order.view(len(ORDER), rows)
    lists = known["blocks"](
        mask_block_cnt=block.view(1, 1, rows),
        mask_block_idx=middle.view(1, 1, rows, 1),
        full_block_cnt=stop.view(1, 1, rows),
        full_block_idx=last_turn.view(1, 1, rows, 1),
        dq_write_order=turn.view(1, 1, rows, 1),
        dq_write_order_full=turn.view(1, 1, rows, 1),
        spt=False,
        block_size=(BLOCK, BLOCK),
    )
    return {"mask_mod": known["mask"], "block_sparse_tensors": lists, "aux_tensors": [blocks[: rows * BLOCK]]}


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shape: Tensor, blocks: Tensor, order: Tensor, out: Tensor,
    lse: Tensor, scale: float,
) -> Gradients:  # fmt: skip
    """Gradients by our block-sparse kernel, given `mask_shape`, `mask_blocks` and `mask_order`; equal bits for equal inputs."""
    tokens = q.shape[2]
    if not tokens:
        return of_no_tokens(q, k, v, sinks)
    install()
    known = functions()
    dim, v_dim = fa4.LIBRARY.dims(q, k, v)
    q_, k_ = (tokens_first(x, dim) for x in (q, k))
    v_, grad_, out_ = (tokens_first(x, v_dim) for x in (v, grad, out))
    given = _lists(shape, blocks, order, tokens)
    with torch.cuda.device_of(q):
        found = known["backward"](
            q_[None], k_[None], v_[None], out_[None], grad_[None], lse, softmax_scale=scale, deterministic=True, **given
        )
    d_q, d_k, d_v = (heads_first(x[0], like.shape[3], like.dtype) for x, like in zip(found[:3], (q, k, v), strict=True))
    return d_q, d_k, d_v, q.new_empty(0), gradient_of_sinks(sinks, lse[0], grad_, out_)
