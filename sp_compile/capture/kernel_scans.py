"""mamba_ssm, causal_conv1d and fla: their public functions, for models that call them directly.

The same ops as for transformers' copies (`hf_scans`). These functions run on a GPU only, so nothing is tried: a function is known by its
package, its name and its leading parameters. A gate inside of a function becomes ops on tokens; a state to start from and borders of
packed sequences are refused, as is any argument in force that is not listed here.

A function that fuses a whole layer is written with the package's separate functions and torch ops. So a graph that is not shared runs the
same kernels one by one, which rounds in a few more places and keeps what lies between them for backward.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
import torch.nn.functional as F

from sp_compile.capture import fla_scans
from sp_compile.capture.kernel_calls import Builder, gated, key_of, refused, unknown
from sp_compile.capture.polyfills import Function, Parameters, bind, constant, is_substituted, substitute
from sp_compile.ops.dense_scans import Given, register_library

_DECLINED = "is of a version that sharing does not know: it runs on rows, where nothing of it is shared"

_SPLIT = (
    "zxbcdt", "conv1d_weight", "conv1d_bias", "dt_bias", "A", "D", "chunk_size", "dt_limit", "return_final_states", "activation",
    "rmsnorm_weight", "rmsnorm_eps", "outproj_weight", "outproj_bias", "headdim", "ngroups", "norm_before_gate",
)  # fmt: skip
_INNER = (
    "xz", "conv1d_weight", "conv1d_bias", "x_proj_weight", "delta_proj_weight", "out_proj_weight", "out_proj_bias", "A", "D", "delta_bias",
    "B_proj_bias", "C_proj_bias", "delta_softplus", "checkpoint_lvl",
)  # fmt: skip


def _conv(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
    parameters = Parameters(original)
    names, defaults, key = parameters.names, parameters.defaults, key_of(original)
    if names[:2] != ("x", "weight") or not {"bias", "activation"} <= set(names):
        return None

    def dense(g: Given, final: bool) -> torch.Tensor:
        x = g["x"]
        if x.stride(1) == 1 and (x.stride(0) % 8 or x.stride(2) % 8 or x.shape[1] % 8):
            x = x.contiguous()  # kernels for channels last take steps of eight only
        return raw(x=x, weight=g["weight"], bias=g["bias"], activation=g["activation"])  # type: ignore[no-any-return]

    register_library(key, dense)

    def causal_conv1d(*args: Any, **kwargs: Any) -> Any:
        bound = bind(names, defaults, {}, args, kwargs)
        activation = bound["activation"]
        if (name := unknown(bound, ("x", "weight", "bias", "activation"), defaults)) is not None:
            return refused(raw, args, kwargs, f"causal_conv1d_fn was given {name}, which sharing does not know")
        if activation not in (None, "silu", "swish"):
            return refused(raw, args, kwargs, f"causal_conv1d_fn with the activation {activation}, which sharing does not know")
        x = bound["x"]
        return torch.ops.sp_compile.dense_causal_conv1d(
            x, bound["weight"], bound["bias"], activation="silu" if activation else None, dtype=x.dtype, library=key
        )

    return causal_conv1d


def _ssd(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
    parameters = Parameters(original)
    names, defaults, key = parameters.names, parameters.defaults, key_of(original)
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
        if (name := unknown(bound, known, defaults)) is not None:
            return refused(raw, args, kwargs, f"mamba_chunk_scan_combined was given {name}, which sharing does not know")
        x, limits = bound["x"], bound["dt_limit"]
        tensors = (x, bound["dt"], bound["A"], bound["B"], bound["C"], bound["D"], bound["dt_bias"])
        options = {
            "dt_softplus": bool(bound["dt_softplus"]), "dt_min": float(constant(limits[0])), "dt_max": float(constant(limits[1])),
            "chunk": constant(bound["chunk_size"]), "library": key,
        }  # fmt: skip
        out = gated(torch.ops.sp_compile.dense_ssd_scan(*tensors, **options, dtype=x.dtype), bound["z"])
        if not bound["return_final_states"]:
            return out
        return out, torch.ops.sp_compile.dense_ssd_scan_state(*tensors, **options, dtype=torch.float32)

    return chunk_scan


def _selective(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
    parameters = Parameters(original)
    names, defaults, key = parameters.names, parameters.defaults, key_of(original)
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
        if (name := unknown(bound, known, defaults)) is not None:
            return refused(raw, args, kwargs, f"selective_scan_fn was given {name}, which sharing does not know")
        u, state_in, state_out = bound["u"], bound["B"], bound["C"]
        if state_in.dim() < 3 or state_out.dim() < 3 or bound["A"].is_complex():
            return refused(raw, args, kwargs, "selective_scan_fn with complex A, or B or C that are the same for all tokens")
        state_in, state_out = ((s.unsqueeze(1) if s.dim() == 3 else s).permute(0, 3, 1, 2) for s in (state_in, state_out))
        tensors = (u.transpose(1, 2), bound["delta"].transpose(1, 2), bound["A"], state_in, state_out, bound["D"], bound["delta_bias"])
        options = {"delta_softplus": bool(bound["delta_softplus"]), "chunk": 64, "library": key}
        out = gated(torch.ops.sp_compile.dense_selective_scan(*tensors, **options, dtype=u.dtype).transpose(1, 2), bound["z"])
        if not bound["return_last_state"]:
            return out
        # The package's backward gives the last state no gradient.
        return out, torch.ops.sp_compile.dense_selective_scan_state(*tensors, **options, dtype=torch.float32).detach()

    return selective_scan


def _member(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _gated_norm(
    out: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, groups: int, norm_before_gate: bool
) -> torch.Tensor:
    """RMSNorm over each of `groups` equal parts of the last dim, times `silu(gate)` behind it or in front; in float32, or in float64."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    x, gate = out.to(dtype), F.silu(gate.to(dtype))
    parts = (x if norm_before_gate else x * gate).unflatten(-1, (groups, -1))
    normed: torch.Tensor = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight.to(dtype)
    normed = normed * gate if norm_before_gate else normed
    return normed.to(out.dtype)


def _split(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
    """Mamba-2 between its input projection and its output projection, that included; beside it perhaps a gated MLP's middle."""
    parameters = Parameters(original)
    names, defaults = parameters.names, parameters.defaults
    conv, scan = _member("causal_conv1d", "causal_conv1d_fn"), _member("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    if names[:7] != _SPLIT[:7] or not set(_SPLIT) <= set(names) or not is_substituted(conv) or not is_substituted(scan):
        return None

    def split_scan(*args: Any, **kwargs: Any) -> Any:
        bound = bind(names, defaults, {}, args, kwargs)
        if (name := unknown(bound, _SPLIT, defaults)) is not None:
            return refused(raw, args, kwargs, f"mamba_split_conv1d_scan_combined was given {name}, which sharing does not know")
        D, norm, weight, bias = bound["D"], bound["rmsnorm_weight"], bound["outproj_weight"], bound["outproj_bias"]
        lacks = (
            "dt_bias" if bound["dt_bias"] is None
            else "headdim, which D of one number per head does not tell" if D.dim() == 1 and bound["headdim"] is None
            else "outproj_weight, beside an outproj_bias" if weight is None and bias is not None
            else None
        )  # fmt: skip
        if lacks is not None:
            return refused(raw, args, kwargs, f"mamba_split_conv1d_scan_combined was given no {lacks}")
        heads, groups = constant(D.shape[0]), constant(bound["ngroups"])
        size = constant(D.shape[1]) if D.dim() == 2 else constant(bound["headdim"])
        dim = heads * size
        state = (constant(bound["conv1d_weight"].shape[0]) - dim) // groups // 2
        widths = [dim, dim + 2 * groups * state, heads]
        beside = (constant(bound["zxbcdt"].shape[-1]) - sum(widths)) // 2
        *other, z, xBC, dt = bound["zxbcdt"].split([beside, beside, *widths] if beside else widths, dim=-1)
        xBC = conv(xBC.transpose(1, 2), bound["conv1d_weight"], bound["conv1d_bias"], activation=bound["activation"]).transpose(1, 2)
        x, B, C = xBC.split([dim, groups * state, groups * state], dim=-1)
        found = scan(
            x.unflatten(-1, (heads, size)), dt, bound["A"], B.unflatten(-1, (groups, state)), C.unflatten(-1, (groups, state)),
            bound["chunk_size"], D=D, z=z.unflatten(-1, (heads, size)) if norm is None else None, dt_bias=bound["dt_bias"],
            dt_softplus=True, dt_limit=bound["dt_limit"], return_final_states=bound["return_final_states"],
        )  # fmt: skip
        out = (found[0] if bound["return_final_states"] else found).flatten(2)
        if norm is not None:
            out = _gated_norm(out, z, norm, constant(bound["rmsnorm_eps"]), groups, bound["norm_before_gate"])
        if beside:
            out = torch.cat([gated(other[1], other[0]), out], dim=-1)
        if weight is not None:
            out = F.linear(out, weight, bias)
        return (out, found[1]) if bound["return_final_states"] else out

    return split_scan


def _inner(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
    """Mamba-1 between its input projection and its output projection, that included.

    Norms of B, C and dt are refused, since the package's backward leaves them out.
    """
    parameters = Parameters(original)
    names, defaults = parameters.names, parameters.defaults
    conv = _member("causal_conv1d", "causal_conv1d_fn")
    scan = _member("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn")
    if names[:8] != _INNER[:8] or not set(_INNER) <= set(names) or not is_substituted(conv) or not is_substituted(scan):
        return None

    def inner(*args: Any, **kwargs: Any) -> Any:
        bound = bind(names, defaults, {}, args, kwargs)
        if (name := unknown(bound, _INNER, defaults)) is not None:
            return refused(raw, args, kwargs, f"mamba_inner_fn was given {name}, which sharing does not know")
        if bound["A"].is_complex():
            return refused(raw, args, kwargs, "mamba_inner_fn with complex A")
        x, z = bound["xz"].chunk(2, dim=1)
        x = conv(x, bound["conv1d_weight"].squeeze(1), bound["conv1d_bias"], activation="silu")
        made = F.linear(x.transpose(1, 2), bound["x_proj_weight"])
        rank, state = constant(bound["delta_proj_weight"].shape[1]), constant(bound["A"].shape[1])
        B, C = made[..., rank : rank + state], made[..., -state:]
        B = B if bound["B_proj_bias"] is None else B + bound["B_proj_bias"].to(B.dtype)
        C = C if bound["C_proj_bias"] is None else C + bound["C_proj_bias"].to(C.dtype)
        out = scan(
            x, F.linear(made[..., :rank], bound["delta_proj_weight"]).transpose(1, 2), bound["A"], B.transpose(1, 2), C.transpose(1, 2),
            bound["D"], z=z, delta_bias=bound["delta_bias"], delta_softplus=bound["delta_softplus"],
        )  # fmt: skip
        return F.linear(out.transpose(1, 2), bound["out_proj_weight"], bound["out_proj_bias"])

    return inner


FUNCTIONS: tuple[tuple[str, str, Builder], ...] = (
    ("causal_conv1d", "causal_conv1d_fn", _conv),
    ("causal_conv1d.causal_conv1d_interface", "causal_conv1d_fn", _conv),
    ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", _ssd),
    ("mamba_ssm.ops.triton.ssd_combined", "mamba_split_conv1d_scan_combined", _split),  # behind the functions it is written with
    ("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", _selective),
    ("mamba_ssm.ops.selective_scan_interface", "mamba_inner_fn", _inner),
    *fla_scans.FUNCTIONS,
)
"""Module, name and builder of every function that is substituted."""


def scan() -> None:
    """Substitutes the functions of every package imported so far."""
    for module, name, build in FUNCTIONS:
        substitute(_member(module, name), build, _DECLINED)
