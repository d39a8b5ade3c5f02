"""A model compiled with `context_parallel` equals the model itself on full rows, on any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sp_compile.ops.numerics import relative_error
from tests.distributed import compiled, processes

HYBRIDS = ["mamba", "mamba2", "qwen3_5", "lfm2"]
CASES = [
    pytest.param(2, ["short hybrid", "windowed"], ["tree", "tiny"], "balanced", "eager"),
    pytest.param(1, ["windowed", "hybrid"], ["star"], "balanced", "eager", marks=pytest.mark.slow),
    pytest.param(2, ["gpt", "hybrid"], ["star", "tree", "tiny"], "balanced", "aot_eager", marks=pytest.mark.slow),
    pytest.param(2, ["windowed"], ["star", "tree"], "zigzag", "aot_eager", marks=pytest.mark.slow),
    pytest.param(3, ["hybrid"], ["deep", "forest"], "zigzag", "eager", marks=pytest.mark.slow),
    pytest.param(4, ["gpt"], ["star", "tree", "tiny"], "contiguous", "eager", marks=pytest.mark.slow),
    pytest.param(4, ["windowed"], ["star", "tree"], "balanced", "aot_eager", marks=pytest.mark.slow),
    pytest.param(4, ["hybrid"], ["star", "forest", "deep", "tiny"], "balanced", "aot_eager", marks=pytest.mark.slow),
    pytest.param(2, ["qwen3"], ["star", "tree"], "balanced", "aot_eager", marks=pytest.mark.slow),
    pytest.param(2, ["gpt"], ["star", "tree"], "balanced", "inductor", marks=pytest.mark.slow),
    pytest.param(2, ["short hybrid"], ["tree", "deep", "tiny"], "balanced", "inductor", marks=pytest.mark.slow),
    pytest.param(2, HYBRIDS, ["tree", "deep"], "balanced", "eager", marks=pytest.mark.slow),
]

# Values are float64, but for what transformers computes in float32, whatever the model's dtype is.
LOGITS = dict.fromkeys(HYBRIDS, 1e-5)
GRADIENTS = {"qwen3": 1e-6, **dict.fromkeys(HYBRIDS, 1e-4)}


@pytest.mark.parametrize(("ranks", "kinds", "batches", "layout", "inner"), CASES)
def test_compiled_model_equals_dense_rows(ranks: int, kinds: list[str], batches: list[str], layout: str, inner: str) -> None:
    found = processes.results(ranks, compiled.on_rank, kinds, batches, layout, inner)
    for kind in kinds:
        for number, rows in enumerate(batches):
            check(kind, rows, [rank[kind][number] for rank in found])


def check(kind: str, rows: str, got: list[dict[str, Any]]) -> None:
    """What the ranks found for a batch against the model on its rows."""
    wanted = compiled.on_one(kind, rows)
    tokens = wanted["logits"].shape[1]
    assert relative_error(torch.cat([rank["logits"] for rank in got], 1)[:, :tokens], wanted["logits"]) <= LOGITS.get(kind, 1e-10), kind
    assert all(torch.equal(rank["loss"], got[0]["loss"]) for rank in got)
    assert relative_error(got[0]["loss"], wanted["loss"]) <= LOGITS.get(kind, 1e-10)
    assert got[0]["gradients"].keys() == wanted["gradients"].keys()
    whole = max(float(g.norm()) for g in wanted["gradients"].values())
    for name, gradient in wanted["gradients"].items():
        total = torch.stack([rank["gradients"][name] for rank in got]).sum(0)
        size = max(float(gradient.norm()), 1e-3 * whole)
        assert float((total - gradient).norm()) <= GRADIENTS.get(kind, 1e-9) * size, (kind, rows, name)
    assert all(rank["compiles"] <= 2 for rank in got), "a new batch compiled again"


@pytest.mark.slow
def test_replay_is_bit_equal() -> None:
    assert processes.results(2, compiled.replays, "hybrid") == [[], []]
