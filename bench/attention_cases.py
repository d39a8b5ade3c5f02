"""Forests for `bench/attention.py`, their values, and the same values as full rows."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sp_compile.kernels.attention import blocked
from sp_compile.layout.forest import Forest
from sp_compile.ops.attention import Mask

HEADS, KV_HEADS = 32, 8
Rows = list[list[int]]


def star(prompt: int, rows: int, completion: int, first: int = 0) -> Rows:
    """Rows of one prompt and completions of their own."""
    head = list(range(first, first + prompt))
    return [head + list(range(first + prompt + r * completion, first + prompt + (r + 1) * completion)) for r in range(rows)]


def stars(count: int, prompt: int, rows: int, completion: int) -> Rows:
    tokens = prompt + rows * completion
    return [row for s in range(count) for row in star(prompt, rows, completion, s * tokens)]


def tree(depth: int, tokens: int, seed: int = 0) -> Rows:
    """Rows of an agent's tree: 2 to 4 children a node, nodes of differing length, about `tokens` physical tokens."""
    generator = random.Random(seed)
    nodes = sum(3**level for level in range(depth))
    rows: Rows = []
    fresh = iter(range(10**9))

    def grow(path: list[int], level: int) -> None:
        path = path + [next(fresh) for _ in range(generator.randint(tokens // nodes // 2, 3 * tokens // nodes // 2))]
        if level == depth - 1:
            rows.append(path)
            return
        for _ in range(generator.choice((2, 3, 4))):
            grow(path, level + 1)

    grow([], 0)
    return rows


def ragged(groups: int, seed: int = 0) -> Rows:
    """Groups of 1 to 12 rows whose prompts and completions have lengths of no common divisor."""
    generator = random.Random(seed)
    rows: Rows = []
    fresh = iter(range(10**9))
    for _ in range(groups):
        prompt = [next(fresh) for _ in range(generator.randint(50, 3000))]
        rows += [prompt + [next(fresh) for _ in range(generator.randint(1, 1500))] for _ in range(generator.randint(1, 12))]
    return rows


CASES: dict[str, Callable[[], Rows]] = {
    "P=8192 G=8 R=1024": lambda: star(8192, 8, 1024),
    "P=4096 G=16 R=1024": lambda: star(4096, 16, 1024),
    "P=2048 G=16 R=4096": lambda: star(2048, 16, 4096),
    "P=32768 G=4 R=512": lambda: star(32768, 4, 512),
    "tree, depth 6, 2 to 4 children": lambda: tree(6, 64_000),
    "64 stars P=512 G=8 R=256": lambda: stars(64, 512, 8, 256),
    "ragged, 8 groups": lambda: ragged(8),
    "one token": lambda: [[5]],
}


@dataclasses.dataclass
class Problem:
    """A forest and its values in bf16; q, k, v and the gradient of the output are token-major [1, H, T, D]."""

    rows: Rows
    forest: Forest
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    @staticmethod
    def make(rows: Rows, dim: int) -> Problem:
        forest = Forest.from_rows(rows)
        generator = torch.Generator("cuda").manual_seed(0)
        values = [
            torch.randn((1, forest.num_tokens, heads, dim), generator=generator, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        ]
        return Problem(rows, forest, *values)

    @property
    def dim(self) -> int:
        return self.q.shape[3]

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    @property
    def pairs(self) -> int:
        """Visible pairs: each token sees the columns of its row up to its own."""
        return int((self.forest.column + 1).sum())

    @property
    def flops(self) -> int:
        """Of forward; backward has 2.5 times as many."""
        return 4 * self.pairs * self.dim * self.q.shape[1]

    def given(self) -> tuple[Any, ...]:
        """Arguments of the semantic op: q, k, v, end, column, and no mask, segments, bias or sinks."""
        return self.q, self.k, self.v, *self.forest.tensors(("end", "column"), "cuda"), None, None, None, None

    def heads(self, kv: int) -> Problem:
        groups = HEADS // KV_HEADS
        q, grad = (x[:, : kv * groups] for x in (self.q, self.grad))
        return dataclasses.replace(self, q=q, k=self.k[:, :kv], v=self.v[:, :kv], grad=grad)

    def exact(self) -> list[Tensor]:
        """o, dq, dk and dv in float64, from blocks of queries."""
        q, k, v, grad = (x.double() for x in (self.q, self.k, self.v, self.grad))
        end, column = self.forest.tensors(("end", "column"), "cuda")
        mask = Mask(end, column, None, None, None, None, None, None)
        out, lse = blocked.forward(q, k, v, mask, None, self.scale)
        return [out, *blocked.backward(grad, q, k, v, mask, None, out, lse, self.scale, False)[:3]]


class Dense:
    """Full rows [B, L, H, D], padded at their end to the longest. The gradient of a shared token is split evenly over its rows."""

    def __init__(self, given: Problem) -> None:
        self.index, count = given.forest.tensors(("index", "count"), "cuda")
        self.real, self.tokens = self.index >= 0, given.forest.num_tokens
        share = (given.grad[0].transpose(0, 1) / count[:, None, None]).to(torch.bfloat16)
        self.q, self.k, self.v = (x[0].transpose(0, 1)[self.index.clamp(min=0)] for x in (given.q, given.k, given.v))
        self.grad = share[self.index.clamp(min=0)] * self.real[..., None, None]

    def packed(self, results: tuple[Tensor, ...]) -> list[Tensor]:
        """o of each token's last row, and the gradients summed over rows in float64, [1, H, T, D], of results [B, L, H, D]."""
        where = self.index[self.real]
        found = []
        for number, value in enumerate(results):
            flat = value[self.real].double()
            total = flat.new_zeros((self.tokens, *flat.shape[1:]))
            total.index_copy_(0, where, flat) if number == 0 else total.index_add_(0, where, flat)
            found.append(total.transpose(0, 1)[None])
        return found
