"""`Forest`: how the rows of a batch share their prefixes. Plain data, immutable, numpy on the host."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import RLock

import numpy as np
import torch

from sp_compile.errors import InvalidForest
from sp_compile.layout import derive, inputs, tensors
from sp_compile.layout.build import Ints, Parts, assemble, sort_rows
from sp_compile.layout.validate import validated_parts


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Forest:
    """A compressed trie of the rows of a batch, stored in depth-first preorder.

    Sizes: B rows (`num_rows`), L dense columns (`num_columns`), T physical tokens (`num_tokens`), N logical tokens (`logical_tokens`).
    A node is a maximal stretch of tokens through which the same rows pass: it ends where rows diverge or where a row ends. The physical
    order is the depth-first preorder of nodes; children of a node, and roots, follow each other by their smallest row number. The same
    input always gives the identical forest. All arrays are int64 and read-only.

    Attributes:
        node_start: [nodes] first token of each node; spans are contiguous from 0.
        node_len: [nodes] tokens per node, at least 1.
        parent: [nodes] parent node, -1 for a root; always smaller than the node.
        row_node: [B] node in whose last token row b ends, -1 for a row without tokens.
        num_columns: L.
        run_start: [runs] first token of each maximal stretch of consecutive dense columns inside one node (one run a node without holes).
        run_column: [runs] dense column of that token.
    """

    node_start: Ints
    node_len: Ints
    parent: Ints
    row_node: Ints
    num_columns: int
    run_start: Ints
    run_column: Ints
    _lock: RLock = field(init=False)
    _tensors: dict[tuple[str, torch.device], torch.Tensor] = field(init=False)

    def __init__(
        self,
        node_start: object,
        node_len: object,
        parent: object,
        row_node: object,
        *,
        column: object = None,
        num_columns: int | None = None,
    ) -> None:
        """Checks and copies an explicit description; any depth-first preorder will do, and nodes may be shorter than maximal.

        Args:
            node_start, node_len, parent, row_node: as in the attributes; integer arrays, CPU tensors or sequences of Python integers.
            column: [T] dense column of each token, increasing along every path; None: tokens stand at their position in the row.
            num_columns: L; None: one more than the largest column.

        Raises:
            InvalidForest: wrong dtype or shape, zero-length nodes, overlapping or gapped spans, a parent that does not precede its node,
                nodes out of depth-first preorder, a node that no row passes through, rows or columns out of range.
        """
        self._fill(validated_parts(node_start, node_len, parent, row_node, column, num_columns))

    def _fill(self, parts: Parts) -> None:
        arrays = {"node_len": parts.node_len, "parent": parts.parent, "row_node": parts.row_node}
        arrays |= {"run_start": parts.run_start, "run_column": parts.run_column}
        arrays["node_start"] = np.cumsum(parts.node_len) - parts.node_len
        for name, array in arrays.items():
            object.__setattr__(self, name, derive.read_only(array.astype(np.int64, copy=False)))
        object.__setattr__(self, "num_columns", parts.num_columns)
        object.__setattr__(self, "_lock", RLock())
        object.__setattr__(self, "_tensors", {})

    @staticmethod
    def _of(parts: Parts) -> Forest:
        forest = object.__new__(Forest)
        forest._fill(parts)
        return forest

    # Construction from rows

    @staticmethod
    def from_tokens(*keys: object, keep: object = None) -> Forest:
        """Finds the shared prefixes of a dense batch.

        Two rows share the token at column l exactly if, at every column up to l, they have the same `keep`, and where it is true, the
        same bits in every key (so -0.0 and 0.0 differ, and so do two NaNs of different payload).

        Args:
            keys: int, bool or float arrays or CPU tensors (8 to 64 bits) of shape [B, L], or [B] for a key of the whole row;
                at least one, or `keep`, has shape [B, L].
            keep: bool [B, L], false where there is no token (left padding, right padding, holes); None: every column is a token.

        Raises:
            InvalidForest: shapes that disagree, other dtypes, tensors off the CPU.
        """
        columns, row_keys, kept, num_rows, num_columns = inputs.key_arrays(keys, keep)
        order, common = sort_rows(columns, row_keys, kept, num_rows, num_columns)
        return Forest._of(assemble(order, common, kept, num_columns))

    @staticmethod
    def from_rows(rows: Sequence[object]) -> Forest:
        """Finds the shared prefixes of rows of any lengths, all starting at column 0.

        Args:
            rows: 1-D integer arrays, CPU tensors or sequences of Python integers, compared by value; L is the longest length.

        Raises:
            InvalidForest: a row is not a 1-D integer vector.
        """
        padded, keep = inputs.pad_rows(inputs.row_vectors(rows, "rows"))
        return Forest.from_tokens(padded, keep=keep)

    @staticmethod
    def from_groups(prompts: Sequence[object], completions: Sequence[object], groups: object) -> Forest:
        """Forest of the rows prompt + completion, where only rows of one group may share.

        Rows of one group share as far as their tokens are equal: a common start of two completions is shared too, and two prompts of
        one group need not be equal.

        Args:
            prompts: per row, a 1-D integer vector.
            completions: per row, a 1-D integer vector; may be empty.
            groups: [B] integer array, or a sequence of B integers or strings.

        Raises:
            InvalidForest: different numbers of prompts, completions and groups, or vectors of another dtype or rank.
        """
        heads, tails = inputs.row_vectors(prompts, "prompts"), inputs.row_vectors(completions, "completions")
        if len(heads) != len(tails):
            raise InvalidForest(f"completions: expected {len(heads)}, one for each prompt, got {len(tails)}")
        codes = inputs.group_codes(groups, len(heads))
        padded, keep = inputs.pad_rows([np.concatenate(pair) for pair in zip(heads, tails, strict=True)])
        return Forest.from_tokens(padded, codes, keep=keep)

    def refined(self, k: int) -> Forest:
        """The forest in which two rows share column l exactly if they agree through column l + k (dropped columns are symbols too).

        The end of the dense columns counts as a symbol that all rows agree on, so equal rows stay shared and rows that end within k of
        each other's branch point do not. k = 0 returns this forest.

        Raises:
            InvalidForest: k is no integer or negative.
        """
        ahead = inputs.integer(k, "refined: k")
        if ahead < 0:
            raise InvalidForest(f"refined: k: expected at least 0, got {ahead}")
        if ahead == 0:
            return self
        order, common = sort_rows([self.index.view(np.uint64)], [], None, self.num_rows, self.num_columns)
        common = np.where(common == self.num_columns, common, np.maximum(common - ahead, 0))
        keep = self.index >= 0
        return Forest._of(assemble(order, common, None if bool(keep.all()) else keep, self.num_columns))

    def without_last(self, cut: int) -> Forest:
        """The forest of the first L - cut columns.

        Raises:
            InvalidForest: cut is no integer, negative or more than L.
        """
        left = self.num_columns - inputs.integer(cut, "without_last: cut")
        if cut < 0 or left < 0:
            raise InvalidForest(f"without_last: cut: expected 0 to {self.num_columns} columns, got {cut}")
        if cut == 0:
            return self
        index = self.index[:, :left]
        return Forest.from_tokens(np.ascontiguousarray(index), keep=index >= 0)

    # Sizes

    @property
    def num_rows(self) -> int:
        """B."""
        return int(self.row_node.size)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return int(self.node_len.size)

    @cached_property
    def num_tokens(self) -> int:
        """T, physical tokens."""
        return int(self.node_len.sum())

    @cached_property
    def logical_tokens(self) -> int:
        """N, tokens of all rows: sum of `count`."""
        return int((self.node_len * self.node_count).sum())

    @property
    def sharing(self) -> float:
        """Sharing ratio N / T; 1.0 for a forest without tokens."""
        return self.logical_tokens / self.num_tokens if self.num_tokens else 1.0

    # Per node

    @property
    def depth(self) -> Ints:
        """[nodes] number of proper ancestors."""
        return self._tree.depth

    @property
    def node_end(self) -> Ints:
        """[nodes] exclusive end of the node's subtree, as a node number."""
        return self._tree.node_end

    @property
    def node_row(self) -> Ints:
        """[nodes] smallest row through the node."""
        return self._tree.node_row

    @property
    def node_count(self) -> Ints:
        """[nodes] number of rows through the node."""
        return self._tree.node_count

    @cached_property
    def _tree(self) -> derive.PerNode:
        return derive.per_node(self)

    # Per token

    @cached_property
    def row(self) -> Ints:
        """[T] smallest row through token i."""
        return derive.read_only(derive.row(self))

    @cached_property
    def count(self) -> Ints:
        """[T] number of rows through token i."""
        return derive.read_only(derive.count(self))

    @cached_property
    def column(self) -> Ints:
        """[T] dense column of token i."""
        return derive.read_only(derive.column(self))

    @cached_property
    def prev(self) -> Ints:
        """[T] physical index of the token before i in its rows, -1 for a row's first."""
        return derive.read_only(derive.prev(self))

    @cached_property
    def end(self) -> Ints:
        """[T] exclusive end, as a token, of the subtree of i's node."""
        return derive.read_only(derive.end(self))

    # Per row and column

    @cached_property
    def index(self) -> Ints:
        """[B, L] physical token of row b at column l, -1 where the row has none."""
        return derive.read_only(derive.index(self))

    # Tensors

    def tensor(self, name: str, device: torch.device | str) -> torch.Tensor:
        """The registered tensor `name` on `device`, see `tensors`."""
        return self.tensors((name,), device)[0]

    def tensors(self, names: Sequence[str], device: torch.device | str) -> tuple[torch.Tensor, ...]:
        """Registered tensors on `device`, made once per forest, name and device; what is missing travels in one non-blocking copy.

        The results are shared between callers and must not be written to. They are ordinary tensors even when they are first asked for
        under `torch.inference_mode`. On CUDA they are ready on the stream that is current at the first call.

        Raises:
            InvalidForest: unknown name.
        """
        place = _resolved(torch.device(device))
        places = {name: tensors.device_of(name, place) for name in names}
        fresh: dict[str, torch.Tensor] = {}
        with self._lock:
            for where in dict.fromkeys(places.values()):
                missing = [name for name in places if places[name] == where and (name, where) not in self._tensors]
                made = tensors.upload([tensors.build_array(self, name) for name in missing], where) if missing else []
                fresh.update(zip(missing, made, strict=True))
            # Fake tensors, made while a compiler traces, must not outlive the trace.
            self._tensors.update({(name, places[name]): value for name, value in fresh.items() if type(value) is torch.Tensor})
            return tuple(fresh[name] if name in fresh else self._tensors[name, places[name]] for name in names)

    # Identity

    @cached_property
    def _key(self) -> bytes:
        digest = hashlib.blake2b(digest_size=32)
        for array in (self.node_len, self.parent, self.row_node, self.run_start, self.run_column):
            digest.update(array.size.to_bytes(8, "little"))
            digest.update(array.astype("<i8", copy=False).tobytes())
        digest.update(self.num_columns.to_bytes(8, "little"))
        return digest.digest()

    def key(self) -> bytes:
        """32 bytes that depend on the structure alone: equal for equal forests, in every process."""
        return self._key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Forest) and (self is other or self.key() == other.key())

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return (
            f"Forest(rows={self.num_rows}, columns={self.num_columns}, nodes={self.num_nodes}, tokens={self.num_tokens}, "
            f"logical={self.logical_tokens}, sharing={self.sharing:.3f})"
        )

    def __reduce__(self) -> tuple[Callable[[Parts], Forest], tuple[Parts]]:
        parts = Parts(self.node_len, self.parent, self.row_node, self.run_start, self.run_column, self.num_columns)
        return Forest._of, (parts,)


def _resolved(device: torch.device) -> torch.device:
    """`cuda` means the current device; the cache must not hold one device under two names."""
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    return torch.empty(0, device=device).device
