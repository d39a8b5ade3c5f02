"""Attention markers become attention on a forest, with every term of the model's own mask."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor

from sp_compile.passes import markers
from sp_compile.passes.stage import Source, input_of
from tests.passes.harness import Rewrite, Tiny, batch, rewrite, targets
from tests.passes.test_share_prefixes import Positions, logits

PASS = "add_forest_masks"


def _attention(found: Rewrite) -> tuple[str, str]:
    """The attention call before and after."""
    before = next(node for node in found.before[PASS].nodes if node.target is markers.shared_attention)
    after = next(node for node in found.after[PASS].nodes if node.target is torch.ops.sp_compile.attention.default)
    return tuple(f"{', '.join(map(str, node.args))}\n{node.kwargs}\n" for node in (before, after))  # type: ignore[return-value]


def test_causal_attention() -> None:
    before, after = _attention(rewrite(Tiny(logits), batch()))
    assert_expected_inline(
        before,
        """\
q, k, v, None, None, None, None
{'scale': 0.5, 'window': None, 'chunk': None, 'softcap': None}
""",
    )
    assert_expected_inline(
        after,
        """\
q, k, v, forest_end, forest_column, None, None, None, None
{'scale': 0.5, 'window': None, 'chunk': None, 'softcap': None}
""",
    )


def test_window_and_padding() -> None:
    ids = batch()
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    before, after = _attention(rewrite(Positions(), ids, mask))
    assert_expected_inline(
        before,
        """\
q, k, v, reshape, None, None, None
{'scale': 0.5, 'window': 4, 'chunk': None, 'softcap': None}
""",
    )
    assert_expected_inline(
        after,
        """\
q, k, v, forest_end, forest_column, reshape, None, None, None
{'scale': 0.5, 'window': 4, 'chunk': None, 'softcap': None}
""",
    )


def test_forest_inputs_are_made_once() -> None:
    class Two(Tiny):
        def hidden(self, ids: Tensor) -> Tensor:
            return super().hidden(ids) + super().hidden(ids // 2)

    found = rewrite(Two(logits), batch())
    keys = [input_of(n).key for n in found.after[PASS].nodes if n.op == "placeholder" and input_of(n).source is Source.FOREST]
    assert sorted(map(str, keys)) == ["column", "end", "index", "row"]
    assert targets(found.after[PASS]).count("sp_compile.attention") == 2


def test_must_not_rewrite_what_is_no_attention() -> None:
    class Without(Tiny):
        def hidden(self, ids: Tensor) -> Tensor:
            return self.q(self.words(ids))

    found = rewrite(Without(logits), batch())
    assert str(found.before[PASS]) == str(found.after[PASS])
