"""Every implementation of every op gives equal bits on every run, when deterministic algorithms are required."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_compile.errors import NoImplementation
from sp_compile.layout import Forest
from sp_compile.lowering import registry, select
from sp_compile.lowering.registry import Implementation
from sp_compile.ops import paths
from sp_compile.ops.attention import attention_inputs
from tests.determinism import delta_cases, scan_cases
from tests.determinism.replay import differing, same_bits

assert select.SelectKernels, "importing the pass fills the tables"

Arguments = dict[str, Any]
EVERY = [(op, item) for op in registry.semantic_ops() for item in registry.implementations(op)]
NAMES = [f"{registry.option_name(op)}-{item.name}" for op, item in EVERY]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Required algorithms, and two threads, since one thread has only one order."""
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def tree() -> Forest:
    """Two ragged stars and a lone row: chains on both sides of every block size in use, and shared tokens with many rows."""
    stars = [[*range(150), *range(1000 * b, 1000 * b + 19 * b)] for b in range(1, 8)]
    stars += [[500, *range(40), *range(2000 * b, 2000 * b + 9)] for b in range(1, 6)]
    return Forest.from_rows([*stars, [700, 701]])


def attention_cases(forest: Forest) -> list[Arguments]:
    end, column = forest.tensor("end", "cpu"), forest.tensor("column", "cpu")
    names = ("q", "k", "v", "end", "column", "key_valid", "segments", "bias", "sinks")
    plain: Arguments = {"scale": 0.25, "window": None, "chunk": None, "softcap": None}
    valid = (torch.arange(forest.num_tokens) % 11 != 5)[None]
    return [
        dict(zip(names, attention_inputs(end, column), strict=True)) | plain,
        dict(zip(names, attention_inputs(end, column, sinks=True, dtype=torch.bfloat16), strict=True)) | plain,
        dict(zip(names, attention_inputs(end, column, sinks=True), strict=True))
        | plain
        | {"window": 40, "softcap": 3.0, "key_valid": valid},
    ]


def unpack_cases(forest: Forest) -> list[Arguments]:
    values = torch.randn(forest.num_tokens, 24, generator=torch.Generator().manual_seed(0))
    index = forest.tensor("index", "cpu")
    return [{"values": values.to(dtype).requires_grad_(), "index": index} for dtype in (torch.float32, torch.bfloat16)]


def take_tokens_cases(forest: Forest) -> list[Arguments]:
    index = forest.tensor("index", "cpu")
    target = torch.randint(24, index.shape, generator=torch.Generator().manual_seed(1))
    return [case | {"target": target} for case in unpack_cases(forest)]


def cross_entropy_rows_cases(forest: Forest) -> list[Arguments]:
    options: Arguments = {"weight": None, "ignore_index": -100, "label_smoothing": 0.1, "dtype": None}
    return [
        {"logits": case["values"], "index": case["index"], "target": case["target"].masked_fill(case["target"] == 3, -100)} | options
        for case in take_tokens_cases(forest)
    ]


CASES: dict[str, Callable[[Forest], list[Arguments]]] = {
    "attention": attention_cases,
    "unpack": unpack_cases,
    "take_tokens": take_tokens_cases,
    "cross_entropy_rows": cross_entropy_rows_cases,
    **delta_cases.CASES,
    **scan_cases.CASES,
}


@pytest.mark.parametrize(("op", "item"), EVERY, ids=NAMES)
def test_replay(op: torch._ops.OpOverload, item: Implementation) -> None:
    assert registry.option_name(op) in CASES, "a new op needs inputs here"
    forest = tree()
    cases = CASES[registry.option_name(op)](forest)
    if not item.deterministic:
        with pytest.raises(NoImplementation, match="not deterministic"):
            registry.select(op, cases[0], names=[item.name])
        return
    supported = [case for case in cases if item.supports(case) is None]
    if not supported:
        pytest.skip(f"needs another device: {item.supports(cases[0])}")
    for case in supported:
        tensors = {name: forest.tensor(name, "cpu") for name in item.forest_names(case)}
        args, kwargs = registry.call(item, op, case, tensors)
        leaves = [value for value in case.values() if isinstance(value, Tensor) and value.requires_grad]

        def call(args: tuple[Any, ...] = args, kwargs: Arguments = kwargs) -> list[Tensor]:
            out = item.op(*args, **kwargs)
            return list(out) if isinstance(out, tuple | list) else [out]

        assert differing(call, leaves) == []


def test_path_segments() -> None:
    forest = tree()
    positions = torch.randint(0, 3, (1, forest.num_tokens), generator=torch.Generator().manual_seed(0))
    assert differing(lambda: [paths.path_segments(positions, forest.tensor("prev", "cpu"))], []) == []


@pytest.mark.parametrize("op", registry.semantic_ops(), ids=registry.option_name)
def test_required_determinism_excludes_what_is_not_reproducible(op: torch._ops.OpOverload) -> None:
    for case in CASES[registry.option_name(op)](tree()):
        try:
            chosen = registry.select(op, case)
        except NoImplementation:
            continue
        assert chosen.implementation.deterministic


def test_replay_notices_a_sum_in_changing_order() -> None:
    values = torch.randn(5000, requires_grad=True)

    def call() -> list[Tensor]:
        return [torch.zeros(1).index_add(0, torch.zeros(5000, dtype=torch.int64), values[torch.randperm(5000)])]

    assert differing(call, [values]) == ["output 0"]


def test_replay_notices_a_gradient_that_changes() -> None:
    values = torch.randn(100, requires_grad=True)

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad + 1e-7 * torch.rand_like(grad)

    assert differing(lambda: [Noisy.apply(values)], [values]) == ["gradient 0"]


def test_same_bits_tells_signs_of_zero_and_knows_nan() -> None:
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
