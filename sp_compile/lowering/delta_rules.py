"""Implementations of the ops with a matrix state per head, `gated_delta_rule`, `kda` and `linear_attention`, best first.

| name | where | forest tensors | what it is |
| --- | --- | --- | --- |
| chunked | any | chunks_exact_64 | matrix products inside of chunks whose grid starts at each node, states passed down the tree |
| chunked_replay | any | chunks_replay_{chunk} | the same on the grid of the dense run, with the chunk size that the op is given |
| reference | any | | the op's own recurrence, token by token |
"""

from __future__ import annotations

import torch

from sp_compile.kernels.delta_rule import gated as gated_delta_rule_chunked
from sp_compile.kernels.delta_rule import kda as kda_chunked
from sp_compile.kernels.linear_attention import chunked as linear_attention_chunked
from sp_compile.layout.chunks import chunk_tensor_name
from sp_compile.lowering.registry import Arguments, Implementation, register
from sp_compile.ops import gated_delta_rule, kda, linear_attention
from sp_compile.ops.recurrent import TOLERANCE

__all__ = [
    "TABLES",
    "gated_delta_rule",
    "gated_delta_rule_chunked",
    "kda",
    "kda_chunked",
    "linear_attention",
    "linear_attention_chunked",
]

# Tokens per chunk of the exact grid; heads of 128 gain from it, heads of 32 lose little.
EXACT = 64


def _known_dtype(arguments: Arguments) -> str | None:
    dtype = arguments["v"].dtype
    return None if dtype in TOLERANCE else f"dtype {dtype} is none of {', '.join(str(known) for known in TOLERANCE)}"


def _anything(arguments: Arguments) -> str | None:
    return None


def _exact(arguments: Arguments) -> tuple[str, ...]:
    return (chunk_tensor_name("exact", EXACT),)


def _replay(arguments: Arguments) -> tuple[str, ...]:
    return (chunk_tensor_name("replay", arguments["chunk"]),)


def _table(op: torch._ops.OpOverload, chunked: torch._ops.OpOverload) -> tuple[Implementation, ...]:
    return (
        Implementation("chunked", chunked, _known_dtype, deterministic=True, forest_tensors=_exact),
        Implementation("chunked_replay", chunked, _known_dtype, deterministic=True, forest_tensors=_replay),
        Implementation("reference", op, _anything, deterministic=True),
    )


_OPS = torch.ops.sp_compile
TABLES = {
    op: _table(op, chunked)
    for op, chunked in (
        (_OPS.gated_delta_rule.default, _OPS.gated_delta_rule_chunked.default),
        (_OPS.kda.default, _OPS.kda_chunked.default),
        (_OPS.linear_attention.default, _OPS.linear_attention_chunked.default),
    )
}

for _op, _implementations in TABLES.items():
    register(_op, *_implementations)
