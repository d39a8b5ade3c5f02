"""Chains and passes: every visible pair once, whatever the forest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_compile.layout import Forest
from sp_compile.layout.chains import CAUSAL, CROSS, FIELDS, attention_passes, chain_of_node

ROWS = st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=10)


def covered(passes: np.ndarray, tokens: int) -> np.ndarray:
    """[T, T] how many passes compute each (query, key) pair."""
    count = np.zeros((tokens, tokens), dtype=np.int64)
    for kind, q_start, q_len, k_start, k_len, batch in passes.tolist():
        for part in range(batch):
            queries = slice(q_start + part * q_len, q_start + (part + 1) * q_len)
            keys = slice(k_start + part * k_len, k_start + (part + 1) * k_len)
            count[queries, keys] += np.tril(np.ones((q_len, k_len), dtype=np.int64)) if kind == CAUSAL else 1
    return count


def visible(forest: Forest) -> np.ndarray:
    """[T, T] ancestor-or-self, found by walking `prev`."""
    seen = np.zeros((forest.num_tokens, forest.num_tokens), dtype=np.int64)
    for token in range(forest.num_tokens):
        at = token
        while at >= 0:
            seen[token, at] = 1
            at = int(forest.prev[at])
    return seen


@settings(max_examples=150, deadline=None)
@given(ROWS)
def test_passes_cover_every_visible_pair_once(rows: list[list[int]]) -> None:
    forest = Forest.from_rows(rows)
    assert (covered(attention_passes(forest), forest.num_tokens) == visible(forest)).all()


@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_passes_are_one_per_chain_and_one_per_branching_node(rows: list[list[int]]) -> None:
    forest = Forest.from_rows(rows)
    passes = attention_passes(forest)
    causal, cross = passes[passes[:, 0] == CAUSAL], passes[passes[:, 0] == CROSS]
    children = np.bincount(forest.parent[forest.parent >= 0], minlength=forest.num_nodes)
    assert causal[:, -1].sum() == len(np.unique(chain_of_node(forest.parent)))
    assert len(cross) == (children > 1).sum()
    # Causal passes write every token once, in order.
    assert (np.cumsum(causal[:, 2] * causal[:, 5]) - causal[:, 2] * causal[:, 5] == causal[:, 1]).all()
    assert (causal[:, 2] * causal[:, 5]).sum() == forest.num_tokens


def test_a_star_is_three_passes() -> None:
    forest = Forest.from_rows([[*range(10), 100 + b, 200 + b] for b in range(5)])
    passes = attention_passes(forest)
    assert [dict(zip(FIELDS, row, strict=True)) for row in passes.tolist()] == [
        {"kind": CAUSAL, "q_start": 0, "q_len": 12, "k_start": 0, "k_len": 12, "batch": 1},
        {"kind": CAUSAL, "q_start": 12, "q_len": 2, "k_start": 12, "k_len": 2, "batch": 4},
        {"kind": CROSS, "q_start": 12, "q_len": 8, "k_start": 0, "k_len": 10, "batch": 1},
    ]


@pytest.mark.parametrize("rows", [[], [[]], [[], []]])
def test_a_forest_without_tokens_has_no_passes(rows: list[list[int]]) -> None:
    assert attention_passes(Forest.from_rows(rows)).shape == (0, len(FIELDS))


def test_passes_are_a_registered_tensor_on_the_cpu() -> None:
    forest = Forest.from_rows([[1, 2, 3], [1, 2, 4]])
    tensor = forest.tensor("attention_passes", "cpu")
    assert tensor.device.type == "cpu"
    assert (tensor.numpy() == attention_passes(forest)).all()


def test_coverage_check_notices_a_dropped_pass() -> None:
    forest = Forest.from_rows([[1, 2, 3], [1, 2, 4]])
    passes = attention_passes(forest)
    assert (covered(passes[:-1], forest.num_tokens) != visible(forest)).any()
