"""Site markers: identity ops that carry what a library call means, put into the captured graph beside the call's own dense nodes.

Each op returns a fresh tensor with the sizes, strides, dtype and device of its first argument, `dense`, whose value it copies and to
which it passes the whole gradient. So a graph with markers computes exactly what the graph without them computes, and "run it densely"
means replacing every marker by its first argument. A pass that shares prefixes replaces the marker by a real op on the other
arguments instead, and the dense nodes become dead.

`attention_site`  dense [B, L, Hq, Dv]; q [B, Hq, L, D]; k [B, Hkv, L, D]; v [B, Hkv, L, Dv] (key and value heads not repeated);
    mask: what the model passed (the result of a `mask_site`, some other [B|1, 1|H, L, L] tensor, a [B, L] tensor with nonzero = real
    token, or None); sinks [Hq], logits that enter the softmax denominator; bias, added to the scaled and capped scores, broadcastable to
    [B, Hq, L, L]; scale: None means 1 / sqrt(D); is_causal: the function itself masks later columns, on top of `mask`; window: number of
    visible columns including the own one, applied by the function itself (a window that is part of the mask is on the `mask_site`);
    dropout: the probability in force, 0.0 in evaluation; finite: keys are hidden by a finite score, so that a query whose keys are all
    hidden sees every key alike, later ones included (an additive float mask says by its values whether it does that).
`mask_site`  dense [B|1, 1, L, L], bool (True = visible) or additive float; padding [B, L], nonzero = real token, or None; segments
    [B, L] integers, a query sees only keys of its own segment, or None; kind "causal": later columns are hidden; window as above;
    chunk: a query sees only keys of its own chunk of that many columns. With a padding, columns are counted from the row's first real
    token. With segments, newer versions of transformers count by position id and older ones by column, so a pass that honours both must
    require that the `position_ids` of the `segments_site` are the columns.
    Where the library's mask is no tensor (a `BlockMask`), dense is an all-true [1, 1, 1, 1] stand-in that nothing dense reads.
`segments_site`  dense [B, L] integers, counted up where a position id is not its predecessor's plus one; position_ids [B|1, L].
`refusal_site`  dense of any shape; reason: why the call must run densely.
`rows_site`  dense of any shape; reason: why the call was not captured, and runs on rows unless its own nodes can be shared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAMESPACE = "sp_compile"
NAMES = ("attention_site", "mask_site", "segments_site", "refusal_site", "rows_site")


def _fresh(dense: Tensor) -> Tensor:
    """Copies `dense` into storage of its own, with the same strides even where they overlap (expanded masks) or leave holes."""
    if dense.numel() == 0:
        return torch.empty_strided(dense.size(), dense.stride(), dtype=dense.dtype, device=dense.device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(dense.size(), dense.stride(), strict=True))
    flat = dense.as_strided((extent,), (1,)).clone()
    return flat.as_strided(dense.size(), dense.stride(), 0)


def _fake(dense: Tensor) -> Tensor:
    return torch.empty_strided(dense.size(), dense.stride(), dtype=dense.dtype, device=dense.device)


def attention_site(
    dense: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    *,
    scale: float | None,
    is_causal: bool,
    window: int | None,
    softcap: float | None,
    dropout: float,
    finite: bool = False,
) -> Tensor:
    """Marks `dense` as softmax attention of q, k, v (module docstring: shapes and meaning)."""
    return _fresh(dense)


def mask_site(
    dense: Tensor,
    padding: Tensor | None,
    segments: Tensor | None,
    *,
    kind: str,
    window: int | None,
    chunk: int | None,
) -> Tensor:
    """Marks `dense` as an attention mask of a known form (module docstring)."""
    return _fresh(dense)


def segments_site(dense: Tensor, position_ids: Tensor) -> Tensor:
    """Marks `dense` as the segment numbers read off jumps in `position_ids`."""
    return _fresh(dense)


def refusal_site(dense: Tensor, reason: str) -> Tensor:
    """Marks `dense` as the result of a call that must not be shared, for `reason`."""
    return _fresh(dense)


def rows_site(dense: Tensor, reason: str) -> Tensor:
    """Marks `dense` as the result of a call that was not captured, for `reason`."""
    return _fresh(dense)


_SCHEMAS = {
    "attention_site": "(Tensor dense, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor? bias, *, "
    "float? scale, bool is_causal, int? window, float? softcap, float dropout, bool finite=False) -> Tensor",
    "mask_site": "(Tensor dense, Tensor? padding, Tensor? segments, *, str kind, int? window, int? chunk) -> Tensor",
    "segments_site": "(Tensor dense, Tensor position_ids) -> Tensor",
    "refusal_site": "(Tensor dense, str reason) -> Tensor",
    "rows_site": "(Tensor dense, str reason) -> Tensor",
}


def _define(name: str, function: Any) -> None:
    op = torch.library.custom_op(f"{NAMESPACE}::{name}", function, mutates_args=(), schema=_SCHEMAS[name])
    others = len(op._opoverload._schema.arguments) - 1 - sum(a.kwarg_only for a in op._opoverload._schema.arguments)

    def fake(dense: Tensor, *args: object, **kwargs: object) -> Tensor:
        return _fake(dense)

    def backward(ctx: object, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad, *([None] * others))

    op.register_fake(fake)
    op.register_autograd(backward)


for _name, _function in zip(NAMES, (attention_site, mask_site, segments_site, refusal_site, rows_site), strict=True):
    _define(_name, _function)
