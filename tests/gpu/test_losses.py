"""The loss of rows on a GPU by Triton's kernel: against float64, and bit for bit again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sp_compile.lowering import rows as _table  # noqa: F401  (the op's implementations)
from sp_compile.ops.numerics import relative_error
from tests.determinism.replay import differing

OPTIONS: dict[str, Any] = {"ignore_index": -100, "label_smoothing": 0.0}


def case(dtype: torch.dtype, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    logits = (10 * torch.randn(500, classes, generator=generator, device="cuda")).to(dtype).requires_grad_()
    index = torch.randint(-1, 500, (40, 60), generator=generator, device="cuda")
    target = torch.randint(0, classes, index.shape, generator=generator, device="cuda")
    target[:, ::7] = -100
    return logits, index, target


def loss(logits: Tensor, index: Tensor, target: Tensor) -> Tensor:
    found: Tensor = torch.ops.sp_compile.cross_entropy_rows_triton(logits, index, target, None, **OPTIONS, dtype=torch.float32)[0]
    return found


@pytest.mark.parametrize("classes", [1, 100, 4097, 152_000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)])
def test_equals_float64(dtype: torch.dtype, tolerance: float, classes: int) -> None:
    logits, index, target = case(dtype, classes)
    found = loss(logits, index, target)
    kept = index >= 0
    wide = logits.detach().double().requires_grad_()
    want = F.cross_entropy(wide[index[kept]], target[kept], reduction="none")
    assert relative_error(found[kept], want) < 1e-5
    grad = torch.randn(found.shape, device="cuda")
    (got,), (exact,) = torch.autograd.grad(found, logits, grad), torch.autograd.grad(want, wide, grad[kept].double())
    assert relative_error(got, exact) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_replay(dtype: torch.dtype) -> None:
    logits, index, target = case(dtype, 50_000)
    torch.use_deterministic_algorithms(True)
    try:
        assert differing(lambda: [loss(logits, index, target)], [logits]) == []
    finally:
        torch.use_deterministic_algorithms(False)
