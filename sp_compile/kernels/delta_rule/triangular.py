"""The inverse of unit lower triangular matrices, batched."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 16


def unit_lower_inverse(strict: Tensor) -> Tensor:
    """[N, c, c] inverse of I + `strict` for `strict` [N, c, c], c a power of two; on and above the diagonal `strict` is not read.

    Diagonal blocks of `BASE` rows by substitution; then pairs of blocks are joined, until one is left:

        inv [[L, 0], [B, R]] = [[inv L, 0], [-inv R B inv L, inv R]]
    """
    size = strict.shape[1]
    half = min(size, BASE)
    corner = _blocks(strict, half).reshape(-1, half, half)
    unit = torch.eye(half, dtype=strict.dtype, device=strict.device).expand_as(corner)
    inverse: Tensor = torch.linalg.solve_triangular(corner, unit, upper=False, unitriangular=True)
    while half < size:
        below = _blocks(strict, 2 * half)[:, :, half:, :half].reshape(-1, half, half)
        left, right = inverse.view(-1, 2, half, half).unbind(1)
        joined = strict.new_zeros((left.shape[0], 2 * half, 2 * half))
        joined[:, :half, :half], joined[:, half:, half:] = left, right
        joined[:, half:, :half] = torch.bmm(right, torch.bmm(below, left)).neg_()
        inverse, half = joined, 2 * half
    return inverse


def _blocks(matrix: Tensor, size: int) -> Tensor:
    """[N, c / size, size, size] view of the diagonal blocks."""
    chunks, rows, _ = matrix.shape
    step = size * (matrix.stride(1) + matrix.stride(2))
    shape, strides = (chunks, rows // size, size, size), (matrix.stride(0), step, matrix.stride(1), matrix.stride(2))
    return matrix.as_strided(shape, strides)
