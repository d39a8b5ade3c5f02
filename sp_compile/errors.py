"""Every error of the package, one class per mistake.

Messages say what was expected, what was given, where (graph node and source line, when there is one), and what to do.
User mistakes derive from `ValueError` (or `ImportError` for missing packages), so that generic handlers keep working.
"""

from __future__ import annotations


class SharedPrefixError(Exception):
    """Base class of all errors raised on purpose by this package."""


class InvalidForest(SharedPrefixError, ValueError):
    """A forest description is inconsistent: overlapping nodes, parent after child, zero length, wrong dtype or range."""


class InvalidOption(SharedPrefixError, ValueError):
    """An option of `torch.compile(..., options={...})` is unknown or has a value outside its range."""


class InvalidInput(SharedPrefixError, ValueError):
    """A tensor argument has the wrong shape, dtype, device or layout."""


class UnsupportedVersion(SharedPrefixError, ImportError):
    """An installed package is outside the range of versions this package was tested with."""


class MissingPackage(SharedPrefixError, ImportError):
    """An optional package is needed for what was asked and is not installed."""


class StageError(SharedPrefixError, RuntimeError):
    """A compiler stage was given, or produced, a graph that breaks the stage's grammar. This is a defect of the package."""


class NoImplementation(SharedPrefixError, RuntimeError):
    """No implementation of an op supports the given arguments under the current determinism policy."""


class StaleForest(SharedPrefixError, ValueError):
    """A forest does not describe the batch it is used with (row count, columns, or token count differ)."""


class InvalidShards(SharedPrefixError, ValueError):
    """Shards, routes or plans of context parallelism are inconsistent: no permutation, tokens uncovered, numbers of ranks that differ."""


class StaleRoute(SharedPrefixError, ValueError):
    """A route or plan of context parallelism is missing, or was made for another forest, other shards, another rank or other sizes."""


class RanksDisagree(SharedPrefixError, RuntimeError):
    """The ranks of a context parallel group prepared different batches, or one of them failed to; raised on every rank alike."""


class CannotShare(SharedPrefixError, ValueError):
    """Sharing could not be proved. The dense graph runs instead, unless `strict` is set.

    Attributes:
        reason: what could not be proved, one sentence.
        op: the operation (`aten.cumsum.default`, `torch.nn.functional.batch_norm`, ...).
        node: name of the graph node.
        source: `file:line` in the user's model, or an empty string.
        advice: what to do about it.
    """

    def __init__(self, reason: str, *, op: str = "", node: str = "", source: str = "", advice: str = "") -> None:
        self.reason = reason
        self.op = op
        self.node = node
        self.source = source
        self.advice = advice
        super().__init__(str(self))

    def __str__(self) -> str:
        where = ", ".join(
            part for part in (f"op {self.op}" if self.op else "", f"node {self.node}" if self.node else "", self.source) if part
        )
        text = f"cannot share prefixes: {self.reason}"
        if where:
            text += f" [{where}]"
        if self.advice:
            text += f". {self.advice}"
        return text

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.reason, self.op, self.node, self.source, self.advice))


class LayoutNotAccepted(CannotShare):
    """Under context parallelism, an op got tokens in a layout over the ranks that it does not accept."""


class NothingToShare(CannotShare):
    """The graph holds no computation that rows with a common prefix could share, so running it densely loses nothing.

    The tail of a graph break (a loss on logits, say) is such a graph. It is recorded, but neither warned of nor raised.
    """


def _rebuild(kind: type[CannotShare], reason: str, op: str, node: str, source: str, advice: str) -> CannotShare:
    return kind(reason, op=op, node=node, source=source, advice=advice)
