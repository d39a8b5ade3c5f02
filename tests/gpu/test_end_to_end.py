"""The spine on a GPU: Hugging Face and hand-written models under Inductor equal their dense runs, batch by batch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import sp_compile
from tests.e2e import compare, models
from tests.e2e.scenarios import Batch, batches

pytest.importorskip("transformers")

MODELS: dict[str, Callable[[], nn.Module]] = {"llama": models.llama, "qwen3": models.qwen3}


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def _on_gpu(batch: Batch) -> Batch:
    moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.inputs.items()}
    return dataclasses.replace(batch, inputs=moved, real=batch.real.cuda())


def _step(call: Callable[..., object], model: nn.Module, batch: Batch) -> compare.Result:
    model.zero_grad(set_to_none=True)
    logits, loss = compare.outputs(call(**batch.inputs))
    weights = compare.weighting(logits.shape, batch.real.cpu()).to(logits.device)
    objective = (logits.float() * weights).sum() + (0 if loss is None else 3 * loss)
    objective.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return compare.Result(logits.detach().clone(), None if loss is None else loss.detach().clone(), gradients)


@pytest.mark.parametrize("name", MODELS)
def test_every_scenario_equals_dense_under_inductor(name: str) -> None:
    model = MODELS[name]().cuda()
    for signature, group in itertools.groupby(sorted(batches(), key=lambda batch: batch.signature), key=lambda batch: batch.signature):
        torch._dynamo.reset()  # Dynamo counts recompilations per function, and every set of inputs is one
        call = compare.compiled(model, "inductor")
        for given in group:
            batch = _on_gpu(given)
            wanted = _step(model, model, batch)
            found = _step(call, model, batch)
            account = sp_compile.last_run()
            compare.assert_shared(account, given)
            compare.assert_close(found, wanted, batch.real)
            assert account.compiles <= 2
            print(f"{name} {batch.name} ({signature}): N = {account.logical_tokens}, T = {account.physical_tokens}")
            print(f"    attention: {account.kernels['attention']}")
