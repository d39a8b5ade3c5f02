"""Random rows, their values packed and dense, and what log-probabilities, entropies and divergences are on dense rows in float64.

The dense side knows no forest: a row's values are looked up by the tokens it has had so far.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from sp_compile.layout import Forest
from sp_compile.ops.numerics import relative_error

EXACT = 1e-10


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of tokens between left and right padding.

    Attributes:
        ids, keep: [B, L]; padding holds a token id of its own.
        forest: of the kept tokens.
        place: [B, L] number of the distinct prefix that ends at a position, -1 at padding; found with a dictionary.
        packed: [T] number of the prefix of each physical token.
    """

    ids: Tensor
    keep: Tensor
    forest: Forest
    place: Tensor
    packed: Tensor

    @property
    def prefixes(self) -> int:
        return int(self.place.max()) + 1 if self.place.numel() else 0


def make(rows: list[list[int]], left: list[int] | None = None) -> Rows:
    """Rows with so many columns of padding before each."""
    before = left or [0] * len(rows)
    length = max((len(row) + pad for row, pad in zip(rows, before, strict=True)), default=0) + 1
    ids, keep = torch.full((len(rows), length), 9), torch.zeros(len(rows), length, dtype=torch.bool)
    place, known = torch.full((len(rows), length), -1), {}
    for b, (row, pad) in enumerate(zip(rows, before, strict=True)):
        ids[b, pad : pad + len(row)] = torch.tensor(row, dtype=torch.int64)
        keep[b, pad : pad + len(row)] = True
        for n in range(len(row)):
            place[b, pad + n] = known.setdefault((pad, *row[: n + 1]), len(known))
    forest = Forest.from_tokens(ids, keep=keep)
    packed = torch.tensor([int(place[b, column]) for b, column in zip(forest.row, forest.column, strict=True)], dtype=torch.int64)
    assert len(packed) == len(known), "each distinct prefix is one physical token"
    return Rows(ids, keep, forest, place, packed)


@st.composite
def random_rows(draw: st.DrawFn) -> Rows:
    """Few symbols, so that rows share; rows without tokens, prompts of one token, strict prefixes and left padding included."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 6))):
        base = draw(st.sampled_from(rows)) if rows and draw(st.booleans()) else []
        kept = base[: draw(st.integers(0, len(base)))]
        rows.append(kept + draw(st.lists(st.integers(0, 2), max_size=6)))
    return make(rows, draw(st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows))))


STAR = [[5, *([1] * 4), *tail] for tail in ([2, 3, 4], [2, 3], [2], [], [4, 4, 4, 4], [2, 3, 4])]
"""A prompt of five tokens; completions that are equal, strict prefixes of one another, and empty."""


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).requires_grad_()


def expanded(table: Tensor, rows: Rows) -> Tensor:
    """Values [prefixes, H] as dense [B, L, H]; zeros at padding."""
    return torch.cat([table, table.new_zeros(1, table.shape[-1])])[rows.place if len(table) else 0 * rows.place]


def dense_logits(
    values: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    logits = values if weight is None else values @ weight.T
    logits = (logits if bias is None else logits + bias) * scale
    return (logits if softcap is None else torch.tanh(logits / softcap) * softcap) / temperature


def dense_logprobs(logits: Tensor, targets: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of logits [B, C, V], 0 where a position does not count."""
    whole = torch.log_softmax(logits, -1)
    picked = whole.gather(-1, targets.masked_fill(~counted, 0)[..., None])[..., 0]
    entropies = torch.distributions.Categorical(logits=logits, validate_args=False).entropy()
    return torch.where(counted, picked, 0), torch.where(counted, entropies, 0)


def same_results(found: list[Tensor], wanted: list[Tensor], leaves: list[Tensor], tolerance: float = EXACT) -> None:
    """Equal values, and equal gradients of the leaves for random gradients of the results."""
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert relative_error(one, other) <= tolerance
    grads = [normal(*x.shape, seed=40 + n, dtype=x.dtype).detach() for n, x in enumerate(found)]
    got, want = (
        torch.autograd.grad(results, leaves, [g.to(x.dtype) for g, x in zip(grads, results, strict=True)]) for results in (found, wanted)
    )
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert relative_error(one, other) <= tolerance


class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """What is made while it is active, inside of the package's own ops too.

    Attributes:
        largest: elements of the largest storage that any call made.
        products: `(rows, columns)` of every matrix product.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "sp_compile":
            body = torch._library.custom_ops.OPDEFS[func.name()]._init_fn
            with self:  # past the dispatcher, which would come back here
                return body(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for item in torch.utils._pytree.tree_leaves(out):
            if isinstance(item, Tensor) and item.untyped_storage()._cdata not in given:
                self.largest = max(self.largest, item.untyped_storage().nbytes() // item.element_size())
        if func in (torch.ops.aten.mm.default, torch.ops.aten.matmul.default):
            self.products.append(tuple(out.shape))
        return out
