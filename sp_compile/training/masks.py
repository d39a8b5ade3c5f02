"""Checks of per-row values and masks, before any work."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput


def check_values(name: str, **tensors: Tensor) -> None:
    """Raises InvalidInput unless all are float tensors of one shape on one device."""
    first: Tensor | None = None
    for what, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidInput(f"{name}: expected {what} to be a float tensor, got {got}")
        first = tensor if first is None else first
        if tensor.shape != first.shape or tensor.device != first.device:
            raise InvalidInput(
                f"{name}: expected {what} {list(first.shape)} on {first.device}, as {next(iter(tensors))}, "
                f"got {list(tensor.shape)} on {tensor.device}"
            )


def checked_mask(name: str, mask: Tensor, values: Tensor) -> Tensor:
    """The mask as bools; values must be [B, C].

    Raises:
        InvalidInput: another shape or device, or a mask of floats, which could be weights.
    """
    if values.dim() != 2:
        raise InvalidInput(f"{name}: expected values [B, C], one per position of each row, got {list(values.shape)}")
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidInput(f"{name}: expected a mask of bools or integers, got {got}; weights are multiplied into the values")
    if mask.shape != values.shape or mask.device != values.device:
        raise InvalidInput(
            f"{name}: expected a mask {list(values.shape)} on {values.device}, as the values, got {list(mask.shape)} on {mask.device}"
        )
    return mask if mask.dtype == torch.bool else mask != 0


def checked_row_values(name: str, what: str, values: Tensor, like: Tensor) -> Tensor:
    """Float values [B] or [B, C], constants of a loss on [B, C], spread to [B, C].

    Raises:
        InvalidInput: another shape, dtype or device.
    """
    good = isinstance(values, Tensor) and values.is_floating_point() and values.device == like.device
    if not good or (values.shape != like.shape and values.shape != like.shape[:1]):
        got = f"{values.dtype} {list(values.shape)} on {values.device}" if isinstance(values, Tensor) else type(values).__name__
        raise InvalidInput(f"{name}: expected {what} of floats {list(like.shape[:1])} or {list(like.shape)} on {like.device}, got {got}")
    return (values[:, None] if values.dim() == 1 else values).detach().expand(like.shape)


def check_number(name: str, what: str, number: object, least: float, *, most: float = float("inf"), open_end: bool = False) -> None:
    """Raises InvalidInput unless it is a number in [least, most], or above `least` if the end is open."""
    good = isinstance(number, int | float) and not isinstance(number, bool)
    if not good or not (least < number if open_end else least <= number) or not number <= most or number == float("inf"):  # type: ignore[operator]
        interval = f"{'(' if open_end else '['}{least}, {most}{']' if most != float('inf') else ')'}"
        raise InvalidInput(f"{name}: expected {what} in {interval}, got {number!r}")


def checked_groups(name: str, groups: Tensor, rows: int, device: torch.device) -> Tensor:
    """The groups of rows.

    Raises:
        InvalidInput: no integers [B] on the device.
    """
    good = isinstance(groups, Tensor) and not (groups.is_floating_point() or groups.is_complex() or groups.dtype == torch.bool)
    if not good or groups.shape != (rows,) or groups.device != device:
        got = f"{groups.dtype} {list(groups.shape)} on {groups.device}" if isinstance(groups, Tensor) else type(groups).__name__
        raise InvalidInput(f"{name}: expected groups of integers [{rows}] on {device}, one per row, got {got}")
    return groups


def group_places(groups: Tensor) -> Tensor:
    """[B]: for each row a number in [0, B) that the rows of its group share and no others have; no size depends on the data."""
    ordered = torch.sort(groups).values
    return torch.searchsorted(ordered, groups)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the positions that count, a metric without gradient; 0 if none counts."""
    return torch.where(mask, values.detach(), 0).sum() / mask.sum().clamp(min=1)
