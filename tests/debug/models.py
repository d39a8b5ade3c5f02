"""Small models, ids with a common prefix, and the backend without an inner compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sp_compile.backend import shared_prefix


class Model(nn.Module):
    """Embedding, one causal attention, head. `graph_break` ends the first graph behind the attention; `causal=False` cannot be shared."""

    def __init__(self, *, graph_break: bool = False, causal: bool = True) -> None:
        super().__init__()
        self.graph_break, self.causal = graph_break, causal
        self.embedding = nn.Embedding(32, 16)
        self.qkv = nn.Linear(16, 48)
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).reshape(b, n, 16)
        if self.graph_break:
            torch._dynamo.graph_break()
        return self.head(x)


def compiled(model: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(model, backend=shared_prefix, options={"inner": "eager", **options})


def rows(batch: int = 4, prefix: int = 6, columns: int = 10) -> Tensor:
    """int64 [batch, columns], at most 32 rows: a common prefix, then each row its own tokens; T = prefix + batch * (columns - prefix)."""
    ids = (torch.arange(batch)[:, None] + torch.arange(columns)[None]) % 32
    ids[:, :prefix] = torch.arange(prefix)
    return ids
