"""`sp_compile::causal_conv1d`: depthwise causal convolution of width W along every root-to-leaf path.

    y[i] = act(bias + sum_w weight[:, W-1-w] * x[prev^w(i)])        w = 0 .. W-1, zeros before the root

x is channel-last [1, T, C], weight [C, W] with the newest tap last, as torch's conv1d and the causal_conv1d package have it. The taps of
a node's first W-1 tokens lie in its ancestors, and may span several of them. A path that continues external state s reads on in
`halo[s]` [W-1, C], oldest first. Products and sums are formed in accumulation dtype in the order bias, w = 0, 1, ..., rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.numerics import accumulate_dtype
from sp_compile.ops.recurrent import Inputs, Values, check_forest, define, expect, reference_backward

INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor prev, Tensor? halo"
OPTIONS = "str? activation"
GRADIENTS = 3


def check_inputs(x: Tensor, weight: Tensor, bias: Tensor | None, prev: Tensor, halo: Tensor | None, activation: str | None) -> None:
    """Raises InvalidInput for inputs outside the contract. For real tensors only."""
    if x.dim() != 3 or x.shape[0] != 1 or not x.is_floating_point() or weight.dim() != 2 or weight.shape[1] < 1:
        shapes = f"{x.dtype} {list(x.shape)} and {list(weight.shape)}"
        raise InvalidInput(f"causal_conv1d: expected floating-point x [1, T, C] and weight [C, W]; got {shapes}")
    tokens, channels, width = x.shape[1], x.shape[2], weight.shape[1]
    expect("causal_conv1d", "weight", weight, (channels, width))
    expect("causal_conv1d", "bias", bias, (channels,))
    if halo is not None:
        expect("causal_conv1d", "halo", halo, (halo.shape[0] if halo.dim() else 0, width - 1, channels))
    check_forest("causal_conv1d", tokens, prev, None, None if halo is None else halo.shape[0], None)
    if activation not in (None, "silu"):
        raise InvalidInput(f"causal_conv1d: activation must be None or 'silu'; got {activation!r}")


def taps(prev: Tensor, width: int, states: int) -> Tensor:
    """int64 [W, T]: place of tap w of each token in `[one row of zeros, states * (W-1) halo rows, T tokens]`."""
    tokens, base = prev.shape[0], 1 + states * (width - 1)
    halo = torch.arange(states * (width - 1), device=prev.device)
    before_halo = torch.where(halo % max(width - 1, 1) == 0, 0, halo) if width > 1 else halo
    newest = 1 + (-1 - prev) * (width - 1) + (width - 2)
    before_token = torch.where(prev >= 0, base + prev, newest if states else 0)
    before = torch.cat([prev.new_zeros(1), before_halo, before_token])
    places = [base + torch.arange(tokens, device=prev.device)]
    for _ in range(width - 1):
        places.append(before[places[-1]])
    return torch.stack(places)


def _body(
    x: Tensor, weight: Tensor, bias: Tensor | None, prev: Tensor, halo: Tensor | None, *, activation: str | None
) -> tuple[Tensor]:  # fmt: skip
    dtype, width = accumulate_dtype(x.dtype), weight.shape[1]
    rows = [x.new_zeros((1, x.shape[2]), dtype=dtype)]
    if halo is not None:
        rows.append(halo.to(dtype).reshape(-1, x.shape[2]))
    rows.append(x[0].to(dtype))
    values = torch.cat(rows)
    out = x.new_zeros(x.shape[1:], dtype=dtype) if bias is None else bias.to(dtype).expand(x.shape[1:])
    for w, place in enumerate(taps(prev, width, 0 if halo is None else halo.shape[0])):
        out = out + weight[:, width - 1 - w].to(dtype) * values[place]
    if activation is not None:
        out = torch.nn.functional.silu(out)
    return (out.to(x.dtype)[None],)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, prev: Tensor, halo: Tensor | None, *, activation: str | None
) -> Values:  # fmt: skip
    check_inputs(x, weight, bias, prev, halo, activation)
    (out,) = _body(x, weight, bias, prev, halo, activation=activation)
    return (out.contiguous(),)


def fake(x: Tensor, *rest: Any, activation: str | None) -> Values:
    """Result of every implementation."""
    return (x.new_empty(x.shape),)


causal_conv1d = define("causal_conv1d", INPUTS, OPTIONS, 1, _forward, reference_backward(_body, 0, 1, 2, 4), fake, GRADIENTS)


def causal_conv1d_inputs(
    prev: Tensor,
    *,
    channels: int = 12,
    width: int = 4,
    bias: bool = True,
    states: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Inputs:
    """Random inputs of the op on a forest; `states` halos if that is positive."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(prev.device, dtype).requires_grad_()

    x, weight = made(1, prev.shape[0], channels), made(channels, width)
    return x, weight, made(channels) if bias else None, prev, made(states, width - 1, channels) if states else None
