"""Models that no library wrote, in two different styles, and tiny Hugging Face models; weights have a spread of 0.1."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.e2e.scenarios import IGNORED, VOCABULARY


def spread(model: nn.Module, seed: int = 0) -> nn.Module:
    """At a spread of 0.02 attention is nearly uniform, and a wrong position does not show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(noise + 1 if parameter.dim() == 1 and bool((parameter == 1).all()) else noise)
    return model


# A decoder in the style of nanoGPT: fused qkv with biases, is_causal, learned positions, tied head, a (logits, loss) tuple.


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head = heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        k = k.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        q = q.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        v = v.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """`labels` are compared with the logits one column earlier."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2, block_size: int = 64) -> None:
        super().__init__()
        self.block_size = block_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, width),
                "wpe": nn.Embedding(block_size, width),
                "h": nn.ModuleList([GptBlock(width, heads) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = input_ids.size()
        assert t <= self.block_size, f"cannot forward {t} tokens, the block size is {self.block_size}"
        pos = torch.arange(0, t, dtype=torch.long, device=input_ids.device)
        x = self.transformer["wte"](input_ids) + self.transformer["wpe"](pos)
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        if labels is None:
            return logits, None
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1), ignore_index=IGNORED)
        return logits, loss


# A decoder with functional layers, grouped heads, rotations by position_ids and a mask of its own; a dictionary of results.


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """x [B, L, H, D], angle [B, L, D / 2], by complex numbers written out."""
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = angle.cos().unsqueeze(2), angle.sin().unsqueeze(2)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Rope(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, groups: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.heads, self.groups, self.head_width = heads, groups, width // heads
        self.embed = nn.Parameter(torch.empty(VOCABULARY, width))
        self.unembed = nn.Parameter(torch.empty(width, VOCABULARY))
        self.final = nn.Parameter(torch.ones(width))
        self.register_buffer("frequency", 10000.0 ** -(torch.arange(0, self.head_width, 2) / self.head_width), persistent=False)
        kv = groups * self.head_width
        shapes = {
            "wq": (width, width), "wk": (width, kv), "wv": (width, kv), "wo": (width, width),
            "gate": (width, 2 * width), "up": (width, 2 * width), "down": (2 * width, width),
        }  # fmt: skip
        self.layers = nn.ModuleList()
        for _ in range(layers):
            weights = {name: nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()}
            norms = {name: nn.Parameter(torch.ones(width)) for name in ("before", "after")}
            self.layers.append(nn.ParameterDict({**weights, **norms}))  # type: ignore[arg-type]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device).unsqueeze(0)
        angle = position_ids.unsqueeze(-1) * self.frequency
        visible = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()[None, None]
        if attention_mask is not None:
            visible = visible & attention_mask.bool()[:, None, None, :]
        x = self.embed[input_ids]
        for layer in self.layers:
            x = x + self.mix(rms_norm(x, layer["before"]), layer, angle, visible)  # type: ignore[index]
            y = rms_norm(x, layer["after"])  # type: ignore[index]
            x = x + (F.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]  # type: ignore[index]
        logits = torch.einsum("blw,wv->blv", rms_norm(x, self.final), self.unembed)
        result = {"logits": logits}
        if labels is not None:
            chosen = logits.log_softmax(-1)[:, :-1].gather(-1, labels[:, 1:, None].clamp(min=0)).squeeze(-1)
            counts = (labels[:, 1:] != IGNORED).to(chosen.dtype)
            result["loss"] = -(chosen * counts).sum() / counts.sum().clamp(min=1)
        return result

    def mix(self, x: Tensor, layer: Any, angle: Tensor, visible: Tensor) -> Tensor:
        q = rotate((x @ layer["wq"]).unflatten(-1, (self.heads, -1)), angle).movedim(2, 1)
        k = rotate((x @ layer["wk"]).unflatten(-1, (self.groups, -1)), angle).movedim(2, 1)
        v = (x @ layer["wv"]).unflatten(-1, (self.groups, -1)).movedim(2, 1)
        scale = 1 / math.sqrt(self.head_width)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
        return y.movedim(1, 2).flatten(-2) @ layer["wo"]


def gpt() -> nn.Module:
    return spread(Gpt())


def rope() -> nn.Module:
    return spread(Rope())


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return spread(LlamaForCausalLM(LlamaConfig(**{**_TINY, **changes})))


def qwen3(**changes: Any) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return spread(Qwen3ForCausalLM(Qwen3Config(**{**_TINY, "head_dim": 16, "tie_word_embeddings": True, **changes})))


_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "use_cache": False,
}
