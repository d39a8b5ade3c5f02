"""Runs a call again and again and compares bits, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TIMES = 3


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal shape, dtype and bytes: unlike `==`, tells 0.0 from -0.0 and takes a NaN for itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.detach().contiguous().flatten().view(torch.uint8), other.detach().contiguous().flatten().view(torch.uint8))


def disturb(turn: int) -> None:
    """Work of another size between two runs, so that memory, thread pools and allocator reuse differ."""
    torch.randn(257 + 64 * turn, 127).sin().sum().item()


def differing(call: Callable[[], Sequence[Tensor]], leaves: Sequence[Tensor], times: int = TIMES) -> list[str]:
    """Names of results (`output 0`, `gradient 2`, ...) whose bits are not the same in `times` runs of forward and backward.

    Args:
        call: makes the outputs from `leaves`; differentiable outputs are given one fixed gradient.
        leaves: tensors whose gradients are compared.
    """
    first: dict[str, Tensor] = {}
    wrong: set[str] = set()
    for turn in range(times):
        outputs = call()
        loose = [out for out in outputs if out.requires_grad]
        weights = [torch.linspace(-1, 1, out.numel(), device=out.device).to(out.dtype).view(out.shape) for out in loose]
        gradients = torch.autograd.grad(loose, leaves, weights) if leaves else ()
        results = {f"output {i}": out for i, out in enumerate(outputs)} | {f"gradient {i}": g for i, g in enumerate(gradients)}
        for name, value in results.items():
            if not same_bits(first.setdefault(name, value), value):
                wrong.add(name)
        disturb(turn)
    return sorted(wrong)
