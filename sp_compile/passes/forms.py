"""In which forms each value of the dense graph can be had on physical tokens, and which inputs it reads."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import torch.fx

from sp_compile.analysis.interpret import NodeInfo
from sp_compile.analysis.layouts import Axis, Dims, Kind, Layout

Infos = Mapping[torch.fx.Node, NodeInfo]


class Form(enum.Enum):
    """How a node's value can be had on physical tokens."""

    COMMON = "common"  # holds no tokens: one value serves both worlds
    DIRECT = "direct"  # by running the node on packed operands
    GATHER = "gather"  # by running it on rows, cheaply, and gathering
    NONE = "none"


def find_forms(order: Sequence[torch.fx.Node], infos: Infos, packed: bool = False) -> dict[torch.fx.Node, Form]:
    """The form of every node. Memory that is written is on physical tokens for every op that sees it, or on rows for every one.

    Args:
        order: the graph's nodes.
        infos: what the analysis found.
        packed: the inputs are on physical tokens.
    """
    written = set[int]().union(*(infos[node].writes for node in order))
    on_rows: set[int] = set()
    while True:
        forms: dict[torch.fx.Node, Form] = {}
        for node in order:
            given = packed and node.op == "placeholder" and any(t.has_tokens for t in infos[node].tensors)
            forms[node] = Form.DIRECT if given else _form(node, infos, forms, on_rows)
        others = [infos[node] for node in order if forms[node] is not Form.DIRECT]
        found = on_rows.union(*(info.writes | (info.storages & written) for info in others))
        if found == on_rows:
            return forms
        on_rows = found


def _form(node: torch.fx.Node, infos: Infos, forms: Mapping[torch.fx.Node, Form], on_rows: set[int]) -> Form:
    info = infos[node]
    layouts = info.tensors
    if node.op == "output" or (not layouts and not info.writes):
        return Form.COMMON
    direct = (info.segments is not None or _runs_on_tokens(node, infos, forms)) and not (info.storages | info.writes) & on_rows
    if not layouts:
        targets = [a for a in node.all_input_nodes if infos[a].storages & info.writes]
        return Form.DIRECT if direct and all(forms[a] is Form.DIRECT for a in targets) else Form.COMMON
    if all(not t.has_tokens and t.reach.kind <= Kind.COLUMN for t in layouts):
        return Form.COMMON
    if not all(t.packable for t in layouts):
        return Form.NONE
    if direct or (info.attention is not None and not info.storages & on_rows):
        return Form.DIRECT
    return Form.GATHER if all(t.entry and gatherable(t) for t in layouts) else Form.NONE


def _runs_on_tokens(node: torch.fx.Node, infos: Infos, forms: Mapping[torch.fx.Node, Form]) -> bool:
    info = infos[node]
    ready = all(forms[a] is not Form.NONE for a in node.all_input_nodes if infos[a].tensors)
    called = node.op in ("call_function", "call_method")
    return called and ready and info.failure is None and info.body is None and not (info.shapes and info.numbers)


def gatherable(layout: Layout) -> bool:
    """Whether `tokens.pack` knows the layout."""
    axes = [axis for _, axis in layout.axes]
    return 1 <= axes.count(Axis.COLUMNS) <= 2 and axes.count(Axis.BATCH) <= 1 and _plain_merges(layout)


def scatterable(layout: Layout) -> bool:
    """Whether `tokens.unpack` knows the layout; a (query, key) value is none of one token."""
    axes = [axis for _, axis in layout.axes]
    return axes.count(Axis.COLUMNS) == 1 and axes.count(Axis.BATCH) == 1 and _plain_merges(layout)


def _plain_merges(layout: Layout) -> bool:
    merged = [dim for dim in layout.dims if len(dim) > 1 and any(isinstance(f, Axis) for f in dim)]
    return all(isinstance(f, Axis | int) for dim in merged for f in dim)


def pattern_of(dims: Dims) -> str:
    """The einops-like pattern of a layout (see `ops/tokens.py`)."""
    named = [
        "*".join(f.value if isinstance(f, Axis) else str(f) for f in dim) if any(isinstance(f, Axis) for f in dim) else "_" for dim in dims
    ]
    return " ".join(named)


def inputs_read(order: Sequence[torch.fx.Node], infos: Infos, numbers: Mapping[torch.fx.Node, int]) -> dict[torch.fx.Node, frozenset[int]]:
    """Numbers of the token inputs that each value depends on, also by way of memory that others write."""
    found: dict[torch.fx.Node, frozenset[int]] = {}
    stored: dict[int, frozenset[int]] = {}

    def kept(node: torch.fx.Node) -> frozenset[int]:
        return frozenset().union(*(stored.get(storage, frozenset()) for storage in infos[node].storages))

    for node in order:
        own = {numbers[node]} if node in numbers and any(t.reach.kind == Kind.TOKENS for t in infos[node].tensors) else set()
        found[node] = frozenset(own).union(*(found[a] | kept(a) for a in node.all_input_nodes))
        stored |= {storage: stored.get(storage, frozenset()) | found[node] for storage in infos[node].writes}
    return {node: read | kept(node) for node, read in found.items()}
