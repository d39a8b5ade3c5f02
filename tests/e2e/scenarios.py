"""Batches of rows with common prefixes, as dictionaries of model inputs.

Every batch knows which positions are real, and how many physical tokens a perfect trie of its rows has.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sp_compile.layout.forest import Forest

VOCABULARY = 97
PAD = 0
IGNORED = -100

Row = tuple[list[int], list[int]]
"""Prompt and completion."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """One call of a model.

    Attributes:
        name: what is special about it.
        inputs: keyword arguments of the model.
        real: bool [B, L], False for padding that the attention mask hides.
        pads: whether padding is computed like any token, because the model's loss reads it.
        leading: whether padding in front of a row's last token is computed, because a recurrence reads it.
    """

    name: str
    inputs: dict[str, Tensor | int]
    real: Tensor
    pads: bool = False
    leading: bool = False

    @property
    def signature(self) -> str:
        return "+".join(self.inputs)

    def tensor(self, name: str) -> Tensor:
        value = self.inputs[name]
        assert isinstance(value, Tensor)
        return value

    @property
    def kept(self) -> Tensor:
        """bool [B, L], the tokens that are computed."""
        if self.leading:
            return self.real.flip(1).cummax(1).values.flip(1)
        return torch.ones_like(self.real) if self.pads else self.real

    @property
    def logical(self) -> int:
        return int(self.kept.sum())

    @functools.cached_property
    def physical(self) -> int:
        """Tokens of the trie of the kept tokens; a token is its column with every key at it."""
        keys = [self.tensor(name) for name in ("input_ids", "attention_mask", "position_ids") if name in self.inputs]
        columns = torch.arange(self.real.shape[1]).expand_as(self.real)
        symbols = torch.stack([columns, *keys], -1).reshape(self.real.numel(), -1)
        _, numbers = np.unique(symbols.numpy(), axis=0, return_inverse=True)
        table = torch.as_tensor(numbers).view(self.real.shape)
        return Forest.from_rows([row[kept].tolist() for row, kept in zip(table, self.kept, strict=True)]).num_tokens


def random_tokens(generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(1, VOCABULARY, (count,), generator=generator).tolist()


def _group(generator: torch.Generator, prompt: int, completions: Sequence[int]) -> list[Row]:
    shared = random_tokens(generator, prompt)
    return [(shared, random_tokens(generator, count)) for count in completions]


def star(seed: int = 0, rows: int = 4, prompt: int = 11, completion: int = 6) -> list[Row]:
    return _group(torch.Generator().manual_seed(seed), prompt, [completion] * rows)


def forest(seed: int = 0) -> list[Row]:
    """Groups of 3, 1 and 4 rows with ragged prompts and completions."""
    generator = torch.Generator().manual_seed(seed)
    return [*_group(generator, 9, [5, 2, 7]), *_group(generator, 4, [6]), *_group(generator, 12, [3, 8, 1, 5])]


def tree(seed: int = 0) -> list[Row]:
    """Three levels of turns; the rows that end after a turn are prefixes of others."""
    generator = torch.Generator().manual_seed(seed)
    root = random_tokens(generator, 6)
    rows: list[Row] = [(root, [])]
    for _ in range(2):
        turn = [*root, *random_tokens(generator, 4)]
        rows.append((turn, []))
        rows += [(turn, random_tokens(generator, count)) for count in (3, 7, 1)]
    rows.append((root, random_tokens(generator, 2)))
    return rows


def duplicates(seed: int = 0) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    first, second = _group(generator, 7, [5, 5])
    return [first, second, first, second, first]


def short(seed: int = 0) -> list[Row]:
    """One-token rows, empty completions, and one row that has both neighbours' beginning."""
    generator = torch.Generator().manual_seed(seed)
    prompt = random_tokens(generator, 5)
    other = random_tokens(generator, 1)
    return [
        (prompt, []),
        (prompt[:1], []),
        (prompt, random_tokens(generator, 1)),
        (prompt, random_tokens(generator, 4)),
        (other, []),
        (prompt, []),
    ]


def different(seed: int = 0) -> list[Row]:
    """Rows that share nothing, not even the first token."""
    generator = torch.Generator().manual_seed(seed)
    return [([number + 1], random_tokens(generator, 8)) for number in range(4)]


def right_padded(rows: Sequence[Row], columns: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """ids, mask and labels [B, L], each row followed by pads."""
    return _placed(rows, [0] * len(rows), max(columns, *(len(p) + len(c) for p, c in rows)))


def both_padded(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts end, and completions begin, in one column."""
    border = max(len(prompt) for prompt, _ in rows)
    starts = [border - len(prompt) for prompt, _ in rows]
    return _placed(rows, starts, border + max(len(completion) for _, completion in rows))


def _placed(rows: Sequence[Row], starts: Sequence[int], columns: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.full((len(rows), columns), PAD)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, IGNORED)
    for number, ((prompt, completion), start) in enumerate(zip(rows, starts, strict=True)):
        border, end = start + len(prompt), start + len(prompt) + len(completion)
        ids[number, start:end] = torch.tensor(prompt + completion)
        mask[number, start:end] = 1
        labels[number, border:end] = torch.tensor(completion, dtype=torch.long)
    return ids, mask, labels


def counted(mask: Tensor) -> Tensor:
    """Positions that count real tokens, as generation code makes them."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def _plain(name: str, ids: Tensor, **others: Tensor | int) -> Batch:
    return Batch(name, {"input_ids": ids, **others}, torch.ones_like(ids, dtype=torch.bool))


def masked(name: str, ids: Tensor, mask: Tensor, **others: Tensor | int) -> Batch:
    return Batch(name, {"input_ids": ids, "attention_mask": mask, **others}, mask.bool())


def _square(seed: int = 3, size: int = 8) -> list[Row]:
    return star(seed, rows=size, prompt=5, completion=size - 5)


_KINDS = {
    "star": star,
    "forest": forest,
    "tree": tree,
    "duplicates": duplicates,
    "short": short,
    "square": _square,
    "different": different,
}


def batches() -> list[Batch]:
    """Every scenario; those of one signature go through one compiled model."""
    found: list[Batch] = []
    for name, make in _KINDS.items():
        ids, mask, labels = right_padded(make())
        found.append(_plain(name, ids))
        found.append(masked(f"{name} right-padded", ids, mask))
        if name != "different":
            found.append(_plain(f"{name} labels", ids, labels=labels))
            found.append(masked(f"{name} right-padded labels", ids, mask, labels=labels))
    for name in ("forest", "tree", "short"):
        ids, mask, labels = both_padded(_KINDS[name]())
        found.append(masked(f"{name} both-padded", ids, mask))
        found.append(masked(f"{name} both-padded labels", ids, mask, labels=labels))
        found.append(masked(f"{name} both-padded counted", ids, mask, position_ids=counted(mask)))
    ids, _, _ = right_padded(star())
    rows, columns = ids.shape
    start = torch.arange(columns).expand(rows, columns)
    found.append(_plain("later start", ids, position_ids=start + 5))
    found.append(_plain("start per row", ids, position_ids=start + torch.tensor([0, 3, 0, 3])[:, None]))
    found.append(_plain("two documents", ids, position_ids=torch.where(start < 8, start, start - 8)))
    found.append(_plain("branches restart", ids, position_ids=torch.where(start < 11, start, start - 7)))
    found.append(_plain("last three", ids, logits_to_keep=3))
    found.append(_plain("last three of a forest", right_padded(forest())[0], logits_to_keep=3))
    return found
