"""`sp_compile::kda_chunked`: the op of the same name over a plan of chunks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sp_compile.kernels.delta_rule.chunked import Rule
from sp_compile.ops import kda, matrix_states
from sp_compile.ops.recurrent import Values, define

INPUTS = f"{kda.INPUTS}, Tensor chunks"


def _rule(inputs: tuple[Any, ...], options: dict[str, Any]) -> Rule:
    q, k, v, g, beta, _, _, initial, final, chunks = inputs
    return Rule(q[0], k[0], v[0], g[0], beta[0], initial, final, chunks, options["scale"], options["qk_l2norm"])


def _forward(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
    kda.check_inputs(*inputs[:9], chunk=options.get("chunk", 64))
    out, states = _rule(inputs, options).forward()
    return out[None], states


def _backward(grads: Values, inputs: tuple[Any, ...], options: dict[str, Any]) -> Values:
    d_q, d_k, d_v, d_g, d_beta, d_initial = _rule(inputs, options).backward(grads[0][0], grads[1])
    found = (d_q[None], d_k[None], d_v[None], d_g[None], d_beta[None], d_initial)
    return matrix_states.rounded(found, (*inputs[:5], inputs[7]), grads[0])


kda_chunked = define(
    "kda_chunked",
    INPUTS,
    kda.OPTIONS,
    2,
    _forward,
    _backward,
    matrix_states.fake,
    kda.GRADIENTS,
)
