"""Small forests with awkward shapes, random ones, and the dense attention of full rows in float64."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from sp_compile.layout import Forest

# name -> rows; a row is a list of token ids, all rows start at column 0.
ROWS: dict[str, list[list[int]]] = {
    "one_token": [[1]],
    "no_sharing": [list(range(9)), list(range(20, 25))],
    "one_branch": [list(range(12)), [*range(7), 50, 51]],
    "one_row_63": [list(range(63))],
    "star_1000": [[*range(40), *range(100 * b, 100 * b + 60)] for b in range(1, 17)],
    "ragged_star": [[*range(30), *range(100 * b, 100 * b + 7 * b)] for b in range(1, 11)],
    "several_roots": [[r * 10, *range(r * 10 + 1, r * 10 + 4), 900 + b] for r in range(4) for b in range(3)],
    "strict_prefixes": [list(range(n)) for n in (3, 6, 6, 9)],
    "deep": [[*range(5 * n), 900 + n, 950 + n] for n in range(1, 8)],
    "tokens_of_one": [[a, b, c] for a in range(2) for b in range(3) for c in range(2)],
}


def forest(name: str) -> Forest:
    return Forest.from_rows(ROWS[name])


def random_forest(seed: int, rows: int = 7, length: int = 24) -> Forest:
    """Rows over two symbols that branch now and then, some cut short."""
    generator = random.Random(seed)
    made: list[list[int]] = []
    for _ in range(rows):
        base = generator.choice(made)[: generator.randint(0, length)] if made and generator.random() < 0.8 else []
        tail = generator.choices((0, 1), k=generator.randint(1 if not base else 0, length))
        made.append(base + tail)
    return Forest.from_rows(made)


def tensors(tree: Forest) -> tuple[Tensor, Tensor, Tensor]:
    """`(end, column, index)` on the CPU."""
    return tree.tensor("end", "cpu"), tree.tensor("column", "cpu"), tree.tensor("index", "cpu")


def dense_attention(
    tree: Forest,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_valid: Tensor | None = None,
    segments: Tensor | None = None,
    bias: Any = None,
    sinks: Tensor | None = None,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
) -> list[Tensor]:
    """Per row of the batch the attention output [Hq, row length, Dv] of the model that knows nothing of forests.

    Plain causal calls go to scaled_dot_product_attention. `bias(columns_q, columns_k)` gives a [H|1, n, n] additive bias of columns.
    """
    index = tree.tensor("index", "cpu")
    groups = q.shape[1] // k.shape[1]
    out = []
    for row in index:
        tokens = row[row >= 0]
        columns = (row >= 0).nonzero()[:, 0]
        rows = [x[0][:, tokens] for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))]
        if all(x is None for x in (key_valid, segments, bias, sinks, window, chunk, softcap)):
            out.append(torch.nn.functional.scaled_dot_product_attention(*(x[None] for x in rows), is_causal=True, scale=scale)[0])
            continue
        scores = rows[0] @ rows[1].mT * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        distance = columns[:, None] - columns[None, :]
        seen = distance >= 0
        if window is not None:
            seen &= distance < window
        if chunk is not None:
            seen &= columns[:, None] // chunk == columns[None, :] // chunk
        if key_valid is not None:
            seen &= key_valid[0, tokens]
        if segments is not None:
            seen &= segments[0, tokens][:, None] == segments[0, tokens][None, :]
        if bias is not None:
            scores = scores + bias(columns, columns)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(tokens), 1)], -1)
        weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., : len(tokens)]
        out.append(weights @ rows[2])
    return out
