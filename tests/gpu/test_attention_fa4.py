"""Attention through flash-attn-4 on forests: errors against float64, bits under contention, no waiting, and through the compiler."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import sp_compile
from sp_compile.backend import shared_prefix
from sp_compile.kernels.attention import fa4, fa4_ordered
from sp_compile.layout import Forest
from sp_compile.lowering.attention import TABLE
from sp_compile.lowering.registry import Implementation, bind, call, select
from sp_compile.ops.attention import TOLERANCE, attention_inputs
from sp_compile.ops.numerics import relative_error
from tests.determinism.replay import same_bits
from tests.ops.forests import ROWS, forest, random_forest

SEMANTIC = torch.ops.sp_compile.attention.default
ITEMS = {item.name: item for item in TABLE if item.name.startswith("fa4")}
PLAIN: dict[str, Any] = {"scale": 0.125, "window": None, "chunk": None, "softcap": None}
EVERY = pytest.mark.parametrize("name", ITEMS)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    if (reason := fa4.unusable()) is not None:
        pytest.skip(reason)
    if torch.cuda.get_device_capability() != fa4.CAPABILITY:
        pytest.skip("needs a Hopper GPU")
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)
    torch.cuda.set_sync_debug_mode("default")


def make(tree: Forest, **changed: Any) -> list[Tensor | None]:
    changed = {"dtype": torch.bfloat16, "dims": (64, 64), "heads": (8, 2)} | changed
    return attention_inputs(tree.tensor("end", "cuda"), tree.tensor("column", "cuda"), **changed)


def run(item: Implementation, tree: Forest, inputs: list[Tensor | None], options: dict[str, Any]) -> list[Tensor]:
    given = {name: tree.tensor(name, "cuda") for name in item.forest_names({})}
    args, kwargs = call(item, SEMANTIC, bind(SEMANTIC, inputs, options), given)
    result = item.op(*args, **kwargs)
    out = result if item.output is None else result[item.output]
    grad = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=torch.float64).sin_().mul_(7919).sin_().view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x for x in inputs if x is not None and x.requires_grad], grad)]


def check(name: str, tree: Forest, inputs: list[Tensor | None], options: dict[str, Any] = PLAIN) -> None:
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x is not None and x.is_floating_point() else x for x in inputs]
    got, want = run(ITEMS[name], tree, inputs, options), run(TABLE[-1], tree, wide, options)
    found = [relative_error(one, other) for one, other in zip(got, want, strict=True)]
    assert all(x.isfinite().all() for x in got)
    assert all(x.transpose(1, 2).is_contiguous() for x in got if x.dim() == 4)
    tolerance = TOLERANCE[inputs[0].dtype]  # type: ignore[union-attr]
    assert max(found[:4]) < tolerance, found
    assert max(found[4:], default=0.0) < 4 * tolerance, found


@EVERY
@pytest.mark.parametrize("which", [*ROWS, *range(6)])
def test_equals_float64(name: str, which: str | int) -> None:
    # Unwritten memory is NaN. The block-sparse backward may run, since the op is called and not chosen.
    torch.use_deterministic_algorithms(True, warn_only=True)
    tree = random_forest(which, rows=30, length=400) if isinstance(which, int) else forest(which)
    check(name, tree, make(tree, sinks=isinstance(which, int)))


@EVERY
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 1000])
def test_equals_float64_for_one_row(name: str, tokens: int) -> None:
    tree = Forest.from_rows([[*range(tokens)]])
    inputs = make(tree)
    if tokens > 1:  # one token has gradients of zero, which have no relative error
        check(name, tree, inputs)
    else:
        out = run(ITEMS[name], tree, inputs, PLAIN)[0]
        assert torch.equal(out, inputs[2].repeat_interleave(4, 1))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "dims"),
    [("fa4_chains", (192, 128)), ("fa4_chains", (256, 256)), ("fa4_mixed", (128, 128)), ("fa4_blocks", (96, 96)), ("fa4_blocks", (20, 12))]
    + [("fa4_ordered", dims) for dims in ((64, 64), (96, 96), (128, 128), (80, 40), (128, 64))],
)
@pytest.mark.parametrize("heads", [(4, 1), (2, 2)])
def test_equals_float64_for_head_dims(name: str, dims: tuple[int, int], heads: tuple[int, int]) -> None:
    tree = random_forest(3, rows=30, length=300)
    check(name, tree, make(tree, dims=dims, heads=heads), PLAIN | {"scale": dims[0] ** -0.5})


@EVERY
@pytest.mark.parametrize("changed", [{"dtype": torch.float16}, {"heads": (4, 4)}])
def test_equals_float64_for_dtypes_and_heads(name: str, changed: dict[str, Any]) -> None:
    tree = random_forest(4, rows=30, length=300)
    check(name, tree, make(tree, **changed))


@EVERY
def test_equals_float64_for_many_short_rows(name: str) -> None:
    tree = Forest.from_rows([[s, *range(5), 100 + b] for s in range(150) for b in range(3)])
    check(name, tree, make(tree))


@EVERY
def test_equals_float64_for_many_stars(name: str) -> None:
    tree = Forest.from_rows(
        [[1000 * s + x for x in (*range(100 + s), *range(400 + 100 * b, 460 + 100 * b))] for s in range(40) for b in range(4)]
    )
    check(name, tree, make(tree, dims=(128, 128), heads=(4, 2)), PLAIN | {"scale": 0.09})


@EVERY
@pytest.mark.parametrize("option", [{"window": 40}, {"window": 10_000}, {"chunk": 64}])
def test_windows(name: str, option: dict[str, Any]) -> None:
    tree = random_forest(5, rows=20, length=200)
    check(name, tree, make(tree), PLAIN | option)


def long_tree() -> Forest:
    stars = [[*range(700), *range(10_000 * b, 10_000 * b + 300 + 40 * b)] for b in range(1, 9)]
    return Forest.from_rows([*stars, *([5, *range(900_000, 900_400), b, *range(600)] for b in range(4))])


def replays(name: str, times: int) -> list[list[Tensor]]:
    """Results of repeated runs while other work of changing size occupies the GPU from another stream."""
    tree = long_tree()
    inputs = make(tree, heads=(16, 4), sinks=True)
    other, work = torch.cuda.Stream(), torch.randn(3000, 3000, device="cuda", dtype=torch.bfloat16)
    found = []
    for turn in range(times):
        with torch.cuda.stream(other):
            for _ in range(10 + 7 * turn):
                torch.mm(work[: 500 + 300 * turn], work)
        found.append(run(ITEMS[name], tree, inputs, PLAIN))
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("name", ["fa4_auto_ordered", "fa4_ordered", "fa4_mixed", "fa4_chains"])
def test_replays_bit_for_bit_under_contention(name: str) -> None:
    torch.use_deterministic_algorithms(True)
    first, *others = replays(name, 6)
    assert all(same_bits(one, two) for other in others for one, two in zip(first, other, strict=True))


def test_ordered_sums_repeat_whatever_is_required() -> None:
    first, *others = replays("fa4_ordered", 6)
    assert all(same_bits(one, two) for other in others for one, two in zip(first, other, strict=True))


@pytest.mark.parametrize("name", ["fa4_blocks", "fa4_mixed", "fa4_chains"])
def test_without_deterministic_algorithms_bits_of_gradients_differ(name: str) -> None:
    first, *others = replays(name, 12)
    assert all(same_bits(first[0], other[0]) for other in others)
    assert not all(same_bits(one, two) for other in others for one, two in zip(first, other, strict=True))


@EVERY
def test_waits_for_no_device(name: str) -> None:
    tree = long_tree()
    inputs = make(tree, sinks=True)
    run(ITEMS[name], tree, inputs, PLAIN | {"window": 100_000})
    torch.cuda.set_sync_debug_mode("error")
    run(ITEMS[name], tree, inputs, PLAIN | {"window": 100_000})


def test_kernels_do_not_change_with_the_forest() -> None:
    """Compiled kernels are counted: the package keeps them by key."""
    kept = [fa4.functions()[name].compile_cache.cache for name in ("forward", "backward")]
    counts = []
    for seed in range(8):
        tree = random_forest(seed, rows=3 + 9 * seed, length=40 + 130 * seed)
        for item in ITEMS.values():
            run(item, tree, make(tree), PLAIN)
        counts.append([len(kernels) for kernels in kept])
    assert counts[-1] == counts[1], counts


def test_kernels_with_other_masks_stay_the_packages_own() -> None:
    interface, cutlass = importlib.import_module("flash_attn.cute.interface"), importlib.import_module("cutlass")
    fa4_ordered.install()
    ordered, other = fa4_ordered.functions()["mask"], fa4.functions()["mask"]
    for deterministic, mask in ((True, other), (False, ordered), (True, ordered)):
        made = interface.FlashAttentionBackwardSm90(cutlass.BFloat16, 64, deterministic=deterministic, mask_mod=mask)
        assert made.in_turn == (deterministic and mask is ordered)


def test_is_chosen_and_says_why_not() -> None:
    inputs = make(forest("ragged_star"))
    bound = bind(SEMANTIC, inputs, PLAIN)
    assert select(SEMANTIC, bound, deterministic=False).implementation.name == "fa4_blocks"
    chosen = select(SEMANTIC, bound, deterministic=True)
    assert chosen.implementation.name == "fa4_auto_ordered"
    assert ("fa4_blocks", "not deterministic, and deterministic algorithms are required") in chosen.rejected
    assert select(SEMANTIC, bound, names=["fa4_chains", "blocked"]).implementation.name == "fa4_chains"
    wide = bind(SEMANTIC, make(forest("ragged_star"), dims=(192, 128)), PLAIN)
    chosen = select(SEMANTIC, wide, deterministic=False)
    assert chosen.implementation.name == "fa4_chains"
    assert ("fa4_blocks", "head dim 192 is above 128") in chosen.rejected


@pytest.mark.parametrize("strict", [False, True])
def test_through_the_compiler(strict: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.use_deterministic_algorithms(strict)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=256, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
        head_dim=64, max_position_embeddings=256, initializer_range=0.1, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).cuda()
    half = transformers.LlamaForCausalLM(config).cuda()
    half.load_state_dict(model.state_dict())
    half.to(torch.bfloat16)
    compiled = torch.compile(half, backend=shared_prefix, dynamic=True, options={"inner": "aot_eager"})

    def step(called: Any, owner: torch.nn.Module, ids: Tensor) -> list[Tensor]:
        owner.zero_grad(set_to_none=True)
        logits = called(input_ids=ids).logits
        (logits.float() * torch.linspace(-1, 1, 97, device="cuda")).sum().backward()
        return [logits.detach(), *(p.grad for p in owner.parameters() if p.grad is not None)]

    torch._dynamo.reset()
    for rows, length in ((6, 90), (4, 130)):
        ids = torch.randint(0, 97, (rows, length), device="cuda")
        ids[:, :60] = ids[0, :60]
        exact, dense = step(model, model, ids), step(half, half, ids)
        shared = step(compiled, half, ids)
        account = sp_compile.last_run()
        assert account.kernels["attention"].startswith("fa4_auto_ordered" if strict else "fa4_auto "), account.kernels
        assert account.physical_tokens < account.logical_tokens
        for one, two, want in zip(shared, dense, exact, strict=True):
            assert relative_error(one, want) < 1.25 * relative_error(two, want) + 2e-3
