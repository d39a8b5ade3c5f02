"""Two models that no library wrote: every scenario equals the dense model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import sp_compile
from tests.e2e import compare, models, scenarios, sweep
from tests.e2e.scenarios import Batch

GPT = {("aot_eager", ""), ("aot_eager", "labels")}
ROPE = {("aot_eager", "attention_mask+labels")}


@pytest.mark.parametrize("inner, batch", sweep.cases(models.gpt, GPT))
def test_gpt_equals_dense(inner: str, batch: Batch) -> None:
    sweep.check(models.gpt, inner, batch)


@pytest.mark.parametrize("inner, batch", sweep.cases(models.rope, ROPE))
def test_rope_equals_dense(inner: str, batch: Batch) -> None:
    """Its loss multiplies what pads give by zero, which is no proof that nothing reads them: pads are tokens there."""
    reads_pads = "labels" in batch.inputs and not bool(batch.real.all())
    sweep.check(models.rope, inner, dataclasses.replace(batch, pads=reads_pads))


@pytest.mark.parametrize("rows, columns", [(1, 7), (4, 1), (1, 1)])
def test_gpt_one_row_or_column_runs_dense(rows: int, columns: int) -> None:
    torch._dynamo.reset()
    model = models.gpt()
    call = compare.compiled(model, "eager")
    ids = torch.arange(columns).expand(rows, columns) + 1
    batch = Batch("static", {"input_ids": ids}, torch.ones_like(ids, dtype=torch.bool))
    for _ in range(2):
        compare.assert_same_bits(compare.step(call, model, batch), compare.step(model, model, batch))
        account = sp_compile.last_run()
        assert not account.shared
        assert account.physical_tokens == account.logical_tokens == rows * columns
        assert account.refused


def test_gpt_one_row_after_many_and_back() -> None:
    torch._dynamo.reset()
    model = models.gpt()
    call = compare.compiled(model, "eager")
    ids, _, _ = scenarios.right_padded(scenarios.star())
    for chosen in (ids, ids[:1], ids, ids[:2], ids[:, :1], ids):
        batch = Batch("some rows", {"input_ids": chosen.clone()}, torch.ones_like(chosen, dtype=torch.bool))
        compare.assert_close(compare.step(call, model, batch), compare.step(model, model, batch), batch.real)
    compare.assert_shared(sp_compile.last_run(), batch)


def test_rope_only_padding_in_a_row() -> None:
    """A row without a real token: its values are dropped, and the others are right."""
    torch._dynamo.reset()
    model = models.rope()
    ids, mask, _ = scenarios.right_padded(scenarios.star())
    mask[2] = 0
    batch = Batch("empty row", {"input_ids": ids, "attention_mask": mask}, mask.bool())
    wanted = compare.step(model, model, batch)
    found = compare.step(compare.compiled(model, "aot_eager"), model, batch)
    assert sp_compile.last_run().physical_tokens == batch.physical
    compare.assert_close(found, dataclasses.replace(wanted, gradients=found.gradients), batch.real)
