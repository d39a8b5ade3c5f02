"""Registry of the per-forest tensors that a compiled graph may ask for by name, and their way to a device.

A name stands for one function from a forest to a numpy array. Graph inputs carry these names, so a name is registered once and
its meaning never changes. Base names:

    row, column, count, prev, end    [T] int64, see `Forest`
    index                            [B, L] int64, -1 for dropped
    keep                             [B, L] bool, index >= 0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sp_compile.errors import InvalidForest

if TYPE_CHECKING:
    from sp_compile.layout.forest import Forest

Array = np.ndarray[Any, Any]
Builder = Callable[["Forest"], Array]

Shape = tuple["int | str", ...]

_BUILDERS: dict[str, Builder] = {}
_SHAPES: dict[str, tuple[Shape, torch.dtype]] = {}
# Inductor assumes inputs aligned to 16 bytes; 256 also keeps every tensor on its own cache lines.
_ALIGNMENT = 256


def register(name: str, builder: Builder, shape: Shape = ("T",), dtype: torch.dtype = torch.int64) -> None:
    """Makes `forest.tensor(name, device)` return what `builder(forest)` computes: a numpy array of fixed dtype and rank.

    Args:
        name: the registry name.
        builder: from a forest to the array.
        shape: sizes as numbers, or names of sizes that change from forest to forest: "T", "B", "L" or a name of its own.
        dtype: of the tensor.

    Raises:
        InvalidForest: the name is empty or taken.
    """
    if not name:
        raise InvalidForest("forest tensor: expected a name, got an empty string")
    if name in _BUILDERS:
        taken = _BUILDERS[name]
        raise InvalidForest(f"forest tensor {name!r}: expected an unused name, got one that {taken.__module__} registered already")
    _BUILDERS[name] = builder
    _SHAPES[name] = (shape, dtype)


def symbolic_shape(name: str) -> tuple[Shape, torch.dtype]:
    """The shape, in numbers and names of sizes, and the dtype of a registered tensor.

    Raises:
        InvalidForest: unknown name.
    """
    if name not in _SHAPES:
        raise InvalidForest(f"forest tensor: expected one of {', '.join(registered())}, got {name!r}")
    return _SHAPES[name]


def registered() -> tuple[str, ...]:
    """Registered names in alphabetical order."""
    return tuple(sorted(_BUILDERS))


def build_array(forest: Forest, name: str) -> Array:
    """Runs the builder of `name` on `forest`.

    Raises:
        InvalidForest: unknown name.
    """
    builder = _BUILDERS.get(name)
    if builder is None:
        raise InvalidForest(f"forest tensor: expected one of {', '.join(registered())}, got {name!r}")
    return builder(forest)


def upload(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Copies arrays to tensors of the same dtype and shape on `device`: never inference tensors, never views, never aliases of `arrays`.

    Off the CPU all arrays travel in one buffer; to CUDA it is pinned and the copy does not block the host.
    """
    with torch.inference_mode(False), torch.no_grad():
        if device.type == "cpu":
            return [torch.from_numpy(np.array(array, order="C")) for array in arrays]
        return _upload_packed(arrays, device)


def _upload_packed(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    offsets: list[int] = []
    size = 0
    for array in arrays:
        offsets.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda" and size > 0)
    staging = host.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        staging[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    storage = host.to(device, non_blocking=True).untyped_storage()
    tensors: list[torch.Tensor] = []
    for array, offset in zip(arrays, offsets, strict=True):
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        strides = torch.empty(array.shape, device="meta").stride()
        empty = torch.empty(0, dtype=dtype, device=device)
        tensors.append(empty.set_(storage, offset // array.itemsize, array.shape, strides))
    return tensors


register("row", lambda forest: forest.row)
register("column", lambda forest: forest.column)
register("count", lambda forest: forest.count)
register("prev", lambda forest: forest.prev)
register("end", lambda forest: forest.end)
register("index", lambda forest: forest.index, ("B", "L"))
register("keep", lambda forest: forest.index >= 0, ("B", "L"), torch.bool)
