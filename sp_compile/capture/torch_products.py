"""The two matrix products of attention, `q @ k^T` and `weights @ v`, as operands in one order whatever their spelling."""

from __future__ import annotations

import dataclasses
from typing import Any

import sympy
from torch.fx import Node

from sp_compile.capture.torch_spelling import Shape, shape, spelled


class NotAttention(Exception):
    """A piece of graph is not attention as the matcher knows it."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """A graph value after some views, with the sizes it then has."""

    node: Node
    sizes: Shape
    steps: tuple[tuple[str, tuple[Any, ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class Values:
    """`weights @ v`. `order` names the result's dimensions: b batch, h head, q query, d width, n batch and head in one; where heads stand
    in groups that share keys, g group and r its members, instead of h."""

    weights: Node
    v: Operand
    order: str


ORDERS = {3: "nqd", 4: "bhqd", 5: "bgrqd"}
"""The plain order of a result of each rank."""


def first_product(node: Node) -> tuple[Operand, Operand]:
    """Queries [..., L, D] and keys [..., L, D] of a product [..., L, L].

    Raises:
        NotAttention: the node is no such product.
    """
    call = spelled(node)
    if call.name == "einsum":
        return _first_einsum(node)
    left, right = (call["batch1"], call["batch2"]) if call.name == "baddbmm" else (call["input"], call["other"])
    sizes = shape(right)
    if not isinstance(left, Node) or not isinstance(right, Node) or len(shape(left)) not in (3, 4, 5) or len(shape(left)) != len(sizes):
        raise NotAttention("a product of other ranks")
    keys = Operand(right, (*sizes[:-2], sizes[-1], sizes[-2]), (("transpose", (-2, -1)),))
    return _four(Operand(left, shape(left))), _four(keys)


def _four(operand: Operand) -> Operand:
    """Heads in groups [B, G, R, L, D] as [B, G * R, L, D]; a size R of 1 is left out, so that keys have one head per group."""
    sizes = operand.sizes
    if len(sizes) != 5:
        return operand
    merged = (sizes[0], sizes[1] * sizes[2], *sizes[3:])
    return Operand(operand.node, merged, (*operand.steps, ("squeeze", (2,)) if sizes[2] == 1 else ("flatten", (1, 2))))


def second_product(node: Node) -> Values:
    """Weights [..., L, L] and values [..., L, D] of a product.

    Raises:
        NotAttention: the node is no such product.
    """
    call = spelled(node)
    if call.name == "einsum":
        return _second_einsum(node)
    left, right = call["input"], call["other"]
    if call.name != "matmul" or not isinstance(left, Node) or not isinstance(right, Node):
        raise NotAttention("no product")
    if len(shape(left)) not in ORDERS or len(shape(left)) != len(shape(right)):
        raise NotAttention("a product of other ranks")
    return Values(left, _four(Operand(right, shape(right))), ORDERS[len(shape(left))])


def _parse(node: Node) -> tuple[tuple[Node, str], tuple[Node, str], str]:
    """The two operands of an einsum with their letters, and the letters of the result."""
    call = spelled(node)
    equation: Any = call["equation"]
    given: Any = call["rest"] or ()
    if len(given) == 1 and isinstance(given[0], list | tuple):
        given = given[0]
    if not isinstance(equation, str) or len(given) != 2 or "->" not in equation or not all(isinstance(x, Node) for x in given):
        raise NotAttention("an einsum of another form")
    inputs, result = equation.replace(" ", "").split("->")
    letters = [*inputs.split(","), result]
    if len(letters) != 3:
        raise NotAttention("an einsum of another form")
    free = next(c for c in "ZYXWVUTSRQPO" if c.lower() not in equation.lower())
    extra = {len(shape(x)) - len(text.replace("...", "")) for x, text in zip(given, letters, strict=False) if "..." in text}
    if len(extra) > 1 or any(n not in (0, 1, 2) for n in extra):
        raise NotAttention("an einsum whose dots differ")
    dots = (free + free.lower())[: next(iter(extra), 0)]
    a, b, out = (text.replace("...", dots) for text in letters)
    if any(len(set(text)) != len(text) for text in (a, b, out)) or len(a) != len(shape(given[0])) or len(b) != len(shape(given[1])):
        raise NotAttention("an einsum of another form")
    return (given[0], a), (given[1], b), out


def _arranged(node: Node, letters: str, wanted: str) -> Operand:
    """An operand with its dimensions in the wanted order; a letter it does not have becomes a dimension of size 1."""
    present = [c for c in wanted if c in letters]
    if set(letters) != set(present):
        raise NotAttention("an einsum sums over something else")
    steps: list[tuple[str, tuple[Any, ...]]] = []
    order = tuple(letters.index(c) for c in present)
    if order != tuple(range(len(order))):
        steps.append(("permute", order))
    known = dict(zip(letters, shape(node), strict=True))
    steps += [("unsqueeze", (place,)) for place, c in enumerate(wanted) if c not in letters]
    return Operand(node, tuple(known.get(c, sympy.Integer(1)) for c in wanted), tuple(steps))


def _first_einsum(node: Node) -> tuple[Operand, Operand]:
    a, b, out = _parse(node)
    if len(out) not in ORDERS:
        raise NotAttention("an einsum of another rank")
    *batch, query, key = list(out)
    summed = (set(a[1]) & set(b[1])) - set(out)
    if query not in a[1]:
        a, b = b, a
    if len(summed) != 1 or query not in a[1] or query in b[1] or key not in b[1] or key in a[1]:
        raise NotAttention("an einsum that is no product of queries and keys")
    (width,) = summed
    return _four(_arranged(*a, "".join((*batch, query, width)))), _four(_arranged(*b, "".join((*batch, key, width))))


def _second_einsum(node: Node) -> Values:
    first, second, out = _parse(node)
    for (weights, letters), value in ((first, second), (second, first)):
        *batch, query, key = list(letters)
        width = set(value[1]) - set(letters)
        if len(letters) not in ORDERS or len(width) != 1 or query in value[1] or key not in value[1] or key in out:
            continue
        (wide,) = width
        if set(out) != {*batch, query, wide}:
            continue
        names = dict(zip((*batch, query, wide), ORDERS[len(letters)], strict=True))
        order = "".join(names[c] for c in out)
        if len(order) == 3 and order != "nqd":
            continue
        return Values(weights, _four(_arranged(*value, "".join((*batch, key, wide)))), order)
    raise NotAttention("an einsum that is no product of weights and values")
