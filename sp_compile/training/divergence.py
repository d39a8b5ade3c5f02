"""Divergence from a reference: over the whole vocabulary per token, and estimated from the log-probabilities of what was sampled."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.layout.forest import Forest
from sp_compile.ops import token_kl as _token_kl  # noqa: F401  (registers sp_compile::token_kl)
from sp_compile.training.heads import VocabularyHead, check_columns, check_rows, chunk
from sp_compile.training.masks import check_values

_NAME = "token_kl"
_PLAIN = VocabularyHead()


def token_kl(
    values: Tensor,
    reference: Tensor,
    forest: Forest | None = None,
    *,
    head: VocabularyHead = _PLAIN,
    reference_head: VocabularyHead | None = None,
    mask: Tensor | None = None,
    chunk_tokens: int | None = None,
    chunk_vocabulary: int | None = None,
) -> Tensor:
    """KL(p || q) of the policy p from the reference q over the whole vocabulary, at every position of every row.

        kl[b, l] = sum_c p[c] (log p[c] - log q[c])        p = softmax of the policy's logits, q = softmax of the reference's

    Computed once per physical token, in blocks of the vocabulary, like `token_logprobs`; gradients reach both sides, so the forward
    divergence of distillation is `token_kl(teacher, student)`. Freeze a reference by `detach` or `torch.no_grad`.

    Args:
        values: the policy's hidden states or logits. With a forest, packed [1, T, H or V]; without, dense [B, L, H or V].
        reference: the reference's, for the same tokens; its hidden size may differ.
        forest: which rows the packed tokens stand for.
        head: makes logits of the policy's values; without a weight they are logits.
        reference_head: likewise for the reference; None: the policy's.
        mask: bool or integer [B, L] or [B, L - 1], nonzero where the divergence is wanted; None: everywhere.
        chunk_tokens, chunk_vocabulary: size of a block; None: chosen by device.

    Returns:
        float32 (float64 for float64) in the shape of the mask, or [B, L]; 0 where it is not wanted or the row has no token.

    Raises:
        InvalidInput: shapes, dtypes or devices that do not fit, or options out of range.
        StaleForest: the forest has another number of tokens.
    """
    rows, columns = check_rows(values, forest, _NAME)
    check_rows(reference, forest, _NAME, "reference")
    if not isinstance(head, VocabularyHead) or not isinstance(reference_head, VocabularyHead | None):
        raise InvalidInput(f"{_NAME}: expected heads to be VocabularyHead, got {type(head).__name__} and {type(reference_head).__name__}")
    head, other = head.checked(values, _NAME), (reference_head or head).checked(reference, f"{_NAME}: reference")
    if reference.shape[:2] != values.shape[:2] or reference.device != values.device:
        raise InvalidInput(
            f"{_NAME}: expected reference {list(values.shape[:2])} on {values.device}, "
            f"got {list(reference.shape[:2])} on {reference.device}"
        )
    if head.classes(values) != other.classes(reference):
        raise InvalidInput(f"{_NAME}: expected one vocabulary, got {head.classes(values)} and {other.classes(reference)} classes")
    if (values.dtype == torch.float64) != (reference.dtype == torch.float64):
        raise InvalidInput(f"{_NAME}: expected both sides or none in float64, got {values.dtype} and {reference.dtype}")
    sizes = (chunk(chunk_tokens, "chunk_tokens", _NAME), chunk(chunk_vocabulary, "chunk_vocabulary", _NAME))
    if mask is not None and (not isinstance(mask, Tensor) or mask.is_floating_point() or mask.device != values.device):
        got = f"{mask.dtype} on {mask.device}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidInput(f"{_NAME}: expected a mask of bools or integers on {values.device}, got {got}")
    used = columns if mask is None else check_columns(mask, rows, columns, "mask", _NAME)
    options = head.options() | other.options("reference_") | {"chunk_tokens": sizes[0], "chunk_classes": sizes[1]}
    if torch.compiler.is_compiling() and forest is None:
        # In a graph every position is asked for: a compiler can follow it to the tokens it shows.
        one, two = (x if used == columns else x[:, :used] for x in (values, reference))
        whole: Tensor = torch.ops.sp_compile.token_kl(None, *head.cast(one), *other.cast(two), **options)[0]
        return whole if mask is None else whole.masked_fill(mask == 0, 0)
    found: Tensor = _on_tokens(head, other, values, reference, forest, mask, used, options)
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]  # forests are work on the host
def _on_tokens(
    head: VocabularyHead,
    other: VocabularyHead,
    values: Tensor,
    reference: Tensor,
    forest: Forest | None,
    mask: Tensor | None,
    used: int,
    options: dict[str, Any],
) -> Tensor:
    if forest is None:
        index = torch.arange(values.shape[0] * values.shape[1], device=values.device).view(values.shape[:2])
    else:
        index = forest.tensor("index", values.device)
    index = index[:, :used] if mask is None else index[:, :used].masked_fill(mask == 0, -1)
    kl, *_ = torch.ops.sp_compile.token_kl(index, *head.cast(values.flatten(0, 1)), *other.cast(reference.flatten(0, 1)), **options)
    result: Tensor = torch.ops.sp_compile.unpack(kl, index)
    return result


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """Estimates KL(policy || reference) from log-probabilities of tokens that the policy sampled.

    With d = logprobs - reference_logprobs:

        k1 = d                    unbiased, may be negative
        k2 = d^2 / 2              biased, small variance; its gradient is that of the true divergence, in expectation
        k3 = exp(-d) - 1 + d      unbiased, never negative; GRPO's (DeepSeekMath, arXiv:2402.03300, eq. 4)

    Source: J. Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html, 2020.

    Args:
        logprobs, reference_logprobs: float tensors of one shape.
        kind: "k1", "k2" or "k3".

    Returns:
        Of the same shape; differentiable in both.

    Raises:
        InvalidInput: no float tensors of one shape, or an unknown kind.
    """
    check_values("kl_estimate", logprobs=logprobs, reference_logprobs=reference_logprobs)
    difference = logprobs - reference_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    if kind == "k3":
        return torch.expm1(-difference) + difference
    raise InvalidInput(f"kl_estimate: expected kind k1, k2 or k3, got {kind!r}")
