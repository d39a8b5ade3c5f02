"""`sp_compile::linear_scan`: the gated recurrence of one number per channel along every root-to-leaf path.

    h_t = exp(a_t) * h_{t-1} + x_t

a [1, T, D] is the log of the decay, at most 0; minus infinity resets the state (the recurrence of RG-LRU, arXiv 2402.19427). Results are
`(out [1, T, D], states [F, D])`: out in the dtype of x, states after the tokens `final` in accumulation dtype, in which h is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.numerics import accumulate_dtype
from sp_compile.ops.recurrent import Inputs, Values, check_forest, check_initial, define, reference_backward, scan_states, state_fake

INPUTS = "Tensor a, Tensor x, Tensor prev, Tensor end, Tensor? initial, Tensor? final"
OPTIONS = ""
GRADIENTS = 2


def check_inputs(a: Tensor, x: Tensor, prev: Tensor, end: Tensor, initial: Tensor | None, final: Tensor | None) -> None:
    """Raises InvalidInput for inputs outside the contract. For real tensors only."""
    if x.dim() != 3 or x.shape[0] != 1 or a.shape != x.shape or not (x.is_floating_point() and a.is_floating_point()):
        shapes = f"{a.dtype} {list(a.shape)} and {x.dtype} {list(x.shape)}"
        raise InvalidInput(f"linear_scan: expected floating-point a and x [1, T, D]; got {shapes}")
    states = check_initial("linear_scan", x, initial, (x.shape[2],))
    check_forest("linear_scan", x.shape[1], prev, end, states, final)


def _body(a: Tensor, x: Tensor, prev: Tensor, end: Tensor, initial: Tensor | None, final: Tensor | None) -> Values:
    dtype = accumulate_dtype(x.dtype)
    states = scan_states(a[0].to(dtype).exp(), x[0].to(dtype), prev, initial)
    return states.to(x.dtype)[None], states[:0] if final is None else states[final]


def _forward(*inputs: Any) -> Values:
    check_inputs(*inputs)
    out, states = _body(*inputs)
    return out.clone(memory_format=torch.contiguous_format), states.clone()


def fake(a: Tensor, x: Tensor, prev: Tensor, end: Tensor, initial: Tensor | None, final: Tensor | None, *rest: Any) -> Values:
    """Results of every implementation."""
    return x.new_empty(x.shape), state_fake(x, final, x.shape[2])


linear_scan = define("linear_scan", INPUTS, OPTIONS, 2, _forward, reference_backward(_body, 0, 1, 4), fake, GRADIENTS)


def linear_scan_inputs(
    prev: Tensor,
    end: Tensor,
    *,
    channels: int = 8,
    states: int = 0,
    final: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Inputs:
    """Random inputs of the op on a forest; `states` external states if that is positive."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, prev.shape[0], channels)
    a, x = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    made = [value.to(prev.device, dtype).requires_grad_() for value in (-a.exp(), x)]
    initial = torch.randn((states, channels), generator=generator, dtype=torch.float64).to(prev.device, accumulate_dtype(dtype))
    return made[0], made[1], prev, end, initial.requires_grad_() if states else None, final
