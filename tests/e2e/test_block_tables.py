"""Block tables of flex_attention against the mask function they came with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from sp_compile.blocks import BlockTables

LENGTH = 21


def tables(function: Callable[..., Tensor]) -> list[Any]:
    made = create_block_mask(function, 2, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=4)
    return [made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices]


def checker(function: Callable[..., Tensor], full: bool = True) -> BlockTables:
    """Computes the mask of a function of no inputs, by hand."""
    graph = torch.fx.Graph()
    b, q, k = (graph.call_function(torch.arange, (size,)) for size in (2, LENGTH, LENGTH))
    b, q = graph.call_method("view", (b, -1, 1, 1, 1)), graph.call_method("view", (q, -1, 1))
    mask = graph.call_function(function, (b, None, q, k))
    graph.output(mask)
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    return BlockTables(module, (), (0, 1, 2, 3) if full else (0, 1, None, None), (4, 4), mask)


def causal(b: Tensor, h: Any, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Any, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 6 + b)


@pytest.mark.parametrize("function", [causal, window], ids=lambda f: f.__name__)
def test_made_by_the_library(function: Callable[..., Tensor]) -> None:
    check = checker(function)
    assert check.why_not(tables(function)) is None
    assert check.why_not(tables(lambda b, h, q, k: (q >= k) & (k > 7))) is not None, "blocks are left out"


@pytest.mark.parametrize("wrong", ["fewer", "more full", "other blocks"])
def test_put_together_by_hand(wrong: str) -> None:
    check, given = checker(causal), [x.clone() for x in tables(causal)]
    assert check.why_not(given) is None
    if wrong == "fewer":
        given[0][0, 0, -1] = 0
    elif wrong == "more full":
        given[2][1, 0, 2] += 1  # the next one listed lies on the diagonal or above it
    else:
        given[1][0, 0, 3, 0] = 5
    why = check.why_not(given)
    assert why is not None
    assert "block tables" in str(why)


def test_changed_in_place_and_new_ones_are_looked_at_again() -> None:
    check, given = checker(causal), [x.clone() for x in tables(causal)]
    assert check.why_not(given) is None
    given[0].zero_()
    assert check.why_not(given) is not None
    assert check.why_not(tables(causal)) is None


def test_without_full_blocks() -> None:
    given = tables(causal)[:2]
    assert checker(causal, full=False).why_not(given) is not None
