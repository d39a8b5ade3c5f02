"""A plain decoder with multi-token prediction in the style of DeepSeek-V3, written without a thought of shared prefixes.

The body is a string of layers: `*` attention, `-` feed-forward, `E` mixture of experts with bias-corrected routing, `M` Mamba-2, `G` gated
delta rule, `C` gated short convolution; the recurrences are transformers' functions. Head d = 1, 2, ...
takes the hidden state of head d - 1 at column l and the embedding of token l + d, runs a block of its own, and predicts token l + d + 1
with the body's embedding and head. Tokens roll within a row, zeros follow the last one.

Losses (factor f, D heads, m the loss mask): with m_0 = roll(m) and m_d = roll(m_{d-1}) * m_input_d, where m_input_d says that token l + d
is real, head d adds (f / D) sum m_d CE_d / max(1, sum_group m_d), and under `per_token` that times sum_group m_0, averaged over all
tokens of m_0 at the end. A group is a set of rows, such as those of one prompt.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes and choices.

    Attributes:
        body: one character a layer.
        head_block: the layers of each prediction head.
        depth: D, heads besides the main one.
        factor: f, the weight of their losses.
        detach: heads send no gradient into the body.
        per_token: losses are weighted so that every token counts alike.
    """

    vocabulary: int = 97
    width: int = 32
    heads: int = 4
    body: str = "*-*E"
    head_block: str = "*E"
    depth: int = 2
    experts: int = 4
    chosen: int = 2
    factor: float = 0.3
    detach: bool = False
    per_token: bool = False


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        rows, columns, width = x.shape
        q, k, v = (part.view(rows, columns, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(rows, columns, width))


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(config.width, 2 * config.width), nn.Linear(2 * config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Experts(nn.Module):
    """Sigmoid routing, whose choice a bias corrects that is moved against the load, as counted in training."""

    load: Tensor
    correction: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.chosen = config.chosen
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(config.experts))
        self.shared = FeedForward(config)
        self.register_buffer("load", torch.zeros(config.experts, dtype=torch.int64))
        self.register_buffer("correction", torch.zeros(config.experts))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.router(tokens).sigmoid()
        chosen = (scores + self.correction).topk(self.chosen, dim=-1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.training:
            with torch.no_grad():
                self.load.scatter_add_(0, chosen.view(-1), torch.ones_like(chosen.view(-1)))
        y = self.shared(tokens, mask)
        for number, expert in enumerate(self.experts):
            y = y + (weights * (chosen == number)).sum(-1, keepdim=True) * expert(tokens, mask)
        return y.view_as(x)

    @torch.no_grad()
    def balance(self, rate: float = 1e-3) -> None:
        """What an optimiser step does besides: moves the bias against the load, and forgets the load."""
        load = self.load.to(self.correction.dtype)
        self.correction += rate * torch.sign(load.mean() - load)
        self.load.zero_()


class ShortConvolution(nn.Module):
    """A causal convolution between two gates."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.maps = nn.Linear(config.width, 3 * config.width)
        self.conv = nn.Conv1d(config.width, config.width, 3, groups=config.width, padding=2)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        before, after, value = self.maps(x).chunk(3, -1)
        y = self.conv((before * value).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return self.out(after * y)


class Mamba2(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.width = config.heads, config.width
        self.maps = nn.Linear(config.width, 4 * config.width + config.heads)
        self.conv = nn.Conv1d(3 * config.width, 3 * config.width, 4, groups=3 * config.width, padding=3)
        self.rate, self.skip, self.step = (nn.Parameter(torch.ones(config.heads)) for _ in range(3))
        self.norm, self.out = nn.RMSNorm(config.width), nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

        gate, mixed, step = self.maps(x).split([self.width, 3 * self.width, self.heads], dim=-1)
        mixed = F.silu(self.conv(mixed.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)
        value, write, read = mixed.chunk(3, -1)
        heads = value.unflatten(-1, (self.heads, -1))
        write, read = (part.unflatten(-1, (1, self.width)) for part in (write, read))
        y = mamba2_chunk_scan(heads, step, -self.rate.exp(), write, read, chunk_size=8, D=self.skip, dt_bias=self.step, dt_softplus=True)
        return self.out(self.norm(y.flatten(2).to(x.dtype) * F.silu(gate)))


class GatedDelta(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.maps, self.gates = nn.Linear(config.width, 4 * config.width), nn.Linear(config.width, 2 * config.heads)
        self.rate = nn.Parameter(torch.zeros(config.heads))
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        q, k, v, gate = (part.unflatten(-1, (self.heads, -1)) for part in self.maps(x).chunk(4, -1))
        decay, strength = self.gates(x).chunk(2, -1)
        y, _ = torch_chunk_gated_delta_rule(
            q, k, v, g=-self.rate.exp() * F.softplus(decay), beta=strength.sigmoid(), chunk_size=8, use_qk_l2norm_in_kernel=True
        )
        return self.out((y * F.silu(gate)).flatten(2))


LAYERS = {"*": Attention, "-": FeedForward, "E": Experts, "C": ShortConvolution, "M": Mamba2, "G": GatedDelta}


class Block(nn.Module):
    def __init__(self, config: Config, layers: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(config.width) for _ in layers)
        self.layers = nn.ModuleList(LAYERS[kind](config) for kind in layers)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), mask)
        return x


class PredictionHead(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_hidden, self.norm_token = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.join = nn.Linear(2 * config.width, config.width, bias=False)
        self.block = Block(config, config.head_block)

    def forward(self, hidden: Tensor, embedded: Tensor, mask: Tensor | None) -> Tensor:
        joined = torch.cat([self.norm_hidden(hidden), self.norm_token(embedded)], dim=-1)
        return self.block(self.join(joined), mask)


def roll(x: Tensor) -> Tensor:
    """[B, L] one column to the left, with zero after the last."""
    return F.pad(x[:, 1:], (0, 1))


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.body = Block(config, config.body)
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.predictions = nn.ModuleList(PredictionHead(config) for _ in range(config.depth))

    def forward(
        self,
        ids: Tensor,
        loss_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        groups: Tensor | None = None,
        predict: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, the main loss and the heads' loss.

        Args:
            ids: int64 [B, L].
            loss_mask: [B, L], 1 for tokens that are to be predicted; None: all.
            attention_mask: [B, L], 1 for real tokens; None: all are.
            groups: int64 [B], the group of each row; None: all rows are one.
            predict: whether the heads run in training; they never do in evaluation.
        """
        real = torch.ones_like(ids) if attention_mask is None else attention_mask
        kept = real if loss_mask is None else loss_mask * real
        mask = None
        if attention_mask is not None:
            columns = ids.shape[1]
            mask = torch.ones(columns, columns, dtype=torch.bool, device=ids.device).tril() & attention_mask.bool()[:, None, None, :]
        hidden = self.body(self.embedding(ids), mask)
        logits = self.head(self.norm(hidden))
        m_0 = roll(kept)
        losses = self.losses(logits, roll(ids), m_0)
        main = losses.sum() / m_0.sum().clamp(min=1)
        extra = torch.zeros_like(main)
        if not self.training or not predict:
            return logits, main, extra
        state = hidden.detach() if self.config.detach else hidden
        tokens, inputs, m_d = ids, real, m_0
        for head in self.predictions:
            tokens, inputs = roll(tokens), roll(inputs)
            m_d = roll(m_d) * inputs
            embedded = self.embedding(tokens)
            state = head(state, embedded.detach() if self.config.detach else embedded, mask)
            weight = self.head.weight.detach() if self.config.detach else self.head.weight
            losses = self.losses(F.linear(self.norm(state), weight), roll(tokens), m_d)
            scale = 1 / self.per_group(m_d, groups).clamp(min=1)
            if self.config.per_token:
                scale = scale * self.per_group(m_0, groups) / m_0.sum().clamp(min=1)
            extra = extra + self.config.factor / self.config.depth * (losses * scale[:, None]).sum()
        return logits, main, extra

    @staticmethod
    def losses(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """[B, L], zero where the mask is."""
        wanted = labels.masked_fill(mask == 0, IGNORED)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="none").view_as(labels)

    def per_group(self, mask: Tensor, groups: Tensor | None) -> Tensor:
        """[B], the number of the group's positions that the mask keeps."""
        counted = mask.sum(1).to(self.norm.weight.dtype)
        if groups is None:
            return counted.sum().expand(counted.shape)
        return (groups[:, None] == groups[None, :]).to(counted.dtype) @ counted
