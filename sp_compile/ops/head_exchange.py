"""All tokens of some heads instead of some tokens of all heads: the other way to spread a mixer over ranks.

`sp_compile::swap_heads`   [..., H, ..., S, ...] <-> [..., H / C, ..., C * S, ...]: one all-to-all. The gradient goes the way back
`sp_compile::own_tokens`   the calling rank's C-th of a dimension, here of heads of a parameter (`ops/rank_values.py`)

A rank's heads are consecutive, so that the heads of queries and those of the keys that they read stay together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops import rank_values  # noqa: F401  (registers sp_compile::own_tokens)
from sp_compile.ops.layout_conversion import EXACT, _all_to_all
from sp_compile.ops.numerics import owned


def _swap_heads(x: Tensor, tokens: int, heads: int, ranks: int, group: str, inverse: bool) -> Tensor:
    cut, joined = (tokens, heads) if inverse else (heads, tokens)
    if x.shape[cut] % ranks:
        what = "tokens" if inverse else "heads"
        raise InvalidInput(f"swap_heads: expected a multiple of {ranks} {what}, got {x.shape[cut]}")
    parts = torch.stack(x.chunk(ranks, cut)).contiguous()  # [C, ...], one for each rank
    received = _all_to_all(parts, [1] * ranks, [1] * ranks, group)
    return torch.cat(received.unbind(0), joined).clone(memory_format=torch.contiguous_format)


swap_heads = torch.library.custom_op(
    "sp_compile::swap_heads",
    _swap_heads,
    mutates_args=(),
    schema="(Tensor x, int tokens, int heads, int ranks, str group, bool inverse) -> Tensor",
    tags=EXACT,
)


@swap_heads.register_fake
def _swap_heads_fake(x: Tensor, tokens: int, heads: int, ranks: int, group: str, inverse: bool) -> Tensor:
    cut, joined = (tokens, heads) if inverse else (heads, tokens)
    return x.new_empty([s // ranks if d == cut else s * ranks if d == joined else s for d, s in enumerate(x.shape)])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.options = inputs[1:]


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *dims, inverse = ctx.options
    return torch.ops.sp_compile.swap_heads(owned(grad), *dims, not inverse), *[None] * 5


swap_heads.register_autograd(_autograd, setup_context=_setup)


def elements_sent(ranks: int, query_heads: int, key_heads: int, key_size: int, value_size: int) -> dict[str, float]:
    """Elements that a rank sends per token of its own in the forward pass of attention, by way; backward sends as many.

    Args:
        query_heads, key_heads: Hq, Hkv.
        key_size, value_size: D, Dv. Queries change their layout as in zigzag or balanced ones, where about (C - 1) / C of them move.
    """
    queries, keys = query_heads * (key_size + value_size), key_heads * (key_size + value_size)
    moved = (ranks - 1) / ranks
    return {"gather": (ranks - 1) * keys + moved * queries, "heads": moved * (queries + keys)}
