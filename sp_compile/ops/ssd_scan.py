"""`sp_compile::ssd_scan`: the Mamba-2 recurrence (state space duality) along every root-to-leaf path.

    d_t = clamp(softplus(dt_t + dt_bias), dt_min, dt_max)      softplus only if `dt_softplus`
    h_t = exp(d_t A) h_{t-1} + d_t x_t B_t^T                   [P, N] per head; head h uses group h // (H / G) of B and C
    y_t = h_t C_t + D x_t

(arXiv 2405.21060, section 6.) x [1, T, H, P]; dt [1, T, H]; A [H], the negative decay rate; B, C [1, T, G, N]; D [H] or [H, P]; dt_bias
[H]. Results are `(out [1, T, H, P], states [F, H, P, N])`: out in the dtype of x, states after the tokens `final` in accumulation dtype.

The body is the quadratic form: y_q = sum_k exp(cum_q - cum_k) (C_q . B_k) d_k x_k over the ancestors k of q, where cum is the sum of
d A along the path.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.numerics import accumulate_dtype
from sp_compile.ops.recurrent import (
    Inputs,
    Values,
    allow_matrix,
    check_forest,
    check_group,
    check_initial,
    define,
    expect,
    external_state,
    reference_backward,
    softplus,
    state_fake,
)

INPUTS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias, Tensor prev, Tensor end, Tensor? initial, Tensor? final"
)
OPTIONS = "bool dt_softplus, float dt_min, float dt_max, int chunk=64"
GRADIENTS = 7


def check_inputs(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    prev: Tensor, end: Tensor, initial: Tensor | None, final: Tensor | None,
) -> None:  # fmt: skip
    """Raises InvalidInput for inputs outside the contract. For real tensors only."""
    if x.dim() != 4 or x.shape[0] != 1 or B.dim() != 4:
        raise InvalidInput(f"ssd_scan: expected x [1, T, H, P] and B [1, T, G, N]; got {list(x.shape)} and {list(B.shape)}")
    (_, tokens, heads, dim), groups, size = x.shape, B.shape[2], B.shape[3]
    expect("ssd_scan", "x", x, (1, tokens, heads, dim))
    expect("ssd_scan", "dt", dt, (1, tokens, heads))
    expect("ssd_scan", "A", A, (heads,))
    for name, value in (("B", B), ("C", C)):
        expect("ssd_scan", name, value, (1, tokens, groups, size))
    expect("ssd_scan", "D", D, (heads,), (heads, dim))
    expect("ssd_scan", "dt_bias", dt_bias, (heads,))
    check_group("ssd_scan", heads, groups)
    states = check_initial("ssd_scan", x, initial, (heads, dim, size))
    check_forest("ssd_scan", tokens, prev, end, states, final)


def step_sizes(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_min: float, dt_max: float) -> Tensor:
    """d [T, H] of dt [T, H], both in accumulation dtype."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = softplus(dt)
    return dt.clamp(dt_min, dt_max)


def _body(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, dt_bias: Tensor | None,
    prev: Tensor, end: Tensor, initial: Tensor | None, final: Tensor | None,
    *, dt_softplus: bool, dt_min: float, dt_max: float, chunk: int = 64,
) -> Values:  # fmt: skip
    dtype = accumulate_dtype(x.dtype)
    share = x.shape[2] // B.shape[2]
    x_ = x[0].to(dtype)
    d = step_sizes(dt[0].to(dtype), dt_bias, dt_softplus, dt_min, dt_max)
    B_, C_ = (value[0].to(dtype).repeat_interleave(share, 1).transpose(0, 1) for value in (B, C))
    xd = (d[..., None] * x_).transpose(0, 1)
    allow = allow_matrix(end)
    # [H, T]. Differences of long sums: in float64 the difference of two neighbours keeps its bits.
    cum = (allow.double() @ (d.double() * A.double())).T
    decay = (cum[:, :, None] - cum[:, None, :]).masked_fill(~allow, -math.inf).exp().to(dtype)
    out = torch.bmm(torch.bmm(C_, B_.mT) * decay, xd).transpose(0, 1)
    before = external_state(prev, allow, initial)
    if before is not None:
        before = cum.exp().to(dtype).T[..., None, None] * before
        out = out + (before @ C_.transpose(0, 1)[..., None])[..., 0]
    if D is not None:
        out = out + (D.to(dtype) if D.dim() == 2 else D.to(dtype)[:, None]) * x_
    states = x_.new_zeros((0, *x.shape[2:], B.shape[3]))
    if final is not None:
        states = torch.einsum("hfk,hkn,hkp->fhpn", decay[:, final], B_, xd)
        if before is not None:
            states = states + before[final]
    return out.to(x.dtype)[None], states


def _forward(*inputs: Any, **options: Any) -> Values:
    check_inputs(*inputs)
    out, states = _body(*inputs, **options)
    return out.contiguous(), states.contiguous()


def fake(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, *rest: Any, **options: Any) -> Values:
    """Results of every implementation."""
    return x.new_empty(x.shape), state_fake(x, rest[6], *x.shape[2:], B.shape[3])


ssd_scan = define("ssd_scan", INPUTS, OPTIONS, 2, _forward, reference_backward(_body, 0, 1, 2, 3, 4, 5, 6, 9), fake, GRADIENTS)


def ssd_scan_inputs(
    prev: Tensor,
    end: Tensor,
    *,
    heads: int = 4,
    groups: int = 2,
    dims: tuple[int, int] = (6, 5),
    skip: int = 1,
    bias: bool = True,
    states: int = 0,
    final: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Inputs:
    """Random inputs of the op on a forest.

    Args:
        dims: P and N.
        skip: rank of D, 0 for none.
        states: number of external states, 0 for none.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = prev.shape[0]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def leaf(value: Tensor, kind: torch.dtype = dtype) -> Tensor:
        return value.to(prev.device, kind).requires_grad_()

    x, dt, A = leaf(normal(1, tokens, heads, dims[0])), leaf(normal(1, tokens, heads)), leaf(-normal(heads).exp())
    B, C = leaf(normal(1, tokens, groups, dims[1])), leaf(normal(1, tokens, groups, dims[1]))
    D, dt_bias = leaf(normal(heads, *dims[:1][: skip - 1])), leaf(normal(heads) - 1)
    initial = leaf(normal(states, heads, *dims), accumulate_dtype(dtype))
    return x, dt, A, B, C, D if skip else None, dt_bias if bias else None, prev, end, initial if states else None, final
