"""`sp_compile::linear_scan_wavefront`: the recurrence of one number per channel, a position of all rows at a time; see wavefront.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.kernels.scan.wavefront import Front, advance, begin, make_front, retreat
from sp_compile.ops import linear_scan
from sp_compile.ops.numerics import accumulate_dtype
from sp_compile.ops.recurrent import Inputs, Values, define
from sp_compile.ops.rows import sum_by_key


def _scan(front: Front, decay: Tensor, term: Tensor, initial: Tensor | None) -> Tensor:
    """States [T, D] in the order of positions; overwrites `decay` with the products decay_t * h_prev(t), and `term`."""
    before = term
    for number, segment in enumerate(front.segments):
        if number == 0:
            before = begin(segment, term, initial)
        before = advance(segment, decay[segment.span], term[segment.span], before, number == 0)
    return term


def forward(a: Tensor, x: Tensor, prev: Tensor, end: Tensor, initial: Tensor | None, final: Tensor | None) -> Values:
    linear_scan.check_inputs(a, x, prev, end, initial, final)
    dtype = accumulate_dtype(x.dtype)
    front = make_front(prev, None)
    decay, term = (value[0].index_select(0, front.order).to(dtype) for value in (a, x))
    h = torch.empty_like(term).index_copy_(0, front.order, _scan(front, decay.exp_(), term, initial))
    states = h[:0] if final is None else h[final]
    return h[None].to(x.dtype) if x.dtype != dtype else h[None], states.clone()


def backward(grads: Values, inputs: Inputs, options: dict[str, Any]) -> Values:
    a, x, prev, _, initial, final = inputs
    dtype = accumulate_dtype(x.dtype)
    front = make_front(prev, None)
    decay, term, g = (value[0].index_select(0, front.order).to(dtype) for value in (a, x, grads[0]))
    if final is not None:
        g += sum_by_key(grads[1].to(dtype), final, len(g))[front.order]
    decay.exp_()
    products = decay.clone()
    _scan(front, products, term, initial)
    later = None
    for number in reversed(range(len(front.segments))):
        span = front.segments[number].span
        later = retreat(front.segments, number, decay[span], g[span], later)
    d_a, d_x = (torch.empty_like(g).index_copy_(0, front.order, value) for value in (products.mul_(g), g))
    d_initial = x.new_empty(0)
    if initial is not None:
        d_initial = torch.zeros_like(initial)
        if later is not None and front.segments[0].sources[0] is not None:
            d_initial = sum_by_key(later, front.segments[0].sources[0], initial.shape[0])
    return d_a[None].to(a.dtype), d_x[None].to(x.dtype), d_initial


linear_scan_wavefront = define(
    "linear_scan_wavefront", linear_scan.INPUTS, linear_scan.OPTIONS, 2, forward, backward, linear_scan.fake, linear_scan.GRADIENTS
)
