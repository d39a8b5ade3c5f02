"""A model compiled with `context_parallel` equals the model itself on full rows, on any number of ranks."""

from __future__ import annotations

import pytest
import torch

from sp_compile.ops.numerics import relative_error
from tests.distributed import compiled, processes

CASES = [
    pytest.param(2, "windowed", ["star", "tiny"], "balanced", "eager"),
    pytest.param(1, "windowed", ["star"], "balanced", "eager", marks=pytest.mark.slow),
    pytest.param(2, "gpt", ["star", "tree", "tiny"], "balanced", "aot_eager", marks=pytest.mark.slow),
    pytest.param(2, "windowed", ["star", "tree"], "zigzag", "aot_eager", marks=pytest.mark.slow),
    pytest.param(4, "gpt", ["star", "tree", "tiny"], "contiguous", "eager", marks=pytest.mark.slow),
    pytest.param(4, "windowed", ["star", "tree"], "balanced", "aot_eager", marks=pytest.mark.slow),
    pytest.param(2, "qwen3", ["star", "tree"], "balanced", "aot_eager", marks=pytest.mark.slow),
    pytest.param(2, "gpt", ["star", "tree"], "balanced", "inductor", marks=pytest.mark.slow),
]

# Values are float64, but for norms and rotations that transformers computes in float32, whatever the model's dtype is.
GRADIENTS = {"qwen3": 1e-6}


@pytest.mark.parametrize(("ranks", "kind", "batches", "layout", "inner"), CASES)
def test_compiled_model_equals_dense_rows(ranks: int, kind: str, batches: list[str], layout: str, inner: str) -> None:
    found = processes.results(ranks, compiled.on_rank, kind, batches, layout, inner)
    for number, rows in enumerate(batches):
        wanted, got = compiled.on_one(kind, rows), [rank[number] for rank in found]
        tokens = wanted["logits"].shape[1]
        assert relative_error(torch.cat([rank["logits"] for rank in got], 1)[:, :tokens], wanted["logits"]) <= 1e-10
        assert all(torch.equal(rank["loss"], got[0]["loss"]) for rank in got)
        assert relative_error(got[0]["loss"], wanted["loss"]) <= 1e-10
        assert got[0]["gradients"].keys() == wanted["gradients"].keys()
        whole = max(float(g.norm()) for g in wanted["gradients"].values())
        for name, gradient in wanted["gradients"].items():
            total = torch.stack([rank["gradients"][name] for rank in got]).sum(0)
            size = max(float(gradient.norm()), 1e-3 * whole)
            assert float((total - gradient).norm()) <= GRADIENTS.get(kind, 1e-9) * size, (rows, name)
        assert all(rank["compiles"] <= 2 for rank in got), "a new batch compiled again"
