"""In which forms each value of the dense graph can be had on physical tokens, and which inputs it reads."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import torch.fx

from sp_compile.analysis.interpret import NodeInfo
from sp_compile.analysis.layouts import Axis, Dims, Kind, Layout, Span

Infos = Mapping[torch.fx.Node, NodeInfo]


class Form(enum.Enum):
    """How a node's value can be had on physical tokens."""

    COMMON = "common"  # holds no tokens: one value serves both worlds
    DIRECT = "direct"  # by running the node on packed operands
    GATHER = "gather"  # by running it on rows, cheaply, and gathering
    MOVED = "moved"  # by gathering another node's value from other columns
    NONE = "none"


def find_forms(order: Sequence[torch.fx.Node], infos: Infos, packed: bool = False, refine: bool = False) -> dict[torch.fx.Node, Form]:
    """The form of every node. Memory that is written is on physical tokens for every op that sees it, or on rows for every one.

    Args:
        order: the graph's nodes.
        infos: what the analysis found.
        packed: the inputs are on physical tokens.
        refine: values that look ahead, or lack some of the last columns, may be had on refined forests.
    """
    written = set[int]().union(*(infos[node].writes for node in order))
    on_rows: set[int] = set()
    fixed = None
    if refine:  # written memory that holds tokens of the forest itself is that of no refined one
        plain = [info for info in infos.values() if any(t.reach.kind is Kind.TOKENS and t.packable for t in info.tensors)]
        fixed = written & set[int]().union(*(info.storages for info in plain))
    apart = frozenset[torch.fx.Node]() if packed else _rows_data(order, infos)
    while True:
        forms: dict[torch.fx.Node, Form] = {}
        for node in order:
            given = packed and node.op == "placeholder" and any(t.has_tokens for t in infos[node].tensors)
            forms[node] = Form.DIRECT if given else Form.NONE if node in apart else _form(node, infos, forms, on_rows, fixed)
        others = [infos[node] for node in order if forms[node] is not Form.DIRECT]
        found = on_rows.union(*(info.writes | (info.storages & written) for info in others))
        if found == on_rows:
            return forms
        on_rows = found


def _rows_data(order: Sequence[torch.fx.Node], infos: Infos) -> frozenset[torch.fx.Node]:
    """Nodes where fractional inputs of the rows (advantages, returns, weights of a loss) meet what tokens have become, and nothing that
    mixes tokens or meets a parameter follows. On tokens they would be part of what rows must agree in, and rows would share nothing."""
    deep: set[torch.fx.Node] = set()
    for node in reversed(order):
        info = infos[node]
        mixes = info.attention is not None or info.scan is not None
        if node in deep or mixes or (_weighs(node, infos) and any(t.has_tokens for t in info.tensors)):
            deep.update(node.all_input_nodes, [node])
    data: set[torch.fx.Node] = set()
    apart: set[torch.fx.Node] = set()
    for node in order:
        info = infos[node]
        tokens = [t for t in info.tensors if t.has_tokens]
        if node.op == "placeholder":
            value = info.value
            if tokens and isinstance(value, torch.Tensor) and value.is_floating_point() and not value.requires_grad:
                data.add(node)
            continue
        operands = [a for a in node.all_input_nodes if any(t.has_tokens for t in infos[a].tensors)]
        if not data & set(operands) or not tokens:
            continue
        if all(t.entry for t in tokens):
            data.add(node)
        elif node not in deep and any(not t.entry for a in operands for t in infos[a].tensors):
            apart.add(node)
    return frozenset(apart)


def _weighs(node: torch.fx.Node, infos: Infos) -> bool:
    """Whether a parameter of two dimensions is among the operands."""
    values = [
        infos[a].value for a in node.all_input_nodes if all(not t.has_tokens and t.reach.kind is Kind.UNIFORM for t in infos[a].tensors)
    ]
    return any(isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2 for value in values)


def _form(node: torch.fx.Node, infos: Infos, forms: Mapping[torch.fx.Node, Form], on_rows: set[int], fixed: set[int] | None = None) -> Form:
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
        if fixed is None or any(t.is_rows for t in layouts) or (info.storages | info.writes) & fixed:
            return Form.NONE
        if info.moves.total is not None and not all(t.entry for t in layouts):
            return Form.MOVED if _only_moves(node, infos, forms) else Form.NONE
    mixer = info.attention is not None or info.scan is not None
    if direct or (mixer and not info.storages & on_rows):
        return Form.DIRECT
    return Form.GATHER if all(t.entry and gatherable(t) for t in layouts) else Form.NONE


def _only_moves(node: torch.fx.Node, infos: Infos, forms: Mapping[torch.fx.Node, Form]) -> bool:
    """Whether a node's result is its operand with other columns, and nothing else about it changed."""
    operand = node.args[0] if node.args else None
    if not isinstance(operand, torch.fx.Node) or forms[operand] not in (Form.DIRECT, Form.MOVED):
        return False
    before, after = infos[operand].tensors, infos[node].tensors
    if len(before) != 1 or len(after) != 1 or len(before[0].column_like) != 1 or len(after[0].column_like) != 1:
        return False
    pairs = zip(before[0].dims, after[0].dims, strict=False)
    moved = [(a, b) for a, b in pairs if a != b]
    return len(before[0].dims) == len(after[0].dims) and all(len(a) == len(b) == 1 and isinstance(b[0], Axis | Span) for a, b in moved)


def _runs_on_tokens(node: torch.fx.Node, infos: Infos, forms: Mapping[torch.fx.Node, Form]) -> bool:
    info = infos[node]
    ready = all(forms[a] is not Form.NONE for a in node.all_input_nodes if infos[a].tensors)
    called = node.op in ("call_function", "call_method")
    return called and ready and info.failure is None and info.body is None and not (info.shapes and info.numbers)


def gatherable(layout: Layout) -> bool:
    """Whether `tokens.pack` knows the layout."""
    axes = [axis for _, axis in layout.axes]
    one = 1 <= axes.count(Axis.COLUMNS) <= 2 and not layout.has_spans
    cut = layout.column_like == _spans(layout) and (len(_spans(layout)) == 1 or layout.is_pairs)
    return (one or cut) and axes.count(Axis.BATCH) <= 1 and _plain_merges(layout)


def scatterable(layout: Layout) -> bool:
    """Whether `tokens.unpack` knows the layout; a (query, key) value is none of one token."""
    axes = [axis for _, axis in layout.axes]
    return len(layout.column_like) == 1 and axes.count(Axis.BATCH) == 1 and _plain_merges(layout)


def _spans(layout: Layout) -> list[Span]:
    return [f for dim in layout.dims for f in dim if isinstance(f, Span)]


def _plain_merges(layout: Layout) -> bool:
    merged = [dim for dim in layout.dims if len(dim) > 1 and any(isinstance(f, Axis | Span) for f in dim)]
    return all(isinstance(f, Axis | Span | int) for dim in merged for f in dim)


def pattern_of(dims: Dims) -> str:
    """The einops-like pattern of a layout (see `ops/tokens.py`); columns of which the last are left out are named `L`, too."""
    names = [["L" if isinstance(f, Span) else f.value if isinstance(f, Axis) else str(f) for f in dim] for dim in dims]
    return " ".join("*".join(dim) if {"B", "L"} & set(dim) else "_" for dim in names)


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
