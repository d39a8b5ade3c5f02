"""Models that are given whole rows on every rank: outputs, losses, counts and the sum of gradients are those of the dense model.

Ranks are simulated (`simulated.py`); `test_processes.py` runs some of this over gloo.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models import mtp
from sp_compile.ops.numerics import relative_error
from tests.distributed import compiled, simulated
from tests.distributed.hybrids import Hybrid
from tests.e2e import test_expert_forms as forms
from tests.e2e.models import spread
from tests.e2e.test_mtp import FORESTS
from tests.passes.harness import Tiny, TinyHidden, batch

TOLERANCE = 1e-9
"""float64"""
SINGLE = 1e-4
"""Where a library computes in float32."""


def loss_of(outputs: Sequence[Tensor]) -> Tensor:
    """A loss in which every element of every float output has a weight of its own."""
    floats = [x for x in outputs if x.is_floating_point() and x.requires_grad]
    return torch.stack([(x * (0.1 + torch.sin(torch.arange(x.numel(), dtype=x.dtype))).view(x.shape)).sum() for x in floats]).sum()


def check(model: nn.Module, inputs: Sequence[Any], ranks: int, tolerance: float = TOLERANCE, **options: Any) -> list[simulated.Found]:
    dense = copy.deepcopy(model)
    outputs = dense(*inputs)
    wanted = [outputs] if isinstance(outputs, Tensor) else [x for x in outputs if isinstance(x, Tensor)]
    loss_of(wanted).backward()
    found = simulated.on_rows(model, inputs, ranks, loss_of, **options)
    for one in found:
        assert len(one.outputs) >= len(wanted), "a buffer that is written may be an output too"
        for got, want, first in zip(one.outputs, wanted, found[0].outputs, strict=False):
            assert got.dtype == want.dtype
            assert relative_error(got, want.detach()) <= tolerance
            assert torch.equal(got, first), "other bits on another rank"
    gradients = {name: p.grad for name, p in dense.named_parameters() if p.grad is not None}
    assert all(one.gradients.keys() == gradients.keys() for one in found)
    whole = max(float(g.norm()) for g in gradients.values())
    for name, want in gradients.items():
        got = torch.stack([one.gradients[name] for one in found]).sum(0)
        assert float((got - want).norm()) <= tolerance * max(float(want.norm()), 1e-3 * whole), (name, ranks)
    for name, want in dense.named_buffers():
        assert all(torch.equal(one.buffers[name], want) for one in found if name in one.buffers), (name, ranks)
    return found


LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "logits": lambda x, ids: x,
    "cross entropy": lambda x, ids: F.cross_entropy(x[:, :-1].flatten(0, 1), ids[:, 1:].flatten()),
    "weighed and smoothed": lambda x, ids: F.cross_entropy(
        x[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1, weight=torch.linspace(1, 2, 50, dtype=x.dtype), reduction="sum"
    ),
    "picked": lambda x, ids: -(x.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)).mean(1),
    "nll": lambda x, ids: F.nll_loss(x.log_softmax(-1)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=3),
    "last": lambda x, ids: x[:, -1],
    "rolled": lambda x, ids: x.roll(-1, 1) * 2,
    "centred": lambda x, ids: x - x.mean((0, 1)),
    "scaled": lambda x, ids: (x / x.norm(), x.flatten(0, 1).logsumexp(0), x.std((0, 1))),
    "of rows": lambda x, ids: (x.mean(1), x / x.shape[1]),
    "greatest": lambda x, ids: (x - x.amax((0, 1)), (x > 1).sum((0, 1))),
}
QUICK = ("cross entropy", "nll", "centred", "greatest")


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in LOSSES])
def test_losses_and_reductions(name: str, ranks: int) -> None:
    check(Tiny(LOSSES[name]), (batch(),), ranks)


class Regularised(Tiny):
    """Parameters that meet tokens, a reduction, and neither."""

    def forward(self, ids: Tensor, *more: Tensor) -> Any:
        logits = self.head(self.hidden(ids))
        used = logits.softmax(-1).mean((0, 1))
        balanced = (used * self.head.bias).sum() + (self.head.weight.square().sum() * used.square().sum()).sqrt()
        return logits + 0.1 * used * self.head.bias, balanced, self.q.weight.norm()


@pytest.mark.parametrize("ids", [torch.tensor([[1, 2, 3], [1, 4, 5]]), torch.tensor([[1, 2], [3, 4]])], ids=["shared", "not shared"])
def test_ranks_with_nothing_but_padding(ids: Tensor) -> None:
    """They take part in every exchange: nobody leaves an attention early."""
    check(Tiny(LOSSES["centred"]), (ids,), 8)


class Written(Tiny):
    """Reductions that are written in place to, and into, before tokens and parameters use them."""

    def forward(self, ids: Tensor, *more: Tensor) -> Any:
        logits = self.head(self.hidden(ids))
        used = logits.softmax(-1).mean((0, 1))
        used.mul_(2)
        kept = torch.zeros(50, dtype=logits.dtype)
        kept.add_(used)
        logits = logits * kept
        logits.add_(kept * self.head.bias)
        return logits, (kept * self.head.bias).sum()


@pytest.mark.parametrize("ranks", [1, 2])
def test_reductions_that_are_written_in_place(ranks: int) -> None:
    check(Written(lambda x, ids: x), (batch(),), ranks)


class Scored(TinyHidden):
    """A head on the last column alone, which is computed on rows."""

    def forward(self, ids: Tensor, *more: Tensor) -> Any:
        return self.head(self.hidden(ids)[:, -1]).tanh()


def test_a_head_on_rows() -> None:
    check(Scored(lambda x, ids: x), (batch(),), 3)


@pytest.mark.parametrize("ranks", [1, 3])
def test_parameters_that_all_ranks_use_alike(ranks: int) -> None:
    check(Regularised(lambda x, ids: x), (batch(),), ranks)


@pytest.mark.parametrize(
    "kind", [forms.Loop, forms.Fine, *(pytest.param(k, marks=pytest.mark.slow) for k in (forms.Sorted, forms.Switch, forms.Dispatch))]
)
def test_experts(kind: Callable[[], forms.Experts]) -> None:
    """Auxiliary losses, counts of every kind, buffers that are counted in and a bias that moves."""
    for ranks in (3,):
        check(forms.Model(kind).double(), (forms.batch(),), ranks)


def predictor(**config: Any) -> nn.Module:
    return spread(mtp.Model(mtp.Config(**config))).double()


@pytest.mark.parametrize(
    ("forest", "config"),
    [
        ("ragged", {"body": "*E", "experts": 3, "depth": 1}),
        pytest.param("rows that end within the depth", {"body": "*-", "head_block": "*-", "depth": 2}, marks=pytest.mark.slow),
        pytest.param("nodes shorter than the depth", {"body": "*E", "experts": 3, "depth": 2, "per_token": True}, marks=pytest.mark.slow),
        pytest.param("star", {"body": "*-", "head_block": "-", "depth": 2, "detach": True}, marks=pytest.mark.slow),
    ],
)
def test_prediction_of_several_tokens_over_borders(forest: str, config: dict[str, Any]) -> None:
    """Each refined forest is spread for itself, so what looks ahead comes from another rank."""
    ids, real, groups = FORESTS[forest]
    for ranks in (2, 3, 8) if config["depth"] > 1 else (4,):
        check(predictor(**config), (ids, real, real if ranks != 3 else None, groups), ranks)


MIXED = {"body": "*MG*E", "head_block": "*E", "depth": 1, "experts": 3}
"""The plain hybrid: attention, Mamba-2, gated delta net, experts, and a head that predicts another token."""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", ["star", "forest", "deep"])
def test_plain_hybrid(rows: str, ranks: int) -> None:
    pytest.importorskip("transformers")
    given = compiled.ROWS[rows]
    length = max(map(len, given))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in given])
    real = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in given])
    groups = torch.tensor([row[0] for row in given])
    check(spread(mtp.Model(mtp.Config(**MIXED))), (ids, real, real, groups), ranks, SINGLE)


@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_recurrences_of_refined_forests(ranks: int) -> None:
    """A short convolution and a recurrence in the body and in the head."""
    pytest.importorskip("transformers")
    ids, real, groups = FORESTS["ragged"]
    model = spread(
        mtp.Model(mtp.Config(body="*", head_block="M", depth=1) if ranks == 2 else mtp.Config(body="C*", head_block="MCG", depth=1))
    )
    check(model, (ids, real, real, groups), ranks, SINGLE)


@pytest.mark.slow
def test_every_recurrence_on_rows() -> None:
    given = compiled.ROWS["deep"]
    length = max(map(len, given))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in given])
    check(spread(Hybrid()).double(), (ids,), 4, kernels=compiled.KERNELS)


def test_replay_is_bit_equal() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        runs = simulated.repeated(forms.Model(forms.Fine), (forms.batch(),), 2, loss_of, 3)
        for run in runs[1:]:
            for one, first in zip(run, runs[0], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one.outputs, first.outputs, strict=True))
                assert all(torch.equal(one.gradients[name], g) for name, g in first.gradients.items())
                assert all(torch.equal(one.buffers[name], b) for name, b in first.buffers.items())
    finally:
        torch.use_deterministic_algorithms(False)
