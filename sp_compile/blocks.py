"""Block tables of flex_attention: whether they say the same as the mask function they came with.

A BlockMask lists the blocks of keys that each block of queries looks at. `create_block_mask` makes the tables from the function, and then
nothing has to be done; but they may be put together by hand, and only the function is carried to the packed graph.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from sp_compile.analysis.refusals import source_line
from sp_compile.capture.graphs import placeholders
from sp_compile.capture.torch_flex import BLOCKS, Blocks
from sp_compile.errors import CannotShare
from sp_compile.hidden import cut_out
from sp_compile.passes.stage import Context


@dataclasses.dataclass
class BlockTables:
    """Compares the tables of one BlockMask with its function, in every call that brings new ones.

    Attributes:
        graph: computes the mask [B|1, H|1, L, L] from inputs of the captured graph.
        arguments: their numbers.
        tables: input numbers of counts, columns, counts of full blocks and their columns, None for those that are absent.
        sizes: rows and columns of a block, as numbers or as (input number,).
        node: the mask, for the message.
    """

    graph: torch.fx.GraphModule
    arguments: tuple[int, ...]
    tables: tuple[int | None, ...]
    sizes: tuple[int | tuple[int], ...]
    node: torch.fx.Node
    _seen: list[tuple[weakref.ref[torch.Tensor], int]] = dataclasses.field(default_factory=list)

    def why_not(self, values: Sequence[Any], kept: torch.Tensor | None = None) -> CannotShare | None:
        """Why a call with these inputs cannot be shared, None if tables and function agree."""
        read = [values[n] for n in (*self.arguments, *self.tables) if n is not None]
        tensors = [(value, -1 if value.is_inference() else value._version) for value in read if isinstance(value, torch.Tensor)]
        if len(tensors) == len(self._seen) and all(
            ref() is value and then == now >= 0 for (ref, then), (value, now) in zip(self._seen, tensors, strict=True)
        ):
            return None
        with torch.no_grad():
            agree = self._agree(values)
        if agree:
            self._seen = [(weakref.ref(value), version) for value, version in tensors]
            return None
        return CannotShare(
            "the block tables of a BlockMask leave out what its mask function shows, or show what it hides",
            node=self.node.name,
            source=source_line(self.node),
            advice="Make it with create_block_mask, for the sizes of this batch.",
        )

    def _agree(self, values: Sequence[Any]) -> bool:
        mask: torch.Tensor = self.graph(*(values[n] for n in self.arguments))
        rows, columns = (size if isinstance(size, int) else int(values[size[0]]) for size in self.sizes)
        given: list[Any] = [None if n is None else values[n] for n in self.tables]
        counts, places, full_counts, full_places = given
        applied = _table(counts, places)
        full = torch.zeros_like(applied) if full_counts is None else _table(full_counts, full_places)
        high, wide = applied.shape[-2] * rows - mask.shape[-2], applied.shape[-1] * columns - mask.shape[-1]
        if high < 0 or wide < 0:
            return False
        some = _blocks(mask, high, wide, rows, columns, False).any(-1).any(-2)
        every = _blocks(mask, high, wide, rows, columns, True).all(-1).all(-2)
        return not bool((some & ~(applied | full)).any()) and not bool((full & ~every).any())


def _table(counts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """bool [.., query blocks, key blocks] of the blocks listed."""
    listed = torch.arange(places.shape[-1], device=places.device) < counts[..., None]
    found = torch.zeros(*places.shape[:-1], places.shape[-1] + 1, dtype=torch.bool, device=places.device)
    table: torch.Tensor = found.scatter(-1, places.long().masked_fill(~listed, places.shape[-1]), True)[..., :-1]
    return table


def _blocks(mask: torch.Tensor, high: int, wide: int, rows: int, columns: int, fill: bool) -> torch.Tensor:
    """[.., query blocks, rows, key blocks, columns], of which the rows and columns of each block are reduced."""
    padded = torch.nn.functional.pad(mask, (0, wide, 0, high), value=fill)
    found: torch.Tensor = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    return found


def find_block_tables(context: Context, module: torch.fx.GraphModule) -> list[BlockTables]:
    """The BlockMasks whose functions an analysed graph relies on.

    Raises:
        CannotShare: a mask function reads activations, so that it is known too late.
    """
    analysis = context.analysis
    numbers = {node: number for number, node in enumerate(placeholders(analysis.graph))}
    by_name = {node.name: number for node, number in numbers.items()}
    found: list[BlockTables] = []
    for node in analysis.graph.nodes:
        blocks = node.meta.get(BLOCKS)
        if not isinstance(blocks, Blocks):
            continue
        if not all(layout.entry for layout in analysis.nodes[node].tensors):
            raise CannotShare("the mask function of a BlockMask reads activations", node=node.name, source=source_line(node))
        graph, arguments = cut_out(node, numbers)
        names = (blocks.counts, blocks.columns, blocks.full_counts, blocks.full_columns)
        tables = tuple(None if name is None else by_name[name] for name in names)
        sizes = tuple(size if isinstance(size, int) else (by_name[size],) for size in blocks.sizes)
        found.append(BlockTables(torch.fx.GraphModule(module, graph, class_name="BlockMask"), arguments, tables, sizes, node))
    return found
