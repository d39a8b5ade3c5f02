"""A Hugging Face Qwen3: every scenario equals the dense model."""

from __future__ import annotations

import pytest

from tests.e2e import models, sweep
from tests.e2e.scenarios import Batch

pytest.importorskip("transformers")

QUICK = {("aot_eager", "attention_mask+labels"), ("aot_eager", "logits_to_keep")}


@pytest.mark.parametrize("inner, batch", sweep.cases(models.qwen3, QUICK))
def test_qwen3_equals_dense(inner: str, batch: Batch) -> None:
    sweep.check(models.qwen3, inner, batch)
