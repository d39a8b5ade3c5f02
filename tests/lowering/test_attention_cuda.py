"""The composition of variable-length flash calls, with plain torch in place of the CUDA kernel: plans, merging, gradients, choice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import sp_compile
from sp_compile.batch import hides
from sp_compile.errors import InvalidInput
from sp_compile.kernels.attention import chains_cuda, composed, forest_ops
from sp_compile.kernels.attention.composed import Call, Library, Sequences, make_calls
from sp_compile.layout import Forest
from sp_compile.layout.flash_calls import CHAINS, CROSS, PART
from sp_compile.lowering import registry
from sp_compile.lowering.attention import TABLE, chains_cpu
from sp_compile.lowering.registry import bind, call, select
from sp_compile.ops.attention import TOLERANCE, Mask, attention_inputs
from sp_compile.ops.numerics import relative_error
from tests.e2e import compare, models
from tests.ops.forests import ROWS, forest, random_forest, tensors

SEMANTIC = torch.ops.sp_compile.attention.default
FLASH = next(item for item in TABLE if item.name == "chains_cuda")
PLAIN: dict[str, Any] = {"scale": 0.3, "window": None, "chunk": None, "softcap": None}
NAMES = (*ROWS, *range(12))


def tree_of(name: str | int) -> Forest:
    return random_forest(name) if isinstance(name, int) else forest(name)


def calls_of(tree: Forest) -> list[Call]:
    return make_calls(tree.tensor("flash_calls", "cpu"), tree.tensor("flash_plan", "cpu"), tree.num_tokens)


def spans(lengths: Sequences) -> list[tuple[slice, slice]]:
    q, k = lengths.q.tolist(), lengths.k.tolist()
    assert lengths.q.dtype == lengths.k.dtype == torch.int32
    assert len(q) == len(k)
    return [(slice(q[i], q[i + 1]), slice(k[i], k[i + 1])) for i in range(len(q) - 1)]


def scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """[Hq, n, m] of [n, Hq, D] and [m, Hkv, D]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    made = torch.einsum("ihd,jhd->hij", q, k) * scale
    return made.masked_fill(torch.ones(made.shape[1:], dtype=torch.bool).triu(1), -math.inf) if causal else made


def plain_forward(q: Tensor, k: Tensor, v: Tensor, lengths: Sequences, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    assert q.shape[-1] == k.shape[-1]
    assert q.shape[-1] % 8 == 0
    out, lse = (
        q.new_empty((*q.shape[:2], v.shape[2])),
        q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32)),
    )
    for rows, columns in spans(lengths):
        assert rows.stop - rows.start <= lengths.most_q
        assert columns.stop - columns.start <= lengths.most_k
        x = scores(q[rows].double(), k[columns].double(), causal, scale)
        values = v[columns].double().repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[rows] = torch.einsum("hij,jhd->ihd", x.softmax(-1), values).to(q.dtype)
        lse[:, rows] = x.logsumexp(-1).to(lse.dtype)
    return out, lse


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Sequences, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As a flash backward: probabilities from the lse and the inner product from the out that it is given."""
    found = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    groups = q.shape[1] // k.shape[1]
    for rows, columns in spans(lengths):
        q_, k_, v_, do, o = (x.double() for x in (q[rows], k[columns], v[columns], grad[rows], out[rows]))
        p = (scores(q_, k_, causal, scale) - lse[:, rows, None].double()).exp()
        dp = torch.einsum("ihd,jhd->hij", do, v_.repeat_interleave(groups, 1))
        ds = p * (dp - (do * o).sum(-1).t()[..., None]) * scale
        found[0][rows] = torch.einsum("hij,jhd->ihd", ds, k_.repeat_interleave(groups, 1)).to(q.dtype)
        for where, value in ((1, torch.einsum("hij,ihd->jhd", ds, q_)), (2, torch.einsum("hij,ihd->jhd", p, do))):
            found[where][columns] = value.unflatten(1, (k.shape[1], groups)).sum(2).to(q.dtype)
    return found[0], found[1], found[2]


def use(monkeypatch: pytest.MonkeyPatch, backward: Callable[..., Any]) -> None:
    monkeypatch.setattr(chains_cuda, "LIBRARY", Library(plain_forward, backward, splits=True))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, plain_backward)


def make(tree: Forest, **changed: Any) -> list[Tensor | None]:
    end, column, _ = tensors(tree)
    return attention_inputs(end, column, **changed)


Given = dict[str, Tensor]


def run(item: Any, tree: Forest, inputs: list[Tensor | None], options: dict[str, Any], given: Given | None = None) -> list[Tensor]:
    """Output and the gradients of every float leaf, for a fixed random gradient of the output."""
    given = {name: tree.tensor(name, "cpu") for name in item.forest_tensors} if given is None else given
    args, kwargs = call(item, SEMANTIC, bind(SEMANTIC, inputs, options), given)
    result = item.op(*args, **kwargs)
    out = result if item.output is None else result[item.output]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x for x in inputs if x is not None and x.requires_grad], grad)]


def errors(tree: Forest, inputs: list[Tensor | None], options: dict[str, Any] = PLAIN, given: Given | None = None) -> list[float]:
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x is not None and x.is_floating_point() else x for x in inputs]
    got, want = run(FLASH, tree, inputs, options, given), run(TABLE[-1], tree, wide, options)
    assert all(x.isfinite().all() for x in got)
    assert all(x.transpose(1, 2).is_contiguous() for x in got if x.dim() == 4)
    return [relative_error(one, other) for one, other in zip(got, want, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_every_visible_pair_is_computed_once(name: str | int) -> None:
    tree = tree_of(name)
    counted = {kind: torch.zeros(tree.num_tokens, tree.num_tokens, dtype=torch.int64) for kind in (CHAINS, PART, CROSS)}
    for one in calls_of(tree):
        q, k = (side.read(torch.arange(tree.num_tokens)) for side in (one.queries, one.keys))
        # One owner per row: gradients are written, not summed, within a call.
        assert len(q.unique()) == len(q) == one.lengths.q[-1]
        assert len(k.unique()) == len(k) == one.lengths.k[-1]
        for rows, columns in spans(one.lengths):
            pairs = torch.ones(rows.stop - rows.start, columns.stop - columns.start, dtype=torch.int64)
            counted[one.kind][q[rows][:, None], k[columns][None]] += pairs if one.kind == CROSS else pairs.tril()
    end, column, _ = tensors(tree)
    every = torch.arange(tree.num_tokens)
    if any(one.kind == PART for one in calls_of(tree)):
        assert torch.equal(counted[PART], counted[CHAINS])
    assert torch.equal(
        counted[CHAINS] + counted[CROSS], Mask(end, column, None, None, None, None, None, None).allow(every, every)[0].long()
    )


def test_calls_do_not_grow_with_branches_or_rows() -> None:
    stars = [[s, *range(5), 100 + b] for s in range(20) for b in range(8)]
    assert [one.kind for one in calls_of(Forest.from_rows(stars))] == [CHAINS, CROSS]


def test_heavy_sequences_are_calls_of_their_own() -> None:
    # Chains of 90, 10 and 10, then 70, then 5 tokens: both long ones are cut out, and rectangles of their trees part as well.
    rows = [
        [*range(90)],
        [*range(80), *range(100, 110)],
        [*range(80), *range(110, 120)],
        [*range(200, 270)],
        [*range(200, 265), *range(300, 305)],
    ]
    calls = calls_of(Forest.from_rows(rows))
    assert [(one.kind, one.queries.first, one.queries.count) for one in calls] == [
        (CHAINS, 0, 185), (PART, 0, 90), (PART, 90, 20), (PART, 110, 70), (PART, 180, 5), (CROSS, 90, 20), (CROSS, 180, 5),
    ]  # fmt: skip
    assert all(side.rows is None for one in calls for side in (one.queries, one.keys))


def test_consecutive_tokens_are_views() -> None:
    x = torch.arange(forest("ragged_star").num_tokens)
    for side in [side for one in calls_of(forest("ragged_star")) for side in (one.queries, one.keys)]:
        assert side.rows is None
        assert side.read(x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.fixture(params=[False, True], ids=["", "deterministic"])
def strict(request: pytest.FixtureRequest) -> Iterator[None]:
    """Deterministic algorithms cut the causal call of backward in parts; they also fill unwritten memory with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("stand_in", "strict")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_equals_reference(name: str | int, dtype: torch.dtype) -> None:
    tree = tree_of(name)
    found = errors(tree, make(tree, dtype=dtype, sinks=isinstance(name, int)))
    assert max(found[:4]) < TOLERANCE[dtype]
    # A sink's gradient sums products with the rounded out over all tokens; they nearly cancel.
    assert max(found[4:], default=0.0) < 4 * TOLERANCE[dtype]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("dims", [(16, 16), (12, 8), (8, 20)])
def test_equals_reference_for_head_layouts(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    for seed in range(3):
        tree = random_forest(seed)
        inputs = make(tree, heads=heads, dims=dims, dtype=torch.float64, sinks=seed == 0, seed=seed)
        if seed == 1:
            inputs[:3] = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs[:3] if x is not None]
        assert max(errors(tree, inputs)) < TOLERANCE[torch.float64]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("option", [{"window": 5}, {"window": 1000}, {"chunk": 8}, {"chunk": 1000}])
def test_windows_and_chunks(option: dict[str, Any]) -> None:
    tree = forest("deep")
    inputs = make(tree, dims=(8, 6), dtype=torch.float64, sinks=True)
    calls, nothing = tree.tensors(("flash_calls", "padding_hides"), "cpu")
    window, chunk = option.get("window"), option.get("chunk")
    assert forest_ops.needs_blocked(calls, nothing, window, chunk) == (max(option.values()) < 1000)
    mask = Mask(*inputs[3:8], window, chunk, None)
    assert forest_ops.needs_blocked(calls, nothing, window, chunk) == chains_cpu.needs_blocked(mask)
    assert max(errors(tree, inputs, PLAIN | option)) < TOLERANCE[torch.float64]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("hidden", [0, 1])
def test_padding_is_looked_at_only_where_it_hides(hidden: int) -> None:
    tree = forest("ragged_star")
    inputs = make(tree, dtype=torch.float64)
    inputs[5] = torch.arange(tree.num_tokens)[None] % 5 > 0 if hidden else torch.ones(1, tree.num_tokens, dtype=torch.bool)
    given = {name: tree.tensor(name, "cpu") for name in FLASH.forest_tensors} | {"padding_hides": torch.tensor([hidden])}  # type: ignore[union-attr]
    assert max(errors(tree, inputs, given=given)) < TOLERANCE[torch.float64]
    if hidden:
        assert min(errors(tree, inputs, given=given | {"padding_hides": torch.tensor([0])})) > 0.1


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("tokens", [0, 1])
def test_without_tokens_or_with_one(tokens: int) -> None:
    tree = Forest.from_rows([[5] * tokens])
    assert max(errors(tree, make(tree, dtype=torch.float64, sinks=True))) < TOLERANCE[torch.float64]


def test_an_empty_sequence_is_added_where_it_saves_a_wave() -> None:
    *_, cross = calls_of(forest("ragged_star"))
    assert len(cross.lengths.q) == 2
    # 32 heads on 132 processors: 5 splits are 160 blocks, two waves of a fifth each; for two sequences it is one wave of a third.
    more = cross.lengths.with_spare(32, 132)
    assert more.q.tolist() == [*cross.lengths.q.tolist(), cross.queries.count]
    assert more.k.tolist() == [*cross.lengths.k.tolist(), cross.keys.count]
    for heads in (12, 4, 128):
        assert cross.lengths.with_spare(heads, 132) is cross.lengths


@pytest.mark.usefixtures("stand_in", "strict")
def test_an_empty_sequence_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composed, "processors", lambda device: 9)
    tree = forest("ragged_star")
    assert max(errors(tree, make(tree, dtype=torch.float64))) < TOLERANCE[torch.float64]


def _own(backward: Callable[..., Any]) -> Callable[..., Any]:
    def own_out(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Sequences, causal: bool, scale: float
    ) -> Any:
        out, _ = plain_forward(q, k, v, lengths, causal, scale)
        return backward(grad, q, k, v, out, lse, lengths, causal, scale)

    return own_out


@pytest.mark.usefixtures("stand_in")
def test_backward_with_each_call_its_own_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = forest("ragged_star")
    use(monkeypatch, _own(plain_backward))
    assert min(errors(tree, make(tree, dtype=torch.float64))[1:3]) > 0.1


@pytest.mark.usefixtures("stand_in")
def test_a_lost_call_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = forest("ragged_star")
    monkeypatch.setattr(composed, "make_calls", lambda *given: make_calls(*given)[:1])
    assert min(errors(tree, make(tree, dtype=torch.float64))) > 0.1


@pytest.mark.usefixtures("stand_in")
def test_another_forest_and_unknown_masks_are_refused() -> None:
    tree, other = forest("ragged_star"), forest("deep")
    inputs = make(tree)
    given = {name: other.tensor(name, "cpu") for name in FLASH.forest_tensors}  # type: ignore[union-attr]
    args, kwargs = call(FLASH, SEMANTIC, bind(SEMANTIC, inputs, PLAIN), given)
    with pytest.raises(InvalidInput, match="calls describe"):
        FLASH.op(*args, **kwargs)
    with pytest.raises(InvalidInput, match="softcap"):
        run(FLASH, tree, inputs, PLAIN | {"softcap": 2.0})


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", ["ragged_star", "several_roots"])
def test_op_contract(name: str) -> None:
    tree = forest(name)
    given = {name: tree.tensor(name, "cpu") for name in FLASH.forest_tensors}  # type: ignore[union-attr]
    args, kwargs = call(FLASH, SEMANTIC, bind(SEMANTIC, make(tree, dtype=torch.float64, sinks=True), PLAIN), given)
    torch.library.opcheck(FLASH.op, args, kwargs)


def test_launches_are_read_on_the_host() -> None:
    tree = forest("ragged_star")
    calls, plan, end = tree.tensors(("flash_calls", "flash_plan", "end"), "meta")
    assert [x.device.type for x in (calls, plan, end)] == ["cpu", "meta", "meta"]
    assert plan.dtype == torch.int32


def test_the_choice_on_another_device_says_why() -> None:
    inputs = make(forest("ragged_star"), dtype=torch.bfloat16)
    chosen = select(SEMANTIC, bind(SEMANTIC, inputs, PLAIN), names=["chains_cuda", "chains"])
    assert chosen.implementation.name == "chains"
    assert chosen.rejected == (("chains_cuda", "runs on NVIDIA GPUs, the tensors are on cpu"),)


def test_hides_asks_the_mask_at_tokens_only() -> None:
    tree = Forest.from_rows([[1, 2, 3], [1, 2]])
    assert hides(torch.tensor([[1, 1, 1], [1, 1, 0]]), tree).tolist() == [0]
    assert hides(torch.tensor([[1, 1, 0], [1, 1, 1]]), tree).tolist() == [1]
    assert hides(torch.ones(1, 3), tree).tolist() == [1]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("labels_at_pads", [False, True])
def test_padding_masks_through_the_compiler(labels_at_pads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setitem(registry._TABLES, SEMANTIC, (dataclasses.replace(FLASH, supports=lambda given: None),))
    seen: list[int] = []
    plain = forest_ops.needs_blocked
    monkeypatch.setattr(forest_ops, "needs_blocked", lambda *given: seen.append(plain(*given)) or seen[-1])
    torch.manual_seed(0)
    model = models.llama(num_hidden_layers=1)
    torch._dynamo.reset()
    compiled = compare.compiled(model, "aot_eager")
    for rows, length, padded in ((4, 20, 0), (5, 23, 5)):
        ids = torch.randint(1, 50, (rows, length))
        ids[:, :9] = ids[0, :9]
        mask = torch.ones_like(ids)
        mask[1::2, length - padded :] = 0
        labels = ids if labels_at_pads else ids.masked_fill(mask == 0, -100)
        given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        found = []
        for call_ in (model, compiled):
            model.zero_grad(set_to_none=True)
            loss = call_(**given).loss
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        assert sp_compile.last_run().kernels["attention"] == "chains_cuda"
        for one, two in zip(*found, strict=True):
            assert relative_error(one, two) < 1e-4
        # Forward and backward. Pads that a loss reads stay, and hide.
        assert [bool(x) for x in seen] == [labels_at_pads and padded > 0] * 2
        seen.clear()
