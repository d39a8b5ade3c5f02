"""One account per call of a compiled model: how many tokens there were, how many were computed, and what stood in the way."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sp_compile.debug import calls
from sp_compile.errors import SharedPrefixError
from sp_compile.layout.refine import refined_forest

if TYPE_CHECKING:
    from sp_compile.debug.regions import Bucket, Region, Variant
    from sp_compile.layout.forest import Forest
    from sp_compile.passes.runner import PassRecord


@dataclasses.dataclass(frozen=True)
class Account:
    """What happened in one call, summed over the graphs that ran in it (a model with graph breaks has several).

    Attributes:
        logical_tokens: tokens of the rows, dropped ones left out; counted once in every graph that ran.
        physical_tokens: tokens computed. A dense run computes every logical token.
        refined_tokens: by number of columns that values look ahead (multi-token prediction), the tokens computed for them.
        shared: at least one graph ran on physical tokens, and so did every other that was not refused.
        refused: why graphs could not share, with what to do about it.
        notes: why graphs that could share did not.
        unpacked: values that had to be expanded to rows before the end of the graph, each with the op that needs them.
        kernels: per op the implementation, and why not those that come before it.
        passes: what each graph rewrite did.
        regions: number of graphs that ran.
        compiles: how often the inner compiler has run so far for these graphs, in both forms.
        dense_compiles: those of the dense form.
        seconds: time these compilations and rewrites took.
    """

    logical_tokens: int = 0
    physical_tokens: int = 0
    refined_tokens: Mapping[int, int] = dataclasses.field(default_factory=dict)
    shared: bool = False
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unpacked: tuple[str, ...] = ()
    kernels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    passes: tuple[PassRecord, ...] = ()
    regions: int = 0
    compiles: int = 0
    dense_compiles: int = 0
    seconds: float = 0.0

    @property
    def sharing(self) -> float:
        """Logical over physical tokens; 1.0 for a dense run."""
        return self.logical_tokens / self.physical_tokens if self.physical_tokens else 1.0


class _Call:
    """An account that is being written. Holds plain data only: no tensors, graphs or regions."""

    def __init__(self, root: int) -> None:
        self.root = root
        self.logical = self.physical = self.shared = self.could = 0
        self.refined: dict[int, int] = {}
        self.refused: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self.unpacked: dict[str, None] = {}
        self.kernels: dict[str, dict[str, None]] = {}
        self.passes: dict[tuple[int, int], tuple[PassRecord, ...]] = {}
        self.compiles: dict[int, tuple[int, int, float]] = {}

    def account(self) -> Account:
        counts = list(self.compiles.values())
        return Account(
            logical_tokens=self.logical,
            physical_tokens=self.physical,
            refined_tokens=dict(sorted(self.refined.items())),
            shared=0 < self.shared == self.could,
            refused=tuple(self.refused),
            notes=tuple(self.notes),
            unpacked=tuple(self.unpacked),
            kernels={op: " | ".join(texts) for op, texts in self.kernels.items()},
            passes=tuple(one for records in self.passes.values() for one in records),
            regions=len(counts),
            compiles=sum(shared + dense for shared, dense, _ in counts),
            dense_compiles=sum(dense for _, dense, _ in counts),
            seconds=sum(seconds for _, _, seconds in counts),
        )


_KEY = "__sp_compile_call__"
_thread = threading.local()
_latest: list[_Call] = []


def last_run() -> Account:
    """The account of this thread's latest call of a compiled model; if there was none, of the latest call in the process.

    A call is that of the outermost module or compiled function, so what a wrapping module calls is summed. Recomputation during
    backward belongs to its forward and is not counted.

    Raises:
        SharedPrefixError: nothing compiled with the backend has run.
    """
    found = getattr(_thread, "call", None) or (_latest[0] if _latest else None)
    if found is None:
        raise SharedPrefixError(
            "last_run: expected a call of a model compiled with backend='shared_prefix', but none has run in this process. "
            "Call the compiled model first; under another backend nothing of this package runs."
        )
    account: Account = found.account()
    return account


def record(
    region: Region,
    values: Sequence[Any],
    *,
    forest: Forest | None = None,
    variant: Variant | None = None,
    refused: str = "",
    note: str = "",
    idle: bool = False,
) -> None:
    """Adds one run of a region to the account of the running call.

    Args:
        region: what runs; its compiled forms are counted.
        values: inputs of the captured graph; read for their sizes only.
        forest: the forest that was found, None after a refusal.
        variant: the rewritten form that runs; None: the dense form runs.
        refused: why sharing was refused.
        note: why nothing was shared although it could be.
        idle: the region holds nothing that could be shared; it adds no tokens.
    """
    from sp_compile.debug import regions

    if calls.in_backward():
        return
    history = regions.history(region)
    logical = forest.logical_tokens if forest is not None else 0 if idle else _dense_tokens(region.module, values)
    physical = forest.num_tokens if variant is not None and forest is not None else logical
    history.note(forest, logical, physical, refused or note)
    if not history.state:
        history.state = tuple(weakref.ref(value) for value in values if isinstance(value, torch.nn.Parameter))
    call = _running(region.number)
    call.logical += logical
    call.physical += physical
    call.could += not refused and not idle
    call.refused.update(dict.fromkeys(history.broken))
    if refused:
        call.refused[refused] = None
    if note:
        call.notes[note] = None
    if variant is None:
        history.dense_calls += 1
    else:
        history.shared_calls += 1
        call.shared += 1
        _describe(call, region, variant)
        if forest is not None and variant.context is not None:
            _count_refined(call, forest, variant.context.refined)
    call.compiles[region.number] = _compiles(region)


def _count_refined(call: _Call, forest: Forest, refined: Sequence[tuple[int, int]]) -> None:
    widest: dict[int, int] = {}
    for ahead, cut in refined:
        widest[ahead] = max(widest.get(ahead, 0), refined_forest(forest, ahead, cut).num_tokens)
    for ahead, tokens in widest.items():
        call.refined[ahead] = call.refined.get(ahead, 0) + tokens


def _running(number: int) -> _Call:
    """The account of the running call, a new one if this is its first region."""
    space = calls.space()
    found: object = space.get(_KEY) if space is not None else getattr(_thread, "loose", None)
    call = found if isinstance(found, _Call) and not (space is None and found.root == number) else _Call(number)
    if space is not None:
        space[_KEY] = call
    # Without a frame to tell calls apart, a call ends when its first region runs again or another call begins.
    _thread.loose = call if space is None else None
    _thread.call = call
    _latest[:] = [call]
    return call


def _describe(call: _Call, region: Region, variant: Variant) -> None:
    context = variant.context
    if context is None:
        return
    call.unpacked.update(dict.fromkeys(context.unpacked))
    for op, text in context.kernels.items():
        call.kernels.setdefault(op, {})[text] = None
    call.passes[region.number, id(variant)] = tuple(variant.records)


def _compiles(region: Region) -> tuple[int, int, float]:
    """Inner compilations of the shared and of the dense form so far, and the seconds of both and of the rewrites."""
    shared: list[Bucket] = [bucket for variant in (*region.variants, *region.packed_forms) for bucket in variant.buckets]
    seconds = _seconds(shared) + _seconds(region.dense_buckets)
    seconds += sum(one.seconds for variant in (*region.variants, *region.packed_forms) for one in variant.records)
    return len(shared), len(region.dense_buckets), seconds


def _seconds(buckets: Iterable[Bucket]) -> float:
    return sum(bucket.seconds for bucket in buckets)


def _dense_tokens(module: torch.fx.GraphModule, values: Sequence[Any]) -> int:
    """B * L of a call without a forest, from its ids or else its activations [B, L, ...]; 0 if it has neither."""
    from sp_compile.debug.regions import source_name

    activations = 0
    for node, value in zip((n for n in module.graph.nodes if n.op == "placeholder"), values, strict=True):
        source = source_name(node)
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter) or "_buffers" in source or "_parameters" in source:
            continue
        if value.dim() == 2 and not value.is_floating_point() and not value.is_complex():
            return value.numel()
        if value.dim() >= 3 and value.is_floating_point() and not activations:
            activations = value.shape[0] * value.shape[1]
    return activations
