"""A tiny language model around an attention function written by hand, compared with its own dense run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import sp_compile
from sp_compile import backend
from sp_compile.analysis.interpret import Analysis
from sp_compile.analysis.sites import AttentionCall

INF = math.inf
WORDS, HIDDEN, HEADS, LONGEST = 41, 16, 4, 24
Attention = Callable[..., Tensor]


class Model(nn.Module):
    """One layer per `attention(model, q, k, v, mask)`: q, k, v [B, H, L, D], mask [B, L] or None; the result is [B, L, H * D]."""

    def __init__(self, *attentions: Attention) -> None:
        super().__init__()
        self.attentions = attentions
        self.words, self.places = nn.Embedding(WORDS, HIDDEN), nn.Embedding(LONGEST, HIDDEN)
        self.qkv = nn.ModuleList(nn.Linear(HIDDEN, 3 * HIDDEN) for _ in attentions)
        self.out = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in attentions)
        self.head = nn.Linear(HIDDEN, WORDS)
        self.sinks = nn.Parameter(torch.empty(HEADS))
        self.distance = nn.Embedding(LONGEST, HEADS)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.register_buffer("tril", torch.tril(torch.ones(LONGEST, LONGEST)).view(1, 1, LONGEST, LONGEST))
        self.register_buffer("triu", torch.triu(torch.ones(LONGEST, LONGEST), diagonal=1))
        self.register_buffer("slopes", 0.5 ** torch.arange(1.0, HEADS + 1))
        self.double()

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, columns = ids.shape
        x = self.words(ids) + self.places(torch.arange(columns))
        for attention, qkv, out in zip(self.attentions, self.qkv, self.out, strict=True):
            q, k, v = (t.view(rows, columns, HEADS, -1).transpose(1, 2) for t in qkv(x).chunk(3, -1))
            x = x + out(attention(self, q, k, v, mask)).tanh()
        return self.head(x)


def merge(y: Tensor) -> Tensor:
    """[B, H, L, D] -> [B, L, H * D]"""
    return y.transpose(1, 2).contiguous().view(y.shape[0], y.shape[2], -1)


def batch(padding: str | None = None) -> tuple[Tensor, Tensor]:
    """Ids [4, 11] whose rows share 5 columns, and a mask with padding "left", "right" or None."""
    ids = torch.randint(0, WORDS, (4, 11), generator=torch.Generator().manual_seed(0))
    ids[:, :5] = ids[0, :5]
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[:, :2] = 0
    elif padding == "right":
        mask[1, -2:] = 0
        mask[3, -4:] = 0
    return ids, mask


def compiled(model: nn.Module, found: list[Analysis] | None = None) -> Any:
    torch._dynamo.reset()
    analyse = backend.analyse

    def watched(*args: Any) -> Analysis:
        analysis = analyse(*args)
        if found is not None:
            found.append(analysis)
        return analysis

    options: dict[str, Any] = {"inner": "eager", "strict": True, "min_sharing": 1.0}
    run = torch.compile(model, backend=backend.shared_prefix, options=options)

    def call(*args: Tensor) -> Tensor:
        with mock.patch.object(backend, "analyse", watched):
            return run(*args)  # type: ignore[no-any-return]

    return call


def close(got: Tensor, wanted: Tensor, what: str) -> None:
    error = float((got - wanted).norm() / wanted.norm().clamp(min=1e-30))
    assert error < 1e-10, f"{what} differs by {error:.1e}"


def compare(*attentions: Attention, padding: str | None = None) -> list[AttentionCall]:
    """Logits at real tokens, the loss and every gradient of the shared run equal the dense run's; the attention calls found."""
    torch.manual_seed(0)
    model = Model(*attentions)
    ids, mask = batch(padding)
    inputs = (ids, mask) if padding else (ids,)
    weight = torch.linspace(0.5, 1.5, ids.numel(), dtype=torch.float64).view(ids.shape) * mask

    def run(function: Callable[..., Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        model.zero_grad()
        logits = function(*inputs)
        loss = (logits.logsumexp(-1) * weight).sum() - (logits[..., 0] * weight).sum()
        loss.backward()
        return logits.detach(), loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    logits, loss, gradients = run(model)
    found: list[Analysis] = []
    shared_logits, shared_loss, shared_gradients = run(compiled(model, found))
    account = sp_compile.last_run()
    assert account is not None
    assert account.shared
    assert account.physical_tokens < account.logical_tokens
    assert not account.refused
    close(shared_logits[mask.bool()], logits[mask.bool()], "logits")
    close(shared_loss, loss, "loss")
    assert gradients.keys() == shared_gradients.keys()
    for name, gradient in gradients.items():
        close(shared_gradients[name], gradient, f"gradient of {name}")
    return [info.attention for analysis in found for info in analysis.nodes.values() if info.attention is not None]


def refusal(attention: Attention, padding: str | None = None) -> str:
    """The text with which a model is refused."""
    torch.manual_seed(0)
    model = Model(attention)
    ids, mask = batch(padding)
    with pytest.raises(Exception, match="cannot share prefixes") as raised:
        compiled(model)(*((ids, mask) if padding else (ids,)))
    return str(raised.value)
