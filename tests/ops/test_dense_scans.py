"""The ops that stand for a library's recurrence: they compute what the library's function computes, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sp_compile.errors import StageError
from sp_compile.ops.dense_scans import KINDS, register_library

OPTIONS: dict[str, dict[str, Any]] = {
    "causal_conv1d": {"activation": "silu"},
    "ssd_scan": {"dt_softplus": True, "dt_min": 0.0, "dt_max": 2.0, "chunk": 4},
    "selective_scan": {"delta_softplus": True, "chunk": 4},
    "gated_delta_rule": {"scale": 0.5, "qk_l2norm": True, "chunk": 4},
    "kda": {"scale": 0.5, "qk_l2norm": True, "chunk": 4},
    "linear_attention": {"scale": 0.5, "chunk": 4},
    "linear_scan": {},
}
_SIZES = {"B": 2, "L": 5}


def _tensors(kind: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    patterns = [pattern.lstrip("?").split("|")[0].split(" ") for pattern in KINDS[kind].tensors.values()]
    return [torch.randn([_SIZES.get(letter, 4) for letter in p], generator=generator, dtype=torch.float64) for p in patterns]


def _mixing(kind: str) -> Any:
    """A function of every tensor and of every column up to its own; it need not be the real recurrence."""

    def function(given: dict[str, Any], final: bool) -> Tensor:
        names = list(KINDS[kind].tensors)
        result = given[KINDS[kind].result]
        total = sum((given[name] * given[name].cos()).sum() * (number + 1) for number, name in enumerate(names))
        if final:
            state = KINDS[kind].state
            assert state is not None
            return total * torch.ones(state(given), dtype=result.dtype)
        return result.cumsum(-1 if kind == "causal_conv1d" else 1) * total

    return function


@pytest.fixture(autouse=True)
def libraries() -> None:
    for kind in KINDS:
        register_library(f"tests.{kind}", _mixing(kind))


CALLS = [(kind, final) for kind in KINDS for final in (False, True) if not final or KINDS[kind].state is not None]


@pytest.mark.parametrize(("kind", "final"), CALLS)
def test_equals_the_function_and_its_gradients(kind: str, final: bool) -> None:
    op = KINDS[kind].dense_state if final else KINDS[kind].dense
    tensors = [t.requires_grad_() for t in _tensors(kind)]
    given = dict(zip(KINDS[kind].tensors, tensors, strict=True)) | OPTIONS[kind]
    want = _mixing(kind)(given, final)
    got = op(*tensors, **OPTIONS[kind], dtype=torch.float64, library=f"tests.{kind}")
    assert torch.equal(got, want)
    weight = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad(want, tensors, weight, allow_unused=True, materialize_grads=True)
    found = torch.autograd.grad(got, tensors, weight)
    assert all(bool(w.abs().sum() > 0) for w in wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind: str) -> None:
    tensors = [t.requires_grad_() for t in _tensors(kind)]
    torch.library.opcheck(KINDS[kind].dense, tuple(tensors), {**OPTIONS[kind], "dtype": torch.float64, "library": f"tests.{kind}"})


def test_rounds_to_the_wanted_dtype_and_takes_absent_tensors() -> None:
    def conv(given: dict[str, Any], final: bool) -> Tensor:
        return F.conv1d(given["x"], given["weight"].unsqueeze(1), given["bias"], padding=3, groups=4)[..., :5]

    register_library("tests.conv", conv)
    x, weight = torch.randn(2, 4, 5), torch.randn(4, 4)
    got = torch.ops.sp_compile.dense_causal_conv1d(x, weight, None, activation=None, dtype=torch.bfloat16, library="tests.conv")
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, conv({"x": x, "weight": weight, "bias": None}, False).bfloat16())


def test_the_result_shares_no_memory_with_an_argument() -> None:
    register_library("tests.same", lambda given, final: given["x"])
    x = torch.randn(2, 4, 5)
    got = torch.ops.sp_compile.dense_causal_conv1d(x, torch.randn(4, 4), None, activation=None, dtype=x.dtype, library="tests.same")
    got.zero_()
    assert bool(x.abs().sum() > 0)


def test_an_unknown_library_is_named() -> None:
    with pytest.raises(StageError, match=r"no library function 'nowhere'"):
        torch.ops.sp_compile.dense_causal_conv1d(
            torch.ones(1, 1, 1), torch.ones(1, 1), None, activation=None, dtype=torch.float32, library="nowhere"
        )
