"""transformers: recurrences that stand in a method as a loop over columns or blocks, captured as one op (see `ops/dense_scans.py`).

torch has no substitution for methods, so the method itself is wrapped: while Dynamo traces for this backend it is written with one op,
in every other call it is the original. As in `hf_scans`, a method is wrapped only if what it gives on a few random tokens is what the
written form gives.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sp_compile.capture import versions
from sp_compile.capture.polyfills import count_replaced, on_rows, ours
from sp_compile.capture.scan_check import DECLINED, calm
from sp_compile.ops.dense_scans import Given, register_library

log = logging.getLogger(__name__)

_SEEN: set[int] = set()


def lightning_blocks(given: Given, final: bool) -> Tensor:
    """Lightning attention in blocks of `chunk` columns: decay `exp(decay)` per head and column, no softmax.

    Source: Qin et al., "Lightning Attention-2", 2024, algorithm 1.
    """
    q, k, v = (given[name].transpose(1, 2) for name in ("q", "k", "v"))
    q, decay, size = q * given["scale"], given["decay"].to(q.dtype)[:, None, None], given["chunk"]
    state = q.new_zeros((*q.shape[:2], k.shape[3], v.shape[3]))
    made = []
    for start in range(0, q.shape[2], size):
        some = [x[:, :, start : start + size] for x in (q, k, v)]
        count = some[0].shape[2]
        place = torch.arange(1, count + 1, device=q.device, dtype=q.dtype)
        distance = place[:, None] - place
        within = torch.where(distance >= 0, (decay * distance.clamp(min=0)).exp(), 0)
        inside = (some[0] @ some[1].mT * within) @ some[2]
        made.append(some[0] * (decay * place[:, None]).exp() @ state + inside)
        state = state * (decay * count).exp() + (some[1] * (decay * (count - place[:, None])).exp()).mT @ some[2]
    return state if final else torch.cat(made, 2).transpose(1, 2)


def gated_columns(given: Given, final: bool) -> Tensor:
    """`h_l = exp(a_l) h_{l-1} + x_l`, column by column, in float32."""
    decay, x = given["a"].float().exp(), given["x"].float()
    state, made = x.new_zeros((x.shape[0], x.shape[2])), []
    for column in range(x.shape[1]):
        state = decay[:, column] * state + x[:, column]
        made.append(state)
    return state if final else torch.stack(made, 1)


register_library("lightning", lightning_blocks)
register_library("rg_lru", gated_columns)


def _lightning(original: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a lightning attention layer."""

    def written(self: Any, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, columns, _ = hidden.shape
        qkv = self.act_fn(self.qkv_proj(hidden))
        if mask is not None:
            qkv = (qkv * mask[:, :, None]).to(qkv.dtype)
        qkv = qkv.reshape(rows, columns, self.num_attention_heads, 3 * self.head_dim)
        q, k, v = torch.split(qkv, self.head_dim, dim=3)
        decay = -self.slope_rate.flatten()
        options = {"scale": 1.0, "chunk": self.block_size, "dtype": v.dtype, "library": "lightning"}
        out = torch.ops.sp_compile.dense_linear_attention(q, k, v, None, decay, **options)
        state = torch.ops.sp_compile.dense_linear_attention_state(q, k, v, None, decay, **options)
        out = self.norm(out.reshape(rows, columns, self.num_attention_heads * self.head_dim))
        return self.out_proj(F.sigmoid(self.output_gate(hidden)) * out), state

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        cached = kwargs.get("cache") is not None or kwargs.get("past_key_values") is not None or len(args) > 0
        if ours() and not cached:
            return written(self, hidden_states, attention_mask)
        return original(self, hidden_states, position_embeddings, attention_mask, *args, **kwargs)

    forward._sp_compile_written = written  # type: ignore[attr-defined]
    return forward


def _same_lightning(kind: Any, written: Callable[..., Any]) -> bool:
    layer: Any = kind.__new__(kind)
    nn.Module.__init__(layer)
    layer.layer_idx, layer.num_hidden_layers, layer.head_dim, layer.num_attention_heads, layer.block_size = 0, 3, 3, 2, 4
    layer.act_fn, layer.norm = F.silu, nn.LayerNorm(6)
    layer.qkv_proj, layer.out_proj, layer.output_gate = (
        nn.Linear(5, 18, bias=False),
        nn.Linear(6, 5, bias=False),
        nn.Linear(5, 6, bias=False),
    )
    layer.slope_rate = layer.get_slope_rate()
    layer.query_decay, layer.key_decay, layer.diagonal_decay = layer.decay_factors(layer.slope_rate)
    hidden, mask = torch.randn(2, 9, 5), torch.tensor([[0] * 2 + [1] * 7, [1] * 9])
    want, got = kind.forward(layer, hidden, None, mask), written(layer, hidden, mask)
    return _close(got[0], want[0]) and _close(got[1], want[1])


def _rg_lru(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_rnn_scan` of an RG-LRU layer."""

    def written(self: Any, x: Tensor, gate: Tensor, reset: Tensor) -> tuple[Tensor, Tensor]:
        gate = gate * ~reset
        # The logarithm of a gate of zero is minus infinity, whose gradient must not become 0 / 0.
        decay = torch.where(gate > 0, torch.log(torch.where(gate > 0, gate, 1.0)), -torch.inf)
        options = {"library": "rg_lru"}
        out = torch.ops.sp_compile.dense_linear_scan(decay, x, **options, dtype=x.dtype)
        return out, torch.ops.sp_compile.dense_linear_scan_state(decay, x, **options, dtype=torch.float32)

    @functools.wraps(original)
    def scan(self: Any, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, recurrent_states: Any, **kwargs: Any) -> Any:
        if ours() and recurrent_states is None and not kwargs:
            return written(self, hidden_states, recurrent_gate, reset)
        return original(self, hidden_states, recurrent_gate, reset, recurrent_states, **kwargs)

    scan._sp_compile_written = written  # type: ignore[attr-defined]
    return scan


def _same_rg_lru(kind: Any, written: Callable[..., Any]) -> bool:
    x, gate, reset = torch.randn(2, 9, 5), torch.rand(2, 9, 5), torch.arange(9)[None, :, None].expand(2, 9, 1) % 5 == 0
    want, got = kind._rnn_scan(None, x, gate, reset, None), written(None, x, gate, reset)
    return _close(got[0], want[0]) and _close(got[1], want[1])


def _close(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and bool((got - want).norm() <= 1e-4 * want.norm())


_METHODS: tuple[tuple[str, str, Any, Any], ...] = (
    ("LightningAttention", "forward", _lightning, _same_lightning),
    ("Rglru", "_rnn_scan", _rg_lru, _same_rg_lru),
)
"""End of a class name, method, wrapper, check."""


def _wrap(kind: Any, method: str, build: Any, same: Any) -> None:
    try:
        with calm():
            original = kind.__dict__[method]
            wrapped = build(original)
            agrees = same(kind, wrapped._sp_compile_written)
    except Exception:
        log.debug("%s.%s could not be tried", kind.__qualname__, method, exc_info=True)
        original, agrees = kind.__dict__[method], False
    setattr(kind, method, wrapped if agrees else _left_alone(original))
    count_replaced()


def _left_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    """The method itself, its result marked while this backend traces."""
    reason = f"{original.__module__}.{original.__qualname__} {DECLINED}"

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return on_rows(found, reason) if ours() else found

    return method


def scan() -> None:
    """Wraps the methods of every modelling module imported so far, each class once."""
    if not versions.is_tested("transformers"):
        return
    for loaded, module in tuple(sys.modules.items()):
        if not loaded.startswith(("transformers.models.", "transformers_modules.")) or ".modeling_" not in loaded:
            continue
        for kind in tuple(vars(module).values()):
            if not isinstance(kind, type) or id(kind) in _SEEN or kind.__module__ != loaded:
                continue
            for end, method, build, same in _METHODS:
                if kind.__name__.endswith(end) and method in vars(kind):
                    _SEEN.add(id(kind))
                    _wrap(kind, method, build, same)
