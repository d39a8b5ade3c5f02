"""Runs passes: checks what each requires and leaves, times, counts and diffs it, and can leave one out by name."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

from sp_compile.errors import InvalidOption, StageError
from sp_compile.ops import attention as _attention  # noqa: F401  (registers sp_compile::attention)
from sp_compile.ops import cross_entropy as _cross_entropy  # noqa: F401
from sp_compile.ops import rows as _rows  # noqa: F401
from sp_compile.ops import scans
from sp_compile.passes import markers
from sp_compile.passes.stage import Context, Pass, Stage, is_lowered

NEEDED = frozenset({"share_prefixes", "add_forest_masks", "fork_states", "select_kernels"})
"""Passes without which a shared graph is not right; switching one off switches sharing off."""


@dataclasses.dataclass(frozen=True)
class PassRecord:
    """What one pass did: places changed, seconds, and nodes added and removed by op."""

    name: str
    changed: int
    seconds: float
    added: dict[str, int]
    removed: dict[str, int]
    skipped: bool = False


Watcher = Callable[[int, str, "torch.fx.Graph", "torch.fx.Graph"], None]


def run_passes(
    module: torch.fx.GraphModule,
    context: Context,
    passes: Sequence[Pass],
    disabled: frozenset[str] = frozenset(),
    watch: Watcher | None = None,
) -> tuple[torch.fx.GraphModule, list[PassRecord]]:
    """Apply `passes` in order to a copy of the module's graph.

    Args:
        module: the captured graph; not changed.
        context: what the passes know; they add to it.
        disabled: names of passes to leave out; the stage they would have provided counts as reached.
        watch: called with (number, name, graph before, graph after) for each pass that ran.

    Raises:
        InvalidOption: `disabled` names no pass.
        StageError: a pass met or left a graph against its stage. A defect of the package.
    """
    unknown = disabled - {p.name for p in passes}
    if unknown:
        raise InvalidOption(f"disable names {sorted(unknown)}; known passes are {[p.name for p in passes]}")
    graph, stage = module.graph, Stage.CAPTURED
    context.module = module
    records: list[PassRecord] = []
    for number, one in enumerate(passes, start=1):
        if one.name in disabled:
            records.append(PassRecord(one.name, 0, 0.0, {}, {}, skipped=True))
            stage = one.provides
            continue
        if one.requires is not stage:
            raise StageError(f"pass {one.name} requires a graph at stage '{one.requires.value}', got '{stage.value}'")
        before, counts = graph, _counts(graph)
        copy = _copy(graph) if stage is not Stage.CAPTURED else graph
        started = time.perf_counter()
        result = one(copy, context)
        seconds = time.perf_counter() - started
        graph, stage = result.graph, one.provides
        check_stage(graph, stage)
        after = _counts(graph)
        records.append(PassRecord(one.name, result.changed, seconds, dict(after - counts), dict(counts - after)))
        if watch is not None:
            watch(number, one.name, before, graph)
    final = torch.fx.GraphModule(module, graph, class_name="SharedPrefixGraph")
    with GraphTransformObserver(final, "shared_prefix"):
        final.recompile()
    return final, records


def _copy(graph: torch.fx.Graph) -> torch.fx.Graph:
    copied = torch.fx.Graph()
    output = copied.graph_copy(graph, {})
    copied.output(output)
    return copied


def _counts(graph: torch.fx.Graph) -> collections.Counter[str]:
    return collections.Counter(_name(node) for node in graph.nodes if node.op not in ("placeholder", "output"))


def _name(node: torch.fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    target: Any = node.target
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


SEMANTIC = frozenset(
    getattr(torch.ops.sp_compile, name).default for name in ("attention", "unpack", "take_tokens", "cross_entropy_rows", *scans.FOREST)
)
"""Ops that stand for a choice of implementation until `select_kernels` has made it."""


_FORKED = frozenset({Stage.FORKED, Stage.COUNTED, Stage.SUNK, Stage.LOWERED})


def check_stage(graph: torch.fx.Graph, stage: Stage) -> None:
    """Lint the graph and check what may stand in it at a stage.

    Raises:
        StageError: a node is not allowed at this stage.
    """
    graph.lint()
    for node in graph.nodes:
        if node.op == "placeholder" and stage is not Stage.CAPTURED and "sp_compile" not in node.meta:
            raise StageError(f"placeholder {node.name} has no source at stage '{stage.value}'")
        marked = markers.MARKERS if stage in _FORKED else {markers.shared_attention} if stage is Stage.MASKED else set()
        if node.target in marked:
            raise StageError(f"node {node.name} is a marker at stage '{stage.value}'")
        if stage is Stage.LOWERED and node.target in SEMANTIC and not is_lowered(node):
            raise StageError(f"node {node.name} has no implementation at stage '{stage.value}'")
        if stage is not Stage.CAPTURED and "_site" in _name(node) and _name(node).startswith("sp_compile"):
            raise StageError(f"node {node.name} is a capture marker at stage '{stage.value}'")
