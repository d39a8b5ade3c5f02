"""Torch functions that reduce over all tokens of a value, as the analysis and the pass `expand_multiplicities` read them.

Such a result is one number, or a few, for the whole batch: equal for all rows, so every token may use it. It stays right on physical
tokens if each of them counts as often as rows pass through it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from sp_compile.analysis.facts import Constant
from sp_compile.analysis.layouts import UNIFORM, Axis, Dim, Kind, Layout, Span, Symbols
from sp_compile.analysis.memory import storage_of
from sp_compile.analysis.permutations import Check, Permuted

LayoutOf = Callable[[Any], Layout]


@dataclasses.dataclass(frozen=True)
class TokenSum:
    """One call that reduces over tokens.

    Attributes:
        name: of the function, in-place ones without their underscore.
        given: its arguments by name.
        dims: the reduced dimensions of the operand; for scattered sums the one that is scattered.
        inplace: the call writes to its first argument.
    """

    name: str
    given: Mapping[str, Any]
    dims: tuple[int, ...]
    inplace: bool = False

    @property
    def operand(self) -> Any:
        """What is summed over; of a scattered sum, the places."""
        return self.given["index"] if self.name in SCATTERS else self.given["input"]


SCATTERS = frozenset({"scatter_add", "index_add"})

_DIMS: tuple[str, ...] = ("input", "dim", "keepdim")
_SIGNATURES: dict[str, tuple[str, ...]] = {
    "sum": (*_DIMS, "dtype"), "nansum": (*_DIMS, "dtype"), "mean": (*_DIMS, "dtype"),
    "amax": _DIMS, "amin": _DIMS, "any": _DIMS, "all": _DIMS, "logsumexp": _DIMS,
    "max": ("input",), "min": ("input",), "count_nonzero": ("input", "dim"),
    "var": ("input", "dim"), "std": ("input", "dim"), "var_mean": ("input", "dim"), "std_mean": ("input", "dim"),
    "norm": ("input", "p", "dim", "keepdim", "dtype"), "vector_norm": ("input", "ord", "dim", "keepdim", "dtype"),
    "bincount": ("input", "weights", "minlength"), "histc": ("input", "bins", "min", "max"),
    "scatter_add": ("base", "dim", "index", "src"), "index_add": ("base", "dim", "index", "src"),
}  # fmt: skip
_KEYWORDS: dict[str, tuple[str, ...]] = {
    "var": ("correction", "keepdim", "unbiased"), "std": ("correction", "keepdim", "unbiased"),
    "sum": ("dtype",), "mean": ("dtype",), "index_add": ("alpha",),
}  # fmt: skip
_ALIASES = {"self": "input", "x": "input", "source": "src", "axis": "dim", "keepdims": "keepdim", "A": "input"}
_FUNCTIONS: dict[Any, str] = {getattr(torch, name): name for name in _SIGNATURES if hasattr(torch, name)}
_FUNCTIONS |= {getattr(torch.Tensor, name): name for name in _SIGNATURES if hasattr(torch.Tensor, name)}
_FUNCTIONS |= {getattr(torch.Tensor, name + "_"): name + "_" for name in SCATTERS}
_FUNCTIONS[torch.linalg.vector_norm] = "vector_norm"
_METHODS = frozenset({*_SIGNATURES, *(name + "_" for name in SCATTERS)}) - {"vector_norm", "var_mean", "std_mean"}


def read(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], rank_of: Callable[[Any], int]) -> TokenSum | None:
    """A call of a captured graph as a reduction, or None if it is none or is called in a way that is not known here.

    Args:
        target, args, kwargs: of a node that calls a function, or a method by its name; operands may be nodes or tensors.
        rank_of: the number of dimensions of an operand.
    """
    found = (target if target in _METHODS else None) if isinstance(target, str) else _FUNCTIONS.get(target)
    if found is None or "out" in kwargs:
        return None
    name = found.removesuffix("_")
    names = _SIGNATURES[name]
    if len(args) > len(names):
        return None
    given: dict[str, Any] = dict(zip(names, args, strict=False))
    for key, value in kwargs.items():
        key = _ALIASES.get(key, key)
        key = "base" if name in SCATTERS and key == "input" else key
        if key in given or key not in (*names, *_KEYWORDS.get(name, ())):
            return None
        given[key] = value
    call = TokenSum(name, given, (), found.endswith("_"))
    if name in SCATTERS:
        if not all(key in given for key in names) or not isinstance(given["dim"], int):
            return None
        return dataclasses.replace(call, dims=(given["dim"] % max(rank_of(given["base"]), 1),))
    if "input" not in given:
        return None
    dims = given.get("dim")
    if isinstance(dims, bool) or not (dims is None or isinstance(dims, int) or _integers(dims)):
        return None
    rank = rank_of(given["input"])
    asked = list(range(rank)) if dims is None or dims in ((), []) else [dims] if isinstance(dims, int) else list(dims)
    return dataclasses.replace(call, dims=tuple(sorted({d % max(rank, 1) for d in asked}))) if _is_plain(call) else None


def _integers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, int) for item in value)


def _is_plain(call: TokenSum) -> bool:
    """Whether the arguments besides the tokens are constants of a known kind."""
    given = call.given
    if not isinstance(given.get("keepdim", False), bool) or not isinstance(given.get("dtype"), torch.dtype | None):
        return False
    if call.name in ("norm", "vector_norm"):
        order = given.get("p", "fro") if call.name == "norm" else given.get("ord", 2)
        return (
            order is None or order == "fro" or (isinstance(order, int | float) and not isinstance(order, bool))
        ) and "dtype" not in given
    if call.name == "histc":
        return all(isinstance(given.get(key, 0), int | float) for key in ("bins", "min", "max"))
    if call.name == "bincount":
        return isinstance(given.get("minlength", 0), int)
    return call.name not in ("var_mean", "std_mean")


def order_of(call: TokenSum) -> float:
    """The order p of a norm; of a matrix as a whole, the Frobenius norm is that of order 2."""
    order = call.given.get("p", "fro") if call.name == "norm" else call.given.get("ord", 2)
    return 2.0 if order in (None, "fro") else float(order)


def correction_of(call: TokenSum) -> float:
    if "unbiased" in call.given:
        return 1.0 if call.given["unbiased"] else 0.0
    found = call.given.get("correction", 1)
    return 1.0 if found is None else float(found)


def covers(layout: Layout, dims: tuple[int, ...], symbols: Symbols) -> bool:
    """Whether the given dimensions hold every token, each equally often, and the others hold none."""
    if layout.is_rows or not layout.has_tokens or any(layout.token_dim(d) for d in range(len(layout.dims)) if d not in dims):
        return False
    if symbols.packed and any(dim == () for d, dim in enumerate(layout.dims) if d not in dims):
        return False  # that may be the rows, which are reduced one by one then
    reduced = _factors(tuple(factor for d in dims for factor in layout.dims[d]))
    factors = [Axis.COLUMNS if isinstance(factor, Span) and not symbols.packed else factor for factor in reduced]
    axes = [factor for factor in factors if isinstance(factor, Axis)]
    wanted = [Axis.COLUMNS] if symbols.packed else [Axis.BATCH, Axis.COLUMNS]
    return sorted(map(repr, axes)) == sorted(map(repr, wanted)) and all(isinstance(f, Axis | int) for f in factors)


def _factors(dim: Dim) -> list[Any]:
    found: list[Any] = []
    for factor in dim:
        found += _factors(factor.inner) if isinstance(factor, Permuted) else [factor]
    return found


def result(call: TokenSum, layout_of: LayoutOf, symbols: Symbols) -> Layout | None:
    """The layout of a reduction over all tokens of values that rows share, its dims left open, or None if it is not one."""
    operand = layout_of(call.operand)
    dims = (0,) if call.name == "index_add" else call.dims
    if not covers(operand, dims, symbols) or operand.reach.kind > Kind.TOKENS:
        return None
    entry = operand.entry
    if call.name in SCATTERS:
        base, src = layout_of(call.given["base"]), call.given["src"]
        if base.has_tokens or base.reach.kind > Kind.UNIFORM or not isinstance(src, torch.Tensor):
            return None
        added = layout_of(src)
        if added.reach.kind > Kind.TOKENS or not (isinstance(added.fact, Constant) or _lines_up(call, operand, added)):
            return None
        entry = entry and base.entry and added.entry
    given = call.given.get("weights")
    if given is not None:
        if not isinstance(given, torch.Tensor) or layout_of(given).dims != operand.dims or layout_of(given).reach.kind > Kind.TOKENS:
            return None
        entry = entry and layout_of(given).entry
    return Layout((), UNIFORM, entry=entry)


def _lines_up(call: TokenSum, places: Layout, added: Layout) -> bool:
    """Whether what is added stands in the order of the places."""
    if call.name == "scatter_add":
        return added.dims == places.dims
    at = call.dims[0]
    return (
        len(added.dims) > at and added.dims[at] == places.dims[0] and not any(added.token_dim(d) for d in range(len(added.dims)) if d != at)
    )


def run_call(runner: Any, target: Any, args: Any, kwargs: Any, run: Callable[[Any, Any, Any], Any]) -> Any:
    """Runs one node's call on fakes: a reduction over all tokens gives a value that every row shares, others are judged by what they do.

    Args:
        runner: the analysis' interpreter, with `mode` and `fake_mode`.
        target, args, kwargs: the call.
        run: runs it.
    """
    mode = runner.mode
    found = read(target, args, kwargs, lambda value: value.dim() if isinstance(value, torch.Tensor) else 0)
    layout = None
    if found is not None and isinstance(found.operand, torch.Tensor):
        layout = result(found, lambda value: mode.layout_of(value).folded, mode.symbols)
    if layout is None or found is None:
        return run(target, args, kwargs)
    mode.info.token_sum = found
    if found.inplace:
        return _write(runner, found.given["base"], layout, lambda: run(target, args, kwargs))
    value = run(target, args, kwargs)
    if mode.info.failure is not None or mode.layout_of(value).is_rows or isinstance(mode.layout_of(value).fact, Check):
        mode.info.failure = None
        mode.give(value, layout.with_(dims=tuple(mode.symbols.dim(size) for size in value.shape)))
    return value


def _write(runner: Any, base: torch.Tensor, layout: Layout, run: Callable[[], Any]) -> Any:
    """Adds a reduction in place to memory that holds no tokens."""
    mode = runner.mode
    before, storage = mode.layout_of(base), storage_of(base)
    with _disable_current_modes(), runner.fake_mode:
        value = run()
    mode.stored[storage].write(layout)
    for written in (base, value):
        mode.give(written, before.with_(entry=before.entry and layout.entry, fact=None))
    mode.info.writes.add(storage)
    return value
