"""Runs every scenario that a model's inputs allow through one compiled model per set of inputs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import nn

from tests.e2e import compare
from tests.e2e.scenarios import Batch, batches

Make = Callable[[], nn.Module]


def cases(make: Make, quick: Collection[tuple[str, str]]) -> list[Any]:
    """Parameters `inner, batch`, neighbours sharing a compiled model; those whose (inner, inputs) is not in `quick` are slow.

    Args:
        make: the model.
        quick: (inner compiler, inputs besides the ids, joined by "+").
    """
    takes = inspect.signature(make().forward).parameters
    fitting = sorted((b for b in batches() if set(b.inputs) <= set(takes)), key=lambda batch: batch.signature)
    return [
        pytest.param(inner, batch, id=f"{inner}-{batch.name}", marks=() if (inner, _extra(batch)) in quick else pytest.mark.slow)
        for inner in ("aot_eager", "inductor")
        for batch in fitting
    ]


def _extra(batch: Batch) -> str:
    return "+".join(name for name in batch.inputs if name != "input_ids")


@functools.lru_cache(maxsize=1)
def _model(make: Make, inner: str, signature: str) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    model = make()
    return model, compare.compiled(model, inner)


def check(make: Make, inner: str, batch: Batch) -> None:
    """The scenario is right, shared, and needs no further compilation."""
    model, call = _model(make, inner, batch.signature)
    account = compare.check(call, model, batch)
    assert account.compiles <= (1 if inner == "aot_eager" else 2)
