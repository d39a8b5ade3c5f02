"""`sp_compile::dense_*`: a library's recurrence or causal convolution on dense rows, as one node of the captured graph.

Libraries write these functions as loops over chunks or columns, so tracing into one gives another graph for every length. Under this
backend such a call is captured as one op instead, which runs the library's own function, forward and backward. A graph that is not shared
therefore computes what the library computes; a graph that shares puts the op of the same name on physical tokens in its place.

Each kind has two ops: `dense_<kind>` gives the outputs, `dense_<kind>_state` the state after the last column. Their arguments are the
tensors of `KINDS`, then keyword options, then `dtype` of the result and `library`, the name under which the function is registered here.

A pattern names the dimensions of a tensor: `B` rows, `L` columns, any other letter a size, which is one number wherever it stands; `|`
separates alternatives, and a tensor whose pattern starts with `?` may be None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import StageError
from sp_compile.ops.numerics import owned
from sp_compile.ops.replay import autograd_inside_op

Given = dict[str, Any]
Function = Callable[[Given, bool], Tensor]
"""Called with the tensors and options of a kind by name, and whether the final state is wanted instead of the outputs."""


@dataclass(frozen=True)
class ScanKind:
    """One kind of recurrence.

    Attributes:
        name: of the op on physical tokens.
        tensors: argument name to pattern.
        options: schema text of the keyword options.
        divides: (size, divisor) letters, such as heads and groups of heads.
        result: name of the tensor whose shape the outputs have.
        uniform: tensors that the op on physical tokens takes in one dtype, which is also that of its outputs.
        state: the final state's shape from the tensors by name; None for a kind without a state op.
    """

    name: str
    tensors: Mapping[str, str]
    options: str
    divides: tuple[str, str] | None
    result: str
    uniform: tuple[str, ...]
    state: Callable[[Given], tuple[int | torch.SymInt, ...]] | None

    @property
    def dense(self) -> torch._ops.OpOverload:
        """The op that gives the outputs."""
        return getattr(torch.ops.sp_compile, f"dense_{self.name}").default  # type: ignore[no-any-return]

    @property
    def dense_state(self) -> torch._ops.OpOverload:
        """The op that gives the final state."""
        return getattr(torch.ops.sp_compile, f"dense_{self.name}_state").default  # type: ignore[no-any-return]


def _key_value_state(given: Given) -> tuple[int | torch.SymInt, ...]:
    k, v = given["k"], given["v"]
    return (v.shape[0], v.shape[2], k.shape[3], v.shape[3])


_NORMED = "float scale, bool qk_l2norm, int chunk"
_DELTA = {"q": "B L J K", "k": "B L J K", "v": "B L H V"}
_ATTENTION = {"q": "B L H K", "k": "B L H K", "v": "B L H V"}
_UNIFORM = tuple(_DELTA)
_SSD = {"x": "B L H P", "dt": "B L H", "A": "H", "B": "B L G N", "C": "B L G N", "D": "?H|H P", "dt_bias": "?H"}
_SELECTIVE = {"u": "B L D", "delta": "B L D", "A": "D N", "B": "B L G N", "C": "B L G N", "D": "?D", "delta_bias": "?D"}
KINDS = {
    kind.name: kind
    for kind in (
        ScanKind("causal_conv1d", {"x": "B C L", "weight": "C W", "bias": "?C"}, "str? activation", None, "x", ("x",), None),
        ScanKind(
            "ssd_scan", _SSD, "bool dt_softplus, float dt_min, float dt_max, int chunk", ("H", "G"), "x", ("x", "B", "C"),
            lambda given: (*(given["x"].shape[i] for i in (0, 2, 3)), given["B"].shape[3]),
        ),
        ScanKind(
            "selective_scan", _SELECTIVE, "bool delta_softplus, int chunk", ("D", "G"), "u", ("u", "B", "C"),
            lambda given: (given["u"].shape[0], *given["A"].shape),
        ),
        ScanKind("gated_delta_rule", {**_DELTA, "g": "B L H", "beta": "B L H"}, _NORMED, ("H", "J"), "v", _UNIFORM, _key_value_state),
        ScanKind("kda", {**_ATTENTION, "g": "B L H K", "beta": "B L H"}, _NORMED, None, "v", _UNIFORM, _key_value_state),
        ScanKind(
            "linear_attention", {**_ATTENTION, "g": "?B L H", "decay": "?H"}, "float scale, int chunk", None, "v", _UNIFORM,
            _key_value_state,
        ),
        ScanKind("linear_scan", {"a": "B L D", "x": "B L D"}, "", None, "x", ("x",), lambda given: given["x"].shape[::2]),
    )
}  # fmt: skip
"""Every kind by the name of its op on physical tokens."""

_LIBRARIES: dict[str, Function] = {}


def register_library(name: str, function: Function) -> None:
    """Makes `function` what the dense ops run for `library=name`; the first registration stays."""
    _LIBRARIES.setdefault(name, function)


def library(name: str) -> Function:
    """The function registered under a name. Raises StageError if there is none."""
    if name not in _LIBRARIES:
        raise StageError(f"dense scan: no library function {name!r} is registered; known are {', '.join(sorted(_LIBRARIES)) or 'none'}")
    return _LIBRARIES[name]


def _run(kind: ScanKind, tensors: Sequence[Tensor | None], options: Given, final: bool) -> Tensor:
    given: Given = dict(zip(kind.tensors, tensors, strict=True))
    given |= options
    dtype = given.pop("dtype")
    return library(given.pop("library"))(given, final).to(dtype)


def _fresh(value: Tensor, tensors: Sequence[Tensor | None]) -> Tensor:
    """A contiguous result that shares no memory with an argument."""
    value = value.contiguous()
    storages = {t.untyped_storage().data_ptr() for t in tensors if t is not None}
    return value.clone() if value.untyped_storage().data_ptr() in storages else value


def _gradients(
    kind: ScanKind, grad: Tensor, tensors: Sequence[Tensor | None], options: Given, needs: Sequence[bool], final: bool
) -> list[Tensor]:
    """Gradients of the needed tensors, by running the library's function again; an empty tensor for the others."""
    with autograd_inside_op():
        leaves = [t if t is None else t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        out = _run(kind, leaves, options, final)
        wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if need and leaf is not None]
        assert out.requires_grad, f"{options['library']}: the result of a function of {kind.name} depends on its arguments"
        found = torch.autograd.grad(out, wanted, grad, allow_unused=True)
    made = iter(zip(found, wanted, strict=True))
    result: list[Tensor] = []
    for need in needs:
        if not need:
            result.append(grad.new_empty(0))
            continue
        gradient, leaf = next(made)
        absent = torch.zeros_like(leaf, memory_format=torch.contiguous_format)
        result.append(absent if gradient is None else _fresh(gradient, [grad, *tensors]))
    return result


def _define(kind: ScanKind, final: bool) -> None:
    names = list(kind.tensors)
    arguments = ", ".join(f"Tensor{'?' if kind.tensors[name].startswith('?') else ''} {name}" for name in names)
    options = f"{kind.options}{', ' if kind.options else ''}ScalarType dtype, str library"
    name = f"sp_compile::dense_{kind.name}{'_state' if final else ''}"
    tags = (torch.Tag.needs_exact_strides,)

    def forward(*tensors: Any, **options: Any) -> Tensor:
        with torch.no_grad():
            return _fresh(_run(kind, tensors, options, final), tensors)

    def backward(grad: Tensor, needs: list[bool], *tensors: Any, **options: Any) -> list[Tensor]:
        return _gradients(kind, grad, tensors, options, needs, final)

    op = torch.library.custom_op(name, forward, mutates_args=(), schema=f"({arguments}, *, {options}) -> Tensor", tags=tags)
    back = torch.library.custom_op(
        f"{name}_backward",
        backward,
        mutates_args=(),
        schema=f"(Tensor grad, bool[] needs, {arguments}, *, {options}) -> Tensor[]",
        tags=tags,
    )

    def fake(*tensors: Any, **options: Any) -> Tensor:
        given = dict(zip(names, tensors, strict=True))
        like = given[kind.result]
        shape = kind.state(given) if final and kind.state is not None else like.shape
        return like.new_empty(shape, dtype=options["dtype"])  # type: ignore[no-any-return]

    def backward_fake(grad: Tensor, needs: list[bool], *tensors: Any, **options: Any) -> list[Tensor]:
        return [t.new_empty(t.shape) if need else grad.new_empty(0) for t, need in zip(tensors, needs, strict=True)]

    def setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Given, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.options = keyword_only_inputs

    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        needs = [bool(need) and t is not None for need, t in zip(ctx.needs_input_grad, tensors, strict=True)]
        given = back(owned(grad), needs, *tensors, **ctx.options)
        return tuple(g if need else None for g, need in zip(given, needs, strict=True))

    op.register_fake(fake)
    back.register_fake(backward_fake)
    op.register_autograd(gradients, setup_context=setup)


for _kind in KINDS.values():
    _define(_kind, False)
    if _kind.state is not None:
        _define(_kind, True)
