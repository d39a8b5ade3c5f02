"""A Hugging Face Llama: every scenario equals the dense model."""

from __future__ import annotations

import pytest

from tests.e2e import models, sweep
from tests.e2e.scenarios import Batch

pytest.importorskip("transformers")

QUICK = {("aot_eager", "attention_mask+labels"), ("aot_eager", "position_ids"), ("inductor", "attention_mask+labels")}


@pytest.mark.parametrize("inner, batch", sweep.cases(models.llama, QUICK))
def test_llama_equals_dense(inner: str, batch: Batch) -> None:
    sweep.check(models.llama, inner, batch)
