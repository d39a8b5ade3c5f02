"""Markers are identities: value, strides, gradient."""

from __future__ import annotations

import pytest
import torch

import sp_compile.ops.sites  # noqa: F401

OPS = torch.ops.sp_compile
PLAIN = {"scale": None, "is_causal": True, "window": 3, "softcap": None, "dropout": 0.0}


def test_attention_site_passes_value_and_gradient() -> None:
    dense = torch.randn(2, 5, 4, 8, requires_grad=True)
    query = torch.randn(2, 4, 5, 8, requires_grad=True)
    out = OPS.attention_site(dense, query, query, query, None, None, None, **PLAIN)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    assert torch.equal(out, dense)
    assert out.data_ptr() != dense.data_ptr()
    assert dense.grad is not None
    assert torch.equal(dense.grad, weight)
    assert query.grad is None


@pytest.mark.parametrize(
    "dense",
    [
        torch.ones(1, 1, 4, 4, dtype=torch.bool).tril().expand(3, -1, 4, 4),
        torch.randn(2, 5, 4, 8).transpose(1, 2),
        torch.randn(6, 8)[::2, 1:3],
        torch.randn(0, 3),
    ],
    ids=["expanded", "transposed", "with_holes", "empty"],
)
def test_strides_are_kept(dense: torch.Tensor) -> None:
    out = OPS.refusal_site(dense, "because")
    assert torch.equal(out, dense)
    assert out.stride() == dense.stride()
    torch.library.opcheck(OPS.refusal_site.default, (dense, "because"))


def test_schemas_pass_opcheck() -> None:
    dense = torch.randn(2, 5, 4, 8, requires_grad=True)
    query, mask = torch.randn(2, 4, 5, 8), torch.ones(2, 1, 5, 5, dtype=torch.bool)
    torch.library.opcheck(OPS.attention_site.default, (dense, query, query, query, mask, torch.randn(4), None), PLAIN)
    padding = torch.ones(2, 5, dtype=torch.int64)
    torch.library.opcheck(OPS.mask_site.default, (mask, padding, None), {"kind": "causal", "window": None, "chunk": 2})
    torch.library.opcheck(OPS.segments_site.default, (padding, padding))
