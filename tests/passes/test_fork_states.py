"""Recurrences and causal convolutions become ops that know each token's predecessor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from sp_compile.passes import markers
from sp_compile.passes.stage import Source, input_of
from tests.passes.harness import Rewrite, Tiny, batch, compare, rewrite
from tests.passes.test_share_prefixes import logits

PASS = "fork_states"


class Convolved(Tiny):
    """A short convolution in the place of attention, as people write it."""

    def __init__(self, use: Callable[..., Any], cut: Callable[[Tensor, int], Tensor] = lambda y, length: y[..., :length]) -> None:
        super().__init__(use)
        self.conv = nn.Conv1d(8, 8, 3, groups=8, padding=2, dtype=torch.float64)
        self.cut = cut

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        return x + self.cut(self.conv(x.transpose(1, 2)), x.shape[1]).transpose(1, 2)


class Scanned(Tiny):
    """A state space scan as the library's op, on values of the dtype `narrow`; `use_state` also returns the state after the last column."""

    def __init__(self, use: Callable[..., Any], use_state: bool = False, narrow: torch.dtype = torch.float64) -> None:
        super().__init__(use)
        self.narrow = narrow
        self.rate = nn.Parameter(torch.rand(2, dtype=torch.float64))
        self.use_state = use_state

    def forward(self, ids: Tensor, *more: Tensor) -> Any:
        x = self.words(ids)
        heads, state_in, state_out = (y.unflatten(-1, (2, 4)) for y in (x, self.k(x), self.v(x)))
        if self.narrow != x.dtype:
            heads, state_in, state_out = (y.to(self.narrow) for y in (heads, state_in, state_out))
        tensors = (heads, self.q(x)[..., :2], -self.rate, state_in, state_out, None, None)
        options: dict[str, Any] = {"dt_softplus": True, "dt_min": 0.0, "dt_max": float("inf"), "chunk": 4}
        options |= {"dtype": torch.float64, "library": "tests.ssd"}
        out = torch.ops.sp_compile.dense_ssd_scan(*tensors, **options)
        found = self.head(x + out.flatten(2))
        if not self.use_state:
            return self.use(found, ids, *more)
        return found, torch.ops.sp_compile.dense_ssd_scan_state(*tensors, **options)


def _ssd(given: dict[str, Any], final: bool) -> Tensor:
    """The recurrence, column by column."""
    rates = F.softplus(given["dt"])
    state = given["x"].new_zeros((*given["x"].shape[0:1], *given["x"].shape[2:], given["B"].shape[-1]))
    made = []
    for column in range(rates.shape[1]):
        rate = rates[:, column, :, None, None]
        write = given["x"][:, column, :, :, None] * given["B"][:, column, :, None, :]
        state = (rate * given["A"][:, None, None]).exp() * state + rate * write
        made.append((state * given["C"][:, column, :, None, :]).sum(-1))
    return state if final else torch.stack(made, 1)


@pytest.fixture(autouse=True)
def library() -> None:
    from sp_compile.ops.dense_scans import register_library

    register_library("tests.ssd", _ssd)


def _calls(found: Rewrite) -> str:
    """The call before and after, without options."""
    before = [node for node in found.before[PASS].nodes if node.target is markers.shared_scan]
    after = [
        node for node in found.after[PASS].nodes if str(node.target) in ("sp_compile.causal_conv1d.default", "sp_compile.ssd_scan.default")
    ]
    lines = [f"{node.args[0]} {node.args[1]} {node.args[2]}" for node in before]
    lines += [f"{node.target} {node.args}" for node in after]
    return "\n".join(lines) + "\n"


def test_a_convolution() -> None:
    found = rewrite(Convolved(logits), batch())
    assert_expected_inline(
        _calls(found),
        """\
causal_conv1d (transpose_1, squeeze, l_self_modules_conv_parameters_bias_) None
sp_compile.causal_conv1d.default (transpose_1, squeeze, l_self_modules_conv_parameters_bias_, forest_prev, None)
""",
    )


def test_a_scan_and_its_last_state() -> None:
    found = rewrite(Scanned(logits, use_state=True), batch())
    assert_expected_inline(
        _calls(found),
        """\
ssd_scan (heads, getitem, neg, state_in, state_out, None, None) None
ssd_scan (heads, getitem, neg, state_in, state_out, None, None) select
sp_compile.ssd_scan.default (heads, getitem, neg, state_in, state_out, None, None, forest_prev, forest_end, None, select)
""",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_and_states_come_from_one_scan(dtype: torch.dtype) -> None:
    """Also where the library gives outputs in a wider dtype than its operands have."""
    model = Scanned(logits, use_state=True, narrow=dtype)
    error, found = compare(model, batch())
    calls = [node for node in found.after[PASS].nodes if str(node.target) == "sp_compile.ssd_scan.default"]
    assert len(calls) == 1
    assert error < (1e-12 if dtype == torch.float64 else 1e-5)


def test_predecessors_are_an_input_made_once() -> None:
    class Two(Convolved):
        def hidden(self, ids: Tensor) -> Tensor:
            return super().hidden(ids) + super().hidden(ids // 2)

    graph = rewrite(Two(logits), batch()).after[PASS]
    keys = [input_of(n).key for n in graph.nodes if n.op == "placeholder" and input_of(n).source is Source.FOREST]
    assert sorted(map(str, keys)) == ["column", "index", "prev", "row"]


def test_must_not_rewrite_attention() -> None:
    found = rewrite(Tiny(logits), batch())
    assert str(found.before[PASS]) == str(found.after[PASS])


def test_must_not_take_a_convolution_that_looks_ahead_for_a_causal_one() -> None:
    """Cut one column later, it reads the next token: it runs on rows, and is right."""
    model = Convolved(logits, lambda y, length: y[..., 1 : length + 1])
    error, found = compare(model, batch())
    assert error < 1e-12
    assert not [node for node in found.after[PASS].nodes if "causal_conv1d" in str(node.target)]


@pytest.mark.parametrize("model", [Convolved(logits), Scanned(logits), Scanned(logits, use_state=True)], ids=["conv", "ssd", "state"])
def test_numerics(model: nn.Module) -> None:
    error, _ = compare(model, batch())
    assert error < 1e-12
    error, _ = compare(model, batch(rows=5, columns=9, prefix=1, seed=3))
    assert error < 1e-12
