"""Every test compiles afresh and knows only its own graphs."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator

import pytest
import torch

from sp_compile.debug import account, regions


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    monkeypatch.setattr(regions, "_fresh", itertools.count())
    monkeypatch.setattr(account, "_thread", threading.local())
    monkeypatch.setattr(account, "_latest", [])
    for name in ("_rewrites", "_histories"):
        monkeypatch.setattr(regions, name, type(getattr(regions, name))())
    yield
    torch._dynamo.reset()
