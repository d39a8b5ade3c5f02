"""Attention that models write out themselves is found in every common spelling, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from sp_compile.capture.graphs import placeholders
from sp_compile.capture.torch_attention import mark_attention
from tests.capture.handwritten import INF, Attention, Model, batch, compare, merge, refusal
from tests.capture.recording import capture, sites

FORMS: dict[str, Attention] = {}


def form(function: Attention) -> Attention:
    """Registers a function of (model, q, k, v, mask) on [B, H, L, D]."""
    FORMS[function.__name__] = function
    return function


def later(q: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)


def fold(x: Tensor) -> Tensor:
    """[B, H, L, D] -> [B * H, L, D]"""
    return x.reshape(-1, *x.shape[2:])


@form
def nano_gpt(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    weights = (q @ k.transpose(-2, -1)) * (1.0 / k.size(-1) ** 0.5)
    weights = weights.masked_fill(model.tril[:, :, : q.size(2), : q.size(2)] == 0, float("-inf"))
    return merge(F.dropout(F.softmax(weights, dim=-1), 0.0, True) @ v)


@form
def masked_in_place_then_scaled(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = q @ k.transpose(2, 3)
    scores.masked_fill_(model.triu.bool()[: q.shape[2], : q.shape[2]], -torch.inf)
    return merge(torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1) @ v)


@form
def gpt2(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / torch.full([], v.size(-1) ** 0.5, dtype=scores.dtype)
    queries, keys = q.size(-2), k.size(-2)
    shown = model.tril[:, :, keys - queries : keys, :keys].bool()
    lowest = torch.finfo(scores.dtype).min
    scores = torch.where(shown, scores.to(scores.dtype), torch.full([], lowest, dtype=scores.dtype))
    if mask is not None:
        scores = scores + (1.0 - mask[:, None, None, :].to(scores.dtype)) * lowest
    return merge(torch.matmul(F.softmax(scores, dim=-1).type(v.dtype), v))


@form
def gpt_neox(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    rows, heads, columns, width = q.shape
    scores = torch.zeros(rows * heads, columns, columns, dtype=q.dtype)
    scores = torch.baddbmm(scores, fold(q), fold(k).transpose(1, 2), beta=1.0, alpha=width**-0.5).view(rows, heads, columns, columns)
    lowest = torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype)
    scores = torch.where(model.tril[:, :, :columns, :columns].bool(), scores, lowest)
    return merge(F.softmax(scores, -1).to(v.dtype) @ v)


@form
def bloom(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    rows, heads, columns, width = q.shape
    keys = k.permute(0, 1, 3, 2).reshape(rows * heads, width, columns)
    places = model.slopes[:, None, None] * torch.arange(columns)[None, None, :]
    alibi = places[None].expand(rows, heads, 1, columns).reshape(rows * heads, 1, columns)
    scores = alibi.baddbmm(batch1=fold(q), batch2=keys, beta=1.0, alpha=width**-0.5).view(rows, heads, columns, columns)
    scores = torch.masked_fill(scores, later(q)[None, None], torch.finfo(scores.dtype).min)
    weights = F.softmax(scores, -1, dtype=torch.float64).to(q.dtype).view(rows * heads, columns, columns)
    return merge((weights @ fold(v)).view(rows, heads, columns, width))


@form
def opt(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    rows, heads, columns, width = q.shape
    scores = torch.bmm(fold(q * width**-0.5), fold(k).transpose(1, 2)).view(rows, heads, columns, columns)
    scores = scores + torch.triu(torch.full((columns, columns), torch.finfo(q.dtype).min, dtype=q.dtype), 1)
    weights = F.softmax(scores.view(rows * heads, columns, columns), dim=-1)
    y = torch.bmm(F.dropout(weights, p=0.1, training=False), fold(v))
    return y.view(rows, heads, columns, width).transpose(1, 2).reshape(rows, columns, heads * width)


@form
def einsum(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.size(-1) ** -0.5
    return merge(torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(later(q), -INF).softmax(-1), v))


@form
def einsum_heads_last(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    hidden = later(q)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = torch.where(hidden, -1e30, torch.einsum("blhe,bshe->bhls", q, k) * 0.3)
    return torch.einsum("bhls,bshd->blhd", torch.softmax(scores, dim=-1), v).flatten(2)


@form
def einsum_with_dots(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", q, k).masked_fill(later(q), -INF)
    return merge(torch.einsum("... i j, ... j d -> ... i d", scores.softmax(-1), v))


@form
def einsum_multi_query(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.einsum("bhid,bjd->bhij", q, k[:, 0]).masked_fill(later(q), -INF)
    return merge(torch.einsum("bhij,bjd->bhid", scores.softmax(dim=3), v[:, 1]))


@form
def softcap_and_sum_in_place(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = torch.tanh(torch.matmul(q * 0.5, k.swapaxes(-1, -2)) / 3.0) * 3.0
    scores += torch.triu(torch.full(scores.shape[-2:], -INF, dtype=scores.dtype), 1)
    return merge(scores.softmax(-1) @ v)


@form
def sinks(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = (q @ k.transpose(2, 3) * 0.3).masked_fill(later(q), -INF)
    column = model.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    joined = torch.cat([scores, column], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    return merge(F.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1] @ v)


@form
def grouped_repeat_interleave(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    k, v = (t[:, :2].repeat_interleave(2, dim=1) for t in (k, v))
    return nano_gpt(model, q, k, v, mask)


@form
def grouped_expand(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    rows, heads, columns, width = q.shape
    k, v = (t[:, :2, None].expand(rows, 2, 2, columns, width).reshape(rows, heads, columns, width) for t in (k, v))
    return nano_gpt(model, q, k, v, mask)


@form
def learned_temperature(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = (q @ k.mT) * model.sinks.view(1, -1, 1, 1) - 1e9 * later(q).to(q.dtype)
    return merge(scores.softmax(-1) @ v)


@form
def sum_of_two_products(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return merge(((q @ k.mT) + (k @ q.mT)).masked_fill(later(q), -INF).softmax(-1) @ v)


@form
def two_masks(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = (q @ k.mT).masked_fill(later(q), -1e9)
    if mask is not None:
        scores = scores.masked_fill(mask[:, None, None, :] == 0, -1e9)
    return merge(torch.nan_to_num(scores.softmax(-1)) @ v)


@form
def weights_masked_again(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    hidden = later(q)
    if mask is not None:
        hidden = hidden | ~mask[:, None, None, :].bool()
    scores = (q @ k.transpose(-1, -2)).masked_fill(hidden, torch.finfo(q.dtype).min)
    return merge(torch.softmax(scores, -1).masked_fill(hidden, 0.0) @ v)


def one_head_at_a_time(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    parts = []
    for q_, k_, v_ in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
        scores = (q_ @ k_.transpose(-2, -1) * 0.4).masked_fill(model.tril[0, 0][: q_.shape[1], : q_.shape[1]] == 0, -1e9)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, :] == 0, -1e9)
        parts.append(F.softmax(scores, dim=-1) @ v_)
    return torch.cat(parts, -1)


def captured(*attentions: Attention, padding: str | None = None) -> GraphModule:
    torch.manual_seed(0)
    ids, mask = batch(padding)
    return capture(Model(*attentions), *((ids, mask) if padding else (ids,)))


def site_of(attention: Attention) -> Node:
    (node,) = sites(mark_attention(captured(attention)), "attention_site")
    return node


@pytest.mark.parametrize("name", FORMS)
def test_form_equals_dense(name: str) -> None:
    assert len(compare(FORMS[name])) == 1


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("attention", [gpt2, two_masks, weights_masked_again])
def test_form_with_padding_equals_dense(attention: Attention, padding: str) -> None:
    assert len(compare(attention, padding=padding)) == 1


@pytest.mark.parametrize("padding", [None, "right"])
def test_single_heads_equal_dense(padding: str | None) -> None:
    assert len(compare(one_head_at_a_time, padding=padding)) == 4


def test_layers_of_different_forms_equal_dense() -> None:
    calls = compare(nano_gpt, opt, einsum_heads_last, sinks)
    assert [call.sinks is not None for call in calls] == [False, False, False, True]


def test_one_site_per_layer() -> None:
    graph = captured(*FORMS.values())
    before = [node.name for node in graph.graph.nodes]
    marked = mark_attention(graph)
    assert len(sites(marked, "attention_site")) == len(FORMS)
    assert [node.name for node in graph.graph.nodes] == before, "the captured graph was changed"
    assert not sites(graph, "attention_site")


def test_inputs_stay_as_they_were() -> None:
    graph = captured(nano_gpt)
    old, new = placeholders(graph.graph), placeholders(mark_attention(graph).graph)
    assert [n.name for n in new] == [n.name for n in old]
    for a, b in zip(old, new, strict=True):
        assert a.meta["example_value"] is b.meta["example_value"]
        assert getattr(a, "_dynamo_source", None) is getattr(b, "_dynamo_source", None)


def test_marked_graph_computes_the_same() -> None:
    """A marker passes its dense value on, through every layout that the matcher moves it to."""
    torch.manual_seed(0)
    model = Model(nano_gpt, opt, sinks, einsum_heads_last, one_head_at_a_time)
    ids, _ = batch()
    torch._dynamo.reset()
    run = torch.compile(model, backend=lambda graph, values: mark_attention(graph), dynamic=True, fullgraph=True)
    torch.testing.assert_close(run(ids), model(ids), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "attention, scale, softcap",
    [(nano_gpt, 0.5, None), (masked_in_place_then_scaled, 0.5, None), (opt, 1.0, None), (softcap_and_sum_in_place, 1.0, 3.0)],
)
def test_site_scale_and_softcap(attention: Attention, scale: float, softcap: float | None) -> None:
    given = site_of(attention).kwargs
    assert given["scale"] == pytest.approx(scale)
    assert given["softcap"] == softcap
    assert given["dropout"] == 0.0
    assert given["is_causal"] is False
    assert given["window"] is None


def test_site_dropout() -> None:
    def attention(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return merge(F.dropout((q @ k.mT).masked_fill(later(q), -INF).softmax(-1), 0.25) @ v)

    assert site_of(attention).kwargs["dropout"] == 0.25
    assert "random numbers are drawn per token" in refusal(attention)


def test_site_mask_of_conditions_is_boolean() -> None:
    mask = site_of(two_masks).args[4]
    assert isinstance(mask, Node)
    assert mask.target == "logical_not"


def test_site_mask_of_sums_is_the_sum() -> None:
    mask = site_of(opt).args[4]
    assert isinstance(mask, Node)
    assert mask.target is torch.triu


def test_upcast_scores_keep_float32() -> None:
    def attention(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        scores = (q.float() @ k.float().mT).masked_fill(later(q), -INF)
        return merge(torch.softmax(scores, -1, dtype=torch.float32).type_as(v) @ v).double()

    v = site_of(attention).args[3]
    assert isinstance(v, Node)
    assert (v.target, v.args[1]) == ("to", torch.float32)


NEAR: dict[str, Attention] = {
    "relu": lambda model, q, k, v, mask: merge((q @ k.mT).relu().masked_fill(later(q), -INF).softmax(-1) @ v),
    "softmax over queries": lambda model, q, k, v, mask: merge((q @ k.mT).masked_fill(later(q), -INF).softmax(-2) @ v),
    "bent mask": lambda model, q, k, v, mask: merge(torch.tanh((q @ k.mT).masked_fill(later(q), -1e9)).softmax(-1) @ v),
    "mask made weak": lambda model, q, k, v, mask: merge(((q @ k.mT).masked_fill(later(q), -1e9) / 1e8).softmax(-1) @ v),
    "mask turned round": lambda model, q, k, v, mask: merge(((q @ k.mT).masked_fill(later(q), -1e9) * -1).softmax(-1) @ v),
    "weak fill": lambda model, q, k, v, mask: merge((q @ k.mT).masked_fill(later(q), -9.0).softmax(-1) @ v),
    "scaled by key": lambda model, q, k, v, mask: merge(
        ((q @ k.mT) * model.triu[0, : q.shape[2]]).masked_fill(later(q), -INF).softmax(-1) @ v
    ),
    "weights masked alone": lambda model, q, k, v, mask: merge((q @ k.mT).softmax(-1).masked_fill(later(q), 0.0) @ v),
    "weights bent": lambda model, q, k, v, mask: merge((q @ k.mT).masked_fill(later(q), -INF).softmax(-1) ** 2 @ v),
    "transposed weights": lambda model, q, k, v, mask: merge((q @ k.mT).masked_fill(later(q), -INF).softmax(-1).mT @ v),
    "among heads": lambda model, q, k, v, mask: (
        torch.softmax(q.transpose(1, 2) @ k.transpose(1, 2).mT, -1).matmul(v.transpose(1, 2)).flatten(2)
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_miss_is_left_alone(name: str) -> None:
    graph = captured(NEAR[name])
    assert mark_attention(graph) is graph


def written_through_a_view(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = (q @ k.mT).masked_fill(later(q), -INF)
    scores[:, 0].mul_(2.0)
    return merge(scores.softmax(-1) @ v)


def written_by_index(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = (q @ k.mT).masked_fill(later(q), -INF)
    scores[:, :, :, 0] = 1.0
    return merge(scores.softmax(-1) @ v)


def queries_overwritten(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q = q * 1
    weights = (q @ k.mT).masked_fill(later(q), -INF).softmax(-1)
    q.mul_(2.0)
    return merge(weights @ v)


def mask_overwritten(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    hidden = later(q)
    scores = (q @ k.mT).masked_fill(hidden, -INF)
    hidden.logical_not_()
    return merge(scores.softmax(-1) @ v)


@pytest.mark.parametrize("attention", [written_through_a_view, written_by_index, queries_overwritten, mask_overwritten])
def test_values_written_in_place_are_left_alone(attention: Attention) -> None:
    graph = captured(attention)
    assert mark_attention(graph) is graph


def test_attention_without_mask_is_refused() -> None:
    text = refusal(lambda model, q, k, v, mask: merge((q @ k.mT).softmax(-1) @ v))
    assert "sees later tokens" in text


def test_weights_that_are_returned_are_refused() -> None:
    def attention(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        weights = (q @ k.mT).masked_fill(later(q), -INF).softmax(-1)
        return merge(weights @ v) + weights.amax(-1).amax(1)[..., None]

    refusal(attention)


def test_body_of_a_marked_call_is_not_marked_again() -> None:
    def attention(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        y = ((q @ k.mT).masked_fill(later(q), -INF).softmax(-1) @ v).transpose(1, 2)
        site = torch.ops.sp_compile.attention_site(
            y, q, k, v, None, None, None, scale=1.0, is_causal=True, window=None, softcap=None, dropout=0.0
        )
        return site.flatten(2)  # type: ignore[no-any-return]

    graph = captured(attention)
    assert mark_attention(graph) is graph
