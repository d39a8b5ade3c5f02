"""The torch.compile backend: capture, analyse, rewrite, lower, compile, run.

`torch.compile(model, backend="shared_prefix")` arrives in `shared_prefix` with a captured graph. `compile_region` is the whole
compiler; `region.Region` is what runs on every call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from sp_compile import options as option_parser
from sp_compile.analysis.inputs import GraphInputs, read_inputs
from sp_compile.analysis.interpret import analyse
from sp_compile.analysis.packed_inputs import read_packed_inputs
from sp_compile.analysis.refusals import tell_rows
from sp_compile.capture import install, require_tested, set_backend
from sp_compile.capture.checkpoint import inline_checkpoints
from sp_compile.capture.data_sizes import is_sized_by_data, switch_back
from sp_compile.capture.graphs import find_held_batch, is_module_state, placeholders
from sp_compile.capture.local_sums import functional_sums
from sp_compile.capture.numbers import freeze_numbers
from sp_compile.capture.shapes import capture_broken, ensure_symbolic
from sp_compile.capture.size_checks import without_size_checks
from sp_compile.capture.split_graphs import split_refusal
from sp_compile.capture.torch_attention import mark_attention
from sp_compile.capture.torch_convolutions import mark_convolutions
from sp_compile.capture.traces import watch_traces
from sp_compile.capture.transforms import refuse_transforms, restored_levels
from sp_compile.debug import dump
from sp_compile.lowering.select import SelectKernels
from sp_compile.options import Options
from sp_compile.passes.add_forest_masks import AddForestMasks
from sp_compile.passes.block_routers import BlockRouters
from sp_compile.passes.expand_multiplicities import ExpandMultiplicities
from sp_compile.passes.fork_states import ForkStates
from sp_compile.passes.insert_layout_conversions import InsertLayoutConversions
from sp_compile.passes.reduce_over_ranks import ReduceOverRanks
from sp_compile.passes.refine_sharing import RefineSharing
from sp_compile.passes.runner import PassRecord, run_passes
from sp_compile.passes.share_prefixes import SharePrefixes
from sp_compile.passes.sink_unpacking import SinkUnpacking
from sp_compile.passes.stage import Context, Pass, origin_of
from sp_compile.sharing import packed_tokens, tokens_in_force


def pipeline(options: Options) -> list[Pass]:
    """The passes in order."""
    return [
        RefineSharing(),  # decides on which forest share_prefixes computes what looks ahead
        SharePrefixes(),
        AddForestMasks(),  # needs the markers that share_prefixes leaves
        ForkStates(),  # beside it: recurrences get the same forest
        ExpandMultiplicities(options.count_padding),  # before gathers move: a reduction stands beside the one it reads
        *([BlockRouters(options.router_blocks)] if options.router_blocks else []),  # anywhere after share_prefixes has made the products
        SinkUnpacking(),  # after all packed nodes exist, so that gathers can move past every one of them
        *_over_ranks(options),  # after gathers, which need rows, have gone as far as they can
        SelectKernels(options.kernels),  # last: later passes would not know the implementations
    ]


def _over_ranks(options: Options) -> list[Pass]:
    group = options.context_parallel
    if group is None:
        return []
    given = group.size(), group.group_name
    return [ReduceOverRanks(*given), InsertLayoutConversions(*given, options.context_attention)]


@dataclasses.dataclass(frozen=True)
class Shared:
    """A rewritten graph and everything that was found out on the way.

    Attributes:
        graph: the graph on physical tokens; its placeholders carry `passes.stage.Input`.
        context: what the passes found.
        records: one per pass.
        inputs: how the captured graph's inputs were read.
        numbers: Python floats among the inputs whose present values are written into the graph.
    """

    graph: torch.fx.GraphModule
    context: Context
    records: list[PassRecord]
    inputs: GraphInputs
    numbers: dict[int, float]


def compile_region(module: torch.fx.GraphModule, values: Sequence[Any], options: Options, tokens: int | None = None) -> Shared:
    """Prove and rewrite: from a captured dense graph to one on physical tokens.

    Args:
        module: the captured graph.
        values: its inputs.
        options: the user's.
        tokens: T if the inputs are packed already, else None.

    Raises:
        CannotShare: something was not proved; nothing has been changed.
    """
    refuse_transforms(module)
    module, numbers = freeze_numbers(inline_checkpoints(module), values)
    module = mark_attention(mark_convolutions(functional_sums(without_size_checks(module))), values, packed=tokens is not None)
    inputs = read_inputs(module.graph, values) if tokens is None else read_packed_inputs(module.graph, values, tokens)
    with restored_levels():
        context = Context(analyse(module, inputs))
    watch = dump.watcher(options.dump, module, context)
    graph, records = run_passes(module, context, pipeline(options), frozenset(options.disable), watch)
    tell_rows(module.graph.nodes, context.analysis.layout, options.strict)
    return Shared(graph, context, records, inputs, numbers)


def _keeps_data_sizes(variant: Any) -> bool:
    """Whether a graph was rewritten so that all sizes that depend on data are those of physical tokens.

    Anything else is better left to Dynamo, who breaks the graph there: the inner compiler may not know such sizes.
    """
    if variant.shared is None:
        return False
    found = {node.name: info.value for node, info in variant.shared.context.analysis.nodes.items()}
    origins = [origin for node in variant.shared.graph.graph.nodes if (origin := origin_of(node)) is not None and not origin.packed]
    return not any(is_sized_by_data(found.get(origin.dense)) for origin in origins)


def shared_prefix(
    module: torch.fx.GraphModule, values: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """The backend's entry point, called by Dynamo for every captured graph.

    Args:
        module: the captured graph.
        values: its inputs.
        options: see `sp_compile.options.Options`.
    """
    from sp_compile.region import make_region

    chosen = option_parser.parse(options)
    require_tested(module)
    again, split = install(), split_refusal(values)
    watch_traces(tokens_in_force)
    find_held_batch(module.graph)
    if split is None:
        given = [
            v
            for node, v in zip(placeholders(module.graph), values, strict=True)
            if isinstance(v, torch.Tensor) and not is_module_state(node)
        ]
        packed = packed_tokens(given)
        goes_on = ensure_symbolic(module.graph, values, again=again, tokens=packed)
        made = make_region(module, values, chosen)
        refusals = [variant.refusal for variant in made.__self__.variants if variant.refusal is not None]  # type: ignore[attr-defined]
        if goes_on and chosen.strict and refusals and packed is None:
            raise refusals[0]
        if goes_on and (packed is not None or not all(map(_keeps_data_sizes, made.__self__.variants))):  # type: ignore[attr-defined]
            raise capture_broken()
        return made
    switch_back()
    return make_region(module, values, chosen, split)


set_backend(shared_prefix)
install()
watch_traces(tokens_in_force)
