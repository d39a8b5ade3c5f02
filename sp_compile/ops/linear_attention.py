"""`sp_compile::linear_attention`: a sum of k v^T with a decay per head, along the paths of a forest (lightning, simple GLA, retention).

    S_i = exp(g_i) S_prev + k_i v_i^T                    S [K, V] per head; g_i [H], or `decay` [H] for every token, or no decay
    o_i = scale * S_i^T q_i

`prev`, external and final states as in `recurrent`. `out` has the dtype of q; states are float32, or float64 for float64 inputs.
`decay` is a log decay: minus the slope of a head in "Lightning Attention-2", Qin et al., 2024, equation 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops import matrix_states
from sp_compile.ops.numerics import accumulate_dtype
from sp_compile.ops.recurrent import Values, define, expect

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? decay, Tensor prev, Tensor end, Tensor? initial, Tensor? final"
OPTIONS = "float scale, int chunk=64"
GRADIENTS = 5


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, decay: Tensor | None, prev: Tensor, end: Tensor,
    initial: Tensor | None, final: Tensor | None, *, chunk: int,
) -> None:  # fmt: skip
    """Raises InvalidInput for shapes, dtypes and numbers outside the contract. For real tensors only."""
    matrix_states.check_inputs("linear_attention", q, k, v, prev, end, initial, final, chunk)
    expect("linear_attention", "g", g, tuple(v.shape[:3]))
    expect("linear_attention", "decay", decay, (v.shape[2],))
    if g is not None and decay is not None:
        raise InvalidInput("linear_attention: expected g or decay or neither; got both")


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, decay: Tensor | None, prev: Tensor, initial: Tensor | None, final: Tensor | None,
    scale: float,
) -> matrix_states.Recurrence:  # fmt: skip
    dtype = accumulate_dtype(q.dtype)
    q_, k_, v_ = (x.to(dtype) for x in (q, k, v))
    log_decay = None
    if g is not None:
        log_decay = g.to(dtype)[..., None]
    elif decay is not None:
        log_decay = decay.to(dtype)[None, None, :, None].expand(*v.shape[:3], 1)
    numbers = matrix_states.numbers
    return matrix_states.Recurrence(q_, k_, v_, log_decay, None, numbers(prev), initial, numbers(final), scale)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, decay: Tensor | None, prev: Tensor, end: Tensor,
    initial: Tensor | None, final: Tensor | None, *, scale: float, chunk: int = 64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_inputs(q, k, v, g, decay, prev, end, initial, final, chunk=chunk)
    out, states = _recurrence(q, k, v, g, decay, prev, initial, final, scale).forward()
    return out.to(q.dtype), states


def _backward(grads: Values, inputs: tuple[Any, ...], options: dict[str, Any]) -> Values:
    (grad, grad_states), (q, k, v, g, decay, prev, _, initial, final) = grads, inputs
    made = _recurrence(q, k, v, g, decay, prev, initial, final, options["scale"])
    d_q, d_k, d_v, d_g, _, d_initial = made.backward(grad.to(made.q.dtype), grad_states)
    per_token = None if d_g is None else d_g[..., 0]
    per_head = None if per_token is None else per_token[0].sum(0, dtype=torch.float64)
    found = (d_q, d_k, d_v, per_token, per_head, d_initial)
    return matrix_states.rounded(found, (q, k, v, g, decay, initial), grad)


linear_attention = define("linear_attention", INPUTS, OPTIONS, 2, _forward, _backward, matrix_states.fake, GRADIENTS)


def linear_attention_inputs(
    prev: Tensor,
    end: Tensor,
    *,
    decays: str | None = "g",
    heads: int = 2,
    dims: tuple[int, int] = (8, 12),
    dtype: torch.dtype = torch.float32,
    states: int = 0,
    final: Tensor | None = None,
    seed: int = 0,
) -> list[Tensor | None]:
    """Random positional inputs on the forest given by `prev` and `end`: decays in (0, 1).

    Args:
        decays: "g", "decay" or None.
        dims: K and V.
        states: number of external states; 0: none given.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, (rows, columns) = prev.shape[0], dims
    shapes = [(1, tokens, heads, rows)] * 2 + [(1, tokens, heads, columns), (1, tokens, heads), (heads,), (states, heads, rows, columns)]
    # Made in float64 first, so that every dtype rounds the same values.
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    made[3:5] = [-torch.nn.functional.softplus(x - 1) for x in made[3:5]]
    q, k, v, g, decay = (x.to(prev.device, dtype).requires_grad_() for x in made[:5])
    initial = made[5].to(prev.device, accumulate_dtype(dtype)).requires_grad_() if states else None
    return [q, k, v, g if decays == "g" else None, decay if decays == "decay" else None, prev, end, initial, final]
