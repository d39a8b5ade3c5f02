"""flex_attention called by a model: its mask and score functions are read, whatever they are written like."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import sp_compile
from sp_compile.backend import shared_prefix
from sp_compile.capture import install
from tests.e2e import compare, families
from tests.e2e.decoders import CHUNK, HEAD, HEADS, WINDOW, Decoder
from tests.e2e.models import spread
from tests.e2e.scenarios import Batch, forest, right_padded, star

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="older versions capture flex_attention in a form that is refused"
)


def anywhere(*_: Tensor) -> None:
    """Accepts every device; Dynamo traces it, which it does not a mock."""


@pytest.fixture(autouse=True)
def _anywhere() -> Iterator[None]:
    """torch refuses to trace flex_attention with gradients on a CPU, where its own kernel has no backward; the packed graph has one."""
    torch._dynamo.reset()
    install()  # a reset forgets what looks for libraries before each capture
    with mock.patch.object(flex, "_validate_device", anywhere):
        yield


Attention = Callable[[Any, Tensor, Tensor, Tensor, Any, "Tensor | None"], Tensor]


class Model(Decoder):
    """`attention(model, q, k, v, block_mask, documents)`; documents [B, L] may be None."""

    def __init__(self, attention: Attention) -> None:
        super().__init__(layers=1)
        self.places, self.table = nn.Embedding(64, 32), nn.Parameter(torch.empty(HEADS, 64))
        self.register_buffer("slopes", 0.5 ** torch.arange(1.0, HEADS + 1), persistent=False)
        self.attention = attention

    def start(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.places(torch.arange(ids.shape[1]))

    def forward(self, input_ids: Tensor, block_mask: Any = None, documents: Tensor | None = None) -> tuple[Tensor, ...]:  # type: ignore[override]
        self.given = block_mask, documents
        return self.run(input_ids, None, None)

    def attend(self, number: int, ids: Tensor, mask: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return lambda q, k, v: self.attention(self, q, k, v, *self.given)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def windowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < WINDOW)


def chunked(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q // CHUNK == k // CHUNK)


def plain(model: Any, q: Tensor, k: Tensor, v: Tensor, block_mask: Any, documents: Tensor | None) -> Tensor:
    return flex.flex_attention(q, k, v, block_mask=block_mask)  # type: ignore[return-value]


def bent(model: Any, q: Tensor, k: Tensor, v: Tensor, block_mask: Any, documents: Tensor | None) -> Tensor:
    """A softcap, slopes in a buffer, and a learned table."""
    slopes, table = model.slopes, model.table

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 2 * torch.tanh(s / 2) - slopes[h] * (i - j) + table[h, (i - j).abs()]

    return flex.flex_attention(q, k, v, score_mod=score, block_mask=block_mask, scale=0.3)  # type: ignore[return-value]


def grouped(model: Any, q: Tensor, k: Tensor, v: Tensor, block_mask: Any, documents: Tensor | None) -> Tensor:
    return flex.flex_attention(q, k[:, ::2], v[:, ::2], block_mask=block_mask, enable_gqa=True)  # type: ignore[return-value]


def by_score(model: Any, q: Tensor, k: Tensor, v: Tensor, block_mask: Any, documents: Tensor | None) -> Tensor:
    """No block mask: the score function hides what is later, and other documents."""
    assert documents is not None

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where((i >= j) & (documents[b, i] == documents[b, j]), s, -torch.inf)

    return flex.flex_attention(q, k, v, score_mod=score)  # type: ignore[return-value]


def reference(model: Any, q: Tensor, k: Tensor, seen: Tensor, v: Tensor, scale: float, bend: bool) -> Tensor:
    scores = q @ k.mT * scale
    if bend:
        apart = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        scores = 2 * torch.tanh(scores / 2) - model.slopes[:, None, None] * apart + model.table[:, apart.abs()]
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def dense_twin(model: Model, seen: Tensor) -> Model:
    """The same weights with attention written out, for pairs `seen` [.., L, L]."""
    bend, times = model.attention is bent, 2 if model.attention is grouped else 1

    def attention(own: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        k, v = (x[:, ::times].repeat_interleave(times, 1) for x in (k, v))
        return reference(own, q, k, seen, v, 0.3 if bend else HEAD**-0.5, bend)

    twin = Model(attention)
    twin.load_state_dict(model.state_dict())
    return twin


def pairs(function: Callable[..., Tensor], ids: Tensor) -> Tensor:
    columns = torch.arange(ids.shape[1])
    return function(torch.tensor(0), torch.tensor(0), columns[:, None], columns)


def block_mask(function: Callable[..., Tensor], ids: Tensor, rows: int | None = None) -> Any:
    return flex.create_block_mask(function, rows, None, ids.shape[1], ids.shape[1], device="cpu", BLOCK_SIZE=4)


def check(call: Callable[..., Any], model: Model, seen: Tensor, ids: Tensor, **given: Any) -> None:
    batch = Batch("flex", {"input_ids": ids, **given}, torch.ones_like(ids, dtype=torch.bool))
    twin = dense_twin(model, seen)
    wanted, found = compare.step(twin, twin, batch), compare.step(call, model, batch)
    run = sp_compile.last_run()
    assert run.shared, run.refused
    assert run.physical_tokens < run.logical_tokens
    compare.assert_close(found, wanted, batch.real)


@pytest.mark.parametrize(
    ("attention", "function"), [(plain, windowed), (bent, causal), (grouped, chunked)], ids=["window", "scores", "groups"]
)
def test_functions_are_read(attention: Attention, function: Callable[..., Tensor]) -> None:
    model = spread(Model(attention))
    call = compare.compiled(model, "eager")
    for rows in (star(), forest()):
        ids, _, _ = right_padded(rows)
        check(call, model, pairs(function, ids), ids, block_mask=block_mask(function, ids))
    assert sp_compile.last_run().compiles == 1


def documents_of(ids: Tensor) -> Tensor:
    return (ids < 30).cumsum(-1)


@pytest.mark.parametrize("how", ["mask", "score"])
def test_documents_are_part_of_the_key(how: str) -> None:
    model = spread(Model(plain if how == "mask" else by_score))
    call = compare.compiled(model, "eager")
    ids, _, _ = right_padded(forest())
    documents = documents_of(ids)
    documents[1, 3:] += 1

    def own(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (documents[b, q] == documents[b, k])

    seen = pairs(causal, ids) & (documents[:, None, :, None] == documents[:, None, None, :])
    given = {"block_mask": block_mask(own, ids, len(ids))} if how == "mask" else {"documents": documents}
    check(call, model, seen, ids, **given)


def made_inside(model: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    made = flex.create_block_mask(causal, None, None, q.shape[2], q.shape[2], device="cpu")
    return flex.flex_attention(q, k, v, block_mask=made)  # type: ignore[return-value]


def sorted_scores(model: Any, q: Tensor, k: Tensor, v: Tensor, block_mask: Any, *_: Any) -> Tensor:
    return flex.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s.exp(), block_mask=block_mask)  # type: ignore[return-value]


def with_sums(model: Any, q: Tensor, k: Tensor, v: Tensor, block_mask: Any, *_: Any) -> Tensor:
    out, lse = flex.flex_attention(q, k, v, block_mask=block_mask, return_lse=True)
    return out + lse[..., None]  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Attention, Callable[..., Tensor], str]] = {
    "two-sided": (plain, lambda b, h, q, k: q - k < 3, "later columns"),
    "score function": (sorted_scores, causal, "exp"),
    "sums are used": (with_sums, causal, "more than its output"),
    "made inside": (made_inside, causal, "made inside of the compiled function"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_read_is_refused(kind: str) -> None:
    attention, function, reason = REFUSED[kind]
    model = spread(Model(attention))
    call = compare.compiled(model, "eager")
    ids, _, _ = right_padded(star())
    with pytest.raises(Exception, match=reason) as raised, torch.no_grad():
        call(ids, block_mask(function, ids))
    assert "cannot share prefixes" in str(raised.value)


def test_tables_that_leave_blocks_out() -> None:
    """Put together by hand: the function alone is not what the dense run computes."""
    model = spread(Model(plain))
    ids, _, _ = right_padded(star())
    right = block_mask(causal, ids)
    few = torch.ones_like(right.kv_num_blocks)
    diagonal = torch.arange(few.shape[-1], dtype=torch.int32)[None, None, :, None].expand_as(right.kv_indices).contiguous()
    wrong = flex.BlockMask.from_kv_blocks(few, diagonal, BLOCK_SIZE=4, mask_mod=causal, seq_lengths=(ids.shape[1], ids.shape[1]))
    call = torch.compile(model, backend=shared_prefix, options={"inner": "eager", "min_sharing": 1.0})
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for mask in (right, wrong, right):
            found = call(ids, mask)[0]
            run = sp_compile.last_run()
            assert run.shared == (mask is right)
            if mask is right:  # run eagerly, torch itself does not read the tables
                assert compare.relative(found, dense_twin(model, pairs(causal, ids))(ids)[0]) <= compare.LOGITS
    assert any("block tables" in str(w.message) for w in caught)


def test_of_a_library() -> None:
    """Hugging Face makes the BlockMask inside of its model; windows and padding are part of it."""
    model, other = (families.make("mistral", attn_implementation=name) for name in ("flex_attention", "sdpa"))
    call = compare.compiled(model, "eager")
    ids, mask, labels = right_padded(forest())
    batch = Batch("flex", {"input_ids": ids, "attention_mask": mask, "labels": labels}, mask.bool())
    collector = sys.modules["transformers.utils.output_capturing"]._active_collector
    try:
        wanted, found = compare.step(other, other, batch), compare.step(call, model, batch)
    finally:
        # Under this backend, Dynamo's bytecode leaves the library's switch for recording outputs on: later models would record none.
        collector.compiling, collector.global_var = False, None
    compare.assert_shared(sp_compile.last_run(), batch)
    compare.assert_close(found, wanted, batch.real)


def test_packed() -> None:
    """Inside of `share` the indices are those of the pack, and become the rows' columns."""
    model = spread(Model(plain))
    ids, _, _ = right_padded(forest())
    packed = sp_compile.pack({"input_ids": ids}, positions=None)
    call = torch.compile(model, backend=shared_prefix, options={"inner": "eager"})
    with sp_compile.share(packed.forest):
        found = call(packed.inputs["input_ids"], block_mask(windowed, packed.inputs["input_ids"]))[0]
    wanted = F.pad(dense_twin(model, pairs(windowed, ids))(ids)[0], (0, 0))
    assert compare.relative(sp_compile.unpack(found, packed.forest), wanted) <= compare.LOGITS
