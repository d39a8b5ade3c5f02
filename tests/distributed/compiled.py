"""A compiled model on the ranks of a group: what each rank computes of logits, loss and gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile
from sp_compile.backend import shared_prefix
from sp_compile.layout import Forest
from sp_compile.layout.rank_plans import take_local
from sp_compile.ops import over_ranks
from sp_compile.ops.rank_agreement import plan_over_ranks
from tests.e2e import models

ROWS: dict[str, list[list[int]]] = {
    "star": [[*range(1, 14), *range(20 + b, 27 + 2 * b)] for b in range(4)],
    "tree": [[1, 2, 3, *range(4, 4 + n), 30 + n, 31 + n] for n in range(6)],
    "tiny": [[1, 2, 3], [1, 4]],
}


class Windowed(nn.Module):
    """One layer of attention with fewer key heads and a window that is wider than a rank's stretch, on keys of its own padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.unembed = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        rows, columns, _ = x.shape
        q, k, v = (f(x).view(rows, columns, -1, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        place = torch.arange(columns)
        mask = (place[:, None] >= place[None]) & (place[:, None] - place[None] < 9)
        mask = mask[None, None] & attention_mask[:, None, None].bool()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.unembed(x + y.transpose(1, 2).reshape(rows, columns, 16))


MODELS: dict[str, Any] = {"gpt": lambda: models.Gpt(width=16, heads=2), "windowed": Windowed, "qwen3": models.qwen3}


def model_and_inputs(kind: str, rows: str) -> tuple[nn.Module, Forest, dict[str, Tensor]]:
    model = models.spread(MODELS[kind]()).double()
    given = ROWS[rows]
    length = max(map(len, given))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in given])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in given])
    packed = sp_compile.pack({"input_ids": ids, "attention_mask": mask}, positions="position_ids" if kind == "qwen3" else None)
    inputs = dict(packed.inputs)
    if kind == "gpt":
        del inputs["attention_mask"]
    return model, packed.forest, inputs


def objective(logits: Tensor, weight: Tensor) -> Tensor:
    return (logits.log_softmax(-1) * weight).sum()


def weights(tokens: int, words: int) -> Tensor:
    return torch.randn((1, tokens, words), generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def logits_of(found: Any) -> Tensor:
    if isinstance(found, tuple):
        return found[0]
    return found if isinstance(found, Tensor) else found["logits"]


def on_rank(rank: int, ranks: int, kind: str, batches: list[str], layout: str, inner: str) -> list[dict[str, Any]]:
    """Batches one after the other through one compiled model."""
    group = dist.group.WORLD
    torch._dynamo.reset()
    found = []
    call = None
    for rows in batches:
        model, forest, inputs = model_and_inputs(kind, rows)
        if call is None:
            kept, call = model, torch.compile(model, backend=shared_prefix, options={"inner": inner, "context_parallel": group})
        kept.zero_grad()
        plan = plan_over_ranks(forest, group, attention=layout, inputs=list(inputs.values()))
        local = {name: take_local(value, plan, fill=1) for name, value in inputs.items()}
        with sp_compile.share(plan):
            logits = logits_of(call(**local))
        assert sp_compile.last_run().shared
        weight = take_local(weights(forest.num_tokens, logits.shape[-1]), plan)
        loss = over_ranks.total(objective(logits, weight), plan, group.group_name)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in kept.named_parameters() if p.grad is not None}
        found.append({"logits": logits.detach(), "loss": loss.detach(), "gradients": gradients, "compiles": sp_compile.last_run().compiles})
    return found


def on_one(kind: str, rows: str) -> dict[str, Any]:
    """The same model, not compiled, on the rows themselves: each token of the pack from the first row through it."""
    model, forest, _ = model_and_inputs(kind, rows)
    given = ROWS[rows]
    length = max(map(len, given))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in given])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in given])
    logits = logits_of(model(ids) if kind == "gpt" else model(input_ids=ids, attention_mask=mask))
    row, column = forest.tensors(("row", "column"), "cpu")
    logits = logits[row, column][None]
    loss = objective(logits, weights(forest.num_tokens, logits.shape[-1]))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "loss": loss.detach(), "gradients": gradients}
