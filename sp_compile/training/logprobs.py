"""`token_logprobs`: log-probabilities of the rows' targets, each distinct (token, target) computed once and [rows, V] never made."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.layout.forest import Forest
from sp_compile.ops import token_logprobs as _token_logprobs  # noqa: F401  (registers sp_compile::token_logprobs)
from sp_compile.training.heads import VocabularyHead, check_columns, check_rows, chunk

_NAME = "token_logprobs"


@overload
def token_logprobs(
    values: Tensor,
    targets: Tensor,
    forest: Forest | None = ...,
    *,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    scale: float = ...,
    softcap: float | None = ...,
    temperature: float = ...,
    ignore_index: int = ...,
    entropy: Literal[False] = ...,
    chunk_tokens: int | None = ...,
    chunk_vocabulary: int | None = ...,
) -> Tensor: ...


@overload
def token_logprobs(
    values: Tensor,
    targets: Tensor,
    forest: Forest | None = ...,
    *,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    scale: float = ...,
    softcap: float | None = ...,
    temperature: float = ...,
    ignore_index: int = ...,
    entropy: Literal[True],
    chunk_tokens: int | None = ...,
    chunk_vocabulary: int | None = ...,
) -> tuple[Tensor, Tensor]: ...


def token_logprobs(
    values: Tensor,
    targets: Tensor,
    forest: Forest | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
    chunk_tokens: int | None = None,
    chunk_vocabulary: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of a target at every position of every row, in the rows' own layout.

        packed = sp_compile.pack({"input_ids": ids, "attention_mask": mask})
        with sp_compile.share(packed.forest):
            hidden = model.model(**packed.inputs).last_hidden_state                     # [1, T, H]
        logprobs = token_logprobs(hidden, ids[:, 1:], packed.forest, weight=model.lm_head.weight)   # [B, L - 1]

    Targets are not shifted here: `targets[b, l]` is what column l of row b predicts, so its own next token for a language model. That is
    `ids[:, 1:]`, or `sp_compile.training.next_tokens(ids, mask)`, which also ignores padding. With z the logits of a token,

        logprobs[b, l] = z[targets[b, l]] - logsumexp(z)        entropy[b, l] = logsumexp(z) - sum_c softmax(z)[c] z[c]

    The vocabulary is gone through block by block, forward and backward, which forms the scores again: nothing of the size of tokens times V
    is made, except the gradient of logits where logits are given. A token is computed once for all its rows, and not at all if no position
    of it counts. Its gradient is the sum over its rows, in a fixed order.

    Args:
        values: hidden states if `weight` is given, else logits. With a forest, packed [1, T, H or V]; without, dense [B, L, H or V].
        targets: int64 or int32 [B, L], or [B, L - 1], where the last column predicts nothing.
        forest: which rows the packed tokens stand for.
        weight: [V, H], the output layer's weight, in the dtype of the hidden states. Under autocast both are cast, as a linear layer does.
        bias: [V].
        scale, softcap, temperature: logits are softcap * tanh(scale * x / softcap) / temperature, without tanh if softcap is None, where x
            is values @ weight.T + bias or the logits given.
        ignore_index: a target that does not count.
        entropy: also return the entropies, which are differentiable too.
        chunk_tokens, chunk_vocabulary: size of a block; None: chosen by device. Results depend on them by rounding only.

    Returns:
        Log-probabilities, float32 (float64 for float64 values), in the shape of the targets; with `entropy`, a pair with the entropies in
        the same layout. Both are 0, without gradient, where the target is ignored or the row has no token.

    Raises:
        InvalidInput: shapes, dtypes or devices that do not fit, options out of range, a target that counts and is outside [0, V).
        StaleForest: the forest has another number of tokens.
    """
    rows, columns = check_rows(values, forest, _NAME)
    head = VocabularyHead(weight, bias, scale, softcap, temperature).checked(values, _NAME)
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, torch.int32) or targets.device != values.device:
        got = f"{targets.dtype} on {targets.device}" if isinstance(targets, Tensor) else type(targets).__name__
        raise InvalidInput(f"{_NAME}: expected targets of int64 or int32 on {values.device}, got {got}")
    used = check_columns(targets, rows, columns, "targets", _NAME)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise InvalidInput(f"{_NAME}: expected ignore_index to be an integer, got {ignore_index!r}")
    if not isinstance(entropy, bool):
        raise InvalidInput(f"{_NAME}: expected entropy to be True or False, got {entropy!r}")
    sizes = (chunk(chunk_tokens, "chunk_tokens", _NAME), chunk(chunk_vocabulary, "chunk_vocabulary", _NAME))
    if torch.compiler.is_compiling() and forest is None:
        # In a graph, positions are plain cuts, which a compiler can follow to the tokens they show.
        return _results(head, values if used == columns else values[:, :used], None, targets, ignore_index, entropy, sizes)
    found: Tensor | tuple[Tensor, Tensor] = _on_tokens(head, values, targets, forest, ignore_index, entropy, sizes)
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]  # forests are work on the host
def _on_tokens(
    head: VocabularyHead, values: Tensor, targets: Tensor, forest: Forest | None, ignore_index: int, entropy: bool, sizes: tuple[int, int]
) -> Tensor | tuple[Tensor, Tensor]:
    if forest is None:
        index = torch.arange(values.shape[0] * values.shape[1], device=values.device).view(values.shape[:2])
    else:
        index = forest.tensor("index", values.device)
    index = index[:, : targets.shape[1]]
    counted = (targets != ignore_index) & (index >= 0)
    wrong = counted & ((targets < 0) | (targets >= head.classes(values)))
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise InvalidInput(
            f"{_NAME}: expected targets in [0, {head.classes(values)}) or {ignore_index}, got {int(targets[row, column])} at row {row}, "
            f"column {column}; mark what does not count by ignore_index"
        )
    return _results(head, values.flatten(0, 1), index, targets, ignore_index, entropy, sizes)


def _results(
    head: VocabularyHead, values: Tensor, index: Tensor | None, targets: Tensor, ignore_index: int, entropy: bool, sizes: tuple[int, int]
) -> Tensor | tuple[Tensor, Tensor]:
    targets = targets.to(torch.int64)
    values, weight, bias = head.cast(values)
    logprobs: Tensor
    logprobs, entropies, _ = torch.ops.sp_compile.token_logprobs(
        values,
        index,
        targets,
        weight,
        bias,
        **head.options(),
        ignore_index=ignore_index,
        with_entropy=entropy,
        chunk_tokens=sizes[0],
        chunk_classes=sizes[1],
    )
    if not entropy:
        return logprobs
    if index is not None:
        entropies = torch.ops.sp_compile.unpack(entropies, index.masked_fill(targets == ignore_index, -1))
    return logprobs, entropies


def next_tokens(ids: Tensor, mask: Tensor | None = None, *, trained: Tensor | None = None, ignore_index: int = -100) -> Tensor:
    """The targets of a language model: at each position the next token of its row.

    Args:
        ids: int64 [B, L].
        mask: [B, L] bool or integer, nonzero where there is a token (left and right padding, holes); None: everywhere.
        trained: [B, L] bool or integer, nonzero at tokens that are to be predicted, such as those of completions: their targets stand at
            the position before. None: all.
        ignore_index: put where there is no token, no next token, or one that is not trained.

    Returns:
        int64 [B, L].

    Raises:
        InvalidInput: ids are not int64 [B, L], or a mask is of another shape or of floats.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype != torch.int64:
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InvalidInput(f"next_tokens: expected ids int64 [B, L], got {got}")
    for what, given in (("mask", mask), ("trained", trained)):
        if given is not None and (not isinstance(given, Tensor) or given.shape != ids.shape or given.is_floating_point()):
            got = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
            raise InvalidInput(f"next_tokens: expected {what} of bools or integers {list(ids.shape)}, got {got}")
    length = ids.shape[1]
    if length == 0:
        return ids.clone()
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    columns = torch.arange(length, device=ids.device).expand_as(ids)
    # Smallest column of a token at or after each; shifted by one, the next token's.
    first = columns.masked_fill(~real, length).flip(1).cummin(1).values.flip(1)
    after = torch.cat([first[:, 1:], first.new_full((len(ids), 1), length)], 1)
    place = after.clamp(max=length - 1)
    counts = real & (after < length)
    if trained is not None:
        counts &= (trained != 0).gather(1, place)
    return ids.gather(1, place).masked_fill(~counts, ignore_index)
