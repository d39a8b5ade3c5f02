"""Rotary positions in three sections (mRoPE), given as [3, B, L]: part of what rows must agree in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_compile
from sp_compile.layout.forest import Forest
from tests.e2e import compare, decoders
from tests.e2e.models import spread
from tests.e2e.scenarios import VOCABULARY, Batch, forest, right_padded


def sections(ids: Tensor, images: Tensor) -> Tensor:
    """Time, height and width as Qwen2-VL counts them: an image of 2 x 3 tokens at column `images[row]`, text around it (-1: no image)."""
    rows, columns = ids.shape
    found = torch.empty(3, rows, columns, dtype=torch.int64)
    for row in range(rows):
        start = int(images[row])
        place = torch.arange(columns).expand(3, -1).clone()
        if start >= 0:
            place[0, start : start + 6] = start
            place[1, start : start + 6] = start + torch.arange(6) // 3
            place[2, start : start + 6] = start + torch.arange(6) % 3
            place[:, start + 6 :] -= 3
        found[:, row] = place
    return found


def tokens(ids: Tensor, positions: Tensor, real: Tensor) -> int:
    """Of a perfect trie of ids and all three positions."""
    return Forest.from_tokens(ids, *positions, keep=real).num_tokens


class TextModel(nn.Module):
    """The decoder inside of Qwen2-VL, which takes the positions from outside, with a head."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

        config = Qwen2VLTextConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, use_cache=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        )  # fmt: skip
        self.model, self.head = Qwen2VLTextModel(config), nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, positions: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        hidden = self.model(input_ids=input_ids, position_ids=positions, attention_mask=attention_mask).last_hidden_state
        return (self.head(hidden),)


@pytest.mark.parametrize("kind", ["by hand", "Qwen2-VL"])
def test_three_sections(kind: str) -> None:
    torch._dynamo.reset()
    model: Any = decoders.make("positions3d") if kind == "by hand" else spread(TextModel())
    call: Callable[..., Any] = compare.compiled(model, "eager")
    ids, mask, _ = right_padded(forest())
    rows = len(ids)
    places = {
        "text": torch.full((rows,), -1),
        "one image": torch.ones(rows, dtype=torch.int64),
        "one row without": torch.tensor([1, -1, *[1] * (rows - 2)]),
    }
    counts = []
    for images in places.values():
        inputs: dict[str, Any] = {"input_ids": ids, "positions": sections(ids, images)}
        real = torch.ones_like(mask, dtype=torch.bool)
        if kind != "by hand":
            inputs["attention_mask"], real = mask, mask.bool()
        batch = Batch("sections", inputs, real)
        wanted, found = compare.step(model, model, batch), compare.step(call, model, batch)
        run = sp_compile.last_run()
        assert run.shared, run.refused
        assert run.physical_tokens == tokens(ids, inputs["positions"], real)
        compare.assert_close(found, wanted, batch.real)
        counts.append(run.physical_tokens)
    assert counts[0] == counts[1] < counts[2]
    assert sp_compile.last_run().compiles == 1
