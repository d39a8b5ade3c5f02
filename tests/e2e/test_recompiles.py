"""New batches never recompile: random forests of all sizes go through one compiled form per mode."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch._dynamo.utils import counters

import sp_compile
from sp_compile.backend import shared_prefix
from tests.e2e import compare, models
from tests.e2e.models import Rope, spread
from tests.e2e.scenarios import VOCABULARY, Batch, Row, right_padded


def random_batch(seed: int, largest: int) -> Batch:
    """B in 2..64, T about log-uniform from 40 to `largest`, N / T from 1 to about 8, 1 to 5 levels."""
    rng = random.Random(seed)
    wanted = math.exp(rng.uniform(math.log(40), math.log(largest)))
    count = min(rng.randint(2, 64), int(wanted) // 8)
    levels = rng.randint(1, 5)
    weights = [rng.uniform(0.1, 1.0) for _ in range(levels)]

    def grow(rows: int, level: int, before: list[float]) -> list[list[float]]:
        """Segment lengths before scaling, one list per row; equal objects are shared segments."""
        if rows == 1 or level == levels - 1:
            return [[*before, weights[level] * rng.uniform(0.2, 1.0)] for _ in range(rows)]
        shared = [*before, weights[level] * rng.uniform(0.2, 1.0) * rng.choice([1, 4])]
        cut = rng.randint(1, rows - 1)
        return [*grow(cut, level + 1, shared), *grow(rows - cut, level + 1, shared)]

    paths = grow(count, 0, [])
    distinct = {id(length): length for path in paths for length in path}
    scale = wanted / sum(distinct.values())
    text: dict[int, list[int]] = {
        key: [rng.randrange(1, VOCABULARY) for _ in range(max(1, round(length * scale)))] for key, length in distinct.items()
    }
    rows: list[Row] = [([token for length in path for token in text[id(length)]], []) for path in paths]
    rng.shuffle(rows)
    ids, mask, _ = right_padded(rows)
    return Batch(f"random {seed}", {"input_ids": ids, "attention_mask": mask}, mask.bool())


def run(inner: str, count: int, largest: int) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = spread(Rope(width=16, heads=2, groups=1, layers=1))
    call = torch.compile(model, backend=shared_prefix, options={"inner": inner})
    graphs = 0
    shared = 0
    for seed in range(count):
        batch = random_batch(seed, largest)
        found = compare.step(call, model, batch)
        account = sp_compile.last_run()
        if batch.logical >= 1.1 * batch.physical:
            compare.assert_shared(account, batch)
            shared += 1
        if batch.real.numel() < 3000:
            compare.assert_close(found, compare.step(model, model, batch), batch.real)
        assert account.compiles <= 2
        assert account.dense_compiles <= 1
        if seed < 2:
            graphs = counters["stats"]["unique_graphs"]
        assert counters["stats"]["unique_graphs"] == graphs
    assert shared > count // 2


def test_random_forests_compile_twice_at_most_aot_eager() -> None:
    run("aot_eager", 50, 4000)


@pytest.mark.slow
def test_random_forests_compile_twice_at_most_inductor() -> None:
    run("inductor", 20, 2000)


def test_random_forests_cover_the_range() -> None:
    """The generator's own range, so that the sweep means something."""
    batches = [random_batch(seed, 4000) for seed in range(50)]
    tokens = [batch.physical for batch in batches]
    sharing = [batch.logical / batch.physical for batch in batches]
    assert min(tokens) < 80
    assert max(tokens) > 3000
    assert min(sharing) < 1.1
    assert max(sharing) > 5
    assert max(batch.real.shape[0] for batch in batches) > 50


def test_square_and_equal_sizes_do_not_recompile() -> None:
    """B == L, T == B and T == L in turn: sizes that happen to be equal are no reason to compile again."""
    torch._dynamo.reset()
    counters.clear()
    model = models.gpt()
    call = compare.compiled(model, "aot_eager")
    graphs = None
    for rows, columns, prefix in ((4, 9, 6), (6, 6, 3), (2, 5, 4), (8, 3, 2), (5, 5, 5), (3, 7, 2)):
        ids = (torch.arange(rows)[:, None] * 7 + torch.arange(columns)[None]) % 90 + 1
        ids[:, :prefix] = torch.arange(prefix) + 1
        batch = Batch("sizes", {"input_ids": ids}, torch.ones_like(ids, dtype=torch.bool))
        assert compare.check(call, model, batch).compiles == 1
        graphs = graphs or counters["stats"]["unique_graphs"]
        assert counters["stats"]["unique_graphs"] == graphs


def test_capture_after_one_size_changed_is_symbolic_in_both() -> None:
    """Dynamo then knows one changed size and one that did not change; the mode switch makes it capture again."""
    torch._dynamo.reset()
    model = models.gpt()
    call = compare.compiled(model, "eager")

    def batch(rows: int, columns: int) -> Batch:
        ids = (torch.arange(rows)[:, None] * 7 + torch.arange(columns)[None]) % 90 + 1
        ids[:, :2] = torch.tensor([1, 2])
        return Batch("sizes", {"input_ids": ids}, torch.ones_like(ids, dtype=torch.bool))

    compare.check(call, model, batch(4, 9))
    model.eval()
    for rows, columns in ((5, 9), (5, 12), (3, 4)):
        assert compare.check(call, model, batch(rows, columns)).compiles == 1
    model.train()
    compare.check(call, model, batch(4, 7))


def test_input_that_appears_later_is_symbolic() -> None:
    torch._dynamo.reset()
    model = models.gpt()
    call = compare.compiled(model, "eager")
    for rows, columns, labelled in ((4, 9, False), (5, 11, True), (3, 8, True), (6, 8, False)):
        ids = (torch.arange(rows)[:, None] * 7 + torch.arange(columns)[None]) % 90 + 1
        ids[:, :2] = torch.tensor([1, 2])
        inputs: dict[str, torch.Tensor | int] = {"input_ids": ids, "labels": ids} if labelled else {"input_ids": ids}
        assert compare.check(call, model, Batch("labels", inputs, torch.ones_like(ids, dtype=torch.bool))).compiles == 1
