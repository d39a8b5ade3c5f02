"""What cannot be shared: one warning and the bits of the inner compiler; under `strict` an error that names op, line and remedy."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import sp_compile
from sp_compile.backend import shared_prefix
from tests.e2e import compare, models, scenarios
from tests.e2e.models import spread
from tests.e2e.scenarios import VOCABULARY, Batch

WIDTH = 16


@torch.library.custom_op("sp_compile_tests::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


double.register_fake(torch.empty_like)
double.register_autograd(lambda ctx, grad: grad * 2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, causal: bool = True) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).reshape(b, n, -1))


class Between(nn.Module):
    """Two causal attentions with something between them."""

    def __init__(self, between: Callable[[Between, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.first, self.second = Attention(), Attention()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.between = between

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.first(self.embedding(input_ids))
        return self.head(self.second(self.between(self, x)))


def mean(model: Between, x: Tensor) -> Tensor:
    return x + x.mean(1, keepdim=True)


def shift(model: Between, x: Tensor) -> Tensor:
    return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


def look_ahead(model: Between, x: Tensor) -> Tensor:
    return x + F.pad(x[:, 1:], (0, 0, 0, 1))


def roll(model: Between, x: Tensor) -> Tensor:
    return x + x.roll(1, dims=1)


def running_sum(model: Between, x: Tensor) -> Tensor:
    return x + x.cumsum(1) / 10


def flip(model: Between, x: Tensor) -> Tensor:
    return x + x.flip(0)


def columns_first(model: Between, x: Tensor) -> Tensor:
    b, n, d = x.shape
    return x + x.transpose(0, 1).reshape(b, n, d)


def batch_norm(model: Between, x: Tensor) -> Tensor:
    return model.norm(x.flatten(0, 1)).view(x.shape)


def two_sided(model: Between, x: Tensor) -> Tensor:
    return model.first(x, causal=False)


def dropout(model: Between, x: Tensor) -> Tensor:
    return F.dropout(x, 0.2, model.training)


def noise(model: Between, x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def coin(model: Between, x: Tensor) -> Tensor:
    return x * torch.bernoulli(torch.full_like(x, 0.5))


def custom(model: Between, x: Tensor) -> Tensor:
    return x + torch.ops.sp_compile_tests.double(x)


CASES = {
    mean: ("mean", "mean over dimension 1 reduces over tokens"),
    shift: ("constant_pad_nd", "padded or shifted"),
    look_ahead: ("constant_pad_nd", "padded or shifted"),
    roll: ("roll", "moves tokens along dimension 1"),
    running_sum: ("cumsum", "cumsum runs along the columns"),
    flip: ("flip", "moves tokens along dimension 0"),
    columns_first: ("view", "reorders tokens"),
    batch_norm: ("batch_norm", "layer or RMS normalisation"),
    two_sided: ("scaled_dot_product_attention", "Only causal attention can be shared"),
    dropout: ("dropout", "Set dropout to 0"),
    noise: ("rand", "Set dropout to 0"),
    coin: ("bernoulli", "Set dropout to 0"),
    custom: ("sp_compile_tests.double", "register a rule"),
}
"""Per function: part of the op's name, part of the reason or remedy."""


def star() -> Batch:
    ids, _, _ = scenarios.right_padded(scenarios.star())
    return Batch("star", {"input_ids": ids}, torch.ones_like(ids, dtype=torch.bool))


def seeded_step(call: Callable[..., Any], model: nn.Module, batch: Batch) -> compare.Result:
    torch.manual_seed(3)
    return compare.step(call, model, batch)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("inner", ["eager", *(pytest.param(inner, marks=pytest.mark.slow) for inner in ("aot_eager", "inductor"))])
@pytest.mark.parametrize("between", list(CASES), ids=lambda function: function.__name__)
def test_refused_runs_the_dense_graph(between: Callable[[Between, Tensor], Tensor], inner: str) -> None:
    op, _ = CASES[between]
    batch = star()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = spread(Between(between))
        call = torch.compile(model, backend=shared_prefix, options={"inner": inner})
        found = seeded_step(call, model, batch)
        seeded_step(call, model, batch)
    mine = [w for w in caught if "shared_prefix" in str(w.message)]
    assert len(mine) == 1
    account = sp_compile.last_run()
    assert not account.shared
    assert len(account.refused) == 1
    assert op in account.refused[0]
    assert account.physical_tokens == account.logical_tokens == batch.logical
    torch._dynamo.reset()
    model = spread(Between(between))
    compare.assert_same_bits(found, seeded_step(torch.compile(model, backend=inner, dynamic=True), model, batch))


@pytest.mark.parametrize("between", list(CASES), ids=lambda function: function.__name__)
def test_refused_strict_names_op_line_and_remedy(between: Callable[[Between, Tensor], Tensor]) -> None:
    op, text = CASES[between]
    model = spread(Between(between))
    call = torch.compile(model, backend=shared_prefix, options={"inner": "eager", "strict": True})
    with pytest.raises(BackendCompilerFailed, match="cannot share prefixes") as raised:
        call(**star().inputs)
    assert isinstance(raised.value.inner_exception, sp_compile.CannotShare)
    refused = raised.value.inner_exception
    assert op in refused.op
    assert text in str(refused)
    assert refused.advice
    lines, start = inspect.getsourcelines(Attention.forward if between is two_sided else between)
    file, _, rest = refused.source.partition(":")
    assert file == __file__
    assert int(rest.split(",")[0]) in range(start, start + len(lines))


class Branch(Between):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.first(self.embedding(input_ids))
        if x.sum() > 1e9:
            x = -x
        return self.head(self.second(x))


def test_data_dependent_branch_runs_the_rest_densely() -> None:
    batch = star()
    model = spread(Branch(mean))
    call = torch.compile(model, backend=shared_prefix, options={"inner": "aot_eager"})
    with pytest.warns(UserWarning, match="no integer .rows, columns. input") as caught:
        found = compare.step(call, model, batch)
    assert len([w for w in caught if "shared_prefix" in str(w.message)]) == 1
    compare.assert_close(found, compare.step(model, model, batch), batch.real)
    account = sp_compile.last_run()
    assert account.regions == 2
    assert len(account.refused) == 1
    assert "graph break" in account.refused[0]
    assert account.physical_tokens == batch.physical + batch.logical


def test_data_dependent_branch_strict() -> None:
    call = torch.compile(spread(Branch(mean)), backend=shared_prefix, options={"inner": "eager", "strict": True})
    with pytest.raises(BackendCompilerFailed, match="graph break"):
        call(**star().inputs)


class FromEmbeddings(Between):
    def forward(self, inputs_embeds: Tensor) -> Tensor:
        return self.head(self.second(self.first(inputs_embeds)))


@pytest.mark.parametrize("trainable", [False, True])
def test_inputs_embeds_runs_densely(trainable: bool) -> None:
    ids = star().tensor("input_ids")
    model = spread(FromEmbeddings(mean))
    rows = torch.randn(*ids.shape, WIDTH, requires_grad=trainable)
    batch = Batch("embeddings", {"inputs_embeds": rows}, torch.ones_like(ids, dtype=torch.bool))
    call = torch.compile(model, backend=shared_prefix, options={"inner": "aot_eager"})
    with pytest.warns(UserWarning, match="inputs_embeds") as caught:
        found = compare.step(call, model, batch)
    assert len([w for w in caught if "shared_prefix" in str(w.message)]) == 1
    assert "inputs_embeds" in sp_compile.last_run().refused[0]
    torch._dynamo.reset()
    compare.assert_same_bits(found, compare.step(torch.compile(model, backend="aot_eager"), model, batch))
    torch._dynamo.reset()
    call = torch.compile(model, backend=shared_prefix, options={"inner": "eager", "strict": True})
    with pytest.raises(BackendCompilerFailed, match="inputs_embeds"):
        call(**batch.inputs)


@pytest.mark.parametrize("make", [models.gpt, pytest.param(models.rope, marks=pytest.mark.slow)])
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_unshared_batch_has_the_inner_compilers_bits(make: Callable[[], nn.Module], inner: str) -> None:
    ids, _, _ = scenarios.right_padded(scenarios.different())
    batch = Batch("different", {"input_ids": ids}, torch.ones_like(ids, dtype=torch.bool))
    model = make()
    found = compare.step(torch.compile(model, backend=shared_prefix, options={"inner": inner}), model, batch)
    account = sp_compile.last_run()
    assert not account.shared
    assert not account.refused
    assert "min_sharing" in account.notes[0]
    torch._dynamo.reset()
    compare.assert_same_bits(found, compare.step(torch.compile(model, backend=inner), model, batch))
