"""What happened and why, as text for people."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch

from sp_compile.capture.graphs import example_of, placeholders
from sp_compile.debug import account, regions
from sp_compile.debug.regions import Bucket, History, Region, Variant
from sp_compile.errors import InvalidInput, SharedPrefixError
from sp_compile.passes.runner import PassRecord

MOST = 12
"""Lines of one kind that are shown of a region."""

Lines = Iterator[tuple[str, str]]


def explain(model: object = None) -> str:
    """Readable text about the graphs that the backend has compiled: sizes, keys, passes, kernels, refusals, compilations.

    Args:
        model: a module, compiled or not, or a compiled function that uses one: only graphs that were called with its parameters are
            described. None: all graphs of this process, and what the latest call did.

    Raises:
        InvalidInput: `model` is no module and uses none.
    """
    found = [(region, history) for region, history in regions.known() if history.calls or [*region.variants, *region.packed_forms]]
    if model is None:
        head = _latest_call()
    else:
        wanted = _parameters(model)
        found = [(region, history) for region, history in found if _state(region, history) & wanted]
        head = f"shared_prefix: {len(found)} {_plural('graph', len(found))} of this model"
    if not found:
        return f"shared_prefix: nothing was compiled{' for this model' if model is not None else ''} in this process\n"
    return "\n".join([head + "\n", *(_region(region, history) for region, history in found)])


def _latest_call() -> str:
    try:
        run = account.last_run()
    except SharedPrefixError:
        return "shared_prefix: nothing has run yet"
    tokens = f"{run.logical_tokens} logical tokens computed as {run.physical_tokens} physical, sharing {run.sharing:.2f}"
    tokens += "".join(f", {count} for what looks {ahead} {_plural('column', ahead)} ahead" for ahead, count in run.refined_tokens.items())
    return f"shared_prefix: the latest call ran {run.regions} {_plural('graph', run.regions)}: {tokens}"


def _parameters(model: object) -> set[int]:
    """Addresses of the parameters of a module, or of the modules that a function uses."""
    if isinstance(model, torch.nn.Module):
        return {id(parameter) for parameter in model.parameters()}
    function: Any = inspect.unwrap(getattr(model, "_torchdynamo_orig_callable", model)) if callable(model) else None
    used: list[object] = [getattr(function, "__self__", None)]
    if inspect.ismethod(function) or inspect.isfunction(function):
        variables = inspect.getclosurevars(function)
        used += [*variables.nonlocals.values(), *variables.globals.values()]
    modules = [value for value in used if isinstance(value, torch.nn.Module)]
    if not modules:
        raise InvalidInput(f"explain: expected a module, or a function that uses one, got {type(model).__name__}. Pass the model itself.")
    return {id(parameter) for module in modules for parameter in module.parameters()}


def _state(region: Region, history: History) -> set[int]:
    alive = {id(parameter) for parameter in (reference() for reference in history.state) if parameter is not None}
    return alive | {id(parameter) for parameter in region.module.parameters()}


def _region(region: Region, history: History) -> str:
    texts: dict[str, list[str]] = {}
    for label, text in _region_lines(region, history):
        texts.setdefault(label, []).append(text)
    lines = [f"  {label if not number else '':<11}{text}" for label, group in texts.items() for number, text in enumerate(group)]
    return "\n".join([regions.folder_name(region.number, 0), *lines]) + "\n"


def _region_lines(region: Region, history: History) -> Lines:
    yield "calls", f"{history.shared_calls} shared, {history.dense_calls} dense"
    yield from _last_call(region, history)
    for number, variant in enumerate([*region.variants, *region.packed_forms]):
        if len([*region.variants, *region.packed_forms]) > 1:
            yield "variant", f"{number}, for other relations between the sizes of the inputs" if number else "0"
        if variant.refusal is not None:
            yield "refused", str(variant.refusal)
        elif variant.context is not None:
            yield from _variant(region, variant)
    yield from _compiled("dense form", region.dense_buckets, region.options.inner, _captured_sizes(region))
    if region.options.dump is not None and any(variant.context is not None for variant in [*region.variants, *region.packed_forms]):
        yield "dump", os.path.join(region.options.dump, regions.folder_name(region.number, 0))


def _last_call(region: Region, history: History) -> Lines:
    if not history.calls:
        return
    rows, columns, logical, physical = history.sizes
    batch = f"{rows} rows x {columns} columns: " if rows is not None else ""
    ran = f"computed as {physical} physical, sharing {logical / max(physical, 1):.2f}" if physical < logical else "computed densely"
    yield "last call", f"{batch}{logical} logical tokens {ran}"
    if history.said and history.said not in {str(variant.refusal) for variant in [*region.variants, *region.packed_forms]}:
        yield "last call", f"because {history.said}"


def _variant(region: Region, variant: Variant) -> Lines:
    context = variant.context
    assert context is not None, "a variant without refusal has a context"
    nodes = placeholders(region.module.graph)
    keys = [regions.input_name(nodes[number]) for number in context.keys]
    yield "keys", f"{', '.join(keys)} (rows share tokens up to the first column in which they differ in one of these)"
    for ahead, cut in context.refined:
        yield "refined", f"forest refined by {ahead}" + (f", without its last {cut} {_plural('column', cut)}" if cut else "")
    yield from (("passes", line) for line in _passes(variant.records))
    yield from (("kernels", f"{op}: {text}") for op, text in context.kernels.items())
    yield from _some("unpacked", list(dict.fromkeys(context.unpacked)), "nothing before the end of the graph")
    yield from _compiled("shared form", variant.buckets, region.options.inner, {})


def _passes(records: Sequence[PassRecord]) -> Iterator[str]:
    width = max((len(one.name) for one in records), default=0)
    for one in records:
        if one.skipped:
            yield f"{one.name:<{width}}  switched off"
            continue
        ops = [f"+{_times(op, n)}" for op, n in one.added.items()] + [f"-{_times(op, n)}" for op, n in one.removed.items()]
        shown = " ".join(ops[:MOST]) + (f" and {len(ops) - MOST} more" if len(ops) > MOST else "")
        yield f"{one.name:<{width}}  {one.changed:>4} {_plural('change', one.changed):<7} {one.seconds:7.3f} s  {shown}".rstrip()


def _compiled(form: str, buckets: Sequence[Bucket], inner: str, names: Mapping[str, str]) -> Lines:
    if not buckets:
        yield "compiled", f"{form}: never"
        return
    seconds = sum(bucket.seconds for bucket in buckets)
    yield "compiled", f"{form}: {len(buckets)} {_plural('time', len(buckets))} by {inner}, {seconds:.2f} s"
    for number, bucket in enumerate(buckets, start=1):
        guards = _guards(bucket, names) if bucket.exact is None else [f"{names.get(n, n)} = {size}" for n, size in bucket.exact.items()]
        shown = " and ".join(guards[:MOST]) + (f" and {len(guards) - MOST} more" if len(guards) > MOST else "")
        yield "compiled", f"  {number}: for {f'sizes with {shown}' if guards else 'all sizes'}"


def _guards(bucket: Bucket, names: Mapping[str, str]) -> list[str]:
    """The conditions on the sizes, with `names` for the symbols that have a better one."""
    symbols = {symbol: sympy.Symbol(names.get(name, name), integer=True) for name, symbol in bucket.symbols.items()}
    return list(dict.fromkeys(str(guard.subs(symbols)) for guard in bucket.guards if guard != sympy.true))


def _captured_sizes(region: Region) -> dict[str, str]:
    """What Dynamo calls the rows and the columns."""
    context = next((variant.context for variant in [*region.variants, *region.packed_forms] if variant.context is not None), None)
    if context is None or context.analysis.inputs is None:
        return {}
    if context.analysis.symbols.packed:
        return {}
    nodes, sizes = placeholders(region.module.graph), context.analysis.inputs.sizes
    return {str(example_of(nodes[number]).shape[dim]): name for (number, dim), name in ((sizes.batch, "B"), (sizes.columns, "L"))}


def _some(label: str, texts: Sequence[str], none: str) -> Lines:
    if not texts:
        yield label, none
    yield from ((label, text) for text in texts[:MOST])
    if len(texts) > MOST:
        yield label, f"and {len(texts) - MOST} more"


def _times(name: str, count: int) -> str:
    return name if count == 1 else f"{count} {name}"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
