"""The chunked ops with a matrix state on a GPU: equal to the same on the CPU in float64, and to themselves, run after run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_compile.layout import Forest
from sp_compile.lowering import delta_rules, registry
from sp_compile.ops.gated_delta_rule import gated_delta_rule_inputs
from sp_compile.ops.kda import kda_inputs
from sp_compile.ops.linear_attention import linear_attention_inputs
from sp_compile.ops.numerics import relative_error
from sp_compile.ops.recurrent import TOLERANCE
from tests.determinism.replay import differing

OPS = torch.ops.sp_compile
DELTA: dict[str, Any] = {"scale": 0.25, "qk_l2norm": True, "chunk": 32}
CASES: dict[str, tuple[torch._ops.OpOverload, Callable[..., Any], dict[str, Any]]] = {
    "gated_delta_rule": (OPS.gated_delta_rule.default, gated_delta_rule_inputs, DELTA),
    "kda": (OPS.kda.default, kda_inputs, DELTA),
    "linear_attention": (OPS.linear_attention.default, linear_attention_inputs, {"scale": 0.25, "chunk": 32}),
}


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # cuBLAS is reproducible with a workspace of its own per stream only.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def tree() -> Forest:
    rows = [[*range(130), *range(1000 * b, 1000 * b + 17 * b)] for b in range(1, 9)]
    return Forest.from_rows([*rows, *([500, a, b, 501 + a + b] for a in range(3) for b in range(3))])


def moved(values: Any, device: str, dtype: torch.dtype) -> list[Any]:
    made: list[Any] = []
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            states = value.dim() == 4 and value.shape[0] == 2 and dtype != torch.float64
            made.append(value.detach().to(device, torch.float32 if states else dtype).requires_grad_())
        else:
            made.append(value.to(device) if isinstance(value, Tensor) else value)
    return made


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", ["chunked", "chunked_replay"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_cpu_and_repeats(name: str, implementation: str, dtype: torch.dtype) -> None:
    op, make, options = CASES[name]
    item = next(item for item in delta_rules.TABLES[op] if item.name == implementation)
    forest = tree()
    final = torch.from_numpy(forest.node_start + forest.node_len - 1)
    prev = forest.tensor("prev", "cpu")
    given = moved(make(prev, forest.tensor("end", "cpu"), final=final, states=2, dims=(32, 16)), "cuda", dtype)
    exact = moved(given, "cpu", torch.float64)
    results = []
    for values, device in ((given, "cuda"), (exact, "cpu")):
        bound = registry.bind(op, values, options)
        tensors = {key: forest.tensor(key, device) for key in item.forest_names(bound)}
        args, kwargs = registry.call(item, op, bound, tensors)
        leaves = [value for value in values if isinstance(value, Tensor) and value.requires_grad]

        def call(args: Any = args, kwargs: Any = kwargs) -> list[Tensor]:
            return list(item.op(*args, **kwargs))

        if device == "cuda":
            assert differing(call, leaves) == []
        out = call()
        weights = [torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape).to(x.device, x.dtype) for x in out]
        results.append([*out, *torch.autograd.grad(out, leaves, weights)])
    for got, want in zip(*results, strict=True):
        assert relative_error(got.cpu(), want) < TOLERANCE[dtype]
