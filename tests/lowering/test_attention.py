"""Every implementation of attention against the reference: values, gradients, masks, bits, memory, and the faults that must show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sp_compile.errors import InvalidInput
from sp_compile.kernels.attention import blocked, chains_cpu
from sp_compile.layout import Forest
from sp_compile.layout.chains import CAUSAL, CROSS
from sp_compile.lowering.attention import TABLE
from sp_compile.lowering.registry import Implementation, call
from sp_compile.ops.attention import TOLERANCE, Mask, attention_inputs
from sp_compile.ops.numerics import relative_error
from tests.ops.forests import ROWS, forest, random_forest, tensors

SEMANTIC = torch.ops.sp_compile.attention.default
PLAIN: dict[str, Any] = {"scale": 0.3, "window": None, "chunk": None, "softcap": None}
IMPLEMENTATIONS = [item for item in TABLE if item.name in ("chains", "blocked")]  # those that run here and are no oracle
each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda item: item.name)

Inputs = list[Tensor | None]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Deterministic mode fills `torch.empty` with NaN, so that reading it shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def run(
    implementation: Implementation, tree: Forest, inputs: Inputs, options: dict[str, Any], passes: Tensor | None = None
) -> list[Tensor]:
    """Output and the gradients of every float leaf, for a fixed random gradient of the output."""
    names = [argument.name for argument in SEMANTIC._schema.arguments]
    bound = dict(zip(names, inputs, strict=False)) | options
    available = {"attention_passes": tree.tensor("attention_passes", "cpu") if passes is None else passes}
    args, kwargs = call(implementation, SEMANTIC, bound, available)
    result = implementation.op(*args, **kwargs)
    out = result if implementation.output is None else result[implementation.output]
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def errors(
    implementation: Implementation, tree: Forest, inputs: Inputs, options: dict[str, Any], passes: Tensor | None = None
) -> list[float]:
    """Relative errors of output and gradients against the reference in float64."""
    wide: Inputs = [x.detach().double().requires_grad_(x.requires_grad) if x is not None and x.is_floating_point() else x for x in inputs]
    got = run(implementation, tree, inputs, options, passes)
    assert got[0].is_contiguous()
    assert all(x.isfinite().all() for x in got)
    return [relative_error(one, other) for one, other in zip(got, run(TABLE[-1], tree, wide, options), strict=True)]


def make(tree: Forest, **changed: Any) -> Inputs:
    end, column, _ = tensors(tree)
    return attention_inputs(end, column, **changed)


@each
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ROWS)
def test_equals_reference(implementation: Implementation, name: str, dtype: torch.dtype) -> None:
    tree = forest(name)
    assert max(errors(implementation, tree, make(tree, dtype=dtype, dims=(8, 8)), PLAIN)) < TOLERANCE[dtype]


@pytest.mark.parametrize("branches", [3, 90])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_short_chains_are_batched_in_place_or_padded(branches: int, tokens_first: bool) -> None:
    # Equal short chains are one view where they are many; few, or unequal ones, are gathered from either order in memory.
    tree = Forest.from_rows([[0, 1, 2, 1000 + b, 5, 6, 7] for b in range(branches)] + [[0, 1, 2, 5, 9, 9], [0, 1, 2, 6, 9, 9, 9]])
    plan = chains_cpu.make_plan(tree.tensor("attention_passes", "cpu"), tree.num_tokens)
    assert any(isinstance(chains, chains_cpu.Ragged) for chains in plan.causal)
    assert any(isinstance(chains, chains_cpu.Span) and chains.batch == branches - 1 for chains in plan.causal) == (branches == 90)
    inputs = make(tree, dtype=torch.float64, sinks=True)
    if tokens_first:
        inputs[:3] = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs[:3] if x is not None]
    assert max(errors(TABLE[0], tree, inputs, PLAIN)) < TOLERANCE[torch.float64]


@each
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("dims", [(16, 16), (12, 8), (8, 12)])
def test_equals_reference_for_head_layouts(implementation: Implementation, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    for seed in range(4):
        tree = random_forest(seed)
        inputs = make(tree, heads=heads, dims=dims, dtype=torch.float64, sinks=seed % 2 == 0, seed=seed)
        assert max(errors(implementation, tree, inputs, PLAIN)) < TOLERANCE[torch.float64]


@each
@pytest.mark.parametrize(
    "option", [{"window": 5}, {"window": 1}, {"chunk": 8}, {"softcap": 0.7}, {"window": 40, "chunk": 64, "softcap": 2.0}]
)
def test_equals_reference_with_options(implementation: Implementation, option: dict[str, Any]) -> None:
    for name in ("ragged_star", "deep", "several_roots"):
        tree = forest(name)
        inputs = make(tree, dims=(8, 6), dtype=torch.float64, sinks=True)
        assert max(errors(implementation, tree, inputs, PLAIN | option)) < TOLERANCE[torch.float64]


@each
def test_equals_reference_where_options_hide_nothing(implementation: Implementation) -> None:
    tree = forest("deep")
    inputs = make(tree, dtype=torch.float64)
    inputs[5] = torch.ones(1, tree.num_tokens, dtype=torch.bool)
    inputs[6] = torch.full((1, tree.num_tokens), 4)
    options = PLAIN | {"window": tree.num_columns, "chunk": tree.num_columns}
    assert not chains_cpu.needs_blocked(Mask(*inputs[3:8], options["window"], options["chunk"], None))
    assert chains_cpu.needs_blocked(Mask(*inputs[3:8], options["window"] - 1, None, None))
    assert chains_cpu.needs_blocked(Mask(*inputs[3:8], None, options["chunk"] - 1, None))
    assert max(errors(implementation, tree, inputs, options)) < TOLERANCE[torch.float64]


@each
@pytest.mark.parametrize("sinks", [False, True])
def test_equals_reference_with_padding_and_segments(implementation: Implementation, sinks: bool) -> None:
    for seed in range(4):
        tree = random_forest(seed)
        inputs = make(tree, dtype=torch.float64, sinks=sinks)
        # The first key is padding, so roots have queries that see nothing.
        inputs[5] = torch.rand(1, tree.num_tokens, generator=torch.Generator().manual_seed(seed)) < 0.6
        inputs[5][0, 0] = False
        inputs[6] = torch.from_numpy(tree.column // 7)[None]
        assert max(errors(implementation, tree, inputs, PLAIN)) < TOLERANCE[torch.float64]


@each
@pytest.mark.parametrize("shape", [(1, 4, -1, -1), (1, 1, 1, -1), (4, 1, -1), (-1, -1), (1, 4, -1, 1)])
def test_equals_reference_with_bias(implementation: Implementation, shape: tuple[int, ...]) -> None:
    tree = forest("ragged_star")
    sizes = [tree.num_tokens if size < 0 else size for size in shape]
    # With sinks even a bias that is constant over keys has a gradient.
    inputs = make(tree, dtype=torch.float64, sinks=True)
    inputs[7] = torch.randn(sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    assert max(errors(implementation, tree, inputs, PLAIN)) < TOLERANCE[torch.float64]
    inputs[7] = inputs[7].detach() > 0
    assert max(errors(implementation, tree, inputs, PLAIN)) < TOLERANCE[torch.float64]


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_inputs_give_the_same_bits(implementation: Implementation, dtype: torch.dtype) -> None:
    tree = forest("ragged_star")
    inputs = make(tree, dtype=dtype)
    strided: Inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs[:3] if x is not None]
    other = run(implementation, tree, strided + inputs[3:], PLAIN)
    for one, two in zip(run(implementation, tree, inputs, PLAIN), other, strict=True):
        assert torch.equal(one, two)


@each
@pytest.mark.parametrize("options", [PLAIN, PLAIN | {"softcap": 2.0}], ids=["plain", "softcap"])
def test_replays_bit_for_bit(implementation: Implementation, options: dict[str, Any]) -> None:
    tree = forest("ragged_star")
    inputs = make(tree, sinks=True)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        first = run(implementation, tree, inputs, options)
        for _ in range(3):
            assert all(torch.equal(one, two) for one, two in zip(first, run(implementation, tree, inputs, options), strict=True))
    finally:
        torch.set_num_threads(threads)


@each
@pytest.mark.parametrize("options", [PLAIN, PLAIN | {"window": 20}], ids=["plain", "window"])
def test_editing_one_row_moves_no_bit_of_its_siblings(implementation: Implementation, options: dict[str, Any]) -> None:
    tree = forest("ragged_star")
    inputs = make(tree)
    edited_node = 4
    start = int(tree.node_start[edited_node])
    edited = torch.zeros(tree.num_tokens, dtype=torch.bool)
    edited[start : start + int(tree.node_len[edited_node])] = True
    prompt = torch.arange(tree.num_tokens) < int(tree.node_len[0])
    changed: Inputs = [x.detach().clone() if x is not None else None for x in inputs]
    for x in changed[:3]:
        assert x is not None
        x[:, :, edited] = 7 * torch.randn(x[:, :, edited].shape, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
    before, after = run(implementation, tree, inputs, options), run(implementation, tree, changed, options)
    for one, two in zip(before[:2], after[:2], strict=True):
        assert torch.equal(one[:, :, ~edited], two[:, :, ~edited])
        assert not torch.equal(one[:, :, edited], two[:, :, edited])
    for one, two in zip(before[2:], after[2:], strict=True):
        assert torch.equal(one[:, :, ~edited & ~prompt], two[:, :, ~edited & ~prompt])


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements that any op returned."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.untyped_storage().nbytes() // value.element_size())
        return result


@pytest.mark.parametrize("options", [{"window": None}, {"window": 64}])
def test_memory_is_linear_in_tokens(options: dict[str, Any]) -> None:
    def largest(tokens: int) -> int:
        tree = Forest.from_rows([list(range(tokens)), [*range(tokens // 2), *range(10**6, 10**6 + tokens // 2)]])
        inputs = make(tree, heads=(1, 1), dims=(8, 8))
        q, k, v = (x.detach() for x in inputs[:3] if x is not None)
        passes = tree.tensor("attention_passes", "cpu")
        mask = Mask(*inputs[3:8], options["window"], None, None)
        with LargestTensor() as seen:
            out, lse = blocked.forward(q, k, v, mask, None, 0.3)
            blocked.backward(out, q, k, v, mask, None, out, lse, 0.3, False)
            if options["window"] is None:
                chains_cpu.backward(out, q, k, v, None, passes, *chains_cpu.forward(q, k, v, None, passes, 0.3), 0.3)
        return seen.largest

    assert largest(4000) < 2.2 * largest(2000)


def test_dropping_the_ancestors_is_detected() -> None:
    tree = forest("ragged_star")
    passes = tree.tensor("attention_passes", "cpu")
    inputs = make(tree, dtype=torch.float64)
    without = passes[passes[:, 0] == CAUSAL]
    assert min(errors(IMPLEMENTATIONS[0], tree, inputs, PLAIN, without)) > 0.1
    short = passes.clone()
    short[short[:, 0] == CROSS, 4] -= 1
    assert min(errors(IMPLEMENTATIONS[0], tree, inputs, PLAIN, short)) > 1e-3


def test_seeing_siblings_is_detected() -> None:
    tree = forest("ragged_star")
    inputs = make(tree, dtype=torch.float64)
    loose = list(inputs)
    loose[3] = torch.full_like(loose[3], tree.num_tokens)  # type: ignore[arg-type]
    right, wrong = run(IMPLEMENTATIONS[1], tree, inputs, PLAIN), run(IMPLEMENTATIONS[1], tree, loose, PLAIN)
    assert min(relative_error(one, two) for one, two in zip(wrong, right, strict=True)) > 0.1


def test_backward_with_each_pass_its_own_out_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = forest("ragged_star")
    inputs = make(tree, dtype=torch.float64)
    right = run(IMPLEMENTATIONS[0], tree, inputs, PLAIN)
    merged_backward: Callable[..., Any] = chains_cpu._flash_backward

    def own_out(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dropout: float, causal: bool, *, scale: float
    ) -> Any:
        own, _ = chains_cpu._flash(q, k, v, 0.0, causal, scale=scale)
        return merged_backward(grad, q, k, v, own, lse, dropout, causal, scale=scale)

    monkeypatch.setattr(chains_cpu, "_flash_backward", own_out)
    wrong = run(IMPLEMENTATIONS[0], tree, inputs, PLAIN)
    assert relative_error(wrong[1], right[1]) > 0.1
    assert relative_error(wrong[2], right[2]) > 0.1


def test_passes_of_another_batch_are_refused() -> None:
    tree = forest("ragged_star")
    with pytest.raises(InvalidInput, match="passes describe"):
        run(IMPLEMENTATIONS[0], tree, make(tree), PLAIN, forest("deep").tensor("attention_passes", "cpu"))


@each
@pytest.mark.parametrize("tokens", [0, 1])
def test_without_tokens_or_with_one(implementation: Implementation, tokens: int) -> None:
    tree = Forest.from_rows([[5] * tokens])
    for options in (PLAIN, PLAIN | {"softcap": 1.0}, PLAIN | {"window": 1}):
        assert max(errors(implementation, tree, make(tree, dtype=torch.float64, sinks=True), options)) < TOLERANCE[torch.float64]
