"""The inputs of a graph whose caller holds packed values: one row of T physical tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.weak import WeakTensorKeyDictionary

from sp_compile.analysis import inputs as dense
from sp_compile.analysis.facts import Constant, Fact, MaskSpec, Nonzero, Triangle
from sp_compile.analysis.inputs import GraphInputs, Stamp
from sp_compile.analysis.layouts import TOKENS, UNIFORM, Layout, Symbols, size_expr
from sp_compile.capture.graphs import example_of, is_module_state, is_symbolic, placeholders, token_dims
from sp_compile.errors import CannotShare
from sp_compile.ops.blocking import is_blocking


def read_packed_inputs(graph: torch.fx.Graph, values: Sequence[Any], tokens: int) -> GraphInputs:
    """Give every graph input a fake value in which T tokens are the symbol L of a batch without rows, and its layout.

    Args:
        graph: the captured graph.
        values: the real inputs of the first call, in order.
        tokens: T of that call.

    Raises:
        CannotShare: T is a constant of the graph, an input has no place for tokens, or a (query, key) matrix comes from outside.
    """
    nodes = placeholders(graph)
    env = ShapeEnv(duck_shape=False, specialize_zero_one=True)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    mode.cache_enabled = False
    length = dense.make_symbol(env, "L", max(tokens, 2))
    symbols = Symbols(sympy.Symbol("sp_no_rows", integer=True, positive=True), length.node.expr, packed=True)
    made: dict[Any, torch.SymInt] = {}
    for number, node in enumerate(nodes):
        example = example_of(node)
        if isinstance(example, torch.Tensor) and not is_module_state(node):
            for dim in token_dims([int(s) for s in values[number].shape], tokens):
                if is_symbolic(example.shape[dim]):
                    made[size_expr(example.shape[dim])] = length
    if not made:
        raise CannotShare(
            f"no input of this graph has a dimension of {tokens} tokens that may change from call to call",
            advice="Pass values [1, T, ...] for the T tokens of the forest, and leave torch.compile's dynamic argument at its default.",
        )

    def size_of(size: int | torch.SymInt, real: int) -> int | torch.SymInt:
        if not is_symbolic(size):
            return int(size)
        expr = size_expr(size)
        if expr not in made:
            made[expr] = dense.make_symbol(env, str(expr), max(real, 2))
        return made[expr]

    fakes: list[Any] = []
    layouts: list[Layout | None] = []
    read: dict[int, Stamp] = {}
    for node, value in zip(nodes, values, strict=True):
        example = example_of(node)
        if isinstance(example, torch.Tensor):
            sizes = [size_of(s, int(r)) for s, r in zip(example.shape, value.shape, strict=True)]
            fake = dense.make_fake(mode, example, value, sizes)
            layout = _layout(node, fake, value, symbols)
            if isinstance(layout.fact, Triangle | Constant):
                read[len(fakes)] = dense.stamp_of(value)
            fakes.append(fake)
            layouts.append(layout)
            continue
        layouts.append(None)
        if isinstance(example, torch.SymInt):
            fakes.append(made[size_expr(example)] if size_expr(example) in made else dense.other_size(env, made, example, value))
        else:
            fakes.append(value if isinstance(example, torch.SymFloat) else example)
    return GraphInputs(mode, symbols, fakes, layouts, token_sizes=None, constants_read=read)


def _layout(node: torch.fx.Node, fake: torch.Tensor, value: torch.Tensor, symbols: Symbols) -> Layout:
    dims = tuple(symbols.dim(size) for size in fake.shape)
    layout = Layout(dims, UNIFORM, entry=not value.requires_grad)
    if not layout.has_tokens:
        return layout.with_(fact=dense.read_constant(node, value))
    if len(layout.columns_dims) == 2 and not value.requires_grad:
        return layout.with_(reach=TOKENS, entry=False, fact=MaskSpec(window=read_window(node.name, value)))
    if len(layout.columns_dims) != 1 or layout.has_spans:
        raise CannotShare(
            f"input {node.name} {list(value.shape)} has {len(layout.columns_dims)} dimensions of the size of the tokens", node=node.name
        )
    mask = len(dims) == 2 and dims[0] == () and not value.requires_grad
    fact: Fact | None = Nonzero(node.name) if mask else None
    at = layout.columns_dims[0]
    in_front = () in dims[:at] and () not in dims[at:]
    return layout.with_(reach=TOKENS, entry=False, fact=fact, rows_behind=not in_front)


_seen: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Windows of masks that were looked at, with the version of their memory: every layer of a model is given the same one."""


def read_window(name: str, mask: torch.Tensor) -> int | None:
    """The window of a mask [1, 1, T, T] that was made outside of the graph, None if every earlier token is visible.

    Such a mask is in the packed order, where whoever made it saw one row. "Every earlier token" and "the last so many" say the same of
    the rows; a window that is wider than all tokens together is wider than any row.

    Raises:
        CannotShare: it is another one, such as chunks, or the borders of documents that were read off the positions.
    """
    stamp = (-1 if mask.is_inference() else mask._version, mask.data_ptr())
    known = _seen.get(mask)
    if known is not None and known[0] == stamp and stamp[0] >= 0:
        return known[1]  # type: ignore[no-any-return]
    window = _window_of(name, mask.detach())
    _seen[mask] = (stamp, window)
    return window


def _window_of(name: str, mask: torch.Tensor) -> int | None:
    size = mask.shape[-1]
    table = mask.reshape(-1, size, size)
    visible = table if table.dtype == torch.bool else table == 0
    band = torch.ones(size, size, dtype=torch.bool, device=mask.device).tril()
    window = int(visible[0, :, 0].sum())
    band = band if window == size else band.triu(1 - window)
    right = bool((visible == band).all())
    if right and table.dtype != torch.bool and not bool(band.all()):
        right = is_blocking(float(table.masked_fill(band, -math.inf).max()))
    if not right:
        raise CannotShare(
            f"input {name} {list(mask.shape)} is an attention mask over packed tokens other than a causal one, with or without a window; "
            "in the packed order it says nothing about rows",
            node=name,
            advice="Pass a [1, T] attention mask of ones with the packed ids, or compile the model as a whole, so that the graph "
            "holds what makes the mask.",
        )
    return None if window == size else window
