"""Advantages of groups of completions of one prompt, without a value model."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_compile.ops.rows import sum_by_key
from sp_compile.training.masks import check_number, check_values, checked_groups, group_places


def group_advantages(rewards: Tensor, groups: Tensor, *, scale: bool = True, epsilon: float = 1e-6) -> Tensor:
    """Rewards relative to their group.

        scale=True     (r - mean) / (std + epsilon)     GRPO, DeepSeekMath, arXiv:2402.03300, section 4.1.2
        scale=False    r - mean                         Dr. GRPO, arXiv:2503.20783

    The standard deviation divides by the number of rows less one, as in the usual implementations. A group of one row, or of equal
    rewards, has advantage 0.

    Args:
        rewards: float [B].
        groups: integers [B], equal for rows of one group; in any order.
        scale: divide by the standard deviation.
        epsilon: added to it.

    Returns:
        [B], of the rewards' dtype, without gradient; formed in float64.

    Raises:
        InvalidInput: rewards or groups of another form, or an epsilon below 0.
    """
    name = "group_advantages"
    check_values(name, rewards=rewards)
    check_number(name, "epsilon", epsilon, 0)
    groups = checked_groups(name, groups, rewards.numel() if rewards.dim() == 1 else -1, rewards.device)
    with torch.no_grad():
        place = group_places(groups)
        wide = rewards.to(torch.float64)
        sizes = sum_by_key(torch.ones_like(wide), place, len(groups)).clamp(min=1)
        centred = wide - (sum_by_key(wide, place, len(groups)) / sizes)[place]
        if not scale:
            return centred.to(rewards.dtype)
        deviation = (sum_by_key(centred.square(), place, len(groups)) / (sizes - 1).clamp(min=1)).sqrt()
        # With epsilon 0 equal rewards would be 0 / 0.
        divisor = deviation[place] + epsilon
        return torch.where(divisor == 0, 0, centred / divisor.clamp(min=torch.finfo(torch.float64).tiny)).to(rewards.dtype)
