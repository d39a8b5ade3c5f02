"""Mixtures of experts over every scenario: logits, loss, auxiliary loss, router logits of every layer and all gradients equal dense."""

from __future__ import annotations

import pytest
import torch

import sp_compile
from tests.e2e import compare, test_experts
from tests.e2e.scenarios import Batch, batches

SIGNATURES = sorted({"+".join(name for name in batch.inputs if name != "input_ids") for batch in batches()})
pytestmark = pytest.mark.slow


def _check(family: str, batch: Batch) -> None:
    model, call = test_experts.compiled(family, "grouped_mm")
    (wanted, wanted_more), (found, found_more) = (test_experts.step(f, model, batch) for f in (model, call))
    account = sp_compile.last_run()
    compare.assert_shared(account, batch)
    compare.assert_close(found, wanted, batch.real)
    assert len(found_more) == len(wanted_more)
    for one, other in zip(found_more, wanted_more, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5 if one.dim() else 1e-6)


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("family", test_experts.FAMILIES)
def test_experts_equal_dense_in_every_scenario(family: str, signature: str) -> None:
    test_experts.compiled.cache_clear()
    for batch in batches():
        if "+".join(name for name in batch.inputs if name != "input_ids") == signature:
            _check(family, batch)
