"""Conversions stand around attention, recurrences get what enters, values travel once, and what needs other ranks is a named error."""

from __future__ import annotations

import dataclasses
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import sp_compile
from sp_compile import backend, options
from sp_compile.errors import InvalidOption, StaleRoute
from sp_compile.layout import Forest
from sp_compile.layout.local_forest import LocalForest
from sp_compile.layout.rank_plans import plan_rank, take_local
from tests.distributed import hybrids
from tests.ops import forests
from tests.passes import harness
from tests.passes.harness import Rewrite, Tiny, batch, show, targets

PASS = "insert_layout_conversions"
CONVERT, GATHER, EXCHANGE = "sp_compile.convert_layout", "sp_compile.gather_tokens", "sp_compile.exchange_rows"


def logits(values: Tensor, ids: Tensor) -> Tensor:
    return values


@dataclasses.dataclass
class OneRank:
    """Stands for a process group of one rank: it sends nothing, so its ops need none."""

    group_name: str = "ranks"

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def rewritten(model: nn.Module) -> tuple[Any, Rewrite, sp_compile.Packed]:
    """One packed call over the ranks of a group of one: result, rewrite, batch."""
    packed = sp_compile.pack({"ids": batch()}, positions=None)
    plan = plan_rank(packed.forest, 1, 0)
    with mock.patch("sp_compile.options._is_group", return_value=True), sp_compile.share(plan):
        result, found = harness.run(model, take_local(packed.inputs["ids"], plan), context_parallel=OneRank())
    assert len(found) == 1
    return result, found[0], packed


def test_attention_between_conversions() -> None:
    _, found, _ = rewritten(Tiny(logits))
    before, after = (show(graph[PASS], since="q") for graph in (found.before, found.after))
    assert_expected_inline(
        _attention(before),
        """\
shared_attention = sp_compile.attention(q, k, v, end, column, None, scale=0.5)
""",
    )
    assert_expected_inline(
        _attention(after),
        """\
convert_layout = sp_compile.convert_layout(q, *route, 2, 'ranks', False)
gather_tokens = sp_compile.gather_tokens(k, 2, 1, 'ranks')
gather_tokens_1 = sp_compile.gather_tokens(v, 2, 1, 'ranks')
query_attention = sp_compile.query_attention(convert_layout, gather_tokens, gather_tokens_1, rank_queries, rank_end, rank_column, scale=0.5)
convert_layout_1 = sp_compile.convert_layout(query_attention, *route, 2, 'ranks', True)
""",
    )


def _attention(text: str) -> str:
    """The package's calls, with the tensors of the route under one name."""
    text = re.sub(r"forest_rank_send, .*?forest_rank_splits", "*route", text).replace("_default", "").replace("forest_", "")
    text = text.replace(", window=None, chunk=None, softcap=None", "").replace(", None, None, None", "")
    return "".join(line + "\n" for line in text.splitlines() if "sp_compile." in line)


def test_numbers_are_those_of_the_rows() -> None:
    model, ids = Tiny(logits), batch()
    got, _, packed = rewritten(model)
    assert torch.allclose(sp_compile.unpack(got, packed.forest), model(ids), rtol=1e-12, atol=1e-12)


def test_two_attentions_of_one_value_send_it_once() -> None:
    class Twice(Tiny):
        def hidden(self, ids: Tensor) -> Tensor:
            x = self.words(ids)
            rows, columns, size = x.shape
            q, k, v = (layer(x).view(rows, columns, 2, size // 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
            mixed = sum(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale) for scale in (0.5, 0.25))
            return x + mixed.transpose(1, 2).reshape(rows, columns, size)

    _, found, _ = rewritten(Twice(logits))
    called = targets(found.after[PASS])
    assert called.count("sp_compile.query_attention") == 2
    assert called.count(GATHER) == 2
    assert called.count(CONVERT) == 3


def test_back_and_in_again_cancels() -> None:
    class Chained(Tiny):
        def hidden(self, ids: Tensor) -> Tensor:
            x = self.words(ids)
            rows, columns, size = x.shape
            q, k, v = (layer(x).view(rows, columns, 2, size // 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
            q = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + mixed.transpose(1, 2).reshape(rows, columns, size)

    got, found, packed = rewritten(Chained(logits))
    called = targets(found.after[PASS])
    assert (called.count(CONVERT), called.count(GATHER)) == (2, 2)
    assert torch.allclose(sp_compile.unpack(got, packed.forest), Chained(logits)(batch()), rtol=1e-12, atol=1e-12)


def test_must_not_rewrite_what_is_no_attention() -> None:
    class Without(Tiny):
        def hidden(self, ids: Tensor) -> Tensor:
            return F.silu(self.q(self.words(ids)))

    _, found, _ = rewritten(Without(logits))
    assert str(found.before[PASS]) == str(found.after[PASS])


def test_nothing_is_inserted_without_the_option() -> None:
    assert PASS not in [one.name for one in backend.pipeline(backend.Options())]
    _, found = harness.run(Tiny(logits), batch())
    assert not {CONVERT, GATHER} & set(targets(found[0].after["select_kernels"]))


class Convolved(Tiny):
    def hidden(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        weight = torch.ones(x.shape[-1], 1, 3, dtype=x.dtype)
        return x + F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), weight, groups=x.shape[-1]).transpose(1, 2)


class Gated(Tiny):
    """A recurrence of one number per channel."""

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        return torch.ops.sp_compile.dense_linear_scan(-F.softplus(self.q(x)), self.k(x), dtype=x.dtype, library=hybrids.LIBRARY)


def _calls(graph: Any, since: str, last: str) -> str:
    """The calls of the pass: from the first that it made to the one that reads what they make."""
    text = show(graph, since).replace("_default", "").replace("forest_rank_", "rank_")
    return text[: text.index("\n", text.index(f"\n{last} = ") + 1) + 1]


def test_convolution_gets_a_halo() -> None:
    got, found, packed = rewritten(Convolved(logits))
    text = _calls(found.after[PASS], since="select_int", last="causal_conv1d")
    assert_expected_inline(
        re.sub(r"conv1d\(\w+, \w+", "conv1d(x, weight", re.sub(r"int\(\w+, 0, 0", "int(x, 0, 0", text)),
        """\
select_int = aten.select.int(x, 0, 0)
exchange_rows = sp_compile.exchange_rows(select_int, rank_halo_send_3, rank_halo_splits_3, sym_size_int, 'ranks')
unpack = sp_compile.unpack(exchange_rows, rank_halo_3)
causal_conv1d = sp_compile.causal_conv1d(x, weight, None, rank_prev, unpack, activation=None)
""",
    )
    assert "forest_prev" not in str(found.after[PASS])
    assert torch.allclose(sp_compile.unpack(got, packed.forest), Convolved(logits)(batch()), rtol=1e-12, atol=1e-12)


def test_recurrence_gets_the_states_that_enter() -> None:
    got, found, packed = rewritten(Gated(logits))
    assert_expected_inline(
        _calls(found.after[PASS], since="constant_pad_nd_default", last="linear_scan"),
        """\
constant_pad_nd = aten.constant_pad_nd(linear_1, [0, 8])
cat = aten.cat([neg, neg], 2)
to_dtype = aten.to.dtype(rank_entered, torch.float64)
view = aten.view(to_dtype, [-1, 1])
expand = aten.expand(view, [-1, 8])
mul_tensor = aten.mul.Tensor(view, 0)
expand_1 = aten.expand(mul_tensor, [-1, 8])
cat_1 = aten.cat([expand_1, expand], 1)
linear_scan_1 = sp_compile.linear_scan(cat, constant_pad_nd, rank_prev, forest_end, cat_1, rank_final)
getitem_1 = getitem(linear_scan_1, 1)
slice_tensor = aten.slice.Tensor(getitem_1, 1, 0, 8)
slice_tensor_1 = aten.slice.Tensor(getitem_1, 1, 8, 16)
flatten_using_ints = aten.flatten.using_ints(slice_tensor, 1)
flatten_using_ints_1 = aten.flatten.using_ints(slice_tensor_1, 1)
cat_2 = aten.cat([flatten_using_ints, flatten_using_ints_1], 1)
sym_size_int = aten.sym_size.int(rank_state_rows, 0)
exchange_rows = sp_compile.exchange_rows(cat_2, rank_state_send, rank_state_splits, sym_size_int, 'ranks')
unpack = sp_compile.unpack(exchange_rows, rank_chain_1)
slice_tensor_2 = aten.slice.Tensor(unpack, 2, 0, 8)
unflatten_int = aten.unflatten.int(slice_tensor_2, 2, [8])
squeeze_dim = aten.squeeze.dim(unflatten_int, 1)
to_dtype_1 = aten.to.dtype(squeeze_dim, torch.float64)
constant_pad_nd_1 = aten.constant_pad_nd(to_dtype_1, [0, 0, 1, 0])
linear_scan = sp_compile.linear_scan(neg, linear_1, rank_prev, forest_end, constant_pad_nd_1, None)
""",
    )
    assert torch.allclose(sp_compile.unpack(got, packed.forest), Gated(logits)(batch()), rtol=1e-12, atol=1e-12)


def test_must_not_rewrite_recurrences_without_the_option() -> None:
    for model in (Convolved(logits), Gated(logits)):
        _, found = harness.run(model, batch())
        last = found[0].after["select_kernels"]
        assert "rank_" not in str(last)
        assert EXCHANGE not in targets(last)
        assert sum(name.startswith("sp_compile.") for name in targets(last)) <= 3


def test_a_plan_and_the_option_go_together() -> None:
    tree = forests.forest("one_branch")
    plan = plan_rank(tree, 2, 0)
    share = sp_compile.sharing.require_plan
    with pytest.raises(InvalidOption, match="without the option context_parallel"):
        share(LocalForest.of(plan), None)
    with pytest.raises(InvalidOption, match="expected a call outside of share, or inside of share"):
        share(tree, OneRank())
    with pytest.raises(StaleRoute, match="rank 0 of 1 without tensor ranks, got that of rank 0 of 2"):
        share(LocalForest.of(plan), OneRank())
    share(None, None)
    share(None, OneRank())
    share(tree, None)
    with pytest.raises(InvalidOption, match="process group"):
        options.parse({"context_parallel": "ranks"})


def test_forest_alone_has_no_route() -> None:
    with pytest.raises(StaleRoute, match="expected the plan of a rank"):
        Forest.from_rows([[1, 2]]).tensor("rank_send", "cpu")
