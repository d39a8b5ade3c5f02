"""Log-probabilities and divergences on a GPU: exact against float64 on the CPU, reproducible, and within their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sp_compile.layout import Forest
from sp_compile.ops.numerics import relative_error
from sp_compile.training import VocabularyHead, next_tokens, token_kl, token_logprobs
from tests.determinism.replay import differing
from tests.training.rows import make, normal

ROWS = make([[*range(50), *[60 + b] * (7 * b % 19)] for b in range(40)])
TARGETS = next_tokens(ROWS.ids, ROWS.keep)
WIDTH, CLASSES = 64, 3000
HEAD: dict[str, Any] = {"softcap": 4.0, "temperature": 0.8}


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def results(values: Tensor, weight: Tensor, other: Tensor, **chunks: Any) -> tuple[Tensor, Tensor, Tensor]:
    targets = TARGETS.to(values.device)
    logprobs, entropies = token_logprobs(values[None], targets, ROWS.forest, weight=weight, entropy=True, **HEAD, **chunks)
    kl = token_kl(values[None], other[None], ROWS.forest, head=VocabularyHead(weight, **HEAD), mask=targets != -100, **chunks)
    return logprobs, entropies, kl


def inputs(dtype: torch.dtype, device: str = "cuda") -> list[Tensor]:
    shapes = [(ROWS.forest.num_tokens, WIDTH), (CLASSES, WIDTH), (ROWS.forest.num_tokens, WIDTH)]
    return [(0.4 * normal(*shape, seed=n)).detach().to(dtype).to(device).requires_grad_() for n, shape in enumerate(shapes)]


@pytest.mark.parametrize(("dtype", "values", "gradients"), [(torch.float32, 1e-5, 1e-5), (torch.bfloat16, 1e-5, 1e-2)])
@pytest.mark.parametrize("chunks", [{}, {"chunk_tokens": 70, "chunk_vocabulary": 999}])
def test_equals_float64(dtype: torch.dtype, values: float, gradients: float, chunks: dict[str, int]) -> None:
    leaves = inputs(dtype)
    wide = [x.detach().cpu().double().requires_grad_() for x in leaves]
    found, wanted = results(*leaves, **chunks), results(*wide)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert relative_error(one.cpu(), other) < values
    grads = [normal(*x.shape, seed=9, dtype=torch.float32).detach() for x in wanted]
    got = torch.autograd.grad(found, leaves, [g.cuda() for g in grads])
    want = torch.autograd.grad(wanted, wide, [g.double() for g in grads])
    for one, other in zip(got, want, strict=True):
        assert one.dtype == dtype
        assert relative_error(one.cpu(), other) < gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay(dtype: torch.dtype) -> None:
    leaves = inputs(dtype)
    torch.use_deterministic_algorithms(True)
    try:
        assert differing(lambda: list(results(*leaves, chunk_tokens=70, chunk_vocabulary=999)), leaves) == []
    finally:
        torch.use_deterministic_algorithms(False)


def test_autocast() -> None:
    leaves = inputs(torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        found = results(*leaves)
    wanted = results(*(x.bfloat16() for x in leaves))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_memory_at_150_000_classes_and_64k_row_positions() -> None:
    vocabulary, width = 150_000, 1024
    forest = Forest.from_rows([[*range(992), *range(1000 + 32 * b, 1032 + 32 * b)] for b in range(64)])
    hidden = torch.randn(1, forest.num_tokens, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, vocabulary, (64, 1024), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, entropies = token_logprobs(hidden, targets, forest, weight=weight, entropy=True)
    (logprobs.sum() + entropies.sum()).backward()
    made = torch.cuda.max_memory_allocated() - before
    gradients = 2 * (hidden.numel() + weight.numel())
    assert made < gradients + 1.5 * 2**30, f"{made / 2**20:.0f} MiB beside gradients of {gradients / 2**20:.0f} MiB"
    assert made < 2 * 65536 * vocabulary / 8
