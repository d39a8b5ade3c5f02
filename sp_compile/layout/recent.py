"""The forests of recent batches, found again by their content."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from threading import RLock

import torch

from sp_compile.layout.forest import Forest

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True)
class _Batch:
    keys: tuple[torch.Tensor, ...]
    keep: torch.Tensor | None
    forest: Forest

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.keys if self.keep is None else (*self.keys, self.keep)


class RecentForests:
    """`Forest.from_tokens` that remembers: several models, and several epochs, see one batch.

    A batch is recognised by comparing all of its keys, bit by bit, with copies, which costs a fraction of building the forest's arrays
    and nothing on a device. Identity would not do: loaders fill one buffer again and again.

    Args:
        capacity: batches to remember; their device tensors stay alive as long.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, f"room for at least one batch, got {capacity}"
        self._lock = RLock()
        self._batches: collections.deque[_Batch] = collections.deque(maxlen=capacity)

    def clear(self) -> None:
        """Forgets every batch."""
        with self._lock:
            self._batches.clear()

    def get(self, keys: Sequence[torch.Tensor], keep: torch.Tensor | None) -> Forest:
        """The forest of CPU tensors `keys` and `keep`, see `Forest.from_tokens`."""
        bits = [_bits(key) for key in keys]
        with self._lock:
            for batch in self._batches:
                if _same(batch, bits, keep):
                    return batch.forest
        forest = Forest.from_tokens(*keys, keep=keep)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            full = len(self._batches) == self._batches.maxlen
            spare = list(self._batches.pop().parts) if full else []
            copies = tuple(_copy(part, spare) for part in bits)
            self._batches.appendleft(_Batch(copies, None if keep is None else _copy(keep, spare), forest))
        return forest


def _copy(part: torch.Tensor, spare: list[torch.Tensor]) -> torch.Tensor:
    """A copy, in the memory of a batch that is forgotten if it fits: fresh memory costs more than the copy."""
    for number, old in enumerate(spare):
        if old.shape == part.shape and old.dtype == part.dtype and part.is_contiguous():
            return spare.pop(number).copy_(part)
    return part.clone(memory_format=torch.contiguous_format)


def _bits(key: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: 0.0 and -0.0 are different keys, and a NaN is one with itself."""
    return key.view(_INTEGER[key.element_size()]) if key.dtype.is_floating_point else key


def _same(batch: _Batch, keys: Sequence[torch.Tensor], keep: torch.Tensor | None) -> bool:
    if len(batch.keys) != len(keys) or (batch.keep is None) != (keep is None):
        return False
    pairs = list(zip(batch.keys, keys, strict=True)) + ([(batch.keep, keep)] if batch.keep is not None and keep is not None else [])
    if not all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs):
        return False
    # The last column first: other batches differ there, whatever template they begin with.
    return all(torch.equal(a[..., -1], b[..., -1]) for a, b in pairs if a.numel()) and all(torch.equal(a, b) for a, b in pairs)
