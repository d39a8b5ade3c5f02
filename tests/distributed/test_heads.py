"""Mixers spread by heads: the same results as by tokens, and as on one rank; which way is taken and how it is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile
from sp_compile.errors import InvalidInput, InvalidOption
from sp_compile.layout.rank_plans import plan_rank, take_local
from sp_compile.ops import over_ranks
from sp_compile.ops.head_exchange import elements_sent
from sp_compile.ops.numerics import relative_error
from tests.distributed import cases, compiled, simulated
from tests.distributed.test_rows import check, loss_of
from tests.e2e.models import spread

WAYS = {"heads": over_ranks.scan_by_heads, "states": over_ranks.scan}
HEADS: dict[str, int] = {"linear_scan": 1}


def recurrence(kind: str, way: str, ranks: int, dtype: torch.dtype = torch.float64) -> cases.Tensors:
    """Results of all ranks side by side, and gradients of tokens and parameters."""
    tree = cases.forest("deep")
    values, parameters = cases.inputs(kind, tree.num_tokens, dtype)
    if kind == "linear_scan":  # channels that can be dealt
        values = {name: torch.cat([value, value[..., :3]], -1) for name, value in values.items()}
    group = simulated.Group(ranks)
    leaves = [{name: value.detach().clone().requires_grad_() for name, value in {**values, **parameters}.items()} for _ in range(ranks)]

    def work(rank: int) -> Tensor:
        plan, own = plan_rank(tree, ranks, rank), leaves[rank]
        local = {name: take_local(own[name], plan, 1.0) for name in values}
        given = cases.recurrent(kind, local, {name: own[name] for name in parameters})
        out = WAYS[way](kind, given, plan, group.group_name, **cases.SCANS[kind][2])
        weight = take_local(cases.made(99, 1, tree.num_tokens, *out.shape[2:], dtype=dtype), plan)
        over_ranks.total((out * weight).sum(), plan, group.group_name).backward()
        return out.detach()

    with simulated.standing_in(group):
        outs = simulated.together(group, work)
    found = {"out": torch.cat(outs, 1)[:, : tree.num_tokens]}
    return found | {name: torch.stack([own[name].grad for own in leaves]).sum(0) for name in leaves[0]}  # type: ignore[misc]


@pytest.mark.parametrize("kind", list(cases.SCANS))
def test_recurrences_by_heads_equal_those_by_states(kind: str) -> None:
    by_heads, by_states = (recurrence(kind, way, 2) for way in WAYS)
    for name, want in by_states.items():
        assert relative_error(by_heads[name], want) <= 1e-10, (kind, name)


def test_heads_that_cannot_be_dealt_are_an_error() -> None:
    tree = cases.forest("star")
    plan = plan_rank(tree, 3, 0)
    x = torch.zeros(1, plan.size, 5)
    with pytest.raises(InvalidInput, match="multiple of 3 heads, got 5"):
        over_ranks.scan_by_heads("linear_scan", {"a": x, "x": x}, plan, "")
    with pytest.raises(InvalidInput, match="expected a recurrence among"):
        over_ranks.scan_by_heads("attention", {}, plan, "")


class Attentive(nn.Module):
    """Grouped heads, a padding mask, a window in one layer and a sink in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.unembed = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.q = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.kv = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.sink = nn.Parameter(torch.zeros(8))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        columns = x.shape[1]
        place = torch.arange(columns)
        for number in range(2):
            q = self.q[number](x).unflatten(-1, (8, 4)).transpose(1, 2)
            k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.kv[number](x).chunk(2, -1))
            seen = (place[:, None] >= place) & (attention_mask[:, None, None] != 0)
            if number:
                scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3) / 2).masked_fill(~seen, -torch.inf)
                sink = self.sink.view(1, -1, 1, 1).expand(q.shape[0], -1, columns, 1)
                y = torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)
            else:
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen & (place[:, None] - place < 6), enable_gqa=True)
            x = x + y.transpose(1, 2).flatten(2)
        return self.unembed(x)


def batch() -> tuple[Tensor, Tensor]:
    given = compiled.ROWS["tree"]
    length = max(map(len, given))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in given])
    return ids, torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in given])


class Kept(nn.Module):
    """The logits of real tokens, which are those that dense rows and shared ones agree in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attentive()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.inner(input_ids, attention_mask) * attention_mask[..., None]


def way_taken() -> str:
    """Of the latest call in the process, which is what a thread without calls of its own is told."""
    (said,) = simulated.together(simulated.Group(1), lambda _: sp_compile.last_run().kernels["context_attention"])
    return str(said)


@pytest.mark.parametrize(("ranks", "way"), [(2, "heads"), (4, "auto"), pytest.param(4, "gather", marks=pytest.mark.slow)])
def test_attention_equals_dense(ranks: int, way: str) -> None:
    check(spread(Kept()).double(), batch(), ranks, context_attention=way)
    said = way_taken()
    assert said.startswith("gather" if way == "gather" else "heads"), said


def test_the_way_that_sends_less_is_chosen() -> None:
    assert elements_sent(1, 8, 2, 4, 4) == {"gather": 0, "heads": 0}
    few, many = elements_sent(2, 8, 8, 4, 4), elements_sent(8, 8, 8, 4, 4)
    assert many["gather"] / many["heads"] > few["gather"] / few["heads"] > 1


def test_heads_that_are_no_multiple_of_the_ranks() -> None:
    """They are gathered, or refused with the op's name if they must not be."""
    check(spread(Kept()).double(), batch(), 3)
    assert way_taken().startswith("gather")
    with pytest.raises(Exception, match=r"8 heads of queries and 4 of keys over 3 ranks.*op attention.*'gather' or 'auto'"):
        simulated.on_rows(spread(Kept()).double(), batch(), 3, loss_of, context_attention="heads")
    with pytest.raises(InvalidOption, match="'auto', 'gather' or 'heads', got 'ring'"):
        sp_compile.options.parse({"context_attention": "ring"})


def test_replay_is_bit_equal() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        runs: list[list[simulated.Found]] = simulated.repeated(spread(Kept()), batch(), 2, loss_of, 3, context_attention="heads")
        scans = [recurrence("ssd_scan", "heads", 2, torch.float32) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        for one, first in zip(run, runs[0], strict=True):
            assert torch.equal(one.outputs[0], first.outputs[0])
            assert all(torch.equal(one.gradients[name], g) for name, g in first.gradients.items())
    assert all(torch.equal(found[name], value) for found in scans for name, value in scans[0].items())


def test_opcheck() -> None:
    x = torch.randn(1, 4, 3, 2, requires_grad=True)
    arguments: dict[str, tuple[Any, ...]] = {"swap_heads": (x, 2, 1, 1, "", False), "place_own": (x.detach(), 1, 1, "")}
    for name, given in arguments.items():
        torch.library.opcheck(getattr(torch.ops.sp_compile, name).default, given)
