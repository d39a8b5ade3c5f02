"""Which rank of a context parallel group holds which tokens of a pack.

A pack of T tokens is padded behind its last one to T', a multiple of the quantum: 1 on one rank; 2C on C ranks; 2 * C * TP where each of
the C ranks is TP tensor parallel ranks that split its tokens too (sequence parallelism, on whenever TP > 1). Every member of the C * TP
grid holds T' / (C * TP) tokens. Tokens T .. T' - 1 are padding.

    contiguous   rank r holds [r T'/C, (r+1) T'/C) of the flattened pack, whatever sequences or trees that cuts
    zigzag       of 2C equal chunks, rank r holds r and 2C - 1 - r: equal causal work if the pack is one sequence
    balanced     chosen by the pairs that the forest allows, see `balanced`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from sp_compile.errors import InvalidShards, StaleRoute
from sp_compile.layout.build import Ints
from sp_compile.layout.derive import read_only

if TYPE_CHECKING:
    from sp_compile.layout.forest import Forest

KINDS = ("contiguous", "zigzag", "balanced")

# Pieces of a rank in the balanced layout: more balance better, and shorter ones than a tile of queries cost attention kernels time.
_MOST_PIECES = 16
_TILE = 128


def quantum(ranks: int, tensor_ranks: int = 1) -> int:
    """The number of which a pack's padded length is a multiple, for C = `ranks` and TP = `tensor_ranks`.

    Raises:
        InvalidShards: a number of ranks is no integer or not positive.
    """
    for name, value in (("ranks", ranks), ("tensor_ranks", tensor_ranks)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidShards(f"shards: {name}: expected a positive integer, got {value!r}")
    return 1 if ranks == tensor_ranks == 1 else 2 * ranks * tensor_ranks


def padded_length(tokens: int, ranks: int, tensor_ranks: int = 1) -> int:
    """T': `tokens` rounded up to the quantum."""
    step = quantum(ranks, tensor_ranks)
    return -(-tokens // step) * step


@dataclass(frozen=True, eq=False)
class Shards:
    """Tokens of a pack by the rank that holds them.

    Attributes:
        kind: one of `KINDS`.
        ranks: C.
        tensor_ranks: TP.
        tokens: T, without padding.
        order: int64 [T'] permutation: token numbers in the order in which members 0, 1, ... hold them.
        key: `Forest.key()` of the pack.
    """

    kind: str
    ranks: int
    tensor_ranks: int
    tokens: int
    order: Ints = field(repr=False)
    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Raises InvalidShards unless `order` is a permutation of the padded pack."""
        if self.kind not in KINDS:
            raise InvalidShards(f"shards: expected a kind among {', '.join(KINDS)}, got {self.kind!r}")
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 0:
            raise InvalidShards(f"shards: tokens: expected an integer of at least 0, got {self.tokens!r}")
        if not isinstance(self.key, bytes) or len(self.key) != 32:
            raise InvalidShards(f"shards: key: expected the 32 bytes of Forest.key(), got {self.key!r}")
        padded, order = padded_length(self.tokens, self.ranks, self.tensor_ranks), self.order
        if not isinstance(order, np.ndarray) or order.dtype != np.int64 or order.shape != (padded,):
            raise InvalidShards(f"shards: order: expected int64 [{padded}], got {getattr(order, 'dtype', '?')} {list(np.shape(order))}")
        if order.size and not np.array_equal(np.sort(order), np.arange(padded)):
            raise InvalidShards(f"shards: order: expected every token of 0..{padded - 1} once")
        object.__setattr__(self, "order", read_only(order))

    @property
    def padded(self) -> int:
        """T'."""
        return int(self.order.size)

    @property
    def members(self) -> int:
        """C * TP."""
        return self.ranks * self.tensor_ranks

    @property
    def size(self) -> int:
        """Tokens per member, padding included."""
        return self.padded // self.members

    def member(self, rank: int, tensor_rank: int = 0) -> int:
        """Number of a member: tensor ranks vary fastest.

        Raises:
            InvalidShards: the grid has no such rank.
        """
        if not (0 <= rank < self.ranks and 0 <= tensor_rank < self.tensor_ranks):
            raise InvalidShards(f"shards: expected rank < {self.ranks}, tensor rank < {self.tensor_ranks}; got {rank}, {tensor_rank}")
        return rank * self.tensor_ranks + tensor_rank

    def local(self, member: int) -> Ints:
        """int64 [T' / (C TP)]: tokens of a member in the order in which it holds them."""
        if not 0 <= member < self.members:
            raise InvalidShards(f"shards: expected a member of 0..{self.members - 1}, got {member}")
        return self.order[member * self.size : (member + 1) * self.size]

    @cached_property
    def place(self) -> Ints:
        """int64 [T']: place of each token in `order`."""
        place = np.empty_like(self.order)
        place[self.order] = np.arange(self.padded)
        return read_only(place)

    def loads(self, work: Ints) -> Ints:
        """int64 [C]: sum of `work` [T'] over the tokens of each rank."""
        result: Ints = work[self.order].reshape(self.ranks, -1).sum(1)
        return result

    def require(self, forest: Forest) -> None:
        """Raises StaleRoute unless these are shards of `forest`."""
        if self.key != forest.key():
            raise StaleRoute(
                f"shards: expected those of {forest!r}, got those of another forest, with {self.tokens} tokens: make them anew"
            )

    def state(self) -> dict[str, Any]:
        """Plain values, from which `from_state` makes equal shards."""
        sizes = {"kind": self.kind, "ranks": self.ranks, "tensor_ranks": self.tensor_ranks, "tokens": self.tokens, "key": self.key}
        return sizes | {"order": self.order.astype("<i8", copy=False).tobytes()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Shards:
        """Shards of `state()`, checked as any others.

        Raises:
            InvalidShards: something is missing or inconsistent.
        """
        names = {"kind", "ranks", "tensor_ranks", "tokens", "key", "order"}
        if set(state) != names or not isinstance(state["order"], bytes) or len(state["order"]) % 8:
            raise InvalidShards(f"shards: expected a state with {', '.join(sorted(names))}, got {', '.join(sorted(state))}")
        order = np.frombuffer(state["order"], dtype="<i8").astype(np.int64)
        return Shards(**{**state, "order": order})


def contiguous(forest: Forest, ranks: int, tensor_ranks: int = 1) -> Shards:
    """Consecutive stretches of the pack."""
    order = np.arange(padded_length(forest.num_tokens, ranks, tensor_ranks))
    return Shards("contiguous", ranks, tensor_ranks, forest.num_tokens, order, forest.key())


def zigzag(forest: Forest, ranks: int, tensor_ranks: int = 1) -> Shards:
    """An early and a late chunk for every rank; tensor ranks split the two chunks as one stretch, so an odd one may hold parts of both."""
    order = np.arange(padded_length(forest.num_tokens, ranks, tensor_ranks))
    if ranks > 1:
        chunks = order.reshape(2 * ranks, -1)
        order = np.stack([chunks[:ranks], chunks[: ranks - 1 : -1]], 1).reshape(-1)
    return Shards("zigzag", ranks, tensor_ranks, forest.num_tokens, order, forest.key())


def balanced(forest: Forest, ranks: int, tensor_ranks: int = 1, work: Ints | None = None) -> Shards:
    """Every rank holds as many tokens, and about as many allowed pairs.

    The pack is cut into rounds of C equal pieces, each rank gets one piece of each round, the heaviest goes to the rank with the least
    so far, so that loads never differ by more than the pieces of one round do. Where the heaviest rank of the contiguous layout,
    of zigzag, or of longer pieces is no heavier, those are taken. A rank holds its tokens in increasing order.

    Args:
        work: int64 [T] pairs that each token's query is part of; None: all ancestors and itself.

    Raises:
        InvalidShards: `work` has another size.
    """
    pairs = padded_work(forest, padded_length(forest.num_tokens, ranks, tensor_ranks), work)
    near = contiguous(forest, ranks, tensor_ranks)  # from which nothing would have to move
    order, most = near.order, int(near.loads(pairs).max(initial=0))
    folded = zigzag(forest, ranks, tensor_ranks)
    if int(folded.loads(pairs).max(initial=0)) < most:
        order, most = folded.order, int(folded.loads(pairs).max())
    share = pairs.size // ranks
    pieces = 2
    while ranks > 1 and pieces <= _MOST_PIECES and (share // pieces >= _TILE or pieces == 2) and share >= pieces:
        candidate, load = _dealt(pairs, ranks, pieces)
        if load < most:
            order, most = candidate, load
        pieces *= 2
    return Shards("balanced", ranks, tensor_ranks, forest.num_tokens, order, forest.key())


def _dealt(pairs: Ints, ranks: int, pieces: int) -> tuple[Ints, int]:
    """Order of tokens, and the largest load, with `pieces` pieces for each rank."""
    share = pairs.size // ranks
    sizes = np.diff(np.arange(pieces + 1) * share // pieces)
    starts = np.repeat((np.cumsum(sizes) - sizes) * ranks, ranks).reshape(pieces, ranks) + np.arange(ranks) * sizes[:, None]
    total = np.concatenate([[0], np.cumsum(pairs)])
    weights = total[starts + sizes[:, None]] - total[starts]
    loads = np.zeros(ranks, dtype=np.int64)
    owner = np.empty((pieces, ranks), dtype=np.int64)
    # What a round leaves uneven the rounds after it make even, so the most uneven ones come first.
    for number in np.argsort(weights.min(1) - weights.max(1), kind="stable"):
        lightest = np.argsort(loads, kind="stable")
        heaviest = np.argsort(-weights[number], kind="stable")
        owner[number, heaviest] = lightest
        loads[lightest] += weights[number, heaviest]
    holder = np.repeat(owner.reshape(-1), np.repeat(sizes, ranks))
    return np.argsort(holder, kind="stable"), int(loads.max())


def path_lengths(forest: Forest) -> Ints:
    """int64 [T]: tokens on each token's path, itself included, which is the number of keys that it may attend to."""
    length, parent = forest.node_len, forest.parent
    before = np.zeros_like(length)
    by_depth = np.argsort(forest.depth, kind="stable")
    borders = np.cumsum(np.bincount(forest.depth)) if length.size else np.zeros(0, dtype=np.int64)
    for first, last in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        nodes = by_depth[first:last]
        before[nodes] = before[parent[nodes]] + length[parent[nodes]]
    return np.arange(1, forest.num_tokens + 1) + np.repeat(before - forest.node_start, length)


def padded_work(forest: Forest, padded: int, work: Ints | None = None) -> Ints:
    """int64 [T']: `work`, or allowed pairs, of each token's query; 1 for padding, which sees itself."""
    given = path_lengths(forest) if work is None else np.asarray(work)
    if given.shape != (forest.num_tokens,) or not np.issubdtype(given.dtype, np.integer):
        raise InvalidShards(f"shards: work: expected integers [{forest.num_tokens}], got {given.dtype} {list(given.shape)}")
    return np.concatenate([given.astype(np.int64), np.ones(padded - forest.num_tokens, dtype=np.int64)])


def local_borders(shards: Shards, borders: Ints, member: int) -> Ints:
    """int64 [pieces + 1]: where a member's part of each sequence of a contiguous THD pack begins, from 0, and the end.

    Sequences of which the member has nothing are left out; padding behind the last one is a piece of its own. Cumulative lengths divided
    by the number of ranks would be something else: a slice of every sequence.

    Args:
        borders: int64 [sequences + 1] cumulative lengths of the whole pack, from 0 to T.

    Raises:
        InvalidShards: the shards are not contiguous, or `borders` is not from 0 to T.
    """
    if shards.kind != "contiguous":
        raise InvalidShards(f"local_borders: expected contiguous shards, got {shards.kind}")
    if borders.ndim != 1 or borders.size < 1 or borders[0] != 0 or borders[-1] != shards.tokens or (np.diff(borders) < 0).any():
        raise InvalidShards(f"local_borders: expected cumulative lengths from 0 to {shards.tokens}, got {borders}")
    first = member * shards.size
    whole = np.append(borders, shards.padded).astype(np.int64)
    return np.unique(np.clip(whole, first, first + shards.size)) - first
