"""Semantic ops become implementations: the best that fits, or the one the user asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch._dynamo.exc import BackendCompilerFailed

from sp_compile.lowering import registry
from sp_compile.passes.runner import SEMANTIC
from sp_compile.passes.stage import is_lowered
from tests.passes.harness import Tiny, batch, compare, rewrite, targets
from tests.passes.test_share_prefixes import logits

PASS = "select_kernels"
ATTENTION = "sp_compile::attention"


def _kernels(found: Any) -> list[str]:
    return [name for name in targets(found.after[PASS]) if "attention" in name]


def test_default() -> None:
    found = rewrite(Tiny(logits), batch())
    assert_expected_inline(
        "\n".join(name for name in targets(found.before[PASS]) if name.startswith("sp_compile")),
        """\
sp_compile.attention
sp_compile.unpack""",
    )
    assert_expected_inline(
        "\n".join(name for name in targets(found.after[PASS]) if name.startswith("sp_compile")),
        """\
sp_compile.attention_chains
sp_compile.unpack""",
    )
    assert_expected_inline(str(sorted(found.context.kernels.items())), """[('attention', 'chains'), ('unpack', 'reference')]""")


@pytest.mark.parametrize(("name", "op"), [("blocked", "sp_compile.attention_blocked"), ("reference", "sp_compile.attention")])
def test_asked_for(name: str, op: str) -> None:
    error, found = compare(Tiny(logits), batch(), kernels=(name,))
    assert error < 1e-10
    assert _kernels(found) == [op]
    assert name in found.context.kernels[registry.option_name(torch.ops.sp_compile.attention.default)]


def test_everything_semantic_is_decided() -> None:
    found = rewrite(Tiny(logits), batch())
    assert all(is_lowered(node) for node in found.after[PASS].nodes if node.target in SEMANTIC)
    assert set(registry.semantic_ops()) <= SEMANTIC


def test_no_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._TABLES, torch.ops.sp_compile.attention.default, ())
    with pytest.raises(BackendCompilerFailed, match="NoImplementation"):
        rewrite(Tiny(logits), batch())
