"""`sp_compile::gated_delta_rule`: the delta rule with one decay per head (gated DeltaNet) along the paths of a forest.

    q_i, k_i = l2norm(q_i), l2norm(k_i)                  if qk_l2norm
    S' = exp(g_i) S_prev
    S_i = S' + k_i (beta_i (v_i - S'^T k_i))^T           S [K, V] per head of v; head h uses head h // (H / Hk) of q and k
    o_i = scale * S_i^T q_i

`prev`, external and final states as in `recurrent`. `out` has the dtype of q; states are float32, or float64 for float64 inputs.
Source of the recurrence: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024, equation 10, transposed to [K, V].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.ops import matrix_states
from sp_compile.ops.numerics import accumulate_dtype
from sp_compile.ops.recurrent import Values, define, expect

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor prev, Tensor end, Tensor? initial, Tensor? final"
OPTIONS = "float scale, bool qk_l2norm, int chunk=64"
GRADIENTS = 5


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, prev: Tensor, end: Tensor, initial: Tensor | None, final: Tensor | None,
    *, chunk: int,
) -> None:  # fmt: skip
    """Raises InvalidInput for shapes, dtypes and numbers outside the contract. For real tensors only."""
    matrix_states.check_inputs("gated_delta_rule", q, k, v, prev, end, initial, final, chunk, grouped=True)
    expect("gated_delta_rule", "g", g, tuple(v.shape[:3]))
    expect("gated_delta_rule", "beta", beta, tuple(v.shape[:3]))


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, prev: Tensor, initial: Tensor | None, final: Tensor | None,
    scale: float, qk_l2norm: bool,
) -> matrix_states.Recurrence:  # fmt: skip
    q_, k_, v_, g_, beta_ = (x.to(accumulate_dtype(q.dtype)) for x in (q, k, v, g, beta))
    if qk_l2norm:
        q_, k_ = matrix_states.l2norm(q_), matrix_states.l2norm(k_)
    q_, k_ = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q_, k_))
    numbers = matrix_states.numbers
    return matrix_states.Recurrence(q_, k_, v_, g_[..., None], beta_, numbers(prev), initial, numbers(final), scale)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, prev: Tensor, end: Tensor,
    initial: Tensor | None, final: Tensor | None, *, scale: float, qk_l2norm: bool, chunk: int = 64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_inputs(q, k, v, g, beta, prev, end, initial, final, chunk=chunk)
    out, states = _recurrence(q, k, v, g, beta, prev, initial, final, scale, qk_l2norm).forward()
    return out.to(q.dtype), states


def _backward(grads: Values, inputs: tuple[Any, ...], options: dict[str, Any]) -> Values:
    (grad, grad_states), (q, k, v, g, beta, prev, _, initial, final) = grads, inputs
    made = _recurrence(q, k, v, g, beta, prev, initial, final, options["scale"], options["qk_l2norm"])
    d_q, d_k, d_v, d_g, d_beta, d_initial = made.backward(grad.to(made.q.dtype), grad_states)
    d_q, d_k = (x.unflatten(2, (q.shape[2], -1)).sum(3) for x in (d_q, d_k))
    if options["qk_l2norm"]:
        d_q, d_k = (matrix_states.l2norm_backward(x.to(made.q.dtype), grad) for x, grad in ((q, d_q), (k, d_k)))
    found = (d_q, d_k, d_v, None if d_g is None else d_g[..., 0], d_beta, d_initial)
    return matrix_states.rounded(found, (q, k, v, g, beta, initial), grad)


gated_delta_rule = define("gated_delta_rule", INPUTS, OPTIONS, 2, _forward, _backward, matrix_states.fake, GRADIENTS)


def gated_delta_rule_inputs(
    prev: Tensor,
    end: Tensor,
    *,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (8, 12),
    dtype: torch.dtype = torch.float32,
    states: int = 0,
    final: Tensor | None = None,
    seed: int = 0,
) -> list[Tensor | None]:
    """Random positional inputs on the forest given by `prev` and `end`: decays in (0, 1), beta in (0, 1).

    Args:
        heads: heads of q and k, heads of v.
        dims: K and V.
        states: number of external states; 0: none given.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, (few, many), (rows, columns) = prev.shape[0], heads, dims
    shapes = [(1, tokens, few, rows), (1, tokens, few, rows), (1, tokens, many, columns), (1, tokens, many), (1, tokens, many)]
    # Made in float64 first, so that every dtype rounds the same values.
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [*shapes, (states, many, rows, columns)]]
    made[1] = matrix_states.l2norm(made[1])
    made[3], made[4] = -torch.nn.functional.softplus(made[3] - 1), made[4].sigmoid()
    leaves = [x.to(prev.device, dtype).requires_grad_() for x in made[:5]]
    initial = made[5].to(prev.device, accumulate_dtype(dtype)).requires_grad_() if states else None
    return [*leaves, prev, end, initial, final]
