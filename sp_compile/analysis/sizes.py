"""How an op uses the number of rows and columns: as a size, which is another one on physical tokens, or as a number, which stays."""

from __future__ import annotations

import enum
from typing import Any

import torch

from sp_compile.analysis.layouts import Symbols


class Use(enum.Flag):
    NONE = 0
    SIZE = enum.auto()
    NUMBER = enum.auto()
    PLACE = enum.auto()


_PLACES = frozenset(
    {"index", "shifts", "offset", "storage_offset", "diagonal", "pad", "k", "num_classes", "split_size", "split_sizes", "step", "stride"}
)
"""Integer arguments that say where or how much inside of a dimension; on physical tokens the same places are at other numbers."""


def uses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], symbols: Symbols) -> Use:
    """What an ATen op does with B and L among its arguments."""
    found = Use.NONE
    for position, argument in enumerate(func._schema.arguments):
        value = kwargs.get(argument.name, args[position] if position < len(args) else None)
        items = value if isinstance(value, list | tuple) else [value]
        if not any(symbols.mentions(item) for item in items):
            continue
        counts = func.overloadpacket is torch.ops.aten.arange and argument.name in ("end", "start")
        if not counts and "int" not in str(argument.type).lower():
            found |= Use.NUMBER
        else:
            found |= Use.PLACE if argument.name in _PLACES else Use.SIZE
    return found
