"""mamba_ssm, causal_conv1d and fla: their public functions, for models that call them directly.

The same ops as for transformers' copies (`hf_scans`). These functions run on a GPU only, so nothing is tried: a function is known by its
package, its name and its leading parameters. A gate inside of a function becomes ops on tokens; a state to start from and borders of
packed sequences are refused, as is any argument in force that is not listed here.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from sp_compile.capture.polyfills import Function, Parameters, bind, constant, refuse, substitute
from sp_compile.ops.dense_scans import Given, register_library

Builder = Callable[[types.FunctionType, types.FunctionType], "Function | None"]


def _unknown(bound: dict[str, Any], known: tuple[str, ...], defaults: dict[str, Any]) -> str | None:
    """The first argument in force that is not known. Written for Dynamo to trace."""
    for name, value in bound.items():
        if name in known or value is None or value is False or (name in defaults and defaults[name] is value):
            continue
        return name
    return None


def _gated(out: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """`out * silu(gate)` in float32, as the kernels form it, or in float64."""
    if gate is None:
        return out
    dtype = torch.promote_types(out.dtype, torch.float32)
    return (out.to(dtype) * F.silu(gate.to(dtype))).to(out.dtype)


def _conv(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
    parameters = Parameters(original)
    names, defaults, key = parameters.names, parameters.defaults, _key(original)
    if names[:2] != ("x", "weight") or not {"bias", "activation"} <= set(names):
        return None
    register_library(key, lambda g, final: raw(x=g["x"], weight=g["weight"], bias=g["bias"], activation=g["activation"]))

    def causal_conv1d(*args: Any, **kwargs: Any) -> Any:
        bound = bind(names, defaults, {}, args, kwargs)
        activation = bound["activation"]
        if (name := _unknown(bound, ("x", "weight", "bias", "activation"), defaults)) is not None:
            return refuse(raw(*args, **kwargs), f"causal_conv1d_fn was given {name}, which sharing does not know")
        if activation not in (None, "silu", "swish"):
            return refuse(raw(*args, **kwargs), f"causal_conv1d_fn with the activation {activation}, which sharing does not know")
        x = bound["x"]
        return torch.ops.sp_compile.dense_causal_conv1d(
            x, bound["weight"], bound["bias"], activation="silu" if activation else None, dtype=x.dtype, library=key
        )

    return causal_conv1d


def _ssd(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
    parameters = Parameters(original)
    names, defaults, key = parameters.names, parameters.defaults, _key(original)
    known = ("x", "dt", "A", "B", "C", "chunk_size", "D", "z", "dt_bias", "dt_softplus", "dt_limit", "return_final_states")
    if names[:6] != known[:6]:
        return None

    def dense(g: Given, final: bool) -> torch.Tensor:
        found = raw(
            g["x"], g["dt"], g["A"], g["B"], g["C"], g["chunk"], D=g["D"], dt_bias=g["dt_bias"], dt_softplus=g["dt_softplus"],
            dt_limit=(g["dt_min"], g["dt_max"]), return_final_states=final,
        )  # fmt: skip
        return found[1] if final else found  # type: ignore[no-any-return]

    register_library(key, dense)

    def chunk_scan(*args: Any, **kwargs: Any) -> Any:
        bound = bind(names, defaults, {}, args, kwargs)
        if (name := _unknown(bound, known, defaults)) is not None:
            return refuse(raw(*args, **kwargs), f"mamba_chunk_scan_combined was given {name}, which sharing does not know")
        x, limits = bound["x"], bound["dt_limit"]
        tensors = (x, bound["dt"], bound["A"], bound["B"], bound["C"], bound["D"], bound["dt_bias"])
        options = {
            "dt_softplus": bool(bound["dt_softplus"]), "dt_min": float(constant(limits[0])), "dt_max": float(constant(limits[1])),
            "chunk": constant(bound["chunk_size"]), "library": key,
        }  # fmt: skip
        out = _gated(torch.ops.sp_compile.dense_ssd_scan(*tensors, **options, dtype=x.dtype), bound["z"])
        if not bound["return_final_states"]:
            return out
        return out, torch.ops.sp_compile.dense_ssd_scan_state(*tensors, **options, dtype=torch.float32)

    return chunk_scan


def _selective(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
    parameters = Parameters(original)
    names, defaults, key = parameters.names, parameters.defaults, _key(original)
    known = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state")
    if names[:5] != known[:5]:
        return None

    def dense(g: Given, final: bool) -> torch.Tensor:
        found = raw(
            g["u"].transpose(1, 2), g["delta"].transpose(1, 2), g["A"], g["B"].permute(0, 2, 3, 1), g["C"].permute(0, 2, 3, 1), g["D"],
            delta_bias=g["delta_bias"], delta_softplus=g["delta_softplus"], return_last_state=final,
        )  # fmt: skip
        return found[1] if final else found.transpose(1, 2)  # type: ignore[no-any-return]

    register_library(key, dense)

    def selective_scan(*args: Any, **kwargs: Any) -> Any:
        bound = bind(names, defaults, {}, args, kwargs)
        if (name := _unknown(bound, known, defaults)) is not None:
            return refuse(raw(*args, **kwargs), f"selective_scan_fn was given {name}, which sharing does not know")
        u, state_in, state_out = bound["u"], bound["B"], bound["C"]
        if state_in.dim() < 3 or state_out.dim() < 3 or bound["A"].is_complex():
            return refuse(raw(*args, **kwargs), "selective_scan_fn with complex A, or B or C that are the same for all tokens")
        state_in, state_out = ((s.unsqueeze(1) if s.dim() == 3 else s).permute(0, 3, 1, 2) for s in (state_in, state_out))
        tensors = (u.transpose(1, 2), bound["delta"].transpose(1, 2), bound["A"], state_in, state_out, bound["D"], bound["delta_bias"])
        options = {"delta_softplus": bool(bound["delta_softplus"]), "chunk": 64, "library": key}
        out = _gated(torch.ops.sp_compile.dense_selective_scan(*tensors, **options, dtype=u.dtype).transpose(1, 2), bound["z"])
        if not bound["return_last_state"]:
            return out
        return out, torch.ops.sp_compile.dense_selective_scan_state(*tensors, **options, dtype=torch.float32)

    return selective_scan


def _delta(kind: str) -> Builder:
    def build(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
        parameters = Parameters(original)
        names, defaults, key = parameters.names, parameters.defaults, _key(original)
        known = ("q", "k", "v", "g", "beta", "scale", "output_final_state", "use_qk_l2norm_in_kernel")
        if names[:5] != known[:5] or "scale" not in names:
            return None
        op, state_op = (getattr(torch.ops.sp_compile, f"dense_{kind}{end}") for end in ("", "_state"))

        def dense(g: Given, final: bool) -> torch.Tensor:
            found = raw(
                q=g["q"], k=g["k"], v=g["v"], g=g["g"], beta=g["beta"], scale=g["scale"], output_final_state=final,
                use_qk_l2norm_in_kernel=g["qk_l2norm"],
            )  # fmt: skip
            return found[1] if final else found[0]  # type: ignore[no-any-return]

        register_library(key, dense)

        def delta_rule(*args: Any, **kwargs: Any) -> Any:
            bound = bind(names, defaults, {}, args, kwargs)
            if (name := _unknown(bound, known, defaults)) is not None or bound["g"] is None or bound["beta"] is None:
                return refuse(raw(*args, **kwargs), f"a delta rule was given {name or 'no gate or no beta'}, which sharing does not know")
            q, v, scale = bound["q"], bound["v"], constant(bound["scale"])
            tensors = (q, bound["k"], v, bound["g"], bound["beta"])
            options = {
                "scale": constant(q.shape[-1]) ** -0.5 if scale is None else scale, "qk_l2norm": bool(bound["use_qk_l2norm_in_kernel"]),
                "chunk": 64, "library": key,
            }  # fmt: skip
            out = op(*tensors, **options, dtype=v.dtype)
            return out, state_op(*tensors, **options, dtype=torch.float32) if bound["output_final_state"] else None

        return delta_rule

    return build


def _key(original: types.FunctionType) -> str:
    return f"{original.__module__}.{original.__qualname__}"


FUNCTIONS: tuple[tuple[str, str, Builder], ...] = (
    ("causal_conv1d", "causal_conv1d_fn", _conv),
    ("causal_conv1d.causal_conv1d_interface", "causal_conv1d_fn", _conv),
    ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", _ssd),
    ("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", _selective),
    ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", _delta("gated_delta_rule")),
    ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule", _delta("gated_delta_rule")),
    ("fla.ops.kda", "chunk_kda", _delta("kda")),
    ("fla.ops.kda", "fused_recurrent_kda", _delta("kda")),
)
"""Module, name and builder of every function that is substituted."""


def scan() -> None:
    """Substitutes the functions of every package imported so far."""
    for module, name, build in FUNCTIONS:
        substitute(getattr(sys.modules.get(module), name, None), build)
