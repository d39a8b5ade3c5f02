"""Implementations of the row conversions and of the loss of rows: each op's own body, deterministic and anywhere; on a GPU the loss
reads the logits once, by Triton's kernel."""

from __future__ import annotations

import torch

from sp_compile.kernels.rows import cross_entropy as _triton
from sp_compile.lowering.registry import Arguments, Implementation, register
from sp_compile.ops import cross_entropy, rows

__all__ = ["cross_entropy", "rows"]


def _anything(arguments: Arguments) -> str | None:
    return None


def _cross_entropy_triton(arguments: Arguments) -> str | None:
    logits = arguments["logits"]
    if logits.device.type != "cuda":
        return f"runs on GPUs, the tensors are on {logits.device.type}"
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"computes in float32, not for {logits.dtype}"
    if arguments["label_smoothing"]:
        return "has no label smoothing"
    if logits.stride(1) != 1:
        return "reads classes that are consecutive"
    return _triton.unusable()


for _op in (torch.ops.sp_compile.unpack.default, torch.ops.sp_compile.take_tokens.default):
    register(_op, Implementation("reference", _op, _anything, deterministic=True))
_loss = torch.ops.sp_compile.cross_entropy_rows.default
register(
    _loss,
    Implementation("triton", torch.ops.sp_compile.cross_entropy_rows_triton.default, _cross_entropy_triton, deterministic=True),
    Implementation("reference", _loss, _anything, deterministic=True),
)
