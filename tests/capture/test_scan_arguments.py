"""Every argument of a library's recurrence is honoured or refused: what is captured gives what the function gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capture import test_hf_scans, test_kernel_scans
from tests.capture.recording import captured, reasons, sites
from tests.capture.test_hf_scans import FUNCTIONS, _arguments
from tests.capture.test_kernel_scans import (
    causal_conv1d_fn,
    chunk_gated_delta_rule,
    chunk_kda,
    mamba_chunk_scan_combined,
    selective_scan_fn,
)

scanned = test_hf_scans.scanned
packages = test_kernel_scans.packages

TRANSFORMERS: dict[str, list[dict[str, Any]]] = {
    "conv": [{"activation": None}, {"activation": "swish"}, {"activation": "sigmoid"}, {"seq_idx": None}],
    "ssd": [
        {"D": None, "dt_bias": None}, {"dt_softplus": False, "dt_bias": None}, {"dt_limit": (0.0, 0.5)}, {"dt_limit": (0.0, float("inf"))},
        {"return_final_states": True, "D": None}, {"initial_states": None},
    ],
    "selective": [
        {"delta_softplus": False}, {"delta_bias": torch.linspace(-1, 1, 6)},
        {"delta_bias": torch.linspace(-1, 1, 6), "return_last_state": True},
    ],
    "delta": [
        {"chunk_size": 64}, {"use_qk_l2norm_in_kernel": False}, {"output_final_state": True, "use_qk_l2norm_in_kernel": False},
        {"initial_state": None},
    ],
    "kda": [{"chunk_size": 64}, {"use_qk_l2norm_in_kernel": False}, {"output_final_state": True}, {"initial_state": None}],
}  # fmt: skip


def _same(got: Any, want: Any) -> None:
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True)
    for one, other in pairs:
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_of_transformers(name: str) -> None:
    function, op = FUNCTIONS[name]
    args, kwargs = _arguments(name)
    for change in TRANSFORMERS[name]:
        given = kwargs | change
        graph, got = captured(lambda *a, given=given: function(*a, **given), *args)
        assert len(sites(graph, op)) == 1, change
        assert not reasons(graph), change
        _same(got, function(*args, **given))


def _x(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


HEADS = (_x(2, 6, 2, 4), _x(2, 6, 2, 4) / 2, _x(2, 6, 2, 3))
SSD = (_x(2, 6, 2, 4), _x(2, 6, 2).abs(), -_x(2).abs(), _x(2, 6, 1, 4), _x(2, 6, 1, 3 + 1), 4)
SELECTIVE = (_x(2, 8, 6), _x(2, 8, 6).abs(), -_x(8, 4).abs(), _x(2, 4, 6), _x(2, 4, 6))
PACKAGES: dict[str, tuple[Any, str, tuple[Any, ...], list[dict[str, Any]]]] = {
    "conv": (
        causal_conv1d_fn, "dense_causal_conv1d", (_x(2, 8, 6), _x(8, 3)),
        [{}, {"bias": _x(8)}, {"activation": "silu"}, {"activation": "swish", "bias": _x(8)}],
    ),
    "ssd": (
        mamba_chunk_scan_combined, "dense_ssd_scan", SSD,
        [{}, {"D": _x(2)}, {"z": _x(2, 6, 2, 4)}, {"dt_bias": _x(2), "dt_softplus": True}, {"dt_limit": (0.1, 0.5)},
         {"return_final_states": True, "z": _x(2, 6, 2, 4)}],
    ),
    "selective": (
        selective_scan_fn, "dense_selective_scan", SELECTIVE,
        [{}, {"D": _x(8)}, {"z": _x(2, 8, 6)}, {"delta_bias": _x(8), "delta_softplus": True}, {"return_last_state": True}],
    ),
    "delta": (
        chunk_gated_delta_rule, "dense_gated_delta_rule", (*HEADS, -_x(2, 6, 2).abs(), _x(2, 6, 2).sigmoid()),
        [{}, {"scale": 0.3}, {"use_qk_l2norm_in_kernel": True}, {"output_final_state": True}],
    ),
    "kda": (
        chunk_kda, "dense_kda", (*HEADS, -_x(2, 6, 2, 4).abs(), _x(2, 6, 2).sigmoid()),
        [{}, {"scale": 0.3}, {"use_qk_l2norm_in_kernel": True}, {"output_final_state": True}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKAGES)
def test_arguments_of_packages(name: str) -> None:
    function, op, args, changes = PACKAGES[name]
    for change in changes:
        graph, got = captured(lambda *a, change=change: function(*a, **change), *args)
        assert len(sites(graph, op)) == 1, change
        assert not reasons(graph), change
        _same(got, function(*args, **change))
