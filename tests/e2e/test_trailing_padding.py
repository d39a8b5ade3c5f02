"""Padding under recurrences and convolutions: what stands in front of a token that somebody reads is a token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile
from tests.e2e import compare
from tests.e2e.models import spread

PAD, IGNORED = 0, -100


class Convolved(nn.Module):
    """Two short convolutions between an embedding and a head; `kind` says what the mask is for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.words, self.head, self.value = nn.Embedding(40, 8), nn.Linear(8, 40), nn.Linear(8, 1)
        self.convs = nn.ModuleList([nn.Conv1d(8, 8, 4, groups=8, padding=3) for _ in range(2)])

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, loss_mask: Tensor | None = None, labels: Any = None) -> Any:
        x = self.words(input_ids)
        for conv in self.convs:
            if attention_mask is not None:
                x = x * attention_mask[..., None]
            x = x + F.silu(conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        logits = self.head(x)
        if labels is not None:
            return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)}
        if loss_mask is not None:
            value = self.value(x)[..., 0] * loss_mask
            return {"logits": logits, "loss": value.square().sum() / 100}
        return logits


def _rows() -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, 40, (4, 14), generator=torch.Generator().manual_seed(0))
    ids[:, :6] = ids[0, :6]
    mask = torch.ones_like(ids)
    for row, end in enumerate((9, 14, 11, 8)):
        ids[row, end:], mask[row, end:] = PAD, 0
    return ids, mask


def _check(inputs: dict[str, Tensor], kept: Tensor, real: Tensor) -> None:
    model = spread(Convolved("mask"))
    torch._dynamo.reset()
    call = compare.compiled(model, "eager")
    wanted, found = _step(model, model, inputs, real), _step(call, model, inputs, real)
    account = sp_compile.last_run()
    assert account.shared
    assert account.logical_tokens == int(kept.sum())
    compare.assert_close(found, wanted, real)


def _step(call: Any, model: nn.Module, inputs: dict[str, Tensor], real: Tensor) -> compare.Result:
    model.zero_grad(set_to_none=True)
    logits, loss = compare.outputs(call(**inputs))
    objective = (logits * compare.weighting(logits.shape, real)).sum() + (0 if loss is None else 3 * loss)
    objective.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return compare.Result(logits.detach(), None if loss is None else loss.detach(), gradients)


def test_padding_behind_a_row_is_dropped() -> None:
    ids, mask = _rows()
    _check({"input_ids": ids, "attention_mask": mask}, mask, mask.bool())


def test_padding_in_front_and_between_is_kept() -> None:
    ids, mask = _rows()
    mask[0, :2], mask[2, 7:9] = 0, 0
    kept = mask.flip(1).cummax(1).values.flip(1)
    _check({"input_ids": ids, "attention_mask": mask}, kept, mask.bool())


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_a_mask_of_the_loss_is_no_padding(dtype: torch.dtype) -> None:
    ids, mask = _rows()
    everything = torch.ones_like(mask)
    _check({"input_ids": ids, "loss_mask": mask.to(dtype)}, everything, everything.bool())


def test_a_label_behind_a_gap_keeps_the_gap() -> None:
    """The convolution at the last pad reads the pads in front of it."""
    ids, mask = _rows()
    labels = torch.full_like(ids, IGNORED)
    labels[:, -1], labels[0, 3] = 5, 7
    everything = torch.ones_like(mask)
    _check({"input_ids": ids, "attention_mask": mask, "labels": labels}, everything, mask.bool())
