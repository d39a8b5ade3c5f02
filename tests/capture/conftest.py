from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sp_compile.capture import install
from tests.capture.recording import GRAPHS, OTHERS


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    install()
    GRAPHS.clear()
    OTHERS.clear()
    yield
    torch._dynamo.reset()
