"""Where the batch of packed values is, a dimension of size 1 that no size tells from others of size 1.

Packed values come in as [1, T, ...], so their batch is in front of the tokens. Row-major order puts it there in every view, too: a
dimension of size 1 that a view or `unsqueeze` makes behind the tokens is one of the model's own, such as its only group of experts.

    [(), (L), (E)]  --view(-1, 1, E)-->  [(L), (), (E)]            the () is no batch: topk over it is a choice of the token's own
    [(), (L), (E)]  --transpose(0, 1)-->  [(L), (), (E)]           it is the batch: `rows_behind` holds from here on

What reads a value of which `rows_behind` holds has it as well (`interpret`). It begins wherever a dimension that may be the batch goes
behind the tokens, or is taken apart row by row, after which the rows may be put together again in any place.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from sp_compile.analysis.layouts import Kind, Layout
from sp_compile.analysis.rules.registry import Call, require_no_rows


def goes_behind(call: Call, base: Layout, order: Sequence[int]) -> bool:
    """Whether the batch may stand behind the tokens after a permutation."""
    if not _counts(call.symbols.packed, base) or base.rows_behind:
        return base.rows_behind
    last = max(new for new, old in enumerate(order) if base.token_dim(old))
    return any(base.may_be_rows(old) for old in order[last + 1 :])


def apart(call: Call, base: Layout, dim: int) -> Layout:
    """The layout of a value from which some of what lies along a dimension is about to be taken."""
    return base.with_(rows_behind=True) if _counts(call.symbols.packed, base) and base.may_be_rows(dim) else base


def grows(call: Call, tensors: Sequence[torch.Tensor], dim: int) -> None:
    """Refuses to make several of what may be one row: a dimension of another size would not be known for the batch any more."""
    for tensor in tensors:
        if call.layout_of(tensor).reach.kind > Kind.COLUMN:
            require_no_rows(call, tensor, [dim], call.func._schema.name.split("::")[1])


def index_apart(call: Call, base: Layout, used: Sequence[int], after: Layout) -> Layout:
    """The layout of what an index gives: dimensions that it leaves alone may have changed their places."""
    moved = list(used) != list(range(used[0], used[0] + len(used))) and any(base.may_be_rows(d) for d in range(len(base.dims)))
    return after.with_(rows_behind=True) if _counts(call.symbols.packed, base) and moved else after


def carry_rows(mode: Any, node: torch.fx.Node, given: Sequence[Any], results: Sequence[Any]) -> None:
    """What any node gives, a marker or a function, may have its rows where its operands have them."""
    operands = [mode.layout_of(value) for value in given if isinstance(value, torch.Tensor)]
    if any(layout.rows_behind or _sliced_apart(mode.symbols.packed, node, layout) for layout in operands):
        for result in results:
            if isinstance(result, torch.Tensor):
                mode.give(result, mode.layout_of(result).with_(rows_behind=True))


def _sliced_apart(packed: bool, node: torch.fx.Node, base: Layout) -> bool:
    """Whether `x[b : b + 1]` may take one row; of a batch of one torch returns x, so that no op is seen."""
    if node.target is not operator.getitem or not _counts(packed, base):
        return False
    given: Any = node.args[1]
    places = [place for place in (given if isinstance(given, tuple) else (given,)) if place is not None]
    at = next((i for i, place in enumerate(places) if place is ...), None)
    if at is not None:
        places[at : at + 1] = [slice(None)] * (len(base.dims) - len(places) + 1)
    cuts = [d for d, place in enumerate(places) if isinstance(place, slice) and (place.start is not None or place.stop is not None)]
    return any(base.may_be_rows(d) for d in cuts if d < len(base.dims))


def _counts(packed: bool, layout: Layout) -> bool:
    """Whether a value has rows that differ from each other at all."""
    return packed and layout.has_tokens and layout.reach.kind > Kind.COLUMN
