"""Reductions of per-row values [B, C] under a mask to a loss.

Written with m the mask, x the values, b rows and l their positions. What does not count is never read, so that it may hold anything.
Where nothing counts the result is 0, with zero gradients. `denominator` replaces the number a mean divides by, by that of a larger whole:
over micro-batches whose gradients are accumulated, or over data-parallel ranks, the sum of the parts is then the loss of the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sp_compile.ops.rows import sum_by_key
from sp_compile.training.masks import check_number, check_values, checked_groups, checked_mask, group_places


def token_mean(values: Tensor, mask: Tensor, *, denominator: float | Tensor | None = None) -> Tensor:
    """sum_bl m x / sum_bl m: every token weighs the same.

    Source: the token-level loss of DAPO (arXiv:2503.14476, eq. 12) over a batch, and the usual language-model loss.

    Args:
        values: float [B, C].
        mask: bool or integer [B, C], nonzero where a position counts.
        denominator: number of counted tokens of the whole, if this is a part.

    Raises:
        InvalidInput: values or mask of another form, or a denominator that is not positive.
    """
    mask = _checked("token_mean", values, mask, denominator)
    return torch.where(mask, values, 0).sum() / _or(denominator, mask.sum())


def sequence_mean(values: Tensor, mask: Tensor, *, denominator: float | Tensor | None = None) -> Tensor:
    """1 / B sum_b (sum_l m x / sum_l m): every row weighs the same, a row where nothing counts as 0.

    Source: GRPO (DeepSeekMath, arXiv:2402.03300, eq. 3).

    Args:
        values, mask: as for `token_mean`.
        denominator: number of rows of the whole, if this is a part.

    Raises:
        InvalidInput: as for `token_mean`.
    """
    mask = _checked("sequence_mean", values, mask, denominator)
    rows = torch.where(mask, values, 0).sum(1) / mask.sum(1).clamp(min=1)
    return rows.sum() / _or(denominator, len(values))


def group_mean(values: Tensor, mask: Tensor, groups: Tensor, *, denominator: float | Tensor | None = None) -> Tensor:
    """1 / K sum_k (sum_{b in k, l} m x / sum_{b in k, l} m): every group weighs the same, and in it every token.

    Source: the objective of DAPO (arXiv:2503.14476, eq. 8), whose expectation over prompts is the mean over groups.

    Args:
        values, mask: as for `token_mean`.
        groups: integers [B], equal for rows of one group; in any order.
        denominator: number of groups of the whole, if this is a part; a group must lie in one part.

    Raises:
        InvalidInput: as for `token_mean`, or groups of another form.
    """
    mask = _checked("group_mean", values, mask, denominator)
    groups = checked_groups("group_mean", groups, len(values), values.device)
    place = group_places(groups)
    per_row = torch.stack([mask.sum(1).to(torch.float64), torch.ones_like(place, dtype=torch.float64)], 1)
    counted, sizes = sum_by_key(per_row, place, len(groups)).unbind(1)
    rows = torch.where(mask, values, 0).sum(1) / counted.clamp(min=1)[place].to(values.dtype)
    return rows.sum() / _or(denominator, (sizes > 0).sum())


def constant_length(values: Tensor, mask: Tensor, length: float, *, denominator: float | Tensor | None = None) -> Tensor:
    """1 / B sum_b (sum_l m x) / length: rows are divided by one constant, so that no row's tokens weigh less for its length.

    Source: Dr. GRPO (arXiv:2503.20783, its listing), where `length` is the largest number of tokens of a completion.

    Args:
        values, mask: as for `token_mean`.
        length: the constant, larger than 0.
        denominator: number of rows of the whole, if this is a part.

    Raises:
        InvalidInput: as for `token_mean`, or a length that is not positive.
    """
    mask = _checked("constant_length", values, mask, denominator)
    check_number("constant_length", "length", length, 0, open_end=True)
    return torch.where(mask, values, 0).sum() / length / _or(denominator, len(values))


def _checked(name: str, values: Tensor, mask: Tensor, denominator: float | Tensor | None) -> Tensor:
    check_values(name, values=values)
    if denominator is not None and not isinstance(denominator, Tensor):
        check_number(name, "denominator", denominator, 0, open_end=True)
    return checked_mask(name, mask, values)


def _or(denominator: float | Tensor | None, count: Tensor | int) -> float | Tensor:
    if denominator is not None:
        return denominator
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
