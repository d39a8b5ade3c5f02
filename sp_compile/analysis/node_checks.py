"""What has to hold of the numbers that a torch-level node computes with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sp_compile.analysis.refusals import refusal

if TYPE_CHECKING:
    from sp_compile.analysis.interpret import LayoutMode, NodeInfo


def check_symbols(mode: LayoutMode, fake_mode: Any, target: object) -> None:
    """An op that fixes B or L to one number is not proved for any other.

    Raises:
        CannotShare: the node's op does.
    """
    fixed = [symbol for symbol in (mode.symbols.batch, mode.symbols.columns) if symbol in fake_mode.shape_env.replacements]
    if fixed:
        why = mode.reason("an op fixes the number of rows or columns to one value", target, "Write it for any number of rows and columns.")
        raise refusal(why)


def check_numbers(mode: LayoutMode, target: object, info: NodeInfo, given: Sequence[Any]) -> None:
    """A number that the op reads off its operands' shapes itself would be another one on physical tokens, and so is the number of tokens
    that a mask chooses."""
    if info.numbers and not any(mode.symbols.mentions(value) for value in given):
        mode.fail(mode.reason("the op computes with the number of rows or columns of its operands", target))
    if any(isinstance(value, torch.SymInt) and value.node.expr.free_symbols & mode.chosen for value in given):
        mode.fail(mode.reason("the number of chosen tokens is used, which is another one on physical tokens", target))
