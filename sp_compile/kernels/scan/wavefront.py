"""Elementwise recurrences h_t = a_t * h_prev(t) + b_t, all tokens of one position in their rows at a time.

In order of position, the predecessors of a step's tokens are tokens of the step before, mostly all of them in the same order. A step is
two elementwise operations however many branches there are; every token goes through exactly the operations of the sequential scan of its
row, so results don't depend on what else is in the pack, nor on a grid of chunks: this is the dense run's rounding.

Steps are grouped into segments: what can be computed for many tokens at once (exponentials, products with B and C) is, per segment.
Backward keeps the states at the borders of segments and recomputes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_compile.ops.rows import sum_by_key

# Steps of a segment: the states kept for backward are at most this fraction of all states.
STEPS = 32


@dataclass(frozen=True)
class Segment:
    """Consecutive steps.

    Attributes:
        span: their tokens as places in `Front.order`.
        widths: tokens per step.
        sources: per step, int64 places in the step before it of the predecessors; None: the first ones, in order. For the first step of
            all, external states.
        final: int64, which of the final tokens are in the segment; None if none is.
        places: int64, their places in the segment.
    """

    span: slice
    widths: list[int]
    sources: list[Tensor | None]
    final: Tensor | None
    places: Tensor | None


@dataclass(frozen=True)
class Front:
    """All tokens by position in their rows: int64 `order` [T], and the segments."""

    order: Tensor
    segments: list[Segment]


def make_front(prev: Tensor, final: Tensor | None) -> Front:
    """Reads `prev` (and `final`) on the CPU."""
    device, prev = prev.device, prev.cpu()
    depth = _positions(prev)
    order = torch.argsort(depth, stable=True)
    widths = torch.bincount(depth)
    stops = widths.cumsum(0)
    starts = stops - widths
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    own = torch.arange(len(order)) - starts.repeat_interleave(widths)
    before = prev[order]
    source = torch.where(before >= 0, place[before.clamp(min=0)] - (starts - widths.roll(1)).repeat_interleave(widths), -1 - before)
    straight = torch.zeros(len(widths), dtype=torch.int64).index_add_(0, depth[order], (source != own).to(torch.int64)) == 0
    asked = None if final is None else place[final.cpu()]
    segments: list[Segment] = []
    all_widths, all_straight, all_starts = widths.tolist(), straight.tolist(), starts.tolist()
    moved = source.to(device)
    for first in range(0, len(all_widths), STEPS):
        steps = range(first, min(first + STEPS, len(all_widths)))
        span = slice(all_starts[first], all_starts[steps[-1]] + all_widths[steps[-1]])
        sources = [None if step and all_straight[step] else moved[all_starts[step] : all_starts[step] + all_widths[step]] for step in steps]
        inside = None if asked is None else ((asked >= span.start) & (asked < span.stop)).nonzero()[:, 0]
        places = None
        if asked is not None and inside is not None and len(inside):
            places, inside = (asked[inside] - span.start).to(device), inside.to(device)
        else:
            inside = None
        segments.append(Segment(span, [all_widths[step] for step in steps], sources, inside, places))
    return Front(order.to(device), segments)


def _positions(prev: Tensor) -> Tensor:
    """int64 [T]: number of tokens before each one in its rows."""
    numbers = torch.arange(len(prev))
    heads = (prev != numbers - 1).nonzero()[:, 0] if len(prev) else numbers
    if len(prev) and (not len(heads) or int(heads[0]) != 0):
        heads = torch.cat([numbers[:1], heads])
    before = prev[heads]
    node = torch.searchsorted(heads, before, right=True) - 1
    base: list[int] = []
    starts = heads.tolist()
    for token, above in zip(before.tolist(), node.tolist(), strict=True):
        base.append(base[above] + token - starts[above] + 1 if token >= 0 else 0)
    lengths = torch.diff(heads, append=torch.tensor([len(prev)]))
    return numbers - heads.repeat_interleave(lengths) + torch.tensor(base, dtype=torch.int64).repeat_interleave(lengths)


def begin(segment: Segment, like: Tensor, initial: Tensor | None) -> Tensor:
    """What the first step of all continues, [width, ...] as `like` [n, ...]: external states, or zeros."""
    if initial is None:
        return like.new_zeros((segment.widths[0], *like.shape[1:]))
    assert segment.sources[0] is not None, "the first step names external states"
    return initial.index_select(0, segment.sources[0])


def advance(segment: Segment, a: Tensor, h: Tensor, before: Tensor, first: bool, carried: Tensor | None = None) -> Tensor:
    """Runs a segment; returns the states of its last step, a view of `h`.

    Args:
        a: [n, ...]; overwritten with the products a_t * h_prev(t) if `carried` is None.
        h: [n, ...]; the terms b on entry, the states on return.
        before: states of the step before the segment, or what the first step of all continues, see `begin`.
        carried: [n, ...]; takes the products instead of `a`.
    """
    products = a if carried is None else carried
    for step, (part, product, state) in enumerate(zip(*(x.split(segment.widths) for x in (a, products, h)), strict=True)):
        if not (first and step == 0):
            before = follow(before, segment.sources[step], len(state))
        torch.mul(part, before, out=product)
        state.add_(product)
        before = state
    return before


def follow(before: Tensor, source: Tensor | None, width: int) -> Tensor:
    """States [width, ...] that the tokens of a step continue."""
    if source is not None:
        return before.index_select(0, source)
    return before if len(before) == width else before[:width]


def retreat(segments: Sequence[Segment], number: int, a: Tensor, g: Tensor, later: Tensor | None) -> Tensor:
    """Runs the adjoint of segment `number` backward: g_t += sum over the tokens s that follow t of a_s * g_s.

    Args:
        a: [n, ...]; overwritten.
        g: [n, ...]; on entry the gradients of states from outside the recurrence, on return the complete ones.
        later: what `retreat` of the next segment returned; None for the last one.

    Returns:
        [width of the first step, ...]: a_t * g_t of the first step's tokens.
    """
    segment = segments[number]
    parts = list(zip(a.split(segment.widths), g.split(segment.widths), strict=True))
    sources = [*segment.sources[1:], segments[number + 1].sources[0] if number + 1 < len(segments) else None]
    for (part, adjoint), source in zip(reversed(parts), reversed(sources), strict=True):
        if later is not None:
            if source is None:
                adjoint[: len(later)].add_(later)
            else:
                adjoint.add_(sum_by_key(later, source, len(adjoint)))
        later = part.mul_(adjoint)
    assert later is not None, "a segment has steps"
    return later
