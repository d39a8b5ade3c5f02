"""What a pass is, what it is given, and the typed metadata that passes put on nodes."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Protocol

import torch.fx

from sp_compile.analysis.interpret import Analysis

_KEY = "sp_compile"


class Source(enum.Enum):
    """Where a graph input comes from at run time."""

    ARGUMENT = "argument"  # key: number of the captured graph's input
    FOREST = "forest"  # key: name of a forest tensor
    TOKENS = "tokens"  # T, the number of physical tokens
    ROWS = "rows"  # B
    COLUMNS = "columns"  # L
    SIZE = "size"  # key: number of the captured graph's SymInt input
    HIDES = "hides"  # key: number of a padding mask; on the CPU, int64 [1], 0 if the mask is known to be nonzero at every token


@dataclasses.dataclass(frozen=True)
class Input:
    """Metadata of every placeholder of a rewritten graph."""

    source: Source
    key: int | str = 0


@dataclasses.dataclass(frozen=True)
class Origin:
    """Metadata of a rewritten node: the dense node it computes, on the tokens of the forest refined by `ahead`
    without the last `cut` columns, or on rows."""

    dense: str
    packed: bool
    ahead: int = 0
    cut: int = 0


def set_input(node: torch.fx.Node, given: Input) -> None:
    node.meta[_KEY] = given


def input_of(node: torch.fx.Node) -> Input:
    found = node.meta.get(_KEY)
    assert isinstance(found, Input), f"placeholder {node.name} has no source"
    return found


def set_origin(node: torch.fx.Node, origin: Origin) -> None:
    node.meta[_KEY] = origin


def origin_of(node: torch.fx.Node) -> Origin | None:
    found = node.meta.get(_KEY)
    return found if isinstance(found, Origin) else None


def set_suffix(node: torch.fx.Node, suffix: str, padding: int | None = None) -> None:
    """Says on which forest a node computes, by what is added to the names of forest tensors (`layout/refine.py`), and which input is the
    mask whose zeros are its `key_valid`."""
    node.meta["sp_compile_forest"] = suffix
    node.meta["sp_compile_padding"] = padding


def suffix_of(node: torch.fx.Node) -> str:
    return str(node.meta.get("sp_compile_forest", ""))


def padding_of(node: torch.fx.Node) -> int | None:
    """Number of the input by which attention hides padding; None if there is none, or more to it."""
    found: int | None = node.meta.get("sp_compile_padding")
    return found


def mark_lowered(node: torch.fx.Node) -> None:
    """Says that `select_kernels` has decided about a node."""
    node.meta["sp_compile_lowered"] = True


def is_lowered(node: torch.fx.Node) -> bool:
    return bool(node.meta.get("sp_compile_lowered"))


class Stage(enum.Enum):
    """What a graph may contain between two passes."""

    CAPTURED = "captured"  # the dense graph
    PACKED = "packed"  # physical tokens, attention markers without a forest
    MASKED = "masked"  # every attention is sp_compile.attention with its forest
    FORKED = "forked"  # every recurrence is an op that knows each token's predecessor
    COUNTED = "counted"  # reductions over tokens count each token as often as rows pass through it
    SUNK = "sunk"  # gathers to rows stand as late as possible
    LOWERED = "lowered"  # concrete implementations only


@dataclasses.dataclass(frozen=True)
class FiniteMask:
    """A mask that hides keys by finite scores; a query to which it hides every key has no place among shared tokens.

    Attributes:
        node: the captured graph's node of the [B, L] key mask (nonzero = visible), or of the (query, key) mask.
        matrix: which of the two.
        window: visible columns including the own one, or None.
        local: the mask also ends at borders of chunks or documents.
    """

    node: torch.fx.Node
    matrix: bool
    window: int | None = None
    local: bool = False


@dataclasses.dataclass
class Context:
    """What passes know besides the graph.

    Attributes:
        analysis: token layouts of the captured graph.
        module: the captured graph's module, which holds the constants; set by the runner.
        keys: numbers of the captured graph's inputs in which rows must agree to share; filled by `share_prefixes`.
        padding: input numbers of the padding masks of every attention layer, None for a layer without; filled by `share_prefixes`.
        finite: masks whose queries without visible keys have to be looked for in every call; filled by `share_prefixes`.
        trailing: some op reads padding like tokens (a recurrence), so that only what stands behind a row's last token may be dropped.
        counted: for each reduction over tokens, numbers of the masks at whose zeros nothing is added; filled by `expand_multiplicities`.
        refine: values that look ahead may be had on refined forests; set by `refine_sharing`.
        ahead_keys: those of `keys` that some token reads ahead of its own column; filled by `share_prefixes`.
        refined: the refined forests that are used, (columns ahead, last columns left out); filled by `share_prefixes`.
        unpacked: dense nodes whose rows a later op needs, with the op; filled by `share_prefixes`.
        kernels: op to implementation and reason; filled by `select_kernels`.
        shapes: the fakes of the graph's inputs (`metadata.Shapes`), once a pass needed any.
    """

    analysis: Analysis
    module: torch.fx.GraphModule | None = None
    keys: list[int] = dataclasses.field(default_factory=list)
    padding: list[int | None] = dataclasses.field(default_factory=list)
    finite: list[FiniteMask] = dataclasses.field(default_factory=list)
    trailing: bool = False
    counted: list[frozenset[int]] = dataclasses.field(default_factory=list)
    refine: bool = False
    ahead_keys: set[int] = dataclasses.field(default_factory=set)
    refined: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    unpacked: list[str] = dataclasses.field(default_factory=list)
    kernels: dict[str, str] = dataclasses.field(default_factory=dict)
    shapes: Any = None


@dataclasses.dataclass(frozen=True)
class PassResult:
    """A new graph and how many places changed."""

    graph: torch.fx.Graph
    changed: int


class Pass(Protocol):
    """A graph rewrite; implementations are frozen dataclasses."""

    @property
    def name(self) -> str: ...

    @property
    def requires(self) -> Stage: ...

    @property
    def provides(self) -> Stage: ...

    def __call__(self, graph: torch.fx.Graph, context: Context) -> PassResult: ...


def forest_input(graph: torch.fx.Graph, name: str) -> torch.fx.Node:
    """The graph input that holds a forest tensor; made on first use, after the other inputs."""
    made_of = name.replace("@", "_").replace("-", "_")
    return _placeholder(graph, f"forest_{made_of}", Input(Source.FOREST, name))


def hides_input(graph: torch.fx.Graph, padding: int) -> torch.fx.Node:
    """The graph input that says on the host whether a padding mask hides any token."""
    return _placeholder(graph, f"hides_{padding}", Input(Source.HIDES, padding))


def size_input(graph: torch.fx.Graph, source: Source, name: str, key: int = 0) -> torch.fx.Node:
    """The graph input that holds a size."""
    return _placeholder(graph, name, Input(source, key))


def _placeholder(graph: torch.fx.Graph, name: str, given: Input) -> torch.fx.Node:
    last: torch.fx.Node | None = None
    node: torch.fx.Node
    for node in graph.nodes:
        if node.op != "placeholder":
            break
        if input_of(node) == given:
            return node
        last = node
    first = next(iter(graph.nodes), None)
    if last is not None:
        with graph.inserting_after(last):
            made = graph.placeholder(name)
    elif first is not None:
        with graph.inserting_before(first):
            made = graph.placeholder(name)
    else:
        made = graph.placeholder(name)
    set_input(made, given)
    return made
