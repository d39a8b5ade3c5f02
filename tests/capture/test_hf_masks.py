"""Mask functions of transformers, called alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.capture.recording import capture, captured, reasons, sites

masking = pytest.importorskip("transformers.masking_utils")

EMBEDS = torch.randn(3, 12, 8)
PADDING = torch.ones(3, 12, dtype=torch.int64).index_fill(1, torch.tensor([0]), 0)
POSITIONS = torch.arange(12)[None].expand(3, -1).contiguous()


def config(attention: str, **extra: Any) -> Any:
    return SimpleNamespace(_attn_implementation=attention, sliding_window=4, attention_chunk_size=3, is_causal=True, **extra)


def make(name: str, mask: torch.Tensor | None, positions: torch.Tensor | None = None, **extra: Any) -> Any:
    """The graph of one call, after a check that its value is the library's."""
    own = config("eager")

    def function(embeds: torch.Tensor, padding: torch.Tensor | None, position_ids: torch.Tensor | None) -> Any:
        return getattr(masking, name)(own, embeds, padding, None, position_ids, **extra)

    graph, result = captured(function, EMBEDS, mask, positions)
    assert torch.equal(result, function(EMBEDS, mask, positions))
    return graph


@pytest.mark.parametrize(
    ("name", "window", "chunk"),
    [("create_causal_mask", None, None), ("create_sliding_window_causal_mask", 4, None), ("create_chunked_causal_mask", None, 3)],
)
def test_padding_window_and_chunk_are_carried(name: str, window: int | None, chunk: int | None) -> None:
    (mask,) = sites(make(name, PADDING), "mask_site")
    assert mask.kwargs == {"kind": "causal", "window": window, "chunk": chunk}
    assert mask.args[1].op == "placeholder"
    assert mask.args[2] is None


def test_segments_are_carried_without_a_mask_and_only_then() -> None:
    (mask,) = sites(make("create_causal_mask", None, POSITIONS), "mask_site")
    assert mask.args[2] is not None
    (mask,) = sites(make("create_causal_mask", PADDING, POSITIONS), "mask_site")
    assert mask.args[2] is None
    (mask,) = sites(make("create_causal_mask", None, None, allow_is_causal_skip=False), "mask_site")
    assert mask.args[1] is None
    assert mask.args[2] is None


@pytest.mark.parametrize("argument", ["or_mask_function", "and_mask_function"])
def test_mask_functions_of_the_caller_are_refused(argument: str) -> None:
    graph = make("create_causal_mask", PADDING, None, **{argument: lambda b, h, q, k: q >= k})
    assert sites(graph, "mask_site") == []
    assert reasons(graph) == [f"a causal mask was made with an argument that is not known: {argument}"]


def test_blocks_are_refused() -> None:
    graph = make("create_causal_mask", PADDING, None, block_sequence_ids=torch.zeros(3, 12, dtype=torch.int64))
    assert "block_sequence_ids" in reasons(graph)[0]


def test_bidirectional_and_ready_masks_are_left_alone() -> None:
    ready = torch.ones(3, 1, 12, 12, dtype=torch.bool).tril()
    own = config("eager")
    graph, result = captured(lambda e, m: masking.create_causal_mask(own, e, m, None, None) & (e.sum() == 0), EMBEDS, ready)
    assert torch.equal(result, ready & False)
    assert "sp_compile" not in str(graph.graph)
    own.is_causal = False
    assert "sp_compile" not in str(capture(lambda e, p: masking.create_causal_mask(own, e, p, None, None), EMBEDS, PADDING).graph)


def test_masks_for_generate_are_marked_by_layer_type() -> None:
    own = config("eager", layer_types=["full_attention", "sliding_attention"])
    own.get_text_config = lambda: own

    def function(embeds: torch.Tensor, padding: torch.Tensor) -> Any:
        masks = masking.create_masks_for_generate(own, embeds, padding, None)
        return masks["full_attention"], masks["sliding_attention"]

    windows = [node.kwargs["window"] for node in sites(capture(function, EMBEDS, PADDING), "mask_site")]
    assert sorted(windows, key=str) == [4, None]


def test_a_longer_mask_is_refused() -> None:
    own, longer = config("eager"), torch.ones(3, 15, dtype=torch.int64)
    graph = capture(lambda e, p: masking.create_causal_mask(own, e, p, None, None), EMBEDS, longer)
    assert "differ in length" in reasons(graph)[0]


@pytest.mark.parametrize("name", ["create_causal_mask", "create_sliding_window_causal_mask"])
def test_an_empty_cache_is_no_past(name: str) -> None:
    from transformers import DynamicCache

    own = config("eager")
    (mask,) = sites(capture(lambda e, p: getattr(masking, name)(own, e, None, DynamicCache(), p), EMBEDS, POSITIONS), "mask_site")
    # With a cache the library does not look for packed sequences.
    assert mask.args[2] is None


def test_a_filled_cache_is_refused() -> None:
    from transformers import DynamicCache

    own, cache = config("eager"), DynamicCache()
    cache.update(torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4, 8), 0)
    graph = capture(lambda e: masking.create_causal_mask(own, e, None, cache), EMBEDS)
    assert reasons(graph) == ["the cache holds past tokens"]


def test_block_masks_of_flex_attention_carry_their_marker() -> None:
    from transformers.integrations.flex_attention import flex_attention_forward

    own, module = config("flex_attention"), torch.nn.Module().eval()
    query, key, value = (torch.randn(3, heads, 12, 16) for heads in (4, 2, 2))

    def function(embeds: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        mask = masking.create_sliding_window_causal_mask(own, embeds, padding, None)
        return flex_attention_forward(module, query, key, value, mask, scaling=0.25)[0]

    with torch.no_grad():
        graph, result = captured(function, EMBEDS, PADDING)
    (mask,), (attention,) = sites(graph, "mask_site"), sites(graph, "attention_site")
    assert attention.args[4] is mask
    assert mask.args[1].op == "placeholder"
    assert mask.kwargs["window"] == 4
    allowed = masking.create_sliding_window_causal_mask(config("sdpa"), EMBEDS, PADDING, None)
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed, scale=0.25, enable_gqa=True)
    # Column 0 is padding, and a row that sees nothing is not defined.
    torch.testing.assert_close(result[:, 1:], dense.transpose(1, 2)[:, 1:], rtol=1e-4, atol=1e-5)
