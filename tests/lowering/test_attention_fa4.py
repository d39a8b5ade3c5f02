"""Attention through flash-attn-4, with plain torch in place of the package: lists of blocks, composition, gradients, choice, reasons."""

from __future__ import annotations

import importlib.metadata
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sp_compile.errors import InvalidInput, NoImplementation
from sp_compile.kernels.attention import fa4, fa4_ordered
from sp_compile.layout import Forest
from sp_compile.layout.mask_blocks import BLOCK
from sp_compile.lowering.attention import TABLE
from sp_compile.lowering.registry import bind, call, select
from sp_compile.ops.attention import TOLERANCE, attention_inputs
from sp_compile.ops.numerics import relative_error
from tests.lowering.test_attention_cuda import SEMANTIC, Given, run
from tests.ops.forests import forest, random_forest

PLAIN: dict[str, Any] = {"scale": 0.3, "window": None, "chunk": None, "softcap": None}
ITEMS = {item.name: item for item in TABLE if item.name.startswith("fa4")}
EVERY = pytest.mark.parametrize("name", ITEMS)


class Blocks(NamedTuple):
    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


def walked(given: Blocks) -> Blocks:
    """Lists of what our kernel visits, after a look at the turns it waits for: all that is added before comes from earlier rows."""
    assert given.spt is False
    assert given.dq_write_order is not None
    columns = (given.mask_block_cnt, given.mask_block_idx, given.full_block_cnt, given.full_block_idx, given.dq_write_order)
    assert all(column.dtype == torch.int32 for column in columns)
    rows = torch.stack([column.flatten() for column in columns], 1).tolist()
    taken = [0] * len(rows)
    part: list[list[int]] = [[] for _ in rows]
    full: list[list[int]] = [[] for _ in rows]
    for block, middle, stop, last_turn, turn in rows:
        assert taken[block:stop] == [*[turn] * (stop - block - 1), last_turn]
        taken[block:stop] = [one + 1 for one in taken[block:stop]]
        part[block], full[block] = [block, *range(middle, stop)], [*range(block + 1, middle)]
    made: list[Tensor] = []
    for lists in (part, full):
        counts = [len(one) for one in lists]
        made.append(torch.tensor(counts, dtype=torch.int32).view(1, 1, -1))
        filled = [one + [0] * (max(1, *counts) - len(one)) for one in lists]
        made.append(torch.tensor(filled, dtype=torch.int32).view(1, 1, len(rows), -1))
    return Blocks(made[0], made[1], made[2], made[3], given.block_size, spt=False)


def from_lengths(q_lengths: Tensor, k_lengths: Tensor, causal: bool, shape: tuple[int, int]) -> Tensor:
    seen = torch.zeros(shape, dtype=torch.bool)
    for rows, columns in zip(*(itertools.pairwise(x.tolist()) for x in (q_lengths, k_lengths)), strict=True):
        part = torch.ones(rows[1] - rows[0], columns[1] - columns[0], dtype=torch.bool)
        seen[slice(*rows), slice(*columns)] = part.tril() if causal else part
    return seen


def from_blocks(given: Blocks, allowed: Callable[[Tensor, Tensor], Tensor], tokens: int, of_keys: bool) -> Tensor:
    """bool [T, T]: what a kernel computes that visits the listed blocks, each at most once."""
    assert given.block_size == (BLOCK, BLOCK)
    counted = torch.zeros(tokens, tokens, dtype=torch.int64)
    for full, (counts, items) in enumerate((given[:2], given[2:4])):
        assert counts.dtype == items.dtype == torch.int32
        for row, count in enumerate(counts[0, 0].tolist()):
            for item in items[0, 0, row, :count].tolist():
                one, other = (torch.arange(x * BLOCK, min((x + 1) * BLOCK, tokens)) for x in (row, item))
                query, key = (one, other) if of_keys else (other, one)
                part = torch.ones(len(query), len(key), dtype=torch.bool) if full else allowed(query[:, None], key[None])
                counted[query[:, None], key[None]] += part
    assert counted.max() <= 1
    return counted.bool()


def mask_of(q: Tensor, k: Tensor, given: dict[str, Any], of_keys: bool) -> Tensor:
    if given.get("block_sparse_tensors") is not None:
        lists = given["block_sparse_tensors"]
        assert given["mask_mod"] == ("the mask" if lists.spt is None else "the mask of ordered sums")
        (end,) = given["aux_tensors"]
        assert (end.dtype, len(end) % BLOCK) == (torch.int32, 0)
        return from_blocks(lists, lambda i, j: (j <= i) & (i < end[j]), q.shape[0], of_keys)
    for side in "qk":
        lengths = given[f"cu_seqlens_{side}"]
        assert lengths.dtype == torch.int32
        assert given[f"max_seqlen_{side}"] >= max(256, int(lengths.diff().max()))
    return from_lengths(given["cu_seqlens_q"], given["cu_seqlens_k"], given["causal"], (q.shape[0], k.shape[0]))


def scores(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    made = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    return made.masked_fill(~seen, -math.inf)


def plain_forward(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, return_lse: bool, **given: Any) -> tuple[Any, ...]:
    assert return_lse
    batched = q.dim() == 4
    q, k, v = (x[0] if batched else x for x in (q, k, v))
    assert q.shape[-1] in fa4.HEAD_DIMS
    assert q.shape[-1] == v.shape[-1] or (q.shape[1] == k.shape[1] and (q.shape[-1], v.shape[-1]) == (192, 128))
    x = scores(q.double(), k.double(), mask_of(q, k, given, True), softmax_scale)
    values = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    out, lse = torch.einsum("hij,jhd->ihd", x.softmax(-1), values).to(q.dtype), x.logsumexp(-1)
    lse = lse.to(torch.promote_types(q.dtype, torch.float32))
    return (out[None], lse[None], None, None) if batched else (out, lse, None, None)


def plain_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *, softmax_scale: float, deterministic: bool = False,
    **given: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As the package's: probabilities from the lse and the inner product from the out that it is given."""
    lists = given.get("block_sparse_tensors")
    if lists is None:
        assert deterministic == torch.are_deterministic_algorithms_enabled()
    elif deterministic:
        given["block_sparse_tensors"] = walked(lists)
    else:
        assert lists.spt is None
    inputs = [x[0] if x.dim() == 4 else x for x in (q, k, v, out, dout)]
    q_, k_, v_, o, do = (x.double() for x in inputs)
    lse = lse[0] if lse.dim() == 3 else lse
    groups = q_.shape[1] // k_.shape[1]
    x = scores(q_, k_, mask_of(q_, k_, given, False), softmax_scale)
    p = (x - lse[..., None].double()).exp()
    dp = torch.einsum("ihd,jhd->hij", do, v_.repeat_interleave(groups, 1))
    ds = p * (dp - (do * o).sum(-1).t()[..., None]) * softmax_scale
    d_q = torch.einsum("hij,jhd->ihd", ds, k_.repeat_interleave(groups, 1))
    d_k, d_v = (torch.einsum("hij,ihd->jhd", w, y).unflatten(1, (-1, groups)).sum(2) for w, y in ((ds, q_), (p, do)))
    return tuple(x.to(like.dtype).view_as(like) for x, like in ((d_q, q), (d_k, k), (d_v, v)))


class PlainKernel:
    def __init__(self, deterministic: bool, tile_m: int, mask_mod: Any, q_subtile_factor: int) -> None: ...

    def load(self, mQ: Any, TileSchedulerCls: Any, blocksparse_tensors: Any) -> None: ...

    def mma(self, mdK: Any, AttentionMaskCls: Any, TileSchedulerCls: Any, blocksparse_tensors: Any) -> None: ...

    def dQaccum_store(
        self, mdQaccum: Any, sdQaccum: Any, block_info: Any, TileSchedulerCls: Any, SeqlenInfoCls: Any, blocksparse_tensors: Any,
        mdQ_semaphore: Any,
    ) -> None: ...  # fmt: skip


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"forward": plain_forward, "backward": plain_backward, "blocks": Blocks, "mask": "the mask"}
    monkeypatch.setattr(fa4, "functions", lambda: made)
    kernel = {"mask": "the mask of ordered sums", "kernel": PlainKernel}
    monkeypatch.setattr(fa4_ordered, "functions", lambda: made | kernel)
    monkeypatch.setattr(fa4_ordered, "install", lambda: None)


def errors(
    name: str, tree: Forest, inputs: list[Tensor | None], options: dict[str, Any] = PLAIN, given: Given | None = None
) -> list[float]:
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x is not None and x.is_floating_point() else x for x in inputs]
    got, want = run(ITEMS[name], tree, inputs, options, given), run(TABLE[-1], tree, wide, options)
    assert all(x.isfinite().all() for x in got)
    assert all(x.transpose(1, 2).is_contiguous() for x in got if x.dim() == 4)
    return [relative_error(one, other) for one, other in zip(got, want, strict=True)]


def make(tree: Forest, **changed: Any) -> list[Tensor | None]:
    return attention_inputs(tree.tensor("end", "cpu"), tree.tensor("column", "cpu"), **({"dtype": torch.float64} | changed))


def trees() -> list[Forest]:
    ragged = [[*range(200), *range(1000 * b, 1000 * b + 61 * b)] for b in range(1, 4)]
    made = [forest("deep"), forest("several_roots"), random_forest(1)]
    return made + [Forest.from_rows(rows) for rows in ([*ragged, [700, 701]], [[5]], [[]])]


@pytest.mark.usefixtures("stand_in")
@EVERY
@pytest.mark.parametrize("strict", [False, True])
def test_equals_reference(name: str, strict: bool) -> None:
    torch.use_deterministic_algorithms(strict)
    try:
        for number, tree in enumerate(trees()):
            inputs = make(
                tree, sinks=number % 2 == 0, dims=((16, 16), (12, 20), (192, 128), (72, 64))[number % 4], heads=((4, 2), (3, 3))[number % 2]
            )
            assert max(errors(name, tree, inputs)) < TOLERANCE[torch.float64]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("stand_in")
@EVERY
def test_bfloat16_windows_and_padding(name: str) -> None:
    tree = forest("ragged_star")
    assert max(errors(name, tree, make(tree, dtype=torch.bfloat16))) < TOLERANCE[torch.bfloat16]
    for option in ({"window": 5}, {"window": 1000}, {"chunk": 8}):
        assert max(errors(name, tree, make(tree), PLAIN | option)) < TOLERANCE[torch.float64]
    inputs = make(tree)
    inputs[5] = torch.arange(tree.num_tokens)[None] % 5 > 0
    given = {item: tree.tensor(item, "cpu") for item in ITEMS[name].forest_names({})}
    assert max(errors(name, tree, inputs, given=given | {"padding_hides": torch.tensor([1])})) < TOLERANCE[torch.float64]
    assert min(errors(name, tree, inputs, given=given)) > 0.1


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", ["fa4_auto", "fa4_auto_ordered"])
def test_backward_is_chosen_by_the_mean_node(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = forest("ragged_star")
    mean, turns = tree.num_tokens // tree.num_nodes, list[int]()
    ordered = fa4_ordered.backward
    monkeypatch.setattr(fa4_ordered, "backward", lambda *given: turns.append(1) or ordered(*given))
    for dims, limit in itertools.product(((72, 72), (64, 64)), (mean, mean + 1)):
        monkeypatch.setattr(fa4_ordered, "LONG", limit)
        assert max(errors(name, tree, make(tree, dims=dims))) < TOLERANCE[torch.float64]
        long = limit == mean and (name == "fa4_auto" or dims[0] > fa4_ordered.NARROW)
        assert bool(turns) is not long, (dims, limit)
        turns.clear()


@pytest.mark.usefixtures("stand_in")
@EVERY
def test_another_forest_and_unknown_masks_are_refused(name: str) -> None:
    tree, other = forest("ragged_star"), forest("deep")
    given = {item: other.tensor(item, "cpu") for item in ITEMS[name].forest_names({})}
    with pytest.raises(InvalidInput, match="describe"):
        run(ITEMS[name], tree, make(tree), PLAIN, given)
    with pytest.raises(InvalidInput, match="softcap"):
        run(ITEMS[name], tree, make(tree), PLAIN | {"softcap": 2.0})


@pytest.mark.usefixtures("stand_in")
@EVERY
def test_op_contract(name: str) -> None:
    tree = forest("ragged_star")
    given = {item: tree.tensor(item, "cpu") for item in ITEMS[name].forest_names({})}
    args, kwargs = call(ITEMS[name], SEMANTIC, bind(SEMANTIC, make(tree, sinks=True), PLAIN), given)
    torch.library.opcheck(ITEMS[name].op, args, kwargs)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Makes the arguments of a call on a Hopper GPU, as the lowering sees them, and a package that has what is asked for."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    installed(monkeypatch, fa4.OLDEST)
    fa4._broken.cache_clear()
    fa4_ordered._broken.cache_clear()
    mode = FakeTensorMode()

    def arguments(dtype: torch.dtype = torch.bfloat16, dims: tuple[int, int] = (64, 64), **changed: Any) -> dict[str, Any]:
        with mode:
            shapes = (1, 8, 40, dims[0]), (1, 2, 40, dims[0]), (1, 2, 40, dims[1])
            values = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
            numbers = [torch.empty(40, dtype=torch.int64, device="cuda") for _ in range(2)]
        return bind(SEMANTIC, (*values, *numbers, None, None, None, None), PLAIN) | changed

    return arguments


def installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def find(package: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)


def reasons(arguments: dict[str, Any], **options: Any) -> dict[str, str]:
    return dict(select(SEMANTIC, arguments, names=[*ITEMS, "chains_cuda", "blocked"], **options).rejected)


@pytest.mark.usefixtures("stand_in")
def test_the_fastest_that_is_allowed_is_chosen(hopper: Callable[..., dict[str, Any]]) -> None:
    accepting(fa4.functions())
    assert select(SEMANTIC, hopper(), deterministic=False).implementation.name == "fa4_auto"
    chosen = select(SEMANTIC, hopper(), deterministic=True)
    assert chosen.implementation.name == "fa4_auto_ordered"
    assert ("fa4_auto", "not deterministic, and deterministic algorithms are required") in chosen.rejected
    assert select(SEMANTIC, hopper(dims=(192, 128)), deterministic=False).implementation.name == "fa4_chains"
    assert select(SEMANTIC, hopper(), names=["chains_cuda", "fa4_chains"]).implementation.name == "chains_cuda"


def accepting(known: dict[str, Any]) -> None:
    """Gives the stand-ins every parameter, which their `**given` does not name."""
    for name, parameters in (("forward", fa4._FORWARD), ("backward", fa4._BACKWARD)):

        def function(**given: Any) -> None: ...

        named = [inspect.Parameter(parameter, inspect.Parameter.KEYWORD_ONLY) for parameter in sorted(parameters)]
        function.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
        known[name] = function


def test_why_not(hopper: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def said(text: str, arguments: dict[str, Any]) -> None:
        found = reasons(arguments, deterministic=False)
        assert {found[name] for name in ITEMS} == {text}

    said("computes in bfloat16 or float16, not torch.float32", hopper(dtype=torch.float32))
    assert reasons(hopper(dims=(264, 64)), deterministic=False)["fa4_chains"] == "head dim 264 is above 256"
    assert reasons(hopper(dims=(136, 64)), deterministic=False)["fa4_blocks"] == "head dim 136 is above 128"
    said("has no softcap", hopper(softcap=2.0))
    said("the host cannot tell whether key_valid hides anything", hopper(key_valid=hopper()["end"]))
    installed(monkeypatch, None)
    said("needs the package flash-attn-4 (>= 4.0.0b36), which is not installed", hopper())
    installed(monkeypatch, "4.0.0b9")
    said("needs flash-attn-4 >= 4.0.0b36, found 4.0.0b9", hopper())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    said("is tested on compute capability 9.0, the device has 10.0", hopper())


def test_a_package_that_cannot_be_used_says_why(hopper: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> dict[str, Any]:
        raise OSError("libcuda.so.1: cannot open shared object file")

    installed(monkeypatch, "4.1.0")
    monkeypatch.setattr(fa4, "functions", fails)
    found = reasons(hopper(), deterministic=False)["fa4_chains"]
    assert found == "flash-attn-4 4.1.0 cannot be imported: OSError: libcuda.so.1: cannot open shared object file"

    installed(monkeypatch, "4.2.0")
    monkeypatch.setattr(fa4, "functions", lambda: {"forward": lambda q, k, v: None, "backward": plain_backward, "blocks": Blocks})
    assert "another interface: its forward function does not know aux_tensors, block_sparse_tensors, causal" in fa4.unusable()  # type: ignore[operator]
    with pytest.raises(NoImplementation, match="another interface"):
        select(SEMANTIC, hopper(), names=["fa4_blocks"], deterministic=False)


@pytest.mark.usefixtures("stand_in")
def test_ordered_sums_want_the_kernel_they_were_fitted_to(hopper: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    known = fa4_ordered.functions()
    accepting(fa4.functions())
    assert fa4_ordered.unusable() is None

    def said(version: str, **changed: Any) -> str:
        installed(monkeypatch, version)
        monkeypatch.setattr(fa4_ordered, "functions", lambda: known | changed)
        fa4_ordered._broken.cache_clear()
        chosen = select(SEMANTIC, hopper_arguments, deterministic=True)
        assert chosen.implementation.name == "fa4_mixed"
        return dict(chosen.rejected)["fa4_ordered"]

    hopper_arguments = hopper()
    assert said("4.0.0") == "is fitted to flash-attn-4 4.0.0b36, found 4.0.0"
    found = said(fa4.OLDEST, kernel=type("Other", (PlainKernel,), {"mma": lambda self, mdK, TileSchedulerCls: None}))
    assert "another interface: " in found
    assert "does not know AttentionMaskCls, blocksparse_tensors" in found
    assert "__init__ does not know" in said(fa4.OLDEST, kernel=type("Other", (PlainKernel,), {"__init__": lambda self, tile_m: None}))
    assert "does not know dq_write_order, dq_write_order_full, spt" in said(fa4.OLDEST, blocks=lambda mask_block_cnt: None)
    found = said(fa4.OLDEST, kernel=lambda deterministic, mask_mod, q_subtile_factor, tile_m: None)
    assert found.endswith("its load does not know TileSchedulerCls, blocksparse_tensors")


def test_nothing_of_the_package_is_imported_for_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "unusable", lambda: pytest.fail("asked for"))
    tree = forest("ragged_star")
    found = reasons(bind(SEMANTIC, make(tree, dtype=torch.bfloat16), PLAIN), deterministic=False)
    assert {found[name] for name in ITEMS} == {"runs on NVIDIA GPUs, the tensors are on cpu"}
