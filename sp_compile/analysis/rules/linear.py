"""Matrix products: tokens may stand in row and batch dimensions; contracting over tokens is a mixer and has no rule here."""

from __future__ import annotations

from sp_compile.analysis.layouts import Dim, Kind, Layout
from sp_compile.analysis.rules.registry import CONTRACTS, Call, NotPackable, require_plain, rule

_CONTRACTS = "a matrix product contracts over tokens, which mixes them"
_CONVOLUTIONS = (
    "A convolution of each channel by itself (groups=C) is known with padding=W-1, W its width, if its first L outputs are cut right "
    "behind it, conv(x)[..., :L], and without padding if it reads F.pad(x, (W-1, 0))."
)
_ADVICE = "Attention written as softmax(q @ k.T + mask) @ v is recognised as a whole; other mixers need a rule."


def _product(call: Call, left: Layout, right: Layout, batch: tuple[Dim, ...]) -> tuple[Dim, ...]:
    if left.token_dim(-1) or right.token_dim(-2):
        raise NotPackable(_CONTRACTS, advice=_ADVICE)
    rows = left.may_be_rows(len(left.dims) - 1) or right.may_be_rows(len(right.dims) - 2)
    if rows and call.symbols.packed and left.has_tokens and right.has_tokens:
        raise NotPackable("a matrix product contracts over a dimension of size 1, which may be the rows of a packed call")
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


@rule("convolution.default")
def convolution(call: Call) -> Layout:
    """Token by token if its kernel has one column, or if the columns it runs over are within a token; others read other tokens."""
    base, weight = call.layout("input"), call.layout("weight")
    dims = [call.symbols.dim(size) for size in call.out.shape]
    if not any(layout.has_tokens or layout.reach.kind > Kind.COLUMN for layout in (base, weight)):
        return call.result(tuple(dims))
    along = [d for d in range(2, len(base.dims)) if base.token_dim(d)]
    single = all(size == 1 for size in (*call.arg("weight").shape[2:], *call.arg("stride")))
    single = single and not any(call.arg("padding")) and not call.arg("transposed")
    if weight.has_tokens or weight.reach.kind > Kind.UNIFORM or (along and not single):
        raise NotPackable("a convolution of tokens reads other ones, and is none that is known to be causal", advice=_CONVOLUTIONS)
    require_plain(call, call.arg("input"), [1, *(() if single else range(2, len(base.dims)))], "a convolution")
    return call.result((base.dims[0], dims[1], *(base.dims[2:] if single else dims[2:])))


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
