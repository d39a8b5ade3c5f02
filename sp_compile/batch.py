"""From the inputs of one call to its forest: which inputs are keys, and which padding may be dropped."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.fx

from sp_compile.analysis.inputs import GraphInputs
from sp_compile.layout.forest import Forest
from sp_compile.layout.recent import RecentForests
from sp_compile.ops import layout_conversion as _layout_conversion  # noqa: F401  (registers sp_compile::sum_over_ranks)
from sp_compile.ops import tokens
from sp_compile.ops.token_logprobs import token_logprobs_rows
from sp_compile.passes.stage import Context, Source, input_of

recent = RecentForests(4)


@dataclasses.dataclass(frozen=True)
class LossReads:
    """The (row, column) positions that one fused loss reads, as a small graph run on the host.

    `graph` maps the numbers of the captured graph's inputs in `arguments`, preceded by [B, L] position numbers, to (positions, targets).
    """

    graph: torch.fx.GraphModule
    arguments: tuple[int, ...]
    ignore_index: int


@dataclasses.dataclass(frozen=True)
class Padding:
    """How row padding may be dropped: the input whose zeros mark it, the losses whose targets must ignore what is dropped, and whether
    only what stands behind a row's last token may go."""

    mask: int
    losses: tuple[LossReads, ...] = ()
    trailing: bool = False


def find_padding(graph: torch.fx.GraphModule, context: Context) -> Padding | None:
    """Whether the finished graph proves that padded positions are read by nobody, and under which condition.

    Every mixer must hide the keys that one mask input calls padding, and what is unpacked to rows may only reach the caller (where
    dropped positions are zero), or a fused loss that ignores them. Else pads stay ordinary tokens.
    """
    masks = set(context.padding)
    if len(masks) != 1 or None in masks or not all(counted >= masks for counted in context.counted):
        return None
    losses: list[LossReads] = []
    for node in graph.graph.nodes:
        if node.target in (tokens.unpack, torch.ops.sp_compile.unpack.default, torch.ops.sp_compile.take_tokens.default):
            if not all(_only_returned(user) for user in node.users):
                return None
        elif node.target in (torch.ops.sp_compile.cross_entropy_rows.default, token_logprobs_rows):
            reads = _loss_reads(graph, node)
            if reads is None:
                return None
            losses.append(reads)
    (mask,) = masks
    assert mask is not None, "checked above"
    return Padding(mask, tuple(losses), context.trailing)


_SHAPE_ONLY = frozenset(
    {"view", "reshape", "unsqueeze", "squeeze", "contiguous", "transpose", "permute", "flatten", "clone", "to", "float", "detach"}
)


def _only_returned(node: torch.fx.Node) -> bool:
    if node.op == "output":
        return True
    if node.op == "call_function" and node.target in (operator.getitem, torch.ops.sp_compile.sum_over_ranks.default):
        return all(_only_returned(user) for user in node.users)
    return node.op == "call_method" and node.target in _SHAPE_ONLY and all(_only_returned(user) for user in node.users)


def _loss_reads(module: torch.fx.GraphModule, loss: torch.fx.Node) -> LossReads | None:
    """Cuts the index and target of a fused loss out of the graph, if they come from inputs alone."""
    _, index, target, *_ = loss.args
    ignore = loss.kwargs.get("ignore_index", -100)
    needed: set[torch.fx.Node] = set()
    todo = [index, target]
    while todo:
        node = todo.pop()
        if not isinstance(node, torch.fx.Node) or node in needed:
            continue
        needed.add(node)
        todo += node.all_input_nodes
    graph, env = torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    arguments: list[int] = []
    positions = graph.placeholder("positions")
    for node in module.graph.nodes:
        if node not in needed:
            continue
        if node.op != "placeholder":
            env[node] = graph.node_copy(node, lambda n: env[n])
            continue
        given = input_of(node)
        if given.source is Source.FOREST and str(given.key).partition("@")[0] == "index":
            env[node] = positions
        elif given.source is Source.ARGUMENT:
            env[node] = graph.placeholder(node.name)
            arguments.append(int(given.key))
        elif given.source in (Source.ROWS, Source.COLUMNS):
            env[node] = graph.call_method("size", (positions, 0 if given.source is Source.ROWS else 1))
        else:
            return None
    placed = [n for n in graph.nodes if n.op == "placeholder"]
    first = next((n for n in graph.nodes if n.op != "placeholder"), None)
    for node in placed:
        if first is not None:
            first.prepend(node)
    if not isinstance(index, torch.fx.Node) or not isinstance(target, torch.fx.Node) or not isinstance(ignore, int):
        return None
    graph.output((env[index], env[target]))
    graph.lint()
    return LossReads(torch.fx.GraphModule(module, graph, class_name="LossReads"), tuple(arguments), ignore)


def make_forest(inputs: GraphInputs, context: Context, padding: Padding | None, values: Sequence[Any]) -> Forest:
    """The forest of one call.

    Args:
        inputs: how the analysis read the inputs.
        context: names the inputs in which rows must agree.
        padding: what may be dropped.
        values: the inputs of this call.
    """
    keys = [part for number in context.keys for part in _key(inputs, number, values[number])]
    # a key of one value, such as a mask of ones, parts no rows; one key has to say how many there are
    telling = [key for key in keys if not _is_one_value(key)]
    keep = _keep(padding, values)
    ahead = [part for number in context.ahead_keys for part in _key(inputs, number, values[number])]
    if keep is not None and not all(_one_value_where(~keep, key) for key in ahead):
        keep = None  # what stands at padding is read by the tokens before it, and may differ between rows
    return recent.get(telling if any(key.dim() == 2 for key in telling) else keys, keep)


def _one_value_where(dropped: torch.Tensor, key: torch.Tensor) -> bool:
    found = key[dropped] if key.dim() == 2 else key[:0]
    return not found.numel() or bool((found == found[0]).all())


def _is_one_value(key: torch.Tensor) -> bool:
    if key.dim() != 2 or key.numel() == 0 or key.is_floating_point() or not bool((key[0] == key[0, 0]).all()):
        return False
    return bool((key == key[0, 0]).all())


def _key(inputs: GraphInputs, number: int, value: torch.Tensor) -> list[torch.Tensor]:
    """A token input as [B, L] or [B] keys: further dimensions become further keys."""
    layout = inputs.layouts[number]
    assert layout is not None, "a key is a tensor"
    axes = {axis.value: dim for dim, axis in layout.axes}
    value = value.detach().cpu()
    if len(layout.columns_dims) == 2 and layout.columns_dims[0] == axes["L"] - 1:
        pairs = _pair_key(value, axes.get("B"))
        if pairs is not None:
            return [pairs]
    moved = value.permute([*(axes[a] for a in ("B", "L") if a in axes), *(d for d in range(value.dim()) if d not in axes.values())])
    if moved.dim() == len(axes):
        return [moved]
    flat = moved.reshape(*moved.shape[: len(axes)], -1)
    return [flat[..., i] for i in range(flat.shape[-1])]


def _pair_key(value: torch.Tensor, batch: int | None) -> torch.Tensor | None:
    """A mask [B, .., L, L] as one key [B, L] that numbers what the queries of each column see, up to their own; None if they see more.

    What stands above the diagonal is one value in the whole batch, so that rows which agree through a column agree in every pair up to it.
    """
    later = value[..., torch.ones(value.shape[-2:], dtype=torch.bool).triu(1)]
    if value.numel() == 0 or batch is None or bool((later != later.reshape(-1)[:1]).any()):
        return None
    lines = value.movedim((batch, -2), (0, 1)).flatten(2)
    raw = lines.contiguous().view(torch.uint8).flatten(0, 1).numpy()
    _, numbers = np.unique(raw.view(f"V{raw.shape[1]}").ravel(), return_inverse=True)
    return torch.from_numpy(numbers.reshape(lines.shape[:2]).astype(np.int64, copy=False))


def _keep(padding: Padding | None, values: Sequence[Any]) -> torch.Tensor | None:
    if padding is None:
        return None
    mask = values[padding.mask].detach()
    keep: torch.Tensor = (mask.cpu() != 0).contiguous()
    if padding.trailing:
        keep = _closed(keep)
    if bool(keep.all()):
        return None
    for loss in padding.losses:
        # on the inputs' device: the cut out graph may move targets there itself
        positions = _positions(keep.numel(), mask.device).view(keep.shape)
        read, targets = loss.graph(positions, *(values[number].detach() for number in loss.arguments))
        lost = (targets != loss.ignore_index).reshape(-1).cpu() & ~_taken(keep, positions, read).reshape(-1)
        if bool(lost.any()):
            keep.view(-1)[read.reshape(-1).cpu()[lost]] = True
    return _closed(keep) if padding.trailing else keep  # what is read behind a gap reads the gap


def hides(mask: torch.Tensor, forest: Forest) -> torch.Tensor:
    """int64 [1] on the CPU: 0 if a padding mask [B, L] is nonzero at every token of the forest, else 1. Copies the mask to the host."""
    known = mask.shape == forest.index.shape
    return torch.tensor([int(not known or bool((mask.detach().cpu() == 0)[torch.from_numpy(forest.index >= 0)].any()))])


@functools.lru_cache(maxsize=2)
def _positions(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device)


def _taken(keep: torch.Tensor, positions: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """`keep` at the positions read; where these are a view of all positions, the same view."""
    if read.device.type == "cpu" and read.untyped_storage().data_ptr() == positions.untyped_storage().data_ptr():
        return keep.as_strided(read.size(), read.stride(), read.storage_offset())
    return keep.view(-1)[read.cpu()]


def _closed(keep: torch.Tensor) -> torch.Tensor:
    """bool [B, L] with everything in front of a row's last kept column kept."""
    return keep.flip(1).cummax(1).values.flip(1) if keep.shape[1] else keep
