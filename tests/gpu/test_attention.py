"""Attention of torch's flash kernels on forests: errors against float64, bits under contention, no waiting, and through the compiler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import sp_compile
from sp_compile.kernels.attention import composed
from sp_compile.kernels.attention.composed import Tokens
from sp_compile.layout import Forest
from sp_compile.lowering.attention import TABLE
from sp_compile.lowering.registry import bind, call, select
from sp_compile.ops.attention import TOLERANCE, attention_inputs
from sp_compile.ops.numerics import relative_error
from tests.determinism.replay import same_bits
from tests.ops.forests import ROWS, forest, random_forest

SEMANTIC = torch.ops.sp_compile.attention.default
FLASH = next(item for item in TABLE if item.name == "chains_cuda")
PLAIN: dict[str, Any] = {"scale": 0.3, "window": None, "chunk": None, "softcap": None}
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)
    torch.cuda.set_sync_debug_mode("default")


def make(tree: Forest, **changed: Any) -> list[Tensor | None]:
    return attention_inputs(tree.tensor("end", "cuda"), tree.tensor("column", "cuda"), **changed)


def run(item: Any, tree: Forest, inputs: list[Tensor | None], options: dict[str, Any]) -> list[Tensor]:
    args, kwargs = call(item, SEMANTIC, bind(SEMANTIC, inputs, options), {name: tree.tensor(name, "cuda") for name in item.forest_tensors})
    result = item.op(*args, **kwargs)
    out = result if item.output is None else result[item.output]
    grad = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=torch.float64).sin_().mul_(7919).sin_().view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x for x in inputs if x is not None and x.requires_grad], grad)]


def check(tree: Forest, inputs: list[Tensor | None], options: dict[str, Any], tolerance: float) -> None:
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x is not None and x.is_floating_point() else x for x in inputs]
    got, want = run(FLASH, tree, inputs, options), run(TABLE[-1], tree, wide, options)
    found = [relative_error(one, other) for one, other in zip(got, want, strict=True)]
    assert all(x.isfinite().all() for x in got)
    assert max(found[:4]) < tolerance, found
    assert max(found[4:], default=0.0) < 4 * tolerance, found


@HALVES
@pytest.mark.parametrize("name", [*ROWS, *range(8)])
def test_equals_float64(name: str | int, dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(True)  # unwritten memory is NaN
    tree = random_forest(name, rows=30, length=400) if isinstance(name, int) else forest(name)
    check(tree, make(tree, dtype=dtype, dims=(64, 64), sinks=isinstance(name, int)), PLAIN | {"scale": 0.125}, TOLERANCE[dtype])


@pytest.mark.parametrize("dims", [(128, 128), (96, 96), (256, 256), (192, 128), (64, 128), (20, 12)])
@pytest.mark.parametrize("heads", [(8, 2), (3, 3), (7, 1)])
def test_equals_float64_for_head_layouts(dims: tuple[int, int], heads: tuple[int, int]) -> None:
    tree = random_forest(3, rows=30, length=300)
    for tokens_first in (False, True):
        inputs = make(tree, dtype=torch.bfloat16, dims=dims, heads=heads)
        if tokens_first:
            inputs[:3] = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs[:3] if x is not None]
        check(tree, inputs, PLAIN | {"scale": dims[0] ** -0.5}, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("option", [{"window": 40}, {"window": 10_000}, {"chunk": 64}])
def test_windows(option: dict[str, Any]) -> None:
    tree = random_forest(5, rows=20, length=200)
    check(tree, make(tree, dtype=torch.bfloat16, dims=(64, 64)), PLAIN | option, TOLERANCE[torch.bfloat16])


def long_tree() -> Forest:
    stars = [[*range(700), *range(10_000 * b, 10_000 * b + 300 + 40 * b)] for b in range(1, 9)]
    return Forest.from_rows([*stars, *([5, *range(900_000, 900_400), b, *range(600)] for b in range(4))])


def replays(dtype: torch.dtype, times: int) -> list[list[Tensor]]:
    """Results of repeated runs while other work of changing size occupies the GPU from another stream."""
    tree = long_tree()
    inputs = make(tree, dtype=dtype, dims=(128, 128), heads=(16, 4), sinks=True)
    other, work = torch.cuda.Stream(), torch.randn(3000, 3000, device="cuda", dtype=dtype)
    found = []
    for turn in range(times):
        with torch.cuda.stream(other):
            for _ in range(10 + 7 * turn):
                torch.mm(work[: 500 + 300 * turn], work)
        found.append(run(FLASH, tree, inputs, PLAIN))
    torch.cuda.synchronize()
    return found


@HALVES
def test_replays_bit_for_bit_under_contention(dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(True)
    first, *others = replays(dtype, 6)
    assert all(same_bits(one, two) for other in others for one, two in zip(first, other, strict=True))


def test_without_deterministic_algorithms_bits_differ() -> None:
    first, *others = replays(torch.bfloat16, 12)
    assert not all(same_bits(one, two) for other in others for one, two in zip(first, other, strict=True))


def test_waits_for_no_device() -> None:
    tree = long_tree()
    inputs = make(tree, dtype=torch.bfloat16, dims=(64, 64), sinks=True)
    run(FLASH, tree, inputs, PLAIN | {"window": 100_000})
    torch.cuda.set_sync_debug_mode("error")
    run(FLASH, tree, inputs, PLAIN | {"window": 100_000})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [None, [5, 0, 77, 12], [8]])
@pytest.mark.parametrize("dim", [64, 72, 256])
def test_rows_equal_plain_torch(dtype: torch.dtype, rows: list[int] | None, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    where = Tokens(9, 4, None) if rows is None else Tokens(-1, len(rows), torch.tensor(rows, dtype=torch.int32, device="cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    out, part = (torch.randn(n, 6, dim, device="cuda", generator=generator).to(dtype) for n in (90, where.count))
    lse, part_lse = (9 * torch.randn(6, n, device="cuda", generator=generator) for n in (90, where.count))
    results = []
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(composed, "_triton", lambda x: None)
        found = out.clone(), lse.clone(), out.clone()
        merged_lse = composed.merge_rows(found[0], found[1], part, part_lse, where)
        composed.add_rows(found[2], part, where)
        assert torch.equal(found[1], lse)
        results.append((found[0], merged_lse, found[2]))
    for one, two in zip(*results, strict=True):
        assert relative_error(one, two) < (1e-6 if one.dtype == torch.float32 else 1e-3)
    assert torch.equal(results[0][2], results[1][2])
    assert not torch.equal(results[0][0], out)


def test_is_chosen_and_says_why_not() -> None:
    tree = forest("ragged_star")
    inputs = make(tree, dtype=torch.bfloat16, dims=(64, 64))
    names = ["chains_cuda", "triton", "blocked"]
    assert select(SEMANTIC, bind(SEMANTIC, inputs, PLAIN), names=names, deterministic=True).implementation is FLASH
    chosen = select(SEMANTIC, bind(SEMANTIC, inputs, PLAIN | {"softcap": 1.0}), names=names)
    assert chosen.implementation.name == "blocked"
    assert ("chains_cuda", "has no softcap") in chosen.rejected


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_through_the_compiler(inner: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=256, initializer_range=0.1, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).cuda()
    half = transformers.LlamaForCausalLM(config).cuda()
    half.load_state_dict(model.state_dict())
    half.to(torch.bfloat16)
    compiled = torch.compile(half, backend="shared_prefix", dynamic=True, options={"inner": inner, "kernels": ("chains_cuda",)})

    def step(called: Any, owner: torch.nn.Module, ids: Tensor, mask: Tensor) -> list[Tensor]:
        owner.zero_grad(set_to_none=True)
        logits = called(input_ids=ids, attention_mask=mask).logits * mask[..., None]
        (logits.float() * torch.linspace(-1, 1, 97, device="cuda")).sum().backward()
        return [logits.detach(), *(p.grad for p in owner.parameters() if p.grad is not None)]

    torch._dynamo.reset()
    for rows, length, padded in ((6, 90, 0), (4, 130, 0), (4, 120, 30)):
        ids = torch.randint(0, 97, (rows, length), device="cuda")
        ids[:, :60] = ids[0, :60]
        mask = torch.ones_like(ids)
        mask[::2, length - padded :] = 0
        exact, dense = step(model, model, ids, mask), step(half, half, ids, mask)
        shared = step(compiled, half, ids, mask)
        account = sp_compile.last_run()
        assert account.kernels["attention"].startswith("chains_cuda"), account.kernels
        assert account.physical_tokens < account.logical_tokens
        for one, two, want in zip(shared, dense, exact, strict=True):
            assert relative_error(one, want) < 1.25 * relative_error(two, want) + 2e-3
