"""Calls of loggers inside of a model: no graph break under our backend, said once per compilation, and as ever under others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_compile.capture import install, set_backend, unset_backend

LOGGER = logging.getLogger("tests.a_model")
GRAPHS: list[torch.fx.GraphModule] = []


def _ours(graph: torch.fx.GraphModule, values: Any) -> Any:
    GRAPHS.append(graph)
    return graph


def _other(graph: torch.fx.GraphModule, values: Any) -> Any:
    GRAPHS.append(graph)
    return graph


@pytest.fixture(autouse=True)
def _known() -> Iterator[None]:
    set_backend(_ours)
    install()
    torch._dynamo.reset()
    GRAPHS.clear()
    yield
    unset_backend(_ours)


def _model(x: Tensor) -> Tensor:
    y = x.sin()
    LOGGER.warning("a word about %s", "the configuration")
    LOGGER.info("mean %s", y.mean())
    return y.cos()


def test_log_call_keeps_one_graph(caplog: pytest.LogCaptureFixture) -> None:
    run = torch.compile(_model, backend=_ours)
    for _ in range(2):
        torch.testing.assert_close(run(torch.ones(3)), torch.ones(3).sin().cos())
    assert len(GRAPHS) == 1
    assert [record.message for record in caplog.records if record.name == LOGGER.name] == ["a word about the configuration"]


def test_log_call_is_left_alone_under_another_backend(caplog: pytest.LogCaptureFixture) -> None:
    run = torch.compile(_model, backend=_other)
    for _ in range(2):
        run(torch.ones(3))
    assert len(GRAPHS) > 1
    assert len([record for record in caplog.records if record.name == LOGGER.name and record.levelno == logging.WARNING]) == 2
