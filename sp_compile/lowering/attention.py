"""Implementations of `sp_compile::attention`, best first.

| name | where | forest tensors | what it is |
| --- | --- | --- | --- |
| chains | CPU | attention_passes | torch's flash attention over first-child chains, merged |
| fa4_blocks | Hopper, flash-attn-4 | mask_shape, mask_blocks, padding_hides | block-sparse kernels; bits of gradients change |
| fa4_mixed | Hopper, flash-attn-4 | those, flash_calls, flash_plan | block-sparse forward, composed backward |
| fa4_chains | Hopper, flash-attn-4 | flash_calls, flash_plan, padding_hides | varlen kernels over first-child chains, merged |
| chains_cuda | NVIDIA, 16-bit | flash_calls, flash_plan, padding_hides | the same with torch's varlen kernels |
| blocked | any | | masked softmax over blocks of queries, memory linear in tokens |
| reference | any | | the op's own quadratic body |

All but the last two go to blocked in calls whose mask hides ancestors. The order is that of times on an H200 (`bench/attention.py`).
"""

from __future__ import annotations

import torch

from sp_compile.kernels.attention import blocked, chains_cpu, chains_cuda, fa4, fa4_ops
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
        "fa4_blocks",
        torch.ops.sp_compile.attention_fa4_blocks.default,
        _fa4_blocks,
        deterministic=False,
        forest_tensors=("mask_shape", "mask_blocks", PADDING_HIDES),
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
    Implementation(
        "chains_cuda",
        torch.ops.sp_compile.attention_flash.default,
        _chains_cuda,
        deterministic=True,
        forest_tensors=("flash_calls", "flash_plan", PADDING_HIDES),
        output=0,
    ),
    Implementation("blocked", torch.ops.sp_compile.attention_blocked.default, _known_dtype, deterministic=True, output=0),
    Implementation("reference", torch.ops.sp_compile.attention.default, _anything, deterministic=True),
)

register(torch.ops.sp_compile.attention.default, *TABLE)
