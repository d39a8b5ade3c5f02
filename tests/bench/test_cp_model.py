"""The bytes of the model are those that a run sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench import cp_model
from sp_compile.layout.rank_plans import plan_rank
from sp_compile.ops import layout_conversion, over_ranks
from tests.distributed import cases, processes

SMALL = cp_model.Model(heads=4, kv_heads=2, head_dim=6, mamba_heads=4, mamba_dim=3, mamba_state=2, groups=2, element=4)


def sent(rank: int, ranks: int) -> dict[str, int]:
    """Bytes that this rank sends to others in the forward pass of each mixer."""
    plan, group, total = plan_rank(cases.forest("star"), ranks, rank), dist.group.WORLD.group_name, 0

    def counting(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def count(rows: Tensor, *args: Any) -> Tensor:
            nonlocal total
            row = rows[0].numel() * rows.element_size() if rows.shape[0] else 0
            total += row * (sum(args[0]) - args[0][rank] if isinstance(args[0], list) else rows.shape[0] * (ranks - 1))
            return real(rows, *args)

        return count

    def bytes_of(call: Callable[[], Tensor]) -> int:
        nonlocal total
        total = 0
        with mock.patch.multiple(
            layout_conversion,
            _all_to_all=counting(layout_conversion._all_to_all),
            _all_gather=counting(layout_conversion._all_gather),
        ):
            call()
        return total

    def value(*shape: int) -> Tensor:
        return torch.zeros((1, *shape))

    m, s = SMALL, plan.size
    q, k = value(m.heads, s, m.head_dim), value(m.kv_heads, s, m.head_dim)
    channels = m.mamba_row // m.element
    x, dt, b = value(s, m.mamba_heads, m.mamba_dim), value(s, m.mamba_heads), value(s, m.groups, m.mamba_state)
    return {
        "attention gather": bytes_of(lambda: over_ranks.attention(q, k, k, plan, group, scale=1.0)),
        "recurrent states": bytes_of(lambda: over_ranks.convolution(value(s, channels), torch.zeros(channels, m.width), None, plan, group))
        + bytes_of(lambda: over_ranks.ssd(x, dt, -torch.ones(m.mamba_heads), b, b, None, None, plan, group, **cases.SSD)),
    }


def test_bytes_are_those_of_a_run() -> None:
    measured = processes.results(2, sent)
    found = cp_model.layer(cases.forest("star"), 2, SMALL)["bytes"]
    for name in measured[0]:
        assert max(rank[name] for rank in measured) == found[name] > 0


@pytest.mark.parametrize("name", sorted(cp_model.CASES))
def test_cases_are_forests_of_that_many_tokens(name: str) -> None:
    pack = cp_model.CASES[name](4096)
    assert 0.9 * 4096 <= pack.num_tokens <= 4096
    found = cp_model.layer(pack, 4, cp_model.Model())
    assert found["balance"]["balanced"] >= found["balance"]["zigzag"] > 0
    assert found["balance"]["balanced"] <= 1
    times = cp_model.seconds(found, cp_model.Model(), cp_model.Machine())
    assert np.isfinite(list(times.values())).all()
