"""Implementations of the causal convolution and of the scans with diagonal decay, best first. All of them are plain torch code.

| op | name | forest tensors | what it is |
| --- | --- | --- | --- |
| causal_conv1d | shifted | | the pack, shifted; tokens behind a fork are gathered |
| ssd_scan | chunked | chunks_exact_64 | products inside of chunks, states along the tree of chunks; a grid anew at each node |
| ssd_scan | chunked_replay | chunks_replay_c | the same on the grid of the dense run, whose chunks have `chunk` tokens |
| selective_scan, linear_scan | wavefront | | a position of all rows at a time: the rounding of the dense sequential scan |
| all | reference | | the op's own body |
"""

from __future__ import annotations

import torch

from sp_compile.kernels.scan import causal_conv1d as conv_shifted
from sp_compile.kernels.scan import linear_scan as linear_wavefront
from sp_compile.kernels.scan import selective_scan as selective_wavefront
from sp_compile.kernels.scan import ssd_scan as ssd_chunked
from sp_compile.layout.chunks import chunk_tensor_name
from sp_compile.lowering.registry import Arguments, Implementation, Supports, register
from sp_compile.ops import causal_conv1d, linear_scan, selective_scan, ssd_scan
from sp_compile.ops.recurrent import TOLERANCE

__all__ = [
    "causal_conv1d",
    "conv_shifted",
    "linear_scan",
    "linear_wavefront",
    "selective_scan",
    "selective_wavefront",
    "ssd_chunked",
    "ssd_scan",
]

# Chunk of the exact grid: products of this size are efficient, and the quadratic part doesn't grow beyond the rest.
EXACT = 64


def known_dtype(name: str) -> Supports:
    """Supports calls whose tensor `name` has a dtype that implementations are tested with."""

    def supports(arguments: Arguments) -> str | None:
        dtype = arguments[name].dtype
        return None if dtype in TOLERANCE else f"dtype {dtype} is none of {', '.join(str(known) for known in TOLERANCE)}"

    return supports


def exact_chunks(arguments: Arguments) -> tuple[str, ...]:
    """The forest tensors of an implementation on the exact grid."""
    return (chunk_tensor_name("exact", EXACT),)


def replay_chunks(arguments: Arguments) -> tuple[str, ...]:
    """The forest tensors of an implementation on the dense run's grid, whose size is the option `chunk`."""
    return (chunk_tensor_name("replay", arguments["chunk"]),)


def _anything(arguments: Arguments) -> str | None:
    return None


_OPS = torch.ops.sp_compile

register(
    _OPS.causal_conv1d.default,
    Implementation("shifted", _OPS.causal_conv1d_shifted.default, known_dtype("x"), deterministic=True),
    Implementation("reference", _OPS.causal_conv1d.default, _anything, deterministic=True),
)
register(
    _OPS.ssd_scan.default,
    Implementation("chunked", _OPS.ssd_scan_chunked.default, known_dtype("x"), deterministic=True, forest_tensors=exact_chunks),
    Implementation("chunked_replay", _OPS.ssd_scan_chunked.default, known_dtype("x"), deterministic=True, forest_tensors=replay_chunks),
    Implementation("reference", _OPS.ssd_scan.default, _anything, deterministic=True),
)
register(
    _OPS.selective_scan.default,
    Implementation("wavefront", _OPS.selective_scan_wavefront.default, known_dtype("u"), deterministic=True),
    Implementation("reference", _OPS.selective_scan.default, _anything, deterministic=True),
)
register(
    _OPS.linear_scan.default,
    Implementation("wavefront", _OPS.linear_scan_wavefront.default, known_dtype("x"), deterministic=True),
    Implementation("reference", _OPS.linear_scan.default, _anything, deterministic=True),
)
