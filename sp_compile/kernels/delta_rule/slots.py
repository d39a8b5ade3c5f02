"""Between tokens [T, H, ...] and the slots of a block's chunks, one matrix per chunk and head: [n * H, c, ...], c a power of two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sp_compile.kernels.scan.chunks import Block, look
from sp_compile.ops.numerics import accumulate_dtype


@dataclass(frozen=True)
class Form:
    """What the matrices of a call are like: their dtype, and c for chunks of the plan's full length."""

    dtype: torch.dtype
    longest: int

    @staticmethod
    def of(values: Tensor, chunks: Tensor) -> Form:
        """For inputs like `values` and a chunk tensor."""
        return Form(accumulate_dtype(values.dtype), _power(chunks.shape[1] - 1))

    def size(self, length: int) -> int:
        """c for chunks of `length` slots.

        A chunk grows when tokens are appended to its node. In float32, from the shortest length of blocks on, products of matrices then
        keep the bits of rows that were there (measured with MKL); in float64 they don't, so all its chunks have one size.
        """
        return self.longest if self.dtype == torch.float64 else _power(length)

    def slots(self, x: Tensor, block: Block, *, written: bool = False) -> Tensor:
        """[T, H, D] -> a new tensor [n * H, c, D]; zeros in empty slots, and if `written`, in copies, whose outputs nobody gets."""
        values = look(x, block)
        if written and block.copied is not None:
            values = values.flatten(0, 1).index_fill(0, block.copied, 0).view(values.shape)
        values = values.transpose(1, 2)
        made = values.new_empty((*values.shape[:2], self.size(block.length), values.shape[3]), dtype=self.dtype)
        made[:, :, : block.length] = values
        made[:, :, block.length :] = 0
        return made.flatten(0, 1)


def tokens(x: Tensor, block: Block, heads: int) -> Tensor:
    """[n * H, c, D] -> a view [n, l, H, D], as `write` and `Gradient` take it."""
    return x.view(-1, heads, *x.shape[1:])[:, :, : block.length].transpose(1, 2)


def of_block(states: Tensor, block: Block) -> Tensor:
    """[C, H, ...] -> [n * H, ...]"""
    return states[block.chunks].flatten(0, 1)


def _power(length: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << max(length - 1, 0).bit_length()
