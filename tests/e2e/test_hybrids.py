"""Models with recurrences and short convolutions: every scenario equals the dense model, and the packed graph ran."""

from __future__ import annotations

import dataclasses
import functools
import inspect

import pytest
import torch
from torch import nn

import sp_compile
from tests.e2e import compare, hybrids
from tests.e2e.scenarios import Batch, Row, batches, masked, random_tokens, right_padded

QUICK = ("forest right-padded labels", "tree both-padded labels")
FIRST = ("mamba", "mamba2", "nemotron_h_experts", "qwen3_5", "kimi", "minimax", "lfm2", "recurrent_gemma")
"""The families that run in every test run; the others do under `make test-full`."""
SIGNATURES = sorted({"+".join(name for name in batch.inputs if name != "input_ids") for batch in batches()})


def borders() -> list[Batch]:
    """Prompts shorter than a convolution, completions of one token, and lengths around the borders of chunks of 8 and 64 columns."""
    generator = torch.Generator().manual_seed(7)
    one = random_tokens(generator, 2)
    made: dict[str, list[Row]] = {
        "prompt of two": [(one, random_tokens(generator, count)) for count in (1, 1, 5, 9)],
        "prompt of one": [(one[:1], random_tokens(generator, count)) for count in (1, 2, 3)],
    }
    for length in (7, 8, 9, 63, 64, 65):
        prompt = random_tokens(generator, length)
        made[f"prompt of {length}"] = [(prompt, random_tokens(generator, count)) for count in (1, 8, 64 - length % 8)]
    # a halo that spans nodes of one and two tokens, four levels deep
    path = random_tokens(generator, 9)
    made["four levels"] = [(path[:stop], random_tokens(generator, 3)) for stop in (3, 4, 6, 7, 9)]
    found = []
    for name, rows in made.items():
        ids, mask, labels = right_padded(rows)
        found.append(masked(name, ids, mask, labels=labels))
    return found


def read(batch: Batch, family: str) -> Batch:
    """The batch as a recurrence reads it: pads before a row's last token are tokens, and all of them for a state after the last column."""
    return dataclasses.replace(batch, pads=True) if family in hybrids.FINAL else dataclasses.replace(batch, leading=not batch.pads)


def _check(family: str, inner: str, given: list[Batch]) -> None:
    pytest.importorskip("transformers")
    model: nn.Module = hybrids.make(family)
    torch._dynamo.reset()
    call = compare.compiled(model, inner)
    for batch in given:
        try:
            account = compare.check(call, model, read(batch, family))
        except AssertionError as error:
            raise AssertionError(f"{batch.name}: {error}") from error
        assert account.compiles <= (1 if inner != "inductor" else 2), batch.name


@functools.cache
def _takes(family: str) -> frozenset[str]:
    return frozenset(inspect.signature(hybrids.make(family).forward).parameters)


@pytest.mark.parametrize("family", [f if f in FIRST else pytest.param(f, marks=pytest.mark.slow) for f in hybrids.CONFIGS])
def test_hybrid_equals_dense(family: str) -> None:
    """Both paddings, a tree of turns, and labels; one compilation."""
    _check(family, "eager", [batch for batch in batches() if batch.name in QUICK])


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5"])
def test_hybrid_equals_dense_at_borders(family: str) -> None:
    """One compilation serves all lengths."""
    _check(family, "eager", borders())


@pytest.mark.slow
@pytest.mark.parametrize("family", hybrids.CONFIGS)
def test_hybrid_equals_dense_at_borders_under_aot(family: str) -> None:
    _check(family, "aot_eager", borders())


@pytest.mark.slow
@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("family", hybrids.CONFIGS)
def test_hybrid_equals_dense_in_every_scenario(family: str, signature: str) -> None:
    given = [b for b in batches() if "+".join(n for n in b.inputs if n != "input_ids") == signature and set(b.inputs) <= _takes(family)]
    if not given:
        pytest.skip("the model has no such inputs")
    _check(family, "aot_eager", given)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["falcon_mamba", "nemotron_h", "qwen3_5", "lfm2"])
def test_hybrid_equals_dense_under_inductor(family: str) -> None:
    _check(family, "inductor", [batch for batch in batches() if batch.name in QUICK])


def test_an_edit_of_a_sibling_moves_nothing() -> None:
    """Logits of every other row keep their bits when a completion changes and the forest stays the same."""
    pytest.importorskip("transformers")
    model = hybrids.make("nemotron_h").eval()
    batch = next(b for b in batches() if b.name == "star")
    ids = batch.tensor("input_ids")
    call = compare.compiled(model, "eager")
    with torch.no_grad():
        before = call(input_ids=ids).logits.clone()
        edited = ids.clone()
        edited[1, -1] = (edited[1, -1] + 1) % 90 + 1
        after = call(input_ids=edited).logits
    assert sp_compile.last_run().physical_tokens == batch.physical
    others = [0, *range(2, len(ids))]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[1, -1], after[1, -1])


def test_a_cache_is_that_of_the_rows() -> None:
    """`use_cache`: states and the last inputs of the convolution come back per row."""
    pytest.importorskip("transformers")
    model = hybrids.make("qwen3_5").eval()
    ids = next(b for b in batches() if b.name == "star").tensor("input_ids")
    call = compare.compiled(model, "eager")
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=True).past_key_values
        got = call(input_ids=ids, use_cache=True).past_key_values
    assert sp_compile.last_run().shared
    layer, other = got.layers[0], want.layers[0]
    torch.testing.assert_close(layer.recurrent_states[0], other.recurrent_states[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.conv_states[0], other.conv_states[0], rtol=1e-5, atol=1e-6)
