"""Accumulation dtype and tolerances shared by all ops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_R = TypeVar("_R")


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which sums and softmaxes of `dtype` values are formed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


ROUNDING_NOISE = 1e-12
"""A norm below this is what float64 leaves of a value that is zero in exact arithmetic, as is the gradient of a softmax of one score."""


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Frobenius norm of `got - want` over that of `want`, formed in float64; the plain norm of the difference where `want` is noise."""
    got, want = got.detach().double(), want.detach().double()
    if want.numel() == 0:
        return 0.0
    norm = float(want.norm())
    return float((got - want).norm()) / (norm if norm > ROUNDING_NOISE else 1.0)


def owned(grad: torch.Tensor) -> torch.Tensor:
    """A gradient with memory of its own for every element, as a backward op must be given it.

    The gradient of a mean is one number expanded, strides 0. Ops that ask for exact strides make Inductor keep such a buffer, and it may
    then compute in place in it once per block of elements: gradients come out multiplied (measured on torch 2.13, CPU).
    """
    return grad.contiguous()


def without_autocast(function: Callable[..., _R]) -> Callable[..., _R]:
    """The body of an op computes in the dtypes it is given: autocast is the caller's, and is in force in forward only."""

    @functools.wraps(function)
    def body(*args: Any, **kwargs: Any) -> _R:
        device = next(value.device for value in args if isinstance(value, torch.Tensor))
        with torch.autocast(device.type, enabled=False):
            return function(*args, **kwargs)

    return body
