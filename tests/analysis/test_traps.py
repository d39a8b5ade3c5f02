"""Traps of real captures: models that look shareable and are not, or the other way round, through Dynamo and the whole backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from sp_compile.analysis.interpret import Analysis
from sp_compile.errors import CannotShare
from tests.passes.harness import Rewrite, Tiny, TinyHidden, batch, compare, rewrite, run, targets

TOLERANCE = 1e-10


class Between(nn.Module):
    """Embedding, `between(hidden, ids)`, attention and head."""

    def __init__(self, between: Callable[[Tensor, Tensor], Tensor], mask: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.inner = Tiny(lambda logits, ids: logits)
        self.between, self.mask = between, mask

    def forward(self, ids: Tensor, *more: Tensor) -> Tensor:
        x = self.between(self.inner.words(ids), *more, ids) if more else self.between(self.inner.words(ids), ids)
        rows, columns, size = x.shape
        q, k, v = (layer(x).view(rows, columns, 2, size // 2).transpose(1, 2) for layer in (self.inner.q, self.inner.k, self.inner.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.inner.head(x + mixed.transpose(1, 2).reshape(rows, columns, size))


def refused(model: nn.Module, *inputs: Any) -> CannotShare:
    with pytest.raises(BackendCompilerFailed) as caught:
        run(model, *inputs)
    found = caught.value.inner_exception
    assert isinstance(found, CannotShare), found
    assert "internal error" not in found.reason, found
    return found


def exact(model: nn.Module, *inputs: Any) -> Rewrite:
    """Asserts that the packed model gives the dense results and gradients."""
    error, found = compare(model, *inputs)
    assert error < TOLERANCE
    return found


# -- may be shared -----------------------------------------------------------------------------------------------------------------


def number_of_columns(x: Tensor, ids: Tensor) -> Tensor:
    return x / ids.shape[1]


def number_and_size(x: Tensor, ids: Tensor) -> Tensor:
    return x.view(ids.shape[0], ids.shape[1], 2, 4).flatten(2) / ids.shape[1]


def range_as_value(x: Tensor, ids: Tensor) -> Tensor:
    return x * torch.arange(ids.shape[1])[None, :, None].double().cos()


def range_as_index(x: Tensor, ids: Tensor) -> Tensor:
    table = torch.linspace(0, 1, 64, dtype=torch.float64)
    return x + table[torch.arange(ids.shape[1])][:, None]


def rows_first(x: Tensor, ids: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).sin().view(x.shape)


def columns_first_and_back(x: Tensor, ids: Tensor) -> Tensor:
    columns, rows, size = x.transpose(0, 1).shape
    return x.transpose(0, 1).reshape(-1, size).sin().view(columns, rows, size).transpose(0, 1)


def parts_written(x: Tensor, ids: Tensor) -> Tensor:
    whole = x.new_empty(*x.shape[:2], 8)
    whole[..., :4] = x[..., 4:] * 2
    whole[..., 4:] = x[..., :4]
    return whole


def added_in_place(x: Tensor, ids: Tensor) -> Tensor:
    x = x * 2
    y = x.view(-1, 8)
    x += 1
    y *= 3
    return x


def counted_tokens(x: Tensor, ids: Tensor) -> Tensor:
    """Positions counted over real tokens."""
    real = ids > 3
    positions = (real.long().cumsum(-1) - 1).masked_fill(~real, 1)
    return x + F.one_hot(positions % 8, 8)


@pytest.mark.parametrize(
    "between",
    [
        number_of_columns,
        number_and_size,
        range_as_value,
        range_as_index,
        rows_first,
        columns_first_and_back,
        parts_written,
        added_in_place,
        counted_tokens,
    ],
)
def test_shared(between: Callable[[Tensor, Tensor], Tensor]) -> None:
    exact(Between(between), batch())


@pytest.mark.parametrize("between", [parts_written, added_in_place])
def test_writes_stay_in_order(between: Callable[[Tensor, Tensor], Tensor]) -> None:
    """In-place ops run on physical tokens, once, in the order of the model, and none is dropped as unused."""
    found = rewrite(Between(between), batch())
    dense, packed = targets(found.dense.graph), targets(found.after["share_prefixes"])
    names = ("setitem", "iadd", "imul")
    assert [name for name in packed if name in names] == [name for name in dense if name in names]
    assert not [entry for entry in found.context.unpacked if not entry.endswith("for output")]


def test_attention_output_is_viewed() -> None:
    """`.view` needs the packed attention to be laid out as the dense one."""

    def use(hidden: Tensor, head: nn.Module, ids: Tensor) -> Tensor:
        return head(hidden.view(-1, 8)).view(*ids.shape, -1)

    class Viewed(TinyHidden):
        def hidden(self, ids: Tensor) -> Tensor:
            x = self.words(ids)
            q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()
            return x + mixed.view(*ids.shape, 8)

    exact(Viewed(use), batch())


def test_labels_have_symbols_of_their_own() -> None:
    """Dynamo ties labels to nothing; they stay outside of what rows must agree in."""

    def use(logits: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), shifted.reshape(-1))

    ids = batch()
    labels = ids.clone()
    labels[:2, :3] = -100
    found = exact(Tiny(use), ids, labels)
    assert _names(found.context.analysis, found.context.keys) == ["ids"]


def _names(analysis: Analysis, numbers: list[int]) -> list[str]:
    inputs = [node for node in analysis.graph.nodes if node.op == "placeholder"]
    return [inputs[number].name.removeprefix("l_").removesuffix("_") for number in numbers]


@pytest.mark.parametrize("write", ["copy_", "setitem", "add_"])
def test_what_reaches_memory_is_a_key(write: str) -> None:
    """Rows with equal ids but other token types share nothing, however the types got in."""

    def between(x: Tensor, types: Tensor, ids: Tensor) -> Tensor:
        kept = torch.zeros_like(ids)
        if write == "setitem":
            kept[:] = types
        else:
            getattr(kept, write)(types)
        return x + F.one_hot(kept.cumsum(1) % 8, 8)

    ids = batch(prefix=14)
    types = torch.zeros_like(ids)
    types[1:, 2:] = 1
    found = exact(Between(between), ids, types)
    assert len(found.context.keys) == 2


def test_positions_with_jumps_start_documents() -> None:
    """Attention inside of documents, found by jumps of the positions as libraries find them."""

    class Packed(Tiny):
        def forward(self, ids: Tensor, positions: Tensor) -> Any:
            x = self.words(ids)
            jumps = torch.diff(positions, prepend=positions[:, :1] - 1) != 1
            document = jumps.cumsum(-1)
            place = torch.arange(ids.shape[1])
            mask = (place[None, :] <= place[:, None]) & (document[:, :, None] == document[:, None, :])
            q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
            return self.head(x + mixed.transpose(1, 2).flatten(2))

    ids = batch()
    positions = torch.arange(14).expand(4, -1).clone()
    positions[:2, 4:] -= 4
    positions[2, 9:] -= 9
    found = exact(Packed(None), ids, positions)  # type: ignore[arg-type]
    assert len(found.context.keys) == 2


# -- may not ------------------------------------------------------------------------------------------------------------------------


def columns_first(x: Tensor, ids: Tensor) -> Tensor:
    """Column-major order read back as row-major: every token gets another's value."""
    return x.transpose(0, 1).reshape(x.shape)


def rows_counted(x: Tensor, ids: Tensor) -> Tensor:
    return x + torch.arange(ids.shape[0])[:, None, None]


def rows_flipped(x: Tensor, ids: Tensor) -> Tensor:
    return x + x.flip(0)


def one_row_written(x: Tensor, ids: Tensor) -> Tensor:
    x = x.clone()
    x[0] = 0
    return x


def column_selected(x: Tensor, ids: Tensor) -> Tensor:
    return x + x[:, :1]


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (columns_first, "cuts or reorders tokens"),
        (rows_counted, "numbers the rows"),
        (rows_flipped, "flip moves tokens along dimension 0"),
        (one_row_written, "writes to a part of the rows or columns"),
        (column_selected, "carry different tokens along one dimension"),
    ],
)
def test_not_shared(between: Callable[[Tensor, Tensor], Tensor], said: str) -> None:
    assert said in refused(Between(between), batch()).reason


def test_mask_changed_in_place() -> None:
    """The attention was proved by what the mask had been."""

    class Changed(Tiny):
        def forward(self, ids: Tensor, *more: Tensor) -> Tensor:
            x = self.words(ids)
            place = torch.arange(ids.shape[1])
            kept = more[0].clone()
            seen = (place <= place[:, None]) & kept.bool()[:, None, None, :]
            kept.zero_()
            q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            return self.head(x + mixed.transpose(1, 2).flatten(2)) * more[0][..., None] + kept[..., None]

    class ChangedInput(Changed):
        def forward(self, ids: Tensor, *more: Tensor) -> Tensor:
            mask = more[0]
            place = torch.arange(ids.shape[1])
            seen = (place <= place[:, None]) & mask.bool()[:, None, None, :]
            mask.mul_(0).add_(1)
            x = self.words(ids)
            q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            return self.head(x + F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2))

    ids = batch()
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    exact(Changed(lambda logits, ids: logits), ids, mask)
    assert "changed in place" in refused(ChangedInput(lambda logits, ids: logits), ids, mask.clone()).reason


def test_dense_result_of_what_is_not_shared() -> None:
    model = Between(one_row_written)
    ids = batch()
    compiled = torch.compile(model, backend="shared_prefix", options={"inner": "eager"})
    with pytest.warns(UserWarning, match="The dense graph runs"):
        got = compiled(ids)
    assert torch.equal(got, model(ids))
