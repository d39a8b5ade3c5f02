"""Reads attention off a captured graph, backwards from `weights @ v` to `q @ k^T`.

Every op on the way is one of a known list; anything else raises `NotAttention`. What the ops say is collected in `Scores`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import sympy
import torch
from torch.fx import Node

from sp_compile.capture.torch_products import NotAttention, Operand, first_product, second_product
from sp_compile.capture.torch_spelling import Shape, Spelled, Writes, constant, example, shape, spelled, tensor
from sp_compile.ops.blocking import is_blocking


@dataclasses.dataclass
class Scores:
    """`outer * tanh(inner * q.k)`, or `outer * inner * q.k` if not capped, with masks; values between the two products.

    Attributes:
        q, k: operands as [B, H, L, D] or [B * H, L, D].
        factors: ("mul" or "div", tensor or symbolic number) that scale a query.
        hidden: (condition node, whether it marks visible pairs, what hidden scores become).
        added: (additive node, factor).
        finite: hidden scores become finite numbers, and the weights they get are used.
        ranks: rank of the scores where a condition or an additive node met them.
        chain: nodes from the first product on.
        reads: (node, its reader) of everything that enters the chain from outside.
    """

    q: Operand
    k: Operand
    dtype: torch.dtype
    inner: float = 1.0
    outer: float = 1.0
    capped: bool = False
    factors: list[tuple[str, Node]] = dataclasses.field(default_factory=list)
    hidden: list[tuple[Node, bool, float]] = dataclasses.field(default_factory=list)
    added: list[tuple[Node, float]] = dataclasses.field(default_factory=list)
    sinks: Node | None = None
    dropout: float = 0.0
    finite: bool = False
    ranks: dict[Node, int] = dataclasses.field(default_factory=dict)
    chain: list[Node] = dataclasses.field(default_factory=list)
    reads: list[tuple[Node, Node]] = dataclasses.field(default_factory=list)

    @property
    def masked(self) -> bool:
        return bool(self.hidden or self.added)

    def read(self, node: Node, reader: Node) -> Node:
        self.reads.append((node, reader))
        return node

    def met(self, node: Node, reader: Node) -> Node:
        """The same for a part of the mask: it lines up with the scores from the right, so their rank there counts."""
        rank = len(shape(reader))
        _demand(self.ranks.setdefault(node, rank) == rank, "a mask meets scores of different ranks")
        _demand(rank != 5 or _groupless(shape(node)), "a mask differs between the members of a group of heads")
        return self.read(node, reader)


@dataclasses.dataclass
class Match:
    """One attention: its scores, its values [B, H, L, Dv] or [B * H, L, Dv], and the node of its result."""

    scores: Scores
    v: Operand
    out: Node
    order: str
    heads: int


def read_attention(out: Node, writes: Writes, packed: bool = False) -> Match:
    """The attention whose result is `out`; `packed` says that there is one row.

    Raises:
        NotAttention: there is none, or one of its ops is not known.
    """
    product = second_product(out)
    after: list[Node] = []
    ended: list[tuple[Node, Node]] = []
    dropout, cut, node = 0.0, "", writes.latest(product.weights, out)
    while (call := spelled(node)).name != "softmax":
        after.append(node)
        if call.name == "dropout":
            on = call["training"] is not False
            dropout = max(dropout, float(0.5 if call["p"] is None else call["p"]) if on else 0.0)
        elif call.name == "getitem" and not cut:
            cut = _cut_column(call, node)
        elif call.name == "masked_fill" and call["value"] == 0:
            ended.append((call["mask"], node))
        elif call.name == "nan_to_num":
            _demand(call["nan"] in (None, 0), "NaN is replaced by a number")
        else:
            _demand(_is_cast(call, node) or _is_regroup(call, node), f"{node} stands between softmax and the values")
        node = writes.latest(call["input"], node)
        _demand(isinstance(node, Node), "the weights are no softmax")
    rank = len(shape(node))
    _demand(call["dim"] in (-1, rank - 1), "the softmax is not over keys")
    before = writes.latest(call["input"], node)
    sinks: tuple[Node, Node] | None = None
    chain_tail = [*after, node]
    if cut:
        before, sinks, tail = _without_sinks(before, node, cut, writes)
        chain_tail += tail
    scores = _Reader(writes).scores(before, node if not cut else chain_tail[-1])
    scores.chain += chain_tail
    scores.dropout = dropout
    _demand(all(is_blocking(fill) for _, _, fill in scores.hidden), "masked scores keep some weight")
    known = {writes.latest(cond, at) for cond, at in ended}
    _demand(known <= {cond for cond, _, _ in scores.hidden}, "weights are masked by something the scores are not masked by")
    scores.finite = any(math.isfinite(fill) for cond, _, fill in scores.hidden if cond not in known)
    heads = _heads(scores, product.v, chain_tail, out, packed)
    if sinks is not None:
        scores.sinks = scores.read(_sink_vector(sinks[0], heads), sinks[1])
    scores.read(product.v.node, out)
    _demand(writes.writers(scores.chain) <= set(scores.chain), "something else writes to the scores")
    _demand(not any(writes.between(n, at, out) for n, at in scores.reads), "an operand is overwritten before the attention ends")
    return Match(scores, product.v, out, product.order, heads)


def _groupless(sizes: Shape) -> bool:
    """Whether a value that meets [B, G, R, L, L] scores has one value for all heads, or one for each."""
    heads = (*([sympy.Integer(1)] * (5 - len(sizes))), *sizes)[1:3]
    return len(sizes) <= 5 and (heads == (1, 1) or (len(sizes) == 5 and 1 not in heads))


def _demand(condition: bool, text: str) -> None:
    if not condition:
        raise NotAttention(text)


def _is_cast(call: Spelled, node: Node) -> bool:
    value, before = tensor(node), tensor(call["input"])
    floats = value is not None and before is not None and value.is_floating_point() and before.is_floating_point()
    return call.name in ("cast", "same", "detach") and call.name != "detach" and floats


def _is_regroup(call: Spelled, node: Node) -> bool:
    """[B, H, L, L], [B * H, L, L] and [B, G, R, L, L] are one row-major value; `_heads` checks that every shape is one of one H, G, R."""
    value, before = tensor(node), tensor(call["input"])
    if call.name != "regroup" or value is None or before is None or value.dtype != before.dtype:
        return False
    new, old = shape(node), shape(call["input"])
    return {len(new), len(old)} <= {3, 4, 5} and new[-2:] == old[-2:]


def _cut_column(call: Spelled, node: Node) -> str:
    """ "last" or "first" if `x[..., :-1]` or `x[..., 1:]` drops one column of the weights."""
    index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
    rest_whole = all(i is Ellipsis or i == slice(None) for i in index[:-1])
    rank = len(shape(node))
    _demand(rest_whole and (Ellipsis in index[:-1] or len(index) == rank), "a part of the weights is taken")
    if index[-1] == slice(None, -1):
        return "last"
    _demand(index[-1] == slice(1, None), "a part of the weights is taken")
    return "first"


def _without_sinks(node: Any, reader: Node, cut: str, writes: Writes) -> tuple[Node, tuple[Node, Node], list[Node]]:
    """The scores before a column of sinks was joined to them, the column with its reader, and the nodes passed."""
    tail: list[Node] = []
    while (call := spelled(node)).name != "cat":
        inner = _shifted(call, node, writes) if call.name == "sub" else call["input"] if _is_cast(call, node) else None
        _demand(isinstance(inner, Node), "a column is dropped that no join added")
        tail.append(node)
        node = writes.latest(inner, node)
    tail.append(node)
    parts = call["tensors"]
    one = isinstance(parts, list | tuple) and len(parts) == 2 and call["dim"] in (-1, len(shape(node)) - 1)
    _demand(one, "scores are joined to something")
    scores, sink = parts if cut == "last" else parts[::-1]
    return writes.latest(scores, node), (writes.latest(sink, node), node), tail


def _sink_vector(node: Node, heads: int) -> Node:
    """The [H] vector that a [B, H, L, 1] column was made from."""
    while (sizes := shape(node)) and len(sizes) > 1:
        call = spelled(node)
        known = call.name in ("regroup", "expand", "unsqueeze", "getitem", "cast") and isinstance(call["input"], Node)
        if call.name == "getitem":
            index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
            known = known and all(i is None or i == slice(None) for i in index)
        _demand(known and sizes[-1] == 1 and len(sizes) in (3, 4) and sizes[-3] == heads, "sinks are not one number per head")
        node = call["input"]
    _demand(sizes == (heads,), "sinks are not one number per head")
    return node


def _shifted(call: Spelled, node: Node, writes: Writes) -> Node | None:
    """`x` if the call is `x - max(x, -1, keepdim)`, which softmax does not see."""
    top = call["other"]
    while spelled(top).name in ("detach", "cast"):
        top = spelled(top)["input"]
    most = spelled(top)
    if (most.name, most["index"] if most.name == "getitem" else most["name"]) in (("getitem", 0), ("getattr", "values")):
        top = most["input"]
        most = spelled(top)
    if most.name not in ("max", "amax") or most["keepdim"] is not True or most["dim"] not in (-1, (-1,), [-1], len(shape(node)) - 1):
        return None
    same = writes.latest(call["input"], node) is writes.latest(most["input"], top)
    return call["input"] if same and call["alpha"] in (None, 1) else None


class _Reader:
    """Walks back from the softmax to the product of queries and keys."""

    def __init__(self, writes: Writes) -> None:
        self.writes = writes
        self.failed: set[Node] = set()

    def scores(self, node: Any, reader: Node) -> Scores:
        """What is known about the scores that `reader` reads as `node`.

        Raises:
            NotAttention: an op on the way is not recognised.
        """
        node = self.writes.latest(node, reader)
        if node in self.failed:
            raise NotAttention(f"{node} is no product of queries and keys")
        try:
            found = self._read(node, spelled(node))
        except NotAttention:
            self.failed.add(node)  # sums try both sides, which would take exponential time
            raise
        found.chain.append(node)
        return found

    def _read(self, node: Node, call: Spelled) -> Scores:
        if call.name in ("matmul", "einsum", "baddbmm"):
            found = self._product(node, call)
        elif call.name in ("add", "sub"):
            found = self._sum(node, call)
        elif call.name in ("mul", "div"):
            found = self._scaled(node, call)
        elif call.name == "masked_fill":
            found = self.scores(call["input"], node)
            self._hide(found, node, call["mask"], False, call["value"])
        elif call.name == "where":
            found = self._where(node, call)
        elif call.name == "tanh":
            found = self.scores(call["input"], node)
            _demand(not found.masked and not found.capped and found.outer > 0, "a mask is bent by tanh")
            found.inner, found.outer, found.capped = found.inner * found.outer, 1.0, True
        elif _is_cast(call, node) or _is_regroup(call, node):
            found = self.scores(call["input"], node)
        else:
            raise NotAttention(f"{call.name or node} on attention scores")
        return found

    def _product(self, node: Node, call: Spelled) -> Scores:
        q, k = first_product(node)
        value = tensor(node)
        assert value is not None, "a product is a tensor"
        found = Scores(q, k, value.dtype)
        found.read(q.node, node)
        found.read(k.node, node)
        if call.name == "baddbmm":
            beta, alpha = (1.0 if call[name] is None else constant(call[name]) for name in ("beta", "alpha"))
            _demand(beta is not None and alpha is not None, "a product is scaled by a number that is not constant")
            found.outer *= float(alpha)  # type: ignore[arg-type]
            if beta:
                found.added.append((found.met(self.writes.latest(call["input"], node), node), float(beta)))
        return found

    def _sum(self, node: Node, call: Spelled) -> Scores:
        sign = -1.0 if call.name == "sub" else 1.0
        alpha = 1.0 if call["alpha"] is None else constant(call["alpha"])
        _demand(alpha is not None, "a sum is scaled by a number that is not constant")
        shifted = _shifted(call, node, self.writes) if sign < 0 else None
        if shifted is not None:
            return self.scores(shifted, node)
        tries = [(call["input"], call["other"], sign * float(alpha))]  # type: ignore[arg-type]
        if sign > 0 and alpha == 1.0:
            tries.append((call["other"], call["input"], 1.0))
        for base, term, factor in tries:
            value = tensor(term)
            if value is None or not value.is_floating_point() or shape(base) != shape(node):
                continue
            try:
                found = self.scores(base, node)
            except NotAttention:
                continue
            found.added.append((found.met(self.writes.latest(term, node), node), factor))
            return found
        raise NotAttention("a sum of which neither side is a product of queries and keys")

    def _scaled(self, node: Node, call: Spelled) -> Scores:
        base, by = call["input"], call["other"]
        if call.name == "mul" and shape(base) != shape(node):
            base, by = by, base
        _demand(shape(base) == shape(node) and call["rounding_mode"] is None, "scores are scaled to another size")
        found = self.scores(base, node)
        number = constant(by)
        if number is not None:
            _demand(number != 0 and math.isfinite(number), "scores are scaled by nothing")
            factor = 1.0 / number if call.name == "div" else number
            _demand(factor > 0 or not (found.masked or found.capped), "a negative factor turns a mask round")
            found.outer *= factor
            found.added = [(term, old * factor) for term, old in found.added]
            found.hidden = [(cond, visible, fill * factor) for cond, visible, fill in found.hidden]
            return found
        value, sizes = tensor(by), shape(by)
        symbolic = isinstance(example(by), int | float | torch.SymInt | torch.SymFloat)
        _demand(isinstance(by, Node) and (value is not None or symbolic), "scores are scaled by something else")
        _demand(not found.masked and not found.capped, "masked scores are scaled by a tensor")
        plain = value is None or not sizes or (value.dtype == found.dtype and len(sizes) <= len(shape(node)) == 4 and sizes[-1] == 1)
        _demand(plain and (value is None or value.is_floating_point()), "scores are scaled by key")
        found.factors.append((call.name, found.read(by, node)))
        return found

    def _where(self, node: Node, call: Spelled) -> Scores:
        for base, other, visible in ((call["input"], call["other"], True), (call["other"], call["input"], False)):
            if constant(other) is not None and isinstance(base, Node) and constant(base) is None:
                found = self.scores(base, node)
                self._hide(found, node, call["condition"], visible, other)
                return found
        raise NotAttention("where() between two computed values")

    def _hide(self, found: Scores, node: Node, condition: Any, visible: bool, value: Any) -> None:
        condition, number = self.writes.latest(condition, node), constant(value)
        mask = tensor(condition)
        _demand(mask is not None and mask.dtype == torch.bool, "scores are masked by something that is not boolean")
        if number is None:
            raise NotAttention("masked scores get a computed value")
        found.hidden.append((found.met(condition, node), visible, number))


def _heads(scores: Scores, v: Operand, tail: list[Node], out: Node, packed: bool) -> int:
    """The number of heads. Every value of the chain has to be [B, H, L, L] or [B * H, L, L] for one B, H and L.

    Sizes that are fixed numbers are no batch (but for packed values, where it is 1) and no tokens: attention among a token's own parts is
    per token, and left alone.
    """
    q, k, first = scores.q.sizes, scores.k.sizes, shape(scores.chain[0])
    grouped = [sizes for node in scores.chain if len(sizes := shape(node)) == 5]
    if len(first) == 5:
        batch, heads = first[0], first[1] * first[2]
    else:
        batch, heads = (first[0], first[1]) if len(first) == 4 else reversed(first[0].as_coeff_Mul())
    length = first[-1]
    known = heads.is_Integer and heads > 0 and (batch == 1 if packed else not batch.is_Integer) and not length.is_Integer
    _demand(known, "sizes are not [batch, heads, tokens, tokens]")
    _demand(first[-2] == length, "queries and keys are not the same tokens")
    full, merged = (batch, heads, length, length), (batch * heads, length, length)
    wide = [(batch, heads, length, length + 1), (batch * heads, length, length + 1)] if any(spelled(n).name == "cat" for n in tail) else []
    groups = {(batch, g, r, length, length) for _, g, r, *_ in grouped if g * r == heads}
    _demand(len(groups) <= 1 and all(shape(n) in (full, merged, *groups, *wide) for n in scores.chain), "the scores change their shape")
    fewer = {g for _, g, *_ in groups}
    same = (k[1] if len(k) == 4 else heads,)
    for name, sizes, allowed in (("queries", q, (heads,)), ("keys", k, (heads, 1, *fewer)), ("values", v.sizes, same)):
        right = sizes[0] == batch and sizes[1] in allowed if len(sizes) == 4 else sizes[0] == batch * heads
        _demand(len(sizes) in (3, 4) and right and sizes[-2] == length, f"the {name} do not fit the scores")
    _demand(len(q) == len(k) and min(len(shape(out)), 4) == len(v.sizes), "operands of different ranks")
    return int(heads)
