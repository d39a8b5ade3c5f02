"""Training functions that cut the batch themselves, `x, y = tokens[:, :-1], tokens[:, 1:]`: masks are made for one column less.

And models that compute with sizes: what they compute belongs to the rows' sizes, in every call.
"""

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
from tests.capture.handwritten import INF, WORDS, Model, batch, compiled, merge

Mask = Callable[[Any, int, "Tensor | None"], Tensor]


def below(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def real(mask: Tensor | None) -> Tensor:
    assert mask is not None
    return mask[:, None, None, :].bool()


def distances(n: int) -> Tensor:
    return torch.arange(n)[:, None] - torch.arange(n)


MASKS: dict[str, tuple[Mask, str | None]] = {
    "buffer": (lambda model, n, mask: model.tril[:, :, :n, :n] != 0, None),
    "counted window": (lambda model, n, mask: below(n) & (distances(n) < 4), None),
    "slopes": (lambda model, n, mask: torch.zeros(()).masked_fill(~below(n), -INF) - model.slopes[:, None, None] * distances(n), None),
    "thinned": (lambda model, n, mask: below(n) & (distances(n) % 3 != 1), None),
    "right padding": (lambda model, n, mask: below(n) & real(mask), "right"),
    "pads that see themselves": (lambda model, n, mask: (below(n) & real(mask)) | torch.eye(n, dtype=torch.bool), "left"),
    "finite": (lambda model, n, mask: torch.zeros(()).masked_fill(~(below(n) & real(mask)), -1e9), "right"),
}


class Shifted(nn.Module):
    """Next-token loss of a model, which is given all columns but the last."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.model = Model(lambda model, q, k, v, given: merge(F.scaled_dot_product_attention(q, k, v, mask(model, q.shape[2], given))))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        labels = tokens[:, 1:] if mask is None else tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        logits = self.model(tokens[:, :-1], None if mask is None else mask[:, :-1])
        return F.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1))


def step(model: nn.Module, call: Callable[..., Tensor], *inputs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss = call(*inputs)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}}


def assert_shared_and_equal(model: nn.Module, call: Callable[..., Tensor], *inputs: Tensor) -> None:
    wanted, found = step(model, model, *inputs), step(model, call, *inputs)
    run = sp_compile.last_run()
    assert run.shared
    assert run.physical_tokens < run.logical_tokens
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", MASKS)
def test_mask_of_one_column_less(name: str) -> None:
    mask, padding = MASKS[name]
    torch.manual_seed(0)
    model = Shifted(mask)
    ids, given = batch(padding)
    assert_shared_and_equal(model, compiled(model), *((ids, given) if padding else (ids,)))


def by_sizes(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    rows, columns = q.shape[0], q.shape[2]
    factor = int(columns * 0.5) / math.ceil(columns / 3) + math.floor(columns * 0.3) - round(rows / 3) + columns**-0.5
    y = F.scaled_dot_product_attention(q * factor, k, v, below(columns) & (distances(columns) <= columns / 2), scale=4 / columns)
    return merge(y * math.sqrt(columns / 4) + torch.full((1,), columns / rows, dtype=q.dtype))


def test_numbers_of_sizes_in_every_call() -> None:
    torch.manual_seed(0)
    model = Model(by_sizes)

    def loss(ids: Tensor) -> Tensor:
        return model(ids).logsumexp(-1).square().mean()

    call = compiled(loss)  # type: ignore[arg-type]
    ids, _ = batch()
    for inputs in (ids, ids[:3, :8]):
        wanted, found = step(model, loss, inputs), step(model, call, inputs)
        assert sp_compile.last_run().shared
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


class Remembering(nn.Module):
    """Every token is given the mean of a memory [n, 16] that is no part of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(by_torch)

    def forward(self, ids: Tensor, memory: Tensor) -> Tensor:
        x = self.model.words(ids) + memory.mean(0)
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.model.qkv[0](x).chunk(3, -1))
        return self.model.head(x + by_torch(self.model, q, k, v, None)).logsumexp(-1).sum()  # type: ignore[no-any-return]


def by_torch(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_refusal_by_a_coincidence_of_sizes_holds_for_that_coincidence_only() -> None:
    torch.manual_seed(0)
    model = Remembering()
    torch._dynamo.reset()
    call = torch.compile(model, backend="shared_prefix", options={"inner": "eager", "min_sharing": 1.0})
    ids, _ = batch()
    wide = torch.cat([ids, ids[:, -1:]], 1)
    for size, inputs in ((11, ids), (7, ids), (12, wide), (11, wide), (7, wide)):
        memory = torch.linspace(-1, 1, size * 16, dtype=torch.float64).view(size, 16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted, found = step(model, model, inputs, memory), step(model, call, inputs, memory)
        run = sp_compile.last_run()
        apart = torch.torch_version.TorchVersion(torch.__version__) < (2, 13)  # older versions tell equal sizes apart, and share
        assert run.shared == (size != inputs.shape[1]) or (apart and run.shared)
        assert ("reduces over tokens" in str(run.refused)) != run.shared
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
