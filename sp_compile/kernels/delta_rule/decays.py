"""Decays between the tokens of a chunk, as products of two factors that are exponentials of plain sums of log decays.

The decay from token j to token i > j is exp of the sum of g over j < l <= i. Cut a chunk into halves of size c/2, each of them into
halves again, down to single tokens: every pair (i, j) is parted at exactly one level, by one border, and

    decay(i, j) = exp(sum of g from the border to i) * exp(sum of g from j to the border)

Both exponents are <= 0 for g <= 0, so nothing overflows, whatever the decay and however it differs from row to row of the state; no
difference of large sums is formed either, so nothing cancels. Sums grow by doubling, log2(c) additions deep.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# exp of it is zero in float64, and sums of as many as a chunk holds stay finite: a log decay of -inf would make NaN of 0 * inf.
LOWEST = -1e4


@dataclass(frozen=True)
class Decays:
    """Decays of N chunks of c tokens, for D rows of the state (1: all rows alike).

    Attributes:
        levels: per size h = 1, 2, ..., c/2 of a half, [N, c/2h, 2, h, D]: the factor of each token towards its border.
        start: [N, c, D] decay from before the chunk to after each token.
        stop: [N, c, D] decay from after each token to the chunk's last.
    """

    levels: tuple[Tensor, ...]
    start: Tensor
    stop: Tensor

    @property
    def whole(self) -> Tensor:
        """[N, D] decay over the whole chunk."""
        return self.start[:, -1]


def decays(g: Tensor) -> Decays:
    """Decays of chunks with log decay g [N, c, D], c a power of two; empty slots hold 0."""
    chunks, size, rows = g.shape
    before = g.clamp(min=LOWEST)
    after = torch.zeros_like(before)
    levels: list[Tensor] = []
    half = 1
    while half < size:
        shape = (chunks, size // (2 * half), 2, half, rows)
        to, since = after.view(shape), before.view(shape)
        factors = since.clone()
        factors[:, :, 0] = to[:, :, 0]
        levels.append(factors.exp_())
        left = since[:, :, 0, -1:].clone()
        to[:, :, 0] += since[:, :, 1, -1:]
        since[:, :, 1] += left
        half *= 2
    return Decays(tuple(levels), before.exp_(), after.exp_())


def log_gradient(sums: Tensor) -> Tensor:
    """Gradient of g, in place, for that of the log decays from before the chunk to after each token [N, c, D]: its sums from behind.

    In halves, as above: `torch.cumsum` of floats has no reproducible kernel on CUDA.
    """
    chunks, size, rows = sums.shape
    half = 1
    while half < size:
        parts = sums.view(chunks, size // (2 * half), 2, half, rows)
        parts[:, :, 0] += parts[:, :, 1, :1]
        half *= 2
    return sums
