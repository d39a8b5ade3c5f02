"""mamba_ssm, causal_conv1d and fla, as stand-ins with the packages' parameters: models that call them directly share."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile
from sp_compile.backend import shared_prefix
from sp_compile.capture.polyfills import is_substituted, rescan
from tests.capture.recording import GRAPHS, OTHERS, capture, reasons, recording, sites, stranger
from tests.passes.harness import batch, compare

INF = float("inf")


def _module(name: str, **members: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(members)
    return made


# -- causal_conv1d and mamba_ssm --------------------------------------------------------------------------------------------------------


def _conv(x, weight, bias, activation):
    out = F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=x.shape[1])[..., : x.shape[-1]]
    return out if activation is None else F.silu(out)


def _ssd(x, dt, A, B, C, D, dt_bias, dt_softplus, dt_limit, initial):
    rate = dt if dt_bias is None else dt + dt_bias
    rate = (F.softplus(rate) if dt_softplus else rate).clamp(*dt_limit)
    groups = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(groups, 2), C.repeat_interleave(groups, 2)
    state, made = x.new_zeros((x.shape[0], *x.shape[2:], B.shape[-1])) if initial is None else initial, []
    for t in range(x.shape[1]):
        step = rate[:, t, :, None, None]
        state = (step * A[:, None, None]).exp() * state + step * x[:, t, :, :, None] * B[:, t, :, None, :]
        made.append((state * C[:, t, :, None, :]).sum(-1))
    out = torch.stack(made, 1)
    return (out if D is None else out + x * (D if D.dim() == 2 else D[:, None])), state.float()


def _selective(u, delta, A, B, C, D, delta_bias, delta_softplus):
    rate = delta if delta_bias is None else delta + delta_bias[:, None]
    rate = F.softplus(rate) if delta_softplus else rate
    B, C = ((s if s.dim() == 4 else s.unsqueeze(1)).repeat_interleave(u.shape[1] // (s.shape[1] if s.dim() == 4 else 1), 1) for s in (B, C))
    state, made = u.new_zeros((u.shape[0], *A.shape)), []
    for t in range(u.shape[2]):
        step = rate[:, :, t, None]
        state = (step * A).exp() * state + step * u[:, :, t, None] * B[..., t]
        made.append((state * C[..., t]).sum(-1))
    out = torch.stack(made, -1)
    return (out if D is None else out + u * D[:, None]), state.float().detach()  # the package gives the state no gradient


def _rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None, activation=None):  # fmt: skip  # noqa: E501
    assert seq_idx is None
    assert initial_states is None
    assert x.stride(1) != 1 or not (x.stride(0) % 8 or x.stride(2) % 8), "channels last need strides that are multiples of 8"
    out = _conv(x, weight, bias, activation)
    return (out, x[..., -weight.shape[1] + 1 :]) if return_final_states else out


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, INF), return_final_states=False, return_varlen_states=False):  # fmt: skip  # noqa: E501
    assert seq_idx is None
    out, state = _ssd(x, dt, A, B, C, D, dt_bias, dt_softplus, dt_limit, initial_states)
    out = out if z is None else out * F.silu(z)
    return (out, state) if return_final_states else out


def mamba_split_conv1d_scan_combined(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, seq_idx=None, dt_limit=(0.0, INF), return_final_states=False, activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6, outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True):  # fmt: skip  # noqa: E501
    assert seq_idx is None
    (heads, headdim) = (D.shape[0], headdim) if D.dim() == 1 else D.shape
    dim = heads * headdim
    state = (conv1d_weight.shape[0] - dim) // ngroups // 2
    beside = (zxbcdt.shape[-1] - 2 * dim - 2 * ngroups * state - heads) // 2
    other, z, xBC, dt = zxbcdt.split([2 * beside, dim, dim + 2 * ngroups * state, heads], -1)
    x, B, C = _conv(xBC.mT, conv1d_weight, conv1d_bias, activation).mT.split([dim, ngroups * state, ngroups * state], -1)
    x, B, C = (y.unflatten(-1, (n, -1)) for y, n in ((x, heads), (B, ngroups), (C, ngroups)))
    out, last = _ssd(x, dt, A, B, C, D, dt_bias, True, dt_limit, initial_states)
    out = out.flatten(2)
    if rmsnorm_weight is None or not norm_before_gate:
        out = out * F.silu(z)
    if rmsnorm_weight is not None:
        parts, weights = (y.unflatten(-1, (ngroups, dim // ngroups)) for y in (out, rmsnorm_weight))
        out = _rms(parts, weights, rmsnorm_eps).flatten(2)
        out = out * F.silu(z) if norm_before_gate else out
    if beside:
        out = torch.cat([F.silu(other[..., :beside]) * other[..., beside:], out], -1)
    if outproj_weight is not None:
        out = F.linear(out, outproj_weight, outproj_bias)
    return (out, last) if return_final_states else out


def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
    out, state = _selective(u, delta, A, B, C, D, delta_bias, delta_softplus)
    out = out if z is None else out * F.silu(z)
    return (out, state) if return_last_state else out


def mamba_inner_fn(xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A, B=None, C=None, D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None, delta_softplus=True, checkpoint_lvl=1, b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None, b_c_dt_rms_eps=1e-6):  # fmt: skip  # noqa: E501
    x, z = xz.chunk(2, 1)
    x = _conv(x, conv1d_weight[:, 0], conv1d_bias, "silu")
    rank, state = delta_proj_weight.shape[1], A.shape[1]
    made = x_proj_weight @ x
    dt, B, C = made[:, :rank], made[:, rank : rank + state] if B is None else B, made[:, -state:] if C is None else C
    B, C = (y if bias is None else y + bias[:, None] for y, bias in ((B, B_proj_bias), (C, C_proj_bias)))
    dt = delta_proj_weight @ dt
    B, C, dt = (
        y if weight is None else _rms(y.mT, weight, b_c_dt_rms_eps).mT
        for y, weight in ((B, b_rms_weight), (C, c_rms_weight), (dt, dt_rms_weight))
    )
    out, _ = _selective(x, dt, A, B, C, D, delta_bias, delta_softplus)
    return F.linear((out * F.silu(z)).mT, out_proj_weight, out_proj_bias)


# -- fla --------------------------------------------------------------------------------------------------------------------------------


def _state(q, v, initial):
    return q.new_zeros((q.shape[0], v.shape[2], q.shape[3], v.shape[3])) if initial is None else initial


def _delta_rule(q, k, v, g, beta, scale, initial, final, norm, per_row, gate, A_log, dt_bias, sigmoid, doubled, v_first):
    if norm:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if gate:
        g = g if dt_bias is None else g + dt_bias.view(g.shape[2:])
        g = -A_log.exp().view(-1, *[1] * per_row) * F.softplus(g)
    beta = (2 if doubled else 1) * beta.sigmoid() if sigmoid else beta
    state, made = _state(q, v, initial), []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()
        state = state * (decay[..., None] if per_row else decay[..., None, None])
        delta = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, :, :, None]).sum(2))
        state = state + k[:, t, :, :, None] * delta[:, :, None, :]
        made.append((state * q[:, t, :, :, None]).sum(2) * (q.shape[-1] ** -0.5 if scale is None else scale))
    return torch.stack(made, 1), (state.mT if v_first else state).float() if final else None


def _linear_attention(q, k, v, g, g_gamma, scale, initial, final, v_first):
    state, made = _state(q, v, initial), []
    for t in range(q.shape[1]):
        state = state if g is None else state * g[:, t, :, None, None].exp()
        state = state if g_gamma is None else state * g_gamma.detach().to(q)[:, None, None].exp()  # it gets no gradient
        state = state + k[:, t, :, :, None] * v[:, t, :, None, :]
        made.append((state * q[:, t, :, :, None]).sum(2) * (q.shape[-1] ** -0.5 if scale is None else scale))
    return torch.stack(made, 1), (state.mT if v_first else state).float() if final else None


def _dispatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """As fla wraps a function of several implementations."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return torch.compiler.disable(wrapper)


@torch.compiler.disable
@_dispatched
def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs):  # fmt: skip  # noqa: E501
    return _delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, False, kwargs.get("use_gate_in_kernel"),
        kwargs.get("A_log"), kwargs.get("dt_bias"), use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, **kwargs):  # fmt: skip  # noqa: E501
    if gv is not None:
        v = v * gv
    return _delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, False, use_gate_in_kernel, A_log, dt_bias,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
    )  # fmt: skip


@torch.compiler.disable
@_dispatched
def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, **kwargs):  # fmt: skip  # noqa: E501
    return _delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, True, use_gate_in_kernel, kwargs.get("A_log"),
        kwargs.get("dt_bias"), use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
    )  # fmt: skip


@torch.compiler.disable
def chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, **kwargs):  # fmt: skip  # noqa: E501
    return _linear_attention(q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first)


@_dispatched
def fused_recurrent_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, reverse=False, state_v_first=False, cu_seqlens=None, **kwargs):  # fmt: skip  # noqa: E501
    q, k, v = (x.flip(1) if reverse else x for x in (q, k, v))
    out, state = _linear_attention(q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first)
    return out.flip(1) if reverse else out, state


def _slopes(q: Tensor, layer_idx: int, num_layers: int) -> Tensor:
    return -(8 / q.shape[2] * (1 - layer_idx / num_layers)) * torch.arange(q.shape[2], dtype=torch.float, device=q.device)


@torch.compiler.disable
def chunk_lightning_attn(q, k, v, layer_idx, num_layers, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, **kwargs):  # fmt: skip  # noqa: E501
    return chunk_simple_gla(
        q=q, k=k, v=v, scale=scale, g_gamma=_slopes(q, layer_idx, num_layers), initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=cu_seqlens, chunk_size=kwargs.pop("chunk_size", None),
    )  # fmt: skip


def fused_recurrent_lightning_attn(q, k, v, layer_idx, num_layers, scale=None, initial_state=None, output_final_state=False, reverse=False, cu_seqlens=None, **kwargs):  # fmt: skip  # noqa: E501
    return fused_recurrent_simple_gla(
        q=q, k=k, v=v, g_gamma=_slopes(q, layer_idx, num_layers), scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, reverse=reverse, cu_seqlens=cu_seqlens,
    )  # fmt: skip


@torch.compiler.disable
def chunk_retention(q, k, v, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, **kwargs):
    decay = (1 - 2.0 ** (-5.0 - torch.arange(q.shape[2], dtype=torch.float, device=q.device))).log()
    out, state = chunk_simple_gla(
        q=q, k=k, v=v, scale=scale, g_gamma=decay, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, chunk_size=kwargs.pop("chunk_size", None),
    )  # fmt: skip
    return out, state


def _package(name: str, *functions: Callable[..., Any]) -> tuple[str, types.ModuleType]:
    return name, _module(name, **{function.__name__: function for function in functions})


FAKE = dict(
    (
        _package("causal_conv1d", causal_conv1d_fn),
        _package("mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined),
        _package("mamba_ssm.ops.selective_scan_interface", selective_scan_fn, mamba_inner_fn),
        _package("fla.ops.gated_delta_rule", chunk_gated_delta_rule, fused_recurrent_gated_delta_rule),
        _package("fla.ops.kda", chunk_kda),
        _package("fla.ops.simple_gla", chunk_simple_gla, fused_recurrent_simple_gla),
        _package("fla.ops.lightning_attn", chunk_lightning_attn, fused_recurrent_lightning_attn),
        _package("fla.ops.retention", chunk_retention),
    )
)


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in FAKE.items():
        monkeypatch.setitem(sys.modules, name, module)
    torch._dynamo.reset()
    rescan()


class Mixer(nn.Module):
    """Embedding, one mixer that calls a package, and a head; `kind` names the function. A final state is returned beside the logits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.layer = kind, 1
        self.words, self.head = nn.Embedding(50, 8, dtype=torch.float64), nn.Linear(8, 50, dtype=torch.float64)
        self.maps = nn.ModuleList([nn.Linear(8, 8, dtype=torch.float64) for _ in range(5)])
        self.weight, self.rate = (nn.Parameter(torch.randn(8, 4, dtype=torch.float64)) for _ in range(2))
        self.skip = nn.Parameter(torch.randn(8, dtype=torch.float64))
        # a gated MLP's two parts of width two; z, x, B, C and dt of two heads in two groups
        self.wide, self.out = nn.Linear(8, 2 * 2 + 8 + 16 + 2, dtype=torch.float64), nn.Linear(8 + 2, 8, dtype=torch.float64)
        self.taps = nn.Conv1d(16, 16, 3, groups=16, padding=2, dtype=torch.float64)
        self.made, self.dt = nn.Linear(8, 2 + 2 * 4, bias=False, dtype=torch.float64), nn.Linear(2, 8, dtype=torch.float64)

    def mix(self, x: Tensor) -> Any:
        a, b, c, d, e = (m(x) for m in self.maps)
        if self.kind == "conv":
            return causal_conv1d_fn(x.transpose(1, 2), self.weight, self.skip, activation="silu").transpose(1, 2)
        if self.kind.startswith("selective"):
            turned = (y.transpose(1, 2) for y in (a, b, c[..., :4], d[..., :4]))
            u, delta, state_in, state_out = turned
            rate, state = -self.rate.exp(), self.kind.endswith("state")
            found = selective_scan_fn(
                u, delta, rate, state_in, state_out, self.skip, e.transpose(1, 2), self.skip, True, return_last_state=state
            )  # fmt: skip
            return (found[0].transpose(1, 2), found[1]) if state else found.transpose(1, 2)
        if self.kind == "inner":
            xz = torch.cat([a, e], -1).transpose(1, 2)
            return mamba_inner_fn(
                xz, self.taps.weight[:8], self.taps.bias[:8], self.made.weight, self.dt.weight, self.out.weight[:, :8], self.out.bias,
                -self.rate.exp(), None, None, self.skip, delta_bias=self.dt.bias, delta_softplus=True,
            )  # fmt: skip
        if self.kind.startswith("split"):
            norm = {"split": None, "split_norm": self.skip, "split_norm_state": self.skip}[self.kind]
            return mamba_split_conv1d_scan_combined(
                self.wide(x), self.taps.weight.squeeze(1), self.taps.bias, self.skip[:2], -self.rate[:2, 0].exp(), D=self.skip[2:4],
                chunk_size=4, seq_idx=None, rmsnorm_weight=norm, rmsnorm_eps=1e-5, outproj_weight=self.out.weight,
                outproj_bias=self.out.bias, headdim=4, ngroups=2, norm_before_gate=False, return_final_states=self.kind.endswith("state"),
            )  # fmt: skip
        heads = [y.unflatten(-1, (2, 4)) for y in (a, b, c, e)]
        if self.kind == "ssd":
            rate = -self.rate[:2, 0].exp()
            out = mamba_chunk_scan_combined(
                heads[0], d[..., :2], rate, heads[1], heads[2], chunk_size=4, D=self.skip[:2], z=heads[3], dt_bias=self.skip[:2],
                dt_softplus=True, dt_limit=(0.01, 5.0),
            )  # fmt: skip
            return out.flatten(2)
        out, state = self.attend(heads, d, e)
        return out.flatten(2) if state is None else (out.flatten(2), state)

    def attend(self, heads: list[Tensor], d: Tensor, e: Tensor) -> Any:
        gate = e[..., :2]
        if self.kind == "simple":
            return chunk_simple_gla(*heads[:3], F.logsigmoid(gate), output_final_state=True, state_v_first=True)
        if self.kind == "simple_gamma":
            return fused_recurrent_simple_gla(*heads[:3], g_gamma=-self.rate[:2, 0].exp())
        if self.kind == "lightning":
            return chunk_lightning_attn(*heads[:3], layer_idx=self.layer, num_layers=4)
        if self.kind == "lightning_fused":
            return fused_recurrent_lightning_attn(*heads[:3], layer_idx=self.layer, num_layers=4)
        inside = {"use_qk_l2norm_in_kernel": True}
        if self.kind.endswith("gate"):
            inside |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True, "state_v_first": True}
            inside |= {"A_log": self.rate[:2, 0], "dt_bias": self.skip if self.kind.startswith("kda") else self.skip[:2]}
            function, gate = (chunk_kda, heads[3]) if self.kind.startswith("kda") else (chunk_gated_delta_rule, gate)
            return function(*heads[:3], g=gate, beta=d[..., :2], initial_state=None, cu_seqlens=None, **inside)
        function, gate = (chunk_kda, heads[3]) if self.kind == "kda" else (chunk_gated_delta_rule, gate)
        if self.kind == "delta_recurrent":
            function = fused_recurrent_gated_delta_rule
        return function(*heads[:3], g=F.logsigmoid(gate), beta=d[..., :2].sigmoid(), **inside)

    def forward(self, ids: Tensor) -> Any:
        x, found = self.words(ids), self.mix(self.words(ids))
        return (self.head(x + found[0]), found[1]) if isinstance(found, tuple) else self.head(x + found)


SHARED = {
    "conv": "causal_conv1d", "ssd": "ssd_scan", "selective": "selective_scan", "selective_state": "selective_scan",
    "delta": "gated_delta_rule", "delta_recurrent": "gated_delta_rule", "delta_gate": "gated_delta_rule", "kda": "kda", "kda_gate": "kda",
    "split": "ssd_scan", "split_norm": "ssd_scan", "split_norm_state": "ssd_scan", "inner": "selective_scan",
    "simple": "linear_attention", "simple_gamma": "linear_attention", "lightning": "linear_attention",
    "lightning_fused": "linear_attention",
}  # fmt: skip


@pytest.mark.parametrize("kind", SHARED)
def test_a_model_that_calls_a_package_shares(kind: str) -> None:
    error, found = compare(Mixer(kind), batch())
    assert error < (1e-6 if kind.endswith("state") or kind == "simple" else 1e-10)  # packages give states in float32
    ops = [str(node.target) for node in found.after["fork_states"].nodes]
    assert f"sp_compile.{SHARED[kind]}.default" in ops
    assert ("sp_compile.causal_conv1d.default" in ops) == kind.startswith(("conv", "split", "inner"))


def test_an_argument_that_is_not_known_is_refused() -> None:
    x, weight = torch.randn(2, 4, 6), torch.randn(4, 3)
    graph = capture(lambda a, b: causal_conv1d_fn(a, b, return_final_states=True), x, weight)
    assert "return_final_states" in reasons(graph)[0]
    assert not sites(graph, "dense_causal_conv1d")


@pytest.mark.parametrize(("left_out", "said"), [("dt_bias", "no dt_bias"), ("outproj_weight", "no outproj_weight, beside")])
def test_what_a_fused_scan_lacks_is_named(left_out: str, said: str) -> None:
    model = Mixer("split")
    given = {"dt_bias": model.skip[:2], "outproj_weight": model.out.weight} | {left_out: None}

    def mix(x: Tensor) -> Tensor:
        return mamba_split_conv1d_scan_combined(
            model.wide(x), model.taps.weight.squeeze(1), model.taps.bias, A=-model.rate[:2, 0].exp(), D=model.skip[2:4], chunk_size=4,
            outproj_bias=model.out.bias, headdim=4, ngroups=2, **given,
        )  # fmt: skip

    with pytest.warns(UserWarning, match=said):
        graph = capture(mix, torch.randn(2, 6, 8, dtype=torch.float64))
    assert said in reasons(graph)[0]


def test_a_gate_inside_of_a_scan_is_ops_on_tokens() -> None:
    x, gate = torch.randn(2, 2, 6, 2, 4)
    B, C = torch.randn(2, 2, 6, 2, 4)
    args = (x, torch.rand(2, 6, 2), -torch.rand(2), B, C, 4, None, gate)
    graph = capture(lambda *a: mamba_chunk_scan_combined(*a), *args)
    assert len(sites(graph, "dense_ssd_scan")) == 1


# -- functions that keep Dynamo out -----------------------------------------------------------------------------------------------------


class Started(nn.Module):
    """Linear attention from a state of ones, in a function that Dynamo may not trace."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(50, 8, dtype=torch.float64), nn.Linear(8, 50, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).unflatten(-1, (2, 4))
        return self.head(chunk_simple_gla(x, x, x, initial_state=x.new_ones((x.shape[0], 2, 4, 4)))[0].flatten(2))


def test_a_function_that_keeps_dynamo_out_is_reached_by_every_name() -> None:
    everywhere = [getattr(chunk_gated_delta_rule, "__wrapped__", None), chunk_gated_delta_rule]
    assert [is_substituted(function) for function in everywhere] == [False, True]
    x = torch.randn(2, 6, 2, 4)
    renamed = chunk_simple_gla
    assert len(sites(capture(lambda a: renamed(a, a, a), x), "dense_linear_attention")) == 1


def test_another_backend_sees_a_function_that_keeps_dynamo_out() -> None:
    OTHERS.clear()
    model = Mixer("simple")
    got = torch.compile(model, backend=stranger)(batch())
    assert len(OTHERS) > 1, "the graph breaks, as without this package"
    assert not any(sites(graph, "dense_linear_attention") for graph in OTHERS)
    torch.testing.assert_close(got, model(batch()))


def test_a_refusal_that_breaks_the_graph_is_said() -> None:
    GRAPHS.clear()
    model = Started()
    with pytest.warns(UserWarning, match="chunk_simple_gla was given initial_state"):
        got = torch.compile(model, backend=recording)(batch())
    assert len(GRAPHS) > 1, "the function itself ran, between two graphs"
    assert not any(sites(graph, "dense_linear_attention") for graph in GRAPHS)
    torch.testing.assert_close(got, model(batch()))


def test_a_refusal_that_breaks_the_graph_is_in_the_account() -> None:
    """Beside what is said of the graph behind the break, which knows of no token ids; and of this model only."""
    torch._dynamo.reset()
    compiled = torch.compile(Started(), backend=shared_prefix, options={"inner": "eager"})
    with pytest.warns(UserWarning, match="initial_state"):
        compiled(batch())
    for rows in (batch()[:-1], batch()):
        compiled(rows)
        first, *others = sp_compile.last_run().refused
        assert "chunk_simple_gla was given initial_state" in first
        assert "graph breaks at that call" in first
        assert any("no integer [rows, columns] input" in other for other in others)
    torch.compile(Mixer("simple"), backend=shared_prefix, options={"inner": "eager"})(batch())
    assert sp_compile.last_run().refused == ()


def test_a_refusal_in_the_graph_is_told_once() -> None:
    torch._dynamo.reset()
    taps, table = torch.randn(8, 3, dtype=torch.float64), torch.randn(50, 8, dtype=torch.float64)

    def model(ids: Tensor) -> Tensor:
        return causal_conv1d_fn(table[ids].transpose(1, 2), taps, return_final_states=True)[0]

    with pytest.warns(UserWarning, match="return_final_states"):
        torch.compile(model, backend=shared_prefix, options={"inner": "eager"})(batch())
    (reason,) = sp_compile.last_run().refused
    assert "return_final_states" in reason
    assert "graph breaks" not in reason


def test_a_refusal_is_an_error_on_packed_values() -> None:
    packed = sp_compile.pack({"input_ids": batch()})
    compiled = torch.compile(Started(), backend=shared_prefix, options={"inner": "eager"})
    with sp_compile.share(packed.forest), pytest.raises(RuntimeError, match="chunk_simple_gla was given initial_state"):
        compiled(packed.inputs["input_ids"])


def test_a_switch_that_is_on_by_default_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, head_first=True, use_qk_l2norm_in_kernel=False):  # fmt: skip  # noqa: E501
        turned = (x.transpose(1, 2) if head_first else x for x in (q, k, v, g, beta))
        out, state = _delta_rule(*turned, scale, None, False, False, False, False, None, None, False, False, False)
        return out.transpose(1, 2) if head_first else out, state

    monkeypatch.setitem(sys.modules, *_package("fla.ops.gated_delta_rule", chunk_gated_delta_rule))
    rescan()
    x = torch.randn(2, 6, 2, 4)
    first = (*(x.transpose(1, 2) for _ in range(3)), -torch.rand(2, 2, 6), torch.rand(2, 2, 6))
    graph = capture(lambda *a: chunk_gated_delta_rule(*a)[0], *first)
    assert "head_first" in reasons(graph)[0]
    last = tuple(y.transpose(1, 2) for y in first)
    assert len(sites(capture(lambda *a: chunk_gated_delta_rule(*a, head_first=False)[0], *last), "dense_gated_delta_rule")) == 1


def test_a_function_of_another_version_runs_on_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunk_kda(query, key, value, options):
        return query * options["scale"]

    monkeypatch.setitem(sys.modules, *_package("fla.ops.kda", chunk_kda))
    rescan()
    graph = capture(lambda x: chunk_kda(x, x, x, {"scale": 2}), torch.randn(2, 6, 2, 4))
    (site,) = sites(graph, "rows_site")
    assert "chunk_kda is of a version that sharing does not know" in str(site.args[1])
