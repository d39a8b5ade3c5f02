"""Families of decoders, and decoders that no library wrote: every scenario equals the dense model, on the tokens of a perfect trie."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.e2e import compare, decoders, families
from tests.e2e.scenarios import Batch, batches

MAKERS: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(families.make, name) for name in families.CONFIGS},
    **{name: functools.partial(decoders.make, name) for name in decoders.KINDS},
}
FIRST = (*families.NINE, "mixed", "chunked", "documents", "buckets")
"""The families, and ways to mask, of which a part of the scenarios runs in every test run."""
SIGNATURES = sorted({"+".join(name for name in batch.inputs if name != "input_ids") for batch in batches()})
QUICK = ("forest right-padded labels", "tree both-padded labels")


def _signatures(model: nn.Module) -> dict[str, list[Batch]]:
    """The scenarios that a model's inputs allow, by their inputs."""
    takes = inspect.signature(model.forward).parameters
    found: dict[str, list[Batch]] = {}
    for batch in batches():
        if set(batch.inputs) <= set(takes):
            found.setdefault("+".join(name for name in batch.inputs if name != "input_ids"), []).append(batch)
    return found


def _check(name: str, signature: str, inner: str, chosen: tuple[str, ...] = ()) -> None:
    if name in families.CONFIGS:
        pytest.importorskip("transformers")
    model = MAKERS[name]()
    given = [batch for batch in _signatures(model).get(signature, ()) if not chosen or batch.name in chosen]
    if not given:
        pytest.skip("the model has no such inputs")
    torch._dynamo.reset()
    call = compare.compiled(model, inner)
    for batch in given:
        try:
            account = compare.check(call, model, batch)
        except AssertionError as error:
            raise AssertionError(f"{batch.name}: {error}") from error
        assert account.compiles <= (1 if inner != "inductor" else 2), batch.name


@pytest.mark.parametrize("name", FIRST)
def test_family_equals_dense(name: str) -> None:
    """Both paddings, a tree of turns, and labels; one compilation."""
    _check(name, "attention_mask+labels", "eager", QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("name", MAKERS)
def test_family_equals_dense_in_every_scenario(name: str, signature: str) -> None:
    _check(name, signature, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("signature", ["", "attention_mask+labels"])
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "mpt", "mixed", "grouped"])
def test_family_equals_dense_under_inductor(name: str, signature: str) -> None:
    _check(name, signature, "inductor")
