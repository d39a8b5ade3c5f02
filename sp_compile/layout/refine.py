"""Forest tensors of refined forests by name: `"row@2-1"` is `row` of the forest refined by 2 without the last column.

Tensors of [B, L] keep their L columns; the columns that are left out hold -1.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from sp_compile.errors import InvalidForest

if TYPE_CHECKING:
    from sp_compile.layout.forest import Forest

_made: weakref.WeakKeyDictionary[Forest, dict[tuple[int, int], Forest]] = weakref.WeakKeyDictionary()


def split_name(name: str) -> tuple[str, int, int]:
    """`"row@2-1"` -> ("row", 2, 1); a name without suffix is that of the forest itself.

    Raises:
        InvalidForest: the part behind "@" is no pair of numbers.
    """
    base, mark, rest = name.partition("@")
    if not mark:
        return name, 0, 0
    ahead, _, cut = rest.partition("-")
    if not (ahead.isdigit() and cut.isdigit()):
        raise InvalidForest(f"forest tensor {name!r}: expected two numbers behind '@', as in 'row@1-0'")
    return base, int(ahead), int(cut)


def refined_forest(forest: Forest, ahead: int, cut: int) -> Forest:
    """The forest refined by `ahead`, without the tokens of its last `cut` columns; made once per forest."""
    known = _made.setdefault(forest, {})
    if (ahead, cut) not in known:
        known[ahead, cut] = forest.refined(ahead).without_last(cut)
    return known[ahead, cut]


def full_width(array: np.ndarray[Any, Any], columns: int) -> np.ndarray[Any, Any]:
    """A [B, L - cut] index with L columns."""
    return np.pad(array, ((0, 0), (0, columns - array.shape[1])), constant_values=-1)
