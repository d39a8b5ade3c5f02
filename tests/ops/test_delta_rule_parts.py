"""The pieces of the chunked delta rules, each against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sp_compile.kernels.delta_rule.chunked import Rule
from sp_compile.kernels.delta_rule.decays import decays, log_gradient
from sp_compile.kernels.delta_rule.pairs import PerHead, PerRow
from sp_compile.kernels.delta_rule.triangular import unit_lower_inverse
from sp_compile.kernels.scan.chunks import SHORTEST
from sp_compile.layout import Forest
from sp_compile.lowering import delta_rules, registry
from sp_compile.ops.gated_delta_rule import gated_delta_rule_inputs

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", SIZES)
def test_decays_are_exponentials_of_sums(size: int) -> None:
    g = -random(3, size, 2).abs()
    made, total = decays(g), g.cumsum(1)
    torch.testing.assert_close(made.start, total.exp(), rtol=1e-12, atol=0)
    torch.testing.assert_close(made.stop, (total[:, -1:] - total).exp(), rtol=1e-12, atol=0)
    assert torch.equal(made.whole, made.start[:, -1])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 5])
def test_products_hold_every_earlier_token_once(size: int, rows: int) -> None:
    g = -random(3, size, rows).abs()
    values = random(3, size, 2, 5, seed=1)
    form = PerHead(decays(g)) if rows == 1 else PerRow(decays(g))
    total = g.cumsum(1)
    between = (total[:, :, None] - total[:, None, :]).expand(3, size, size, 5)
    earlier = torch.ones(size, size).tril(-1).bool()
    weights = between.exp().masked_fill(~earlier[:, :, None], 0)
    leaf = values.clone().requires_grad_()
    log = total.clone().requires_grad_()
    again = (log[:, :, None] - log[:, None, :]).masked_fill(~earlier[:, :, None], -torch.inf).exp()
    want = torch.einsum("niwd,njd,nijd->niwj", leaf, leaf[:, :, 1], again.expand(3, size, size, 5))
    torch.testing.assert_close(want, torch.einsum("niwd,njd,nijd->niwj", values, values[:, :, 1], weights))
    got = form.products(values)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    grad = random(*got.shape, seed=2)
    expected = torch.autograd.grad(want, [leaf, log], grad)
    d_rows, d_k, d_log = form.pullback(values, got, grad * earlier[:, None])
    d_rows[:, :, 1] += d_k
    torch.testing.assert_close(d_rows, expected[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(d_log, expected[1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("size", SIZES)
def test_log_gradient_sums_from_behind(size: int) -> None:
    values = random(3, size, 2)
    torch.testing.assert_close(log_gradient(values.clone()), values.flip(1).cumsum(1).flip(1), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_inverse_reads_below_the_diagonal_only(size: int) -> None:
    matrix = 0.3 * random(4, size, size)
    inverse = unit_lower_inverse(matrix)
    one = torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(inverse @ (matrix.tril(-1) + one), one.expand_as(matrix), rtol=0, atol=1e-10)
    assert (inverse.triu(1) == 0).all()


def test_inverse_of_ones_is_exact() -> None:
    inverse = unit_lower_inverse(torch.ones(2, 64, 64))
    assert torch.equal(inverse, (torch.eye(64) - torch.diag(torch.ones(63), -1)).expand(2, 64, 64))


def test_short_nodes_cost_few_slots() -> None:
    tree = Forest.from_rows([[*range(64), 100 + b] for b in range(50)])
    q, k, v, g, beta, *_ = (
        x.detach()[0] if x is not None else None for x in gated_delta_rule_inputs(*tree.tensors(("prev", "end"), "cpu"))
    )
    assert q is not None and k is not None and v is not None and g is not None and beta is not None  # noqa: PT018
    chunks = delta_rules.TABLES[torch.ops.sp_compile.gated_delta_rule.default][0].forest_names({})
    passing = Rule(q, k, v, g[..., None], beta, None, None, tree.tensor(chunks[0], "cpu"), 1.0, True)._passing()
    sizes = {group.to_end.shape[2]: group.to_end.shape[0] for group, _ in passing.places.values()}
    assert sizes == {64: 1, SHORTEST: 50}


@pytest.mark.parametrize("op", delta_rules.TABLES, ids=registry.option_name)
def test_tables_prefer_chunks_and_name_their_grids(op: torch._ops.OpOverload) -> None:
    values = {"v": torch.zeros(1, 3, 2, 4), "chunk": 48}
    chosen = registry.select(op, values, deterministic=True).implementation
    assert (chosen.name, chosen.forest_names(values)) == ("chunked", ("chunks_exact_64",))
    replay = registry.select(op, values, names=["chunked_replay"]).implementation
    assert (replay.op, replay.forest_names(values)) == (chosen.op, ("chunks_replay_48",))
    odd = registry.select(op, {"v": torch.zeros(1, 3, 2, 4, dtype=torch.complex64)})
    assert odd.implementation.name == "reference"
    assert "dtype" in odd.rejected[0][1]
