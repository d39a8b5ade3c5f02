"""What the kernels share: loads of tiles, the mask, and how a score is bent. All strides come in units of 8 elements (`launch.py`)."""

from __future__ import annotations

import triton
import triton.language as tl

# What changes from batch to batch must not make another variant of a kernel.
SECTIONS = ("order32", "full_at32", "full32", "part_at32", "part32", "column32", "low32")
STRIDES = ("q_row8", "q_head8", "k_row8", "k_head8", "v_row8", "v_head8", "g_row8", "g_head8")

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(
    x, first, head, row8, head8, tokens, LANE: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    GUARD: tl.constexpr, DESC: tl.constexpr,
):  # fmt: skip
    """Rows [first, first + ROWS) and lanes [LANE, LANE + LANES) of one head; zeros behind DIM and, if GUARD, behind the last token.

    `x` is a pointer, or a descriptor of [tokens, heads * DIM] with blocks [ROWS, LANES], which knows where the tokens end.
    """
    if DESC:
        tile = x.load([first, head * DIM + LANE])
    else:
        rows = tl.arange(0, ROWS)
        lanes = tl.arange(0, LANES)
        # 64 bits for where the tile starts, 32 inside of it.
        place = x + tl.cast(first, tl.int64) * (row8 * 8) + tl.cast(head, tl.int64) * (head8 * 8) + LANE
        places = place + rows[:, None] * (row8 * 8) + lanes[None, :]
        if LANE + LANES > DIM:
            inside = lanes[None, :] < DIM - LANE
            if GUARD:
                inside = inside & (first + rows < tokens)[:, None]
            tile = tl.load(places, mask=inside, other=0.0)
        elif GUARD:
            tile = tl.load(places, mask=(first + rows < tokens)[:, None], other=0.0)
        else:
            tile = tl.load(places)
    return tile


@triton.jit
def store_tile(
    x, tile, first, head, tokens, HEADS: tl.constexpr, LANE: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Writes to x [tokens, HEADS, DIM], contiguous, what lies in it."""
    rows = tl.arange(0, ROWS)
    lanes = tl.arange(0, LANES)
    place = x + tl.cast(first, tl.int64) * (HEADS * DIM) + head * DIM + LANE
    inside = (first + rows < tokens)[:, None] & (lanes < DIM - LANE)[None, :]
    tl.store(place + rows[:, None] * (HEADS * DIM) + lanes[None, :], tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def visible(queries, keys, end, column, low, CUT: tl.constexpr):
    """bool [queries, keys] broadcast from token numbers of shapes [n, 1] and [1, m] or the other way round.

    `end` and `column` are those of the keys, `low` that of the queries, in the shapes of these.
    """
    seen = (keys <= queries) & (queries < end)
    if CUT:
        seen = seen & (column >= low)
    return seen


@triton.jit
def bend(scores, scale, softcap, CAPPED: tl.constexpr):
    """Capped scores in units of log2 of what softmax exponentiates, and the factor by which the result is still to be multiplied."""
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), right at both infinities.
        power = tl.exp2(scores * (scale * 2.0 * LOG2E / softcap))
        scores = (1.0 - 2.0 / (power + 1.0)) * (softcap * LOG2E)
        factor = 1.0
    else:
        factor = scale * LOG2E
    return scores, factor


@triton.jit
def slope(bent, softcap):
    """d capped / d score, from what `bend` makes of a score."""
    tanh = bent / (softcap * LOG2E)
    return 1.0 - tanh * tanh
