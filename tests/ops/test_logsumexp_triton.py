"""The row kernel of the loss in Triton's interpreter, against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops import interpreted

pytest.importorskip("triton")


def _run(logits: Tensor, block: int) -> Tensor:
    from sp_compile.kernels.rows.logsumexp_triton import logsumexp_kernel

    lse = torch.full((len(logits),), float("nan"))
    logsumexp_kernel[(len(logits),)](logits, lse, logits.stride(0), logits.shape[1], BLOCK=block)
    return lse


def test_equals_torch() -> None:
    """Widths on both sides of a block, rows that are not adjacent, infinities and NaN."""
    inf, nan = float("inf"), float("nan")
    pool = interpreted.start()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for width in (1, 63, 64, 65, 200):
            wide = torch.randn(7, width + 5, generator=torch.Generator().manual_seed(width)).mul(20).to(dtype)
            wide[0, width // 2], wide[1], wide[2, width // 2] = inf, -inf, nan
            wide[3, : width // 2] = -inf
            wide[:, width:] = nan
            logits = wide[:, :width]
            found = pool.submit(_run, logits, 64).result(timeout=100)
            assert torch.allclose(found, torch.logsumexp(logits.float(), -1), rtol=1e-6, atol=1e-6, equal_nan=True), (dtype, width)
    pool.shutdown()
