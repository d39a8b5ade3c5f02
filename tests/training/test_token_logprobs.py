"""Log-probabilities and entropies of rows from physical tokens, against dense rows in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sp_compile
from sp_compile.errors import InvalidInput, StaleForest
from sp_compile.ops.numerics import relative_error
from sp_compile.training import next_tokens, token_logprobs
from tests.training.rows import STAR, Recorder, Rows, dense_logits, dense_logprobs, expanded, make, normal, random_rows, same_results

WIDTH, CLASSES = 4, 11
OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": 0.7, "softcap": 1.5, "temperature": 0.6},
    {"temperature": 2.5},
    {"scale": 1.3},
    {"softcap": 2.0},
]


def head(hidden: bool, bias: bool = True, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    if not hidden:
        return {}
    return {"weight": normal(CLASSES, WIDTH, seed=1, dtype=dtype)} | ({"bias": normal(CLASSES, seed=2, dtype=dtype)} if bias else {})


def table(rows: Rows, hidden: bool, dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(rows.prefixes, WIDTH if hidden else CLASSES, seed=0, dtype=dtype)


def some_targets(rows: Rows, seed: int, columns: int) -> Tensor:
    """Few classes, so that rows ask one token for one class; some ignored."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, 3, rows.ids.shape, generator=generator) * 5
    return targets.masked_fill(torch.rand(rows.ids.shape, generator=generator) < 0.2, -100)[:, :columns].contiguous()


@settings(max_examples=60, deadline=None)
@given(
    rows=random_rows(),
    hidden=st.booleans(),
    bias=st.booleans(),
    options=st.sampled_from(OPTIONS),
    entropy=st.booleans(),
    packed=st.booleans(),
    shorter=st.booleans(),
    chunks=st.tuples(st.sampled_from([None, 1, 3]), st.sampled_from([None, 1, 4, 11, 50])),
)
def test_equals_dense(
    rows: Rows, hidden: bool, bias: bool, options: dict[str, Any], entropy: bool, packed: bool, shorter: bool, chunks: tuple[Any, Any]
) -> None:
    values, layers = table(rows, hidden), head(hidden, bias)
    columns = rows.ids.shape[1] - shorter
    targets = some_targets(rows, seed=3, columns=columns)
    counted = (targets != -100) & (rows.keep[:, :columns] if packed else True)
    given = values[rows.packed][None] if packed else expanded(values, rows)
    sizes = {"chunk_tokens": chunks[0], "chunk_vocabulary": chunks[1]}
    result = token_logprobs(given, targets, rows.forest if packed else None, entropy=entropy, **layers, **options, **sizes)
    found = list(result) if isinstance(result, tuple) else [result]
    wanted = dense_logprobs(dense_logits(expanded(values, rows)[:, :columns], **layers, **options), targets, counted)
    same_results(found, list(wanted)[: len(found)], [values, *layers.values()])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2), (torch.float16, 1.5e-3)])
@pytest.mark.parametrize("hidden", [True, False])
def test_other_dtypes(dtype: torch.dtype, tolerance: float, hidden: bool) -> None:
    """Results are float32 and rounded nowhere; gradients are rounded once, to the dtype of what they belong to."""
    rows = make(STAR)
    values, layers = table(rows, hidden, dtype), head(hidden, dtype=dtype)
    targets = some_targets(rows, 3, rows.ids.shape[1])
    found = token_logprobs(values[rows.packed][None], targets, rows.forest, entropy=True, **layers)
    wide = [x.detach().double().requires_grad_() for x in (values, *layers.values())]
    logits = dense_logits(expanded(wide[0], rows), **dict(zip(layers, wide[1:], strict=True)))
    wanted = dense_logprobs(logits, targets, rows.keep & (targets != -100))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert relative_error(one, other) < 2e-6
    grad = normal(*targets.shape, seed=4, dtype=torch.float32).detach()
    got = torch.autograd.grad([x.float() for x in found], [values, *layers.values()], [grad, -grad])
    want = torch.autograd.grad(wanted, wide, [grad.double(), -grad.double()])
    for one, other in zip(got, want, strict=True):
        assert one.dtype == dtype
        assert relative_error(one, other) < tolerance


def test_first_completion_token_has_the_dense_gradient() -> None:
    """It is predicted by the last token of the prompt, which has one target for each child."""
    rows = make(STAR)
    values, weight = table(rows, True), head(True)["weight"]
    targets = next_tokens(rows.ids, rows.keep)
    found = token_logprobs(values[rows.packed][None], targets, rows.forest, weight=weight)[:, 4]
    wanted = dense_logprobs(dense_logits(expanded(values, rows), weight), targets, targets != -100)[0][:, 4]
    assert (wanted != 0).tolist() == [True, True, True, False, True, True]
    same_results([found], [wanted], [values, weight])


def test_last_tokens_predict_nothing() -> None:
    rows = make([[1], [1, 2], [1, 2, 3]])
    found = token_logprobs(table(rows, False)[rows.packed][None], next_tokens(rows.ids, rows.keep), rows.forest)
    assert (found != 0).sum(1).tolist() == [0, 1, 2]


def test_each_token_is_computed_once_and_only_where_it_counts() -> None:
    rows = make([[*range(10), 5, b] for b in range(8)])
    values, weight = table(rows, True), head(True)["weight"]
    targets = torch.full_like(rows.ids, -100)
    targets[:, 10:12] = torch.arange(8)[:, None]
    with Recorder() as seen:
        token_logprobs(values[rows.packed][None], targets, rows.forest, weight=weight)
    assert seen.products == [(1 + 8, CLASSES)], "the last shared token once, with eight targets, and the last token of each row"


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize(
    "rows", [make([]), make([[]]), make([[], []], [0, 1]), make([[1], [1]])], ids=["no rows", "empty", "pads", "ignored"]
)
def test_nothing_counts(rows: Rows, hidden: bool) -> None:
    values, layers = table(rows, hidden), head(hidden)
    targets = torch.full_like(rows.ids, -100)
    logprobs, entropies = token_logprobs(values[rows.packed][None], targets, rows.forest, entropy=True, **layers)
    assert logprobs.shape == entropies.shape == rows.ids.shape
    assert not logprobs.any()
    assert not entropies.any()
    for gradient in torch.autograd.grad(logprobs.sum() + entropies.sum(), [values, *layers.values()]):
        assert not gradient.any()


def test_infinite_logits() -> None:
    """A class that cannot be chosen adds nothing to the entropy, and its gradient is 0; an ignored position is not read."""
    logits = torch.tensor([[[-torch.inf, 1.0, 0.0, -torch.inf], [-torch.inf, -torch.inf, -torch.inf, 2.0]]], dtype=torch.float64)
    logits.requires_grad_()
    for size in (1, 2, None):
        logprobs, entropies = token_logprobs(logits, torch.tensor([[1, 3]]), entropy=True, chunk_vocabulary=size)
        small = torch.tensor([1.0, 0.0], dtype=torch.float64)
        assert relative_error(logprobs, torch.stack([small.log_softmax(0)[0], torch.tensor(0.0)])[None]) < 1e-12
        wanted = -(small.softmax(0) * small.log_softmax(0)).sum()
        assert relative_error(entropies, torch.stack([wanted, torch.tensor(0.0)])[None]) < 1e-12
        (gradient,) = torch.autograd.grad(logprobs.sum() + entropies.sum(), logits)
        assert gradient.isfinite().all()
        assert not gradient[logits == -torch.inf].any()
        assert not token_logprobs(logits, torch.tensor([[-100, -100]])).any()
    assert token_logprobs(logits, torch.tensor([[0, 3]])).tolist() == [[-torch.inf, 0.0]]


def test_large_logits_lose_no_digits() -> None:
    """lse - z would be rounded at the size of the logits."""
    logits = torch.tensor([[[3e4, 3e4 - 2.0, 0.0]]])
    wanted = torch.tensor([0.0, -2.0], dtype=torch.float64).log_softmax(0)
    assert relative_error(token_logprobs(logits, torch.tensor([[1]]))[0], wanted[1:]) < 1e-7


def test_gradients_that_nobody_wants_are_not_made() -> None:
    rows = make(STAR)
    values, weight = table(rows, True), head(True)["weight"].detach()
    found = token_logprobs(values[rows.packed][None], next_tokens(rows.ids, rows.keep), rows.forest, weight=weight)
    with Recorder() as seen:
        found.sum().backward()
    assert {columns for _, columns in seen.products} == {CLASSES, WIDTH}
    assert len(seen.products) == 2, "scores again, and the gradient of the values"


def test_int32_targets_and_another_ignored_label() -> None:
    rows = make(STAR)
    values, targets = table(rows, False)[rows.packed][None], next_tokens(rows.ids, rows.keep)
    wanted = token_logprobs(values, targets, rows.forest)
    assert torch.equal(token_logprobs(values, targets.to(torch.int32), rows.forest), wanted)
    assert torch.equal(token_logprobs(values, targets.masked_fill(targets == -100, -7), rows.forest, ignore_index=-7), wanted)


def test_dense_logits_are_not_copied() -> None:
    logits = torch.randn(4, 50, 300)
    with Recorder() as seen:
        token_logprobs(logits, torch.zeros(4, 49, dtype=torch.int64), chunk_tokens=8)
    assert seen.largest < 4 * 49 * 30


def test_autocast_is_that_of_a_linear_layer() -> None:
    rows = make(STAR)
    values, layers = table(rows, True, torch.float32), head(True, dtype=torch.float32)
    targets = next_tokens(rows.ids, rows.keep)
    with torch.autocast("cpu", torch.bfloat16):
        found = token_logprobs(values[rows.packed][None], targets, rows.forest, **layers)
    rounded = {name: x.bfloat16() for name, x in layers.items()}
    wanted = token_logprobs(values.bfloat16()[rows.packed][None], targets, rows.forest, **rounded)
    assert torch.equal(found, wanted)
    for one, other in zip(*(torch.autograd.grad(x.sum(), [values, *layers.values()]) for x in (found, wanted)), strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


def test_forward_without_gradients_then_training() -> None:
    rows = make(STAR)
    values, targets = table(rows, False), next_tokens(rows.ids, rows.keep)
    with torch.inference_mode():
        before = token_logprobs(values[rows.packed][None], targets, rows.forest)
    after = token_logprobs(values[rows.packed][None], targets, rows.forest)
    assert torch.equal(before, after)
    after.sum().backward()
    assert values.grad is not None


def test_is_public() -> None:
    assert sp_compile.token_logprobs is token_logprobs


def test_next_tokens() -> None:
    ids = torch.tensor([[9, 1, 2, 3, 9], [1, 9, 2, 3, 4], [9, 9, 9, 9, 9]])
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    assert next_tokens(ids, mask).tolist() == [[-100, 2, 3, -100, -100], [2, -100, 3, 4, -100], [-100] * 5]
    trained = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]])
    assert next_tokens(ids, mask, trained=trained).tolist() == [[-100, 2, 3, -100, -100], [-100, -100, 3, 4, -100], [-100] * 5]
    assert next_tokens(ids[:1], ignore_index=-1).tolist() == [[1, 2, 3, 9, -1]]
    assert next_tokens(ids[:, :0]).shape == (3, 0)


ROWS = make(STAR)
GOOD: dict[str, Any] = {
    "values": torch.zeros(1, ROWS.forest.num_tokens, WIDTH),
    "targets": torch.zeros_like(ROWS.ids),
    "forest": ROWS.forest,
    "weight": torch.zeros(CLASSES, WIDTH),
}
DENSE: dict[str, Any] = {"values": torch.zeros(*ROWS.ids.shape, WIDTH), "forest": None}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"values": "text"}, "float tensor"),
    ({"values": torch.zeros(1, 3, WIDTH, dtype=torch.int64)}, "float tensor"),
    ({"values": torch.zeros(3, WIDTH)}, r"\[1, T, H\]"),
    ({"values": DENSE["values"]}, "leave the forest out"),
    ({"forest": "text"}, "Forest or None"),
    ({"targets": None}, "targets"),
    ({"targets": torch.zeros(ROWS.ids.shape)}, "int64 or int32"),
    ({"targets": ROWS.ids[:-1]}, "targets"),
    ({"targets": ROWS.ids[:, 2:]}, "targets"),
    ({"targets": torch.full_like(ROWS.ids, CLASSES)}, "row 0, column 0"),
    ({"targets": torch.full_like(ROWS.ids, -1)}, "mark what does not count"),
    (DENSE | {"targets": torch.full_like(ROWS.ids, CLASSES)}, "row 0, column 0"),
    (DENSE | {"targets": ROWS.ids[1:]}, "targets"),
    ({"weight": torch.zeros(CLASSES, WIDTH + 1)}, "weight"),
    ({"weight": torch.zeros(CLASSES)}, "weight"),
    ({"weight": torch.zeros(CLASSES, WIDTH, dtype=torch.float64)}, "weight of torch.float32"),
    ({"weight": torch.zeros(CLASSES, WIDTH, device="meta")}, "weight of torch.float32 on cpu"),
    ({"bias": torch.zeros(CLASSES - 1)}, "bias"),
    ({"weight": None, "bias": torch.zeros(WIDTH)}, "bias"),
    ({"temperature": 0.0}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"softcap": -1.0}, "softcap"),
    ({"scale": float("inf")}, "scale"),
    ({"ignore_index": 0.5}, "ignore_index"),
    ({"entropy": 1}, "entropy"),
    ({"chunk_tokens": 0}, "chunk_tokens"),
    ({"chunk_vocabulary": 2.0}, "chunk_vocabulary"),
]


@pytest.mark.parametrize(("changed", "said"), BAD)
def test_wrong_inputs_are_refused(changed: dict[str, Any], said: str) -> None:
    token_logprobs(**GOOD)
    with pytest.raises(InvalidInput, match=said):
        token_logprobs(**(GOOD | changed))


def test_stale_forest_is_refused() -> None:
    with pytest.raises(StaleForest, match="tokens"):
        token_logprobs(**(GOOD | {"values": torch.zeros(1, 3, WIDTH)}))


@pytest.mark.parametrize(
    "given",
    [{"ids": torch.zeros(3)}, {"ids": torch.zeros(3, dtype=torch.int64)}, {"mask": torch.ones(2, 5)}, {"trained": torch.ones(1, 5)}],
)
def test_wrong_ids_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="next_tokens"):
        next_tokens(**({"ids": torch.zeros(2, 5, dtype=torch.int64)} | given))
