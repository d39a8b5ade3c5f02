"""mamba_ssm, causal_conv1d and fla, as stand-ins with the packages' parameters: models that call them directly share."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sp_compile.capture.polyfills import rescan
from tests.capture.recording import capture, reasons, sites
from tests.passes.harness import batch, compare

INF = float("inf")


def _module(name: str, **members: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(members)
    return made


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None, activation=None):  # fmt: skip  # noqa: E501
    assert seq_idx is None
    assert initial_states is None
    out = F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=x.shape[1])[..., : x.shape[-1]]
    return out if activation is None else F.silu(out)


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, INF), return_final_states=False, return_varlen_states=False):  # fmt: skip  # noqa: E501
    assert seq_idx is None
    assert initial_states is None
    rate = dt if dt_bias is None else dt + dt_bias
    rate = (F.softplus(rate) if dt_softplus else rate).clamp(*dt_limit)
    groups = x.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(groups, 2), C.repeat_interleave(groups, 2)
    state, made = x.new_zeros((x.shape[0], *x.shape[2:], B.shape[-1])), []
    for t in range(x.shape[1]):
        step = rate[:, t, :, None, None]
        state = (step * A[:, None, None]).exp() * state + step * x[:, t, :, :, None] * B[:, t, :, None, :]
        made.append((state * C[:, t, :, None, :]).sum(-1))
    out = torch.stack(made, 1)
    out = out if D is None else out + x * D[:, None]
    out = out if z is None else out * F.silu(z)
    return (out, state) if return_final_states else out


def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
    rate = delta if delta_bias is None else delta + delta_bias[:, None]
    rate = F.softplus(rate) if delta_softplus else rate
    B, C = ((s if s.dim() == 4 else s.unsqueeze(1)).repeat_interleave(u.shape[1] // (s.shape[1] if s.dim() == 4 else 1), 1) for s in (B, C))
    state, made = u.new_zeros((u.shape[0], *A.shape)), []
    for t in range(u.shape[2]):
        step = rate[:, :, t, None]
        state = (step * A).exp() * state + step * u[:, :, t, None] * B[..., t]
        made.append((state * C[..., t]).sum(-1))
    out = torch.stack(made, -1)
    out = out if D is None else out + u * D[:, None]
    out = out if z is None else out * F.silu(z)
    return (out, state) if return_last_state else out


def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None):  # fmt: skip  # noqa: E501
    assert initial_state is None
    assert cu_seqlens is None
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state, made = q.new_zeros((*q.shape[:1], q.shape[2], q.shape[3], v.shape[3])), []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()
        state = state * (decay[..., None, None] if g.dim() == 3 else decay[..., None])
        delta = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, :, :, None]).sum(2))
        state = state + k[:, t, :, :, None] * delta[:, :, None, :]
        made.append((state * q[:, t, :, :, None]).sum(2) * (q.shape[-1] ** -0.5 if scale is None else scale))
    return torch.stack(made, 1), state if output_final_state else None


def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None):  # fmt: skip  # noqa: E501
    return chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


FAKE = {
    "causal_conv1d": _module("causal_conv1d", causal_conv1d_fn=causal_conv1d_fn),
    "mamba_ssm.ops.triton.ssd_combined": _module("ssd_combined", mamba_chunk_scan_combined=mamba_chunk_scan_combined),
    "mamba_ssm.ops.selective_scan_interface": _module("selective_scan_interface", selective_scan_fn=selective_scan_fn),
    "fla.ops.gated_delta_rule": _module("gated_delta_rule", chunk_gated_delta_rule=chunk_gated_delta_rule),
    "fla.ops.kda": _module("kda", chunk_kda=chunk_kda),
}


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in FAKE.items():
        monkeypatch.setitem(sys.modules, name, module)
    torch._dynamo.reset()
    rescan()


class Mixer(nn.Module):
    """Embedding, one mixer that calls a package, and a head; `kind` names the function."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.words, self.head = nn.Embedding(50, 8, dtype=torch.float64), nn.Linear(8, 50, dtype=torch.float64)
        self.maps = nn.ModuleList([nn.Linear(8, 8, dtype=torch.float64) for _ in range(5)])
        self.weight, self.rate = (nn.Parameter(torch.randn(8, 4, dtype=torch.float64)) for _ in range(2))
        self.skip = nn.Parameter(torch.randn(8, dtype=torch.float64))

    def mix(self, x: Tensor) -> Tensor:
        a, b, c, d, e = (m(x) for m in self.maps)
        if self.kind == "conv":
            return causal_conv1d_fn(x.transpose(1, 2), self.weight, self.skip, activation="silu").transpose(1, 2)
        if self.kind == "selective":
            turned = (y.transpose(1, 2) for y in (a, b, c[..., :4], d[..., :4]))
            u, delta, state_in, state_out = turned
            rate = -self.rate.exp()
            return selective_scan_fn(
                u, delta, rate, state_in, state_out, self.skip, z=e.transpose(1, 2), delta_bias=self.skip, delta_softplus=True
            ).transpose(1, 2)
        heads = [y.unflatten(-1, (2, 4)) for y in (a, b, c, e)]
        if self.kind == "ssd":
            rate = -self.rate[:2, 0].exp()
            out = mamba_chunk_scan_combined(
                heads[0], d[..., :2], rate, heads[1], heads[2], chunk_size=4, D=self.skip[:2], z=heads[3], dt_bias=self.skip[:2],
                dt_softplus=True, dt_limit=(0.01, 5.0),
            )  # fmt: skip
            return out.flatten(2)
        function = chunk_kda if self.kind == "kda" else chunk_gated_delta_rule
        gate = F.logsigmoid(heads[3] if self.kind == "kda" else e[..., :2])
        return function(heads[0], heads[1], heads[2], gate, d[..., :2].sigmoid(), use_qk_l2norm_in_kernel=True)[0].flatten(2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        return self.head(x + self.mix(x))


@pytest.mark.parametrize("kind", ["conv", "ssd", "selective", "delta", "kda"])
def test_a_model_that_calls_a_package_shares(kind: str) -> None:
    error, found = compare(Mixer(kind), batch())
    # A gate is formed in float32, as the kernels form it.
    assert error < (1e-5 if kind in ("ssd", "selective") else 1e-10)
    name = {"conv": "causal_conv1d", "delta": "gated_delta_rule", "ssd": "ssd_scan", "selective": "selective_scan"}.get(kind, kind)
    assert [node for node in found.after["fork_states"].nodes if str(node.target) == f"sp_compile.{name}.default"]


def test_an_argument_that_is_not_known_is_refused() -> None:
    x, weight = torch.randn(2, 4, 6), torch.randn(4, 3)
    graph = capture(lambda a, b: causal_conv1d_fn(a, b, return_final_states=True), x, weight)
    assert "return_final_states" in reasons(graph)[0]
    assert not sites(graph, "dense_causal_conv1d")


def test_a_gate_inside_of_a_scan_is_ops_on_tokens() -> None:
    x, gate = torch.randn(2, 2, 6, 2, 4)
    B, C = torch.randn(2, 2, 6, 2, 4)
    args = (x, torch.rand(2, 6, 2), -torch.rand(2), B, C, 4, None, gate)
    graph = capture(lambda *a: mamba_chunk_scan_combined(*a), *args)
    assert len(sites(graph, "dense_ssd_scan")) == 1
