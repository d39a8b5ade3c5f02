"""Which values of a graph are of a rank's tokens, and which are the same on all ranks of a context parallel group."""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
from torch.utils._pytree import tree_leaves

from sp_compile.analysis.interpret import NodeInfo
from sp_compile.analysis.layouts import Kind
from sp_compile.analysis.refusals import source_line
from sp_compile.errors import LayoutNotAccepted
from sp_compile.passes.stage import Context, origin_of, set_origin


class State(enum.Enum):
    """Where a value lies."""

    TOKENS = "tokens"  # of the rank's own tokens, another one on each rank
    INDEX = "index"  # places of the rank's own tokens in rows, -1 where another rank has the token
    SAME = "same"  # equal on all ranks


class Gradient(enum.Enum):
    """What a rank gets of the gradient of a value that is the same on all ranks, see `ops/rank_values.py`."""

    NONE = "none"
    PART = "part"
    WHOLE = "whole"
    UNKNOWN = "unknown"


class Tells:
    """What is known about the nodes of a graph so far, on top of what the analysis found about the dense graph."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.by_name = {node.name: info for node, info in context.analysis.nodes.items()}
        self.states: dict[torch.fx.Node, tuple[State, Gradient]] = {}

    def tell(self, node: torch.fx.Node, state: State, gradient: Gradient = Gradient.NONE) -> None:
        self.states[node] = (state, gradient)

    def state(self, value: Any) -> State:
        found = self.states.get(value) if isinstance(value, torch.fx.Node) else None
        return State.SAME if found is None else found[0]

    def gradient(self, value: Any) -> Gradient:
        found = self.states.get(value) if isinstance(value, torch.fx.Node) else None
        return Gradient.NONE if found is None else found[1]

    def info(self, node: torch.fx.Node) -> NodeInfo | None:
        """What the analysis found about the dense node that a node computes."""
        origin = origin_of(node)
        return self.by_name.get(origin.dense) if origin is not None else None

    @staticmethod
    def value(node: Any) -> torch.Tensor | None:
        found = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        return found if isinstance(found, torch.Tensor) else None

    @staticmethod
    def made(node: torch.fx.Node) -> Iterator[torch.Tensor]:
        """The tensors of a node's result."""
        return (value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor))

    def is_tokens(self, size: Any) -> bool:
        """Whether a size depends on the number of tokens: T of some forest, or how many of them the data choose."""
        if not isinstance(size, torch.SymInt):
            return False
        shapes = self.context.shapes
        known = {symbol.node.expr: name for name, symbol in shapes.symbols.items()}
        for symbol in size.node.expr.free_symbols:
            name = known.get(symbol)
            if (name is not None and (name == "T" or name.startswith("T@"))) or shapes.env.is_unbacked_symint(symbol):
                return True
        return False

    def makes_tokens(self, node: torch.fx.Node, local: bool) -> bool:
        """Whether a node's result is of a rank's tokens.

        Args:
            local: whether it reads any that are.
        """
        made = list(self.made(node))
        info, origin = self.info(node), origin_of(node)
        layouts = info.tensors if info is not None and origin is not None and origin.packed else []
        if any(layout.has_tokens or layout.reach.kind is Kind.PLACES for layout in layouts):
            return True
        sized = any(self.is_tokens(size) for value in made for size in value.shape)
        return (sized and (local or self._backed(made))) or (local and not made)

    def _backed(self, made: list[torch.Tensor]) -> bool:
        """Whether a size is T itself, so that what is made without tokens is one of them, such as zeros."""
        env = self.context.shapes.env
        sizes: list[Any] = [s for value in made for s in tuple[Any, ...](value.shape) if isinstance(s, torch.SymInt) and self.is_tokens(s)]
        return any(not env.is_unbacked_symint(symbol) for size in sizes for symbol in size.node.expr.free_symbols)

    def is_free(self, node: torch.fx.Node) -> bool:
        """Whether the analysis knows that a result does not depend on the tokens that are read: it has their dtype, or no more."""
        info, origin = self.info(node), origin_of(node)
        if info is None or origin is None or not info.tensors or info.token_sum is not None or info.writes:
            return False
        return all(not layout.has_tokens and layout.reach.kind is Kind.UNIFORM for layout in info.tensors)

    def attribute(self, node: torch.fx.Node) -> Gradient:
        value: Any = self.context.module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return Gradient.PART if isinstance(value, torch.Tensor) and value.requires_grad else Gradient.NONE

    def kept(self, node: torch.fx.Node, gradient: Gradient) -> Gradient:
        """The gradient of a result, none if it can have none."""
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        made = list(self.made(node))
        floats = any(value.is_floating_point() or value.is_complex() for value in made)
        return gradient if floats and name not in ("detach", "detach_") else Gradient.NONE


_RANDOM = frozenset({"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "multinomial",
                     "normal", "normal_", "uniform_", "exponential_", "randperm", "random_", "gumbel_softmax"})  # fmt: skip
_DROPOUT = frozenset({"dropout", "dropout1d", "dropout2d", "alpha_dropout", "feature_alpha_dropout"})


def draws(node: torch.fx.Node) -> bool:
    """Whether a node draws random numbers; a dropout that drops nothing draws none."""
    if name_of(node) not in _DROPOUT:
        return name_of(node) in _RANDOM
    given = dict(zip(("input", "p", "training"), node.args, strict=False)) | node.kwargs
    return bool(given.get("p", 0.5) != 0) and given.get("training", True) is not False


def name_of(node: torch.fx.Node) -> str:
    """The bare name of what a node calls."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[-1]
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))


def source_of(value: Any) -> torch.fx.Node:
    """The forest tensor behind one that is cut."""
    while value.op != "placeholder":
        assert value.target is operator.getitem, "an index is cut by getitem"
        value = value.args[0]
    found: torch.fx.Node = value
    return found


def take_origin(made: torch.fx.Node, node: torch.fx.Node) -> None:
    """Says that a node computes what another one did."""
    origin = origin_of(node)
    if origin is not None:
        set_origin(made, origin)


_ADVICE = "Compile without context_parallel, or move the op out of the compiled model."


def refused(node: torch.fx.Node, reason: str, advice: str = _ADVICE) -> LayoutNotAccepted:
    """The error of an op that gets a layout over the ranks which it does not accept."""
    why = f"the op does not accept the contiguous layout over ranks: {reason}"
    name = node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))
    return LayoutNotAccepted(why, op=name, node=node.name, source=source_line(node), advice=advice)
