"""Products of queries and keys of a chunk, weighted with the decay between them, and their gradients.

`rows` [N, c, 2, K] holds query and key of each token, `k` is rows[:, :, 1]. For i > j both forms compute

    pairs[i, which, j] = sum over d of rows[i, which, d] * k[j, d] * decay(i, j, d)

and zeros elsewhere. Diagonal entries have no decay and are added by the caller, so that they never enter the gradient of one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sp_compile.kernels.delta_rule.decays import Decays

# Halves smaller than this are not worth matrix products of their own: whole blocks of it are multiplied, and masked.
SMALL = 16


def diagonal_blocks(pairs: Tensor, size: int) -> Tensor:
    """[N, c / size, size, 2, size] view of the pairs [N, c, 2, c] within blocks of tokens."""
    chunks, tokens = pairs.shape[:2]
    row, which, column = pairs.stride()[1:]
    return pairs.as_strided((chunks, tokens // size, size, 2, size), (pairs.stride(0), size * (row + column), row, which, column))


def decay_matrix(decays: Decays) -> Tensor:
    """[N, c, c] decay from token j to token i > j, at [i, j], for D = 1; zeros elsewhere."""
    chunks, size, _ = decays.start.shape
    matrix = decays.start.new_zeros((chunks, size, size))
    for factors in decays.levels:
        torch.mul(factors[:, :, 1], factors[:, :, 0].mT, out=_below(matrix, factors.shape[3]))
    return matrix


def log_gradient_of(rows: Tensor, columns: Tensor) -> Tensor:
    """[N, c, 1] gradient of the log decay up to each token, for products that exp(difference of two of them) multiplies.

    A pair (i, j) adds its gradient times itself at i and takes it at j. Most of it cancels in sums over tokens; in float64 it does so
    exactly, where sums in float32 would leave their rounding.

    Args:
        rows: [N, c, n] these products by i, with zeros on the diagonal.
        columns: [N, i, c] the same by j.
    """
    return (rows.sum(2, dtype=torch.float64) - columns.sum(1, dtype=torch.float64))[..., None]


class PerHead:
    """One decay for all rows of the state: one matrix product, then a matrix of decays."""

    def __init__(self, decays: Decays) -> None:
        """`decays` with D = 1."""
        self.matrix = decay_matrix(decays)

    def products(self, rows: Tensor) -> Tensor:
        """See the module's docstring; [N, c, 2, c]."""
        chunks, size, _, width = rows.shape
        made = torch.bmm(rows.view(chunks, 2 * size, width), rows[:, :, 1].mT).view(chunks, size, 2, size)
        return made.mul_(self.matrix[:, :, None])

    def pullback(self, rows: Tensor, pairs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of `rows` as such, of `k` as the other factor, and [N, c, 1] of the log decay up to each token.

        `pairs` are the products, whatever their diagonal; `grad` [N, c, 2, c] is theirs and gets overwritten.
        """
        chunks, size, _, width = rows.shape
        weights = grad * pairs
        weights.diagonal(dim1=1, dim2=3).zero_()
        d_log = log_gradient_of(weights.view(chunks, size, 2 * size), weights.sum(2))
        grad = grad.mul_(self.matrix[:, :, None]).view(chunks, 2 * size, size)
        return torch.bmm(grad, rows[:, :, 1]).view(rows.shape), torch.bmm(grad.mT, rows.view(chunks, 2 * size, width)), d_log

    @staticmethod
    def reduced(values: Tensor) -> Tensor:
        """Gradient of a log decay, from [..., K] per row of the state."""
        return values.sum(-1, keepdim=True, dtype=torch.float64)


class PerRow:
    """A decay for each row of the state: one matrix product per level of halves, of rows and keys scaled towards the level's border."""

    def __init__(self, decays: Decays) -> None:
        """`decays` with D = K."""
        self.levels = decays.levels

    def products(self, rows: Tensor) -> Tensor:
        """See the module's docstring; [N, c, 2, c]."""
        chunks, size, _, width = rows.shape
        made = rows.new_zeros((chunks, size, 2, size))
        for factors in self.levels:
            half = factors.shape[3]
            scaled = rows * factors.reshape(chunks, size, 1, width)
            if 2 * half > SMALL:
                right, left = self._halves(scaled, half)
                part = torch.bmm(right, left.mT).view(chunks, -1, half, 2, half)
                diagonal_blocks(made, 2 * half)[:, :, half:, :, :half] = part
            else:
                block = min(SMALL, size)
                blocked = scaled.view(-1, block, 2, width)
                part = torch.bmm(blocked.view(-1, 2 * block, width), blocked[:, :, 1].mT).view(chunks, -1, block, 2, block)
                diagonal_blocks(made, block).addcmul_(part, _level_mask(half, block, rows))
        return made

    def pullback(self, rows: Tensor, pairs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of `rows` as such, of `k` as the other factor, and [N, c, K] of the log decay up to each token."""
        chunks, size, _, width = rows.shape
        d_rows = torch.zeros_like(rows)
        d_k = rows.new_zeros((chunks, size, width))
        for factors in self.levels:
            half = factors.shape[3]
            scaled = rows * factors.reshape(chunks, size, 1, width)
            if 2 * half > SMALL:
                right, left = self._halves(scaled, half)
                part = diagonal_blocks(grad, 2 * half)[:, :, half:, :, :half].reshape(-1, 2 * half, half)
                shape = (chunks, -1, 2, half)
                d_rows.view(*shape, 2, width)[:, :, 1] += torch.bmm(part, left).view(chunks, -1, half, 2, width) * factors[:, :, 1, :, None]
                d_k.view(*shape, width)[:, :, 0] += torch.bmm(part.mT, right).view(chunks, -1, half, width) * factors[:, :, 0]
            else:
                block = min(SMALL, size)
                blocked = scaled.view(-1, block, 2, width)
                part = (diagonal_blocks(grad, block) * _level_mask(half, block, rows)).view(-1, 2 * block, block)
                flat = factors.reshape(chunks, size, width)
                d_rows.addcmul_(torch.bmm(part, blocked[:, :, 1]).view(rows.shape), flat[:, :, None])
                d_k.addcmul_(torch.bmm(part.mT, blocked.view(-1, 2 * block, width)).view(d_k.shape), flat)
        # Per row, what a decay gains from a pair is known only as sums over the pairs of a token.
        return d_rows, d_k, (rows * d_rows).sum(2).addcmul_(rows[:, :, 1], d_k, value=-1)

    @staticmethod
    def reduced(values: Tensor) -> Tensor:
        """Gradient of log decays, from [..., K] per row of the state."""
        return values

    @staticmethod
    def _halves(scaled: Tensor, half: int) -> tuple[Tensor, Tensor]:
        """Rows of the right halves [N * c/2h, 2h, K], keys of the left ones [N * c/2h, h, K]."""
        width = scaled.shape[3]
        parted = scaled.view(-1, 2, half, 2, width)
        return parted[:, 1].reshape(-1, 2 * half, width), parted[:, 0, :, 1]


def _below(matrix: Tensor, half: int) -> Tensor:
    """[N, c / 2h, h, h] view: in each diagonal block of size 2h, the part whose row is in the second half and column in the first."""
    chunks, size, _ = matrix.shape
    row, column = matrix.stride()[1:]
    shape, strides = (chunks, size // (2 * half), half, half), (matrix.stride(0), 2 * half * (row + column), row, column)
    return matrix.as_strided(shape, strides, matrix.storage_offset() + half * row)


def _level_mask(half: int, block: int, like: Tensor) -> Tensor:
    """[block, 1, block]: 1 where a pair is parted at the level of halves of this size."""
    place = torch.arange(block, device=like.device)
    same = place[:, None] // (2 * half) == place[None, :] // (2 * half)
    return (same & (place[:, None] // half > place[None, :] // half)).to(like.dtype)[:, None]
