"""The runner checks stages, counts what passes did, leaves passes out by name, and does not touch the captured graph."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx

from sp_compile.analysis.interpret import Analysis
from sp_compile.errors import InvalidOption, StageError
from sp_compile.options import Options
from sp_compile.passes import markers
from sp_compile.passes.runner import check_stage, run_passes
from sp_compile.passes.stage import (
    Context,
    Input,
    Origin,
    PassResult,
    Source,
    Stage,
    forest_input,
    input_of,
    mark_lowered,
    origin_of,
    set_input,
    set_origin,
)


def _captured() -> torch.fx.GraphModule:
    """(x + x) * 2"""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(operator.mul, (graph.call_function(operator.add, (x, x)), 2)))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _context(graph: torch.fx.Graph) -> Context:
    return Context(Analysis(graph, None, None, {}))  # type: ignore[arg-type]


def _keep(graph: torch.fx.Graph) -> int:
    for node in graph.nodes:
        if node.op == "placeholder" and "sp_compile" not in node.meta:
            set_input(node, Input(Source.ARGUMENT, 0))
    return 0


@dataclasses.dataclass(frozen=True)
class Toy:
    """A pass that changes its graph by a function, which returns the number of changes."""

    name: str
    requires: Stage
    provides: Stage
    change: Callable[[torch.fx.Graph], int] = _keep

    def __call__(self, graph: torch.fx.Graph, context: Context) -> PassResult:
        copied = torch.fx.Graph()
        copied.output(copied.graph_copy(graph, {}))
        return PassResult(copied, self.change(copied))


def _negate(graph: torch.fx.Graph) -> int:
    """Every product becomes a difference, negated."""
    _keep(graph)
    found = [node for node in graph.nodes if node.target is operator.mul]
    for node in found:
        node.target = operator.sub
        with graph.inserting_after(node):
            made = graph.call_function(operator.neg, (node,))
        node.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)  # type: ignore[misc]
    return len(found)


PACK = Toy("pack", Stage.CAPTURED, Stage.PACKED)
NEGATE = Toy("negate", Stage.PACKED, Stage.PACKED, _negate)


def _run(*passes: Toy, **options: Any) -> Any:
    module = _captured()
    return run_passes(module, _context(module.graph), passes, **options)


def test_records_count_what_changed() -> None:
    made, records = _run(PACK, NEGATE)
    assert [(r.name, r.changed, r.added, r.removed, r.skipped) for r in records] == [
        ("pack", 0, {}, {}, False),
        ("negate", 1, {"sub": 1, "neg": 1}, {"mul": 1}, False),
    ]
    assert all(record.seconds >= 0 for record in records)
    assert made(torch.tensor(5)).item() == -8


def test_the_captured_graph_stays() -> None:
    module = _captured()
    before = str(module.graph)
    run_passes(module, _context(module.graph), [PACK, NEGATE])
    assert str(module.graph) == before
    assert module(torch.tensor(5)).item() == 20


def test_disabled_by_name() -> None:
    made, records = _run(PACK, NEGATE, disabled=frozenset({"negate"}))
    assert [(r.name, r.skipped, r.added) for r in records] == [("pack", False, {}), ("negate", True, {})]
    assert made(torch.tensor(5)).item() == 20


def test_a_disabled_pass_counts_as_done() -> None:
    """What follows may ask for the stage of a pass that was left out."""
    mask = Toy("mask", Stage.PACKED, Stage.MASKED)
    sink = Toy("sink", Stage.MASKED, Stage.SUNK)
    _, records = _run(PACK, mask, sink, disabled=frozenset({"mask"}))
    assert [record.skipped for record in records] == [False, True, False]


def test_unknown_name_to_disable() -> None:
    with pytest.raises(InvalidOption, match=r"\['nagate'\]; known passes are \['pack', 'negate'\]"):
        _run(PACK, NEGATE, disabled=frozenset({"nagate"}))


def test_wrong_order() -> None:
    with pytest.raises(StageError, match="pass negate requires a graph at stage 'packed', got 'captured'"):
        _run(NEGATE)


def test_watch_sees_every_graph() -> None:
    seen: list[tuple[int, str, int, int]] = []
    _run(PACK, NEGATE, watch=lambda n, name, before, after: seen.append((n, name, len(before.nodes), len(after.nodes))))
    assert seen == [(1, "pack", 4, 4), (2, "negate", 4, 5)]


def test_a_pass_may_not_leave_a_broken_graph() -> None:
    def swap(graph: torch.fx.Graph) -> int:
        _keep(graph)
        first, second = (node for node in graph.nodes if node.op == "call_function")
        second.append(first)
        return 1

    with pytest.raises(RuntimeError, match="used before it has been defined"):
        _run(Toy("swap", Stage.CAPTURED, Stage.PACKED, swap))


# -- what may stand at a stage -----------------------------------------------------------------------------------------------------


def _graph_with(target: Any, *, source: bool = True) -> torch.fx.Graph:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    if source:
        set_input(x, Input(Source.ARGUMENT, 0))
    graph.output(graph.call_function(target, (x,)))
    return graph


LATE = (Stage.FORKED, Stage.COUNTED, Stage.SUNK, Stage.LOWERED)
ATTENTION = torch.ops.sp_compile.attention.default
SITE = torch.ops.sp_compile.refusal_site.default


@pytest.mark.parametrize(
    ("target", "stages", "said"),
    [
        (markers.shared_attention, (Stage.MASKED, *LATE), "is a marker"),
        (markers.shared_scan, LATE, "is a marker"),
        (SITE, (Stage.PACKED, Stage.MASKED, *LATE), "is a capture marker"),
        (torch.ops.sp_compile.ssd_scan.default, (Stage.LOWERED,), "has no implementation"),
        (ATTENTION, (Stage.LOWERED,), "has no implementation"),
        (torch.ops.sp_compile.unpack.default, (Stage.LOWERED,), "has no implementation"),
        (torch.sin, (), ""),
    ],
)
def test_grammar(target: Any, stages: tuple[Stage, ...], said: str) -> None:
    for stage in Stage:
        graph = _graph_with(target)
        if stage in stages:
            with pytest.raises(StageError, match=said):
                check_stage(graph, stage)
        else:
            check_stage(graph, stage)


def test_grammar_of_inputs() -> None:
    check_stage(_graph_with(torch.sin, source=False), Stage.CAPTURED)
    with pytest.raises(StageError, match="placeholder x has no source at stage 'packed'"):
        check_stage(_graph_with(torch.sin, source=False), Stage.PACKED)


def test_grammar_of_a_chosen_kernel() -> None:
    graph = _graph_with(ATTENTION)
    mark_lowered(next(node for node in graph.nodes if node.target is ATTENTION))
    check_stage(graph, Stage.LOWERED)


def test_a_marker_does_not_run() -> None:
    nothing = (None,) * 4
    with pytest.raises(StageError, match="add_forest_masks did not run"):
        markers.shared_attention(*(torch.ones(1),) * 3, *nothing, scale=1.0, window=None, chunk=None, softcap=None)


def test_metadata_is_typed() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    with pytest.raises(AssertionError, match="placeholder x has no source"):
        input_of(x)
    set_input(x, Input(Source.ARGUMENT, 3))
    assert input_of(x) == Input(Source.ARGUMENT, 3)
    made = graph.call_function(torch.sin, (x,))
    assert origin_of(made) is None
    set_origin(made, Origin("sin", True))
    assert origin_of(made) == Origin("sin", True)
    graph.output(made)
    first, second = forest_input(graph, "end"), forest_input(graph, "end")
    assert first is second
    assert [node.name for node in graph.nodes][:2] == ["x", "forest_end"]


def test_options_reach_the_runner() -> None:
    assert Options(disable=("sink_unpacking",)).disable == ("sink_unpacking",)
