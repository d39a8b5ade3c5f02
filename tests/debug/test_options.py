"""A wrong option is an error of its own class before anything is compiled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import sp_compile
from sp_compile import options
from sp_compile.backend import shared_prefix
from tests.e2e.models import Rope, spread
from tests.e2e.scenarios import right_padded, star


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"stric": True}, "unknown options"),
        ({"strict": 1}, "strict"),
        ({"min_sharing": 0.5}, "min_sharing"),
        ({"min_sharing": math.nan}, "min_sharing"),
        ({"min_sharing": True}, "min_sharing"),
        ({"inner": "eagre"}, "inner"),
        ({"kernels": 3}, "kernels takes names"),
        ({"kernels": [3]}, "kernels takes names"),
        ({"disable": {"a": 1}}, "disable takes names"),
        ({"count_padding": 1}, "count_padding"),
        ({"router_blocks": -1}, "router_blocks"),
        ({"dump": 3}, "dump"),
        ({"context_parallel": "world"}, "context_parallel"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_wrong_options(given: dict[str, Any], text: str) -> None:
    with pytest.raises(sp_compile.InvalidOption, match=text):
        options.parse(given)


def test_names_alone_and_in_lists() -> None:
    assert options.parse({"kernels": "reference"}).kernels == options.parse({"kernels": ["reference"]}).kernels == ("reference",)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"kernels": ["nokernel"]}, r"\['nokernel'\]; known implementations are"),
        ({"disable": ["nopass"]}, r"\['nopass'\]; known passes are"),
    ],
)
def test_unknown_names(given: dict[str, Any], text: str) -> None:
    torch._dynamo.reset()
    ids, mask, _ = right_padded(star())
    call = torch.compile(spread(Rope(width=16, heads=2, groups=1, layers=1)), backend=shared_prefix, options={"inner": "eager", **given})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=text):
        call(ids, mask)
