"""Small pieces that tests of training share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.e2e import compare
from tests.e2e.scenarios import Batch


class Adapter(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices beside it (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(base.out_features)
        self.down = nn.Parameter(torch.randn(rank, base.in_features, generator=generator) * 0.3)
        self.up = nn.Parameter(torch.randn(base.out_features, rank, generator=generator) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * (x @ self.down.t()) @ self.up.t()


def with_adapters(model: nn.Module) -> nn.Module:
    """Freezes a model and puts an adapter around each linear layer but its head."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(parent, name, Adapter(child))
    return model


def gradients(model: nn.Module, run: Callable[[], Any]) -> dict[str, Tensor]:
    """Of what `run` does from zero gradients on."""
    model.zero_grad(set_to_none=True)
    run()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert wanted, "something was trained"
    whole = max(float(g.double().norm()) for g in wanted.values())
    for name, gradient in wanted.items():
        assert compare.relative(found[name], gradient, floor=1e-4 * whole) <= compare.GRADIENTS, name


def objective(call: Callable[..., Any], batch: Batch) -> Tensor:
    logits, loss = compare.outputs(call(**batch.inputs))
    assert loss is not None
    return loss + logits.square().mean()
