"""Divergence from a reference per token, against dense rows in float64, and its estimators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sp_compile.errors import InvalidInput, StaleForest
from sp_compile.ops.numerics import relative_error
from sp_compile.training import VocabularyHead, kl_estimate, token_kl
from tests.training.rows import STAR, Recorder, Rows, dense_logits, expanded, make, normal, random_rows, same_results

WIDTH, OTHER_WIDTH, CLASSES = 4, 3, 11
OPTIONS: list[dict[str, Any]] = [{}, {"scale": 0.7, "softcap": 1.5, "temperature": 0.6}, {"temperature": 2.5}]


def dense_kl(one: Tensor, other: Tensor, counted: Tensor) -> Tensor:
    p, q = (torch.log_softmax(x, -1) for x in (one, other))
    return torch.where(counted, torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1), 0)


@settings(max_examples=40, deadline=None)
@given(
    rows=random_rows(),
    hidden=st.tuples(st.booleans(), st.booleans()),
    options=st.tuples(st.sampled_from(OPTIONS), st.sampled_from(OPTIONS)),
    packed=st.booleans(),
    masked=st.sampled_from([None, 0, 1]),
    chunks=st.tuples(st.sampled_from([None, 1, 3]), st.sampled_from([None, 1, 4, 50])),
)
def test_equals_dense(rows: Rows, hidden: Any, options: Any, packed: bool, masked: int | None, chunks: Any) -> None:
    columns = rows.ids.shape[1] - (masked or 0)
    mask = None if masked is None else torch.rand(len(rows.ids), columns, generator=torch.Generator().manual_seed(5)) < 0.7
    values = [normal(rows.prefixes, w if h else CLASSES, seed=w) for h, w in zip(hidden, (WIDTH, OTHER_WIDTH), strict=True)]
    layers: list[dict[str, Tensor]] = [
        {"weight": normal(CLASSES, w, seed=7 + w), "bias": normal(CLASSES, seed=9 + w)} if h else {}
        for h, w in zip(hidden, (WIDTH, OTHER_WIDTH), strict=True)
    ]
    heads = [VocabularyHead(**layer, **option) for layer, option in zip(layers, options, strict=True)]
    given = [x[rows.packed][None] if packed else expanded(x, rows) for x in values]
    forest = rows.forest if packed else None
    sizes = {"chunk_tokens": chunks[0], "chunk_vocabulary": chunks[1]}
    found = token_kl(*given, forest, head=heads[0], reference_head=heads[1], mask=mask, **sizes)
    dense = [
        dense_logits(expanded(x, rows)[:, :columns], **layer, **option) for x, layer, option in zip(values, layers, options, strict=True)
    ]
    counted = torch.ones(len(rows.ids), columns, dtype=torch.bool) if mask is None else mask
    counted = counted & rows.keep[:, :columns] if packed else counted
    leaves = [*values, *(x for layer in layers for x in layer.values())]
    same_results([found], [dense_kl(*dense, counted)], leaves)


def test_one_head_for_both_sides() -> None:
    rows = make(STAR)
    one, other, weight = normal(rows.prefixes, WIDTH, seed=0), normal(rows.prefixes, WIDTH, seed=1), normal(CLASSES, WIDTH, seed=2)
    found = token_kl(one[rows.packed][None], other[rows.packed][None], rows.forest, head=VocabularyHead(weight, softcap=2.0))
    dense = [dense_logits(expanded(x, rows), weight, softcap=2.0) for x in (one, other)]
    same_results([found], [dense_kl(*dense, rows.keep)], [one, other, weight])


def test_of_equal_distributions_is_zero() -> None:
    rows = make(STAR)
    values = normal(rows.prefixes, CLASSES, seed=0, dtype=torch.float32)[rows.packed][None]
    assert not token_kl(values, values + 3.0, rows.forest, chunk_vocabulary=4).abs().max() > 1e-6
    assert not token_kl(values, values, rows.forest, chunk_vocabulary=4).any()


def test_nearly_equal_distributions_keep_digits() -> None:
    """In float32, a divergence of about 1e-6 from logits of about 10."""
    one = torch.randn(1, 50, 400, generator=torch.Generator().manual_seed(0)) * 3
    other = one + 0.002 * torch.randn(1, 50, 400, generator=torch.Generator().manual_seed(1))
    wanted = dense_kl(one.double(), other.double(), torch.ones(1, 50, dtype=torch.bool))
    assert float(wanted.max()) < 1e-5
    assert float((token_kl(one, other, chunk_vocabulary=100) - wanted).abs().max()) < 2e-7


def test_impossible_classes() -> None:
    p = torch.tensor([[[0.0, 1.0, -torch.inf, -torch.inf]]], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([[[1.0, 0.0, 2.0, -torch.inf]]], dtype=torch.float64, requires_grad=True)
    wanted = (p[..., :2].softmax(-1) * (p[..., :2].log_softmax(-1) - q[..., :3].log_softmax(-1)[..., :2])).sum(-1)
    for size in (1, 2, None):
        found = token_kl(p, q, chunk_vocabulary=size)
        assert relative_error(found, wanted) < 1e-12
        assert all(g.isfinite().all() for g in torch.autograd.grad(found.sum(), [p, q]))
        assert float(token_kl(q, p, chunk_vocabulary=size)) == torch.inf


def test_nothing_of_the_size_of_logits_is_made_and_tokens_out_of_the_mask_are_not_computed() -> None:
    rows = make([[*range(40), b, b] for b in range(8)])
    values, weight = normal(rows.prefixes, WIDTH, seed=0), normal(500, WIDTH, seed=1)
    mask = torch.zeros_like(rows.ids)
    mask[:, 40:42] = 1
    with Recorder() as seen:
        kl = token_kl(values[rows.packed][None], values[rows.packed][None].detach(), rows.forest, head=VocabularyHead(weight), mask=mask)
        kl.sum().backward()
    assert {n for n, columns in seen.products if columns == 500} == {16}
    with Recorder() as seen:
        sizes = {"chunk_tokens": 4, "chunk_vocabulary": 64}
        kl = token_kl(values[rows.packed][None], values.detach()[rows.packed][None], rows.forest, head=VocabularyHead(weight), **sizes)
        kl.sum().backward()
    assert seen.largest <= 500 * WIDTH


@pytest.mark.parametrize("rows", [make([]), make([[]])], ids=["no rows", "empty"])
def test_nothing_counts(rows: Rows) -> None:
    values, weight = normal(0, WIDTH, seed=0), normal(CLASSES, WIDTH, seed=1)
    found = token_kl(values[None], values[None].detach(), rows.forest, head=VocabularyHead(weight))
    assert found.shape == rows.ids.shape
    assert not any(g.any() for g in torch.autograd.grad(found.sum(), [values, weight]))


ROWS = make(STAR)
GOOD: dict[str, Any] = {
    "values": torch.zeros(1, ROWS.forest.num_tokens, WIDTH),
    "reference": torch.zeros(1, ROWS.forest.num_tokens, WIDTH),
    "forest": ROWS.forest,
    "head": VocabularyHead(torch.zeros(CLASSES, WIDTH)),
}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"reference": None}, "reference"),
    ({"reference": torch.zeros(2, 3, WIDTH)}, "reference"),
    ({"reference": torch.zeros(1, ROWS.forest.num_tokens, WIDTH, dtype=torch.float64)}, "weight"),
    (
        {"reference": torch.zeros(1, ROWS.forest.num_tokens, CLASSES, dtype=torch.float64), "reference_head": VocabularyHead()},
        "both sides or none",
    ),
    ({"reference_head": VocabularyHead()}, "one vocabulary"),
    ({"head": 3}, "VocabularyHead"),
    ({"head": VocabularyHead(torch.zeros(CLASSES, WIDTH), temperature=-1.0)}, "temperature"),
    ({"mask": torch.ones(ROWS.ids.shape)}, "bools or integers"),
    ({"mask": torch.ones(3, 3, dtype=torch.bool)}, "mask"),
    ({"chunk_tokens": -1}, "chunk_tokens"),
    ({"forest": None, "reference": torch.zeros(1, 2, WIDTH)}, "reference"),
]


@pytest.mark.parametrize(("changed", "said"), BAD)
def test_wrong_inputs_are_refused(changed: dict[str, Any], said: str) -> None:
    token_kl(**GOOD)
    with pytest.raises(InvalidInput, match=said):
        token_kl(**(GOOD | changed))


def test_stale_forest_is_refused() -> None:
    with pytest.raises(StaleForest, match="tokens"):
        token_kl(**(GOOD | {"reference": torch.zeros(1, 3, WIDTH)}))


def test_estimators_by_their_formulas() -> None:
    one, other = normal(5, 4, seed=0), normal(5, 4, seed=1)
    with torch.no_grad():
        one[0, 0] = other[0, 0] = -3.0
    formulas: dict[str, Callable[[Tensor], Tensor]] = {
        "k1": lambda r: -torch.log(r),
        "k2": lambda r: torch.log(r) ** 2 / 2,
        "k3": lambda r: r - 1 - torch.log(r),
    }
    for kind, formula in formulas.items():
        wanted = formula(torch.exp(other) / torch.exp(one))
        same_results([kl_estimate(one, other, kind)], [wanted], [one, other])  # type: ignore[arg-type]


def test_estimators_have_the_divergence_as_mean() -> None:
    """Over every class, weighed by its probability: k1 and k3 are unbiased, and the gradient of k2 is that of the divergence."""
    logits, other = normal(9, seed=0), normal(9, seed=1).detach().log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    weights = logprobs.exp().detach()
    true = (logprobs.exp() * (logprobs - other)).sum()
    for kind in ("k1", "k3"):
        assert relative_error((weights * kl_estimate(logprobs, other, kind)).sum(), true) < 1e-12  # type: ignore[arg-type]
    (wanted,) = torch.autograd.grad(true, logits, retain_graph=True)
    (found,) = torch.autograd.grad((weights * kl_estimate(logprobs, other, "k2")).sum(), logits)
    assert relative_error(found, wanted) < 1e-12


@pytest.mark.parametrize(
    "given",
    [{"kind": "k4"}, {"logprobs": torch.zeros(3, dtype=torch.int64)}, {"reference_logprobs": torch.zeros(4)}, {"logprobs": [0.0] * 3}],
)
def test_wrong_estimator_inputs_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="kl_estimate"):
        kl_estimate(**({"logprobs": torch.zeros(3), "reference_logprobs": torch.zeros(3)} | given))
