"""transformers: the convolutions and recurrences of hybrid models, captured as one op each (see `ops/dense_scans.py`).

Every modelling module brings its own copy of these functions, which calls a kernel of `mamba_ssm`, `causal_conv1d` or `fla` if that package
is installed, and plain PyTorch if not. A name alone proves nothing: a function is substituted only if its PyTorch body, run once on a few
random tokens, gives what the op on physical tokens gives for one row (`scan_check`). A state to start from and borders of packed sequences
are refused.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from sp_compile.capture import versions
from sp_compile.capture.polyfills import Function, Parameters, bind, constant, refuse, substitute
from sp_compile.capture.scan_check import DECLINED, agrees
from sp_compile.ops.dense_scans import Given, register_library

_ACTIVATIONS: dict[str, Function] = {"gelu": F.gelu, "relu": F.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}
"""Activations after a convolution, by the names that transformers gives them."""

_BORDERS = ("seq_idx", "cu_seqlens", "cu_seqlens_cpu", "initial_state", "initial_states", "state_v_first")
"""Arguments that kernels honour and that change which token sees which."""


def _unsupported(bound: dict[str, Any], known: tuple[str, ...], heeded: tuple[str, ...]) -> str | None:
    """The first argument in force that the op on tokens would not honour. Written for Dynamo to trace."""
    for name, value in bound.items():
        if name not in known and value is not None and value is not False and (name in _BORDERS or name in heeded):
            return name
    return None


def _implementation(original: types.FunctionType) -> tuple[Function, bool]:
    """The function that a wrapper of transformers calls, and whether it is the library's PyTorch body."""
    body = inspect.unwrap(original)
    for cell, name in zip(original.__closure__ or (), original.__code__.co_freevars, strict=True):
        if name == "implementation":
            return cell.cell_contents, cell.cell_contents is body
    return body, True


def _key(original: types.FunctionType) -> str:
    return f"{original.__module__}.{original.__qualname__}"


class _Call:
    """What every polyfill here needs to know of its original: parameters, key, and whether kernels run behind it."""

    def __init__(self, original: types.FunctionType) -> None:
        parameters = Parameters(inspect.unwrap(original))
        implementation, self.plain = _implementation(original)
        self.names, self.defaults, self.key = parameters.names, parameters.defaults, _key(original)
        self.heeded = tuple(p for p in inspect.signature(implementation).parameters if not self.plain)


def _conv(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
    call, body = _Call(original), inspect.unwrap(original)
    names, defaults, heeded, key = call.names, call.defaults, call.heeded, call.key

    def dense(function: Function) -> Callable[[Given, bool], torch.Tensor]:
        return lambda g, final: function(g["x"], g["weight"], g["bias"], activation=g["activation"])

    if names[:4] != ("hidden_states", "weight", "bias", "activation") or not agrees("causal_conv1d", dense(body)):
        return None
    register_library(key, dense(raw))

    def causal_conv1d(*args: Any, **kwargs: Any) -> Any:
        bound = bind(names, defaults, {}, args, kwargs)
        if (name := _unsupported(bound, names, heeded)) is not None:
            return refuse(raw(*args, **kwargs), f"a causal convolution was given {name}, which sets borders inside of a row")
        x, weight, activation = bound["hidden_states"], bound["weight"], bound["activation"]
        inside = activation in ("silu", "swish")
        if not (activation is None or inside or activation in _ACTIVATIONS):
            return refuse(raw(*args, **kwargs), f"a causal convolution with the activation {activation}, which sharing does not know")
        out = torch.ops.sp_compile.dense_causal_conv1d(
            x, weight, bound["bias"], activation="silu" if inside else None, dtype=x.dtype, library=key
        )
        return out if activation is None or inside else _ACTIVATIONS[activation](out)

    return causal_conv1d


def _ssd(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
    call, body = _Call(original), inspect.unwrap(original)
    names, defaults, heeded, key, plain = call.names, call.defaults, call.heeded, call.key, call.plain
    known = ("hidden_states", "x", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "dt_softplus", "dt_limit", "return_final_states")

    def dense(function: Function) -> Callable[[Given, bool], torch.Tensor]:
        def run(g: Given, final: bool) -> torch.Tensor:
            found = function(
                g["x"], g["dt"], g["A"], g["B"], g["C"], chunk_size=g["chunk"], D=g["D"], dt_bias=g["dt_bias"],
                dt_softplus=g["dt_softplus"], dt_limit=(g["dt_min"], g["dt_max"]), return_final_states=final,
            )  # fmt: skip
            return found[1] if final else found  # type: ignore[no-any-return]

        return run

    if names[1:6] != ("dt", "A", "B", "C", "chunk_size") or not agrees("ssd_scan", dense(body)):
        return None
    register_library(key, dense(raw))

    def chunk_scan(*args: Any, **kwargs: Any) -> Any:
        bound = bind(names, defaults, {}, args, kwargs)
        if (name := _unsupported(bound, known, heeded)) is not None:
            return refuse(raw(*args, **kwargs), f"a state space scan was given {name}, which sharing does not know")
        x, limits = bound[names[0]], bound["dt_limit"]
        tensors = (x, bound["dt"], bound["A"], bound["B"], bound["C"], bound["D"], bound["dt_bias"])
        options = {
            "dt_softplus": bool(bound["dt_softplus"]), "dt_min": float(constant(limits[0])), "dt_max": float(constant(limits[1])),
            "chunk": constant(bound["chunk_size"]), "library": key,
        }  # fmt: skip
        out = torch.ops.sp_compile.dense_ssd_scan(*tensors, **options, dtype=torch.float32 if plain else x.dtype)
        if not bound["return_final_states"]:
            return out
        return out, torch.ops.sp_compile.dense_ssd_scan_state(*tensors, **options, dtype=torch.float32)

    return chunk_scan


def _selective(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
    call, body = _Call(original), inspect.unwrap(original)
    names, defaults, heeded, key, plain = call.names, call.defaults, call.heeded, call.key, call.plain
    known: tuple[str, ...] = ("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state")
    known = (*known, "use_mambapy", "use_associative_scan")

    def dense(function: Function) -> Callable[[Given, bool], torch.Tensor]:
        def run(g: Given, final: bool) -> torch.Tensor:
            found = function(
                g["u"].transpose(1, 2), g["delta"].transpose(1, 2), g["A"], g["B"].squeeze(2).transpose(1, 2),
                g["C"].squeeze(2).transpose(1, 2), g["D"], None, delta_bias=g["delta_bias"], delta_softplus=g["delta_softplus"],
                return_last_state=final,
            )  # fmt: skip
            return found[1] if final else found.transpose(1, 2)  # type: ignore[no-any-return]

        return run

    if names[:7] != ("hidden_states", "dt", "A", "B", "C", "D", "z") or not agrees("selective_scan", dense(body)):
        return None
    register_library(key, dense(raw))

    def selective_scan(*args: Any, **kwargs: Any) -> Any:
        bound = bind(names, defaults, {}, args, kwargs)
        if (name := _unsupported(bound, known, heeded)) is not None:
            return refuse(raw(*args, **kwargs), f"a selective scan was given {name}, which sharing does not know")
        u, state_in, state_out, skip = bound["hidden_states"], bound["B"], bound["C"], bound["D"]
        if state_in.dim() != 3 or state_out.dim() != 3:
            return refuse(raw(*args, **kwargs), "a selective scan with B or C that is not [batch, state, tokens]")
        tensors = (
            u.transpose(1, 2), bound["dt"].transpose(1, 2), bound["A"], state_in.transpose(1, 2).unsqueeze(2),
            state_out.transpose(1, 2).unsqueeze(2), skip, bound["delta_bias"],
        )  # fmt: skip
        options = {"delta_softplus": bool(bound["delta_softplus"]), "chunk": 64, "library": key}
        dtype = torch.promote_types(u.dtype, skip.dtype) if plain and skip is not None else u.dtype
        out = torch.ops.sp_compile.dense_selective_scan(*tensors, **options, dtype=dtype).transpose(1, 2)
        if bound["z"] is not None:
            out = out * F.silu(bound["z"])
        if not bound["return_last_state"]:
            return out
        return out, torch.ops.sp_compile.dense_selective_scan_state(*tensors, **options, dtype=torch.float32)

    return selective_scan


def _delta(kind: str) -> Callable[[types.FunctionType, types.FunctionType], Function | None]:
    """Builder for the chunked delta rules: `gated_delta_rule` with one decay a head, `kda` with one a channel."""

    def build(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
        call, body = _Call(original), inspect.unwrap(original)
        names, defaults, heeded, key = call.names, call.defaults, call.heeded, call.key
        known = ("query", "key", "value", "g", "beta", "chunk_size", "output_final_state", "use_qk_l2norm_in_kernel")
        op, state_op = (getattr(torch.ops.sp_compile, f"dense_{kind}{end}") for end in ("", "_state"))

        def dense(function: Function) -> Callable[[Given, bool], torch.Tensor]:
            def run(g: Given, final: bool) -> torch.Tensor:
                found = function(
                    g["q"], g["k"], g["v"], g=g["g"], beta=g["beta"], chunk_size=g["chunk"], output_final_state=final,
                    use_qk_l2norm_in_kernel=g["qk_l2norm"], initial_state=None,
                )  # fmt: skip
                return found[1] if final else found[0]  # type: ignore[no-any-return]

            return run

        if names[:5] != ("query", "key", "value", "g", "beta") or not agrees(kind, dense(body)):
            return None
        register_library(key, dense(raw))

        def delta_rule(*args: Any, **kwargs: Any) -> Any:
            bound = bind(names, defaults, {}, args, kwargs)
            if (name := _unsupported(bound, known, heeded)) is not None:
                return refuse(raw(*args, **kwargs), f"a gated delta rule was given {name}, which sharing does not know")
            q, v = bound["query"], bound["value"]
            tensors = (q, bound["key"], v, bound["g"], bound["beta"])
            options = {
                "scale": constant(q.shape[-1]) ** -0.5, "qk_l2norm": bool(bound["use_qk_l2norm_in_kernel"]),
                "chunk": constant(bound["chunk_size"]), "library": key,
            }  # fmt: skip
            out = op(*tensors, **options, dtype=q.dtype)
            return out, state_op(*tensors, **options, dtype=torch.float32) if bound["output_final_state"] else None

        return delta_rule

    return build


def _nothing(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
    """A fused convolution and scan whose PyTorch body answers None, so that its caller runs the two one by one.

    With a kernel behind it, that path is another function (it masks padding once more, may norm elsewhere): the call stays as it is, and
    Dynamo finds the kernel (`kernel_scans`).
    """
    if not _implementation(original)[1]:
        return raw
    body = inspect.unwrap(original)
    if body.__code__.co_names or body.__code__.co_freevars or set(body.__code__.co_consts) - {None, body.__doc__}:
        return None

    def unfused(*args: Any, **kwargs: Any) -> Any:
        return None

    return unfused


_BUILDERS: dict[str, Callable[[types.FunctionType, types.FunctionType], Function | None]] = {
    "causal_conv1d_fn": _conv,
    "mamba2_chunk_scan": _ssd,
    "mamba_selective_scan": _selective,
    "torch_chunk_gated_delta_rule": _delta("gated_delta_rule"),
    "chunk_kimi_delta_attention": _delta("kda"),
    "mamba2_split_conv1d_scan_combined": _nothing,
    "mamba_inner_fn": _nothing,
}


def scan() -> None:
    """Substitutes the recurrences of every modelling module imported so far."""
    if not versions.is_tested("transformers"):
        return
    for loaded, module in tuple(sys.modules.items()):
        if not loaded.startswith(("transformers.models.", "transformers_modules.")):
            continue
        names = getattr(module, "__dict__", None)
        for name, build in _BUILDERS.items() if isinstance(names, dict) else ():
            substitute(names.get(name), build, DECLINED)  # type: ignore[union-attr]
