"""Which additive mask values hide a key for good."""

from __future__ import annotations

BLOCKED = -1e4
"""A finite additive mask at or below this is taken as minus infinity: people write -1e4 where float16 holds nothing much lower."""


def is_blocking(value: float) -> bool:
    """Whether an additive mask value makes a weight exactly zero beside any visible key.

    exp(x) is zero in float32 below -104; attention scores of trained models stay far from the 1e4 range used by finite masks.
    """
    return value <= BLOCKED
