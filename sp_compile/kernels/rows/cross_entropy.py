"""`sp_compile::cross_entropy_rows` whose log sums of exponentials are formed by Triton's kernel, in one read of the logits."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from sp_compile.ops import cross_entropy
from sp_compile.ops.rows import EXACT


def unusable() -> str | None:
    """Why Triton cannot be used here; None if it can."""
    return None if importlib.util.find_spec("triton") is not None else "needs the package triton, which is not installed"


def _log_sums(logits: Tensor, weight: Tensor | None, label_smoothing: float) -> tuple[Tensor, Tensor]:
    kernel = importlib.import_module("sp_compile.kernels.rows.logsumexp_triton")
    lse: Tensor = kernel.logsumexp(logits)
    return lse, lse.new_empty(0)  # read under label smoothing only, for which `supports` declines


def _forward(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return cross_entropy.forward(_log_sums, *inputs, **options)


cross_entropy_rows_triton = torch.library.custom_op(
    "sp_compile::cross_entropy_rows_triton",
    _forward,
    mutates_args=(),
    schema=f"({cross_entropy.ARGUMENTS}, {cross_entropy.OPTIONS}) -> (Tensor, Tensor, Tensor)",
    tags=EXACT,
)
cross_entropy_rows_triton.register_fake(cross_entropy.forward_fake)
cross_entropy_rows_triton.register_autograd(cross_entropy.autograd, setup_context=cross_entropy.setup_context)
