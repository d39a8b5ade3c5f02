"""Blocks of the scores that a head gives to tokens, and the way back: what ops over a vocabulary share.

A *head* turns values [T, H] and a weight [V, H] into scores, or takes values [T, V] as logits. In this order,

    x = values @ weight.T + bias        z = softcap * tanh(scale * x / softcap) / temperature

without tanh where there is no softcap. A block is some tokens by some classes, in float32 (float64 for float64); products of 16-bit
values are accumulated and kept in float32. Nothing is made that grows with tokens times classes, except the gradient of logits.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.numerics import accumulate_dtype
from sp_compile.ops.rows import sum_by_key

# Elements of a block: on a CPU 1 MiB of float32, which stays in cache between the steps of a block; elsewhere 128 MiB, since every step
# of a block is a launch.
_BLOCK_ELEMENTS = {"cpu": 1 << 18}
_LARGE_BLOCK = 1 << 25
_BLOCK_TOKENS = {"cpu": 256}
_LARGE_BLOCK_TOKENS = 2048

OPTIONS = "float scale, float? softcap, float temperature"


def check_values(values: Tensor, weight: Tensor | None, bias: Tensor | None, name: str) -> None:
    """Raises InvalidInput unless the tensors fit together: values [T, H], weight [V, H], bias [V], of one floating dtype."""
    shapes = ", ".join("None" if x is None else f"{x.dtype} {list(x.shape)}" for x in (values, weight, bias))
    if values.dim() != 2 or not values.is_floating_point() or (weight is None and bias is not None):
        raise InvalidInput(f"{name}: expected float values [T, H] with weight [V, H] and maybe bias [V], or logits [T, V]; got {shapes}")
    if weight is not None and (weight.dim() != 2 or weight.shape[1] != values.shape[1] or weight.dtype != values.dtype):
        raise InvalidInput(f"{name}: expected weight [V, {values.shape[1]}] of {values.dtype}; got {shapes}")
    if weight is not None and bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != values.dtype):
        raise InvalidInput(f"{name}: expected bias [{weight.shape[0]}] of {values.dtype}; got {shapes}")


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a @ b` of tensors of one dtype, accumulated and returned in the accumulation dtype."""
    if a.dtype == dtype:
        return a @ b
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


@dataclasses.dataclass(frozen=True)
class Head:
    """A head on the tokens that are used, see the module's docstring.

    Attributes:
        values: [T, H] or logits [T, V].
        tokens: int64 [U], the tokens that are used, each once, ascending.
        weight, bias: [V, H] and [V], or None.
        scale, softcap, temperature: as above.
    """

    values: Tensor
    tokens: Tensor
    weight: Tensor | None
    bias: Tensor | None
    scale: float
    softcap: float | None
    temperature: float

    @property
    def dtype(self) -> torch.dtype:
        """Of scores, sums and results."""
        return accumulate_dtype(self.values.dtype)

    @property
    def classes(self) -> int:
        """V."""
        return self.values.shape[1] if self.weight is None else self.weight.shape[0]

    def hidden(self) -> Tensor | None:
        """[U, H] values of the used tokens; None for logits, which are read block by block."""
        return None if self.weight is None else self.values.index_select(0, self.tokens)

    def scores(self, hidden: Tensor | None, rows: slice, columns: slice) -> Tensor:
        """z of a block: rows of the used tokens, columns of the vocabulary. The result is the caller's own."""
        if self.weight is None:
            z = self.values[:, columns].index_select(0, self.tokens[rows]).to(self.dtype)
        else:
            assert hidden is not None, "values of the used tokens are made once"
            z = product(hidden[rows], self.weight[columns].mT, self.dtype)
            if self.bias is not None:
                z += self.bias[columns]
        if self.scale != 1:
            z *= self.scale
        if self.softcap is not None:
            z = z.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.temperature != 1:
            z /= self.temperature
        return z

    def times_slope(self, grad: Tensor, z: Tensor) -> Tensor:
        """The gradient of x from that of z, in place; z is used up."""
        if self.softcap is not None:
            grad *= z.mul_(self.temperature / self.softcap).square_().neg_().add_(1)
        factor = self.scale / self.temperature
        return grad if factor == 1 else grad.mul_(factor)


@dataclasses.dataclass
class Gradients:
    """Sums of the gradients of a head, block by block: classes outside, tokens inside, so that the weight's sums are small.

    Attributes:
        head: whose.
        values: [T, H] or [T, V], as wanted by the head's values; empty if nobody wants it.
        weight, bias: likewise.
    """

    head: Head
    values: Tensor
    weight: Tensor
    bias: Tensor
    _hidden: Tensor | None = None
    _sums: Tensor | None = None
    _weight_block: Tensor | None = None
    _bias_block: Tensor | None = None

    @staticmethod
    def of(head: Head, wanted: tuple[bool, bool, bool], hidden: Tensor | None) -> Gradients:
        """Zeros for what is wanted of (values, weight, bias), empty tensors for the rest."""
        given = (head.values, head.weight, head.bias)
        made = [torch.zeros_like(x, memory_format=torch.contiguous_format) if want and x is not None else head.values.new_empty(0)
                for x, want in zip(given, wanted, strict=True)]  # fmt: skip
        sums = torch.zeros_like(hidden, dtype=head.dtype) if hidden is not None and made[0].dim() == 2 else None
        return Gradients(head, made[0], made[1], made[2], hidden, sums)

    def add(self, grad: Tensor, rows: slice, columns: slice) -> None:
        """One block's gradient of x."""
        head = self.head
        if head.weight is None:
            if self.values.dim() == 2:
                self.values[:, columns].index_copy_(0, head.tokens[rows], grad.to(self.values.dtype))
            return
        assert self._hidden is not None, "given at the start"
        if self.bias.dim() == 1 and self.bias.numel():
            self._bias_block = _plus(self._bias_block, grad.sum(0))
        # On CUDA products of two dtypes do not exist; the dense run rounds this gradient to 16 bits as well.
        grad = grad.to(head.values.dtype) if grad.device.type == "cuda" else grad
        if self._sums is not None:
            self._sums[rows] += product(grad, head.weight[columns].to(grad.dtype), head.dtype)
        if self.weight.dim() == 2:
            self._weight_block = _plus(self._weight_block, product(grad.mT, self._hidden[rows].to(grad.dtype), head.dtype))

    def close(self, columns: slice) -> None:
        """All tokens of these classes have been added."""
        if self._weight_block is not None:
            self.weight[columns] = self._weight_block
        if self._bias_block is not None:
            self.bias[columns] = self._bias_block
        self._weight_block = self._bias_block = None

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients, each rounded once."""
        if self._sums is not None:
            self.values.index_copy_(0, self.head.tokens, self._sums.to(self.values.dtype))
        return self.values, self.weight, self.bias


def _plus(total: Tensor | None, term: Tensor) -> Tensor:
    return term if total is None else total.add_(term)


def spans(tokens: int, classes: int, chunk_tokens: int, chunk_classes: int, device: torch.device) -> tuple[list[slice], list[slice]]:
    """Cuts of the used tokens and of the vocabulary; a size of 0 is chosen here."""
    rows = chunk_tokens or min(max(tokens, 1), _BLOCK_TOKENS.get(device.type, _LARGE_BLOCK_TOKENS))
    columns = chunk_classes or max(1, _BLOCK_ELEMENTS.get(device.type, _LARGE_BLOCK) // rows)
    return list(_cut(tokens, rows)), list(_cut(classes, columns))


def _cut(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


@dataclasses.dataclass(frozen=True)
class Positions:
    """Which (token, class) pairs positions ask for, each pair once.

    Attributes:
        kept: int64 [K], flat positions that count.
        pair: int64 [K], the pair of each.
        tokens: int64 [U], tokens in use, ascending.
        token: int64 [P], place in `tokens` of each pair; ascending.
        target: int64 [P], class of each pair.
    """

    kept: Tensor
    pair: Tensor
    tokens: Tensor
    token: Tensor
    target: Tensor

    @staticmethod
    def of(index: Tensor, target: Tensor, ignore_index: int, classes: int) -> Positions:
        """From physical tokens and classes of all positions, of one shape; a position counts unless index is -1 or target is ignored."""
        flat, wanted = index.flatten(), target.flatten()
        kept = ((flat >= 0) & (wanted != ignore_index)).nonzero()[:, 0]
        keys, pair = torch.unique(flat[kept] * max(classes, 1) + wanted[kept], return_inverse=True)
        tokens, token = torch.unique(keys // max(classes, 1), return_inverse=True)
        return Positions(kept, pair, tokens, token, keys % max(classes, 1))

    def per_pair(self, grad: Tensor) -> Tensor:
        """[P]: sums over the positions of each pair of a value per position, in the order of positions."""
        return sum_by_key(grad.flatten()[self.kept], self.pair, len(self.target))

    def per_token(self, pairs: Tensor) -> Tensor:
        """[U]: sums over the pairs of each token."""
        return sum_by_key(pairs, self.token, len(self.tokens))

    def within(self, rows: list[slice]) -> list[slice]:
        """The pairs of each span of used tokens."""
        borders = torch.tensor([*(span.start for span in rows), len(self.tokens)], device=self.token.device)
        found = torch.searchsorted(self.token, borders).tolist()
        return [slice(a, b) for a, b in itertools.pairwise(found)]


def local(positions: Positions, pairs: slice, rows: slice, columns: slice) -> tuple[Tensor, Tensor, Tensor]:
    """`(row, column, inside)` of pairs in a block; where a pair lies outside of the columns, some column inside."""
    column = positions.target[pairs] - columns.start
    inside = (column >= 0) & (column < columns.stop - columns.start)
    return positions.token[pairs] - rows.start, column.clamp(0, columns.stop - columns.start - 1), inside


@dataclasses.dataclass
class Softmax:
    """Running softmax over blocks of classes.

    Attributes:
        top: [n] largest score so far.
        total: [n] sum of exp(z - base), where base is top.
        spread: [n] sum of exp(z - base) * (z - base), or None if nobody asks.
    """

    top: Tensor
    total: Tensor
    spread: Tensor | None

    @staticmethod
    def of(count: int, like: Tensor, dtype: torch.dtype, spread: bool) -> Softmax:
        zeros = like.new_zeros(count, dtype=dtype)
        return Softmax(torch.full_like(zeros, -torch.inf), zeros, torch.zeros_like(zeros) if spread else None)

    def add(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Takes in a block; returns exp(z - base) and z - base, the latter in the memory of z.

        A score of -inf has no share, whatever stands beside it.
        """
        before, self.top = self.top, torch.maximum(self.top, z.amax(-1))
        left = (before - self.base).exp()
        old = self.total * left
        distance = z.sub_(self.base[:, None])
        share = distance.exp()
        if self.spread is not None:
            self.spread = left * self.spread + masked_product(old, before - self.base) + masked_product(share, distance).sum(-1)
        self.total = old + share.sum(-1)
        return share, distance

    @property
    def base(self) -> Tensor:
        """`top`, or 0 while every score so far is -inf, so that exp(z - base) is then 0 and not NaN."""
        return self.top.masked_fill(self.top == -torch.inf, 0)

    @property
    def lse(self) -> Tensor:
        """[n] logarithm of the sum of exp(z)."""
        return self.top + self.total.log()


def masked_product(weight: Tensor, value: Tensor) -> Tensor:
    """`weight * value`, 0 where the weight is 0 even if the value is infinite."""
    return (weight * value).masked_fill_(weight == 0, 0)
