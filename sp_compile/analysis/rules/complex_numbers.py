"""Complex numbers as pairs of real ones, as rotary positions are written by some."""

from __future__ import annotations

from sp_compile.analysis.layouts import Layout
from sp_compile.analysis.rules.registry import Call, broadcast, rule


@rule("view_as_complex.default", "view_as_complex_copy.default")
def view_as_complex(call: Call) -> Layout:
    """[..., 2] -> [...]; the last dimension is the pair, hence never tokens."""
    base = call.layout_of(call.tensors[0])
    return call.result(base.dims[:-1])


@rule("view_as_real.default", "view_as_real_copy.default")
def view_as_real(call: Call) -> Layout:
    base = call.layout_of(call.tensors[0])
    return call.result((*base.dims, (2,)))


@rule("polar.default", "complex.default")
def from_parts(call: Call) -> Layout:
    left, right = call.layout_of(call.args[0]), call.layout_of(call.args[1])
    return call.result(broadcast(call, list(call.args[:2]), max(len(left.dims), len(right.dims))))
