"""States on their way through the chunks of a call, and their gradients on the way back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sp_compile.kernels.delta_rule.local import Chunks, step, step_back
from sp_compile.kernels.delta_rule.slots import Form, of_block
from sp_compile.kernels.scan.chunks import Block, Plan, ascend, descend, final_gradients


@dataclass(frozen=True)
class Group:
    """All chunks of one length, in the order of their numbers and so of their levels; arrays [n, H, c, ...] as in `Chunks`."""

    writes: Tensor
    to_end: Tensor
    written: Tensor
    d_written: Tensor


@dataclass(frozen=True)
class Part:
    """The chunks [start, stop) of a group, which are the chunks at `places` of one level; None: all of the level's, in order."""

    group: Group
    start: int
    stop: int
    places: Tensor | None

    def of(self, values: Tensor) -> Tensor:
        """[n of the level, H, ...] -> [n * H, ...]"""
        return (values if self.places is None else values.index_select(0, self.places)).flatten(0, 1)

    def cut(self, array: Tensor) -> Tensor:
        """A view [n * H, ...] of an array of the group."""
        return array[self.start : self.stop].flatten(0, 1)


class Passing:
    """What moves states through all chunks of a plan, level by level.

    Attributes:
        entering: [C, H, K, V] states, after `descend`.
        leaving: [C, H, K, V] gradients of the leaving states, after `ascend`.
    """

    def __init__(self, plan: Plan, form: Form, like: Tensor, heads: int, rows: int, columns: int, decays: int) -> None:
        """For states [heads, rows, columns] in the dtype of `form`, on the device of `like`, with `decays` 1 or `rows`."""
        self.plan = plan
        like = like.new_empty(0, dtype=form.dtype)
        self.whole = like.new_empty((plan.chunks, heads, decays, 1))
        self.entering = self.leaving = self.left = self.d_entering = like.new_empty((plan.chunks, heads, rows, columns))
        self.places: dict[int, tuple[Group, int]] = {}
        self.parts: dict[int, list[Part]] = {level.span.start: [] for level in plan.levels}
        borders = torch.tensor([0, *(level.span.stop for level in plan.levels)])
        for length in dict.fromkeys(block.length for block in plan.blocks):
            blocks = [block for block in plan.blocks if block.length == length]
            chunks = torch.cat([block.chunks for block in blocks])
            shape = (len(chunks), heads, form.size(length))
            group = Group(*(like.new_empty((*shape, width)) for width in (columns + rows, rows, columns, columns)))
            start = 0
            for block in blocks:
                self.places[id(block)] = group, start
                start += len(block.chunks)
            bounds = torch.searchsorted(chunks.cpu(), borders).tolist()
            for level, first, last in zip(plan.levels, bounds, bounds[1:], strict=False):
                span = level.span
                if first < last:
                    places = None if last - first == span.stop - span.start else chunks[first:last] - span.start
                    self.parts[span.start].append(Part(group, first, last, places))

    def keep(self, block: Block, made: Chunks) -> None:
        """Takes what moves states through the chunks of a block."""
        group, start = self.places[id(block)]
        for target, values in ((group.writes, made.writes), (group.to_end, made.to_end)):
            target[start : start + len(block.chunks)] = values.view(-1, *target.shape[1:])
        self.whole[block.chunks] = made.decays.whole.view(-1, *self.whole.shape[1:])

    def descend(self, initial: Tensor | None) -> None:
        """Makes the entering states and what is written; `initial` are the external states [S, H, K, V]."""
        if self.plan.final is not None:
            self.left = torch.empty_like(self.entering)

        def through(span: slice, entering: Tensor) -> Tensor:
            leaving = torch.empty_like(entering)
            for part in self.parts[span.start]:
                group, whole = part.group, part.of(self.whole[span])
                written, state = step(part.cut(group.writes), part.cut(group.to_end), whole, part.of(entering))
                part.cut(group.written).copy_(written)
                leaving = _placed(leaving, part, state)
            if self.plan.final is not None:
                self.left[span] = leaving
            return leaving

        self.entering = descend(self.plan, self.entering, initial, through)

    def written_of(self, block: Block) -> Tensor:
        """[n * H, c, V] after `descend`."""
        group, start = self.places[id(block)]
        return group.written[start : start + len(block.chunks)].flatten(0, 1)

    def final_states(self) -> Tensor:
        """[F, H, K, V] after `descend`."""
        if self.plan.final is None:
            return self.entering.new_zeros((0, *self.entering.shape[1:]))
        return self.left.index_select(0, self.plan.final)

    def keep_back(self, block: Block, d_written: Tensor, d_state: Tensor) -> None:
        """Takes the gradients of what is written and of the entering states that come from a block's outputs."""
        if self.d_entering is self.entering:
            self.d_entering = torch.empty_like(self.entering)
        self.d_written_of(block).copy_(d_written)
        self.d_entering[block.chunks] = d_state.view(-1, *self.entering.shape[1:])

    def ascend(self, initial: Tensor | None, grad_states: Tensor) -> Tensor | None:
        """Completes the gradients of leaving states and of what is written, given those of the final states; returns that of `initial`."""

        def through(span: slice, leaving: Tensor) -> Tensor:
            d_entering = torch.empty_like(leaving)
            for part in self.parts[span.start]:
                group, whole = part.group, part.of(self.whole[span])
                outer = part.cut(group.d_written), part.of(self.d_entering[span])
                d_written, d_state = step_back(part.cut(group.writes), part.cut(group.to_end), whole, outer, part.of(leaving))
                part.cut(group.d_written).copy_(d_written)
                d_entering = _placed(d_entering, part, d_state)
            return d_entering

        self.leaving = final_gradients(self.plan, self.entering, grad_states)
        return ascend(self.plan, self.leaving, initial, through)

    def d_written_of(self, block: Block) -> Tensor:
        """[n * H, c, V] a view; complete after `ascend`."""
        group, start = self.places[id(block)]
        return group.d_written[start : start + len(block.chunks)].flatten(0, 1)

    def states_of(self, block: Block) -> tuple[Tensor, Tensor]:
        """Entering states and gradients of leaving states, [n * H, K, V]."""
        return of_block(self.entering, block), of_block(self.leaving, block)


def _placed(level: Tensor, part: Part, values: Tensor) -> Tensor:
    """The level's values [n, H, ...] with those of a part [n * H, ...] in their places."""
    values = values.view(-1, *level.shape[1:])
    return values if part.places is None else level.index_copy_(0, part.places, values)
