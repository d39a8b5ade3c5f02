"""Whether a library's function computes what the op on physical tokens of its kind computes, tried on a few random tokens."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

from sp_compile.ops import scans
from sp_compile.ops.dense_scans import KINDS, Function, Given

log = logging.getLogger(__name__)

DECLINED = "does not give what sharing knows by its name, tried on a few random tokens: it runs on rows, where nothing of it is shared"
"""What is said of a function or method that does not agree."""

_TOKENS = 11
_PER_HEAD = {"q": (1, _TOKENS, 4, 5), "k": (1, _TOKENS, 4, 5), "v": (1, _TOKENS, 4, 3)}
_SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "causal_conv1d": {"x": (1, 6, _TOKENS), "weight": (6, 4), "bias": (6,)},
    "ssd_scan": {
        "x": (1, _TOKENS, 4, 3),
        "dt": (1, _TOKENS, 4),
        "A": (4,),
        **dict.fromkeys(("B", "C"), (1, _TOKENS, 2, 5)),
        **dict.fromkeys(("D", "dt_bias"), (4,)),
    },
    "selective_scan": {
        **dict.fromkeys(("u", "delta"), (1, _TOKENS, 6)),
        "A": (6, 5),
        **dict.fromkeys(("B", "C"), (1, _TOKENS, 1, 5)),
        **dict.fromkeys(("D", "delta_bias"), (6,)),
    },
    "gated_delta_rule": {**_PER_HEAD, "g": (1, _TOKENS, 4), "beta": (1, _TOKENS, 4)},
    "kda": {**_PER_HEAD, "g": (1, _TOKENS, 4, 5), "beta": (1, _TOKENS, 4)},
    "linear_attention": {**_PER_HEAD, "decay": (4,)},
    "linear_scan": {"a": (1, _TOKENS, 5), "x": (1, _TOKENS, 5)},
}
_NORMS = tuple({"scale": 5**-0.5, "qk_l2norm": norm, "chunk": 4} for norm in (True, False))
OPTIONS: dict[str, tuple[Given, ...]] = {
    "causal_conv1d": ({"activation": None}, {"activation": "silu"}),
    "ssd_scan": (
        {"dt_softplus": True, "dt_min": 0.0, "dt_max": float("inf"), "chunk": 4},
        {"dt_softplus": False, "dt_min": 0.3, "dt_max": 0.9, "chunk": 4},
    ),
    "selective_scan": ({"delta_softplus": True, "chunk": 4}, {"delta_softplus": False, "chunk": 4}),
    "gated_delta_rule": _NORMS,
    "kda": _NORMS,
    "linear_attention": ({"scale": 0.5, "chunk": 4},),
    "linear_scan": ({},),
}
"""Options under which each kind is tried."""

_TOLERANCE = 1e-4
"""Relative; a function that scales, gates or decays otherwise is off by far more, float32 sums over eleven tokens by far less."""


def tensors(kind: str) -> Given:
    """Random float32 tensors of a kind by name, in ranges in which the recurrence is stable."""
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(size, generator=generator) for name, size in _SIZES[kind].items()}
    for name in ("A", "a", "g", "decay"):  # decays: log factors below zero
        if name in made:
            made[name] = -made[name].abs()
    if "beta" in made:
        made["beta"] = made["beta"].sigmoid()
    if kind in ("gated_delta_rule", "kda"):
        made["q"], made["k"] = made["q"] / 3, made["k"] / 3  # without a norm, large keys would make the rule diverge
    if kind == "ssd_scan" or kind == "selective_scan":
        made = {name: value.abs() if name in ("dt", "delta") else value for name, value in made.items()}
    return made


@contextlib.contextmanager
def calm() -> Iterator[None]:
    """A plain world to try a function in, whatever the caller has switched on: float32 on the CPU, real tensors, no autocast, no
    gradients."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            for kind in ("cpu", "cuda"):
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(torch.device("cpu"))
            yield
    finally:
        torch.set_default_dtype(dtype)


def agrees(kind: str, function: Function) -> bool:
    """Runs `function` (see `dense_scans.Function`) on the CPU and compares outputs and final states with the op. Never raises."""
    try:
        with calm():
            given = tensors(kind)
            prev = torch.arange(-1, _TOKENS - 1)
            end = torch.full((_TOKENS,), _TOKENS)
            for options in OPTIONS[kind]:
                want, state = scans.run(kind, given, options, prev, end, torch.tensor([_TOKENS - 1]))
                pairs: list[tuple[torch.Tensor, torch.Tensor | None]] = [(function({**given, **options}, False), want)]
                if KINDS[kind].state is not None:
                    pairs.append((function({**given, **options}, True), state))
                for got, expected in pairs:
                    assert expected is not None, "a state was asked for"
                    if got.shape != expected.shape or not bool(((got - expected).norm() <= _TOLERANCE * expected.norm()).item()):
                        return False
        return True
    except Exception:
        log.debug("a function for %s could not be tried", kind, exc_info=True)
        return False
