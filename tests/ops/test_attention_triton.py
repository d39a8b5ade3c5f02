"""Attention's Triton kernels in Triton's interpreter: against the op in float64, dense rows, and the op's contract with torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sp_compile.ops.attention import TOLERANCE
from tests.ops import interpreted
from tests.ops.interpreted import Case

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., Any]]:
    pool = interpreted.start()
    yield lambda function, *values: pool.submit(function, *values).result(timeout=300)
    pool.shutdown()


def check(run: Callable[..., Any], case: Case) -> None:
    found = run(interpreted.errors, case)
    tolerance = TOLERANCE[case.dtype]
    assert max(found[:4]) < tolerance, (case, found)
    assert max(found[4:], default=0.0) < 4 * tolerance, (case, found)


NAMES = ["one_branch", "no_sharing", "several_roots", "strict_prefixes", "tokens_of_one", "deep", "one_row_63"]


@pytest.mark.parametrize("name", NAMES)
def test_equals_float64(run: Callable[..., Any], name: str) -> None:
    check(run, Case(name, sinks=name == "deep"))


def test_equals_float64_for_one_token(run: Callable[..., Any]) -> None:
    out, lse, d_q, d_k, d_v = run(interpreted.run, Case(1))
    case = Case(1)
    q, k, v = (x.detach() for x in case.inputs(case.forest())[:3])
    assert torch.equal(out, v.repeat_interleave(2, 1))
    assert torch.allclose(lse, (q * k).sum(-1) * case.scale, rtol=1e-6)
    assert max(float(d_q.abs().max()), float(d_k.abs().max())) < 1e-6
    assert torch.allclose(d_v, interpreted.gradient(out).sum(1, keepdim=True))


@pytest.mark.parametrize("tile", [(128, 64, 128), (64, 128, 128)])
def test_equals_float64_for_thousand_tokens(run: Callable[..., Any], tile: tuple[int, int, int]) -> None:
    check(run, Case("star_1000", tile, heads=(1, 1)))


@pytest.mark.parametrize("tile", [(16, 32, 32), (32, 16, 32), (16, 16, 64)])
def test_equals_float64_for_tiles(run: Callable[..., Any], tile: tuple[int, int, int]) -> None:
    check(run, Case((5, 8, 40), tile))


@pytest.mark.parametrize(
    "option", [{"window": 1}, {"window": 20}, {"chunk": 16}, {"window": 30, "chunk": 24, "softcap": 0.7}, {"softcap": 0.7}]
)
def test_equals_float64_with_options(run: Callable[..., Any], option: dict[str, Any]) -> None:
    check(run, Case((2, 6, 40), sinks=True, **option))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equals_float64_for_half_types(run: Callable[..., Any], dtype: torch.dtype) -> None:
    check(run, Case((3, 6, 40), dtype=dtype, sinks=True, softcap=2.0, window=30))


@pytest.mark.parametrize("dims", [(96, 96), (48, 32), (24, 40), (192, 128), (20, 12), (256, 8)])
def test_equals_float64_for_head_dims(run: Callable[..., Any], dims: tuple[int, int]) -> None:
    check(run, Case((1, 4, 20), dims=dims, scale=dims[0] ** -0.5))


@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (4, 1)])
def test_equals_float64_for_head_layouts(run: Callable[..., Any], heads: tuple[int, int]) -> None:
    for token_major in (False, True):
        check(run, Case((4, 3, 20), heads=heads, token_major=token_major))


def test_equals_float64_through_descriptors(run: Callable[..., Any]) -> None:
    case = Case((6, 4, 20), window=9, dims=(48, 32))
    check(run, dataclasses.replace(case, descriptors=True))
    assert all(run(interpreted.agree, case, dataclasses.replace(case, descriptors=True)))


@pytest.mark.parametrize("sinks", [False, True])
def test_padding_is_hidden_and_rows_without_keys_give_zeros(run: Callable[..., Any], sinks: bool) -> None:
    case = Case("several_roots", padded=True, sinks=sinks)
    check(run, case)
    out, lse, d_q, *_ = run(interpreted.run, case)
    assert (out[:, :, 0] == 0).all()
    assert (d_q[:, :, 0] == 0).all()
    assert (lse[:, :, 0] == -torch.inf).all() != sinks


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6), rows=st.integers(1, 8), length=st.integers(1, 30), window=st.one_of(st.none(), st.integers(1, 40)),
    softcap=st.one_of(st.none(), st.just(1.5)), sinks=st.booleans(),
)  # fmt: skip
def test_equals_float64_random_forest(
    run: Callable[..., Any], seed: int, rows: int, length: int, window: int | None, softcap: float | None, sinks: bool
) -> None:
    check(run, Case((seed, rows, length), window=window, softcap=softcap, sinks=sinks))


@pytest.mark.parametrize(
    "case", [Case("one_branch", heads=(4, 2)), Case((7, 5, 30), sinks=True, window=12, softcap=0.9), Case("one_branch", padded=True)]
)
def test_equals_dense_rows(run: Callable[..., Any], case: Case) -> None:
    case = dataclasses.replace(case, tile=(32, 32, 32))
    assert max(run(interpreted.errors_of_rows, case)) < 2 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("case", [Case("one_branch", sinks=True, window=5), Case("one_branch", dtype=torch.bfloat16, dims=(32, 16))])
def test_opcheck(run: Callable[..., Any], case: Case) -> None:
    run(interpreted.checked, case)


def test_replays(run: Callable[..., Any]) -> None:
    assert run(interpreted.replayed, Case((8, 4, 25), sinks=True)) == []


def test_without_tokens(run: Callable[..., Any]) -> None:
    from sp_compile.kernels.attention.forest_triton import ops
    from sp_compile.layout import Forest
    from sp_compile.layout.attention_tiles import tile_names
    from sp_compile.ops.attention import attention_inputs

    empty = torch.zeros(0, dtype=torch.int64)
    inputs = attention_inputs(empty, empty, sinks=True)
    tensors = Forest.from_rows([[]]).tensors((*tile_names(None, None), "padding_hides"), "cpu")
    out, lse = ops.attention_triton(*inputs, *tensors, scale=0.3, window=None, chunk=None, softcap=None)
    grads = torch.autograd.grad(out.sum(), [inputs[0], inputs[1], inputs[2], inputs[8]])
    assert (out.shape, lse.shape) == ((1, 4, 0, 16), (1, 4, 0))
    assert (grads[3] == 0).all()


def test_wrong_inputs_are_refused(run: Callable[..., Any]) -> None:
    case = Case("one_branch")
    segments = torch.zeros(1, 14, dtype=torch.int64)
    assert "expected no segments" in run(interpreted.refusal, case, 6, segments)
    assert "expected no bias" in run(interpreted.refusal, case, 7, torch.zeros(1, 1, 14, 14))
    shape = torch.tensor([[15, 16, 1, 0, 0, 1, 0, 1]])
    assert "tiles describe 15 tokens, q has 14" in run(interpreted.refusal, case, 9, shape)
    assert "positive scale" in run(interpreted.refusal, dataclasses.replace(case, scale=0.0), 5, None)
