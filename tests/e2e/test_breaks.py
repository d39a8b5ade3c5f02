"""What of a compiled function stands behind a graph break, or around a part that is compiled on its own, reads what is dense there."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile
from sp_compile.backend import shared_prefix
from tests.e2e import compare
from tests.e2e.models import spread
from tests.e2e.scenarios import IGNORED, VOCABULARY, both_padded, right_padded, star

Tail = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
WIDTH = 16


class Model(nn.Module):
    """One layer of attention, and then whatever `tail` does."""

    def __init__(self, tail: Tail) -> None:
        super().__init__()
        self.tail = tail
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x, columns = self.embed(ids), ids.shape[1]
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        causal = torch.ones(columns, columns, dtype=torch.bool).tril()
        seen = (causal & mask[:, None, None, :].bool()) | torch.eye(columns, dtype=torch.bool)
        return self.tail(self, x + F.scaled_dot_product_attention(q, k, v, attn_mask=seen)[:, 0], mask, labels)


def loss(model: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1), ignore_index=IGNORED)


def in_one(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return loss(model, x, labels)


def break_before_the_loss(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return loss(model, x, labels)


def mean_over_all_positions(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    logits = model.gate(x)
    print(end="")
    return loss(model, x, labels) + logits.logsumexp(-1).square().mean()


def count_by_item(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return loss(model, x, labels) * mask.sum().item() + model.gate(x).softmax(-1).mean((0, 1)).square().sum()


def convolution_behind(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    kernel = model.qkv.weight[:WIDTH, None, :3].contiguous()
    moved = F.conv1d(x.transpose(1, 2), kernel, padding=2, groups=WIDTH)[..., : x.shape[1]]
    return loss(model, x + moved.transpose(1, 2), labels)


def batch(padded: Callable[..., Any]) -> tuple[Tensor, Tensor, Tensor]:
    ids, mask, labels = padded(star())
    return ids, mask, labels


def step(run: Callable[..., Tensor], model: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    value = run(*given)
    value.backward()
    return value.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(run: Callable[..., Tensor], shared: nn.Module, dense_run: Callable[..., Tensor], dense: nn.Module, given: Any) -> None:
    (wanted, gradients), (value, found) = step(dense_run, dense, given), step(run, shared, given)
    torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert compare.relative(found[name], gradient) < 1e-9, name


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("padded", [right_padded, both_padded])
@pytest.mark.parametrize("tail", [in_one, break_before_the_loss, mean_over_all_positions, count_by_item, convolution_behind])
def test_what_follows_a_break_reads_padding_as_it_is(tail: Tail, padded: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    dense = spread(Model(tail)).double()
    shared = copy.deepcopy(dense)
    call = torch.compile(shared, backend=shared_prefix, options={"inner": "eager"})
    check(call, shared, dense, dense, batch(padded))
    account = sp_compile.last_run()
    assert account.physical_tokens < account.logical_tokens
    kept = any("padding is computed" in note for note in account.notes)
    assert kept == (tail is not in_one)


def outer(model: Model, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Not traced itself, for the break in it: the model is compiled on its own, inside of it."""
    with contextlib.ExitStack():
        torch._dynamo.graph_break()
        hidden = model(ids, mask, labels)
        return loss(model, hidden, labels) + model.gate(hidden).logsumexp(-1).square().mean()


def only_hidden(model: Model, x: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return x


def test_a_module_compiled_inside_of_a_function_gives_it_its_padding() -> None:
    torch._dynamo.reset()
    dense = spread(Model(only_hidden)).double()
    shared = copy.deepcopy(dense)
    call = torch.compile(outer, backend=shared_prefix, options={"inner": "eager"})
    given = batch(both_padded)
    check(lambda *values: call(shared, *values), shared, lambda *values: outer(dense, *values), dense, given)
    assert sp_compile.last_run().physical_tokens < sp_compile.last_run().logical_tokens


def test_the_same_code_called_from_outside_drops_padding() -> None:
    """Whether more of the compiled function follows is a matter of the call, not of the compilation."""
    torch._dynamo.reset()
    model, given = spread(Model(only_hidden)).double(), batch(both_padded)
    inside, alone = (torch.compile(f, backend=shared_prefix, options={"inner": "eager"}) for f in (outer, model))
    alone(*given)
    dropped = sp_compile.last_run()
    inside(model, *given)
    kept = sp_compile.last_run()
    assert (dropped.logical_tokens, kept.logical_tokens) == (int(given[1].sum()), given[1].numel())
    alone(*given)
    assert sp_compile.last_run().logical_tokens == dropped.logical_tokens
