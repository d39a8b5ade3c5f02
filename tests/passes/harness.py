"""Runs the whole backend on small models and keeps the graph after every pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn

from sp_compile.backend import shared_prefix
from sp_compile.debug import dump
from sp_compile.passes.stage import Context


class Tiny(nn.Module):
    """Embedding, one causal attention layer and a linear head; `use(logits, *inputs)` is what the model returns."""

    def __init__(self, use: Callable[..., Any], words: int = 50, size: int = 8, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(words, size, dtype=dtype)
        self.q, self.k, self.v = (nn.Linear(size, size, dtype=dtype) for _ in range(3))
        self.head = nn.Linear(size, words, dtype=dtype)
        self.use = use

    def hidden(self, ids: Tensor) -> Tensor:
        """[B, L, size]"""
        x = self.words(ids)
        rows, columns, size = x.shape
        q, k, v = (layer(x).view(rows, columns, 2, size // 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + mixed.transpose(1, 2).reshape(rows, columns, size)

    def forward(self, ids: Tensor, *more: Tensor) -> Any:
        logits = self.head(self.hidden(ids))
        return self.use(logits, ids, *more)


class TinyHidden(Tiny):
    """Leaves the head to `use(hidden, head, *inputs)`."""

    def forward(self, ids: Tensor, *more: Tensor) -> Any:
        hidden = self.hidden(ids)
        return self.use(hidden, self.head, ids, *more)


def batch(rows: int = 4, columns: int = 14, prefix: int = 6, words: int = 50, seed: int = 0) -> Tensor:
    """Token ids [rows, columns] that agree in the first `prefix` columns."""
    ids = torch.randint(0, words, (rows, columns), generator=torch.Generator().manual_seed(seed))
    ids[:, :prefix] = ids[0, :prefix]
    return ids


@dataclasses.dataclass
class Rewrite:
    """What the compiler did to one captured graph.

    Attributes:
        dense: the captured graph, with the attention markers of capture.
        context: what the passes found.
        before, after: per pass, the graph it got and the graph it made.
    """

    dense: torch.fx.GraphModule
    context: Context
    before: dict[str, torch.fx.Graph] = dataclasses.field(default_factory=dict)
    after: dict[str, torch.fx.Graph] = dataclasses.field(default_factory=dict)


def run(model: nn.Module, *inputs: Any, **options: Any) -> tuple[Any, list[Rewrite]]:
    """One compiled call: its result and the rewrites that it took.

    With `strict` and no minimum of sharing, nothing but the packed graph can have run.
    """
    found: list[Rewrite] = []

    def watcher(folder: object, module: torch.fx.GraphModule, context: Context) -> Any:
        one = Rewrite(module, context)
        found.append(one)

        def watch(number: int, name: str, before: torch.fx.Graph, after: torch.fx.Graph) -> None:
            one.before[name], one.after[name] = before, after

        return watch

    torch._dynamo.reset()
    settings = {"inner": "eager", "strict": True, "min_sharing": 1.0, **options}
    with mock.patch.object(dump, "watcher", watcher):
        result = torch.compile(model, backend=shared_prefix, options=settings)(*inputs)  # type: ignore[call-overload]
    assert found, "the model was not rewritten"
    return result, found


def rewrite(model: nn.Module, *inputs: Any, **options: Any) -> Rewrite:
    """The one rewrite of a model without graph breaks."""
    _, found = run(model, *inputs, **options)
    assert len(found) == 1, f"expected one graph, got {len(found)}"
    return found[0]


def targets(graph: torch.fx.Graph) -> list[str]:
    """The short names of all calls, in order."""
    return [_name(node) for node in graph.nodes if node.op in ("call_function", "call_method")]


def show(graph: torch.fx.Graph, since: str) -> str:
    """The calls from the node called `since` on, one a line."""
    nodes = list(graph.nodes)
    start = next(number for number, node in enumerate(nodes) if node.name == since)
    return "\n".join(_line(node) for node in nodes[start:]) + "\n"


def _name(node: torch.fx.Node) -> str:
    target: Any = node.target
    if isinstance(target, str):
        return target
    return str(target).removesuffix(".default") if isinstance(target, torch._ops.OpOverload) else str(target.__name__)


def _line(node: torch.fx.Node) -> str:
    if node.op == "output":
        return f"return {_text(node.args[0])}"
    arguments = [_text(value) for value in node.args] + [f"{name}={_text(value)}" for name, value in node.kwargs.items()]
    return f"{node.name} = {_name(node)}({', '.join(arguments)})"


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    if isinstance(value, slice):
        parts = (value.start, value.stop) if value.step is None else (value.start, value.stop, value.step)
        return ":".join("" if part is None else _text(part) for part in parts)
    return value.name if isinstance(value, torch.fx.Node) else repr(value)


def leaves(result: Any) -> list[Tensor]:
    """The tensors of a result; of a Hugging Face output, its loss or else its logits."""
    if hasattr(result, "logits"):
        return [result.loss if getattr(result, "loss", None) is not None else result.logits]
    return [result] if isinstance(result, Tensor) else [leaf for item in result for leaf in leaves(item)]


def gradients(model: nn.Module, result: Any) -> dict[str, Tensor]:
    """Of a sum in which every element of every float result has a weight of its own; then clears them."""
    total = sum((_weighed(leaf) for leaf in leaves(result) if leaf.requires_grad), torch.zeros(()))
    total.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def _weighed(leaf: Tensor) -> Tensor:
    steps = torch.arange(leaf.numel(), dtype=leaf.dtype).reshape(leaf.shape)
    return (leaf * (1 + 0.1 * torch.sin(steps))).sum()


def compare(model: nn.Module, *inputs: Any, **options: Any) -> tuple[float, Rewrite]:
    """The largest relative Frobenius error of any result or gradient against the dense model's, and the one rewrite it took."""
    found, made = errors(model, *inputs, **options)
    return max(found.values()), made


def errors(model: nn.Module, *inputs: Any, **options: Any) -> tuple[dict[str, float], Rewrite]:
    """Relative Frobenius errors of every result ("0", "1", ...) and of every gradient against the dense model's, and the rewrite."""
    wanted = model(*inputs)
    wanted_gradients = gradients(model, wanted)
    got, found = run(model, *inputs, **options)
    assert len(found) == 1, f"expected one graph, got {len(found)}"
    got_gradients = gradients(model, got)
    assert wanted_gradients.keys() == got_gradients.keys()
    pairs = {str(n): pair for n, pair in enumerate(zip(leaves(wanted), leaves(got), strict=True))}
    pairs |= {name: (wanted_gradients[name], got_gradients[name]) for name in wanted_gradients}
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs.values())
    assert all(bool((a.isnan() == b.isnan()).all()) for a, b in pairs.values())
    return {name: _error(*(x.detach().nan_to_num().double() for x in pair)) for name, pair in pairs.items()}, found[0]


def _error(wanted: Tensor, got: Tensor) -> float:
    """Tiny gradients are noise (a key bias has none), so the norm counts as at least 1e-3."""
    return float((wanted - got).norm() / wanted.norm().clamp(min=1e-3))
