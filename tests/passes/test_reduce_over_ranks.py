"""Reductions over tokens become those over ranks, gradients pass between the two by an op, and what mixes tokens otherwise is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import sp_compile
from sp_compile.errors import CannotShare
from sp_compile.layout.rank_plans import plan_rank, take_local
from tests.distributed import hybrids, simulated
from tests.passes import harness
from tests.passes.harness import Rewrite, Tiny, batch, show, targets

PASS = "reduce_over_ranks"


def of_rows(model: nn.Module, *inputs: Any) -> tuple[Any, Rewrite]:
    """One call on rows over a group of one rank."""
    group = simulated.Group(1)
    with simulated.standing_in(group):
        result, found = harness.run(model, *(inputs or (batch(),)), context_parallel=group)
    assert len(found) == 1
    return result, found[0]


def of_pack(model: nn.Module) -> tuple[Any, Rewrite]:
    """One packed call over a group of one rank."""
    packed = sp_compile.pack({"ids": batch()}, positions=None)
    plan = plan_rank(packed.forest, 1, 0)
    group = simulated.Group(1)
    with simulated.standing_in(group), sp_compile.share(plan):
        result, found = harness.run(model, take_local(packed.inputs["ids"], plan), context_parallel=group)
    return result, found[0]


def use(function: Callable[..., Any]) -> nn.Module:
    return Tiny(function)


def since(found: Rewrite, first: str, after: bool = True) -> str:
    text = show((found.after if after else found.before)[PASS], since=first)
    text = re.sub(r"forest_(rank_)?", r"\1", text).replace("_default", "")
    return re.sub(r"(_set_grad_enabled.*\n)", "", text)


def test_reductions_and_their_gradients() -> None:
    """The mean is a value of all ranks: tokens hand it parts of its gradient, and it hands parts of a loss on to tokens."""
    _, found = of_rows(use(lambda x, ids: x - x.mean((0, 1))))
    assert_expected_inline(
        since(found, "token_mean", after=False),
        """\
token_mean = token_mean(logits, count, index, 'B L _', [0, 1], False, None)
sub = sub(logits, token_mean)
flatten = flatten(sub, 0, 1)
unpack = sp_compile.unpack(flatten, index)
return [unpack]
""",
    )
    assert_expected_inline(
        since(found, "token_mean"),
        """\
token_mean = token_mean(logits, count, index, 'B L _', [0, 1], False, None, over=[1, 'simulated'])
enter_tokens = sp_compile.enter_tokens(token_mean, 1, 'simulated')
sub = sub(logits, enter_tokens)
flatten = flatten(sub, 0, 1)
all_tokens = sp_compile.all_tokens(flatten, 0, 1, 'simulated')
unpack = sp_compile.unpack(all_tokens, rank_whole_index)
return [unpack]
""",
    )


def test_losses_are_put_together() -> None:
    _, found = of_rows(use(lambda x, ids: F.cross_entropy(x[:, :-1].flatten(0, 1), ids[:, 1:].flatten())))
    assert_expected_inline(
        since(found, "cross_entropy_rows_default"),
        """\
cross_entropy_rows = sp_compile.cross_entropy_rows(flatten_2, flatten_3, flatten_1, None, ignore_index=-100, label_smoothing=0.0)
getitem_5 = getitem(cross_entropy_rows, 0)
sum_over_ranks = sp_compile.sum_over_ranks(getitem_5, 1, 'simulated')
getitem_6 = getitem(cross_entropy_rows, 1)
sum_over_ranks_1 = sp_compile.sum_over_ranks(getitem_6, 1, 'simulated')
weighted_mean = weighted_mean(sum_over_ranks, sum_over_ranks_1)
return [weighted_mean]
""",
    )


def test_parameters_meet_a_reduction_once() -> None:
    """Every rank computes the product alike, so each may give the parameter a C-th."""

    class Scaled(Tiny):
        def forward(self, ids: Tensor) -> Any:
            logits = self.head(self.hidden(ids))
            return logits, logits.softmax(-1).mean((0, 1)) * self.head.bias

    _, found = of_rows(Scaled(lambda: None))
    called = targets(found.after[PASS])
    assert called.count("sp_compile.once_over_ranks") == 1
    assert "sp_compile.enter_tokens" not in called


def test_a_value_of_parameters_alone_counts_once() -> None:
    class Norm(Tiny):
        def forward(self, ids: Tensor) -> Any:
            return self.head(self.hidden(ids)), self.head.weight.square().sum()

    _, found = of_rows(Norm(lambda: None))
    assert targets(found.after[PASS]).count("sp_compile.once_over_ranks") == 1


def test_counts_are_written_once() -> None:
    class Counted(Tiny):
        def __init__(self) -> None:
            super().__init__(lambda: None)
            self.register_buffer("load", torch.zeros(50, dtype=torch.int64))

        def forward(self, ids: Tensor) -> Any:
            logits = self.head(self.hidden(ids))
            with torch.no_grad():
                chosen = logits.argmax(-1).flatten()
                self.load.scatter_add_(0, chosen, torch.ones_like(chosen))
            return logits

    model = Counted()
    logits, found = of_rows(model)
    assert "scattered_" in targets(found.after[PASS])
    assert "scatter_add_" not in targets(found.after[PASS])
    assert torch.equal(model.load, torch.bincount(logits.argmax(-1).flatten(), minlength=50))  # type: ignore[arg-type]


@pytest.mark.parametrize("run", [of_rows, of_pack])
def test_must_not_rewrite_what_works_token_by_token(run: Callable[[nn.Module], tuple[Any, Rewrite]]) -> None:
    _, found = run(use(lambda x, ids: x.softmax(-1)))
    added = {"sp_compile.all_tokens"} if run is of_rows else set()
    before, after = targets(found.before[PASS]), targets(found.after[PASS])
    assert [name for name in after if name not in added] == before


def test_nothing_without_the_option() -> None:
    _, found = harness.run(use(lambda x, ids: x - x.mean((0, 1))), batch())
    assert PASS not in found[0].after


class Last(Tiny):
    """Adds the state after the last token."""

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        given = -F.softplus(self.q(x)), self.k(x)
        mixed = torch.ops.sp_compile.dense_linear_scan(*given, dtype=x.dtype, library=hybrids.LIBRARY)
        return mixed + torch.ops.sp_compile.dense_linear_scan_state(*given, dtype=x.dtype, library=hybrids.LIBRARY)[:, None]


class Biased(Tiny):
    """A bias of the distance, in attention."""

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        rows, columns, size = x.shape
        q, k, v = (layer(x).view(rows, columns, 2, size // 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        place = torch.arange(columns)
        apart = place[:, None] - place
        bias = (-0.5 * apart.to(x.dtype)).masked_fill(apart < 0, -torch.inf)
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(rows, columns, size)


class Noisy(Tiny):
    def forward(self, ids: Tensor) -> Any:
        return self.head(self.hidden(ids)) + torch.randn(50, dtype=torch.float64)


@pytest.mark.parametrize(
    ("run", "model", "said"),
    [
        (of_pack, Last(lambda x, ids: x), "packed values end with several rows.*linear_scan"),
        (of_pack, use(lambda x, ids: x / x.shape[1]), "number of tokens"),
        (of_pack, use(lambda x, ids: x / x.numel()), "number of tokens"),
        (of_pack, Biased(lambda x, ids: x), "pairs tokens"),
        (of_rows, Biased(lambda x, ids: x), "pairs tokens"),
        (of_rows, Noisy(lambda x, ids: x), "draws random numbers"),
    ],
    ids=["final state", "columns", "numel", "bias packed", "bias", "random"],
)
def test_ops_that_need_other_ranks_are_named(run: Callable[[nn.Module], Any], model: nn.Module, said: str) -> None:
    with pytest.raises(Exception, match=said) as raised:
        run(model)
    text = str(raised.value)
    assert "does not accept the contiguous layout" in text or "cannot share prefixes" in text
    assert re.search(r"\[op \S+", text)


def test_there_is_no_dense_run() -> None:
    """One row has nothing to share, and every rank would give the whole gradient."""
    with pytest.raises(CannotShare, match=r"all give the same gradient.*several rows.*share\(plan\)"):
        of_rows(use(lambda x, ids: x), batch()[:1])


def test_rows_that_share_nothing_are_spread_too() -> None:
    group = simulated.Group(2)
    ids = torch.arange(28).view(2, 14)
    found = simulated.on_rows(use(lambda x, ids: x), (ids,), 2, lambda outs: outs[0].sum())
    assert all(torch.allclose(one.outputs[0], Tiny(lambda x, ids: x)(ids), rtol=1e-12, atol=1e-12) for one in found)
    assert group.size() == 2
