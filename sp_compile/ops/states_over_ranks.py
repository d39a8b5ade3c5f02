"""Recurrences on a pack that is spread over the ranks of a context parallel group: how states get from rank to rank.

Every recurrence here is linear in its state. After a token t of a rank the state is

    h_t = kept_t . h + own_t

where h is the state with which t's path came to the rank, own_t the state after t from zeros, and kept_t a factor per head or element, or
for delta rules a matrix [K, K] per head. Each rank finds both for the tokens that others ask for (`RankPlan.final`) by one run of the very
op: beside the state stands a second one, whose values are zero and which starts from ones, or from the identity. Both travel together once.
A rank composes what it received along the chain of each of its entries, and runs the op again from the states that enter.

The functions here are written once for values and for graphs: `call(op, *args, **options)` runs an op, or makes a node of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sp_compile.ops import layout_conversion, rows, scans  # noqa: F401  (register the ops)
from sp_compile.ops.dense_scans import KINDS, Given
from sp_compile.ops.numerics import accumulate_dtype

Call = Callable[..., Any]

TABLES = ("prev", "entered", "final", "chain", "state_send", "state_splits", "state_rows")
"""Tensors of a `RankPlan` that a recurrence reads, besides the ends of subtrees."""

_ATEN = torch.ops.aten
_END = 2**63 - 1


@dataclass(frozen=True)
class Beside:
    """Where what is kept of an entering state stands in a run of a kind of recurrence.

    Attributes:
        value: the tensor in which the recurrence is linear beside the state; zeros are added to its last dimension.
        dim: dimension of states [n, ...], along which what is kept stands behind the state.
        size: its size there, from the tensors by name.
        matrix: it is a matrix that multiplies states from the left, no factor.
        per_head: it is one factor for all elements of a head's state.
        twice: tensors that are repeated, with the dimension.
        absent: tensors that only outputs depend on.
    """

    value: str
    dim: int
    size: Callable[[Given], int]
    matrix: bool = False
    per_head: bool = False
    twice: Mapping[str, int] = field(default_factory=dict)
    absent: tuple[str, ...] = ()


BESIDE = {
    "ssd_scan": Beside("x", 2, lambda given: 1, per_head=True, absent=("D",)),
    "selective_scan": Beside(
        "u", 1, lambda given: given["u"].shape[2], twice={"delta": 2, "A": 0, "B": 2, "C": 2, "delta_bias": 0}, absent=("D",)
    ),
    "gated_delta_rule": Beside("v", 3, lambda given: given["k"].shape[3], matrix=True),
    "kda": Beside("v", 3, lambda given: given["k"].shape[3], matrix=True),
    "linear_attention": Beside("v", 3, lambda given: 1, per_head=True),
    "linear_scan": Beside("x", 1, lambda given: given["x"].shape[2], twice={"a": 2}),
}
"""Every kind of recurrence."""


@dataclass(frozen=True)
class SpreadScan:
    """One recurrence over ranks.

    Attributes:
        kind: of `BESIDE`.
        given: its tensors by name, values or nodes of a graph.
        like: the same as tensors, of which shapes, dtypes and devices are read.
        options: those of the op.
        tables: the tensors of `TABLES` and "end", values or nodes.
        call: see the module.
    """

    kind: str
    given: Given
    like: Given
    options: Mapping[str, Any]
    tables: Mapping[str, Any]
    call: Call

    @property
    def beside(self) -> Beside:
        return BESIDE[self.kind]

    @property
    def state(self) -> tuple[int, ...]:
        """Shape of one state."""
        shape = KINDS[self.kind].state
        assert shape is not None, f"{self.kind} has states"
        return tuple(int(size) for size in shape(self.like)[1:])

    @property
    def dtype(self) -> torch.dtype:
        """Of states."""
        return accumulate_dtype(self.like[self.beside.value].dtype)

    def leaving(self) -> Any:
        """[F, n] states from zeros and behind them what is kept, after the tokens that other ranks ask for."""
        beside, call, given = self.beside, self.call, dict(self.given)
        given[beside.value] = call(_ATEN.constant_pad_nd.default, given[beside.value], [0, self._size])
        given |= {name: call(_ATEN.cat.default, [given[name]] * 2, dim) for name, dim in beside.twice.items() if given[name] is not None}
        given |= dict.fromkeys(beside.absent)
        both, size = self._run(given, self._start(), self.tables["final"], 1), self.state[beside.dim - 1]
        own = call(_ATEN.slice.Tensor, both, beside.dim, 0, size)
        kept = call(_ATEN.slice.Tensor, both, beside.dim, size, size + self._size)
        for dim in range(2, 1 + len(self.state)) if beside.per_head else ():
            kept = call(_ATEN.slice.Tensor, kept, dim, 0, 1)
        return call(_ATEN.cat.default, [call(_ATEN.flatten.using_ints, part, 1) for part in (own, kept)], 1)

    def exchanged(self, leaving: Any, group: str) -> Any:
        """[R, n] the rows of all ranks' `leaving` that this rank reads."""
        tables, call = self.tables, self.call
        number = call(_ATEN.sym_size.int, tables["state_rows"], 0)
        return call(torch.ops.sp_compile.exchange_rows.default, leaving, tables["state_send"], tables["state_splits"], number, group)

    def entering(self, received: Any, links: int) -> Any:
        """[1 + E, ...] external states: zeros, and the state after each entry.

        Args:
            received: see `exchanged`. It is read on every rank, also where there is nothing in it: a rank whose backward left the exchange
                out would keep the others waiting.
            links: width of `chain`, a power of two. In float64, which autocast leaves alone, neighbours are composed until one is left.
        """
        call, beside = self.call, self.beside
        wide = call(torch.ops.sp_compile.unpack.default, received, self.tables["chain"])
        size, end = math.prod(self.state), math.prod(self.state) + math.prod(self._kept)
        if links > 1:
            wide = call(_ATEN.to.dtype, wide, torch.float64)
        own = call(_ATEN.unflatten.int, call(_ATEN.slice.Tensor, wide, 2, 0, size), 2, list(self.state))
        kept = call(_ATEN.unflatten.int, call(_ATEN.slice.Tensor, wide, 2, size, end), 2, list(self._kept)) if links > 1 else None
        apply = _ATEN.matmul.default if beside.matrix else _ATEN.mul.Tensor
        while links > 1:
            after = self._newer(kept)
            own = call(_ATEN.add.Tensor, call(apply, after, self._older(own)), self._newer(own))
            links //= 2
            if links > 1:
                kept = call(apply, after, self._older(kept))
        states = call(_ATEN.to.dtype, call(_ATEN.squeeze.dim, own, 1), self.dtype)
        return call(_ATEN.constant_pad_nd.default, states, [0, 0] * len(self.state) + [1, 0])

    def outputs(self, entering: Any) -> Any:
        """The results of the rank's tokens."""
        return self._run(self.given, entering, None, 0)

    @property
    def _kept(self) -> tuple[int, ...]:
        """Shape of what is kept, of one state."""
        shape, dim = self.state, self.beside.dim - 1
        return (shape[0], 1, 1) if self.beside.per_head else (*shape[:dim], self._size, *shape[dim + 1 :])

    @property
    def _size(self) -> int:
        return int(self.beside.size(self.like))

    def _run(self, given: Given, initial: Any, final: Any, result: int) -> Any:
        tensors = tuple(given[name] for name in KINDS[self.kind].tensors)
        both = self.call(scans.op_of(self.kind), *tensors, self.tables["prev"], self.tables["end"], initial, final, **self.options)
        return self.call(operator.getitem, both, result)

    def _start(self) -> Any:
        """External states [1 + E, ...] of zeros, and beside them ones or identities; without an entry nothing is kept."""
        beside, call, shape = self.beside, self.call, self.state
        kept = (*shape[: beside.dim - 1], self._size, *shape[beside.dim :])
        entered = call(_ATEN.to.dtype, self.tables["entered"], self.dtype)
        entered = call(_ATEN.view.default, entered, [-1] + [1] * len(shape))
        ones = call(_ATEN.expand.default, entered, [-1, *kept])
        if beside.matrix:
            device = self.like[beside.value].device
            ones = call(_ATEN.mul.Tensor, ones, call(_ATEN.eye.default, self._size, dtype=self.dtype, device=device))
        zeros = call(_ATEN.expand.default, call(_ATEN.mul.Tensor, entered, 0), [-1, *shape])
        return call(_ATEN.cat.default, [zeros, ones], beside.dim)

    def _older(self, values: Any) -> Any:
        """[E, links / 2, ...] the older ones of neighbours."""
        return self.call(_ATEN.slice.Tensor, values, 1, 0, _END, 2)

    def _newer(self, values: Any) -> Any:
        """The other ones."""
        return self.call(_ATEN.slice.Tensor, values, 1, 1, _END, 2)
