"""`sp_compile::selective_scan`: the Mamba-1 recurrence along every root-to-leaf path.

    d_t = softplus(delta_t + delta_bias)                      softplus only if `delta_softplus`
    h_t = exp(d_t A) * h_{t-1} + d_t u_t B_t                  [D, N]; channel d uses group d // (D / G) of B and C
    y_t = sum_n C_t h_t + D u_t

(arXiv 2312.00752, eq. 2 and algorithm 2, with the simplified discretisation of B that its code uses.) u, delta [1, T, D]; A [D, N]; B, C
[1, T, G, N]; the skip D and delta_bias [D]. Results are `(out [1, T, D], states [F, D, N])`: out in the dtype of u, states after the tokens
`final` in accumulation dtype, in which h is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.numerics import accumulate_dtype
from sp_compile.ops.recurrent import (
    Inputs,
    Values,
    check_forest,
    check_group,
    check_initial,
    define,
    expect,
    reference_backward,
    scan_states,
    softplus,
    state_fake,
)

INPUTS = (
    "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? delta_bias, "
    "Tensor prev, Tensor end, Tensor? initial, Tensor? final"
)
OPTIONS = "bool delta_softplus, int chunk=64"
GRADIENTS = 7


def check_inputs(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, delta_bias: Tensor | None,
    prev: Tensor, end: Tensor, initial: Tensor | None, final: Tensor | None,
) -> None:  # fmt: skip
    """Raises InvalidInput for inputs outside the contract. For real tensors only."""
    if u.dim() != 3 or u.shape[0] != 1 or A.dim() != 2 or B.dim() != 4:
        shapes = ", ".join(str(list(x.shape)) for x in (u, A, B))
        raise InvalidInput(f"selective_scan: expected u [1, T, D], A [D, N], B [1, T, G, N]; got {shapes}")
    (_, tokens, channels), size, groups = u.shape, A.shape[1], B.shape[2]
    for name, value in (("u", u), ("delta", delta)):
        expect("selective_scan", name, value, (1, tokens, channels))
    expect("selective_scan", "A", A, (channels, size))
    for name, value in (("B", B), ("C", C)):
        expect("selective_scan", name, value, (1, tokens, groups, size))
    expect("selective_scan", "D", D, (channels,))
    expect("selective_scan", "delta_bias", delta_bias, (channels,))
    check_group("selective_scan", channels, groups)
    states = check_initial("selective_scan", u, initial, (channels, size))
    check_forest("selective_scan", tokens, prev, end, states, final)


def _body(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, delta_bias: Tensor | None,
    prev: Tensor, end: Tensor, initial: Tensor | None, final: Tensor | None, *, delta_softplus: bool, chunk: int = 64,
) -> Values:  # fmt: skip
    dtype = accumulate_dtype(u.dtype)
    share = u.shape[2] // B.shape[2]
    u_, d = u[0].to(dtype), delta[0].to(dtype)
    if delta_bias is not None:
        d = d + delta_bias.to(dtype)
    if delta_softplus:
        d = softplus(d)
    B_, C_ = (x[0].to(dtype).repeat_interleave(share, 1) for x in (B, C))
    states = scan_states((d[..., None] * A.to(dtype)).exp(), (d * u_)[..., None] * B_, prev, initial)
    out = (states * C_).sum(-1)
    if D is not None:
        out = out + D.to(dtype) * u_
    return out.to(u.dtype)[None], states[:0] if final is None else states[final]


def _forward(*inputs: Any, **options: Any) -> Values:
    check_inputs(*inputs)
    out, states = _body(*inputs, **options)
    return out.contiguous(), states.clone()


def fake(u: Tensor, delta: Tensor, A: Tensor, *rest: Any, **options: Any) -> Values:
    """Results of every implementation."""
    return u.new_empty(u.shape), state_fake(u, rest[7], *A.shape)


selective_scan = define("selective_scan", INPUTS, OPTIONS, 2, _forward, reference_backward(_body, 0, 1, 2, 3, 4, 5, 6, 9), fake, GRADIENTS)


def selective_scan_inputs(
    prev: Tensor,
    end: Tensor,
    *,
    channels: int = 8,
    size: int = 4,
    groups: int = 1,
    skip: bool = True,
    bias: bool = True,
    states: int = 0,
    final: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Inputs:
    """Random inputs of the op on a forest; `states` external states if that is positive."""
    generator = torch.Generator().manual_seed(seed)
    tokens = prev.shape[0]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def leaf(value: Tensor, kind: torch.dtype = dtype) -> Tensor:
        return value.to(prev.device, kind).requires_grad_()

    u, delta, A = leaf(normal(1, tokens, channels)), leaf(normal(1, tokens, channels)), leaf(-normal(channels, size).exp())
    B, C = leaf(normal(1, tokens, groups, size)), leaf(normal(1, tokens, groups, size))
    D, delta_bias = leaf(normal(channels)), leaf(normal(channels) - 1)
    initial = leaf(normal(states, channels, size), accumulate_dtype(dtype))
    return u, delta, A, B, C, D if skip else None, delta_bias if bias else None, prev, end, initial if states else None, final
