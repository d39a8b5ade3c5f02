"""`sp_compile::selective_scan_wavefront`: Mamba-1, a position of all rows at a time; see wavefront.py.

States of a segment are computed for a slice of channels at a time, [n, d, N], sized for a core's own cache: nothing of size [T, D, N]
exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_compile.kernels.scan.wavefront import Front, Segment, advance, begin, make_front, retreat
from sp_compile.ops import selective_scan
from sp_compile.ops.numerics import accumulate_dtype
from sp_compile.ops.recurrent import Inputs, Values, define, sigmoid, softplus
from sp_compile.ops.rows import sum_by_key

# Elements of the states of a segment.
BUDGET = 1 << 18


@dataclass(frozen=True)
class Scan:
    """The inputs in the order of positions and in accumulation dtype: u, d [T, D], A [D, N], B, C [T, G, N]; `z` is d before softplus."""

    u: Tensor
    z: Tensor
    d: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    front: Front

    def channels(self, segment: Segment) -> Iterator[tuple[slice, int]]:
        """Slices of channels inside of one group, and the group."""
        share = self.u.shape[1] // self.B.shape[1]
        tokens = segment.span.stop - segment.span.start
        size = max(1, BUDGET // max(1, tokens * self.A.shape[1]))
        size = -(-share // -(-share // size))
        for group in range(self.B.shape[1]):
            for start in range(group * share, (group + 1) * share, size):
                yield slice(start, min(start + size, (group + 1) * share)), group

    def terms(self, segment: Segment, part: slice, group: int) -> tuple[Tensor, Tensor]:
        """Decays and terms [n, d, N] of a segment."""
        span = segment.span
        d = self.d[span, part]
        decay = (d[..., None] * self.A[part]).exp_()
        return decay, (d * self.u[span, part])[..., None] * self.B[span, group, None]


def prepare(inputs: Inputs, delta_softplus: bool) -> Scan:
    u, delta, A, B, C, _, bias, prev, _, _, final = inputs
    dtype = accumulate_dtype(u.dtype)
    front = make_front(prev, final)
    u_, z, B_, C_ = (value[0].index_select(0, front.order).to(dtype) for value in (u, delta, B, C))
    if bias is not None:
        z = z + bias.to(dtype)
    return Scan(u_, z, softplus(z) if delta_softplus else z, A.to(dtype), B_, C_, front)


def forward(*inputs: Any, delta_softplus: bool, chunk: int = 64) -> Values:
    selective_scan.check_inputs(*inputs)
    scan = prepare(inputs, delta_softplus)
    u, D, initial, final = inputs[0], inputs[5], inputs[9], inputs[10]
    y = torch.empty_like(scan.u)
    states = scan.u.new_empty((0 if final is None else len(final), *scan.A.shape))
    before = scan.u.new_empty(0)
    for number, segment in enumerate(scan.front.segments):
        after = scan.u.new_empty((segment.widths[-1], *scan.A.shape))
        if number == 0:
            before = begin(segment, after, initial)
        for part, group in scan.channels(segment):
            a, h = scan.terms(segment, part, group)
            after[:, part] = advance(segment, a, h, before[:, part], number == 0)
            if segment.final is not None:
                states[segment.final, part] = h[segment.places]
            y[segment.span, part] = torch.mul(h, scan.C[segment.span, group, None], out=a).sum(-1)
        before = after
    if D is not None:
        y += scan.u * D.to(y.dtype)
    out = torch.empty_like(u[0], memory_format=torch.contiguous_format).index_copy_(0, scan.front.order, y.to(u.dtype))
    return out[None], states


def _borders(scan: Scan, initial: Tensor | None) -> list[Tensor]:
    """What each segment continues, [width, D, N]."""
    borders: list[Tensor] = []
    for number, segment in enumerate(scan.front.segments):
        after = scan.u.new_empty((segment.widths[-1], *scan.A.shape))
        if number == 0:
            borders.append(begin(segment, after, initial))
        if number + 1 == len(scan.front.segments):
            break
        for part, group in scan.channels(segment):
            a, h = scan.terms(segment, part, group)
            after[:, part] = advance(segment, a, h, borders[-1][:, part], number == 0)
        borders.append(after)
    return borders


def backward(grads: Values, inputs: Inputs, options: dict[str, Any]) -> Values:
    scan = prepare(inputs, options["delta_softplus"])
    u, delta, A, B, C, D, bias, _, _, initial, _ = inputs
    dtype, order = scan.u.dtype, scan.front.order
    d_y = grads[0][0].index_select(0, order).to(dtype)
    d_du, d_d, d_A = torch.empty_like(scan.u), torch.empty_like(scan.u), torch.zeros_like(scan.A)
    d_B, d_C = torch.zeros_like(scan.B), torch.zeros_like(scan.C)
    borders = _borders(scan, initial)
    later: Tensor | None = None
    for number in reversed(range(len(scan.front.segments))):
        segment, before = scan.front.segments[number], borders.pop()
        span = segment.span
        earlier = torch.empty((segment.widths[0], *scan.A.shape), dtype=dtype, device=u.device)
        for part, group in scan.channels(segment):
            a, h = scan.terms(segment, part, group)
            carried = torch.empty_like(a)
            advance(segment, a, h, before[:, part], number == 0, carried)
            d_C[span, group] += torch.bmm(d_y[span, None, part], h)[:, 0]
            g = torch.mul(d_y[span, part, None], scan.C[span, group, None], out=h)
            if segment.final is not None and segment.places is not None:
                g += sum_by_key(grads[1][segment.final, part].to(dtype), segment.places, len(g))
            d = scan.d[span, part]
            earlier[:, part] = retreat(scan.front.segments, number, a, g, None if later is None else later[:, part])
            d_B[span, group] += torch.bmm((d * scan.u[span, part])[:, None], g)[:, 0]
            d_du[span, part] = torch.bmm(g, scan.B[span, group, :, None])[..., 0]
            d_log = carried.mul_(g)
            d_d[span, part] = torch.mul(d_log, scan.A[part], out=g).sum(-1)
            d_A[part] += d_log.mul_(d[..., None]).sum(0)
        later = earlier
    d_d += d_du * scan.u
    d_u = d_du.mul_(scan.d)
    d_D = u.new_empty(0)
    if D is not None:
        d_u += d_y * D.to(dtype)
        d_D = (d_y * scan.u).sum(0).to(D.dtype)
    if options["delta_softplus"]:
        d_d *= sigmoid(scan.z)
    d_bias = u.new_empty(0) if bias is None else d_d.sum(0).to(bias.dtype)
    d_initial = u.new_empty(0)
    if initial is not None:
        d_initial = torch.zeros_like(initial)
        if later is not None and scan.front.segments[0].sources[0] is not None:
            d_initial = sum_by_key(later, scan.front.segments[0].sources[0], initial.shape[0])
    tokens = (
        torch.empty_like(like[0], memory_format=torch.contiguous_format).index_copy_(0, order, value.to(like.dtype))[None]
        for value, like in ((d_u, u), (d_d, delta), (d_B, B), (d_C, C))
    )
    d_u, d_d, d_B, d_C = tokens
    return d_u, d_d, d_A.to(A.dtype), d_B, d_C, d_D, d_bias, d_initial


selective_scan_wavefront = define(
    "selective_scan_wavefront",
    selective_scan.INPUTS,
    selective_scan.OPTIONS,
    2,
    forward,
    backward,
    selective_scan.fake,
    selective_scan.GRADIENTS,
)
