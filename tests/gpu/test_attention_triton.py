"""Attention's Triton kernels on the GPU: errors against float64, bits under contention, large offsets, no waiting, one variant per call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_compile.kernels.attention import blocked
from sp_compile.layout import Forest
from sp_compile.lowering.attention_triton import TRITON, unusable
from sp_compile.lowering.registry import bind, call
from sp_compile.ops.attention import TOLERANCE, Mask, attention_inputs
from sp_compile.ops.numerics import relative_error
from tests.determinism.replay import same_bits
from tests.ops.forests import ROWS, forest, random_forest

SEMANTIC = torch.ops.sp_compile.attention.default
BLOCKED = torch.ops.sp_compile.attention_blocked.default
PLAIN: dict[str, Any] = {"scale": 0.125, "window": None, "chunk": None, "softcap": None}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bfloat16", "float16", "float32"])


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    if (reason := unusable()) is not None:
        pytest.skip(reason)
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)
    torch.cuda.set_sync_debug_mode("default")


def make(tree: Forest, **changed: Any) -> list[Tensor | None]:
    changed = {"dtype": torch.bfloat16, "dims": (64, 64), "heads": (4, 2)} | changed
    return attention_inputs(tree.tensor("end", "cuda"), tree.tensor("column", "cuda"), **changed)


def gradient(out: Tensor) -> Tensor:
    return torch.linspace(-1, 1, out.numel(), device="cuda", dtype=torch.float64).sin_().mul_(7919).sin_().view(out.shape).to(out.dtype)


def run(op: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor | None]) -> list[Tensor]:
    out = op(*args, **kwargs)[0]
    return [out.detach(), *torch.autograd.grad(out, [x for x in inputs if x is not None and x.requires_grad], gradient(out))]


def ours(tree: Forest, inputs: list[Tensor | None], options: dict[str, Any]) -> list[Tensor]:
    bound = bind(SEMANTIC, inputs, options)
    given = {name: tree.tensor(name, "cuda") for name in TRITON.forest_names(bound)}
    if inputs[5] is not None:
        given["padding_hides"] = torch.ones(1, dtype=torch.int64)
    args, kwargs = call(TRITON, SEMANTIC, bound, given)
    return run(TRITON.op, args, kwargs, inputs)


def check(tree: Forest, inputs: list[Tensor | None], options: dict[str, Any] = PLAIN) -> None:
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x is not None and x.is_floating_point() else x for x in inputs]
    got, want = ours(tree, inputs, options), run(BLOCKED, wide, options, wide)
    found = [relative_error(one, other) for one, other in zip(got, want, strict=True)]
    assert all(x.isfinite().all() for x in got)
    assert all(x.transpose(1, 2).is_contiguous() for x in got if x.dim() == 4)
    tolerance = TOLERANCE[inputs[0].dtype]  # type: ignore[union-attr]
    assert max(found[:4]) < tolerance, found
    assert max(found[4:], default=0.0) < 4 * tolerance, found


@DTYPES
@pytest.mark.parametrize("which", [*ROWS, *range(4)])
def test_equals_float64(which: str | int, dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(True)  # unwritten memory is NaN
    tree = random_forest(which, rows=30, length=400) if isinstance(which, int) else forest(which)
    if tree.num_tokens == 1:
        inputs = make(tree, dtype=dtype)
        assert torch.equal(ours(tree, inputs, PLAIN)[0], inputs[2].repeat_interleave(2, 1))  # type: ignore[union-attr]
        return
    check(tree, make(tree, sinks=isinstance(which, int), dtype=dtype))


@pytest.mark.parametrize("tokens", [63, 127, 128, 129, 1000])
def test_equals_float64_for_one_row(tokens: int) -> None:
    tree = Forest.from_rows([[*range(tokens)]])
    check(tree, make(tree))


@DTYPES
@pytest.mark.parametrize("dims", [(128, 128), (96, 96), (192, 128), (256, 256), (80, 80), (20, 12)])
def test_equals_float64_for_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    tree = random_forest(3, rows=30, length=100)
    check(tree, make(tree, dims=dims, dtype=dtype), PLAIN | {"scale": dims[0] ** -0.5})


@pytest.mark.parametrize("heads", [(8, 1), (3, 3), (6, 2)])
def test_equals_float64_for_head_layouts(heads: tuple[int, int]) -> None:
    tree = random_forest(4, rows=30, length=200)
    check(tree, make(tree, heads=heads))
    inputs = make(tree, heads=heads)
    inputs[:3] = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs[:3] if x is not None]
    check(tree, inputs)


@pytest.mark.parametrize("option", [{"window": 1}, {"window": 40}, {"window": 300, "softcap": 20.0}, {"chunk": 64}, {"softcap": 0.7}])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_float64_with_options(option: dict[str, Any], padded: bool) -> None:
    tree = random_forest(5, rows=20, length=400)
    inputs = make(tree, sinks=True, dims=(128, 128))
    if padded:
        inputs[5] = (torch.arange(tree.num_tokens, device="cuda") % 7 != 3)[None]
    check(tree, inputs, PLAIN | option)


def long_tree() -> Forest:
    stars = [[*range(700), *range(10_000 * b, 10_000 * b + 300 + 40 * b)] for b in range(1, 9)]
    return Forest.from_rows([*stars, *([5, *range(900_000, 900_400), b, *range(600)] for b in range(4))])


@pytest.mark.parametrize("strict", [False, True])
def test_replays_bit_for_bit_under_contention(strict: bool) -> None:
    torch.use_deterministic_algorithms(strict)
    tree = long_tree()
    inputs = make(tree, heads=(16, 4), sinks=True, dims=(128, 128))
    other, work = torch.cuda.Stream(), torch.randn(3000, 3000, device="cuda", dtype=torch.bfloat16)
    found = []
    for turn in range(8):
        with torch.cuda.stream(other):
            for _ in range(10 + 7 * turn):
                torch.mm(work[: 500 + 300 * turn], work)
        found.append(ours(tree, inputs, PLAIN))
    torch.cuda.synchronize()
    first, *others = found
    assert all(same_bits(one, two) for other in others for one, two in zip(first, other, strict=True))


def test_waits_for_no_device() -> None:
    tree = long_tree()
    inputs = make(tree, sinks=True)
    options = PLAIN | {"window": 500}
    ours(tree, inputs, options)
    torch.cuda.set_sync_debug_mode("error")
    ours(tree, inputs, options)


def test_kernels_do_not_change_with_the_forest() -> None:
    from sp_compile.kernels.attention.forest_triton import backward, forward

    kernels = (forward.forward, backward.prepare, backward.key_gradients, backward.query_gradients)
    counts = []
    for seed in range(10):
        tree = random_forest(seed, rows=3 + 9 * seed, length=40 + 130 * seed)
        ours(tree, make(tree, heads=(10, 5)), PLAIN)
        counts.append([len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels])
    assert counts[-1] == counts[0], counts


def test_offsets_beyond_32_bits() -> None:
    """Values of more than 2^31 elements; the last tokens, with their own root, are compared with a run of them alone."""
    heads, dim, own = 64, 256, 700
    tokens = 2**31 // (heads * dim) + 4000
    if torch.cuda.mem_get_info()[0] < 14 * tokens * heads * dim * 2:
        pytest.skip("needs more free GPU memory")
    lengths = [512] * ((tokens - own) // 512)
    lengths += [tokens - own - sum(lengths), own]
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    tree = Forest(starts, lengths, [-1] * len(lengths), list(range(len(lengths))))
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, tokens, heads, dim, generator=generator, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
    )
    given = {name: tree.tensor(name, "cuda") for name in TRITON.forest_names(PLAIN)}
    bound = bind(SEMANTIC, [q, k, v, tree.tensor("end", "cuda"), tree.tensor("column", "cuda"), None, None, None, None], PLAIN)
    args, kwargs = call(TRITON, SEMANTIC, bound, given)
    out, lse = TRITON.op(*args, **kwargs)
    got = [out, *torch.ops.sp_compile.attention_triton_backward(grad, *args, out, lse, **kwargs, bias_grad=False)[:3]]
    tail = [x[:, :4, -own:].double() for x in (q, k, v, grad)]
    alone = Forest.from_rows([[*range(own)]])
    mask = Mask(alone.tensor("end", "cuda"), alone.tensor("column", "cuda"), *[None] * 6)
    want, want_lse = blocked.forward(*tail[:3], mask, None, PLAIN["scale"])
    wanted = [want, *blocked.backward(tail[3], *tail[:3], mask, None, want, want_lse, PLAIN["scale"], False)[:3]]
    found = [relative_error(x[:, :4, -own:], y) for x, y in zip(got, wanted, strict=True)]
    assert max(found) < TOLERANCE[torch.bfloat16], found
