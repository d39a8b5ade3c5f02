"""Forward: one program owns a tile of queries of one head, visits the keys that it sees, and keeps a running softmax in float32."""

from __future__ import annotations

import triton
import triton.language as tl

from sp_compile.kernels.attention.forest_triton.parts import LN2, LOG2E, SECTIONS, STRIDES, bend, load_tile, store_tile, visible


@triton.jit
def _attend(
    out1, out2, top, total, q1, q2, first, queries, low, k1, k2, v1, v2, head, k_row8, k_head8, v_row8, v_head8, end, column, scale,
    softcap, tokens,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, GUARD: tl.constexpr, CUT: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, DESC: tl.constexpr,
):  # fmt: skip
    """One tile of keys taken into the running softmax."""
    k = load_tile(k1, first, head, k_row8, k_head8, tokens, 0, D1, D, KEYS, GUARD, DESC)
    scores = tl.dot(q1, tl.trans(k), input_precision=PRECISION)
    if D2 > 0:
        k = load_tile(k2, first, head, k_row8, k_head8, tokens, D1, D2, D, KEYS, GUARD, DESC)
        scores = tl.dot(q2, tl.trans(k), scores, input_precision=PRECISION)
    scores, factor = bend(scores, scale, softcap, CAPPED)
    if MASKED:
        keys = first + tl.arange(0, KEYS)
        ends = tl.load(end + keys)
        columns = tl.load(column + keys) if CUT else ends
        scores = tl.where(
            visible(queries[:, None], keys[None, :], ends[None, :], columns[None, :], low[:, None], CUT), scores, float("-inf")
        )
    # The factor is positive, and multiplying behind the maximum leaves one operation a score.
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    # A row that has seen nothing yet has no top to subtract.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    weights = tl.exp2(scores * factor - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(weights, 1)
    v = load_tile(v1, first, head, v_row8, v_head8, tokens, 0, V1, DV, KEYS, GUARD, DESC)
    weights = weights.to(v.dtype)
    out1 = tl.dot(weights, v, out1 * fade[:, None], input_precision=PRECISION)
    if V2 > 0:
        v = load_tile(v2, first, head, v_row8, v_head8, tokens, V1, V2, DV, KEYS, GUARD, DESC)
        out2 = tl.dot(weights, v, out2 * fade[:, None], input_precision=PRECISION)
    return out1, out2, new_top, total


@triton.jit(do_not_specialize=[*SECTIONS, "tokens", *STRIDES[:6]])
def forward(
    q1, q2, k1, k2, v1, v2, out, lse, sinks, end, tiles,
    order32, full_at32, full32, part_at32, part32, column32, low32,
    tokens, q_row8, q_head8, k_row8, k_head8, v_row8, v_head8, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    MASK_ALL: tl.constexpr, CUT: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr, DESC: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of queries times heads.

    Args:
        q1, q2, ...: pointers, or descriptors of the first and the other lanes; see `load_tile`.
        out: [tokens, HEADS, DV]. lse: float32 [HEADS, tokens].
        tiles, order32, ..., low32: the forest's tiles (`layout/attention_tiles.py`) and where their sections start, in units of 32; `full`
            and `part` list blocks of keys. end: that section, or one more hidden.
        GROUP: query heads per key head. D = D1 + D2 and DV = V1 + V2 lanes, in powers of two, the last ones possibly empty.
        MASK_ALL: full blocks are masked as well, since `end` says more than the lists.
    """
    PER: tl.constexpr = BLOCK // QUERIES
    full_at, full, part_at, part = tiles + full_at32 * 32, tiles + full32 * 32, tiles + part_at32 * 32, tiles + part32 * 32
    column, low = tiles + column32 * 32, tiles + low32 * 32
    item = tl.program_id(0)
    head = item % HEADS
    tile = item // HEADS
    block = tl.load(tiles + order32 * 32 + tile // PER)
    first = block * BLOCK + tile % PER * QUERIES
    queries = first + tl.arange(0, QUERIES)
    lows = tl.load(low + queries) if CUT else queries
    q_1 = load_tile(q1, first, head, q_row8, q_head8, tokens, 0, D1, D, QUERIES, True, DESC)
    q_2 = q_1
    if D2 > 0:
        q_2 = load_tile(q2, first, head, q_row8, q_head8, tokens, D1, D2, D, QUERIES, True, DESC)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        top = tl.zeros([QUERIES], tl.float32) + sink
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    out1 = tl.zeros([QUERIES, V1], tl.float32)
    out2 = tl.zeros([QUERIES, V2 if V2 > 0 else 16], tl.float32)
    kv = head // GROUP
    for run in range(tl.load(full_at + block), tl.load(full_at + block + 1)):
        start = tl.load(full + 2 * run) * BLOCK
        stop = tl.load(full + 2 * run + 1) * BLOCK
        for key in tl.range(start, stop, KEYS, num_stages=STAGES, warp_specialize=WARP_SPECIALIZE):
            out1, out2, top, total = _attend(
                out1, out2, top, total, q_1, q_2, key, queries, lows, k1, k2, v1, v2, kv, k_row8, k_head8, v_row8, v_head8, end, column,
                scale, softcap, tokens, D, D1, D2, DV, V1, V2, KEYS, MASK_ALL, False, CUT, CAPPED, PRECISION, DESC,
            )  # fmt: skip
    for run in range(tl.load(part_at + block), tl.load(part_at + block + 1)):
        start = tl.load(part + 2 * run) * BLOCK
        stop = tl.minimum(tl.load(part + 2 * run + 1) * BLOCK, first + QUERIES)
        for key in tl.range(start, stop, KEYS, num_stages=STAGES):
            out1, out2, top, total = _attend(
                out1, out2, top, total, q_1, q_2, key, queries, lows, k1, k2, v1, v2, kv, k_row8, k_head8, v_row8, v_head8, end, column,
                scale, softcap, tokens, D, D1, D2, DV, V1, V2, KEYS, True, True, CUT, CAPPED, PRECISION, DESC,
            )  # fmt: skip
    some = tl.where(total == 0.0, 1.0, total)
    store_tile(out, out1 / some[:, None], first, head, tokens, HEADS, 0, V1, DV, QUERIES)
    if V2 > 0:
        store_tile(out, out2 / some[:, None], first, head, tokens, HEADS, V1, V2, DV, QUERIES)
    tl.store(lse + tl.cast(head, tl.int64) * tokens + queries, (top + tl.log2(total)) * LN2, mask=queries < tokens)
