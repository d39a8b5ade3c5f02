"""A compiled model on the ranks of a group: what each rank computes of logits, loss and gradients."""

from __future__ import annotations

import inspect
from functools import partial
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
from tests.distributed.hybrids import Hybrid
from tests.e2e import hybrids as families
from tests.e2e import models

ROWS: dict[str, list[list[int]]] = {
    "star": [[*range(1, 14), *range(20 + b, 27 + 2 * b)] for b in range(4)],
    "tree": [[1, 2, 3, *range(4, 4 + n), 30 + n, 31 + n] for n in range(6)],
    "deep": [[*range(1, 4 * n + 2), 40 + n, *range(41 + n, 41 + 2 * n)] for n in range(1, 7)],
    "forest": [[30 * r + 1, *range(30 * r + 2, 30 * r + 11), *range(3 + 4 * b, 12 + 4 * b)] for r in range(2) for b in range(3)],
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


MODELS: dict[str, Any] = {"gpt": lambda: models.Gpt(width=16, heads=2), "windowed": Windowed, "qwen3": models.qwen3, "hybrid": Hybrid}
MODELS["short hybrid"] = partial(Hybrid, "selective_scan", "gated_delta_rule")
MODELS |= {family: partial(families.make, family) for family in families.CONFIGS}


KERNELS = ("chunked_replay",)
"""The grid of the dense run, whose chunks are shorter than most nodes here; `test_states` has the others."""


def _takes_ids_only(kind: str) -> bool:
    return kind in ("gpt", "hybrid", "short hybrid")


def model_and_inputs(kind: str, rows: str) -> tuple[nn.Module, Forest, dict[str, Tensor]]:
    model = models.spread(MODELS[kind]()).double()
    given = ROWS[rows]
    length = max(map(len, given))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in given])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in given])
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    packed = sp_compile.pack({"input_ids": ids, "attention_mask": mask}, positions="position_ids" if takes_positions else None)
    inputs = dict(packed.inputs)
    if _takes_ids_only(kind):
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


def on_rank(
    rank: int, ranks: int, kinds: list[str], batches: list[str], layout: str, inner: str, dtype: torch.dtype = torch.float64
) -> dict[str, list[dict[str, Any]]]:
    """Of each model, batches one after the other through its compiled form."""
    return {kind: _one_model(kind, batches, layout, inner, dtype) for kind in kinds}


def replays(rank: int, ranks: int, kind: str) -> list[str]:
    """Names of results in float32 that differ in a bit between runs."""
    torch.use_deterministic_algorithms(True)
    runs = [on_rank(rank, ranks, [kind], ["tree"], "balanced", "aot_eager", torch.float32)[kind][0] for _ in range(3)]
    flat = [{"logits": run["logits"], "loss": run["loss"], **run["gradients"]} for run in runs]
    return [name for name in flat[0] if not all(torch.equal(flat[0][name], other[name]) for other in flat[1:])]


def _one_model(kind: str, batches: list[str], layout: str, inner: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    group = dist.group.WORLD
    torch._dynamo.reset()
    found = []
    call = None
    for rows in batches:
        model, forest, inputs = model_and_inputs(kind, rows)
        if call is None:
            options = {"inner": inner, "context_parallel": group, "kernels": KERNELS}
            kept, call = model.to(dtype), torch.compile(model, backend=shared_prefix, options=options)
        kept.zero_grad()
        plan = plan_over_ranks(forest, group, attention=layout, inputs=list(inputs.values()))
        local = {name: take_local(value, plan, fill=1) for name, value in inputs.items()}
        with sp_compile.share(plan):
            logits = logits_of(call(**local))
        assert sp_compile.last_run().shared
        weight = take_local(weights(forest.num_tokens, logits.shape[-1]).to(dtype), plan)
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
    logits = logits_of(model(ids) if _takes_ids_only(kind) else model(input_ids=ids, attention_mask=mask))
    row, column = forest.tensors(("row", "column"), "cpu")
    logits = logits[row, column][None]
    loss = objective(logits, weights(forest.num_tokens, logits.shape[-1]))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "loss": loss.detach(), "gradients": gradients}
