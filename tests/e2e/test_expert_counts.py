"""Buffers that count what experts get hold the dense counts, once for each forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import sp_compile
from bench.models.mtp import Config, Experts, Model
from tests.e2e import compare
from tests.e2e.models import spread
from tests.e2e.scenarios import VOCABULARY, forest, right_padded, star, tree

TOLERANCE = 1e-9


class Recomputed(Model):
    """The body's activations are recomputed in backward; `kind` None: are kept."""

    kind: str | None = None

    def forward(self, ids: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        x = self.embedding(ids)
        if self.kind is None:
            x = self.body(x, None)
        else:
            x = checkpoint(self.body, x, None, use_reentrant=self.kind == "reentrant")
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def model() -> Recomputed:
    made = spread(Recomputed(Config(body="*E", depth=0, experts=3))).double()
    assert isinstance(made, Recomputed)
    return made


def backward(logits: Tensor) -> None:
    (logits * torch.sin(torch.arange(logits.numel())).view(logits.shape)).sum().backward()


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_once_under_recomputation(kind: str) -> None:
    """Three micro-batches, a frozen router; wanted is what a model counts that keeps its activations."""
    torch._dynamo.reset()
    dense, shared = model(), model()
    shared.kind = kind
    for one in (dense, shared):
        one.body.layers[1].router.requires_grad_(False)  # type: ignore[union-attr]
    call = compare.compiled(shared, "aot_eager")
    for rows in (star(), forest(), tree()):
        ids = right_padded(rows)[0]
        backward(dense(ids))
        backward(call(ids))
        account = sp_compile.last_run()
        assert account.shared
        assert not account.unpacked
    wanted, found = dense.body.layers[1], shared.body.layers[1]
    assert isinstance(wanted, Experts)
    assert torch.equal(found.load, wanted.load)  # type: ignore[arg-type]
    assert int(wanted.load.sum()) == 2 * sum(right_padded(rows)[0].numel() for rows in (star(), forest(), tree()))
    for one_p, other_p in zip(dense.parameters(), shared.parameters(), strict=True):
        assert (one_p.grad is None) == (other_p.grad is None)
        assert one_p.grad is None or compare.relative(other_p.grad, one_p.grad, floor=1e-6) <= TOLERANCE  # type: ignore[arg-type]


def test_counts_of_packed_calls_are_those_of_the_rows() -> None:
    torch._dynamo.reset()
    dense, shared = model(), model()
    shared.load_state_dict(dense.state_dict())
    call = torch.compile(shared, backend="shared_prefix", options={"inner": "eager", "strict": True})
    ids = right_padded(star())[0]
    packed = sp_compile.pack({"input_ids": ids})
    with sp_compile.share(packed.forest):
        logits = call(packed.inputs["input_ids"])
    torch.testing.assert_close(sp_compile.unpack(logits, packed.forest), dense(ids), rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.equal(shared.body.layers[1].load, dense.body.layers[1].load)  # type: ignore[arg-type]


def test_replayed_counts_on_random_forests_are_exact() -> None:
    torch._dynamo.reset()
    dense = model()
    shared = copy.deepcopy(dense)
    call = compare.compiled(shared, "eager")
    generator = torch.Generator().manual_seed(3)
    for _ in range(6):
        rows, columns = (int(n) for n in torch.randint(3, 12, (2,), generator=generator))
        ids = torch.randint(0, 3, (rows, columns), generator=generator) % VOCABULARY
        with torch.no_grad():
            dense(ids), call(ids)
        assert sp_compile.last_run().shared
        assert torch.equal(shared.body.layers[1].load, dense.body.layers[1].load)  # type: ignore[arg-type]
