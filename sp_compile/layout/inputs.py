"""Checks of what callers hand to the layout room, and its conversion to numpy; every failure is an `InvalidForest`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sp_compile.errors import InvalidForest
from sp_compile.layout.build import Bits, Bools, Ints

_TORCH_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIZES = (1, 2, 4, 8)


def host_array(value: object, name: str) -> np.ndarray[Any, Any]:
    """A numpy view of an array or CPU tensor; dtypes numpy lacks (bfloat16, float8) come back as integers of the same bits."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise InvalidForest(f"{name}: expected a tensor on cpu, got one on {value.device}; copy it first, for example with .cpu()")
        if value.layout != torch.strided or value.is_complex() or value.is_quantized:
            raise InvalidForest(f"{name}: expected a strided int, bool or float tensor, got {value.dtype} with layout {value.layout}")
        plain = value.detach().resolve_neg()
        try:
            if plain.dtype == torch.bfloat16 or (plain.element_size() == 1 and plain.dtype.is_floating_point):
                plain = plain.view(_TORCH_BITS[plain.element_size()])
            return plain.numpy()
        except (RuntimeError, TypeError) as error:
            raise InvalidForest(f"{name}: expected an ordinary tensor with data, got {type(value).__name__} ({error})") from error
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf" or value.dtype.itemsize not in _SIZES:
            raise InvalidForest(f"{name}: expected an int, bool or float array of at most 64 bits an element, got dtype {value.dtype}")
        return np.asarray(value)
    raise InvalidForest(f"{name}: expected a numpy array or a torch tensor, got {type(value).__name__}")


def key_arrays(inputs: Sequence[object], keep: object) -> tuple[list[Bits], list[Bits], Bools | None, int, int]:
    """Checks the arguments of `Forest.from_tokens`.

    Returns:
        unsigned [B, L] keys, unsigned [B] keys, keep (None if all true), B and L.
    """
    arrays: list[tuple[str, np.ndarray[Any, Any]]] = [(f"input {i}", host_array(value, f"input {i}")) for i, value in enumerate(inputs)]
    mask: np.ndarray[Any, Any] | None = None
    if keep is not None:
        mask = host_array(keep, "keep")
        if mask.dtype != np.bool_ or mask.ndim != 2:
            raise InvalidForest(f"keep: expected a bool array of shape [rows, columns], got {mask.dtype} of shape {list(mask.shape)}")
        arrays.append(("keep", mask))
    for name, array in arrays:
        if array.ndim not in (1, 2):
            raise InvalidForest(f"{name}: expected shape [rows, columns] or [rows], got {list(array.shape)}")
    wide = [(name, array) for name, array in arrays if array.ndim == 2]
    if not wide:
        raise InvalidForest(f"expected at least one input of shape [rows, columns], got {len(arrays)} of shape [rows]")
    first, (num_rows, num_columns) = wide[0][0], wide[0][1].shape
    for name, array in arrays:
        expected = (num_rows, num_columns)[: array.ndim]
        if array.shape != expected:
            raise InvalidForest(f"{name}: expected shape {list(expected)} to agree with {first}, got {list(array.shape)}")
    keys = [_bits(array) for _, array in wide if array is not mask and not (array.strides[0] == 0 and num_rows > 1)]
    row_keys = [_bits(array) for _, array in arrays if array.ndim == 1]
    kept = None if mask is None or bool(mask.all()) else mask
    return keys, row_keys, kept, num_rows, num_columns


def _bits(array: np.ndarray[Any, Any]) -> Bits:
    """The same bits as unsigned integers, each row contiguous: equality of these is bitwise equality."""
    unsigned = array.view(f"u{array.dtype.itemsize}")
    if array.ndim == 2 and array.strides[1] != array.dtype.itemsize:
        return np.ascontiguousarray(unsigned)
    return unsigned


def integer(value: object, name: str) -> int:
    """A Python integer; bool and float are refused."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise InvalidForest(f"{name}: expected an integer, got {value!r} ({type(value).__name__})")
    return int(value)


def integer_vector(value: object, name: str) -> Ints:
    """A fresh int64 copy of a 1-D integer array, tensor or sequence of Python integers."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        array = host_array(value, name)
        given = str(value.dtype)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        try:
            return np.array([integer(item, name) for item in value], dtype=np.int64)
        except OverflowError as error:
            raise InvalidForest(f"{name}: expected integers of at most 64 bits, got a larger one") from error
    else:
        raise InvalidForest(f"{name}: expected a 1-D integer array, got {type(value).__name__}")
    if array.dtype.kind not in "iu" or not given.removeprefix("torch.").startswith(("int", "uint")):
        raise InvalidForest(f"{name}: expected an integer dtype, got {given}")
    if array.ndim != 1:
        raise InvalidForest(f"{name}: expected 1 dimension, got shape {list(array.shape)}")
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise InvalidForest(f"{name}: expected values below 2**63, got {int(array.max())}")
    return array.astype(np.int64)


def row_vectors(rows: object, name: str) -> list[Ints]:
    """One int64 vector per row."""
    if isinstance(rows, (str, bytes)) or not isinstance(rows, Sequence):
        raise InvalidForest(f"{name}: expected a sequence of 1-D integer arrays, one per row, got {type(rows).__name__}")
    return [integer_vector(row, f"{name}[{i}]") for i, row in enumerate(rows)]


def group_codes(groups: object, num_rows: int) -> Ints:
    """Integer code per row for group keys given as an integer array or a sequence of integers or strings."""
    if isinstance(groups, (torch.Tensor, np.ndarray)):
        codes = integer_vector(groups, "groups")
    elif isinstance(groups, Sequence) and not isinstance(groups, (str, bytes)):
        names = [item if isinstance(item, str) else integer(item, "groups") for item in groups]
        seen = {name: code for code, name in enumerate(dict.fromkeys(names))}
        codes = np.array([seen[name] for name in names], dtype=np.int64)
    else:
        raise InvalidForest(f"groups: expected one integer or string per row, got {type(groups).__name__}")
    if codes.size != num_rows:
        raise InvalidForest(f"groups: expected {num_rows} entries, one per row, got {codes.size}")
    return codes


def pad_rows(rows: Sequence[Ints]) -> tuple[Ints, Bools]:
    """Rows side by side, right-padded with zeros: [B, L] int64 and the bool [B, L] mask of tokens that exist."""
    lengths = np.array([row.size for row in rows], dtype=np.int64)
    columns = int(lengths.max(initial=0))
    keep = np.arange(columns) < lengths[:, None]
    padded = np.zeros((len(rows), columns), dtype=np.int64)
    if rows:
        padded[keep] = np.concatenate(rows)
    return padded, keep
