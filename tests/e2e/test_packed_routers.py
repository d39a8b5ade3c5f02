"""Packed mode with routers that choose among groups of experts, of which there is one: as released models are configured."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile
from sp_compile.backend import shared_prefix
from sp_compile.errors import CannotShare
from tests.e2e.models import _TINY, CausalSelfAttention, spread
from tests.e2e.scenarios import VOCABULARY
from tests.e2e.test_packed import FEW, check, dense_run

WIDTH, EXPERTS = 16, 6
BATCHES = [batch for batch in FEW if batch.name in ("star right-padded", "forest both-padded")]
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1,
           "topk_group": 1, "first_k_dense_replace": 0}  # fmt: skip
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}


class Routed(nn.Module):
    """Experts behind a group-limited router; `tokens_first` gives it [L, B, width]."""

    def __init__(self, groups: int, tokens_first: bool) -> None:
        super().__init__()
        self.groups, self.tokens_first = groups, tokens_first
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8)), nn.Parameter(torch.randn(EXPERTS, 8, WIDTH))

    def weights(self, flat: Tensor) -> Tensor:
        scores = self.gate(flat).sigmoid()
        grouped = scores.view(-1, self.groups, EXPERTS // self.groups)
        chosen = grouped.topk(2, dim=-1)[0].sum(-1).topk(1, dim=-1, sorted=False)[1]
        mask = torch.zeros(flat.shape[0], self.groups, dtype=scores.dtype).scatter_(1, chosen, 1)
        mask = mask.unsqueeze(-1).expand(-1, self.groups, EXPERTS // self.groups).reshape(-1, EXPERTS)
        kept, places = scores.masked_fill(mask == 0, 0.0).topk(2, dim=-1)
        return torch.zeros_like(scores).scatter(1, places, kept / kept.sum(-1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.tokens_first else x
        flat = x.reshape(-1, WIDTH)
        out = torch.einsum("te,ted->td", self.weights(flat), F.silu(torch.einsum("td,edh->teh", flat, self.up)).sum(-1, keepdim=True)
                           * self.down.mean(1)).view(x.shape)  # fmt: skip
        return out.transpose(0, 1) if self.tokens_first else out


class Layer(nn.Module):
    def __init__(self, groups: int, tokens_first: bool) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.experts = CausalSelfAttention(WIDTH, 2), Routed(groups, tokens_first)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.first(x))
        return x + self.experts(self.second(x))


class Model(nn.Module):
    def __init__(self, groups: int = 1, tokens_first: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer(groups, tokens_first) for _ in range(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def transformer(name: str) -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    own = _LATENT if name == "DeepseekV3" else {"head_dim": 16}
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**{**_TINY, **_ROUTED, **own}))
    return spread(model)


@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "per block"])
@pytest.mark.parametrize("name", ["written by hand", "DeepseekV3", "Glm4Moe"])
def test_one_group_of_experts(name: str, blocks: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = spread(Model()) if name == "written by hand" else transformer(name)
    dense, call, regions = copy.deepcopy(model), model, 1
    if blocks:
        layers = list(model.layers if name == "written by hand" else model.model.layers)
        regions = len(layers)
        for layer in layers:
            layer.compile(backend=shared_prefix, options={"inner": "eager"})
    else:
        call = torch.compile(model, backend=shared_prefix, options={"inner": "eager"})
    batches = BATCHES[:1] if name == "written by hand" else BATCHES
    for batch in batches:
        check(call, model, batch, dense_run(dense, batch), regions)


def test_tokens_first_is_still_an_error() -> None:
    """There the dimension of size 1 behind the tokens is the batch."""
    torch._dynamo.reset()
    call = torch.compile(Model(tokens_first=True), backend=shared_prefix, options={"inner": "eager"})
    packed = sp_compile.pack(BATCHES[0].inputs)
    with sp_compile.share(packed.forest), pytest.raises(CannotShare, match="may run over the rows"):
        call(**packed.inputs)
