"""Preference losses: pure functions of log-probabilities of whole completions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.training.masks import check_number, check_values, checked_mask
from sp_compile.training.policy_losses import Loss


def sequence_logprobs(logprobs: Tensor, mask: Tensor, *, mean: bool = False) -> Tensor:
    """[B]: sum over the counted positions of each row, or their mean; 0 for a row where nothing counts.

    Args:
        logprobs: float [B, C], as `token_logprobs` returns them.
        mask: bool or integer [B, C], nonzero at tokens that count, those of the completion.
        mean: divide by the number of counted tokens.

    Raises:
        InvalidInput: tensors of other forms.
    """
    check_values("sequence_logprobs", logprobs=logprobs)
    mask = checked_mask("sequence_logprobs", mask, logprobs)
    total = torch.where(mask, logprobs, 0).sum(1)
    return total / mask.sum(1).clamp(min=1) if mean else total


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    denominator: float | Tensor | None = None,
) -> Loss:
    """The loss of direct preference optimisation, over N pairs:

        h = beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
        loss = 1 / N sum -(1 - label_smoothing) log sigmoid(h) - label_smoothing log sigmoid(-h)

    Sources: DPO, arXiv:2305.18290, eq. 7; label smoothing for noisy preferences, E. Mitchell, ericmitchell.ai/cdpo.pdf.

    Args:
        chosen, rejected: float [N], of the policy, as `sequence_logprobs` returns them.
        reference_chosen, reference_rejected: float [N], of the reference; no gradient reaches them.
        beta: larger than 0.
        label_smoothing: share of preferences that are wrong, in [0, 0.5].
        denominator: number of pairs of the whole, if this is a part, see `reductions`.

    Returns:
        The loss, with the means over pairs `reward_chosen`, `reward_rejected` (beta times the log-ratio to the reference),
        `reward_margin`, their difference, and `accuracy`, how often it is positive.

    Raises:
        InvalidInput: tensors of other forms, or numbers out of range.
    """
    name = "dpo_loss"
    check_values(name, chosen=chosen, rejected=rejected, reference_chosen=reference_chosen, reference_rejected=reference_rejected)
    if chosen.dim() != 1:
        raise InvalidInput(f"{name}: expected log-probabilities [N], one per completion, got {list(chosen.shape)}; see sequence_logprobs")
    check_number(name, "beta", beta, 0, open_end=True)
    check_number(name, "label_smoothing", label_smoothing, 0, most=0.5)
    if denominator is not None and not isinstance(denominator, Tensor):
        check_number(name, "denominator", denominator, 0, open_end=True)
    rewards, others = beta * (chosen - reference_chosen.detach()), beta * (rejected - reference_rejected.detach())
    margin = rewards - others
    losses = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    pairs = max(len(chosen), 1)
    measured = {
        "reward_chosen": rewards,
        "reward_rejected": others,
        "reward_margin": margin,
        "accuracy": (margin > 0).to(margin.dtype),
    }
    value = losses.sum() / (pairs if denominator is None else denominator)
    return Loss(value, {what: x.detach().sum() / pairs for what, x in measured.items()})
