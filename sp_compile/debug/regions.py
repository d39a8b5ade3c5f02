"""The compiled graphs of this process: a number for each, and what has been seen of them. Keeps none of them alive."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed
import torch.fx

from sp_compile.capture.graphs import placeholders
from sp_compile.capture.polyfills import take_told
from sp_compile.errors import CannotShare
from sp_compile.layout.forest import Forest
from sp_compile.options import Options
from sp_compile.passes.runner import PassRecord
from sp_compile.passes.stage import Context


class Bucket(Protocol):
    """What is read of `inner.Bucket`."""

    @property
    def symbols(self) -> Mapping[str, Any]: ...

    @property
    def guards(self) -> Sequence[Any]: ...

    @property
    def seconds(self) -> float: ...

    @property
    def exact(self) -> Mapping[str, int] | None: ...


class Variant(Protocol):
    """What is read of `region.Variant`."""

    @property
    def context(self) -> Context | None: ...

    @property
    def records(self) -> Sequence[PassRecord]: ...

    @property
    def refusal(self) -> CannotShare | None: ...

    @property
    def buckets(self) -> Sequence[Bucket]: ...


class Region(Protocol):
    """What is read of `region.Region`: one captured graph and its compiled forms."""

    @property
    def number(self) -> int: ...

    @property
    def module(self) -> torch.fx.GraphModule: ...

    @property
    def options(self) -> Options: ...

    @property
    def variants(self) -> Sequence[Variant]: ...

    @property
    def packed_forms(self) -> Sequence[Variant]: ...

    @property
    def dense_buckets(self) -> Sequence[Bucket]: ...


@dataclasses.dataclass
class History:
    """What a region has done so far.

    Attributes:
        shared_calls, dense_calls: calls by the form that ran.
        sizes: rows, columns, logical and physical tokens of the latest call; rows and columns are None where no forest was found.
        said: why the latest call ran densely, or an empty string.
        broken: why a call is refused at which the graph breaks.
        state: weak references to the parameters the region was called with.
    """

    shared_calls: int = 0
    dense_calls: int = 0
    sizes: tuple[int | None, int | None, int, int] = (None, None, 0, 0)
    said: str = ""
    broken: tuple[str, ...] = ()
    state: tuple[weakref.ref[torch.nn.Parameter], ...] = ()

    @property
    def calls(self) -> int:
        return self.shared_calls + self.dense_calls

    def note(self, forest: Forest | None, logical: int, physical: int, said: str) -> None:
        self.sizes = (forest.num_rows if forest else None, forest.num_columns if forest else None, logical, physical)
        self.said = said


_KEY = "sp_compile_region"
_lock = threading.Lock()
_fresh = itertools.count()
_rewrites: collections.Counter[int] = collections.Counter()
_histories: weakref.WeakKeyDictionary[Region, History] = weakref.WeakKeyDictionary()


def number_of(module: torch.fx.GraphModule) -> int:
    """The number of a captured graph: 0, 1, ... in the order in which they were met in this process.

    It is kept on the graph's inputs, whose metadata every copy and every form of the graph inherits.
    """
    inputs = placeholders(module.graph)
    with _lock:
        number = next((node.meta[_KEY] for node in inputs if _KEY in node.meta), None)
        if number is None:
            number = next(_fresh)
            for node in inputs:
                node.meta[_KEY] = number
        return int(number)


def next_rewrite(number: int) -> int:
    """How often graph `number` was rewritten before: once for each way to read the sizes of its inputs."""
    with _lock:
        _rewrites[number] += 1
        return _rewrites[number] - 1


def register(region: Region, module: torch.fx.GraphModule) -> int:
    """Makes a region known and gives its number."""
    number = number_of(module)
    reasons = take_told()
    goes_on = bool(getattr(getattr(module, "compile_subgraph_reason", None), "graph_break", False))
    advice = "The graph breaks at that call, and what follows it has no token ids."
    with _lock:
        _histories[region] = History(broken=tuple(str(CannotShare(reason, advice=advice)) for reason in reasons if goes_on))
    return number


def history(region: Region) -> History:
    """What a region has done so far."""
    with _lock:
        return _histories.setdefault(region, History())


def known() -> list[tuple[Region, History]]:
    """The regions that still exist, in order of their numbers."""
    with _lock:
        found = list(_histories.items())
    return sorted(found, key=lambda pair: number_of(pair[0].module))


def source_name(node: torch.fx.Node) -> str:
    """Where Dynamo found a graph input, as an expression on the function's locals: `L['ids']`; an empty string if it does not say."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return str(name() if callable(name) else name)  # a method before torch 2.12


def input_name(node: torch.fx.Node) -> str:
    """A graph input's name for people: the last part of its source, `attention_mask` for `L['kwargs']['attention_mask']`."""
    parts = re.findall(r"\['([^']+)'\]|\.([A-Za-z_]\w*)", source_name(node))
    return next(filter(None, parts[-1])) if parts else node.name


def folder_name(number: int, rewrite: int) -> str:
    """The name under which a rewrite of a region is dumped; the ranks of one job, which often share a folder, are kept apart."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    rank = f"rank_{torch.distributed.get_rank()}_" if distributed else ""
    return f"{rank}region_{number:02}" + (f"_variant_{rewrite}" if rewrite else "")
