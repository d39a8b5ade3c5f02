"""The dense graph becomes one on physical tokens, and only where every step of it was proved."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from sp_compile.ops import tokens
from sp_compile.passes.add_forest_masks import AddForestMasks
from sp_compile.passes.stage import Source, input_of
from sp_compile.region import Region
from tests.passes.harness import Tiny, batch, compare, rewrite, run, show, targets

PASS = "share_prefixes"
TOLERANCE = 1e-10


class Positions(Tiny):
    """With learned positions, a window and padding."""

    def __init__(self, use: Callable[..., Any] = lambda logits, ids, *more: logits, window: int = 4) -> None:
        super().__init__(use)
        self.places = nn.Embedding(32, 8, dtype=torch.float64)
        self.window = window

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, columns = ids.shape
        place = torch.arange(columns)
        x = self.words(ids) + self.places(place)
        q, k, v = (layer(x).view(rows, columns, 2, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        seen = (place <= place[:, None]) & (place > place[:, None] - self.window)
        if mask is not None:
            seen = seen & mask.bool()[:, None, None, :]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return x + mixed.transpose(1, 2).reshape(rows, columns, 8)

    def forward(self, ids: Tensor, *more: Tensor) -> Any:
        return self.use(self.head(self.hidden(ids, *more[:1])), ids, *more)


def logits(logits: Tensor, *more: Tensor) -> Tensor:
    return logits


def real_logits(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """What is computed for padding is nobody's business."""
    return logits * mask[..., None]


def _mask(ids: Tensor) -> Tensor:
    """Padding at the end of two rows, and a hole in one."""
    mask = torch.ones_like(ids)
    mask[:2, -3:] = 0
    mask[0, 3] = 0
    return mask


def _named(text: str) -> str:
    """Dynamo's names for the sizes, which differ between versions, replaced."""
    symbols = list(dict.fromkeys(re.findall(r"\bs\d+\b", text)))
    for symbol, name in zip(symbols, ("rows", "columns"), strict=True):
        text = re.sub(rf"\b{symbol}\b", name, text)
    return text


def test_model_becomes_packed() -> None:
    found = rewrite(Tiny(logits), batch())
    assert_expected_inline(
        _named(show(found.before[PASS], "embedding")),
        """\
embedding = embedding(l_ids_, l_self_modules_words_parameters_weight_, None, None, 2.0, False, False)
linear = linear(embedding, l_self_modules_q_parameters_weight_, l_self_modules_q_parameters_bias_)
view = view(linear, rows, columns, 2, 4)
q = transpose(view, 1, 2)
linear_1 = linear(embedding, l_self_modules_k_parameters_weight_, l_self_modules_k_parameters_bias_)
view_1 = view(linear_1, rows, columns, 2, 4)
k = transpose(view_1, 1, 2)
linear_2 = linear(embedding, l_self_modules_v_parameters_weight_, l_self_modules_v_parameters_bias_)
view_2 = view(linear_2, rows, columns, 2, 4)
v = transpose(view_2, 1, 2)
mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
transpose_3 = transpose(mixed, 1, 2)
reshape = reshape(transpose_3, rows, columns, 8)
add = add(embedding, reshape)
logits = linear(add, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
return [logits]
""",
    )
    assert_expected_inline(
        show(found.after[PASS], "pack"),
        """\
pack = pack(l_ids_, forest_row, forest_column, forest_index, 'B L')
embedding = embedding(pack, l_self_modules_words_parameters_weight_, None, None, 2.0, False, False)
linear = linear(embedding, l_self_modules_q_parameters_weight_, l_self_modules_q_parameters_bias_)
view = view(linear, 1, t, 2, 4)
q = transpose(view, 1, 2)
linear_1 = linear(embedding, l_self_modules_k_parameters_weight_, l_self_modules_k_parameters_bias_)
view_1 = view(linear_1, 1, t, 2, 4)
k = transpose(view_1, 1, 2)
linear_2 = linear(embedding, l_self_modules_v_parameters_weight_, l_self_modules_v_parameters_bias_)
view_2 = view(linear_2, 1, t, 2, 4)
v = transpose(view_2, 1, 2)
shared_attention = shared_attention(q, k, v, None, None, None, None, scale=0.5, window=None, chunk=None, softcap=None)
transpose = transpose(shared_attention, 1, 2)
contiguous = contiguous(transpose)
transpose_1 = transpose(contiguous, 1, 2)
transpose_3 = transpose(transpose_1, 1, 2)
reshape = reshape(transpose_3, 1, t, 8)
add = add(embedding, reshape)
logits = linear(add, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
unpack = unpack(logits, forest_index, 'B L _')
return [unpack]
""",
    )


def test_sizes_are_physical_and_positions_are_gathered() -> None:
    found = rewrite(Positions(), batch())
    assert_expected_inline(
        show(found.after[PASS], "place"),
        """\
place = arange(l)
pack = pack(l_ids_, forest_row, forest_column, forest_index, 'B L')
embedding = embedding(pack, l_self_modules_words_parameters_weight_, None, None, 2.0, False, False)
pack_1 = pack(place, forest_row, forest_column, forest_index, 'L')
embedding_1 = embedding(pack_1, l_self_modules_places_parameters_weight_, None, None, 2.0, False, False)
add = add(embedding, embedding_1)
linear = linear(add, l_self_modules_q_parameters_weight_, l_self_modules_q_parameters_bias_)
view = view(linear, 1, t, 2, 4)
q = transpose(view, 1, 2)
linear_1 = linear(add, l_self_modules_k_parameters_weight_, l_self_modules_k_parameters_bias_)
view_1 = view(linear_1, 1, t, 2, 4)
k = transpose(view_1, 1, 2)
linear_2 = linear(add, l_self_modules_v_parameters_weight_, l_self_modules_v_parameters_bias_)
view_2 = view(linear_2, 1, t, 2, 4)
v = transpose(view_2, 1, 2)
shared_attention = shared_attention(q, k, v, None, None, None, None, scale=0.5, window=4, chunk=None, softcap=None)
transpose = transpose(shared_attention, 1, 2)
contiguous = contiguous(transpose)
transpose_1 = transpose(contiguous, 1, 2)
transpose_3 = transpose(transpose_1, 1, 2)
reshape = reshape(transpose_3, 1, t, 8)
add_1 = add(add, reshape)
linear_3 = linear(add_1, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
unpack = unpack(linear_3, forest_index, 'B L _')
return [unpack]
""",
    )


def test_inputs_are_named() -> None:
    graph = rewrite(Tiny(logits), batch()).after[PASS]
    found = [input_of(node).source for node in graph.nodes if node.op == "placeholder"]
    assert found[:3] == [Source.TOKENS, Source.ROWS, Source.COLUMNS]
    assert found[-3:] == [Source.FOREST] * 3
    assert set(found[3:-3]) == {Source.ARGUMENT}


def test_loss_stays_on_rows() -> None:
    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    found = rewrite(Tiny(loss), batch())
    names = targets(found.after[PASS])
    assert names.index("unpack") < names.index("cross_entropy")
    assert names.count("unpack") == 1
    assert found.context.unpacked == []


def test_every_packed_node_is_counted() -> None:
    found = rewrite(Tiny(logits), batch())
    calls = [node for node in found.after[PASS].nodes if node.op in ("call_function", "call_method")]
    conversions = [node for node in calls if node.target in (tokens.pack, tokens.unpack)]
    assert len(conversions) == 2
    assert len(calls) > 12


@pytest.mark.parametrize("padded", [False, True])
def test_keys_and_padding(padded: bool) -> None:
    ids = batch()
    found = rewrite(Positions(), ids, *([_mask(ids)] if padded else []))
    assert len(found.context.keys) == (2 if padded else 1)
    assert found.context.padding == ([found.context.keys[1]] if padded else [None])


# -- must not be rewritten ---------------------------------------------------------------------------------------------------------


class Mean(Tiny):
    def hidden(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        x = x + x.mean(1, keepdim=True)
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Unmasked(Tiny):
    def hidden(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Dropped(Tiny):
    def hidden(self, ids: Tensor) -> Tensor:
        return F.dropout(super().hidden(ids), 0.5)


@pytest.mark.parametrize(("model", "said"), [(Mean, "reduces over tokens"), (Unmasked, "sees later tokens"), (Dropped, "random numbers")])
def test_must_not_rewrite(model: type[Tiny], said: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=said):
        run(model(logits), batch())


def test_what_is_not_shared_stays_on_rows() -> None:
    """A mean over tokens behind the last attention runs on rows; the layers before it are packed."""

    def centred(logits: Tensor, ids: Tensor) -> Tensor:
        return logits - logits.mean(1, keepdim=True)

    error, found = compare(Tiny(centred), batch())
    assert error < TOLERANCE
    names = targets(found.after[PASS])
    assert names.index("shared_attention") < names.index("unpack") < names.index("mean") < names.index("sub")


# -- numbers, and faults that they show --------------------------------------------------------------------------------------------


def _columns_off_by_one(name: str, tensor: Tensor) -> Tensor:
    return (tensor + 1).clamp(max=13) if name == "column" else tensor


def _index_shifted(name: str, tensor: Tensor) -> Tensor:
    return tensor.roll(1, 1) if name == "index" else tensor


def _rows_swapped(name: str, tensor: Tensor) -> Tensor:
    return 3 - tensor if name == "row" else tensor


def _ends_short(name: str, tensor: Tensor) -> Tensor:
    return (tensor - 1).clamp(min=1) if name == "end" else tensor


@pytest.mark.parametrize("padded", [False, True])
def test_numbers(padded: bool) -> None:
    """Results and all gradients equal the dense ones."""
    ids = batch()
    error, _ = compare(Positions(real_logits), ids, _mask(ids)) if padded else compare(Positions(), ids)
    assert error < TOLERANCE


@pytest.mark.parametrize("fault", [_columns_off_by_one, _index_shifted, _rows_swapped, _ends_short])
def test_numbers_show_wrong_forest_tensors(fault: Callable[[str, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    right = Region._forest_tensor

    def wrong(self: Region, forest: Any, name: str, *more: Any) -> Tensor:
        return fault(name, right(self, forest, name, *more))

    monkeypatch.setattr(Region, "_forest_tensor", wrong)
    error, _ = compare(Positions(), batch())
    assert error > 1e-3


@pytest.mark.parametrize("term", ["window", "padding"])
def test_numbers_show_a_dropped_mask_term(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = AddForestMasks.__call__

    def wrong(self: AddForestMasks, graph: torch.fx.Graph, context: Any) -> Any:
        result = right(self, graph, context)
        for node in result.graph.nodes:
            if node.target is torch.ops.sp_compile.attention.default:
                if term == "window":
                    node.kwargs = {**node.kwargs, "window": None}
                else:
                    node.args = (*node.args[:5], None, *node.args[6:])
        return result

    monkeypatch.setattr(AddForestMasks, "__call__", wrong)
    monkeypatch.setattr("sp_compile.region.find_padding", lambda *_: None)  # else padded tokens are not there at all
    ids = batch()
    error, _ = compare(Positions(real_logits), ids, _mask(ids))
    assert error > 1e-3


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, ids, returns: ((z.mean(-1) - returns) ** 2).mean(),
        lambda z, ids, returns: (F.mse_loss(z[..., 0], returns, reduction="none") * returns).sum(),
        lambda z, ids, returns: z * returns[..., None],
    ],
    ids=["value loss", "unreduced", "returned"],
)
def test_fractions_of_the_rows_behind_the_last_layer_are_no_keys(loss: Callable[..., Any]) -> None:
    """Advantages and returns differ from row to row: as keys they would leave nothing to share."""
    returns = torch.rand(4, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    error, found = compare(Tiny(loss), batch(), returns)
    assert error < 1e-10
    assert len(found.context.keys) == 1


def test_fractions_of_the_rows_before_a_layer_are_keys() -> None:
    class Gated(Tiny):
        def forward(self, ids: Tensor, *more: Tensor) -> Any:
            return self.head(self.hidden(ids) + self.q(self.words(ids) * more[0][..., None]))

    error, found = compare(Gated(logits), batch(), torch.rand(4, 14, dtype=torch.float64))
    assert error < 1e-10
    assert len(found.context.keys) == 2


@pytest.mark.parametrize("weigh", [lambda z, w: (z * w[:, None, None]).sum(), lambda z, w: (z.logsumexp(-1) * w[:, None]).sum()])
def test_one_number_per_row_weighs_rows(weigh: Callable[..., Any]) -> None:
    error, found = compare(Tiny(lambda z, ids, w: weigh(z, w)), batch(), torch.rand(4, dtype=torch.float64))
    assert error < 1e-10
    assert len(found.context.keys) == 1
