"""A model with every recurrence beside convolution, attention and MLP. Its recurrences are loops over columns, from the ops' formulas."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sp_compile.ops import dense_scans

WIDTH, HEADS, DIM = 8, 2, 4
LIBRARY = "tests.distributed.hybrids"


def _by_column(given: dict[str, Any], final: bool) -> Tensor:
    """Outputs or final states of any kind, told by its tensors."""
    assert not final, "the models here ask for no states"
    if "u" in given:
        return _selective(given)
    if "dt" in given:
        return _ssd(given)
    if "a" in given:
        return _gated(given)
    return _matrix(given)


def _ssd(given: dict[str, Any]) -> Tensor:
    x, B, C = given["x"], *(given[n].repeat_interleave(given["x"].shape[2] // given[n].shape[2], 2) for n in "BC")
    steps = F.softplus(given["dt"] + given["dt_bias"])
    state, out = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[3]), []
    for i in range(x.shape[1]):
        d = steps[:, i, :, None, None]
        state = (d * given["A"][:, None, None]).exp() * state + d * x[:, i, :, :, None] * B[:, i, :, None, :]
        out.append((state * C[:, i, :, None, :]).sum(-1) + given["D"][:, None] * x[:, i])
    return torch.stack(out, 1)


def _selective(given: dict[str, Any]) -> Tensor:
    u, B, C = given["u"], *(given[n].repeat_interleave(given["u"].shape[2] // given[n].shape[2], 2) for n in "BC")
    steps = F.softplus(given["delta"] + given["delta_bias"])[..., None]
    state, out = u.new_zeros(u.shape[0], *given["A"].shape), []
    for i in range(u.shape[1]):
        state = (steps[:, i] * given["A"]).exp() * state + steps[:, i] * u[:, i, :, None] * B[:, i]
        out.append((state * C[:, i]).sum(-1) + given["D"] * u[:, i])
    return torch.stack(out, 1)


def _gated(given: dict[str, Any]) -> Tensor:
    state, out = torch.zeros_like(given["x"][:, 0]), []
    for a, x in zip(given["a"].unbind(1), given["x"].unbind(1), strict=True):
        state = a.exp() * state + x
        out.append(state)
    return torch.stack(out, 1)


def _matrix(given: dict[str, Any]) -> Tensor:
    v, g, beta = given["v"], given["g"], given.get("beta")
    q, k = (given[n].repeat_interleave(v.shape[2] // given[n].shape[2], 2) for n in "qk")
    if given.get("qk_l2norm"):
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    g = g if g.dim() == 4 else g[..., None]
    state, out = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]), []
    for i in range(v.shape[1]):
        state, write = g[:, i, ..., None].exp() * state, v[:, i]
        if beta is not None:
            write = beta[:, i, :, None] * (write - (state * k[:, i, ..., None]).sum(2))
        state = state + k[:, i, ..., None] * write[:, :, None]
        out.append(given["scale"] * (state * q[:, i, ..., None]).sum(2))
    return torch.stack(out, 1)


dense_scans.register_library(LIBRARY, _by_column)

TOKENS: dict[str, dict[str, tuple[int, ...]]] = {
    "ssd_scan": {"x": (HEADS, DIM), "dt": (HEADS,), "B": (1, 3), "C": (1, 3)},
    "selective_scan": {"u": (WIDTH,), "delta": (WIDTH,), "B": (2, 3), "C": (2, 3)},
    "gated_delta_rule": {"q": (1, 3), "k": (1, 3), "v": (HEADS, DIM), "g": (HEADS,), "beta": (HEADS,)},
    "kda": {"q": (HEADS, 3), "k": (HEADS, 3), "v": (HEADS, DIM), "g": (HEADS, 3), "beta": (HEADS,)},
    "linear_attention": {"q": (HEADS, 3), "k": (HEADS, 3), "v": (HEADS, DIM), "g": (HEADS,)},
    "linear_scan": {"a": (WIDTH,), "x": (WIDTH,)},
}
"""Shapes per token of what a layer makes of its input."""

PARAMETERS: dict[str, dict[str, tuple[int, ...]]] = {
    "ssd_scan": {"A": (HEADS,), "D": (HEADS,), "dt_bias": (HEADS,)},
    "selective_scan": {"A": (WIDTH, 3), "D": (WIDTH,), "delta_bias": (WIDTH,)},
}

OPTIONS: dict[str, dict[str, Any]] = {
    "ssd_scan": {"dt_softplus": True, "dt_min": 0.0, "dt_max": float("inf"), "chunk": 8},
    "selective_scan": {"delta_softplus": True, "chunk": 8},
    "gated_delta_rule": {"scale": 0.7, "qk_l2norm": True, "chunk": 8},
    "kda": {"scale": 0.7, "qk_l2norm": True, "chunk": 8},
    "linear_attention": {"scale": 0.7, "chunk": 8},
    "linear_scan": {},
}


class Recurrence(nn.Module):
    """A short convolution and a recurrence."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.tokens = kind, TOKENS[kind]
        self.sizes = [torch.Size(shape).numel() for shape in self.tokens.values()]
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.split = nn.Linear(WIDTH, sum(self.sizes))
        self.own = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in PARAMETERS.get(kind, {}).items()})

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        parts = self.split(mixed).split(self.sizes, -1)
        given = {name: part.unflatten(-1, shape) for (name, shape), part in zip(self.tokens.items(), parts, strict=True)}
        given |= dict(self.own.items())
        for name in ("g", "a"):
            if name in given:
                given[name] = -F.softplus(given[name] + 1)
        if "beta" in given:
            given["beta"] = given["beta"].sigmoid()
        if "A" in given:
            given["A"] = -given["A"].exp()
        tensors = [given.get(name) for name in dense_scans.KINDS[self.kind].tensors]
        op = getattr(torch.ops.sp_compile, f"dense_{self.kind}")
        return op(*tensors, **OPTIONS[self.kind], dtype=x.dtype, library=LIBRARY).flatten(2)


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.mix = Recurrence(kind)
        self.qkv, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(F.layer_norm(x, (WIDTH,)))
        q, k, v = (part.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for part in self.qkv(F.layer_norm(x, (WIDTH,))).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.mlp(F.layer_norm(x, (WIDTH,)))


class Hybrid(nn.Module):
    """A layer of each of the given kinds, all of them by default."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.embed, self.unembed = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64)
        self.layers = nn.ModuleList(Layer(kind) for kind in kinds or TOKENS)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.unembed(x)
