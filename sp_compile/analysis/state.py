"""Torch's switches that nodes of a graph may change while it is interpreted."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


@contextlib.contextmanager
def preserved_global_state() -> Any:
    """Grad mode and autocast as they were, whatever nodes of the graph switch."""
    devices = ("cpu", "cuda")
    grad = torch.is_grad_enabled()
    autocast = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices}
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        for device, (enabled, dtype) in autocast.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
