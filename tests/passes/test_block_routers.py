"""Router logits in blocks: the same bits for a token in every batch, nothing else changed, and no silence where there is no router."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import sp_compile
from sp_compile.errors import InvalidOption
from sp_compile.options import parse
from tests.passes.harness import Tiny, batch, compare, rewrite, run, show, targets

PASS, EXPERTS = "block_routers", 4


class Routed(Tiny):
    """A router and four experts behind the attention; returns logits and the router's."""

    def __init__(self, dtype: torch.dtype = torch.float64, size: int = 8, form: str = "linear") -> None:
        super().__init__(lambda logits, ids: logits, size=size, dtype=dtype)
        self.gate = nn.Parameter(torch.randn(EXPERTS, size, dtype=dtype, generator=torch.Generator().manual_seed(2)))
        self.experts = nn.ModuleList(nn.Linear(size, size, dtype=dtype) for _ in range(EXPERTS))
        self.form = form

    def forward(self, ids: Tensor, *more: Tensor) -> Any:
        x = self.hidden(ids)
        scores = F.linear(x, self.gate) if self.form == "linear" else x.view(-1, x.shape[-1]) @ self.gate.t()
        scores = scores.view(*ids.shape, EXPERTS)
        weights, chosen = scores.softmax(-1).topk(2, -1)
        for number, expert in enumerate(self.experts):
            x = x + (weights * (chosen == number)).sum(-1, keepdim=True) * expert(x)
        return self.head(x), scores


@pytest.mark.parametrize("form", ["linear", "matmul"])
def test_equals_dense(form: str) -> None:
    error, found = compare(Routed(form=form), batch(), router_blocks=16)
    assert error < 1e-10
    assert targets(found.after[PASS]).count("router_linear") == 1
    assert sp_compile.last_run().kernels["router_blocks"] == "blocks of 16 tokens for 1 router"


def test_graph() -> None:
    found = rewrite(Routed(), batch(), router_blocks=True)
    assert_expected_inline(
        "".join(line + "\n" for line in show(found.after[PASS], "router_linear").splitlines()[:3]),
        """\
router_linear = router_linear(x, l_self_parameters_gate_, None, 1024)
scores_1 = view(router_linear, 1, t, 4)
softmax = softmax(scores_1, -1)
""",
    )


def test_bits_are_those_of_every_batch() -> None:
    """A router on embeddings, whose bits no other product changes, for the same rows alone and among others."""

    class First(Routed):
        def hidden(self, ids: Tensor) -> Tensor:
            x = self.words(ids)
            scores = F.linear(x, self.gate)
            weights, chosen = scores.softmax(-1).topk(1, -1)
            self.seen = scores
            return super().hidden(ids) + weights * self.experts[0](x) * (chosen == 0)

        def forward(self, ids: Tensor, *more: Tensor) -> Any:
            logits = self.head(self.hidden(ids))
            return logits, self.seen

    model = First(torch.float32, size=64).eval()
    rows, others = batch(3, 20, 8), batch(9, 20, 5, seed=4)
    with torch.no_grad():
        (_, alone), _ = run(model, rows, router_blocks=64)
        (_, among), _ = run(model, torch.cat([others, rows]), router_blocks=64)
    assert sp_compile.last_run().kernels["router_blocks"] == "blocks of 64 tokens for 1 router"
    assert torch.equal(among[9:], alone)


def test_off_by_default() -> None:
    found = rewrite(Routed(), batch())
    assert PASS not in found.after
    assert "router_linear" not in targets(found.after["select_kernels"])


def test_no_router_is_said() -> None:
    """The head's products choose nothing that is computed later."""
    found = rewrite(Tiny(lambda logits, ids: (logits, logits.argmax(-1))), batch(), router_blocks=True)
    assert "router_linear" not in targets(found.after[PASS])
    assert "no router" in sp_compile.last_run().kernels["router_blocks"]


def test_option() -> None:
    assert (parse({"router_blocks": True}).router_blocks, parse({"router_blocks": 256}).router_blocks, parse({}).router_blocks) == (
        1024,
        256,
        0,
    )
    with pytest.raises(InvalidOption, match="router_blocks"):
        parse({"router_blocks": "yes"})
