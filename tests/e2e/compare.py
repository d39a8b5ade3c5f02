"""The compiled model against the same model run densely on the full rows: logits, loss and every parameter's gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sp_compile
from sp_compile.backend import shared_prefix
from sp_compile.debug.account import Account
from tests.e2e.scenarios import Batch

LOGITS = 1e-5
"""Relative L2 error of float32 logits of a whole model: a few dozen roundings of 6e-8, added up in another order."""
GRADIENTS = 1e-4
"""Of float32 gradients, which sum over all tokens of the batch."""


@dataclasses.dataclass
class Result:
    """What one training step gives; gradients are absent without one."""

    logits: Tensor
    loss: Tensor | None
    gradients: dict[str, Tensor]


def outputs(returned: Any) -> tuple[Tensor, Tensor | None]:
    """Logits and loss of what a model returns: a tensor, a (logits, loss) tuple, a dictionary or an object with attributes."""
    if isinstance(returned, Tensor):
        return returned, None
    if isinstance(returned, dict):
        return returned["logits"], returned.get("loss")
    if isinstance(returned, tuple):
        return returned[0], returned[1] if len(returned) > 1 else None
    return returned.logits, getattr(returned, "loss", None)


def weighting(shape: torch.Size, real: Tensor, seed: int = 5) -> Tensor:
    """A random upstream gradient for logits [B, l, V] that are the last l columns; zero at padding."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return noise * real[:, -shape[1] :, None] / 10


def step(call: Callable[..., Any], model: nn.Module, batch: Batch) -> Result:
    """Forward and backward of a random linear function of the logits, plus the model's own loss."""
    model.zero_grad(set_to_none=True)
    logits, loss = outputs(call(**batch.inputs))
    objective = (logits.float() * weighting(logits.shape, batch.real)).sum()
    if loss is not None:
        objective = objective + 3 * loss
    objective.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Result(logits.detach().clone(), None if loss is None else loss.detach().clone(), gradients)


def relative(found: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    scale = max(float(wanted.double().norm()), floor, 1e-30)
    return float((found.double() - wanted.double()).norm()) / scale


def assert_close(found: Result, wanted: Result, real: Tensor, logits: float = LOGITS, gradients: float = GRADIENTS) -> None:
    """Logits at real tokens, loss, and gradients; a gradient that is zero but for rounding is measured against the whole."""
    assert found.logits.shape == wanted.logits.shape
    assert found.logits.dtype == wanted.logits.dtype
    assert bool(found.logits.isfinite().all()), "values at padding are finite"
    kept = real[:, -wanted.logits.shape[1] :]
    assert relative(found.logits[kept], wanted.logits[kept]) <= logits
    assert (found.loss is None) == (wanted.loss is None)
    if found.loss is not None and wanted.loss is not None:
        torch.testing.assert_close(found.loss, wanted.loss, rtol=logits, atol=logits, equal_nan=True)
    assert found.gradients.keys() == wanted.gradients.keys()
    whole = max((float(g.double().norm()) for g in wanted.gradients.values()), default=0.0)
    errors = {name: relative(found.gradients[name], g, floor=1e-4 * whole) for name, g in wanted.gradients.items()}
    worst = max(errors, key=lambda name: errors[name], default=None)
    assert worst is None or errors[worst] <= gradients, f"gradient of {worst} is off by {errors[worst]:.2e}"


def assert_same_bits(found: Result, wanted: Result) -> None:
    assert torch.equal(found.logits, wanted.logits)
    assert (found.loss is None) == (wanted.loss is None)
    assert found.loss is None or (wanted.loss is not None and torch.equal(found.loss, wanted.loss))
    assert found.gradients.keys() == wanted.gradients.keys()
    differing = [name for name, g in wanted.gradients.items() if not torch.equal(found.gradients[name], g)]
    assert not differing


def assert_shared(account: Account, batch: Batch) -> None:
    """The packed graph ran, on exactly the tokens of a perfect trie."""
    assert not account.refused
    assert account.shared, account.notes
    assert account.logical_tokens == batch.logical
    assert account.physical_tokens == batch.physical
    if batch.physical < batch.logical:
        assert account.physical_tokens < account.logical_tokens


def compiled(model: Callable[..., Any], inner: str, **options: Any) -> Any:
    """A model under the backend, strict, and sharing even where nothing is saved."""
    return torch.compile(model, backend=shared_prefix, options={"inner": inner, "strict": True, "min_sharing": 1.0, **options})


def check(call: Callable[..., Any], model: nn.Module, batch: Batch) -> Account:
    """One training step of a compiled model equals the dense one and ran on physical tokens."""
    wanted = step(model, model, batch)
    found = step(call, model, batch)
    account = sp_compile.last_run()
    assert_shared(account, batch)
    assert_close(found, wanted, batch.real)
    return account
