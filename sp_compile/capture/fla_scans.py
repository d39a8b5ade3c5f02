"""flash-linear-attention: its public functions, for models that call them directly. See `kernel_scans`.

A gate, a sigmoid or a norm inside of a function becomes ops on tokens, a state in the layout [V, K] a transposed one. Functions that only
choose the decays of another one (lightning attention, retention) are traced.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
import torch.nn.functional as F

from sp_compile.capture.kernel_calls import Builder, key_of, refused, unknown
from sp_compile.capture.polyfills import Function, Parameters, bind, clone, constant
from sp_compile.ops.dense_scans import Given, register_library

_DELTA = (
    "q", "k", "v", "g", "beta", "scale", "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "A_log", "dt_bias",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first",
)  # fmt: skip
_SIMPLE = ("q", "k", "v", "g", "g_gamma", "scale", "output_final_state", "state_v_first")


def _decay(bound: dict[str, Any], per_row: bool) -> torch.Tensor:
    """Log decays: `g`, or `-exp(A_log) softplus(g + dt_bias)`, formed in float32 as the kernels do, or in float64.

    Args:
        per_row: one decay per row of the state, g [B, T, H, K] with dt_bias [H * K]; else g [B, T, H] with dt_bias [H].
    """
    g: torch.Tensor = bound["g"]
    if not bound.get("use_gate_in_kernel"):
        return g
    dtype, rate, bias = torch.promote_types(g.dtype, torch.float32), bound["A_log"], bound.get("dt_bias")
    g, rate = g.to(dtype), rate.to(dtype).exp()
    if bias is not None:
        g = g + (bias.view(g.shape[-2:]) if per_row else bias).to(dtype)
    decay: torch.Tensor = -(rate.view(-1, 1) if per_row else rate) * F.softplus(g)
    return decay


def _strength(bound: dict[str, Any]) -> torch.Tensor:
    """beta, or `sigmoid(beta)`, doubled if asked, in the same way."""
    beta: torch.Tensor = bound["beta"]
    if not bound.get("use_beta_sigmoid_in_kernel"):
        return beta
    beta = beta.to(torch.promote_types(beta.dtype, torch.float32)).sigmoid()
    return 2 * beta if bound.get("allow_neg_eigval") else beta


def _delta_trouble(bound: dict[str, Any], defaults: dict[str, Any]) -> str | None:
    """What a delta rule was given that is not known, or was not given. Written for Dynamo to trace."""
    if (name := unknown(bound, _DELTA, defaults)) is not None:
        return name
    if bound["g"] is None or bound["beta"] is None:
        return "no gate or no beta"
    if bound.get("use_gate_in_kernel") and bound.get("A_log") is None:
        return "a gate to form without A_log"
    return "allow_neg_eigval" if bound.get("allow_neg_eigval") and not bound.get("use_beta_sigmoid_in_kernel") else None


def delta_rule(kind: str, like: str) -> Builder:
    """Builder for `gated_delta_rule`, with one decay a head, and `kda`, with one a row of the state.

    Args:
        like: the tensor whose dtype the outputs have.
    """

    def build(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
        parameters = Parameters(original)
        names, defaults, key, called = parameters.names, parameters.defaults, key_of(original), original.__name__
        if names[:4] != _DELTA[:4] or not {*_DELTA[4:8]} <= set(names):
            return None
        op, state_op = (getattr(torch.ops.sp_compile, f"dense_{kind}{end}") for end in ("", "_state"))

        def dense(g: Given, final: bool) -> torch.Tensor:
            found = raw(
                q=g["q"], k=g["k"], v=g["v"], g=g["g"], beta=g["beta"], scale=g["scale"], output_final_state=final,
                use_qk_l2norm_in_kernel=g["qk_l2norm"],
            )  # fmt: skip
            return found[1] if final else found[0]  # type: ignore[no-any-return]

        register_library(key, dense)

        def rule(*args: Any, **kwargs: Any) -> Any:
            bound = bind(names, defaults, {}, args, kwargs)
            if (name := _delta_trouble(bound, defaults)) is not None:
                return refused(raw, args, kwargs, f"{called} was given {name}, which sharing does not know")
            tensors = (bound["q"], bound["k"], bound["v"], _decay(bound, kind == "kda"), _strength(bound))
            options = {
                "scale": _scale(bound), "qk_l2norm": bool(bound["use_qk_l2norm_in_kernel"]), "chunk": 64, "library": key,
            }  # fmt: skip
            return op(*tensors, **options, dtype=bound[like].dtype), _state(state_op, tensors, options, bound)

        return rule

    return build


def simple_gla(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
    """Linear attention with one log decay a head: `g` per token, or `g_gamma`, to which the library gives no gradient."""
    parameters = Parameters(original)
    names, defaults, key, called = parameters.names, parameters.defaults, key_of(original), original.__name__
    if names[:4] != _SIMPLE[:4] or not {*_SIMPLE[4:7]} <= set(names):
        return None

    def dense(g: Given, final: bool) -> torch.Tensor:
        found = raw(q=g["q"], k=g["k"], v=g["v"], g=g["g"], g_gamma=g["decay"], scale=g["scale"], output_final_state=final)
        return found[1] if final else found[0]  # type: ignore[no-any-return]

    register_library(key, dense)

    def attention(*args: Any, **kwargs: Any) -> Any:
        bound = bind(names, defaults, {}, args, kwargs)
        name, q, gate, decay = unknown(bound, _SIMPLE, defaults), bound["q"], bound["g"], bound["g_gamma"]
        if name is not None or (gate is not None and decay is not None):
            return refused(raw, args, kwargs, f"{called} was given {name or 'both gates'}, which sharing does not know")
        tensors = (q, bound["k"], bound["v"], gate, None if decay is None else decay.detach())
        options = {"scale": _scale(bound), "chunk": 64, "library": key}
        out = torch.ops.sp_compile.dense_linear_attention(*tensors, **options, dtype=q.dtype)
        return out, _state(torch.ops.sp_compile.dense_linear_attention_state, tensors, options, bound)

    return attention


def _scale(bound: dict[str, Any]) -> Any:
    scale = constant(bound["scale"])
    return constant(bound["k"].shape[-1]) ** -0.5 if scale is None else scale


def _state(op: Any, tensors: tuple[Any, ...], options: dict[str, Any], bound: dict[str, Any]) -> torch.Tensor | None:
    """The final state, [B, H, K, V] or as asked [B, H, V, K], or None."""
    if not bound["output_final_state"]:
        return None
    state: torch.Tensor = op(*tensors, **options, dtype=torch.float32)
    return state.transpose(-1, -2) if bound.get("state_v_first") else state


def traced(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
    """A function that chooses decays and calls another one of this file: its body, below decorators that keep Dynamo out."""
    body = inspect.unwrap(original)
    return clone(body) if isinstance(body, types.FunctionType) else None


FUNCTIONS: tuple[tuple[str, str, Builder], ...] = (
    ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", delta_rule("gated_delta_rule", "q")),
    ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule", delta_rule("gated_delta_rule", "v")),
    ("fla.ops.kda", "chunk_kda", delta_rule("kda", "q")),
    ("fla.ops.kda", "fused_recurrent_kda", delta_rule("kda", "v")),
    ("fla.ops.simple_gla", "chunk_simple_gla", simple_gla),
    ("fla.ops.simple_gla", "fused_recurrent_simple_gla", simple_gla),
    ("fla.ops.lightning_attn", "chunk_lightning_attn", traced),
    ("fla.ops.lightning_attn", "fused_recurrent_lightning_attn", traced),
    ("fla.ops.retention", "chunk_retention", traced),
)
"""Module, name and builder of every function that is substituted."""
