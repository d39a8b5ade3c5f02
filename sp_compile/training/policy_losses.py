"""Policy-gradient losses without a value model: pure functions of per-row values [B, C].

Written with d = logprobs - old_logprobs, r = exp(d) and A the advantage. Positions that the mask leaves out are never read. Old and
reference log-probabilities and advantages are constants: no gradient reaches them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.training.divergence import kl_estimate
from sp_compile.training.masks import check_number, check_values, checked_mask, checked_row_values, masked_mean
from sp_compile.training.reductions import sequence_mean, token_mean

Reduce = Callable[[Tensor, Tensor], Tensor]
"""From values [B, C] and a bool mask [B, C] to the loss, such as `token_mean` or `functools.partial(constant_length, length=4096)`."""


def _reduced(name: str, reduce: Reduce | None, losses: Tensor, mask: Tensor) -> Tensor:
    if reduce is None:
        return losses.masked_fill(~mask, 0)
    if not callable(reduce):
        raise InvalidInput(f"{name}: expected reduce to be a function of values and mask, such as token_mean, or None, got {reduce!r}")
    return reduce(losses, mask)


class Loss(NamedTuple):
    """A loss and what is logged beside it.

    Attributes:
        value: scalar, differentiable; per token with `reduce=None`.
        metrics: scalars by name, without gradient.
    """

    value: Tensor
    metrics: dict[str, Tensor]


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    reduce: Reduce | None = token_mean,
) -> Loss:
    """The clipped surrogate loss of PPO, per token:

        loss = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)
        where A < 0, with dual_clip c:    loss = min(loss, -c A)

    Sources: PPO, arXiv:1707.06347, eq. 7; clip_high > clip_low is DAPO's clip-higher, arXiv:2503.14476, eq. 8 (0.2 and 0.28); dual clip,
    arXiv:1912.09729.

    Args:
        logprobs: float [B, C], as `token_logprobs` returns them.
        old_logprobs: float [B, C], of the policy that sampled.
        advantages: float [B] or [B, C].
        mask: bool or integer [B, C], nonzero at tokens that count.
        clip_low, clip_high: bounds of r below and above 1; clip_low at most 1.
        dual_clip: c > 1, or None.
        reduce: from per-token losses to the value; None: the value is the losses [B, C], 0 at what does not count.

    Returns:
        The loss, with metrics over the counted tokens: `clip_fraction`, where the clipped term is the larger one and gives no gradient,
        and its parts `clip_fraction_low` (A < 0) and `clip_fraction_high` (A > 0); `dual_clip_fraction`; `approx_kl`, the mean of
        r - 1 - d, which estimates KL(old || new).

    Raises:
        InvalidInput: tensors of other forms, or numbers out of range.
    """
    losses, mask, metrics = _surrogate("ppo_loss", logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip)
    return Loss(_reduced("ppo_loss", reduce, losses, mask), metrics)


def grpo_loss(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    beta: float = 0.0,
    kl: Literal["k1", "k2", "k3"] = "k3",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    reduce: Reduce | None = sequence_mean,
) -> Loss:
    """The loss of GRPO: the clipped surrogate and a divergence from a reference, per token:

        loss = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) + beta * kl_estimate(logprobs, reference_logprobs, kl)

    | | advantages | clip_high | beta | reduce |
    |---|---|---|---|---|
    | GRPO, arXiv:2402.03300, eq. 3 and 4 | `group_advantages(r, g)` | 0.2 | 0.04 | `sequence_mean` |
    | DAPO, arXiv:2503.14476, eq. 8 | `group_advantages(r, g)` | 0.28 | 0 | `partial(group_mean, groups=g)` |
    | Dr. GRPO, arXiv:2503.20783 | `group_advantages(r, g, scale=False)` | 0.2 | 0 | `partial(constant_length, length=n)` |

    Args:
        logprobs, advantages, mask, clip_low, clip_high, reduce: as for `ppo_loss`.
        old_logprobs: float [B, C], of the policy that sampled; None: the same policy, so that r is 1 with the gradient of logprobs.
        reference_logprobs: float [B, C]; needed if beta is not 0.
        beta: weight of the divergence.
        kl: its estimator.

    Returns:
        The loss, with the metrics of `ppo_loss` and, if there is a reference, `kl`, the estimator's mean over the counted tokens.

    Raises:
        InvalidInput: tensors of other forms, numbers out of range, or beta without a reference.
    """
    name = "grpo_loss"
    check_number(name, "beta", beta, 0)
    if kl not in ("k1", "k2", "k3"):
        raise InvalidInput(f"{name}: expected kl to be k1, k2 or k3, got {kl!r}")
    check_values(name, logprobs=logprobs)
    if reference_logprobs is not None:
        check_values(name, logprobs=logprobs, reference_logprobs=reference_logprobs)
    elif beta != 0:
        raise InvalidInput(f"{name}: expected reference_logprobs with beta {beta}, got None")
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    losses, mask, metrics = _surrogate(name, logprobs, old, advantages, mask, clip_low, clip_high, None)
    if reference_logprobs is not None:
        # Masked before the exponential: what does not count may be far off, and infinity times a zero gradient is NaN.
        divergence = kl_estimate(torch.where(mask, logprobs, 0), torch.where(mask, reference_logprobs.detach(), 0), kl)
        metrics["kl"] = masked_mean(divergence, mask)
        if beta != 0:
            losses = losses + beta * divergence
    return Loss(_reduced(name, reduce, losses, mask), metrics)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    denominator: float | Tensor | None = None,
) -> Loss:
    """The loss of GSPO, with one ratio per row of n counted tokens:

        s_b = exp(sum_l m d / n_b)        loss = 1 / B sum_b max(-s_b A_b, -clip(s_b, 1 - clip_low, 1 + clip_high) A_b)

    A row where nothing counts adds 0. Source: arXiv:2507.18071, whose bounds are the defaults.

    Args:
        logprobs, old_logprobs, mask: as for `ppo_loss`.
        advantages: float [B].
        clip_low, clip_high: bounds of s below and above 1.
        denominator: number of rows of the whole, if this is a part, see `reductions`.

    Returns:
        The loss, with the metrics of `ppo_loss` over rows in which something counts, but for `dual_clip_fraction`.

    Raises:
        InvalidInput: tensors of other forms, or numbers out of range.
    """
    name = "gspo_loss"
    check_values(name, logprobs=logprobs, old_logprobs=old_logprobs)
    mask = checked_mask(name, mask, logprobs)
    if isinstance(advantages, Tensor) and advantages.dim() != 1:
        raise InvalidInput(f"{name}: expected advantages [{len(logprobs)}], one per row, got {list(advantages.shape)}")
    count = mask.sum(1, keepdim=True)
    means = torch.where(mask, logprobs - old_logprobs.detach(), 0).sum(1, keepdim=True) / count.clamp(min=1)
    losses, rows, metrics = _surrogate(name, means, torch.zeros_like(means), advantages, count > 0, clip_low, clip_high, None)
    del metrics["dual_clip_fraction"]
    return Loss(sequence_mean(losses, rows, denominator=denominator), metrics)


def _surrogate(
    name: str,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """`(losses, mask, metrics)` of the clipped surrogate; losses are 0 where the mask is."""
    check_values(name, logprobs=logprobs, old_logprobs=old_logprobs)
    mask = checked_mask(name, mask, logprobs)
    advantages = torch.where(mask, checked_row_values(name, "advantages", advantages, logprobs), 0)
    check_number(name, "clip_low", clip_low, 0, most=1)
    check_number(name, "clip_high", clip_high, 0)
    if dual_clip is not None:
        check_number(name, "dual_clip", dual_clip, 1, open_end=True)
    # Masked before the exponential: what does not count may be far off, and infinity times a zero gradient is NaN.
    difference = torch.where(mask, logprobs - old_logprobs.detach(), 0)
    ratio = difference.exp()
    plain, clipped = -ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    losses = torch.maximum(plain, clipped)
    active = clipped > plain
    metrics = {
        "clip_fraction": masked_mean(active.to(losses.dtype), mask),
        "clip_fraction_low": masked_mean((active & (advantages < 0)).to(losses.dtype), mask),
        "clip_fraction_high": masked_mean((active & (advantages > 0)).to(losses.dtype), mask),
    }
    bounded = torch.zeros_like(active)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        bounded = (advantages < 0) & (losses > bound)
        losses = torch.where(bounded, bound, losses)
    metrics["dual_clip_fraction"] = masked_mean(bounded.to(losses.dtype), mask)
    metrics["approx_kl"] = masked_mean(torch.expm1(difference) - difference, mask)
    return losses, mask, metrics
