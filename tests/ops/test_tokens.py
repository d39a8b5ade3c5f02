"""Rows to physical tokens and back, for values of pairs."""

from __future__ import annotations

import torch

from sp_compile.layout import Forest
from sp_compile.ops import tokens


def test_pairs_are_those_of_the_later_tokens_row() -> None:
    """Whichever of the two is the query: what queries see may be turned round."""
    rows = [[1, 2, 3, 4], [1, 2, 5], [1, 6, 7, 8], [9]]
    forest = Forest.from_rows(rows)
    row, column, index = forest.tensors(("row", "column", "index"), "cpu")
    batch, length = index.shape
    numbers = torch.arange(batch * length * length).view(batch, 1, length, length)
    # the same for all rows through both tokens, as keys make sure: the smallest row through the later one
    smallest = torch.tensor([[int(row[index[b, c]]) if index[b, c] >= 0 else b for c in range(length)] for b in range(batch)])
    later = torch.maximum(torch.arange(length)[:, None], torch.arange(length))
    values = torch.stack([numbers[smallest[b][later], 0, torch.arange(length)[:, None], torch.arange(length)] for b in range(batch)])[
        :, None
    ]
    found = tokens.pack(values, row, column, index, "B _ L L")
    assert found.shape == (1, 1, forest.num_tokens, forest.num_tokens)
    for b, tokens_of_row in enumerate(rows):
        for q in range(len(tokens_of_row)):
            for k in range(len(tokens_of_row)):
                assert found[0, 0, index[b, q], index[b, k]] == values[b, 0, q, k]
    shared = torch.arange(length * length).view(length, length)
    assert torch.equal(tokens.pack(shared, row, column, index, "L L"), shared[column[:, None], column])
