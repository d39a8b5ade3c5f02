"""Between rows and physical tokens: `pack` and `unpack` for values of any layout.

A pattern names the dimensions of the dense value from left to right, separated by spaces: `B` rows, `L` columns, `_` anything else;
merged dimensions are joined by `*`, with plain sizes as numbers: a [B * L, V] value is `"B*L _"`, [B, L * k, H] is `"B L*4 _"`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sp_compile.ops import rows as _rows  # noqa: F401  (registers sp_compile::unpack)
from sp_compile.ops.numerics import accumulate_dtype


def parse(pattern: str) -> list[list[str]]:
    return [dim.split("*") for dim in pattern.split(" ")] if pattern else []


def _split(
    value: Tensor, dims: list[list[str]], known: dict[str, int | torch.SymInt]
) -> tuple[Tensor, list[str], list[int | torch.SymInt]]:
    """The value with one dimension per factor, and the factors with their sizes."""
    factors: list[str] = []
    sizes: list[int | torch.SymInt] = []
    for place, dim in enumerate(dims):
        for factor in dim:
            factors.append(factor)
            if factor in known:
                sizes.append(known[factor])
            else:
                sizes.append(value.shape[place] if factor == "_" else int(factor))
    return value.reshape(sizes), factors, sizes


def pack(value: Tensor, row: Tensor, column: Tensor, index: Tensor, pattern: str) -> Tensor:
    """The packed form of a dense value, one element per physical token.

    Args:
        value: dense value; the batch dimension may be absent.
        row, column: int64 [T], a representative row and the column of each physical token.
        index: int64 [B, L], for its sizes.
        pattern: the dimensions of `value`. Two column dimensions make a (query, key) matrix [T, T], in which pairs that no row
            holds are arbitrary.

    Returns:
        B becomes 1, L becomes T, B*L becomes T.
    """
    dims = parse(pattern)
    known: dict[str, int | torch.SymInt] = {"B": index.shape[0], "L": index.shape[1]}
    split, factors, sizes = _split(value, dims, known)
    columns = [i for i, f in enumerate(factors) if f == "L"]
    batch = factors.index("B") if "B" in factors else None
    first = [*([batch] if batch is not None else []), *columns]
    moved = split.permute([*first, *(i for i in range(len(factors)) if i not in first)])
    if len(columns) == 2:
        places = torch.arange(row.shape[0], device=row.device)
        # the later token's row: it is one of the earlier token's too, if that is an ancestor
        rows = [row[torch.maximum(places[:, None], places)]] if batch is not None else []
        taken = moved[(*rows, column[:, None], column[None, :])]
    else:
        taken = moved[row, column] if batch is not None else moved[column]
    rest = iter(range(len(columns), taken.dim()))
    order = [columns.index(i) if i in columns else next(rest) for i in range(len(factors)) if i != batch]
    placed = taken.permute(order)
    tokens = row.shape[0]
    if batch is not None:
        placed = placed.unsqueeze(batch)
    small = {"B": 1, "L": tokens}
    sizes_after = [_product([small.get(f, s) for f, s in group]) for group in _grouped(dims, sizes)]
    return placed.reshape(sizes_after)


def unpack(value: Tensor, index: Tensor, pattern: str) -> Tensor:
    """The dense form of a packed value: token `index[b, l]` at row b, column l, zeros where the index is -1.

    Args:
        value: packed value with one B and one L factor.
        index: int64 [B, L].
        pattern: the dimensions of the dense value.
    """
    dims = parse(pattern)
    where = next(i for i, dim in enumerate(dims) if "L" in dim)
    per_token = _product([int(f) for f in dims[where] if f not in ("B", "L")])
    tokens = value.shape[where] // per_token if per_token != 1 else value.shape[where]
    split, factors, sizes = _split(value, dims, {"B": 1, "L": tokens})
    batch, columns = factors.index("B"), factors.index("L")
    order = [columns, batch, *(i for i in range(len(factors)) if i not in (batch, columns))]
    first = split.permute(order).squeeze(1)
    taken = torch.ops.sp_compile.unpack(first.contiguous(), index)
    rest = iter(range(2, taken.dim()))
    placed: Tensor = taken.permute([0 if i == batch else 1 if i == columns else next(rest) for i in range(len(factors))])
    full = {"B": index.shape[0], "L": index.shape[1]}
    return placed.reshape([_product([full.get(f, s) for f, s in group]) for group in _grouped(dims, sizes)])


def _grouped(dims: list[list[str]], sizes: list[int | torch.SymInt]) -> list[list[tuple[str, int | torch.SymInt]]]:
    found = iter(sizes)
    return [[(factor, next(found)) for factor in dim] for dim in dims]


def _product(sizes: list[int | torch.SymInt]) -> int | torch.SymInt:
    result: int | torch.SymInt = 1
    for size in sizes:
        result = result * size
    return result


def wrapped_classes(target: Tensor, classes: int) -> Tensor:
    """The target as indexing reads it: numbers below zero count from the end."""
    return torch.where(target < 0, target + classes, target)


def counted_classes(index: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """The target, or class 0 where a position does not count: its target is `ignore_index`, or its index is -1."""
    return target.masked_fill((target == ignore_index) | (index < 0), 0)


def nll_rows(picked: Tensor, index: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The losses of `nll_loss(reduction="none")` and their weights, from the log-probabilities `picked` at `counted_classes`."""
    counted = (target != ignore_index) & (index >= 0)
    weights = torch.ones_like(picked) if weight is None else weight[counted_classes(index, target, ignore_index)]
    # A log-probability of -inf where nothing counts would make NaN as a product.
    loss = torch.where(counted, -picked * weights, 0)
    return loss, weights.to(accumulate_dtype(picked.dtype)) * counted


def weighted_mean(loss: Tensor, weight: Tensor) -> Tensor:
    """The sum of the losses over the sum of their weights, in the weights' dtype, rounded once; NaN if nothing counts.

    Then no loss gets a gradient, as from torch's own op; differentiating 0 / 0 would give every parameter NaN.
    """
    total = weight.sum()
    mean = loss.sum(dtype=weight.dtype) / torch.where(total == 0, 1, total)
    return torch.where(total == 0, math.nan, mean).to(loss.dtype)
