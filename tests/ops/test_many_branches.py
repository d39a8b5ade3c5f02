"""Every recurrence on more short branches than a grid or a 16-bit number counts, and gradients that only some branches ask for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sp_compile.layout import Forest
from sp_compile.lowering import registry
from sp_compile.ops.numerics import relative_error
from tests.ops import (
    test_causal_conv1d,
    test_gated_delta_rule,
    test_kda,
    test_linear_attention,
    test_linear_scan,
    test_selective_scan,
    test_ssd_scan,
)
from tests.ops.scans import Case, Inputs, fork, leaves

CASES: dict[str, Case] = {
    "causal_conv1d": test_causal_conv1d.case(),
    "ssd_scan": test_ssd_scan.CASE,
    "selective_scan": test_selective_scan.CASE,
    "linear_scan": test_linear_scan.CASE,
    "linear_attention": test_linear_attention.CASE,
    "gated_delta_rule": test_gated_delta_rule.CASE,
    "kda": test_kda.CASE,
}
BRANCHES = 70_000
IMPLEMENTED = [(kind, item.name) for kind, case in CASES.items() for item in registry.implementations(case.op) if item.name != "reference"]
QUICK = ("causal_conv1d", "selective_scan", "linear_scan")


def of_tokens(inputs: Inputs, own: Inputs, tokens: Tensor, count: int) -> Inputs:
    """Some tokens' values as inputs of another forest, whose links are those of `own`."""
    made = [
        mine
        if not isinstance(value, Tensor) or value.dtype == torch.int64
        else value.detach()[:, tokens].requires_grad_(value.requires_grad)
        if value.dim() > 1 and value.shape[:2] == (1, count)
        else value.detach().requires_grad_(value.requires_grad)
        for value, mine in zip(inputs, own, strict=True)
    ]
    return made


@pytest.mark.parametrize(
    ("kind", "name"), [pytest.param(kind, name, marks=[] if kind in QUICK else pytest.mark.slow) for kind, name in IMPLEMENTED]
)
def test_branches_beyond_16_bits(kind: str, name: str) -> None:
    case, prompt = CASES[kind], 3
    some = torch.tensor([0, 1, 32_768, 65_535, 65_536, BRANCHES - 1])
    tree, few = (Forest.from_rows([[0, 1, 2, 9 + branch] for branch in range(count)]) for count in (BRANCHES, len(some)))
    assert tree.num_tokens == prompt + BRANCHES
    tokens = torch.cat([torch.arange(prompt), prompt + some])
    inputs = case.inputs(tree, dtype=torch.float32)
    part = of_tokens(inputs, case.inputs(few, dtype=torch.float32), tokens, tree.num_tokens)
    got, want = case.run(tree, inputs, name)[0], case.run(few, part, name)[0]
    assert relative_error(got[:, tokens], want) < 1e-6
    weight = torch.linspace(-1, 1, want.numel()).view(want.shape)
    spread = torch.zeros_like(got)
    spread[:, tokens] = weight
    found, expected = torch.autograd.grad(got, leaves(inputs), spread), torch.autograd.grad(want, leaves(part), weight)
    for one, other in zip(found, expected, strict=True):
        same = one[:, tokens] if one.shape[:2] == (1, tree.num_tokens) else one
        assert relative_error(same, other) < 1e-4


@pytest.mark.parametrize(("kind", "name"), IMPLEMENTED)
@pytest.mark.parametrize("wanting", [0, 1, 2])
def test_a_prompt_has_the_gradient_of_the_one_branch_that_asks(kind: str, name: str, wanting: int) -> None:
    """Through the halo and the state: as if the other branches were not there."""
    case = CASES[kind]
    rows = fork(5, (4, 2, 70))
    tree, alone = Forest.from_rows(rows), Forest.from_rows([rows[wanting]])
    path = tree.tensor("index", "cpu")[wanting]
    path = path[path >= 0]
    inputs = case.inputs(tree)
    part = of_tokens(inputs, case.inputs(alone), path, tree.num_tokens)
    got, want = case.run(tree, inputs, name)[0], case.run(alone, part)[0]
    weight = torch.randn(want[:, 5:].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = torch.autograd.grad((got[:, path[5:]] * weight).sum(), leaves(inputs))
    expected = torch.autograd.grad((want[:, 5:] * weight).sum(), leaves(part))
    elsewhere = torch.ones(tree.num_tokens, dtype=torch.bool)
    elsewhere[path] = False
    for one, other in zip(found, expected, strict=True):
        per_token = one.shape[:2] == (1, tree.num_tokens)
        assert relative_error(one[:, path] if per_token else one, other) < 1e-9
        assert not per_token or not one[:, elsewhere].any()
