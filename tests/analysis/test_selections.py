"""Experts that take their tokens by a mask, as eager loops do: shared where every token comes back to its own place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile
from tests.analysis.test_experts import CHOSEN, EXPERTS, SIZE, Experts, every_expert
from tests.analysis.test_traps import Between, exact, refused
from tests.passes.harness import batch, run, targets


def added(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """With one-hot masks, as older transformers write it."""
    out = torch.zeros_like(x)
    mask = F.one_hot(experts, EXPERTS).permute(2, 1, 0)
    for number in range(EXPERTS):
        slot, token = torch.where(mask[number])
        y = (x[None, token].reshape(-1, SIZE) @ m.weight[number] + m.bias[number]) * weights[token, slot, None]
        out.index_add_(0, token, y)
    return out


def put(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        token, slot = (experts == number).nonzero(as_tuple=True)
        out[token] += (x[token] @ m.weight[number]) * weights[token, slot].unsqueeze(-1)
    return out


def masked(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        mask = (experts == number).any(-1)
        out[mask] = out[mask] + (x[mask] @ m.weight[number]) * (weights * (experts == number)).sum(-1)[mask, None]
    return out


def of_pairs(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """The places of (token, slot) pairs in one dimension."""
    out = torch.zeros_like(x)
    for number in range(EXPERTS):
        pair = (experts.flatten() == number).nonzero().squeeze(-1)
        y = x.index_select(0, pair // CHOSEN) @ m.weight[number] * weights.flatten()[pair, None]
        out = out.scatter_add(0, (pair // CHOSEN)[:, None].expand(-1, SIZE), y)
    return out


@pytest.mark.parametrize("mix", [added, put, masked, of_pairs])
def test_loop_over_experts_runs_on_tokens(mix: Callable[..., Tensor]) -> None:
    found = exact(Between(Experts(mix)), batch())
    assert found.context.unpacked == []
    assert not any(name == "sp_compile.unpack" for name in targets(found.after["share_prefixes"])[:-2])


class Counting(Experts):
    """Counts in a buffer what the groups of a loop get."""

    def __init__(self) -> None:
        super().__init__(put)
        self.register_buffer("load", torch.zeros(EXPERTS, dtype=torch.int64))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        flat = x.reshape(-1, SIZE)
        probs = F.linear(flat, self.gate).softmax(-1)
        weights, experts = probs.topk(CHOSEN, -1)
        counts = torch.bincount(experts.flatten(), minlength=EXPERTS)
        self.load += counts
        return x + put(self, flat, experts, weights).view(x.shape)


def test_groups_are_of_tokens_and_counts_of_rows() -> None:
    dense, shared, ids = Counting(), Counting(), batch()
    wanted = Between(dense)(ids)
    got, _ = run(Between(shared), ids)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    assert torch.equal(shared.load, dense.load)
    assert int(shared.load.sum()) == CHOSEN * ids.numel()
    assert sp_compile.last_run().shared


def chosen_tokens_summed(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    token, _ = torch.where(experts == 1)
    return x + x[token].sum(0)


def chosen_tokens_numbered(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    token, _ = torch.where(experts == 1)
    return x.index_add(0, token, x[token] * token[:, None])


def other_mask(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    token, other = torch.where(experts == 1)[0], torch.where(experts == 2)[0]
    return x.index_add(0, other, x[token])


def written_in_order(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    mask = (experts == 1).any(-1)
    return x.masked_scatter(mask[:, None], x[mask].flip(0))


def chosen_tokens_counted(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    token, _ = torch.where(experts == 1)
    return x.index_add(0, token, x[token] / token.shape[0])


def test_tokens_that_are_chosen_and_summed_are_left_to_dynamo() -> None:
    """Their sum is one of rows, of which others are chosen than of tokens."""
    assert refused(Between(Experts(chosen_tokens_summed)), batch()).advice is not None


@pytest.mark.parametrize("mix", [chosen_tokens_numbered, other_mask, written_in_order, chosen_tokens_counted])
def test_tokens_that_see_which_others_are_chosen_are_refused(mix: Callable[..., Tensor]) -> None:
    assert "test_selections.py" in refused(Between(Experts(mix)), batch()).source


def branches(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Python that asks for a number: torch breaks the graph there, with or without this package."""
    counts = torch.bincount(experts.flatten(), minlength=EXPERTS).tolist()
    return every_expert(m, x, experts, weights) if counts[0] > 2 else x


def test_what_needs_numbers_is_left_to_dynamo() -> None:
    """No error where there is none without this package, and the numbers are right."""
    torch._dynamo.reset()
    model, ids = Between(Experts(branches)), batch()
    call = torch.compile(model, backend="shared_prefix", options={"inner": "eager"})
    torch.testing.assert_close(call(ids), model(ids), rtol=1e-10, atol=1e-10)
    assert sp_compile.last_run().refused


def test_other_backends_are_left_alone() -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def other(module: torch.fx.GraphModule, values: list[object]) -> Callable[..., object]:
        graphs.append(module)
        return module.forward

    model: nn.Module = Experts(put)
    torch.compile(model, backend=other)(torch.randn(2, 3, SIZE, dtype=torch.float64), batch(2, 3, 1))
    assert len(graphs) != 1, "broken where a size depends on data, as ever"
    assert not torch._dynamo.config.capture_dynamic_output_shape_ops
