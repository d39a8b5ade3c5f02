"""Mean losses on unpacked values under Inductor: the gradient of a mean is one number expanded, which must not be computed in twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile
from tests.e2e import compare, models


class Trained(nn.Module):
    """Embedding, one attention layer, head, and a loss computed inside."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], width: int = 16) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(97, width), nn.Linear(width, 3 * width), nn.Linear(width, 97)
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        rows, columns = ids.shape
        q, k, v = self.qkv(self.embed(ids)).view(rows, columns, 3, 2, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.loss(self.head(seen.transpose(1, 2).flatten(2)), labels)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, 97), labels[:, 1:].reshape(-1))


def picked(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None]).mean()


def by_class(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])


def counted(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None]).squeeze(-1)
    return chosen.sum() / (labels[:, 1:] >= 0).to(chosen.dtype).sum()


@pytest.mark.parametrize("loss", [cross_entropy, by_class, picked, counted])
def test_gradients_of_a_mean_equal_dense(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    model = models.spread(Trained(loss))
    call = compare.compiled(model, "inductor")
    for columns in (9, 14, 20):
        ids = torch.randint(97, (4, columns), generator=torch.Generator().manual_seed(columns))
        ids[:, :6] = ids[:1, :6].clone()
        found: dict[bool, dict[str, Tensor]] = {}
        for shared in (False, True):
            model.zero_grad(set_to_none=True)
            (call if shared else model)(ids, ids).backward()
            found[shared] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        assert sp_compile.last_run().shared
        for name, wanted in found[False].items():
            assert compare.relative(found[True][name], wanted, floor=1e-6) < compare.GRADIENTS, (columns, name)
