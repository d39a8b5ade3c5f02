"""Decoders that no library wrote, one per way to mask attention or to tell positions, and plain in everything else."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.e2e.models import spread
from tests.e2e.scenarios import IGNORED, VOCABULARY

WIDTH, HEADS, HEAD = 32, 4, 8
WINDOW, CHUNK = 5, 6


class Block(nn.Module):
    """A layer around an attention that is given as q [B, H, L, D], k, v -> [B, H, L, Dv]."""

    def __init__(self, value: int = HEAD) -> None:
        super().__init__()
        self.value = value
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, HEADS * HEAD), nn.Linear(WIDTH, HEADS * HEAD)
        self.values, self.out = nn.Linear(WIDTH, HEADS * value), nn.Linear(HEADS * value, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        h = self.before(x)
        q, k, v = (linear(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear in (self.query, self.key, self.values))
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Decoder(nn.Module):
    """Embedding, layers and a tied head; a subclass says how layer `number` attends."""

    value = HEAD

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(self.value) for _ in range(layers))

    def attend(self, number: int, ids: Tensor, mask: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        raise NotImplementedError

    def start(self, ids: Tensor) -> Tensor:
        return self.embed(ids)

    def run(self, ids: Tensor, mask: Tensor | None, labels: Tensor | None) -> tuple[Tensor, ...]:
        x = self.start(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, self.attend(number, ids, mask))
        logits = F.linear(x, self.embed.weight)
        if labels is None:
            return (logits,)
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> tuple[Tensor, ...]:
        return self.run(input_ids, attention_mask, labels)


def differences(length: int, device: torch.device) -> Tensor:
    """[L, L] query column less key column."""
    columns = torch.arange(length, device=device)
    return columns[:, None] - columns[None, :]


class Mixed(Decoder):
    """ALiBi, a window in every other layer, and keys and values decompressed from one latent, of differing width (MLA)."""

    value = 12

    def __init__(self) -> None:
        super().__init__(3)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1).float(), persistent=False)
        for layer in self.layers:
            layer.key = nn.Sequential(nn.Linear(WIDTH, 6), nn.LayerNorm(6), nn.Linear(6, HEADS * HEAD))
            layer.values = nn.Sequential(layer.key[0], layer.key[1], nn.Linear(6, HEADS * self.value))

    def attend(self, number: int, ids: Tensor, mask: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        apart = differences(ids.shape[1], ids.device)
        seen = apart >= 0
        if number % 2:
            seen = seen & (apart < WINDOW)
        if mask is not None:
            seen = seen & mask.bool()[:, None, None, :]
        bias = (-self.slopes[:, None, None] * apart).masked_fill(~seen, -torch.inf)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class Chunked(Decoder):
    """Attention inside chunks in one layer, full in the other, as a boolean mask."""

    def attend(self, number: int, ids: Tensor, mask: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        columns = torch.arange(ids.shape[1], device=ids.device)
        seen = columns[:, None] >= columns
        if number == 0:
            seen = seen & (columns[:, None] // CHUNK == columns // CHUNK)
        if mask is not None:
            seen = seen & (mask != 0)[:, None, None, :]
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class Buckets(Decoder):
    """A learned bias per bucket of the distance (T5), with its gradient, in attention written out with a softcap and a sink."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, HEADS)
        self.sink = nn.Parameter(torch.zeros(HEADS))

    def attend(self, number: int, ids: Tensor, mask: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        apart = differences(ids.shape[1], ids.device)
        near = apart.clamp(min=0)
        far = 4 + (near.float().clamp(min=1) / 4).log().mul(2).long()
        bias = self.table(torch.where(near < 4, near, far.clamp(max=7))).permute(2, 0, 1)[None]
        hidden = apart < 0
        if mask is not None:
            hidden = hidden | (mask == 0)[:, None, None, :]

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = torch.tanh(q @ k.transpose(-1, -2) / math.sqrt(HEAD) / 3) * 3
            scores = (scores + bias).masked_fill(hidden, -torch.inf)
            sink = self.sink.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
            return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v

        return attention


class Grouped(Decoder):
    """Two query heads per key head in five dimensions, by einsum, with a window."""

    def attend(self, number: int, ids: Tensor, mask: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        apart = differences(ids.shape[1], ids.device)
        hidden = (apart < 0) | (apart >= WINDOW)
        if mask is not None:
            hidden = hidden | (mask == 0)[:, None, None, None, :]

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = k[:, ::2], v[:, ::2]
            grouped = q.unflatten(1, (HEADS // 2, 2))
            scores = torch.einsum("bgrqd,bgkd->bgrqk", grouped, k) / math.sqrt(HEAD)
            weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
            return torch.einsum("bgrqk,bgkd->bgrqd", weights, v).flatten(1, 2)

        return attention


class Old(Decoder):
    """A triangle and a number in buffers, and where(), as GPT-2 once was."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(64, 64, dtype=torch.bool)).view(1, 1, 64, 64), persistent=False)
        self.register_buffer("masked_bias", torch.tensor(-1e4), persistent=False)
        self.places = nn.Embedding(64, WIDTH)

    def start(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))

    def attend(self, number: int, ids: Tensor, mask: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        hidden = (1.0 - mask[:, None, None, :].float()) * -1e4 if mask is not None else None

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            weights = torch.matmul(q, k.transpose(-1, -2)) / (float(v.size(-1)) ** 0.5)
            queries, keys = q.size(-2), k.size(-2)
            triangle = self.bias[:, :, keys - queries : keys, :keys].bool()
            weights = torch.where(triangle, weights, self.masked_bias.to(weights.dtype))
            if hidden is not None:
                weights = weights + hidden
            return torch.matmul(F.softmax(weights, dim=-1), v)

        return attention


class Documents(Decoder):
    """Several documents in a row, found from a separator's id: no token sees another document; chunks and padding on top."""

    def attend(self, number: int, ids: Tensor, mask: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        documents = (ids == 7).cumsum(-1)
        columns = torch.arange(ids.shape[1], device=ids.device)
        seen = (columns[:, None] >= columns) & (documents[:, None, :, None] == documents[:, None, None, :])
        if number:
            seen = seen & (columns[:, None] // CHUNK == columns // CHUNK)
        if mask is not None:
            seen = seen & mask.bool()[:, None, None, :]
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class Positions3d(Decoder):
    """Rotary positions in three sections (mRoPE), of a part of the head, scaled; the position ids are an input [3, B, L]."""

    def forward(self, input_ids: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:  # type: ignore[override]
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand(3, *input_ids.shape)
        frequency = 100.0 ** -(torch.arange(0, 6, 2, device=input_ids.device) / 6) / 2
        angle = torch.stack([positions[i].float() * frequency[i] for i in range(3)], -1)[:, None]
        self.rotation = angle.cos(), angle.sin()
        return self.run(input_ids, None, None)

    def attend(self, number: int, ids: Tensor, mask: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        cos, sin = self.rotation

        def turned(x: Tensor) -> Tensor:
            a, b, rest = x.split((3, 3, HEAD - 6), -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

        return lambda q, k, v: F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)


KINDS: dict[str, type[Decoder]] = {
    "mixed": Mixed,
    "chunked": Chunked,
    "buckets": Buckets,
    "grouped": Grouped,
    "old": Old,
    "documents": Documents,
    "positions3d": Positions3d,
}


def make(kind: str) -> nn.Module:
    return spread(KINDS[kind]())
