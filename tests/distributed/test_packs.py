"""Packed calls over simulated ranks: experts, their counts, and reductions inside of the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_compile
from bench.models import mtp
from sp_compile.layout.rank_plans import RankPlan, plan_rank, take_local
from sp_compile.ops import over_ranks
from sp_compile.ops.numerics import relative_error
from tests.distributed import compiled, simulated
from tests.e2e import test_expert_forms as forms
from tests.e2e.models import spread

TOLERANCE = 1e-9


class Body(mtp.Model):
    """Logits alone."""

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.norm(self.body(self.embedding(ids), None)))  # type: ignore[no-any-return]


class Reduced(nn.Module):
    """Tokens use means and counts of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Body(mtp.Config(body="*", depth=0))
        self.gain = nn.Parameter(torch.zeros(97))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("best", torch.zeros(97, dtype=torch.float64))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inner(ids)
        used = x.softmax(-1).mean((0, 1))
        self.steps += 1
        self.best.copy_(x.detach().amax((0, 1)))
        return x * (1 + self.gain) - x.mean((0, 1)), (used * self.gain).sum() + x.std()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "counts": lambda: spread(Body(mtp.Config(body="*E", experts=3, depth=0))).double(),
    "balance": lambda: forms.Model(forms.Dispatch).double(),
    "reductions": lambda: spread(Reduced()).double(),
}


def weights(shape: Any) -> Tensor:
    return torch.sin(1 + torch.arange(torch.Size(shape).numel(), dtype=torch.float64)).view(shape)


def outputs_of(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


@pytest.mark.parametrize(("rows", "ranks"), [("deep", 3), ("tiny", 4), pytest.param("forest", 8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MODELS)
def test_equals_dense_rows(kind: str, rows: str, ranks: int) -> None:
    given = [[token % 40 for token in row] for row in compiled.ROWS[rows]]
    length = max(map(len, given))
    if kind == "reductions":  # dense means and counts see no padding
        given = [row + [39 - n] * (length - len(row)) for n, row in enumerate(given)]
    ids = torch.tensor([row + [0] * (length - len(row)) for row in given])
    real = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in given])
    packed = sp_compile.pack({"ids": ids, "mask": real}, mask="mask", positions=None)
    forest, model = packed.forest, MODELS[kind]()
    plans = [plan_rank(forest, ranks, rank) for rank in range(ranks)]
    dense = copy.deepcopy(model)
    wanted = _dense(dense, ids, real, forest)

    def loss_of(outs: list[Tensor], plan: RankPlan) -> Tensor:
        weight = take_local(weights((1, forest.num_tokens, outs[0].shape[-1])), plan)
        loss = over_ranks.total((outs[0] * weight).sum(), plan, "simulated")
        return loss + sum((3 * x for x in outs[1:] if x.requires_grad), torch.zeros(()))

    found = simulated.on_pack(model, [packed.inputs["ids"]], plans, loss_of)
    got = torch.cat([one.outputs[0] for one in found], 1)[:, : forest.num_tokens]
    assert relative_error(got, wanted["outputs"][0]) <= TOLERANCE
    for number, want in enumerate(wanted["outputs"][1:], start=1):
        assert all(relative_error(one.outputs[number], want) <= TOLERANCE for one in found)
    whole = max(float(g.norm()) for g in wanted["gradients"].values())
    assert all(one.gradients.keys() == wanted["gradients"].keys() for one in found)
    for name, want in wanted["gradients"].items():
        total = torch.stack([one.gradients[name] for one in found]).sum(0)
        assert float((total - want).norm()) <= TOLERANCE * max(float(want.norm()), 1e-3 * whole), name
    for name, value in wanted["buffers"].items():
        for one in found:
            if name in one.buffers:
                torch.testing.assert_close(one.buffers[name], value, rtol=1e-12 if value.is_floating_point() else 0, atol=0)
                assert torch.equal(one.buffers[name], found[0].buffers[name])


def _dense(model: nn.Module, ids: Tensor, real: Tensor, forest: sp_compile.Forest) -> dict[str, Any]:
    """The model on rows without padding, one by one if they differ in length; what it reduces is reduced over all real tokens."""
    row, column = forest.tensors(("row", "column"), "cpu")
    if bool(real.all()):
        outputs = outputs_of(model(ids))
        packed = [outputs[0][row, column][None], *outputs[1:]]
    else:
        packed = _by_packed_call(model, forest, ids[row, column][None])
    loss = (packed[0] * weights(packed[0].shape)).sum() + sum((3 * x for x in packed[1:] if x.requires_grad), torch.zeros(()))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"outputs": [x.detach() for x in packed], "gradients": gradients, "buffers": dict(model.named_buffers())}


def _by_packed_call(model: nn.Module, forest: sp_compile.Forest, ids: Tensor) -> list[Tensor]:
    """A packed call of one process, which `tests/e2e` compares with dense rows."""
    torch._dynamo.reset()
    call = torch.compile(model, backend="shared_prefix", options={"inner": "eager", "strict": True})
    with sp_compile.share(forest):
        return outputs_of(call(ids))
