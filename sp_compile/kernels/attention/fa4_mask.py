"""The mask of a forest as flash-attn-4's kernels call it, score by score in blocks that are visible in part.

Imported where the package is about to be used (`fa4.py`), since it needs the CuTe DSL.
"""

from __future__ import annotations

import cutlass
from cutlass import cute
from flash_attn.cute import utils


@cute.jit
def forest_mask(batch, head, query, key, lengths, tensors):
    """Whether `query` sees `key`: key <= query < end[key], with `end` int32 the only one of `tensors`, long enough for every block."""
    end = utils.scalar_to_ssa(tensors[0][key[0]], cutlass.Int32)
    return (key <= query) & (query < end)
