"""Inputs of the convolution and of the scans with diagonal decay, for `test_replay.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sp_compile.layout import Forest
from sp_compile.ops.causal_conv1d import causal_conv1d_inputs
from sp_compile.ops.linear_scan import linear_scan_inputs
from sp_compile.ops.selective_scan import selective_scan_inputs
from sp_compile.ops.ssd_scan import ssd_scan_inputs

Arguments = dict[str, Any]


def _named(op: torch._ops.OpOverload, values: Any, options: Arguments) -> Arguments:
    names = [item.name for item in op._schema.arguments if not item.kwarg_only]
    return dict(zip(names, values, strict=True)) | options


def _cases(op: torch._ops.OpOverload, make: Callable[..., Any], options: Arguments) -> Callable[[Forest], list[Arguments]]:
    def cases(forest: Forest) -> list[Arguments]:
        prev, end = forest.tensor("prev", "cpu"), forest.tensor("end", "cpu")
        final = torch.from_numpy(forest.node_start + forest.node_len - 1)
        return [_named(op, make(prev, end, final=final, dtype=dtype), options) for dtype in (torch.float32, torch.bfloat16)]

    return cases


def causal_conv1d_cases(forest: Forest) -> list[Arguments]:
    op = torch.ops.sp_compile.causal_conv1d.default
    prev = forest.tensor("prev", "cpu")
    return [_named(op, causal_conv1d_inputs(prev, dtype=dtype), {"activation": "silu"}) for dtype in (torch.float32, torch.bfloat16)]


CASES: dict[str, Callable[[Forest], list[Arguments]]] = {
    "causal_conv1d": causal_conv1d_cases,
    "ssd_scan": _cases(
        torch.ops.sp_compile.ssd_scan.default, ssd_scan_inputs, {"dt_softplus": True, "dt_min": 0.0, "dt_max": torch.inf, "chunk": 32}
    ),
    "selective_scan": _cases(torch.ops.sp_compile.selective_scan.default, selective_scan_inputs, {"delta_softplus": True, "chunk": 64}),
    "linear_scan": _cases(torch.ops.sp_compile.linear_scan.default, linear_scan_inputs, {}),
}
