"""Implementations of `sp_compile::attention`, best first.

| name | where | forest tensors | what it is |
| --- | --- | --- | --- |
| chains | CPU | attention_passes | torch's flash attention over first-child chains, merged |
| chains_cuda | NVIDIA, 16-bit | flash_calls, flash_plan, padding_hides | the same with torch's varlen kernels |
| blocked | any | | masked softmax over blocks of queries, memory linear in tokens |
| reference | any | | the op's own quadratic body |

Both kinds of chains go to blocked in calls whose mask hides ancestors.
"""

from __future__ import annotations

import torch

from sp_compile.kernels.attention import blocked, chains_cpu, chains_cuda
from sp_compile.lowering.registry import PADDING_HIDES, Arguments, Implementation, register
from sp_compile.ops.attention import TOLERANCE, attention

__all__ = ["TABLE", "attention", "blocked", "chains_cpu", "chains_cuda"]


def _known_dtype(arguments: Arguments) -> str | None:
    dtype = arguments["q"].dtype
    return None if dtype in TOLERANCE else f"dtype {dtype} is none of {', '.join(str(known) for known in TOLERANCE)}"


def _chains(arguments: Arguments) -> str | None:
    device = arguments["q"].device.type
    if device != "cpu":
        return f"runs on cpu, the tensors are on {device}"
    return _known_dtype(arguments)


def _chains_cuda(arguments: Arguments) -> str | None:
    q, v = arguments["q"], arguments["v"]
    if q.device.type != "cuda" or torch.version.hip is not None:
        return f"runs on NVIDIA GPUs, the tensors are on {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bfloat16 or float16, not {q.dtype}"
    if max(q.shape[3], v.shape[3]) > chains_cuda.LARGEST_HEAD:
        return f"head dim {max(q.shape[3], v.shape[3])} is above {chains_cuda.LARGEST_HEAD}"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "needs compute capability 8.0"
    for name in ("segments", "bias", "softcap"):
        if arguments[name] is not None:
            return f"has no {name}"
    if arguments["key_valid"] is not None and arguments.get("padding") is None:
        return "the host cannot tell whether key_valid hides anything"
    return None


def _anything(arguments: Arguments) -> str | None:
    return None


TABLE = (
    Implementation(
        "chains", torch.ops.sp_compile.attention_chains.default, _chains, deterministic=True, forest_tensors=("attention_passes",), output=0
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
