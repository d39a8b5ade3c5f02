"""Which recurrences are proved to give rows of one prefix the same values, and which are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sp_compile.ops.dense_scans import register_library
from tests.analysis.test_traps import Between, exact, refused
from tests.passes.harness import batch

WEIGHT = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)


def conv(x: Tensor, weight: Tensor = WEIGHT) -> Tensor:
    """Over the third dimension."""
    return torch.ops.sp_compile.dense_causal_conv1d(x, weight, None, activation=None, dtype=x.dtype, library="tests.analysis.conv")


def delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, final: bool = False) -> Tensor:
    op = torch.ops.sp_compile.dense_gated_delta_rule_state if final else torch.ops.sp_compile.dense_gated_delta_rule
    return op(q, k, v, g, beta, scale=0.5, qk_l2norm=True, chunk=4, dtype=v.dtype, library="tests.analysis.delta")  # type: ignore[no-any-return]


def _conv(given: dict[str, Any], final: bool) -> Tensor:
    x, weight = given["x"], given["weight"]
    return F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight.unsqueeze(1), groups=x.shape[1])


def _delta(given: dict[str, Any], final: bool) -> Tensor:
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (given["q"], given["k"]))
    v, state, made = given["v"], given["v"].new_zeros((*given["v"].shape[:1], *given["v"].shape[2:3], q.shape[3], given["v"].shape[3])), []
    for t in range(v.shape[1]):
        state = state * given["g"][:, t, :, None, None].exp()
        step = given["beta"][:, t, :, None] * (v[:, t] - (state * k[:, t, ..., None]).sum(2))
        state = state + k[:, t, ..., None] * step[:, :, None]
        made.append(0.5 * (state * q[:, t, ..., None]).sum(2))
    return state if final else torch.stack(made, 1)


@pytest.fixture(autouse=True)
def libraries() -> None:
    register_library("tests.analysis.conv", _conv)
    register_library("tests.analysis.delta", _delta)


def _heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads = x.unflatten(-1, (2, 4))
    return heads, heads.sin(), heads.cos(), F.logsigmoid(x[..., :2]), x[..., 2:4].sigmoid()


# -- proved ----------------------------------------------------------------------------------------------------------------------------


def convolved(x: Tensor, ids: Tensor) -> Tensor:
    return x + conv(x.transpose(1, 2)).transpose(1, 2)


def twice(x: Tensor, ids: Tensor) -> Tensor:
    return x + conv(conv(x.transpose(1, 2))).transpose(1, 2)


def channels_of_two_dimensions(x: Tensor, ids: Tensor) -> Tensor:
    y = x.unflatten(-1, (2, 4)).flatten(2).mT
    return x + conv(y).mT


def remembered(x: Tensor, ids: Tensor) -> Tensor:
    return x + delta(*_heads(x)).flatten(2)


def weight_of_positions(x: Tensor, ids: Tensor) -> Tensor:
    scale = torch.arange(ids.shape[1], dtype=x.dtype).cos()
    return x + conv((x * scale[:, None]).transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("between", [convolved, twice, channels_of_two_dimensions, remembered, weight_of_positions])
def test_a_recurrence_of_shared_values_is_shared(between: Callable[..., Tensor]) -> None:
    found = exact(Between(between), batch())
    assert [node for node in found.after["fork_states"].nodes if str(node.target).startswith(("sp_compile.causal", "sp_compile.gated"))]


# -- not proved ------------------------------------------------------------------------------------------------------------------------


def over_channels(x: Tensor, ids: Tensor) -> Tensor:
    """Runs along the width instead of the columns."""
    return x + conv(x, WEIGHT[:1].expand(ids.shape[1], 3))


def over_rows(x: Tensor, ids: Tensor) -> Tensor:
    return x + conv(x.permute(1, 2, 0)).permute(2, 0, 1)


def backwards(x: Tensor, ids: Tensor) -> Tensor:
    return x + conv(x.flip(1).transpose(1, 2)).transpose(1, 2).flip(1)


def ahead(x: Tensor, ids: Tensor) -> Tensor:
    return x + conv(F.pad(x[:, 1:], (0, 0, 0, 1)).transpose(1, 2)).transpose(1, 2)


def weights_of_tokens(x: Tensor, ids: Tensor) -> Tensor:
    return x + conv(x.transpose(1, 2), WEIGHT * x.cumsum(1)[0, -1, 0]).transpose(1, 2)


def folded(x: Tensor, ids: Tensor) -> Tensor:
    """Rows and columns in one dimension: the first column of a row would follow the last of the row before."""
    y = conv(x.flatten(0, 1).mT[None])
    return x + y[0].mT.view(x.shape)


def one_beta_for_all_heads(x: Tensor, ids: Tensor) -> Tensor:
    """Libraries broadcast it; the op on tokens does not."""
    q, k, v, g, beta = _heads(x)
    return x + delta(q, k, v, g, beta[..., :1]).flatten(2)


def state_into_tokens(x: Tensor, ids: Tensor) -> Tensor:
    state = delta(*_heads(x), final=True)
    return x + state.sum((1, 2, 3))[:, None, None]


@pytest.mark.parametrize(
    ("between", "text"),
    [
        (over_channels, "x of a causal conv1d"),
        (over_rows, "x of a causal conv1d is not"),
        (backwards, "flip moves tokens"),
        (ahead, "padded or shifted"),
        (weights_of_tokens, "cumsum runs along"),
        (folded, "x of a causal conv1d is not"),
        (one_beta_for_all_heads, "beta of a gated delta rule is"),
        (state_into_tokens, "one value per row"),
    ],
)
def test_what_mixes_otherwise_is_refused(between: Callable[..., Tensor], text: str) -> None:
    found = refused(Between(between), batch())
    assert text in str(found), str(found)
