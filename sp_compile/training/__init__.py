"""Training on shared rows: log-probabilities, entropies and divergences per row without [rows, V], and losses on per-row values."""

from sp_compile.training.advantages import group_advantages
from sp_compile.training.divergence import kl_estimate, token_kl
from sp_compile.training.heads import VocabularyHead
from sp_compile.training.logprobs import next_tokens, token_logprobs
from sp_compile.training.policy_losses import Loss, grpo_loss, gspo_loss, ppo_loss
from sp_compile.training.preference_losses import dpo_loss, sequence_logprobs
from sp_compile.training.reductions import constant_length, group_mean, sequence_mean, token_mean

__all__ = [
    "Loss",
    "VocabularyHead",
    "constant_length",
    "dpo_loss",
    "group_advantages",
    "group_mean",
    "grpo_loss",
    "gspo_loss",
    "kl_estimate",
    "next_tokens",
    "ppo_loss",
    "sequence_logprobs",
    "sequence_mean",
    "token_kl",
    "token_logprobs",
    "token_mean",
]
