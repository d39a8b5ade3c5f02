"""Packed mode: the model is given one row of physical tokens inside of `share`, and equals the dense model on the rows."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_compile
from sp_compile.backend import shared_prefix
from sp_compile.errors import CannotShare, InvalidInput, StaleForest
from sp_compile.layout import Forest
from tests.e2e import decoders, families
from tests.e2e.compare import GRADIENTS, LOGITS, outputs, relative, weighting
from tests.e2e.models import VOCABULARY, Gpt, Rope, qwen3, spread
from tests.e2e.scenarios import Batch, batches

USED = ("input_ids", "attention_mask", "position_ids")
ALL = [b for b in batches() if set(b.inputs) <= set(USED)]
BATCHES = [b for b in ALL if not b.name.startswith(("different", "square", "duplicates r", "short", "forest b", "star r"))]
FEW = [b for b in ALL if b.name in ("star right-padded", "forest both-padded", "tree both-padded counted", "square right-padded")]


def weights(logits: Tensor, batch: Batch) -> Tensor:
    return weighting(logits.shape, batch.real)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def dense_run(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits, _ = outputs(model(**batch.inputs))
    (logits * weights(logits, batch)).sum().backward()
    return logits.detach(), gradients(model)


def check(call: Callable[..., Any], model: nn.Module, batch: Batch, wanted: tuple[Tensor, dict[str, Tensor]], regions: int = 1) -> None:
    """Forward inside of `share`, backward outside of it."""
    model.zero_grad()
    packed = sp_compile.pack(batch.inputs)
    assert packed.forest.num_tokens == batch.physical
    with sp_compile.share(packed.forest):
        logits, _ = outputs(call(**packed.inputs))
    account = sp_compile.last_run()
    assert account.shared
    assert account.physical_tokens == regions * batch.physical
    assert account.logical_tokens == regions * batch.logical
    assert logits.shape[:2] == (1, batch.physical)
    rows = sp_compile.unpack(logits, packed.forest)
    (rows * weights(rows, batch)).sum().backward()
    assert relative(rows[batch.real], wanted[0][batch.real]) <= LOGITS
    found = gradients(model)
    assert found.keys() == wanted[1].keys()
    whole = max(float(g.norm()) for g in wanted[1].values())
    for name, gradient in wanted[1].items():
        assert relative(found[name], gradient, floor=1e-4 * whole) <= GRADIENTS, name


@pytest.fixture(scope="module")
def whole() -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    model = qwen3()
    return model, torch.compile(model, backend=shared_prefix, options={"inner": "aot_eager"})


@pytest.mark.parametrize("batch", BATCHES, ids=lambda b: b.name)
def test_whole_model(whole: tuple[nn.Module, Any], batch: Batch) -> None:
    model, call = whole
    check(call, model, batch, dense_run(model, batch))
    assert sp_compile.last_run().compiles >= 1, "from the first call on"


def test_new_batches_do_not_recompile(whole: tuple[nn.Module, Any]) -> None:
    model, call = whole
    for batch in FEW[:2]:
        check(call, model, batch, dense_run(model, batch))
    before = sp_compile.last_run().compiles
    frames = torch._dynamo.utils.counters["frames"]["total"]
    for batch in FEW[2:] + FEW[:2]:
        check(call, model, batch, dense_run(model, batch))
    assert sp_compile.last_run().compiles == before
    assert torch._dynamo.utils.counters["frames"]["total"] == frames


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [Gpt, Rope], ids=lambda k: k.__name__)
def test_models_that_no_library_wrote(kind: Callable[[], nn.Module], inner: str) -> None:
    """Positions that the model counts itself become the rows' columns."""
    torch._dynamo.reset()
    model = spread(kind())
    call = torch.compile(model, backend=shared_prefix, options={"inner": inner})
    for batch in (b for b in BATCHES if b.name in ("star", "duplicates")):
        model.zero_grad()
        wanted = dense_run(model, batch)
        model.zero_grad()
        packed = sp_compile.pack(batch.inputs, positions=None)
        with sp_compile.share(packed.forest):
            logits, _ = outputs(call(**packed.inputs))
        assert sp_compile.last_run().shared
        rows = sp_compile.unpack(logits, packed.forest)
        (rows * weights(rows, batch)).sum().backward()
        assert relative(rows, wanted[0]) <= LOGITS
        assert all(relative(g, wanted[1][name], floor=1e-6) <= GRADIENTS for name, g in gradients(model).items())


@pytest.mark.parametrize(
    ("implementation", "checkpointing"), [("eager", "none"), ("sdpa", "reentrant"), ("sdpa", "not reentrant"), ("eager", "not reentrant")]
)
def test_blocks_compiled_one_by_one(implementation: str, checkpointing: str) -> None:
    """The forest of a block that is recomputed in backward is that of its forward, long after `share` ended."""
    torch._dynamo.reset()
    model = qwen3(attn_implementation=implementation)
    dense = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.compile(backend=shared_prefix, options={"inner": "aot_eager"})
    if checkpointing != "none":
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    for batch in FEW:
        wanted = dense_run(dense, batch)
        check(model, model, batch, wanted, len(model.model.layers))


def test_two_forests_recomputed_in_one_backward() -> None:
    """Micro-batches of different forests, whose losses are added before backward."""
    torch._dynamo.reset()
    model = qwen3()
    dense = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.compile(backend=shared_prefix, options={"inner": "aot_eager"})
    model.gradient_checkpointing_enable({"use_reentrant": False})
    total: Any = 0
    for batch in FEW:
        packed = sp_compile.pack(batch.inputs)
        with sp_compile.share(packed.forest):
            logits = model(**packed.inputs).logits
        rows = sp_compile.unpack(logits, packed.forest)
        total = total + (rows * weights(rows, batch)).sum()
    total.backward()
    expected: Any = 0
    for batch in FEW:
        logits = dense(**batch.inputs).logits
        expected = expected + (logits * weights(logits, batch)).sum()
    expected.backward()
    wanted = gradients(dense)
    assert all(relative(g, wanted[name], floor=1e-6) <= GRADIENTS for name, g in gradients(model).items())


def test_backward_in_another_thread() -> None:
    """As on an accelerator, where autograd has threads of its own and no context variable of the caller's."""
    torch._dynamo.reset()
    model = qwen3()
    batch = FEW[0]
    wanted = dense_run(copy.deepcopy(model), batch)
    for layer in model.model.layers:
        layer.compile(backend=shared_prefix, options={"inner": "aot_eager"})
    model.gradient_checkpointing_enable({"use_reentrant": False})
    packed = sp_compile.pack(batch.inputs)
    with sp_compile.share(packed.forest):
        rows = sp_compile.unpack(model(**packed.inputs).logits, packed.forest)
    loss = (rows * weights(rows, batch)).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert all(relative(g, wanted[1][name], floor=1e-6) <= GRADIENTS for name, g in gradients(model).items())


def test_dense_calls_of_the_same_model() -> None:
    """A packed call, a dense one and a single row share one compiled model."""
    torch._dynamo.reset()
    model = qwen3()
    call = torch.compile(model, backend=shared_prefix, options={"inner": "eager"})
    batch = FEW[0]
    wanted = dense_run(model, batch)
    check(call, model, batch, wanted)
    assert relative(call(**batch.inputs).logits[batch.real], wanted[0][batch.real]) <= LOGITS
    assert sp_compile.last_run().shared
    one = {name: value[:1, :9] for name, value in batch.inputs.items() if isinstance(value, Tensor)}
    assert relative(call(**one).logits, model(**one).logits) <= LOGITS
    assert not sp_compile.last_run().shared
    check(call, model, batch, wanted)


def test_a_batch_of_padding_only() -> None:
    """A rank without rows takes part in the step: zeros forward and backward, before and after ordinary batches."""
    torch._dynamo.reset()
    model = spread(Gpt())
    call = torch.compile(model, backend=shared_prefix, options={"inner": "eager"})
    ids = FEW[0].inputs["input_ids"]
    for real in (0, 1, 0):
        model.zero_grad()
        packed = sp_compile.pack({"input_ids": ids, "attention_mask": torch.full_like(ids, real)}, positions=None)
        with sp_compile.share(packed.forest):
            logits, _ = outputs(call(packed.inputs["input_ids"]))
        rows = sp_compile.unpack(logits, packed.forest)
        assert rows.shape[:2] == ids.shape
        rows.sum().backward()
        assert packed.forest.num_tokens > 0 or not rows.any()
        assert all(bool(gradient.any()) <= bool(real) for gradient in gradients(model).values())


class Block(nn.Module):
    def __init__(self, mixer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.mixer = nn.Embedding(VOCABULARY, 8), mixer

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.mixer(self.embed(input_ids))


@pytest.mark.parametrize(
    ("mixer", "reason"),
    [
        (lambda x: x + x.mean(1, keepdim=True), "reduces over tokens"),
        (lambda x: x + x.cumsum(1), "cumsum"),
        (lambda x: x + x.roll(1, 1), "roll"),
        (lambda x: x + x.mean(0, keepdim=True), "may run over the rows"),
        (lambda x: x.flip(0), "may run over the rows"),
        (lambda x: x * torch.rand_like(x), "random"),
        (lambda x: x[:, -1], "selected|columns|tokens"),
        (lambda x: nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0], "without a mask"),
        (lambda x: nn.functional.pad(x, (0, 0, 1, 0))[:, :-1], "columns"),
    ],
    ids=["mean", "cumsum", "roll", "batch mean", "batch flip", "random", "last", "not causal", "shift"],
)
def test_what_needs_rows_is_an_error(mixer: Callable[[Tensor], Tensor], reason: str) -> None:
    """There is no dense run to fall back to: the packed row is none of the batch's."""
    torch._dynamo.reset()
    call = torch.compile(Block(mixer), backend=shared_prefix, options={"inner": "eager"})
    packed = sp_compile.pack({"input_ids": FEW[0].tensor("input_ids")}, positions=None)
    with sp_compile.share(packed.forest), pytest.raises(CannotShare, match=reason):
        call(**packed.inputs)


def test_masks_made_outside_must_be_causal() -> None:
    torch._dynamo.reset()

    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask)[:, 0]

    packed = sp_compile.pack({"input_ids": FEW[0].tensor("input_ids")})
    tokens = packed.forest.num_tokens
    call = torch.compile(attend, backend=shared_prefix, options={"inner": "eager"})
    x, causal = torch.randn(1, tokens, 8), torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
    with sp_compile.share(packed.forest):
        call(x, causal)
        assert sp_compile.last_run().shared
        blocks = causal & (torch.arange(tokens)[:, None] // 4 == torch.arange(tokens) // 4)
        for wrong in (blocks, causal.flip(-1), torch.ones_like(causal), causal.triu(-3) | causal.roll(5, -2).tril()):
            with pytest.raises(CannotShare, match="says nothing about rows"):
                call(x, wrong)
        call(x, causal)


def test_wrong_forest_and_inputs() -> None:
    torch._dynamo.reset()
    packed = sp_compile.pack({"input_ids": FEW[0].tensor("input_ids")}, positions=None)
    other = sp_compile.pack({"input_ids": FEW[1].tensor("input_ids")})
    call = torch.compile(Block(lambda x: x * 2), backend=shared_prefix, options={"inner": "eager"})
    with sp_compile.share(other.forest), pytest.raises(StaleForest, match=f"{other.forest.num_tokens} tokens"):
        call(**packed.inputs)
    with pytest.raises(InvalidInput, match="expected a Forest"):
        sp_compile.share(packed)  # type: ignore[arg-type]
    with pytest.raises(StaleForest):
        sp_compile.unpack(torch.zeros(1, 3, 4), packed.forest)
    with pytest.raises(InvalidInput, match=r"\[1, T"):
        sp_compile.unpack(torch.zeros(2, 3, 4), packed.forest)
    with pytest.raises(InvalidInput, match="empty"):
        sp_compile.pack({})
    with pytest.raises(InvalidInput, match="rows and columns"):
        sp_compile.pack({"input_ids": torch.zeros(2, 3, dtype=torch.int64), "token_type_ids": torch.zeros(2, 4, dtype=torch.int64)})
    with pytest.raises(InvalidInput, match="float"):
        sp_compile.pack({"input_ids": torch.zeros(2, 3)})


def test_contexts_nest_and_end_with_an_error() -> None:
    first, second = (sp_compile.pack({"input_ids": b.tensor("input_ids")}).forest for b in FEW[:2])
    from sp_compile.sharing import packed_tokens

    def fail() -> None:
        with sp_compile.share(second):
            assert packed_tokens() == second.num_tokens
            raise KeyError

    with sp_compile.share(first):
        with pytest.raises(KeyError):
            fail()
        assert packed_tokens() == first.num_tokens
    assert packed_tokens() is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_behind_other_work_in_a_checkpoint_is_an_error(reentrant: bool) -> None:
    """It is recomputed on new memory; a reentrant checkpoint captures it anew besides, with gradients."""
    torch._dynamo.reset()
    block = nn.Linear(8, 8)
    call = torch.compile(lambda x: block(nn.functional.scaled_dot_product_attention(*[x[:, None]] * 3, is_causal=True)[:, 0]),
                         backend=shared_prefix, options={"inner": "eager"})  # fmt: skip
    packed = sp_compile.pack({"input_ids": FEW[0].tensor("input_ids")})
    x = torch.randn(1, packed.forest.num_tokens, 8, requires_grad=True)
    with sp_compile.share(packed.forest):
        out = checkpoint(lambda y: call(y * 2), x, use_reentrant=reentrant)
    with pytest.raises(StaleForest, match="recomputed"):
        out.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_parts_of_one_tensor_with_forests_of_their_own(reentrant: bool) -> None:
    """Two micro-batches of equally many tokens, cut from one tensor."""
    torch._dynamo.reset()
    linear = nn.Linear(8, 8)

    def attend(x: Tensor) -> Tensor:
        return linear(nn.functional.scaled_dot_product_attention(*[x[:, None]] * 3, is_causal=True)[:, 0])

    call = torch.compile(attend, backend=shared_prefix, options={"inner": "eager"})
    forests = [Forest.from_rows([[1, 2, 3, 4], [1, 2, 5]]), Forest.from_rows([[1, 2, 3], [1, 7, 8]])]
    assert forests[0].num_tokens == forests[1].num_tokens == 5
    whole = torch.randn(1, 10, 8, requires_grad=True)
    wanted = torch.autograd.grad(
        sum(attend_on(attend, part, forest) for part, forest in zip(whole.split(5, 1), forests, strict=True)), whole
    )[0]
    total: Any = 0
    for part, forest in zip(whole.split(5, 1), forests, strict=True):
        with sp_compile.share(forest):
            total = total + checkpoint(call, part, use_reentrant=reentrant).square().sum()
    assert relative(torch.autograd.grad(total, whole)[0] if not reentrant else backward_of(total, whole), wanted) <= GRADIENTS


def attend_on(function: Callable[[Tensor], Tensor], part: Tensor, forest: Forest) -> Any:
    """The sum over tokens of the squares of a dense run on the rows, each token once."""
    rows = sp_compile.unpack(part, forest)
    out = function(rows)
    row, column = forest.tensors(("row", "column"), "cpu")
    return out[row, column].square().sum()


def backward_of(total: Tensor, leaf: Tensor) -> Tensor:
    leaf.grad = None
    total.backward()
    assert leaf.grad is not None
    return leaf.grad


def test_pack_in_a_compiled_function() -> None:
    """A graph break, as for any work on the host."""
    torch._dynamo.reset()
    ids = FEW[0].tensor("input_ids")
    made = torch.compile(lambda x: sp_compile.pack({"input_ids": x}).inputs["input_ids"] * 2, backend="eager")(ids)
    assert torch.equal(made, sp_compile.pack({"input_ids": ids}).inputs["input_ids"] * 2)


def test_a_recomputation_without_a_forest_is_an_error() -> None:
    """Inputs that were copied between forward and recomputation say nothing; a guess could be a wrong number."""
    torch._dynamo.reset()
    call = torch.compile(Block(lambda x: x * 2), backend=shared_prefix, options={"inner": "eager"})
    packed = sp_compile.pack({"input_ids": FEW[0].tensor("input_ids")}, positions=None)
    ids = packed.inputs["input_ids"]
    scale = torch.ones((), requires_grad=True)
    with sp_compile.share(packed.forest):
        out = checkpoint(lambda s: call(ids.clone()) * s, scale, use_reentrant=False)
    with pytest.raises(StaleForest, match="recomputed"):
        out.sum().backward()


@pytest.mark.parametrize(("kind", "implementation"), [("mistral", "sdpa"), ("gemma3", "eager")])
def test_blocks_with_windows_compiled_one_by_one(kind: str, implementation: str) -> None:
    """A window is part of the mask, which the library makes outside of its blocks from what it takes for one row."""
    torch._dynamo.reset()
    model = families.make(kind, attn_implementation=implementation)
    dense = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.compile(backend=shared_prefix, options={"inner": "eager"})
    for batch in FEW[:2]:
        check(model, model, batch, dense_run(dense, batch), len(model.model.layers))


def test_blocks_with_chunks_are_refused() -> None:
    """Blocks of equal documents look like chunks in the packed order."""
    torch._dynamo.reset()
    model = families.make("llama4", attn_implementation="sdpa")
    for layer in model.model.layers:
        layer.compile(backend=shared_prefix, options={"inner": "eager"})
    packed = sp_compile.pack(FEW[0].inputs)
    with sp_compile.share(packed.forest), pytest.raises(CannotShare, match="compile the model as a whole"):
        model(**packed.inputs)


class Products(decoders.Decoder):
    """Attention in three dimensions, heads merged with rows, by products of matrices."""

    def attend(self, number: int, ids: Tensor, mask: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        hidden = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)) / 3
            return torch.bmm(scores.masked_fill(hidden, -torch.inf).softmax(-1), v.flatten(0, 1)).unflatten(0, (-1, q.shape[1]))

        return attention


@pytest.mark.parametrize("kind", ["buckets", "grouped", "old", "products"])
def test_attention_written_by_hand(kind: str) -> None:
    torch._dynamo.reset()
    model = spread(Products()) if kind == "products" else decoders.make(kind)
    call = torch.compile(model, backend=shared_prefix, options={"inner": "eager"})
    batch = next(b for b in BATCHES if b.name == "star")
    wanted = dense_run(model, batch)
    model.zero_grad()
    packed = sp_compile.pack(batch.inputs, positions=None)
    with sp_compile.share(packed.forest):
        logits, _ = outputs(call(**packed.inputs))
    assert sp_compile.last_run().shared
    rows = sp_compile.unpack(logits, packed.forest)
    (rows * weights(rows, batch)).sum().backward()
    assert relative(rows, wanted[0]) <= LOGITS
    whole = max(float(g.norm()) for g in wanted[1].values())
    assert all(relative(g, wanted[1][name], floor=1e-4 * whole) <= GRADIENTS for name, g in gradients(model).items())


@pytest.mark.parametrize("equal", [False, True])
def test_forests_recomputed_behind_other_work(equal: bool) -> None:
    """A second region, behind work of its own, follows the first of its checkpoint, unless forests of equally many tokens are mixed."""
    torch._dynamo.reset()
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def attend(x: Tensor, linear: nn.Module) -> Tensor:
        return linear(nn.functional.scaled_dot_product_attention(*[x[:, None]] * 3, is_causal=True)[:, 0])

    call = torch.compile(attend, backend=shared_prefix, options={"inner": "eager"})
    rows = [[[1, 2, 3, 4], [1, 2, 5]], [[1, 2, 3], [1, 7, 8]] if equal else [[1, 2, 3], [1, 7, 8], [9]]]
    forests = [Forest.from_rows(r) for r in rows]
    parts = [torch.randn(1, forest.num_tokens, 8, requires_grad=True) for forest in forests]

    def both(x: Tensor, run: Callable[..., Tensor]) -> Tensor:
        return run(run(x, first).tanh() * 2, second)

    wanted = [torch.autograd.grad(attend_on(lambda x: both(x, attend), p, f), p)[0] for p, f in zip(parts, forests, strict=True)]
    total: Any = 0
    for part, forest in zip(parts, forests, strict=True):
        with sp_compile.share(forest):
            total = total + checkpoint(lambda x: both(x, call), part, use_reentrant=False).square().sum()
    if equal:
        with pytest.raises(StaleForest, match="recomputed"):
            torch.autograd.grad(total, parts)
        return
    for found, gradient in zip(torch.autograd.grad(total, parts), wanted, strict=True):
        assert relative(found, gradient) <= GRADIENTS
