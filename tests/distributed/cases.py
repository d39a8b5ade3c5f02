"""Mixers on a forest whose tokens are spread over ranks: inputs, what a rank computes, and the same by the ops on the whole pack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sp_compile.layout import Forest
from sp_compile.layout.rank_plans import RankPlan, plan_rank, take_local
from sp_compile.ops import dense_scans, over_ranks, scans

Tensors = dict[str, Tensor]

FORESTS: dict[str, list[list[int]]] = {
    "star": [[*range(20), *range(100 * b, 100 * b + 11)] for b in range(1, 5)],
    "several": [[r * 10, *range(r * 10 + 1, r * 10 + 6), *range(900 + 20 * b, 904 + 20 * b)] for r in range(3) for b in range(2)],
    "deep": [[*range(5 * n), 900 + n, 950 + n] for n in range(1, 8)],
    "ones": [[a, b, c] for a in range(2) for b in range(3) for c in range(2)],
    "tiny": [[1, 2], [1, 3]],  # ranks with nothing but padding
}

SSD: dict[str, Any] = {"dt_softplus": True, "dt_min": 0.0, "dt_max": float("inf"), "chunk": 16}
HEADS, GROUPS, DIM = 4, 2, 6


def forest(name: str) -> Forest:
    return Forest.from_rows(FORESTS[name])


def made(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def decay(seed: int, *shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: -made(seed, *shape).exp().to(dtype)


def plain(seed: int, *shape: int) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: made(seed, *shape, dtype=dtype)


_DELTA: dict[str, Any] = {"scale": 0.4, "qk_l2norm": True, "chunk": 16}
_HEADS = {"q": (HEADS, DIM), "k": (HEADS, DIM), "v": (HEADS, DIM + 1)}
SCANS: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Callable[[torch.dtype], Tensor]], dict[str, Any]]] = {
    "ssd_scan": (
        {"x": (HEADS, DIM), "dt": (HEADS,), "B": (GROUPS, 3), "C": (GROUPS, 3)},
        {"A": decay(1, HEADS), "D": plain(2, HEADS), "dt_bias": plain(3, HEADS)},
        SSD,
    ),
    "selective_scan": (
        {"u": (8,), "delta": (8,), "B": (GROUPS, 3), "C": (GROUPS, 3)},
        {"A": decay(1, 8, 3), "D": plain(2, 8), "delta_bias": plain(3, 8)},
        {"delta_softplus": True, "chunk": 16},
    ),
    "gated_delta_rule": ({**_HEADS, "q": (GROUPS, DIM), "k": (GROUPS, DIM), "g": (HEADS,), "beta": (HEADS,)}, {}, _DELTA),
    "kda": ({**_HEADS, "g": (HEADS, DIM), "beta": (HEADS,)}, {}, _DELTA),
    "linear_attention": (_HEADS, {"decay": decay(1, HEADS)}, {"scale": 0.4, "chunk": 16}),
    "linear_scan": ({"a": (5,), "x": (5,)}, {}, {}),
}
"""Shapes per token, parameters and options of every recurrence."""


def recurrent(kind: str, values: Tensors, parameters: Tensors) -> Tensors:
    """The tensors of a recurrence by name: log decays below zero, and strengths of delta rules between zero and one."""
    given = {**values, **parameters}
    for name in ("g", "a"):
        if name in given:
            given[name] = -torch.nn.functional.softplus(given[name])
    return given | ({"beta": given["beta"].sigmoid()} if "beta" in given else {})


def inputs(kind: str, tokens: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    """Token values [1, T, ...] and parameters of a mixer, the same on every rank."""
    if kind in ("attention", "window"):
        shapes = {"q": (HEADS, DIM), "k": (GROUPS, DIM), "v": (GROUPS, DIM + 1)}
        parameters = {"sinks": made(1, HEADS, dtype=dtype)} if kind == "attention" else {}
    elif kind == "convolution":
        shapes = {"x": (5,)}
        parameters = {"weight": made(1, 5, 4, dtype=dtype), "bias": made(2, 5, dtype=dtype)}
    else:
        shapes, parameters = SCANS[kind][0], {name: make(dtype) for name, make in SCANS[kind][1].items()}
    return {name: made(10 + n, 1, tokens, *shape, dtype=dtype) for n, (name, shape) in enumerate(shapes.items())}, parameters


def spread(kind: str, values: Tensors, parameters: Tensors, plan: RankPlan, group: str) -> Tensor:
    """The rank's part [1, S, ...] of the result."""
    if kind in ("attention", "window"):
        q, k, v = (values[name].transpose(1, 2) for name in "qkv")
        window = {"window": 7, "softcap": 2.0} if kind == "window" else {}
        return over_ranks.attention(q, k, v, plan, group, sinks=parameters.get("sinks"), scale=0.4, **window).transpose(1, 2)
    if kind == "convolution":
        return over_ranks.convolution(values["x"], parameters["weight"], parameters["bias"], plan, group, activation="silu")
    return over_ranks.scan(kind, recurrent(kind, values, parameters), plan, group, **SCANS[kind][2])


def whole(kind: str, values: Tensors, parameters: Tensors, tree: Forest) -> Tensor:
    """The same by the op on the whole pack [1, T, ...]."""
    end, column, prev = tree.tensors(("end", "column", "prev"), "cpu")
    ops, v, p = torch.ops.sp_compile, values, parameters
    if kind in ("attention", "window"):
        heads = [v[name].transpose(1, 2) for name in "qkv"]
        window, softcap = (7, 2.0) if kind == "window" else (None, None)
        out = ops.attention(*heads, end, column, None, None, None, p.get("sinks"), scale=0.4, window=window, chunk=None, softcap=softcap)
        return out.transpose(1, 2)
    if kind == "convolution":
        return ops.causal_conv1d(v["x"], p["weight"], p["bias"], prev, None, activation="silu")
    given = recurrent(kind, v, p)
    tensors = [given.get(name) for name in dense_scans.KINDS[kind].tensors]
    return scans.op_of(kind)(*tensors, prev, end, None, None, **SCANS[kind][2])[0]


KINDS = ("attention", "window", "convolution", *SCANS)


def run_case(kind: str, tree: Forest, dtype: torch.dtype, mixer: Callable[[Tensors, Tensors], Tensor], local: Any, total: Any) -> Tensors:
    """Output, loss and all gradients of a mixer under a random objective."""
    values, parameters = inputs(kind, tree.num_tokens, dtype)
    values = {name: local(value).detach().requires_grad_() for name, value in values.items()}
    parameters = {name: value.requires_grad_() for name, value in parameters.items()}
    out = mixer(values, parameters)
    weight = local(made(99, 1, tree.num_tokens, *out.shape[2:], dtype=dtype), 0.0)
    loss = total((out * weight).sum())
    loss.backward()
    found = {"out": out.detach(), "loss": loss.detach()[None, None]}
    return found | {f"d_{name}": value.grad for name, value in [*values.items(), *parameters.items()] if value.grad is not None}


def on_rank(rank: int, ranks: int, name: str, kind: str, attention: str, dtype: torch.dtype, group: str) -> Tensors:
    """What rank `rank` finds; token values of padding are ones, so that a mixer that reads them shows."""
    tree = forest(name)
    plan = plan_rank(tree, ranks, rank, attention=attention)
    return run_case(
        kind, tree, dtype, lambda v, p: spread(kind, v, p, plan, group),
        lambda value, fill=1.0: take_local(value, plan, fill), lambda loss: over_ranks.total(loss, plan, group),
    )  # fmt: skip


def on_one(name: str, kind: str, dtype: torch.dtype) -> Tensors:
    """The oracle: the ops on the whole pack."""
    tree = forest(name)
    return run_case(kind, tree, dtype, lambda v, p: whole(kind, v, p, tree), lambda value, fill=0.0: value, lambda loss: loss)


def all_cases(rank: int, ranks: int) -> dict[tuple[str, str, str], Tensors]:
    """Mixers on every forest in float64, recurrences on two, and the attention of one forest in every layout."""
    group = dist.group.WORLD.group_name
    cases = [(name, kind, "balanced") for name in FORESTS for kind in KINDS if kind not in SCANS or name in ("deep", "tiny")]
    cases += [("deep", "attention", layout) for layout in ("contiguous", "zigzag")]
    return {(name, kind, layout): on_rank(rank, ranks, name, kind, layout, torch.float64, group) for name, kind, layout in cases}


def replays(rank: int, ranks: int) -> list[str]:
    """Names of results that differ in a bit between runs in float32; of the tensors, not of the cases."""
    group = dist.group.WORLD.group_name
    torch.use_deterministic_algorithms(True)
    wrong = []
    for kind in KINDS:
        runs = [on_rank(rank, ranks, "star", kind, "balanced", torch.float32, group) for _ in range(3)]
        wrong += [f"{kind}.{name}" for name in runs[0] if not all(torch.equal(runs[0][name], other[name]) for other in runs[1:])]
    return wrong


def counts(rank: int, ranks: int) -> Tensor:
    """Tokens per expert, each as often as rows pass through it, reduced once."""
    tree = forest("several")
    plan = plan_rank(tree, ranks, rank)
    expert = take_local(torch.arange(tree.num_tokens)[None] * 7 % 5, plan)[0].to(torch.int64)
    (count,) = plan.tensors(("count",), "cpu")
    local = torch.zeros(5, dtype=torch.int64).index_add_(0, expert, count * (2**24 + 1))
    return over_ranks.total(local, plan, dist.group.WORLD.group_name)
