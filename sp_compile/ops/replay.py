"""Differentiating inside of an op: a backward op that runs the forward again and asks autograd for its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_KEYS = (torch._C.DispatchKey.AutogradOther, torch._C.DispatchKey.AutogradFunctionality)


@contextlib.contextmanager
def autograd_inside_op() -> Iterator[None]:
    """Lets operations inside of a custom op be recorded.

    torch runs the body of a custom op below the autograd dispatch keys, where `torch.enable_grad()` alone records nothing and every
    gradient comes out absent. The keys are put back as they were.
    """
    before = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in _KEYS]
    for key in _KEYS:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for key, excluded in zip(_KEYS, before, strict=True):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)
