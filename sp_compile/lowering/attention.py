"""Implementations of `sp_compile::attention`, best first.

| name | where | forest tensors | what it is |
| --- | --- | --- | --- |
| chains | CPU | attention_passes | torch's flash attention over first-child chains, merged |
| fa4_auto | Hopper, flash-attn-4 | those of fa4_blocks, mask_order | block-sparse; the backward of fa4_blocks or of fa4_ordered |
| fa4_auto_ordered | Hopper, flash-attn-4 | those of fa4_ordered and fa4_chains | block-sparse; the backward of fa4_ordered or composed |
| fa4_blocks | Hopper, flash-attn-4 | mask_shape, mask_blocks, mask_queries, padding_hides | block-sparse; bits of gradients change |
| fa4_ordered | Hopper, flash-attn-4 | mask_shape, mask_blocks, mask_order, padding_hides | the same with sums in a fixed order |
| fa4_mixed | Hopper, flash-attn-4 | mask_shape, mask_blocks and those of fa4_chains | block-sparse forward, composed backward |
| fa4_chains | Hopper, flash-attn-4 | flash_calls, flash_plan, padding_hides | varlen kernels over first-child chains, merged |
| triton | Hopper, Triton | attention_tiles, padding_hides | our own kernels, in calls that were compared on a GPU |
| chains_cuda | NVIDIA, 16-bit | flash_calls, flash_plan, padding_hides | the same with torch's varlen kernels |
| blocked | any | | masked softmax over blocks of queries, memory linear in tokens |
| triton_all | NVIDIA, Triton | attention_tiles, padding_hides | the same in every call they are written for: windows, softcap, padding |
| reference | any | | the op's own quadratic body |

Those of flash-attn-4 and torch go to blocked in calls whose mask hides ancestors. The order is that of times on an H200
(`bench/attention.py`).
"""

from __future__ import annotations

import torch

from sp_compile.kernels.attention import blocked, chains_cpu, chains_cuda, fa4, fa4_ops, fa4_ordered
from sp_compile.lowering.attention_triton import TRITON, TRITON_ALL
from sp_compile.lowering.registry import PADDING_HIDES, Arguments, Implementation, register
from sp_compile.ops.attention import TOLERANCE, attention

__all__ = ["TABLE", "attention", "blocked", "chains_cpu", "chains_cuda", "fa4_ops"]


def _known_dtype(arguments: Arguments) -> str | None:
    dtype = arguments["q"].dtype
    return None if dtype in TOLERANCE else f"dtype {dtype} is none of {', '.join(str(known) for known in TOLERANCE)}"


def _chains(arguments: Arguments) -> str | None:
    device = arguments["q"].device.type
    if device != "cpu":
        return f"runs on cpu, the tensors are on {device}"
    return _known_dtype(arguments)


def _nvidia(arguments: Arguments, largest_head: int) -> str | None:
    q, v = arguments["q"], arguments["v"]
    if q.device.type != "cuda" or torch.version.hip is not None:
        return f"runs on NVIDIA GPUs, the tensors are on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16, not {q.dtype}"
    if max(q.shape[3], v.shape[3]) > largest_head:
        return f"head dim {max(q.shape[3], v.shape[3])} is above {largest_head}"
    for name in ("segments", "bias", "softcap"):
        if arguments[name] is not None:
            return f"has no {name}"
    if arguments["key_valid"] is not None and arguments.get("padding") is None:
        return "the host cannot tell whether key_valid hides anything"
    return None


def _chains_cuda(arguments: Arguments) -> str | None:
    reason = _nvidia(arguments, chains_cuda.LARGEST_HEAD)
    if reason is None and torch.cuda.get_device_capability(arguments["q"].device) < (8, 0):
        reason = "needs compute capability 8.0"
    return reason


def _fa4_chains(arguments: Arguments) -> str | None:
    return _nvidia(arguments, fa4.LARGEST_HEAD) or _fa4(arguments)


def _fa4_blocks(arguments: Arguments) -> str | None:
    return _nvidia(arguments, fa4.LARGEST_BLOCK_HEAD) or _fa4(arguments)


def _fa4_ordered(arguments: Arguments) -> str | None:
    return _fa4_blocks(arguments) or fa4_ordered.unusable()


def _fa4(arguments: Arguments) -> str | None:
    found = torch.cuda.get_device_capability(arguments["q"].device)
    if found != fa4.CAPABILITY:
        return f"is tested on compute capability {'.'.join(map(str, fa4.CAPABILITY))}, the device has {'.'.join(map(str, found))}"
    return fa4.unusable()


def _anything(arguments: Arguments) -> str | None:
    return None


TABLE = (
    Implementation(
        "chains", torch.ops.sp_compile.attention_chains.default, _chains, deterministic=True, forest_tensors=("attention_passes",), output=0
    ),
    Implementation(
        "fa4_auto",
        torch.ops.sp_compile.attention_fa4_auto.default,
        _fa4_ordered,
        deterministic=False,
        forest_tensors=("mask_shape", "mask_blocks", "mask_queries", "mask_order", PADDING_HIDES),
        output=0,
    ),
    Implementation(
        "fa4_auto_ordered",
        torch.ops.sp_compile.attention_fa4_auto_ordered.default,
        _fa4_ordered,
        deterministic=True,
        forest_tensors=("mask_shape", "mask_blocks", "mask_order", "flash_calls", "flash_plan", PADDING_HIDES),
        output=0,
    ),
    Implementation(
        "fa4_blocks",
        torch.ops.sp_compile.attention_fa4_blocks.default,
        _fa4_blocks,
        deterministic=False,
        forest_tensors=("mask_shape", "mask_blocks", "mask_queries", PADDING_HIDES),
        output=0,
    ),
    Implementation(
        "fa4_ordered",
        torch.ops.sp_compile.attention_fa4_ordered.default,
        _fa4_ordered,
        deterministic=True,
        forest_tensors=("mask_shape", "mask_blocks", "mask_order", PADDING_HIDES),
        output=0,
    ),
    Implementation(
        "fa4_mixed",
        torch.ops.sp_compile.attention_fa4_mixed.default,
        _fa4_blocks,
        deterministic=True,
        forest_tensors=("mask_shape", "mask_blocks", "flash_calls", "flash_plan", PADDING_HIDES),
        output=0,
    ),
    Implementation(
        "fa4_chains",
        torch.ops.sp_compile.attention_fa4_chains.default,
        _fa4_chains,
        deterministic=True,
        forest_tensors=("flash_calls", "flash_plan", PADDING_HIDES),
        output=0,
    ),
    TRITON,
    Implementation(
        "chains_cuda",
        torch.ops.sp_compile.attention_flash.default,
        _chains_cuda,
        deterministic=True,
        forest_tensors=("flash_calls", "flash_plan", PADDING_HIDES),
        output=0,
    ),
    Implementation("blocked", torch.ops.sp_compile.attention_blocked.default, _known_dtype, deterministic=True, output=0),
    TRITON_ALL,
    Implementation("reference", torch.ops.sp_compile.attention.default, _anything, deterministic=True),
)

register(torch.ops.sp_compile.attention.default, *TABLE)
