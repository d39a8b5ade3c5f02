"""What an attention mask allows, read off its facts: structured where possible, else carried as a matrix."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable

from sp_compile.analysis.facts import Atom, MaskSpec, Nonzero, SameChunk, TwoValued, Valid, facing
from sp_compile.analysis.layouts import Axis, Dim, Kind, Layout
from sp_compile.ops.blocking import is_blocking


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """A proved causal mask. Names are graph nodes of the dense graph.

    Attributes:
        window, chunk: as in `MaskSpec`.
        padding: node whose nonzero elements are real keys, one per token.
        alone: the same, but that a pad sees itself; it is the matrix that says so.
        segments: node with one document number per token.
        matrix: node of a (query, key) mask that has to be carried element by element.
        finite: hidden keys have finite scores, so that a query without visible keys sees all of them alike, later ones included.
        told: window, chunk and padding say all about what is hidden; else the matrix may hide more.
        given: inputs whose values, not the graph, hide later columns.
    """

    window: int | None = None
    chunk: int | None = None
    padding: str | None = None
    alone: str | None = None
    segments: str | None = None
    matrix: str | None = None
    finite: bool = False
    told: bool = True
    given: tuple[str, ...] = ()


class NotCausal(Exception):
    """The mask is not proved to hide later columns."""


def read_mask(name: str | None, layout: Layout | None, is_causal: bool, is_bool: bool, rows: Dim = (Axis.BATCH,)) -> AttentionMask:
    """The structure of the mask that an attention call was given.

    Args:
        name: graph node of the mask, None if there is none.
        layout: its layout.
        is_causal: whether the call itself hides later columns.
        is_bool: whether the mask is boolean (True = visible) rather than additive.
        rows: the batch dimension of a value with one entry per token.

    Raises:
        NotCausal: causality is not proved, or the mask differs between rows that share tokens.
    """
    if layout is None or name is None:
        if not is_causal:
            raise NotCausal("attention without a mask and without is_causal sees later tokens")
        return AttentionMask()
    if layout.is_rows or not layout.reach.shared:
        text = layout.why.text if layout.why is not None else "it depends on later columns"
        raise NotCausal(f"the attention mask differs between rows that share tokens: {text}")
    if isinstance(layout.fact, MaskSpec):
        spec = layout.fact
        return AttentionMask(spec.window, spec.chunk, spec.padding, segments=spec.segments, finite=not is_bool)
    rank = len(layout.dims)
    columns = layout.column_like_dims
    if rank == 2 and layout.dims[0] == rows and columns == [1] and len(layout.dims[1]) == 1 and is_causal:
        return AttentionMask(padding=name)
    if layout.is_pairs:
        return _pairwise(name, layout, is_causal, is_bool)
    if rank >= 2 and columns == [rank - 1] and is_causal:
        return _keys_only(name, layout, is_bool)
    raise NotCausal(f"an attention mask of layout {layout.dims} is not known to be causal")


def _pairwise(name: str, layout: Layout, is_causal: bool, is_bool: bool) -> AttentionMask:
    rank = len(layout.dims)
    query, key = rank - 2, rank - 1
    if any(layout.token_dim(d) for d in range(rank - 2) if (rank, d) != (4, 0)) or rank > 4:
        raise NotCausal(f"an attention mask of layout {layout.dims} is not [batch, heads, queries, keys]")
    fact = facing(layout.fact, operator.not_ if is_bool else is_blocking)
    finite = not is_bool and not (fact is not None and fact.if_false == -math.inf and not fact.loose)
    if fact is None:
        if is_causal:
            return AttentionMask(matrix=name, finite=finite, told=False)
        raise NotCausal("the attention mask is not proved to hide later columns")
    visible = 1.0 if is_bool else 0.0
    causal = [c for c in fact.conditions if isinstance(c, Atom) and c.left == query and c.right == key and c.bound >= 0]
    if not is_causal and not causal:
        raise NotCausal("the attention mask lets a token see later columns")
    proved = is_causal or any(c.given is None for c in causal)
    given = () if proved else tuple(sorted({c.given for c in causal if c.given is not None}))
    window: int | None = None
    chunk: int | None = None
    padding: str | None = None
    alone: str | None = None
    known = fact.exact and fact.if_true == visible
    for condition in fact.conditions:
        if isinstance(condition, Atom) and condition.given is not None:
            known = False  # what it says besides is not looked at in every call
            continue
        if isinstance(condition, Atom) and (condition.left, condition.right) == (query, key) and condition.bound == 0:
            continue
        if isinstance(condition, Atom) and (condition.left, condition.right) == (key, query) and condition.bound <= 0:
            width = 1 - condition.bound
            window = width if window is None else min(window, width)
        elif isinstance(condition, SameChunk) and {condition.left, condition.right} == {query, key} and chunk in (None, condition.size):
            chunk = condition.size
        elif isinstance(condition, Valid) and condition.dims == (key,) and padding in (None, condition.node):
            padding = condition.node
        elif isinstance(condition, Valid) and condition.dims == (key, query) and alone in (None, condition.node):
            alone, known = condition.node, False
        else:
            known = False
    if known:
        return AttentionMask(window, chunk, padding, finite=finite)
    # what the matrix hides by itself is told as well: it lets padding be dropped, and far keys be skipped
    alone = alone if padding is None else None
    return AttentionMask(window, chunk, padding, alone, matrix=name, finite=finite, told=False, given=given)


def _keys_only(name: str, layout: Layout, is_bool: bool) -> AttentionMask:
    fact = layout.fact
    if is_bool and isinstance(fact, Nonzero):
        return AttentionMask(padding=fact.node)
    if is_bool and isinstance(fact, TwoValued) and fact.exact and fact.if_true == 1.0 and fact.if_false == 0.0:
        only = next(iter(fact.conditions)) if len(fact.conditions) == 1 else None
        if isinstance(only, Valid) and only.unless is None:
            return AttentionMask(padding=only.node)
    if layout.reach.kind is Kind.TOKENS and is_bool and all(d == () or layout.token_dim(i) for i, d in enumerate(layout.dims)):
        return AttentionMask(padding=name)
    raise NotCausal("a mask over keys alone, added to causal attention, has no structured form")


def padding_source(name: str | None, layout_of: Callable[[str], Layout | None]) -> str | None:
    """The graph input whose nonzero elements a padding node marks as real, or None."""
    layout = layout_of(name) if name is not None else None
    if layout is None:
        return None
    return layout.fact.node if isinstance(layout.fact, Nonzero) else None
