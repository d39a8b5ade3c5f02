"""A call on rows with `context_parallel`: every rank is given the whole batch, and computes its part of the tokens."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sp_compile.capture.graphs import is_module_state, placeholders
from sp_compile.debug import account
from sp_compile.errors import InvalidInput, LayoutNotAccepted, NothingToShare
from sp_compile.layout.forest import Forest
from sp_compile.layout.local_forest import LocalForest
from sp_compile.layout.rank_plans import RankPlan
from sp_compile.ops.rank_agreement import plan_over_ranks

if TYPE_CHECKING:
    from sp_compile.region import Region, Variant

_plans: weakref.WeakKeyDictionary[Forest, dict[tuple[int, int], RankPlan]] = weakref.WeakKeyDictionary()


def run_over_ranks(region: Region, variant: Variant, values: Sequence[Any], keeps_padding: bool) -> Any:
    """One call of a region on rows [B, L], the same on all ranks; results are whole on every rank.

    There is no dense run to fall back to: every rank would make it, and the sum of their gradients be C times too large.

    Args:
        region, variant, values: what is called.
        keeps_padding: padding is computed.

    Raises:
        CannotShare: something was not proved.
        RanksDisagree: on every rank, if a rank has another batch or failed to prepare it.
    """
    if variant.refusal is not None and (isinstance(variant.refusal, NothingToShare) or not variant.refusal.op):
        if not _trains(region, values):
            return region._run_dense(values, idle=True)
        raise LayoutNotAccepted(
            f"a graph runs densely, where context parallel ranks would all give the same gradient: {variant.refusal.reason}",
            advice="Call the model on several rows and columns, or pack the batch (sp_compile.pack, plan_over_ranks) and call it inside of "
            "share(plan); a graph break may leave such a graph, too.",
        )
    if variant.refusal is not None:
        raise variant.refusal
    plan = _plan(region, variant, values, keeps_padding)
    local = LocalForest.of(plan)
    bucket = region._bucket(variant, values, local)
    account.record(region, values, forest=plan.forest, variant=variant)
    return bucket.call(*region._feed(variant, values, local))


def _plan(region: Region, variant: Variant, values: Sequence[Any], keeps_padding: bool) -> RankPlan:
    def forest() -> Forest:
        found = region._forest(variant, values, None if keeps_padding else variant.padding)
        for check in variant.checks:
            why = check.why_not(values, torch.from_numpy(found.index >= 0))
            if why is not None:
                raise why
        if found.num_tokens == 0:
            raise InvalidInput("context parallel: expected a batch with a token, got padding only")
        return found

    return plan_over_ranks(forest, region.options.context_parallel, inputs=region.packed.tensors(values), known=_plans)


def _trains(region: Region, values: Sequence[Any]) -> bool:
    """Whether a parameter would get a gradient."""
    if not torch.is_grad_enabled():
        return False
    given = zip(placeholders(region.module.graph), values, strict=True)
    return any(is_module_state(node) and isinstance(v, torch.Tensor) and v.requires_grad for node, v in given)
