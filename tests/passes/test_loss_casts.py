"""A loss reads 16-bit logits as they are, where the model casts them to float32 only for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

from tests.passes.harness import Tiny, batch, rewrite, run, show

PASS = "sink_unpacking"


def loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), F.pad(ids, (0, 1), value=-100)[:, 1:].flatten())


def test_a_cast_and_a_reshape() -> None:
    found = rewrite(Tiny(lambda logits, ids: loss(logits.float(), ids), dtype=torch.bfloat16), batch())
    lines = [line.replace("ignore_index=-100, label_smoothing=0.0, ", "") for line in show(found.after[PASS], "logits").splitlines()]
    assert_expected_inline(
        "\n".join(line for line in lines if any(part in line for part in ("float(", "view(", "_rows("))),
        """\
view_4 = view(logits, -1, 50)
cross_entropy_rows_default = sp_compile.cross_entropy_rows(view_4, flatten_1, flatten, None, dtype=torch.float32)""",
    )


@pytest.mark.parametrize(
    ("dtype", "use"),
    [
        (torch.bfloat16, lambda logits, ids: loss(logits.float(), ids)),
        (torch.float16, lambda logits, ids: loss(logits.to(torch.float32), ids)),
        (torch.bfloat16, lambda logits, ids: loss(logits, ids)),
        (torch.bfloat16, lambda logits, ids: loss((logits * 2).float(), ids) + logits.float().logsumexp(-1).mean()),
        (torch.float32, lambda logits, ids: loss(logits.float(), ids)),
        (torch.float32, lambda logits, ids: loss(logits.double(), ids)),
        (torch.bfloat16, lambda logits, ids: loss(logits.double(), ids)),
    ],
)
def test_equals_dense(dtype: torch.dtype, use: Callable[..., Any]) -> None:
    """As near to float64 as the dense run in the same dtype."""
    ids = batch(5, 17, 9)
    packed, dense, wide = Tiny(use, dtype=dtype), Tiny(use, dtype=dtype), Tiny(use, dtype=torch.float64)
    packed.load_state_dict(wide.state_dict()), dense.load_state_dict(wide.state_dict()), wide.load_state_dict(dense.state_dict())
    got, found = run(packed, ids)
    want = dense(ids)
    assert found
    assert got.dtype == want.dtype
    exact = wide(ids)
    for value in (got, want, exact):
        value.backward()
    room = 4 * torch.finfo(dtype).eps
    assert abs(float(got) - float(exact)) <= abs(float(want) - float(exact)) + room * abs(float(exact))
    largest = max(float(p.grad.norm()) for p in wide.parameters() if p.grad is not None)
    for name, parameter in wide.named_parameters():
        norms = [float((dict(m.named_parameters())[name].grad.double() - parameter.grad).norm()) for m in (packed, dense)]  # type: ignore[union-attr,operator]
        assert norms[0] <= 1.3 * norms[1] + room * (float(parameter.grad.norm()) + largest), name  # type: ignore[union-attr]


def test_other_casts_stay() -> None:
    for dtype, use in (
        (torch.float32, lambda logits, ids: loss(logits.double(), ids)),
        (torch.bfloat16, lambda x, ids: loss(x.double(), ids)),
    ):
        found = rewrite(Tiny(use, dtype=dtype), batch())
        assert "double" in show(found.after[PASS], "logits")
        assert "dtype=" not in show(found.after[PASS], "logits")
