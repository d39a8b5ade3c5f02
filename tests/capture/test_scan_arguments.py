"""Every argument of a library's recurrence is honoured or refused: what is captured gives what the function gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capture import test_hf_scans, test_kernel_scans
from tests.capture.recording import GRAPHS, captured, reasons, recording, sites
from tests.capture.test_hf_scans import FUNCTIONS, _arguments
from tests.capture.test_kernel_scans import (
    causal_conv1d_fn,
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_lightning_attn,
    chunk_retention,
    chunk_simple_gla,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_lightning_attn,
    fused_recurrent_simple_gla,
    mamba_chunk_scan_combined,
    mamba_inner_fn,
    mamba_split_conv1d_scan_combined,
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
DELTA = (*HEADS, -_x(2, 6, 2).abs(), _x(2, 6, 2).sigmoid())
KDA = (*HEADS, -_x(2, 6, 2, 4).abs(), _x(2, 6, 2).sigmoid())
NAMED = dict(zip(("q", "k", "v", "g", "beta"), DELTA, strict=True))
# z, x, B, C and dt of four heads of two in two groups with a state of two; the convolution runs over x, B and C
SPLIT = (_x(2, 6, 8 + 16 + 4), _x(16, 3), _x(16), _x(4), -_x(4).abs(), _x(4), 4)
GROUPS = {"headdim": 2, "ngroups": 2}
BESIDE = _x(2, 6, 2 * 3 + 8 + 16 + 4)
INNER = (_x(2, 16, 6), _x(8, 1, 3), _x(8), _x(2 + 2 * 4, 8) / 3, _x(8, 2), _x(5, 8), None, -_x(8, 4).abs())

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
    "split": (
        mamba_split_conv1d_scan_combined, "dense_ssd_scan", SPLIT,
        [GROUPS | change for change in (
            {}, {"dt_limit": (0.1, 0.5)}, {"return_final_states": True}, {"activation": None}, {"activation": "swish"}, {"ngroups": 1},
            {"rmsnorm_weight": _x(8)}, {"rmsnorm_weight": _x(8), "rmsnorm_eps": 0.5}, {"rmsnorm_weight": _x(8), "norm_before_gate": False},
            {"rmsnorm_weight": _x(8), "ngroups": 1}, {"norm_before_gate": False}, {"outproj_weight": _x(5, 8)},
            {"outproj_weight": _x(5, 8), "outproj_bias": _x(5)}, {"seq_idx": None, "initial_states": None},
            {"rmsnorm_weight": _x(8), "outproj_weight": _x(5, 8), "return_final_states": True},
        )],
    ),
    "split with a row of D": (
        mamba_split_conv1d_scan_combined, "dense_ssd_scan", (*SPLIT[:2], None, *SPLIT[3:5], _x(4, 2), 4), [{"ngroups": 2}, {"ngroups": 4}],
    ),
    "split beside an MLP": (
        mamba_split_conv1d_scan_combined, "dense_ssd_scan", (BESIDE, *SPLIT[1:]),
        [GROUPS, GROUPS | {"rmsnorm_weight": _x(8), "outproj_weight": _x(5, 8 + 3)}],
    ),
    "selective": (
        selective_scan_fn, "dense_selective_scan", SELECTIVE,
        [{}, {"D": _x(8)}, {"z": _x(2, 8, 6)}, {"delta_bias": _x(8), "delta_softplus": True}, {"return_last_state": True}],
    ),
    "inner": (
        mamba_inner_fn, "dense_selective_scan", INNER,
        [{}, {"D": _x(8)}, {"delta_bias": _x(8)}, {"delta_bias": _x(8), "delta_softplus": False}, {"B_proj_bias": _x(4)},
         {"C_proj_bias": _x(4)}, {"checkpoint_lvl": 0}, {"B": None, "C": None}],
    ),
    "inner without a bias of the convolution": (
        mamba_inner_fn, "dense_selective_scan", (*INNER[:2], None, *INNER[3:6], _x(5), INNER[7]), [{}],
    ),
    "delta": (
        chunk_gated_delta_rule, "dense_gated_delta_rule", DELTA,
        [{}, {"scale": 0.3}, {"use_qk_l2norm_in_kernel": True}, {"output_final_state": True},
         {"output_final_state": True, "state_v_first": True}, {"use_beta_sigmoid_in_kernel": True},
         {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}, {"use_gate_in_kernel": True, "A_log": _x(2)},
         {"use_gate_in_kernel": True, "A_log": _x(2), "dt_bias": _x(2) + 1}, {"A_log": _x(2), "dt_bias": _x(2) + 1}],
    ),
    "delta by steps": (
        lambda *given, **kwargs: fused_recurrent_gated_delta_rule(**dict(zip(NAMED, given, strict=True)), **kwargs),
        "dense_gated_delta_rule", DELTA,
        [{}, {"scale": 0.3}, {"gk": None, "gv": None}, {"output_final_state": True, "state_v_first": True},
         {"use_gate_in_kernel": True, "A_log": _x(2), "dt_bias": _x(2) + 1}],
    ),
    "kda": (
        chunk_kda, "dense_kda", KDA,
        [{}, {"scale": 0.3}, {"use_qk_l2norm_in_kernel": True}, {"output_final_state": True},
         {"output_final_state": True, "state_v_first": True}, {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
         {"use_gate_in_kernel": True, "A_log": _x(2)}, {"use_gate_in_kernel": True, "A_log": _x(2), "dt_bias": _x(8)}],
    ),
    "simple": (
        chunk_simple_gla, "dense_linear_attention", HEADS,
        [{}, {"g": -_x(2, 6, 2).abs()}, {"g_gamma": -_x(2).abs()}, {"scale": 0.3}, {"output_final_state": True},
         {"output_final_state": True, "state_v_first": True}, {"chunk_size": None}],
    ),
    "simple by steps": (
        fused_recurrent_simple_gla, "dense_linear_attention", HEADS,
        [{}, {"g": -_x(2, 6, 2).abs()}, {"g_gamma": -_x(2).abs()}, {"output_final_state": True, "reverse": False}],
    ),
    "lightning": (
        chunk_lightning_attn, "dense_linear_attention", (*HEADS, 1, 4), [{}, {"scale": 0.3}, {"output_final_state": True}],
    ),
    "lightning by steps": (
        fused_recurrent_lightning_attn, "dense_linear_attention", (*HEADS, 1, 4), [{}, {"scale": 0.3}, {"output_final_state": True}],
    ),
    "retention": (chunk_retention, "dense_linear_attention", HEADS, [{}, {"scale": 0.3}, {"output_final_state": True}]),
}  # fmt: skip


@pytest.mark.parametrize("name", PACKAGES)
def test_arguments_of_packages(name: str) -> None:
    function, op, args, changes = PACKAGES[name]
    for change in changes:
        torch._dynamo.reset()
        graph, got = captured(lambda *a, change=change: function(*a, **change), *args)
        assert len(sites(graph, op)) == 1, change
        assert not reasons(graph), change
        _same(got, function(*args, **change))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("conv", {"return_final_states": True}, "return_final_states"),
    ("ssd", {"initial_states": _x(2, 2, 4, 4)}, "initial_states"),
    ("split", GROUPS | {"initial_states": _x(2, 4, 2, 2)}, "initial_states"),
    ("inner", {"B": _x(2, 4, 6)}, "B"),
    ("inner", {"C": _x(2, 4, 6)}, "C"),
    ("inner", {"b_rms_weight": _x(4)}, "b_rms_weight"),
    ("inner", {"c_rms_weight": _x(4)}, "c_rms_weight"),
    ("inner", {"dt_rms_weight": _x(8)}, "dt_rms_weight"),
    ("delta", {"initial_state": _x(2, 2, 4, 3)}, "initial_state"),
    ("delta", {"something_new": 3}, "something_new"),
    ("delta by steps", {"gv": _x(2, 6, 2, 3)}, "gv"),
    ("kda", {"initial_state": _x(2, 2, 4, 3)}, "initial_state"),
    ("kda", {"safe_gate": True}, "safe_gate"),
    ("simple", {"initial_state": _x(2, 2, 4, 3)}, "initial_state"),
    ("simple", {"g": -_x(2, 6, 2).abs(), "g_gamma": -_x(2).abs()}, "both gates"),
    ("simple by steps", {"reverse": True}, "reverse"),
    ("lightning", {"initial_state": _x(2, 2, 4, 3)}, "initial_state"),
    ("retention", {"initial_state": _x(2, 2, 4, 3)}, "initial_state"),
    ("lightning by steps", {"reverse": True}, "reverse"),
]


@pytest.mark.parametrize(("name", "change", "word"), REFUSED, ids=[f"{name}-{word}" for name, _, word in REFUSED])
def test_what_is_not_known_is_refused_by_name(name: str, change: dict[str, Any], word: str) -> None:
    function, _, args, _ = PACKAGES[name]
    GRAPHS.clear()
    with pytest.warns(UserWarning, match=rf"was given {word}, which sharing does not know"):
        got = torch.compile(lambda *a: function(*a, **change), backend=recording)(*args)
    assert not [node for graph in GRAPHS for node in graph.graph.nodes if "dense_" in str(node.target)]
    _same(got, function(*args, **change))
