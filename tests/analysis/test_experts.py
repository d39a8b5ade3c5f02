"""Mixtures of experts by hand: which ways of sorting tokens are proved to keep every token to itself, and which are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.analysis.test_traps import Between, exact, refused
from tests.passes.harness import Tiny, batch, compare, rewrite, run, targets

pytest.importorskip("transformers.integrations.moe")

SIZE, EXPERTS, CHOSEN = 8, 4, 2


@torch.library.custom_op("transformers_like::grouped", mutates_args=())
def unknown_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(x, weight, ends)  # type: ignore[no-any-return]


unknown_product.register_fake(lambda x, weight, ends: x.new_empty(x.shape[0], weight.shape[2]))


class Experts(nn.Module):
    """`mix(self, tokens [S, H], chosen experts [S, k], their weights [S, k]) -> [S, H]`."""

    def __init__(self, mix: Callable[[Experts, Tensor, Tensor, Tensor], Tensor], chosen: int = CHOSEN) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.gate = nn.Parameter(torch.randn(EXPERTS, SIZE, generator=generator, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(EXPERTS, SIZE, SIZE, generator=generator, dtype=torch.float64) * 0.3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, SIZE, generator=generator, dtype=torch.float64))
        self.mix, self.chosen = mix, chosen

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        flat = x.reshape(-1, SIZE)
        weights, experts = F.linear(flat, self.gate).softmax(-1).topk(self.chosen, -1)
        return x + self.mix(self, flat, experts, weights).view(x.shape)


def product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(x, weight, ends)  # type: ignore[no-any-return]


def ends_of(ids: Tensor, bins: int = EXPERTS) -> Tensor:
    return torch.histc(ids.float(), bins=bins, min=0, max=bins - 1).cumsum(0, dtype=torch.int32)


# -- proved ----------------------------------------------------------------------------------------------------------------------------


def written_inverse(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    ids, perm = torch.sort(experts.reshape(-1))
    y = (product(x[perm // m.chosen], m.weight, ends_of(ids)) + m.bias[ids]) * weights.reshape(-1)[perm, None]
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.shape[0])
    return y[inverse].view(-1, m.chosen, SIZE).sum(1)


def sorted_inverse(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    flat = experts.flatten()
    perm = flat.argsort(stable=True)
    y = product(x.repeat_interleave(m.chosen, 0).index_select(0, perm), m.weight, ends_of(flat))
    back = y.index_select(0, perm.argsort()).unflatten(0, (-1, m.chosen))
    return (back * weights.unsqueeze(-1)).sum(1)


def added_to_tokens(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    ids, perm = experts.view(-1).sort()
    token = torch.div(perm, m.chosen, rounding_mode="floor")
    y = product(x.gather(0, token[:, None].expand(-1, SIZE)), m.weight, ends_of(ids)) * weights.view(-1)[perm].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, token, y)


def scattered(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    ids, perm = experts.view(-1).sort()
    y = product(x[perm // m.chosen], m.weight, ends_of(ids))
    back = torch.empty_like(y, requires_grad=False).scatter(0, perm[:, None].expand(-1, SIZE), y)
    return torch.einsum("skh,sk->sh", back.view(-1, m.chosen, SIZE), weights)


def put_back(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    ids, perm = experts.view(-1).sort()
    y = product(x[perm // m.chosen], m.weight, ends_of(ids))
    back = torch.zeros(experts.numel(), SIZE, dtype=y.dtype)
    back[perm] = y
    return (back.view(-1, m.chosen, SIZE) * weights[..., None]).sum(1)


def gathered_weights(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    flat = experts.reshape(-1)
    y = torch.bmm(x.repeat_interleave(m.chosen, 0)[:, None], m.weight[flat]).squeeze(1) + m.bias[flat]
    return (y * weights.reshape(-1, 1)).view(-1, m.chosen, SIZE).sum(1)


def every_expert(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        share = (weights * (experts == number)).sum(-1, keepdim=True)
        out = out + share * (x @ m.weight[number])
    return out


def dispatched(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    choice = F.one_hot(experts, EXPERTS).to(x.dtype)
    combine = torch.einsum("ske,sk->se", choice, weights)
    taken = torch.einsum("se,sh->esh", choice.sum(1), x)
    return torch.einsum("esh,se->sh", torch.bmm(taken, m.weight), combine)


SORTED = [written_inverse, sorted_inverse, added_to_tokens, scattered, put_back]


@pytest.mark.parametrize("mix", [*SORTED, gathered_weights, every_expert, dispatched])
def test_experts_are_computed_on_tokens(mix: Callable[..., Tensor]) -> None:
    found = exact(Between(Experts(mix)), batch())
    assert found.context.unpacked == []
    assert "sp_compile.attention" in targets(found.after["select_kernels"]) or "attention" in str(targets(found.after["add_forest_masks"]))


@pytest.mark.parametrize("mix", [written_inverse, sorted_inverse])
def test_one_expert_per_token(mix: Callable[..., Tensor]) -> None:
    exact(Between(Experts(mix, chosen=1)), batch())


def test_torch_grouped_product() -> None:
    def mix(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        ids, perm = torch.sort(experts.reshape(-1))
        y = torch._grouped_mm(x[perm // CHOSEN].bfloat16(), m.weight.bfloat16(), offs=ends_of(ids)).double()
        return (y[perm.argsort()].view(-1, CHOSEN, SIZE) * weights[..., None]).sum(1)

    error, _ = compare(Between(Experts(mix)), batch())
    assert error < 0.02, "bfloat16"


def test_counts_for_the_caller_are_those_of_the_rows() -> None:
    """The sort that groups tokens is one of physical tokens; what the caller sees of it is not."""

    def use(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        experts = hidden.reshape(-1, SIZE)[:, :EXPERTS].topk(CHOSEN, -1).indices
        chosen, perm = torch.sort(experts.reshape(-1), stable=True)
        y = product(hidden.reshape(-1, SIZE)[perm // CHOSEN], torch.eye(SIZE, dtype=hidden.dtype).repeat(EXPERTS, 1, 1), ends_of(chosen))
        return y[perm.argsort()].view(*ids.shape, CHOSEN, SIZE).sum(2), ends_of(chosen), perm

    class Counted(Tiny):
        def forward(self, ids: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
            return use(self.hidden(ids), ids)

    model, ids = Counted(lambda logits, ids: logits), batch()
    wanted = model(ids)
    got, _ = run(model, ids)
    for one, other in zip(wanted, got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert any("histc" in entry or "sort" in entry for entry in rewrite(model, ids).context.unpacked)


class Counting(Experts):
    """Updates a count of its experts' tokens and a bias by it, as routers without auxiliary loss do."""

    def __init__(self) -> None:
        super().__init__(written_inverse)
        self.register_buffer("load", torch.zeros(EXPERTS, dtype=torch.int64))
        self.register_buffer("correction", torch.zeros(EXPERTS, dtype=torch.float64))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        flat = x.reshape(-1, SIZE)
        scores = F.linear(flat, self.gate).sigmoid()
        experts = (scores + self.correction).topk(CHOSEN, -1).indices
        with torch.no_grad():
            counts = torch.histc(experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
            self.load += counts.long()
            self.correction.add_(torch.sign(counts.mean() - counts), alpha=0.01)
        return x + written_inverse(self, flat, experts, scores.gather(-1, experts)).view(x.shape)


def test_counts_kept_in_buffers_are_those_of_the_rows() -> None:
    dense, shared, ids = Counting(), Counting(), batch()
    wanted = Between(dense)(ids)
    got, _ = run(Between(shared), ids)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    assert int(shared.load.sum()) == CHOSEN * ids.numel()
    assert torch.equal(shared.load, dense.load)
    torch.testing.assert_close(shared.correction, dense.correction, rtol=1e-6, atol=0)  # steps of 0.01 whose sign comes from counts
    assert bool(dense.correction.any())


# -- not proved ------------------------------------------------------------------------------------------------------------------------


def capacity_by_count(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    choice = F.one_hot(experts[:, 0], EXPERTS)
    place = (choice.cumsum(0) * choice).sum(-1)
    return every_expert(m, x * (place <= 3)[:, None], experts, weights)


def capacity_by_cut(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    kept = weights[:, 0].sort(descending=True).indices[:5]
    return torch.zeros_like(x).index_add(0, kept, x[kept])


def chosen_by_experts(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    scores, tokens = F.linear(x, m.gate).softmax(-1).topk(3, dim=0)
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        out = out.index_add(0, tokens[:, number], (x[tokens[:, number]] @ m.weight[number]) * scores[:, number, None])
    return out


def place_as_value(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    _, perm = experts.reshape(-1).sort()
    return (x[perm // CHOSEN] * perm[:, None])[perm.argsort()].view(-1, CHOSEN, SIZE).sum(1)


def count_as_value(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    counts = torch.histc(experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    return every_expert(m, x, experts, weights / counts[experts])


def place_seen_before_it_is_written(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    _, perm = experts.reshape(-1).sort()
    inverse = torch.zeros_like(perm)
    seen = inverse.view(-1)
    inverse[perm] = torch.arange(perm.shape[0])
    return x * seen.view(-1, CHOSEN)[:, :1]


def groups(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Callable[..., Tensor]:
    """The usual computation, but for what `change(experts, weights)` makes: sorted experts, their places, ends of groups."""

    def mix(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        _, perm, ends = change(experts, weights)
        y = product(x[perm // (perm.shape[0] // x.shape[0])], m.weight, ends)
        return y[perm.argsort()].view(x.shape[0], -1, SIZE).sum(1)

    return mix


def other_order(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ids, perm = (weights * 10).floor().reshape(-1).sort()
    return ids, perm, ends_of(experts)


def falling(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ids, perm = experts.reshape(-1).sort(descending=True)
    return ids, perm, ends_of(ids)


def counts_of_a_part(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ids, perm = experts[:, 0].sort()
    return ids, perm, ends_of(experts[:, 1])


def counts_of_more(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ids, perm = experts[:, 0].sort()
    return ids, perm, ends_of(experts)


def counts_not_summed(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ids, perm = experts.reshape(-1).sort()
    return ids, perm, torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).int()


def counts_turned(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ids, perm = experts.reshape(-1).sort()
    counts = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).view(2, 2).t().reshape(-1)
    return ids, perm, counts.cumsum(0, dtype=torch.int32)


def outside_of_the_bins(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ids, perm = (experts - 1).reshape(-1).sort()
    return ids, perm, ends_of(ids)


WRONG_GROUPS = [other_order, falling, counts_of_a_part, counts_of_more, counts_not_summed, counts_turned, outside_of_the_bins]


@pytest.mark.parametrize(
    "mix, reason",
    [
        (capacity_by_count, "cumsum runs along the columns"),
        (capacity_by_cut, "part of the columns is cut out"),
        (chosen_by_experts, "topk along dimension 0 runs over tokens"),
        (place_as_value, "used as a value"),
        (count_as_value, "used as a value"),
        (place_seen_before_it_is_written, "used as a value"),
    ],
)
def test_tokens_that_see_others_are_refused(mix: Callable[..., Tensor], reason: str) -> None:
    found = refused(Between(Experts(mix)), batch())
    assert reason in found.reason
    assert "test_experts.py" in found.source


@pytest.mark.parametrize("change", WRONG_GROUPS)
def test_groups_that_are_not_those_of_the_sort_are_refused(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> None:
    found = refused(Between(Experts(groups(change))), batch())
    assert "groups of a grouped matrix product" in found.reason or "used as a value" in found.reason or "histc" in found.reason


def test_unknown_grouped_product_is_refused() -> None:
    """The contract names an op; another one that does the same is not taken on trust."""

    def mix(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        ids, perm = experts.reshape(-1).sort()
        y = torch.ops.transformers_like.grouped(x[perm // CHOSEN].detach(), m.weight.detach(), ends_of(ids))
        return y[perm.argsort()].view(-1, CHOSEN, SIZE).sum(1)  # type: ignore[no-any-return]

    assert "no rule" in refused(Between(Experts(mix)), batch()).reason
