"""torch.autograd.Function in a model: shared if its written backward is linear in the gradient, else refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_compile.errors import CannotShare
from tests.e2e import compare, decoders
from tests.e2e.models import spread
from tests.e2e.scenarios import batches

STAR = next(batch for batch in batches() if batch.name == "star labels")


def _function(backward: Any) -> type[torch.autograd.Function]:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * torch.sigmoid(1.7 * x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
            return backward(gradient, ctx.saved_tensors[0])

    return Function


LINEAR = {
    "product": lambda g, x: g * torch.tanh(x),
    "straight through": lambda g, x: torch.where(x.abs() < 0.1, g, 0.0),
    "sum and cast": lambda g, x: (g.double() + 2 * g.double() / 3).float() - g.neg(),
    "over features": lambda g, x: (g * x).sum(-1, keepdim=True) * x,
}
OTHERS = {
    "clipped": lambda g, x: g.clamp(-0.01, 0.01),
    "normalised": lambda g, x: g / (g.norm(dim=-1, keepdim=True) + 1e-6),
    "sign": lambda g, x: g.sign() * 0.01,
    "shifted": lambda g, x: g + 0.01 * x,
    "constant": lambda g, x: 0.01 * x,
    "squared": lambda g, x: g * g,
    "chosen by itself": lambda g, x: torch.where(g > 0, g, 0.0),
    "over tokens": lambda g, x: g - g.mean(1, keepdim=True),
}


def _model(backward: Any) -> nn.Module:
    function = _function(backward)

    class Model(decoders.Chunked):
        def start(self, ids: Tensor) -> Tensor:
            return function.apply(self.embed(ids))  # type: ignore[no-any-return]

    return spread(Model(1))


@pytest.mark.parametrize("name", LINEAR)
def test_linear_backward_equals_dense(name: str) -> None:
    torch._dynamo.reset()
    model = _model(LINEAR[name])
    compare.check(compare.compiled(model, "eager"), model, STAR)


@pytest.mark.parametrize("name", OTHERS)
def test_other_backward_is_refused(name: str) -> None:
    torch._dynamo.reset()
    model = _model(OTHERS[name])
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        compare.compiled(model, "eager")(**STAR.inputs)
    assert isinstance(raised.value.inner_exception, CannotShare)


class Rides(torch.autograd.Function):
    """Puts the gradient of an auxiliary loss beside that of activations, as DeepSeek's and Megatron's models do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, torch.ones_like(ctx.saved_tensors[0]) * 0.7


def _balance(x: Tensor, kind: str) -> Tensor:
    """Of experts that are chosen by the first four features."""
    probs = x[..., :4].softmax(-1)
    chosen = torch.nn.functional.one_hot(probs.argmax(-1), 4).to(x.dtype)
    if kind == "batch":
        return 4 * (probs.flatten(0, 1).mean(0) * chosen.flatten(0, 1).mean(0)).sum()
    return 4 * (probs.mean(1) * chosen.mean(1)).sum(-1).mean()


def _riding(kind: str) -> nn.Module:
    class Model(decoders.Chunked):
        def start(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            return Rides.apply(x, _balance(x, kind))  # type: ignore[no-any-return]

    torch._dynamo.reset()
    return spread(Model(1))


def test_a_loss_that_rides_on_activations_gets_its_gradient_once() -> None:
    model = _riding("batch")
    assert not compare.check(compare.compiled(model, "eager"), model, STAR).unpacked


def test_a_loss_over_each_row_that_rides_on_activations_is_refused() -> None:
    """DeepSeek-V2's seq_aux: computed on rows, it is not known for tokens."""
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"CannotShare|cannot share"):
        compare.compiled(_riding("rows"), "eager")(**STAR.inputs)


def test_a_gradient_of_its_own_for_a_value_of_tokens_is_refused() -> None:
    torch._dynamo.reset()

    class Model(decoders.Chunked):
        def start(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            return Rides.apply(x, x.tanh())  # type: ignore[no-any-return]

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="linear in the gradient"):
        compare.compiled(spread(Model(1)), "eager")(**STAR.inputs)
