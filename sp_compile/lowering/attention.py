"""Implementations of `sp_compile::attention`, best first.

| name | where | forest tensors | what it is |
| --- | --- | --- | --- |
| chains | CPU | attention_passes | torch's flash attention over first-child chains, merged; blocked where a mask hides ancestors |
| blocked | any | | masked softmax over blocks of queries, memory linear in tokens |
| reference | any | | the op's own quadratic body |
"""

from __future__ import annotations

import torch

from sp_compile.kernels.attention import blocked, chains_cpu
from sp_compile.lowering.registry import Arguments, Implementation, register
from sp_compile.ops.attention import TOLERANCE, attention

__all__ = ["TABLE", "attention", "blocked", "chains_cpu"]


def _known_dtype(arguments: Arguments) -> str | None:
    dtype = arguments["q"].dtype
    return None if dtype in TOLERANCE else f"dtype {dtype} is none of {', '.join(str(known) for known in TOLERANCE)}"


def _chains(arguments: Arguments) -> str | None:
    device = arguments["q"].device.type
    if device != "cpu":
        return f"runs on cpu, the tensors are on {device}"
    return _known_dtype(arguments)


def _anything(arguments: Arguments) -> str | None:
    return None


TABLE = (
    Implementation(
        "chains", torch.ops.sp_compile.attention_chains.default, _chains, deterministic=True, forest_tensors=("attention_passes",), output=0
    ),
    Implementation("blocked", torch.ops.sp_compile.attention_blocked.default, _known_dtype, deterministic=True, output=0),
    Implementation("reference", torch.ops.sp_compile.attention.default, _anything, deterministic=True),
)

register(torch.ops.sp_compile.attention.default, *TABLE)
