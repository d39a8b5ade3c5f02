"""What a rank of a context parallel group reads of others, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from sp_compile.layout.build import Ints


@dataclass(frozen=True)
class Fetch:
    """Rows that a rank reads of others, in the order of their tokens, and rows that it sends.

    Attributes:
        rows: int64 [n] what is received, as token numbers, ascending and so by sender.
        send: int64 [m] local rows, by receiver.
        send_sizes, receive_sizes: rows to and from each rank, Python integers.
    """

    rows: Ints
    send: Ints
    send_sizes: tuple[int, ...]
    receive_sizes: tuple[int, ...]


@dataclass(frozen=True)
class Look:
    """How tokens of one forest read those of another.

    Attributes:
        source, target: both forests, as (columns ahead, last columns left out) of the plain one.
        offset: a token at column l reads column l + offset of its row.
        wraps: behind the last column stands the first.
    """

    source: tuple[int, int]
    target: tuple[int, int]
    offset: int
    wraps: bool

    @property
    def code(self) -> str:
        """A name for graph inputs."""
        return "x".join(map(str, (*self.source, *self.target, self.offset, int(self.wraps))))

    @staticmethod
    def of(code: str) -> Look:
        """What has this code."""
        a, b, c, d, offset, wraps = map(int, code.split("x"))
        return Look((a, b), (c, d), offset, bool(wraps))
