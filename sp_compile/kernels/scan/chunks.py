"""Chunked recurrences on a forest: which tokens are worked on together, and how states travel down the tree of chunks and adjoints up.

An implementation reads a chunk plan of `layout/chunks.py` once per call:

    plan = make_plan(chunks, tokens, final, cost)
    for block in plan.blocks:                    # chunks of one length, independent of each other
        values = read(x, block)                  # [n, l, ...], zeros in empty slots
        ... own part of the state of each chunk, stored at block.chunks
    entering = descend(plan, like, initial, step)
    for block in plan.blocks:
        write(out, block, result)                # [n, l, ...]

and backward the other way round, with `ascend` for the adjoints of states and a `Gradient` per token input. Chunks are renumbered so
that those of one depth in the tree of chunks are consecutive. Lengths of blocks are 32, 64, ... up to the size of the plan's chunks: a node
of a few tokens doesn't cost a whole chunk. A chunk grows when tokens are appended to its node; the rows that it had keep their bits in
products of float32 matrices of those sizes (with MKL already from 16, in float64 not from 16).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.rows import sum_by_key

SHORTEST = 32

# Elements of the largest intermediate of a block: what fits into a core's own cache beside its inputs.
BUDGET = 1 << 18

Cost = Callable[[int], int]
Step = Callable[[slice, Tensor], Tensor]


@dataclass(frozen=True)
class Block:
    """n chunks of at most `length` tokens.

    Attributes:
        chunks: int64 [n] chunk numbers, in the plan's numbering.
        length: l, slots per chunk.
        tokens: int64 [n * l], 0 in empty slots.
        empty: int64, numbers of the empty slots; None if there are none.
        owned: int64, numbers of the slots that write their token; None if all do.
        copied: int64, numbers of the slots that read a token which another chunk writes; None if there are none.
        span: the tokens of all slots, where those are consecutive and no slot is empty or a copy; else None.
    """

    chunks: Tensor
    length: int
    tokens: Tensor
    empty: Tensor | None
    owned: Tensor | None
    copied: Tensor | None
    span: slice | None


@dataclass(frozen=True)
class Level:
    """Chunks [span) of one depth in the tree of chunks.

    Attributes:
        parents: int64, their parents as places in the level above; at the first level their external states. None: in order, all of them.
    """

    span: slice
    parents: Tensor | None


@dataclass(frozen=True)
class Plan:
    """What `make_plan` finds.

    Attributes:
        tokens: T.
        chunks: C; more than the rows of the chunk tensor where states are asked for inside of chunks.
        blocks: all chunks, each once.
        levels: all chunks, parents before children.
        final: int64 [F] chunks whose leaving state is the state after each of the `final` tokens.
    """

    tokens: int
    chunks: int
    blocks: tuple[Block, ...]
    levels: tuple[Level, ...]
    final: Tensor | None


def make_plan(chunks: Tensor, tokens: int, final: Tensor | None, cost: Cost, shortest: int = SHORTEST) -> Plan:
    """Reads a chunk tensor int64 [C, 1 + c], see `layout/chunks.py`; it is copied to the CPU if it is elsewhere.

    Args:
        final: int64 [F] tokens whose states are asked for. A token inside of a chunk gets a chunk of its own, of copies up to it.
        cost: elements of the largest intermediate per chunk of a given length; blocks are cut to `BUDGET` elements.
        shortest: length of the shortest blocks, if the plan's chunks aren't shorter; each next length is twice as long.

    Raises:
        InvalidInput: the chunks don't write each of the tokens once.
    """
    device = chunks.device
    chunks = chunks.cpu()
    slots = chunks[:, 1:]
    written = slots[slots >= 0]
    if len(written) != tokens or not bool((torch.bincount(written, minlength=tokens) == 1).all()):
        raise InvalidInput(f"chunks: expected a plan that writes {tokens} tokens once each, as those of this batch's forest do")
    asked = None
    if final is not None:
        chunks, asked = _with_final(chunks, tokens, final.cpu())
    order, number, levels = _levels(chunks[:, 0], device)
    slots = chunks[order, 1:]
    last = torch.where(slots != -1, torch.arange(1, slots.shape[1] + 1), 0).amax(1) if len(slots) else slots.new_zeros(0)
    blocks: list[Block] = []
    length = min(shortest, slots.shape[1])
    shorter = 0
    while shorter < slots.shape[1]:
        here = ((last > shorter) & (last <= length)).nonzero()[:, 0]
        blocks += [_block(slots, part, length, device) for part in here.split(max(1, BUDGET // max(1, cost(length)))) if len(part)]
        shorter, length = length, min(2 * length, slots.shape[1])
    return Plan(tokens, len(chunks), tuple(blocks), levels, None if asked is None else number[asked].to(device))


def _with_final(chunks: Tensor, tokens: int, final: Tensor) -> tuple[Tensor, Tensor]:
    """The plan with a chunk of copies for each final token that isn't the last of the chunk that writes it, and the chunk of each."""
    slots = chunks[:, 1:]
    where = torch.empty((tokens, 2), dtype=torch.int64)
    places = (slots >= 0).nonzero()
    where[slots[places[:, 0], places[:, 1]]] = places
    chunk, slot = where[final].unbind(1)
    later = torch.arange(slots.shape[1]) > slot[:, None]
    inside = ((slots[chunk] != -1) & later).any(1)
    made = chunks[chunk[inside]].clone()
    copies = torch.where(made[:, 1:] >= 0, -2 - made[:, 1:], made[:, 1:])
    made[:, 1:] = copies.masked_fill(later[inside], -1)
    chunk[inside] = torch.arange(len(chunks), len(chunks) + len(made))
    return torch.cat([chunks, made]), chunk


def _levels(parent: Tensor, device: torch.device) -> tuple[Tensor, Tensor, tuple[Level, ...]]:
    """`(old number of each new one, new number of each old one, levels)` for the parents of all chunks."""
    depth: list[int] = []
    for before in parent.tolist():
        depth.append(depth[before] + 1 if before >= 0 else 0)
    depths = torch.tensor(depth, dtype=torch.int64)
    order = torch.argsort(depths, stable=True)
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order))
    widths = torch.bincount(depths)
    stops = widths.cumsum(0)
    starts = stops - widths
    before_ = parent[order]
    first_above = (starts - widths.roll(1)).repeat_interleave(widths)
    places = torch.where(before_ >= 0, number[before_.clamp(min=0)] - first_above, -1 - before_)
    moved = places != torch.arange(len(order)) - starts.repeat_interleave(widths)
    in_order = torch.zeros_like(widths).index_add_(0, depths[order], moved.to(torch.int64)) == 0
    in_order &= widths == widths.roll(1)
    if len(widths):
        in_order[0] = False
    spans = [slice(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    places = places.to(device)
    levels = [Level(span, None if plain else places[span]) for span, plain in zip(spans, in_order.tolist(), strict=True)]
    return order, number, tuple(levels)


def _block(slots: Tensor, chunks: Tensor, length: int, device: torch.device) -> Block:
    flat = slots[chunks, :length].flatten()
    empty, copied = (flat == -1).nonzero()[:, 0], (flat < -1).nonzero()[:, 0]
    owned = (flat >= 0).nonzero()[:, 0] if len(empty) or len(copied) else None
    tokens = torch.where(flat < -1, -2 - flat, flat.clamp(min=0))
    some = [part.to(device) if len(part) else None for part in (empty, copied)]
    span = None
    if owned is None and bool((flat == flat[0] + torch.arange(len(flat))).all()):
        span = slice(int(flat[0]), int(flat[0]) + len(flat))
    return Block(chunks.to(device), length, tokens.to(device), some[0], None if owned is None else owned.to(device), some[1], span)


def read(x: Tensor, block: Block) -> Tensor:
    """[T, ...] -> a new tensor [n, l, ...] of the same dtype, zeros in empty slots."""
    out = x.index_select(0, block.tokens)
    if block.empty is not None:
        out.index_fill_(0, block.empty, 0)
    return out.view(len(block.chunks), block.length, *x.shape[1:])


def look(x: Tensor, block: Block) -> Tensor:
    """As `read`, but perhaps a view of `x`, which the caller must not write to."""
    if block.span is None:
        return read(x, block)
    seen: Tensor = x[block.span].unflatten(0, (len(block.chunks), block.length))
    return seen


def write(out: Tensor, block: Block, values: Tensor) -> None:
    """Writes the owned slots of [n, l, ...] to their tokens in `out` [T, ...], converted to its dtype."""
    flat = values.reshape(len(block.tokens), *values.shape[2:])
    if block.span is not None:
        out[block.span] = flat
    elif block.owned is None:
        out.index_copy_(0, block.tokens, flat.to(out.dtype))
    elif len(block.owned):
        out.index_copy_(0, block.tokens[block.owned], flat[block.owned].to(out.dtype))


def running_sum(values: Tensor) -> Tensor:
    """Sums over slots, the slot itself included: [n, l, ...] -> [n, l, ...]. Deterministic on every device, unlike torch's cumsum."""
    if values.device.type == "cpu":
        return values.cumsum(1)
    return sum_by_product(values)


def sum_by_product(values: Tensor) -> Tensor:
    """`running_sum` as a product with a triangle of ones."""
    ones = torch.ones((values.shape[1], values.shape[1]), dtype=values.dtype, device=values.device).tril_()
    return torch.matmul(ones, values.flatten(2)).view(values.shape)


class Gradient:
    """The gradient of one token input, summed over the slots that read a token in a fixed order: the owner's, then copies as they come."""

    def __init__(self, plan: Plan, like: Tensor, dtype: torch.dtype) -> None:
        """Of an input `like` [T, ...], summed in `dtype`."""
        self.sums = like.new_empty(like.shape, dtype=dtype)
        self.copies: list[tuple[Tensor, Tensor]] = []

    def add(self, block: Block, values: Tensor) -> None:
        """Takes the gradients [n, l, ...] of what `read` gave for the block. Each block comes once."""
        write(self.sums, block, values)
        if block.copied is not None:
            flat = values.reshape(len(block.tokens), *values.shape[2:])
            self.copies.append((block.tokens[block.copied], flat[block.copied].to(self.sums.dtype)))

    def total(self) -> Tensor:
        """[T, ...] in the summation dtype, after the last block."""
        if self.copies:
            keys, values = (torch.cat(part) for part in zip(*self.copies, strict=True))
            self.sums += sum_by_key(values, keys, self.sums.shape[0])
            self.copies = []
        return self.sums


def descend(plan: Plan, like: Tensor, initial: Tensor | None, step: Step) -> Tensor:
    """States that enter the chunks, [C, ...] of the shape and dtype of `like` [C, ...], level by level.

    Args:
        initial: external states [S, ...]; None for zeros.
        step: `(span, entering [n, ...]) -> leaving [n, ...]` of the chunks of one level; the results become what their children get.
    """
    entering = torch.empty_like(like)
    leaving: Tensor | None = None
    for level in plan.levels:
        if leaving is None:
            assert level.parents is not None, "the first level names external states"
            if initial is None:
                entering[level.span] = 0
            else:
                entering[level.span] = initial[level.parents]
        else:
            entering[level.span] = leaving if level.parents is None else leaving.index_select(0, level.parents)
        leaving = step(level.span, entering[level.span])
    return entering


def ascend(plan: Plan, adjoint: Tensor, initial: Tensor | None, step: Step) -> Tensor | None:
    """Completes the gradients of the states that leave the chunks, in place; returns that of `initial`.

    Args:
        adjoint: [C, ...]; on entry what comes from elsewhere than from child chunks (see `final_gradients`), on return all of it.
        initial: external states [S, ...]; None if there are none.
        step: `(span, complete adjoint of the leaving states [n, ...]) -> gradient of the entering states [n, ...]` of one level.
            Children are summed in the order of the plan.
    """
    for depth in reversed(range(len(plan.levels))):
        level = plan.levels[depth]
        entering = step(level.span, adjoint[level.span])
        if depth:
            target = adjoint[plan.levels[depth - 1].span]
            target += entering if level.parents is None else sum_by_key(entering, level.parents, target.shape[0])
        elif initial is not None:
            assert level.parents is not None, "the first level names external states"
            return sum_by_key(entering, level.parents, initial.shape[0])
    return None if initial is None else torch.zeros_like(initial)


def final_gradients(plan: Plan, like: Tensor, grad: Tensor) -> Tensor:
    """[C, ...] zeros, and at the chunks of final tokens the gradients `grad` [F, ...] of their states; `like` [C, ...]."""
    if plan.final is None:
        return torch.zeros_like(like)
    return sum_by_key(grad.to(like.dtype), plan.final, plan.chunks)
