"""Backward: probabilities are rebuilt from the log-sum-exp. Every gradient has one owner, which adds up its terms in a fixed order.

`prepare` leaves, per head, log-sum-exp in units of log2 and delta = sum over v of grad * out, continued to whole blocks so that rows behind
the last token weigh exp2(-inf) = 0. `key_gradients` owns tiles of keys and visits queries, those of all heads that share the keys one head
after the other; `query_gradients` owns tiles of queries and visits keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sp_compile.kernels.attention.forest_triton.parts import LOG2E, SECTIONS, STRIDES, bend, load_tile, slope, store_tile, visible


@triton.jit(do_not_specialize=["tokens", "padded", "o_row8", "o_head8", "g_row8", "g_head8"])
def prepare(
    out, grad, lse, lse2, delta, tokens, padded, o_row8, o_head8, g_row8, g_head8,
    DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: [padded / ROWS, heads]. Writes lse2 and delta, float32 [heads, padded]."""
    first = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    rows = first + tl.arange(0, ROWS)
    o = load_tile(out, first, head, o_row8, o_head8, tokens, 0, V1, DV, ROWS, True, False).to(tl.float32)
    g = load_tile(grad, first, head, g_row8, g_head8, tokens, 0, V1, DV, ROWS, True, False).to(tl.float32)
    inner = tl.sum(o * g, 1)
    if V2 > 0:
        o = load_tile(out, first, head, o_row8, o_head8, tokens, V1, V2, DV, ROWS, True, False).to(tl.float32)
        g = load_tile(grad, first, head, g_row8, g_head8, tokens, V1, V2, DV, ROWS, True, False).to(tl.float32)
        inner += tl.sum(o * g, 1)
    known = tl.load(lse + tl.cast(head, tl.int64) * tokens + rows, mask=rows < tokens, other=float("-inf"))
    # A row that sees nothing has -inf, and every weight in it is to be 0.
    known = tl.where(known == float("-inf"), float("inf"), known * LOG2E)
    place = tl.cast(head, tl.int64) * padded + rows
    tl.store(lse2 + place, known)
    tl.store(delta + place, inner)


@triton.jit
def _visit_queries(
    dk1, dk2, dv1, dv2, k_1, k_2, v_1, v_2, first, keys, ends, columns, q1, q2, g1, g2, lse2, delta, head, padded, low,
    q_row8, q_head8, g_row8, g_head8, scale, softcap, tokens,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, QUERIES: tl.constexpr,
    MASKED: tl.constexpr, CUT: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, DESC: tl.constexpr,
):  # fmt: skip
    """One tile of queries taken into the gradients of a tile of keys. Scores are [keys, queries]."""
    q_1 = load_tile(q1, first, head, q_row8, q_head8, tokens, 0, D1, D, QUERIES, True, DESC)
    scores = tl.dot(k_1, tl.trans(q_1), input_precision=PRECISION)
    q_2 = q_1
    if D2 > 0:
        q_2 = load_tile(q2, first, head, q_row8, q_head8, tokens, D1, D2, D, QUERIES, True, DESC)
        scores = tl.dot(k_2, tl.trans(q_2), scores, input_precision=PRECISION)
    scores, factor = bend(scores, scale, softcap, CAPPED)
    queries = first + tl.arange(0, QUERIES)
    place = tl.cast(head, tl.int64) * padded + queries
    weights = tl.exp2(scores * factor - tl.load(lse2 + place)[None, :])
    if MASKED:
        lows = tl.load(low + queries) if CUT else queries
        weights = tl.where(visible(queries[None, :], keys[:, None], ends[:, None], columns[:, None], lows[None, :], CUT), weights, 0.0)
    g_1 = load_tile(g1, first, head, g_row8, g_head8, tokens, 0, V1, DV, QUERIES, True, DESC)
    rounded = weights.to(g_1.dtype)
    dv1 = tl.dot(rounded, g_1, dv1, input_precision=PRECISION)
    pull = tl.dot(v_1, tl.trans(g_1), input_precision=PRECISION)
    if V2 > 0:
        g_2 = load_tile(g2, first, head, g_row8, g_head8, tokens, V1, V2, DV, QUERIES, True, DESC)
        dv2 = tl.dot(rounded, g_2, dv2, input_precision=PRECISION)
        pull = tl.dot(v_2, tl.trans(g_2), pull, input_precision=PRECISION)
    d_scores = weights * (pull - tl.load(delta + place)[None, :])
    if CAPPED:
        # A hidden score has weight 0; its slope is finite.
        d_scores = d_scores * slope(scores, softcap)
    d_scores = d_scores.to(q_1.dtype)
    dk1 = tl.dot(d_scores, q_1, dk1, input_precision=PRECISION)
    if D2 > 0:
        dk2 = tl.dot(d_scores, q_2, dk2, input_precision=PRECISION)
    return dk1, dk2, dv1, dv2


@triton.jit(do_not_specialize=[*SECTIONS, "tokens", "padded", *STRIDES])
def key_gradients(
    q1, q2, k1, k2, v1, v2, g1, g2, dk, dv, lse2, delta, end, tiles,
    order32, full_at32, full32, part_at32, part32, column32, low32,
    tokens, padded, q_row8, q_head8, k_row8, k_head8, v_row8, v_head8, g_row8, g_head8, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    MASK_ALL: tl.constexpr, CUT: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, DESC: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of keys times key heads. Writes dk and dv, [tokens, key heads, D and DV]; `full` and `part` list blocks of queries."""
    PER: tl.constexpr = BLOCK // KEYS
    KV: tl.constexpr = HEADS // GROUP
    full_at, full, part_at, part = tiles + full_at32 * 32, tiles + full32 * 32, tiles + part_at32 * 32, tiles + part32 * 32
    column, low = tiles + column32 * 32, tiles + low32 * 32
    item = tl.program_id(0)
    kv = item % KV
    tile = item // KV
    block = tl.load(tiles + order32 * 32 + tile // PER)
    first = block * BLOCK + tile % PER * KEYS
    keys = first + tl.arange(0, KEYS)
    ends = tl.load(end + keys)
    columns = tl.load(column + keys) if CUT else ends
    k_1 = load_tile(k1, first, kv, k_row8, k_head8, tokens, 0, D1, D, KEYS, True, DESC)
    k_2 = k_1
    if D2 > 0:
        k_2 = load_tile(k2, first, kv, k_row8, k_head8, tokens, D1, D2, D, KEYS, True, DESC)
    v_1 = load_tile(v1, first, kv, v_row8, v_head8, tokens, 0, V1, DV, KEYS, True, DESC)
    v_2 = v_1
    if V2 > 0:
        v_2 = load_tile(v2, first, kv, v_row8, v_head8, tokens, V1, V2, DV, KEYS, True, DESC)
    dk1 = tl.zeros([KEYS, D1], tl.float32)
    dk2 = tl.zeros([KEYS, D2 if D2 > 0 else 16], tl.float32)
    dv1 = tl.zeros([KEYS, V1], tl.float32)
    dv2 = tl.zeros([KEYS, V2 if V2 > 0 else 16], tl.float32)
    for head in range(kv * GROUP, kv * GROUP + GROUP):
        for run in range(tl.load(part_at + block), tl.load(part_at + block + 1)):
            start = tl.maximum(tl.load(part + 2 * run) * BLOCK, first // QUERIES * QUERIES)
            stop = tl.load(part + 2 * run + 1) * BLOCK
            for query in tl.range(start, stop, QUERIES, num_stages=STAGES):
                dk1, dk2, dv1, dv2 = _visit_queries(
                    dk1, dk2, dv1, dv2, k_1, k_2, v_1, v_2, query, keys, ends, columns, q1, q2, g1, g2, lse2, delta, head, padded, low,
                    q_row8, q_head8, g_row8, g_head8, scale, softcap, tokens,
                    D, D1, D2, DV, V1, V2, QUERIES, True, CUT, CAPPED, PRECISION, DESC,
                )  # fmt: skip
        for run in range(tl.load(full_at + block), tl.load(full_at + block + 1)):
            start = tl.load(full + 2 * run) * BLOCK
            stop = tl.load(full + 2 * run + 1) * BLOCK
            for query in tl.range(start, stop, QUERIES, num_stages=STAGES, warp_specialize=WARP_SPECIALIZE):
                dk1, dk2, dv1, dv2 = _visit_queries(
                    dk1, dk2, dv1, dv2, k_1, k_2, v_1, v_2, query, keys, ends, columns, q1, q2, g1, g2, lse2, delta, head, padded, low,
                    q_row8, q_head8, g_row8, g_head8, scale, softcap, tokens,
                    D, D1, D2, DV, V1, V2, QUERIES, MASK_ALL, CUT, CAPPED, PRECISION, DESC,
                )  # fmt: skip
    store_tile(dk, dk1 * scale, first, kv, tokens, KV, 0, D1, D, KEYS)
    if D2 > 0:
        store_tile(dk, dk2 * scale, first, kv, tokens, KV, D1, D2, D, KEYS)
    store_tile(dv, dv1, first, kv, tokens, KV, 0, V1, DV, KEYS)
    if V2 > 0:
        store_tile(dv, dv2, first, kv, tokens, KV, V1, V2, DV, KEYS)


@triton.jit
def _visit_keys(
    dq1, dq2, q_1, q_2, g_1, g_2, lses, deltas, first, queries, lows, k1, k2, v1, v2, kv, k_row8, k_head8, v_row8, v_head8, end, column,
    scale, softcap, tokens,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, GUARD: tl.constexpr, CUT: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, DESC: tl.constexpr,
):  # fmt: skip
    """One tile of keys taken into the gradient of a tile of queries."""
    k_1 = load_tile(k1, first, kv, k_row8, k_head8, tokens, 0, D1, D, KEYS, GUARD, DESC)
    scores = tl.dot(q_1, tl.trans(k_1), input_precision=PRECISION)
    k_2 = k_1
    if D2 > 0:
        k_2 = load_tile(k2, first, kv, k_row8, k_head8, tokens, D1, D2, D, KEYS, GUARD, DESC)
        scores = tl.dot(q_2, tl.trans(k_2), scores, input_precision=PRECISION)
    scores, factor = bend(scores, scale, softcap, CAPPED)
    weights = tl.exp2(scores * factor - lses[:, None])
    if MASKED:
        keys = first + tl.arange(0, KEYS)
        ends = tl.load(end + keys)
        columns = tl.load(column + keys) if CUT else ends
        weights = tl.where(visible(queries[:, None], keys[None, :], ends[None, :], columns[None, :], lows[:, None], CUT), weights, 0.0)
    v_1 = load_tile(v1, first, kv, v_row8, v_head8, tokens, 0, V1, DV, KEYS, GUARD, DESC)
    pull = tl.dot(g_1, tl.trans(v_1), input_precision=PRECISION)
    if V2 > 0:
        v_2 = load_tile(v2, first, kv, v_row8, v_head8, tokens, V1, V2, DV, KEYS, GUARD, DESC)
        pull = tl.dot(g_2, tl.trans(v_2), pull, input_precision=PRECISION)
    d_scores = weights * (pull - deltas[:, None])
    if CAPPED:
        d_scores = d_scores * slope(scores, softcap)
    d_scores = d_scores.to(k_1.dtype)
    dq1 = tl.dot(d_scores, k_1, dq1, input_precision=PRECISION)
    if D2 > 0:
        dq2 = tl.dot(d_scores, k_2, dq2, input_precision=PRECISION)
    return dq1, dq2


@triton.jit(do_not_specialize=[*SECTIONS, "tokens", "padded", *STRIDES])
def query_gradients(
    q1, q2, k1, k2, v1, v2, g1, g2, dq, lse2, delta, end, tiles,
    order32, full_at32, full32, part_at32, part32, column32, low32,
    tokens, padded, q_row8, q_head8, k_row8, k_head8, v_row8, v_head8, g_row8, g_head8, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    MASK_ALL: tl.constexpr, CUT: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, DESC: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of queries times heads. Writes dq [tokens, HEADS, D]; `full` and `part` list blocks of keys."""
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
    place = tl.cast(head, tl.int64) * padded + queries
    lses = tl.load(lse2 + place)
    deltas = tl.load(delta + place)
    q_1 = load_tile(q1, first, head, q_row8, q_head8, tokens, 0, D1, D, QUERIES, True, DESC)
    q_2 = q_1
    if D2 > 0:
        q_2 = load_tile(q2, first, head, q_row8, q_head8, tokens, D1, D2, D, QUERIES, True, DESC)
    g_1 = load_tile(g1, first, head, g_row8, g_head8, tokens, 0, V1, DV, QUERIES, True, DESC)
    g_2 = g_1
    if V2 > 0:
        g_2 = load_tile(g2, first, head, g_row8, g_head8, tokens, V1, V2, DV, QUERIES, True, DESC)
    dq1 = tl.zeros([QUERIES, D1], tl.float32)
    dq2 = tl.zeros([QUERIES, D2 if D2 > 0 else 16], tl.float32)
    kv = head // GROUP
    for run in range(tl.load(full_at + block), tl.load(full_at + block + 1)):
        start = tl.load(full + 2 * run) * BLOCK
        stop = tl.load(full + 2 * run + 1) * BLOCK
        for key in tl.range(start, stop, KEYS, num_stages=STAGES, warp_specialize=WARP_SPECIALIZE):
            dq1, dq2 = _visit_keys(
                dq1, dq2, q_1, q_2, g_1, g_2, lses, deltas, key, queries, lows, k1, k2, v1, v2, kv, k_row8, k_head8, v_row8, v_head8,
                end, column, scale, softcap, tokens, D, D1, D2, DV, V1, V2, KEYS, MASK_ALL, False, CUT, CAPPED, PRECISION, DESC,
            )  # fmt: skip
    for run in range(tl.load(part_at + block), tl.load(part_at + block + 1)):
        start = tl.load(part + 2 * run) * BLOCK
        stop = tl.minimum(tl.load(part + 2 * run + 1) * BLOCK, first + QUERIES)
        for key in tl.range(start, stop, KEYS, num_stages=STAGES):
            dq1, dq2 = _visit_keys(
                dq1, dq2, q_1, q_2, g_1, g_2, lses, deltas, key, queries, lows, k1, k2, v1, v2, kv, k_row8, k_head8, v_row8, v_head8,
                end, column, scale, softcap, tokens, D, D1, D2, DV, V1, V2, KEYS, True, True, CUT, CAPPED, PRECISION, DESC,
            )  # fmt: skip
    store_tile(dq, dq1 * scale, first, head, tokens, HEADS, 0, D1, D, QUERIES)
    if D2 > 0:
        store_tile(dq, dq2 * scale, first, head, tokens, HEADS, D1, D2, D, QUERIES)
