"""Inputs and models at the edge of what may be shared: padding that finite masks hide, losses that count nothing, odd backwards."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile
from sp_compile.backend import shared_prefix
from tests.e2e.compare import GRADIENTS, relative
from tests.e2e.models import VOCABULARY, llama, spread
from tests.e2e.scenarios import both_padded, forest, right_padded, star

IGNORED = -100


def causal(columns: int) -> Tensor:
    return torch.ones(columns, columns, dtype=torch.bool).tril()


def finite_fill(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~(causal(scores.shape[-1]) & (mask[:, None, None] != 0)), torch.finfo(scores.dtype).min)


def finite_sum(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~causal(scores.shape[-1]), -1e9) + (1.0 - mask[:, None, None].to(scores.dtype)) * -1e9


def infinite_fill(scores: Tensor, mask: Tensor) -> Tensor:
    """Hidden scores are -inf, and a query without keys gets zeros."""
    return scores.masked_fill(~(causal(scores.shape[-1]) & (mask[:, None, None] != 0)), -math.inf)


class Decoder(nn.Module):
    """One written-out attention with a mask of the model's own, and the loss of next tokens."""

    def __init__(self, hide: Callable[[Tensor, Tensor], Tensor] | None = None, after: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.embed, self.place, self.mix, self.head = (
            nn.Embedding(VOCABULARY, 16),
            nn.Embedding(64, 16),
            nn.Linear(16, 48),
            nn.Linear(16, VOCABULARY),
        )
        self.hide, self.after = hide, after

    def hidden(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        rows, columns = ids.shape
        x = self.embed(ids) + self.place(torch.arange(columns))
        q, k, v = (part.view(rows, columns, 2, 8).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        if self.hide is None or mask is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = torch.softmax(self.hide(q @ k.transpose(-2, -1) / 8**0.5, mask), -1).nan_to_num(0.0) @ v
        return self.after(x + y.transpose(1, 2).reshape(rows, columns, 16))

    def forward(self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        logits = self.head(self.hidden(ids, mask))
        return logits if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def run(call: Callable[..., Any], model: nn.Module, *inputs: Any, **named: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = call(*inputs, **named)
    loss = loss if isinstance(loss, Tensor) else loss.loss
    (loss if loss.dim() == 0 else loss.square().sum()).backward()
    return loss.detach().clone(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(call: Callable[..., Any], model: nn.Module, *inputs: Any, **named: Any) -> sp_compile.debug.account.Account:  # type: ignore[name-defined]
    wanted = run(model, model, *inputs, **named)
    found = run(call, model, *inputs, **named)
    assert relative(found[0], wanted[0]) <= 1e-5
    assert found[1].keys() == wanted[1].keys()
    whole = max(float(g.norm()) for g in wanted[1].values())
    for name, gradient in wanted[1].items():
        assert relative(found[1][name], gradient, floor=1e-4 * whole) <= GRADIENTS, name
    return sp_compile.last_run()


def compiled(model: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend=shared_prefix, options={"inner": "eager", "min_sharing": 1.0, **options})


def trained_first_tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Left-padded rows with every real token as a label, so that the last pad's logits enter the loss."""
    ids, mask, _ = both_padded(forest())
    return ids, mask, ids.masked_fill(mask == 0, IGNORED)


@pytest.mark.parametrize("hide", [finite_fill, finite_sum], ids=lambda f: f.__name__)
def test_pads_that_see_every_key_run_densely(hide: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Under a finite mask a left pad attends to all of its row, later tokens included; the loss reads it."""
    model = spread(Decoder(hide))
    call = compiled(model)
    with pytest.warns(UserWarning, match="sees no key under a mask of finite scores"):
        account = compare(call, model, *trained_first_tokens())
    assert not account.shared
    assert "later ones included" in account.refused[0]
    ids, mask, labels = both_padded(forest())
    if hide is finite_fill:  # the sum is carried element by element, with no proof that pads are read by nobody
        assert compare(call, model, ids, mask, labels).shared, "completions alone do not read pads"
    ids, mask, _ = right_padded(forest())
    assert compare(call, model, ids, mask, ids.masked_fill(mask == 0, IGNORED)).shared, "right pads see earlier tokens"
    with pytest.raises(sp_compile.CannotShare, match="finite scores"):
        compiled(model, strict=True)(*trained_first_tokens())


def test_infinite_masks_share_what_finite_ones_do_not() -> None:
    model = spread(Decoder(infinite_fill))
    assert compare(compiled(model), model, *trained_first_tokens()).shared


def test_pads_of_the_library_in_its_eager_form() -> None:
    model = llama(attn_implementation="eager")
    call = compiled(model)
    ids, mask, labels = trained_first_tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not compare(call, model, input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).shared
    ids, mask, labels = both_padded(forest())
    assert compare(call, model, input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).shared


def test_masks_given_as_pairs() -> None:
    """A [B, 1, L, L] mask of the caller's: a row that it hides from every token so far."""
    model = spread(Decoder(lambda scores, mask: scores.masked_fill(~causal(scores.shape[-1]), -1e9) + mask))
    call = compiled(model)
    ids, mask, labels = trained_first_tokens()
    pairs = torch.zeros(len(ids), 1, ids.shape[1], ids.shape[1]).masked_fill(mask[:, None, None] == 0, -1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not compare(call, model, ids, pairs, labels).shared
    assert compare(call, model, ids, torch.zeros_like(pairs), labels).shared


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_mean_over_nothing_sends_no_gradient(inner: str) -> None:
    """Its value is NaN as in torch, and one micro-batch without labels does not poison the weights."""
    model = spread(Decoder())
    ids, _, labels = right_padded(star())
    call = compiled(model, inner=inner)
    value, gradients = run(call, model, ids, None, torch.full_like(labels, IGNORED))
    assert sp_compile.last_run().shared
    assert bool(value.isnan())
    assert all(not bool(g.any()) for g in gradients.values())
    compare(call, model, ids, None, labels)


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.001, 0.001)


def test_a_backward_of_its_own_gets_the_gradients_of_rows() -> None:
    """Clipping the sum of the rows' gradients is not the sum of the clipped ones."""
    model = spread(Decoder(after=Clip.apply))
    account = compare(compiled(model), model, right_padded(star())[0])
    assert account.shared
    assert account.unpacked or account.regions > 1, "rows, in one graph or behind the break that older versions make here"


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("grad", [True, False])
def test_returned_logits_may_be_changed_in_place(inner: str, grad: bool) -> None:
    model = spread(Decoder())
    call = compiled(model, inner=inner)
    ids = right_padded(star())[0]
    for _ in range(2):
        with torch.set_grad_enabled(grad):
            logits = call(ids)
            logits.div_(0.7)
            if grad:
                logits.sum().backward()
            assert relative(logits.detach(), (model(ids) / 0.7).detach()) <= 1e-5
