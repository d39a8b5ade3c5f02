"""What is read in (query, key) masks that are passed in: above the diagonal only, and never more than is there."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sp_compile.analysis.facts import Atom, TwoValued
from sp_compile.analysis.given_masks import given_fact, read_later
from sp_compile.analysis.layouts import COLUMN, Axis, Layout
from sp_compile.analysis.masks import NotCausal, read_mask
from sp_compile.batch import _pair_key
from sp_compile.ops.blocking import BLOCKED

LOWEST = torch.finfo(torch.float32).min
LATER = torch.ones(5, 5, dtype=torch.bool).triu(1)


def lower(dtype: torch.dtype) -> Tensor:
    """[3, 1, 5, 5] with all kinds of values at and below the diagonal."""
    values = torch.randint(0, 2, (3, 1, 5, 5), generator=torch.Generator().manual_seed(0))
    return values.to(dtype) if not dtype.is_floating_point else values.to(dtype).masked_fill(values == 0, -math.inf)


READ: dict[str, tuple[Tensor, float | None]] = {
    "bool": (lower(torch.bool).masked_fill(LATER, False), 0.0),
    "bool, True is hidden": (lower(torch.bool).masked_fill(LATER, True), 1.0),
    "integers": (lower(torch.int64).masked_fill(LATER, 0), 0.0),
    "infinite": (lower(torch.float32).masked_fill(LATER, -math.inf), BLOCKED),
    "lowest": (lower(torch.float32).masked_fill(LATER, LOWEST), BLOCKED),
    "several that hide": (lower(torch.float64).masked_fill(LATER, -1e9) + torch.rand(5, 5), BLOCKED),
    "half": (lower(torch.float16).masked_fill(LATER, -6e4), BLOCKED),
    "one visible": (lower(torch.bool).masked_fill(LATER, False) | torch.eye(5, dtype=torch.bool).roll(1, 1).triu(1), None),
    "soft": (lower(torch.float32).masked_fill(LATER, -5.0), None),
    "one soft": (lower(torch.float32).masked_fill(LATER, LOWEST) + torch.full((5, 5), 1e30).tril(-1).flip(0, 1).triu(4) * 1e9, None),
    "not a number": (lower(torch.float32).masked_fill(LATER, math.nan), None),
    "not square": (torch.zeros(2, 1, 4, 5), None),
}


@pytest.mark.parametrize("name", READ)
def test_read_later(name: str) -> None:
    value, wanted = READ[name]
    assert read_later(value) == wanted


DIMS = ((Axis.BATCH,), (), (Axis.COLUMNS,), (Axis.COLUMNS,))


@pytest.mark.parametrize("name", READ)
def test_what_is_relied_on_is_said(name: str) -> None:
    value, reading = READ[name]
    layout = Layout(DIMS, COLUMN, entry=True)
    layout = layout.with_(fact=given_fact("given", layout, value))
    is_bool = value.dtype == torch.bool
    if reading != (0.0 if is_bool else BLOCKED):
        with pytest.raises(NotCausal, match="later columns"):
            read_mask("mask", layout, False, is_bool)
        return
    mask = read_mask("mask", layout, False, is_bool)
    assert (mask.matrix, mask.given, mask.told) == ("mask", ("given",), False)
    assert read_mask("mask", layout, True, is_bool).given == (), "where the call itself hides later columns"


def test_a_condition_of_the_graph_comes_first() -> None:
    """And a given one that the values do not bear out is no window."""
    fact = TwoValued(frozenset({Atom(2, 3, 0), Atom(3, 2, 0, given="x")}), None, 0.0, exact=False)
    mask = read_mask("mask", Layout(DIMS, COLUMN, entry=True, fact=fact), False, True)
    assert (mask.matrix, mask.given, mask.window) == ("mask", (), None)


def test_keys_number_what_is_seen() -> None:
    """Equal at a column exactly if the queries there see the same; no key if something above the diagonal differs."""
    seen = lower(torch.bool).masked_fill(LATER, False)
    key = _pair_key(seen, 0)
    assert key is not None
    for a in range(3):
        for b in range(3):
            for column in range(5):
                assert (key[a, column] == key[b, column]) == torch.equal(seen[a, :, column], seen[b, :, column])
    floats = torch.zeros(3, 1, 5, 5).masked_fill(~seen, LOWEST)
    again = _pair_key(floats, 0)
    assert again is not None
    assert torch.equal(again[:, :, None] == again[:, None], key[:, :, None] == key[:, None])
    floats[1, 0, 0, 3] = -math.inf
    assert _pair_key(floats, 0) is None
    assert _pair_key(seen[0], None) is None
