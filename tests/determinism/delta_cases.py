"""Inputs of the ops with a matrix state per head, for `test_replay.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sp_compile.layout import Forest
from sp_compile.ops.gated_delta_rule import gated_delta_rule_inputs
from sp_compile.ops.kda import kda_inputs
from sp_compile.ops.linear_attention import linear_attention_inputs

Arguments = dict[str, Any]


def _cases(
    op: torch._ops.OpOverload, make: Callable[..., Any], options: Arguments, *variants: Arguments
) -> Callable[[Forest], list[Arguments]]:
    names = [item.name for item in op._schema.arguments if not item.kwarg_only]

    def cases(forest: Forest) -> list[Arguments]:
        prev, end = forest.tensor("prev", "cpu"), forest.tensor("end", "cpu")
        final = torch.from_numpy(forest.node_start + forest.node_len - 1)
        made = [make(prev, end, final=final, states=1, **variant) for variant in variants]
        return [dict(zip(names, values, strict=True)) | options for values in made]

    return cases


_DTYPES = ({"dtype": torch.float32}, {"dtype": torch.bfloat16})
_DELTA: Arguments = {"scale": 0.25, "qk_l2norm": True, "chunk": 32}

CASES: dict[str, Callable[[Forest], list[Arguments]]] = {
    "gated_delta_rule": _cases(torch.ops.sp_compile.gated_delta_rule.default, gated_delta_rule_inputs, _DELTA, *_DTYPES),
    "kda": _cases(torch.ops.sp_compile.kda.default, kda_inputs, _DELTA, *_DTYPES),
    "linear_attention": _cases(
        torch.ops.sp_compile.linear_attention.default,
        linear_attention_inputs,
        {"scale": 0.25, "chunk": 32},
        *_DTYPES,
        {"decays": "decay"},
        {"decays": None},
    ),
}
