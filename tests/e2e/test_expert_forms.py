"""Mixtures of experts by hand, in the styles of public models: logits, gradients, losses and counts equal to dense, rows kept apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile
from tests.e2e import compare

TOLERANCE = 1e-9
"""float64"""
WIDTH, EXPERTS, CHOSEN, VOCABULARY = 16, 6, 2, 40


class Experts(nn.Module):
    """Weights and counts; `forward` gives what is added to the residual stream, and an auxiliary loss."""

    load: Tensor
    correction: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 24) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 24, WIDTH) * 0.2)
        self.register_buffer("load", torch.zeros(EXPERTS, dtype=torch.int64))
        self.register_buffer("correction", torch.zeros(EXPERTS))

    def expert(self, number: int, x: Tensor) -> Tensor:
        return F.silu(x @ self.up[number]) @ self.down[number]

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probs = self.gate(x).softmax(-1)
        weights, chosen = probs.topk(CHOSEN, -1)
        return probs, weights / weights.sum(-1, keepdim=True), chosen


class Loop(Experts):
    """Mixtral: a loop over experts, `torch.where` on one-hot masks, `index_add_`; counts by bincount."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.view(-1, WIDTH)
        probs, weights, chosen = self.route(flat)
        out, mask = torch.zeros_like(flat), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for number in range(EXPERTS):
            slot, token = torch.where(mask[number])
            out.index_add_(0, token, self.expert(number, flat[token]) * weights[token, slot, None])
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        self.load += counts
        return out.view_as(x), EXPERTS * (counts / chosen.numel() * probs.mean(0)).sum()


class Sorted(Experts):
    """OLMoE, MegaBlocks: tokens sorted by expert, histc, and back by index_add; router z loss."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.view(-1, WIDTH)
        probs, weights, chosen = self.route(flat)
        expert, order = torch.sort(chosen.flatten())
        counts = torch.histc(chosen.flatten().float(), EXPERTS, 0, EXPERTS - 1)
        y = flat[order // CHOSEN]
        y = torch.bmm(F.silu(torch.bmm(y[:, None], self.up[expert])), self.down[expert])[:, 0] * weights.flatten()[order, None]
        self.load += counts.long()
        z = self.gate(flat).logsumexp(-1).square().mean()
        balance = EXPERTS * torch.dot(counts.to(x.dtype), probs.mean(0)) / (flat.shape[0] * CHOSEN)
        return torch.zeros_like(flat).index_add_(0, order // CHOSEN, y).view_as(x), balance + 0.1 * z


class Switch(Experts):
    """Switch: one expert a token, taken by boolean masks."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probs = self.gate(x).softmax(-1)
        best, chosen = probs.max(-1)
        choice, out = F.one_hot(chosen, EXPERTS), torch.zeros_like(x)
        for number in range(EXPERTS):
            mask = choice[..., number].bool()
            out[mask] = self.expert(number, x[mask])
        with torch.no_grad():
            self.load.index_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
        return out * best[..., None], EXPERTS * (choice.to(x.dtype).mean((0, 1)) * probs.mean((0, 1))).sum()


class Fine(Experts):
    """DeepSeek-V3: sigmoid scores, groups of experts, a shared expert, bias against the load; the loss of V2 over each sequence."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns, _ = x.shape
        flat = x.view(-1, WIDTH)
        scores = self.gate(flat).sigmoid()
        biased = scores + self.correction
        groups = biased.view(-1, 3, 2).topk(2, -1).values.sum(-1).topk(2, -1, sorted=False).indices
        kept = torch.zeros(flat.shape[0], 3, dtype=x.dtype).scatter_(1, groups, 1)[..., None].expand(-1, 3, 2).reshape(-1, EXPERTS)
        chosen = biased.masked_fill(kept == 0, 0.0).topk(CHOSEN, -1, sorted=False).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
        with torch.no_grad():
            counts = F.one_hot(chosen, EXPERTS).sum((0, 1))
            self.load += counts
            self.correction += 1e-2 * torch.sign(counts.double().mean() - counts)
        share = torch.zeros(rows, EXPERTS, dtype=x.dtype)
        share.scatter_add_(1, chosen.view(rows, -1), torch.ones(rows, columns * CHOSEN, dtype=x.dtype)).div_(columns * CHOSEN / EXPERTS)
        loss = (share * scores.view(rows, columns, -1).mean(1)).sum(1).mean()
        routed = sum((weights * (chosen == n)).sum(-1, keepdim=True) * self.expert(n, flat) for n in range(EXPERTS))
        return (routed + self.expert(0, flat).sigmoid()).view_as(x), loss


class Dispatch(Experts):
    """GShard without capacity: one-hot dispatch and combine tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probs, weights, chosen = self.route(x)
        choice = F.one_hot(chosen, EXPERTS).to(x.dtype)
        y = torch.einsum("bleh,ehd->bled", F.silu(torch.einsum("bld,edh->bleh", x, self.up)), self.down)
        out = torch.einsum("bled,ble->bld", y, torch.einsum("blke,blk->ble", choice, weights))
        return out, EXPERTS * (probs.mean((0, 1)) * choice.sum(2).mean((0, 1))).sum()


class ExpertChoice(Experts):
    """Experts choose their tokens, among those of all rows."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.view(-1, WIDTH)
        best, token = self.gate(flat).softmax(-1).t().topk(5, -1)
        out = torch.zeros_like(flat)
        for number in range(EXPERTS):
            out = out.index_add(0, token[number], self.expert(number, flat[token[number]]) * best[number, :, None])
        return out.view_as(x), best.sum()


class Soft(Experts):
    """Experts get mixtures of all tokens of a row."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x)
        y = torch.stack([self.expert(n, torch.einsum("bl,bld->bd", scores[..., n].softmax(1), x)) for n in range(EXPERTS)], 1)
        return torch.einsum("ble,bed->bld", scores.softmax(-1), y), scores.sum()


class Capacity(Experts):
    """Tokens above an expert's capacity are dropped: which ones depends on the others."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.view(-1, WIDTH)
        probs, weights, chosen = self.route(flat)
        choice = F.one_hot(chosen[:, 0], EXPERTS)
        kept = (choice.cumsum(0) <= 12) * choice
        out = sum(kept[:, n, None] * weights[:, :1] * self.expert(n, flat) for n in range(EXPERTS))
        return out.view_as(x), probs.sum()  # type: ignore[union-attr]


class Model(nn.Module):
    """Attention, experts, and attention again, which would carry a difference to other tokens."""

    def __init__(self, kind: Callable[[], Experts]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.experts = kind()

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.mixed(0, self.embed(ids))
        y, loss = self.experts(x)
        return self.head(self.mixed(1, x + y)), loss

    def mixed(self, layer: int, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv[layer](x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def batch(rows: int = 4, columns: int = 14, prefix: int = 8, seed: int = 0) -> Tensor:
    ids = torch.randint(0, VOCABULARY, (rows, columns), generator=torch.Generator().manual_seed(seed))
    ids[:, :prefix] = ids[0, :prefix]
    return ids


def step(call: Any, model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    logits, loss = call(ids)
    ((logits * torch.sin(torch.arange(logits.numel())).view(logits.shape)).sum() + 3 * loss).backward()
    return logits.detach(), loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


SHARED = [Loop, Sorted, Fine, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (Switch, Dispatch))]


@pytest.mark.parametrize("kind", SHARED)
def test_equals_dense_and_rows_stay_apart(kind: Callable[[], Experts]) -> None:
    torch._dynamo.reset()
    dense = Model(kind).double()
    shared = copy.deepcopy(dense)
    call = compare.compiled(shared, "eager")
    for ids in (batch(), batch(3, 11, 5, seed=3)):
        (logits, loss, wanted), (found, extra, gradients) = step(dense, dense, ids), step(call, shared, ids)
        assert sp_compile.last_run().shared
        assert sp_compile.last_run().physical_tokens < ids.numel()
        assert bool(sp_compile.last_run().unpacked) == (kind is Fine), "a loss over each row is one of rows"
        assert compare.relative(found, logits) <= TOLERANCE
        assert compare.relative(extra, loss) <= TOLERANCE
        assert wanted.keys() == gradients.keys()
        assert all(compare.relative(gradients[name], g, floor=1e-3) <= TOLERANCE for name, g in wanted.items())
        for (name, one), (_, other) in zip(dense.named_buffers(), shared.named_buffers(), strict=True):
            assert torch.equal(one, other), name
    ids = batch()
    edited = ids.clone()
    edited[1, 9:] = (edited[1, 9:] + 7) % VOCABULARY  # as many physical tokens as before
    start = copy.deepcopy(shared.state_dict())
    with torch.no_grad():
        before = call(ids)[0]
        shared.load_state_dict(start)  # a bias that counts has moved
        after = call(edited)[0]
    beside = [0, 2, 3]
    assert not torch.allclose(after[1, 9:], before[1, 9:], atol=1e-3)
    torch.testing.assert_close(after[beside], before[beside], rtol=0, atol=1e-13)
    if kind not in (Loop, Sorted, Switch):  # these give other numbers of tokens to a product, which BLAS may round differently
        assert torch.equal(after[beside], before[beside])


@pytest.mark.parametrize("kind", [ExpertChoice, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (Soft, Capacity))])
def test_experts_that_mix_tokens_run_densely_and_say_so(kind: Callable[[], Experts]) -> None:
    torch._dynamo.reset()
    model, ids = Model(kind).double(), batch()
    call = torch.compile(model, backend="shared_prefix", options={"inner": "eager"})
    with torch.no_grad(), pytest.warns(UserWarning, match="tokens|columns"):
        found = call(ids)
    assert sp_compile.last_run().refused
    for one, other in zip(found, model(ids), strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def test_replayed_routing_is_shared_where_rows_agree() -> None:
    """Experts given for every row and column are part of what rows must agree in; given in the order of dense tokens they are refused."""

    class Replayed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model(Dispatch)

        def forward(self, ids: Tensor, routes: Tensor) -> Tensor:
            x, experts = self.inner.mixed(0, self.inner.embed(ids)), self.inner.experts
            flat = x.view(-1, WIDTH)
            weights = experts.gate(flat).softmax(-1).gather(1, routes.view(-1, CHOSEN))
            y = sum((weights * (routes.view(-1, CHOSEN) == n)).sum(-1, keepdim=True) * experts.expert(n, flat) for n in range(EXPERTS))
            return self.inner.head(self.inner.mixed(1, x + y.view_as(x)))  # type: ignore[no-any-return,union-attr]

    model, ids = Replayed().double(), batch()
    routes = (ids[..., None] + torch.tensor([0, 1])) % EXPERTS
    other = routes.clone()
    other[1, 3] = (other[1, 3] + 1) % EXPERTS
    torch._dynamo.reset()
    call = torch.compile(model, backend="shared_prefix", options={"inner": "eager", "min_sharing": 1.0})
    found = []
    with torch.no_grad():
        for given in (routes, other, routes.view(-1, CHOSEN)):
            torch.testing.assert_close(call(ids, given), model(ids, given), rtol=TOLERANCE, atol=TOLERANCE)
            found.append(sp_compile.last_run())
    assert [run.shared for run in found] == [True, True, False]
    assert found[0].physical_tokens < found[1].physical_tokens < ids.numel(), "a row parts where its experts do"
    assert found[2].refused
