"""Matrix products: tokens may stand in row and batch dimensions; contracting over tokens is a mixer and has no rule here."""

from __future__ import annotations

from sp_compile.analysis.layouts import Dim, Kind, Layout
from sp_compile.analysis.rules.registry import CONTRACTS, Call, NotPackable, rule

_CONTRACTS = "a matrix product contracts over tokens, which mixes them"
_ADVICE = "Attention written as softmax(q @ k.T + mask) @ v is recognised as a whole; other mixers need a rule."


def _product(call: Call, left: Layout, right: Layout, batch: tuple[Dim, ...]) -> tuple[Dim, ...]:
    if left.token_dim(-1) or right.token_dim(-2):
        raise NotPackable(_CONTRACTS, advice=_ADVICE)
    if left.token_dim(-2) and right.token_dim(-1):
        return (*batch, left.dims[-2], right.dims[-1])
    return (*batch, left.dims[-2], right.dims[-1])


@rule("mm.default", "matmul.default")
def mm(call: Call) -> Layout:
    left, right = call.layout_of(call.args[0]), call.layout_of(call.args[1])
    if len(left.dims) != 2 or len(right.dims) != 2:
        raise NotPackable("a matrix product of this rank has no rule")
    return call.result(_product(call, left, right, ()))


@rule("addmm.default")
def addmm(call: Call) -> Layout:
    bias, left, right = (call.layout_of(call.args[i]) for i in range(3))
    dims = _product(call, left, right, ())
    _bias(bias, dims)
    return call.result(dims)


@rule("bmm.default")
def bmm(call: Call) -> Layout:
    left, right = call.layout_of(call.args[0]), call.layout_of(call.args[1])
    return call.result(_product(call, left, right, (_batch(left, right),)))


@rule("baddbmm.default")
def baddbmm(call: Call) -> Layout:
    bias, left, right = (call.layout_of(call.args[i]) for i in range(3))
    dims = _product(call, left, right, (_batch(left, right),))
    _bias(bias, dims)
    return call.result(dims)


@rule("mv.default")
def mv(call: Call) -> Layout:
    matrix, vector = call.layout_of(call.args[0]), call.layout_of(call.args[1])
    if matrix.token_dim(-1) or vector.token_dim(0):
        raise NotPackable(_CONTRACTS, advice=_ADVICE)
    return call.result((matrix.dims[0],))


@rule("addmv.default")
def addmv(call: Call) -> Layout:
    bias, matrix, vector = (call.layout_of(call.args[i]) for i in range(3))
    if matrix.token_dim(-1) or vector.token_dim(0):
        raise NotPackable(_CONTRACTS, advice=_ADVICE)
    _bias(bias, (matrix.dims[0],))
    return call.result((matrix.dims[0],))


@rule("linear.default")
def linear(call: Call) -> Layout:
    base, weight = call.layout_of(call.args[0]), call.layout_of(call.args[1])
    if base.token_dim(-1) or weight.has_tokens:
        raise NotPackable(_CONTRACTS, advice=_ADVICE)
    return call.result((*base.dims[:-1], *weight.dims[:-1]))


def _batch(left: Layout, right: Layout) -> Dim:
    if left.dims[0] != right.dims[0]:
        raise NotPackable("a batched matrix product pairs different tokens")
    return left.dims[0]


def _bias(bias: Layout, dims: tuple[Dim, ...]) -> None:
    lead = len(dims) - len(bias.dims)
    for place, dim in enumerate(bias.dims):
        if dim not in ((), dims[place + lead]):
            raise NotPackable("the added term carries other tokens than the product")


def divergence(call: Call) -> list[Layout]:
    """`sp_compile::token_kl` without an index: one number for each token, of its own values alone."""
    values, reference = call.layout("values"), call.layout("reference")
    if call.arg("index") is not None or values.dims[:-1] != reference.dims[:-1]:
        raise NotPackable("the divergence of a token from another one's reference")
    held = [call.layout_of(tensor) for tensor in call.tensors if tensor is not call.arg("values") and tensor is not call.arg("reference")]
    if values.token_dim(-1) or reference.token_dim(-1) or any(one.has_tokens or one.reach.kind > Kind.UNIFORM for one in held):
        raise NotPackable("a divergence over heads that depend on tokens")
    return [call.result(values.dims[:-1]) for _ in call.outputs]


CONTRACTS["sp_compile::token_kl"] = divergence
