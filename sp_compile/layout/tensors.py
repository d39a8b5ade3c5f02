"""Registry of the per-forest tensors that a compiled graph may ask for by name, and their way to a device.

A name stands for one function from a forest to a numpy array. Graph inputs carry these names, so a name is registered once and
its meaning never changes. `"name@k-c"` is that of the forest refined by k without its last c columns (`layout/refine.py`). Base names:

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
from sp_compile.layout import derive
from sp_compile.layout.refine import full_width, refined_forest, split_name

if TYPE_CHECKING:
    from sp_compile.layout.forest import Forest

Array = np.ndarray[Any, Any]
Builder = Callable[["Forest"], Array]

Shape = tuple["int | str", ...]

_BUILDERS: dict[str, Builder] = {}
_SHAPES: dict[str, tuple[Shape, torch.dtype]] = {}
_HOST: set[str] = set()
# Inductor assumes inputs aligned to 16 bytes; 256 also keeps every tensor on its own cache lines.
_ALIGNMENT = 256


def register(name: str, builder: Builder, shape: Shape = ("T",), dtype: torch.dtype = torch.int64, *, host: bool = False) -> None:
    """Makes `forest.tensor(name, device)` return what `builder(forest)` computes: a numpy array of fixed dtype and rank.

    Args:
        name: the registry name.
        builder: from a forest to the array. An array that may be written is taken over by the tensor: let it be a fresh one.
        shape: sizes as numbers, or names of sizes that change from forest to forest: "T", "B", "L" or a name of its own.
        dtype: of the tensor.
        host: the tensor stays on the CPU, whatever device is asked for: launches depend on it, and reading it must not wait for a device.

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
    if host:
        _HOST.add(name)


def device_of(name: str, device: torch.device) -> torch.device:
    """Where a registered tensor lies that is asked for on `device`: there, or on the CPU if it is one of the host's."""
    return torch.device("cpu") if split_name(name)[0] in _HOST else device


def symbolic_shape(name: str) -> tuple[Shape, torch.dtype]:
    """The shape, in numbers and names of sizes, and the dtype of a registered tensor.

    Raises:
        InvalidForest: unknown name.
    """
    base, ahead, cut = split_name(name)
    if base not in _SHAPES:
        raise InvalidForest(f"forest tensor: expected one of {', '.join(registered())}, got {name!r}")
    shape, dtype = _SHAPES[base]
    if not ahead and not cut:
        return shape, dtype
    return tuple(s if not isinstance(s, str) or s in ("B", "L") else f"{s}@{ahead}-{cut}" for s in shape), dtype


def registered() -> tuple[str, ...]:
    """Registered names in alphabetical order."""
    return tuple(sorted(_BUILDERS))


def build_array(forest: Forest, name: str) -> Array:
    """Runs the builder of `name` on `forest`.

    Raises:
        InvalidForest: unknown name.
    """
    base, ahead, cut = split_name(name)
    builder = _BUILDERS.get(base)
    if builder is None:
        raise InvalidForest(f"forest tensor: expected one of {', '.join(registered())}, got {name!r}")
    array = builder(refined_forest(forest, ahead, cut) if ahead or cut else forest)
    return full_width(array, forest.num_columns) if cut and "L" in _SHAPES[base][0] else array


def upload(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Arrays as tensors of the same dtype and shape on `device`: never inference tensors, never views.

    On the CPU an array that owns its memory and may be written becomes the tensor; read-only ones, and parts of others, are copied. Off the
    CPU all arrays travel in one buffer; to CUDA it is pinned and the copy does not block the host.
    """
    with torch.inference_mode(False), torch.no_grad():
        if device.type == "cpu":
            return [torch.from_numpy(array if _is_own(array) else np.array(array, order="C")) for array in arrays]
        return _upload_packed(arrays, device)


def _is_own(array: Array) -> bool:
    return array.flags.owndata and array.flags.writeable and array.flags.c_contiguous


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


register("row", derive.row)
register("column", derive.column)
register("count", derive.count)
register("prev", derive.prev)
register("end", derive.end)
register("index", derive.index, ("B", "L"))
register("keep", lambda forest: forest.index >= 0, ("B", "L"), torch.bool)
