"""Uses of rows that read physical tokens instead: cuts of positions, picked classes, and losses.

Each takes the node, the row view that is its first operand, and the builder. It returns the node's result as a view, or a node that
computes it without the rows, or None where it does not apply.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from sp_compile.analysis.layouts import size_expr
from sp_compile.ops import cross_entropy as _cross_entropy  # noqa: F401  (registers sp_compile::cross_entropy_rows)
from sp_compile.ops import tokens
from sp_compile.ops.token_logprobs import token_logprobs_rows
from sp_compile.passes.row_views import Builder, RowView, same

Use = Callable[[torch.fx.Node, RowView, Builder], RowView | torch.fx.Node | None]

_ALL = slice(None)
_HALF = (torch.bfloat16, torch.float16)
_RESHAPES = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous")


def _tensor(value: Any) -> torch.Tensor | None:
    found = value.meta.get("val") if isinstance(value, torch.fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def _same_sizes(tensor: torch.Tensor, index: torch.fx.Node) -> bool:
    sizes = index.meta["val"].shape
    return tensor.dim() == len(sizes) and all(same(size_expr(a), size_expr(b)) for a, b in zip(tensor.shape, sizes, strict=True))


def _rewound(view: RowView, index: torch.fx.Node, builder: Builder) -> RowView | torch.fx.Node:
    """The view with another index, one dimension each."""
    rank = index.meta["val"].dim()
    if rank == 0:
        return builder.function(torch.ops.sp_compile.unpack.default, builder.tokens_first(view), index)
    leads = tuple((dim, 1) for dim in range(rank))
    return RowView(builder.with_leads(view, rank), index, (leads,), view.detached or not builder.grad)


# -- cuts ----------------------------------------------------------------------------------------------------------------------


def _spelled(items: tuple[Any, ...], rank: int) -> list[tuple[Any, int]] | None:
    """(item, dimensions it consumes) without an ellipsis and down to the last dimension."""

    def consumed(item: Any) -> int:
        tensor = _tensor(item)
        if tensor is not None:
            return tensor.dim() if tensor.dtype in (torch.bool, torch.uint8) else 1
        return 0 if item is None else 1

    if any(isinstance(item, bool | list | tuple) for item in items) or sum(item is Ellipsis for item in items) > 1:
        return None
    left = rank - sum(consumed(item) for item in items if item is not Ellipsis)
    at = next((n for n, item in enumerate(items) if item is Ellipsis), len(items))
    return [(i, consumed(i)) for i in items[:at]] + [(_ALL, 1)] * left + [(i, consumed(i)) for i in items[at + 1 :]]


def cut(node: torch.fx.Node, view: RowView, builder: Builder) -> RowView | torch.fx.Node | None:
    """`rows[:, :-1]`, `rows[mask]`, `rows[b, last]` cut the index; `rows[b, l, target]` picks a class."""
    first, given = node.args
    spelled = _spelled(given if isinstance(given, tuple) else (given,), first.meta["val"].dim())  # type: ignore[union-attr]
    count = len(view.leads[0])
    if spelled is None or not view.leading:
        return None
    of_index: list[Any] = []
    of_values: list[Any] = []
    dim = 0
    for item, size in spelled:
        if dim < count < dim + size:
            return None
        (of_index if dim < count else of_values).append(item)
        dim += size
    if any(_tensor(item) is not None for item in of_values):
        return _picked(of_index, of_values, view, builder)
    if all(item == _ALL for item in of_index if _tensor(item) is None) and not any(_tensor(item) is not None for item in of_index):
        return None
    found = _rewound(view, builder.function(operator.getitem, builder.index(view), tuple(of_index)), builder)
    if any(not isinstance(item, slice) or item != _ALL for item in of_values):
        if isinstance(found, torch.fx.Node):
            return None
        values = builder.function(operator.getitem, found.values, (*[_ALL] * len(found.leads[0]), *of_values))
        return RowView(values, found.index, found.leads)
    return found


def _picked(of_index: list[Any], of_values: list[Any], view: RowView, builder: Builder) -> torch.fx.Node | None:
    """`rows[i, j, target]`: entry `target` of the token that the index holds at (i, j)."""
    chosen = [_tensor(item) for item in (*of_index, *of_values)]
    if len(of_values) != 1 or len(of_index) != len(view.leads[0]) or any(t is None or t.dtype != torch.int64 for t in chosen):
        return None
    if not view.values.meta["val"].is_floating_point():
        return None
    index = builder.function(operator.getitem, builder.index(view), tuple(of_index))
    classes = view.values.meta["val"].shape[-1]
    if not isinstance(classes, int) or not _same_sizes(of_values[0].meta["val"], index):
        return None
    target = builder.function(tokens.wrapped_classes, of_values[0], classes)
    return builder.function(torch.ops.sp_compile.take_tokens.default, builder.tokens_first(view), index, target)


def along_dimension(node: torch.fx.Node, view: RowView, builder: Builder) -> RowView | torch.fx.Node | None:
    """`narrow`, `select` and `index_select` of a token dimension are the same op on the index."""
    if len(node.args) < 2 or not isinstance(node.args[1], int) or not view.leading:
        return None
    dim = node.args[1] % node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    if dim >= len(view.leads[0]):
        return None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return _rewound(view, builder.method(name, builder.index(view), dim, *node.args[2:], **node.kwargs), builder)


# -- picked classes ------------------------------------------------------------------------------------------------------------


def gather(node: torch.fx.Node, view: RowView, builder: Builder) -> torch.fx.Node | None:
    """`gather(rows, -1, target)` reads the entries of physical tokens."""

    def named(input: Any, dim: Any, index: Any, *, sparse_grad: bool = False) -> tuple[Any, Any]:
        return dim, index

    dim, target = named(*node.args, **node.kwargs)  # type: ignore[arg-type]
    values, wanted, count = view.values.meta["val"], _tensor(target), len(view.leads[0])
    if wanted is None or not isinstance(dim, int) or not view.leading or not values.is_floating_point():
        return None
    if values.dim() != count + 1 or dim % values.dim() != count or wanted.dim() != count + 1:
        return None
    index = builder.index(view)
    if not _same_sizes(wanted[..., 0], index):
        return None
    index = builder.method("unsqueeze", index, -1)
    if wanted.shape[-1] != 1:
        index = builder.method("expand_as", index, target)
    return builder.function(torch.ops.sp_compile.take_tokens.default, builder.tokens_first(view), index, target)


# -- losses --------------------------------------------------------------------------------------------------------------------


def cross_entropy(node: torch.fx.Node, view: RowView, builder: Builder) -> torch.fx.Node | None:
    """`cross_entropy(rows, target)` becomes `sp_compile.cross_entropy_rows` and its reduction."""
    loss = _loss_arguments(torch.nn.functional.cross_entropy, node, view, builder)
    if loss is None:
        return None
    values, index = loss["values"], loss["index"]
    options = {"ignore_index": loss["ignore_index"], "label_smoothing": float(loss["label_smoothing"])}
    short = _before_cast(view, builder)
    if short.values.meta["val"].dtype in _HALF and node.meta["val"].dtype == torch.float32:
        # The op computes in float32 as it is, and the cast rounds the gradient as the op does: no copy of [T, V] is needed.
        values, options["dtype"] = builder.tokens_first(short), torch.float32
    pair = builder.function(torch.ops.sp_compile.cross_entropy_rows.default, values, index, loss["target"], loss["weight"], **options)
    return _reduced(pair, loss["reduction"], builder)


def token_logprobs(node: torch.fx.Node, view: RowView, builder: Builder) -> torch.fx.Node | None:
    """`sp_compile.token_logprobs(rows, None, target, ...)` takes the rows' index instead: each token goes through the head once."""
    names = [argument.name for argument in torch.ops.sp_compile.token_logprobs.default._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    target, values, count = _tensor(given["target"]), view.values.meta["val"], len(view.leads[0])
    if given.get("index") is not None or target is None or target.dtype != torch.int64 or not view.leading or values.dim() != count + 1:
        return None
    if any(user.target is not operator.getitem or user.args[1] not in (0, 1) for user in node.users):
        return None
    index = builder.index(view)
    if not _same_sizes(target, index):
        return None
    operands = (index, given["target"], given.get("weight"), given.get("bias"))
    return builder.function(token_logprobs_rows, builder.tokens_first(view), *operands, **{name: given[name] for name in names[5:]})


def _before_cast(view: RowView, builder: Builder) -> RowView:
    """The view of what was cast to float32, if it was; it may have been reshaped since."""
    node, reshapes = view.values, list[torch.fx.Node]()
    while node.op == "call_method" and node.target in _RESHAPES and isinstance(node.args[0], torch.fx.Node):
        reshapes.append(node)
        node = node.args[0]
    source = node.args[0] if node.op == "call_method" and node.target in ("float", "to", "type") else None
    cast, value = _tensor(source), node.meta["val"]
    if cast is None or not isinstance(source, torch.fx.Node) or value.dtype != torch.float32 or cast.device != value.device:
        return view
    builder.passed |= dict.fromkeys((*reshapes, node))
    for one in reversed(reshapes):
        source = builder.method(str(one.target), source, *one.args[1:], **one.kwargs)
    return dataclasses.replace(view, values=source)


def nll_loss(node: torch.fx.Node, view: RowView, builder: Builder) -> torch.fx.Node | None:
    """`nll_loss(rows, target)` picks with `sp_compile.take_tokens`, weighs and reduces."""
    loss = _loss_arguments(torch.nn.functional.nll_loss, node, view, builder)
    if loss is None:
        return None
    index, target, ignored = loss["index"], loss["target"], loss["ignore_index"]
    classes = builder.function(tokens.counted_classes, index, target, ignored)
    picked = builder.function(torch.ops.sp_compile.take_tokens.default, loss["values"], index, classes)
    pair = builder.function(tokens.nll_rows, picked, index, target, loss["weight"], ignored)
    return _reduced(pair, loss["reduction"], builder)


def _loss_arguments(function: Callable[..., Any], node: torch.fx.Node, view: RowView, builder: Builder) -> dict[str, Any] | None:
    bound = inspect.signature(function).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given, values, index = bound.arguments, view.values.meta["val"], builder.index(view)
    target, result = _tensor(given["target"]), node.meta["val"]
    plain = given["size_average"] is None and given["reduce"] is None and given["reduction"] in ("none", "mean", "sum")
    numbers = isinstance(given["ignore_index"], int) and isinstance(given.get("label_smoothing", 0.0), int | float)
    class_second = values.dim() == len(view.leads[0]) + 1 and all(dim != 1 for dim, _ in view.leads[0])
    if target is None or target.dtype != torch.int64 or not (plain and numbers and class_second) or not values.is_floating_point():
        return None
    if not _same_sizes(target, index) or (given["weight"] is not None and _tensor(given["weight"]) is None):
        return None
    first = builder.tokens_first(view)
    # Autocast computes losses in float32.
    given["values"] = first if node.args[0].meta["val"].dtype == result.dtype else builder.method("to", first, result.dtype)  # type: ignore[union-attr]
    given["index"] = index
    return dict(given)


def _reduced(pair: torch.fx.Node, reduction: str, builder: Builder) -> torch.fx.Node:
    loss = builder.function(operator.getitem, pair, 0)
    if reduction == "mean":
        return builder.function(tokens.weighted_mean, loss, builder.function(operator.getitem, pair, 1))
    return builder.method("sum", loss) if reduction == "sum" else loss
