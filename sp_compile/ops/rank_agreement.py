"""Batch preparation on the ranks of a context parallel group: all of them hold the same batch, or all of them raise the same error."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sp_compile.errors import RanksDisagree
from sp_compile.layout.forest import Forest
from sp_compile.layout.rank_plans import RankPlan, plan_rank

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


Known = MutableMapping[Forest, dict[tuple[int, int], RankPlan]]


def plan_over_ranks(
    forest: Forest | Callable[[], Forest], group: ProcessGroup, *, attention: str = "balanced", inputs: Sequence[Tensor] = (),
    known: Known | None = None,
) -> RankPlan:  # fmt: skip
    """The plan of the calling rank, after one exchange of hashes: the only one that a batch costs.

    Args:
        forest: of the whole pack, or what makes it: if that raises on one rank, no other waits for it.
        group: the C ranks.
        attention: layout of queries, see `plan_rank`.
        inputs: packed tensors of the whole pack, or of its rows, that must have the same bits on every rank.
        known: plans made before, by forest, number of ranks and rank; a new one is added.

    Raises:
        RanksDisagree: on every rank, if forests, layouts or inputs differ or making them raised somewhere; names the ranks.
    """
    import torch.distributed as dist

    ranks, rank = group.size(), group.rank()
    plan, problem, digest = None, None, b""
    try:
        of = forest() if callable(forest) else forest
        made = {} if known is None else known.setdefault(of, {})
        plan = made[ranks, rank] = made.get((ranks, rank)) or plan_rank(of, ranks, rank, attention=attention)
        digest = _digest(plan, inputs)
    except Exception as error:  # whatever it is, the others must hear of it
        problem = error
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, (digest, None if problem is None else f"{type(problem).__name__}: {problem}"), group=group)
    said = [f"rank {number}: {text}" for number, (_, text) in enumerate(found) if text is not None]
    if said:
        raise RanksDisagree(f"context parallel: preparing the batch raised on {'; '.join(said)}") from problem
    different = [number for number, (other, _) in enumerate(found) if other != found[0][0]]
    if different:
        raise RanksDisagree(
            f"context parallel: expected one batch on all {ranks} ranks, got another one than rank 0's on rank"
            f"{'s' if len(different) > 1 else ''} {', '.join(map(str, different))}; give every rank of the group the same rows"
        )
    assert plan is not None, "no rank had a problem"
    return plan


def _digest(plan: RankPlan, inputs: Sequence[Tensor]) -> bytes:
    digest = hashlib.blake2b(plan.forest.key(), digest_size=16)
    for part in (plan.sequence, plan.attention):
        digest.update(f"{part.kind} {part.ranks} {part.tensor_ranks} {part.tokens}".encode())
    for value in inputs:
        digest.update(f"{value.dtype} {list(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.digest()
