"""What the compiler read in constants and sizes at the first call is checked at every later one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile
from sp_compile.backend import shared_prefix
from tests.e2e import compare
from tests.e2e.models import spread


class Masked(nn.Module):
    """One attention layer under a causal table kept as a buffer, and a temperature kept as a Python float."""

    mask: Tensor

    def __init__(self, columns: int = 32, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 50)
        self.temperature = 1.5
        self.register_buffer("mask", torch.ones(columns, columns, dtype=torch.bool).tril())

    def forward(self, ids: Tensor) -> Tensor:
        rows, columns = ids.shape
        q, k, v = self.qkv(self.embed(ids)).view(rows, columns, 3, 2, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:columns, :columns])
        logits: Tensor = self.head(seen.transpose(1, 2).flatten(2)) / self.temperature
        return logits


def star(rows: int, prompt: int, columns: int) -> Tensor:
    ids = torch.randint(50, (rows, columns), generator=torch.Generator().manual_seed(rows))
    ids[:, :prompt] = ids[:1, :prompt].clone()
    return ids


def same(call: object, model: nn.Module, ids: Tensor) -> bool:
    return compare.relative(call(ids), model(ids)) < compare.LOGITS  # type: ignore[operator]


def test_changed_mask_buffer_is_noticed() -> None:
    model = spread(Masked())
    call = torch.compile(model, backend=shared_prefix, options={"inner": "eager", "min_sharing": 1.0})
    ids = star(4, 6, 11)
    assert same(call, model, ids)
    assert sp_compile.last_run().shared
    model.mask[3, 5] = True
    with pytest.warns(UserWarning, match="later columns"):
        assert same(call, model, ids)
    assert not sp_compile.last_run().shared


def test_untouched_copy_of_the_mask_buffer_is_accepted() -> None:
    model = spread(Masked())
    call = compare.compiled(model, "eager")
    ids = star(4, 6, 11)
    assert same(call, model, ids)
    model.mask.copy_(model.mask.clone())
    assert same(call, model, ids)
    assert sp_compile.last_run().shared


def test_float_input_that_changes_is_noticed() -> None:
    model = spread(Masked())
    call = torch.compile(model, backend=shared_prefix, dynamic=True, options={"inner": "eager", "strict": True, "min_sharing": 1.0})
    ids = star(4, 6, 11)
    for temperature in (1.5, 2.0, 1.5):
        model.temperature = temperature
        assert same(call, model, ids)
        assert sp_compile.last_run().shared


@pytest.mark.parametrize("dynamic", [None, True])
def test_square_batch_first(dynamic: bool | None) -> None:
    """As many rows as columns: the two sizes must not become one symbol."""
    model = spread(Masked())
    call = torch.compile(model, backend=shared_prefix, dynamic=dynamic, options={"inner": "eager", "strict": True, "min_sharing": 1.0})
    for rows, columns in ((9, 9), (4, 11), (11, 4), (7, 7)):
        assert same(call, model, star(rows, 3, columns))
        assert sp_compile.last_run().shared


def test_wrong_options_are_refused_before_any_work() -> None:
    model = spread(Masked())
    with pytest.raises(Exception, match="unknown options"):
        torch.compile(model, backend=shared_prefix, options={"min_share": 2.0})(star(4, 6, 11))
    with pytest.raises(Exception, match="min_sharing"):
        torch.compile(model, backend=shared_prefix, options={"min_sharing": 0.5})(star(4, 6, 11))
