"""`sp_compile::causal_conv1d_shifted`: the taps of most tokens are the tokens right before them, so a tap is the whole pack, shifted.

Only tokens whose path was broken within the last W-1 steps, at most W-1 a node, are gathered one by one. Every element goes through the
same products and sums in the same order as in the op's body, so a token's result doesn't depend on where it stands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.ops import causal_conv1d
from sp_compile.ops.numerics import accumulate_dtype
from sp_compile.ops.recurrent import Inputs, Values, define, sigmoid
from sp_compile.ops.rows import sum_by_key

# Elements of a block of tokens; its temporaries stay in a core's own cache.
BLOCK = 1 << 17


class Taps:
    """The taps of a forest.

    Attributes:
        places: int64 [W, T] of `ops.causal_conv1d.taps`.
        base: place of token 0.
        broken: per tap, the tokens for which it isn't the token w places before in the pack; each a subset of the next.
    """

    def __init__(self, prev: Tensor, width: int, halo: Tensor | None) -> None:
        states = 0 if halo is None else halo.shape[0]
        self.base = 1 + states * (width - 1)
        self.places = causal_conv1d.taps(prev, width, states)
        straight = self.base + torch.arange(prev.shape[0], device=prev.device)
        self.broken = [((place != straight - w) | (place < self.base)).nonzero()[:, 0] for w, place in enumerate(self.places)]

    def gather(self, w: int, tokens: Tensor, x: Tensor, halo: Tensor | None) -> Tensor:
        """[n, C]: tap w of some tokens, in the dtype of `x` [T, C]."""
        place = self.places[w, tokens]
        values = x.index_select(0, (place - self.base).clamp(min=0)) if x.shape[0] else x
        outside = place < self.base
        values[outside] = 0
        if halo is not None and halo.numel():
            inside = ((place > 0) & outside).nonzero()[:, 0]
            values[inside] = halo.reshape(-1, x.shape[1])[place[inside] - 1].to(x.dtype)
        return values


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, halo: Tensor | None, taps: Taps, activate: bool) -> Tensor:
    """[T, C] after silu if that is asked for, all in accumulation dtype."""
    tokens, channels = x.shape
    width = weight.shape[1]
    out = torch.empty_like(x)
    rows = max(1, BLOCK // max(1, channels))
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        block = out[start:stop]
        torch.mul(x[start:stop], weight[:, width - 1], out=block)
        if bias is not None:
            block += bias
        for w in range(1, width):
            first = max(start, w)
            if first < stop:
                out[first:stop] += x[first - w : stop - w] * weight[:, width - 1 - w]
        if activate:
            block *= sigmoid(block)
    odd = taps.broken[-1]
    if len(odd):
        fixed = x[odd] * weight[:, width - 1]
        if bias is not None:
            fixed += bias
        for w in range(1, width):
            fixed += taps.gather(w, odd, x, halo) * weight[:, width - 1 - w]
        out[odd] = fixed * sigmoid(fixed) if activate else fixed
    return out


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, prev: Tensor, halo: Tensor | None, *, activation: str | None) -> Values:
    causal_conv1d.check_inputs(x, weight, bias, prev, halo, activation)
    dtype = accumulate_dtype(x.dtype)
    taps = Taps(prev, weight.shape[1], halo)
    out = convolve(x[0].to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), halo, taps, activation is not None)
    return (out[None].to(x.dtype).contiguous(),)


def backward(grads: Values, inputs: Inputs, options: dict[str, Any]) -> Values:
    x, weight, bias, prev, halo = inputs
    dtype, width = accumulate_dtype(x.dtype), weight.shape[1]
    x_, weight_, d_out = x[0].to(dtype), weight.to(dtype), grads[0][0].to(dtype)
    taps = Taps(prev, width, halo)
    if options["activation"] is not None:
        z = convolve(x_, weight_, None if bias is None else bias.to(dtype), halo, taps, False)
        d_out = torch.ops.aten.silu_backward(d_out, z)
    elif d_out.data_ptr() == grads[0].data_ptr():
        d_out = d_out.clone()
    d_bias = x.new_empty(0) if bias is None else d_out.sum(0).to(bias.dtype)
    d_x = d_out * weight_[:, width - 1]
    d_weight = torch.empty_like(weight_)
    d_weight[:, width - 1] = (d_out * x_).sum(0)
    sources: list[Tensor] = []
    terms: list[Tensor] = []
    tokens = x_.shape[0]
    # A token broken at one tap is broken at all further ones: its gradient leaves the shifted sums for good.
    odd, d_odd = taps.broken[0], d_out[taps.broken[0]]
    for w in range(1, width):
        column = weight_[:, width - 1 - w]
        fresh = taps.broken[w][~torch.isin(taps.broken[w], odd)]
        odd, d_odd = torch.cat([odd, fresh]), torch.cat([d_odd, d_out[fresh]])
        d_out[fresh] = 0
        d_column = (d_odd * taps.gather(w, odd, x_, halo)).sum(0)
        if w < tokens:
            d_x[: tokens - w].addcmul_(d_out[w:], column)
            d_column += (d_out[w:] * x_[: tokens - w]).sum(0)
        d_weight[:, width - 1 - w] = d_column
        sources.append(taps.places[w, odd])
        terms.append(d_odd * column)
    d_halo = x.new_empty(0) if halo is None else torch.zeros_like(halo, dtype=dtype)
    if sources:
        sums = sum_by_key(torch.cat(terms), torch.cat(sources), taps.base + tokens)
        d_x += sums[taps.base :]
        if halo is not None:
            # With memory of its own: a part of the sums need not be aligned.
            d_halo = sums[1 : taps.base].clone().view(halo.shape)
    return d_x[None].to(x.dtype), d_weight.to(weight.dtype), d_bias, d_halo if halo is None else d_halo.to(halo.dtype)


causal_conv1d_shifted = define(
    "causal_conv1d_shifted",
    causal_conv1d.INPUTS,
    causal_conv1d.OPTIONS,
    1,
    forward,
    backward,
    causal_conv1d.fake,
    causal_conv1d.GRADIENTS,
)
