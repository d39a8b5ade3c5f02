"""What runs on every call of a captured graph: find the forest, choose shared or dense, feed the compiled graph."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.fx

from sp_compile.analysis.given_masks import Reading, pair_inputs, read_all, relied_inputs
from sp_compile.analysis.inputs import Coincidences, GraphInputs, constants_hold, is_single, static_refusal
from sp_compile.backend import Shared, compile_region
from sp_compile.batch import Padding, find_padding, hides, make_forest
from sp_compile.blocks import BlockTables, find_block_tables
from sp_compile.capture.dense_graph import without_sites
from sp_compile.capture.graphs import example_of, is_symbolic, placeholders, size_name
from sp_compile.capture.numbers import unchanged
from sp_compile.debug import account, calls, regions
from sp_compile.errors import CannotShare, InvalidOption, NothingToShare, SharedPrefixError
from sp_compile.hidden import HiddenQueries, find_hidden_queries
from sp_compile.inner import LOCK, Bucket, TensorSpec, compile_bucket, trained_in
from sp_compile.layout.forest import Forest
from sp_compile.layout.tensors import symbolic_shape
from sp_compile.ops import sites as _sites  # noqa: F401  (site ops have to exist before they can be removed)
from sp_compile.options import Options
from sp_compile.packed import PackedGraph, PackedGraphs
from sp_compile.passes.runner import PassRecord
from sp_compile.passes.stage import Context, Source, input_of
from sp_compile.ranks import run_over_ranks
from sp_compile.sharing import forest_of_call, packed_tokens, require_plan

MAX_BUCKETS = 8
"""Compiled forms kept per graph; more means that sizes are specialised on every call, which would never end."""
MAX_REFUSALS = 8
"""Refused readings per graph; after as many, no other one is tried."""

_KEPT = "padding is computed: a part of the compiled function that is not in this graph may read it"


def make_region(
    module: torch.fx.GraphModule, values: Sequence[Any], options: Options, refusal: CannotShare | None = None
) -> Callable[..., Any]:
    """The callable for one captured graph. A graph without symbolic rows and columns is compiled densely, and so is one that is refused
    already."""
    dense = without_sites(module)
    region = Region(module, dense, options)
    if refusal is not None:
        region.refuse(refusal, warn=any(isinstance(v, torch.Tensor) and v.dim() == 2 and not v.is_floating_point() for v in values))
    elif packed_tokens(region.packed.tensors(values)) is not None:
        pass  # rewritten when it is called
    elif not any(is_symbolic(example_of(node)) for node in placeholders(module.graph)):
        refused, warn = static_refusal(module.graph, values)
        region.refuse(refused, warn=warn)
    else:
        region.variant_for(values)
    return region.__call__  # a function: depyf reads the code object of what a backend returns


@dataclasses.dataclass
class Variant:
    """One way to read the inputs, with its rewritten graph or the reason why there is none; that holds under `ties`, or always."""

    shared: Shared | None = None
    refusal: CannotShare | None = None
    padding: Padding | None = None
    checks: list[HiddenQueries | BlockTables] = dataclasses.field(default_factory=list)
    trained: tuple[bool, ...] = ()
    given: dict[int, Reading] = dataclasses.field(default_factory=dict)
    buckets: list[Bucket] = dataclasses.field(default_factory=list)
    ties: Coincidences | None = None

    @property
    def context(self) -> Context | None:
        return self.shared.context if self.shared is not None else None

    @property
    def graph(self) -> torch.fx.GraphModule | None:
        return self.shared.graph if self.shared is not None else None

    @property
    def records(self) -> list[PassRecord]:
        return self.shared.records if self.shared is not None else []

    @property
    def inputs(self) -> GraphInputs | None:
        return self.shared.inputs if self.shared is not None else None

    def fits(self, values: Sequence[Any]) -> bool:
        """Whether every dimension tied to B or L has that size in this call, every written-in number its value, and the same inputs
        require grad: what does not may be computed on rows. Masks that were passed in have to hide what they hid, too."""
        if read_all(self.given, values) != self.given:
            return False
        if self.shared is None:
            return self.ties is None or self.ties.hold(values)
        sizes = self.shared.inputs.sizes
        rows, columns = values[sizes.batch[0]].shape
        tied = all(values[n].shape[d] == rows for n, d in sizes.batch_ties) and all(
            values[n].shape[d] == columns for n, d in sizes.columns_ties
        )
        same = tied and self.trained == trained_in(values)
        return same and unchanged(self.shared.numbers, values) and constants_hold(self.shared.inputs, values)


def _accepting(buckets: Sequence[Bucket], sizes: Mapping[str, int], trained: tuple[bool, ...]) -> Bucket | None:
    return next((bucket for bucket in buckets if bucket.accepts(sizes, trained)), None)


class Region:
    """The compiled form of one captured graph."""

    def __init__(self, module: torch.fx.GraphModule, dense: torch.fx.GraphModule, options: Options) -> None:
        self.module, self.dense, self.options = module, dense, options
        self.variants: list[Variant] = []
        self.dense_buckets: list[Bucket] = []
        self.warned: set[str] = set()
        self.goes_on = bool(getattr(getattr(module, "compile_subgraph_reason", None), "graph_break", False))
        self.number = regions.register(self, module)
        self.packed = PackedGraphs(
            module, lambda values, tokens: compile_region(module, values, options, tokens), options.inner, MAX_BUCKETS
        )

    # -- variants --------------------------------------------------------------------------------------------------------------

    def variant_for(self, values: Sequence[Any]) -> Variant:
        found = self._variant(values)
        if found is not None:
            return found
        with LOCK:
            found = self._variant(values)  # another thread may have made it
            if found is not None:
                return found
            try:
                shared = compile_region(self.module, values, self.options)
                checks: list[HiddenQueries | BlockTables] = [
                    *find_hidden_queries(shared.context, self.module),
                    *find_block_tables(shared.context, self.module),
                ]
            except InvalidOption:
                raise
            except CannotShare as refused:
                given = read_all(pair_inputs(self.module.graph), values)
                return self.refuse(refused, given=given, ties=Coincidences.of(self.module.graph, values))
            except (
                SharedPrefixError, AssertionError, RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError,
                NotImplementedError,
            ) as error:  # fmt: skip
                # a defect of the package must not break the user's run, and must not pass unseen
                why = CannotShare(f"internal error, {type(error).__name__}: {error}", advice="Please report it with the model.")
                why.__cause__ = error
                return self.refuse(why, ties=Coincidences.of(self.module.graph, values))
            given = read_all(relied_inputs(shared.context.analysis), values)
            made = Variant(shared, None, find_padding(shared.graph, shared.context), checks, trained_in(values), given)
            self.variants.append(made)
            return made

    def _variant(self, values: Sequence[Any]) -> Variant | None:
        found = next((variant for variant in self.variants if variant.fits(values)), None)
        refused = [variant for variant in self.variants if variant.refusal is not None]
        return refused[0] if found is None and len(refused) >= MAX_REFUSALS else found

    def refuse(
        self, refused: CannotShare, warn: bool = True, given: dict[int, Reading] | None = None, ties: Coincidences | None = None
    ) -> Variant:
        warn = warn and not isinstance(refused, NothingToShare)
        if warn:
            self._warn(refused)
        made = Variant(refusal=refused, given=given or {}, ties=ties)
        self.variants.append(made)
        return made

    @property
    def packed_forms(self) -> list[PackedGraph]:
        """The forms for calls inside of `share`."""
        return [form for form in self.packed.forms.values() if isinstance(form, PackedGraph)]

    # -- one call -----------------------------------------------------------------------------------------------------------------

    def __call__(self, *values: Any) -> Any:
        forest = forest_of_call(self.packed.tensors(values))
        require_plan(forest, self.options.context_parallel)
        if forest is not None:
            return self._run_packed(values, forest)
        variant = self.variant_for(values)
        inside = self.goes_on or not calls.returns_to_caller()
        if self.options.context_parallel is not None:
            return run_over_ranks(self, variant, values, inside)
        if isinstance(variant.refusal, NothingToShare):
            single = any(is_single(value) for value in values)
            return self._run_dense(values, note=variant.refusal.reason) if single else self._run_dense(values, idle=True)
        if variant.refusal is not None:
            return self._run_dense(values, refused=str(variant.refusal))
        forest = self._forest(variant, values, None if inside else variant.padding)
        if forest.sharing < self.options.min_sharing or forest.num_tokens < 2:
            little = f"sharing {forest.sharing:.3f} is below min_sharing {self.options.min_sharing}"
            return self._run_dense(values, forest=forest, note=little + self._keys_note(variant))
        unfit = self._unfit(variant, values, forest)
        if unfit is not None:
            return self._run_dense(values, refused=str(unfit))
        bucket = self._bucket(variant, values, forest)
        assert variant.shared is not None, "a variant without refusal is shared"
        account.record(self, values, forest=forest, variant=variant, note=_KEPT if inside and variant.padding is not None else "")
        return bucket.call(*self._feed(variant, values, forest))

    def _unfit(self, variant: Variant, values: Sequence[Any], forest: Forest) -> CannotShare | None:
        """Why this batch cannot be shared although the graph can be."""
        for check in variant.checks:
            why = check.why_not(values, torch.from_numpy(forest.index >= 0))
            if why is not None:
                self._warn(why)
                return why
        return None

    def _warn(self, refused: CannotShare) -> None:
        if self.options.strict or self.options.context_parallel is not None:
            raise refused
        if str(refused) not in self.warned:
            self.warned.add(str(refused))
            warnings.warn(f"shared_prefix: {refused} The dense graph runs.", stacklevel=2)

    def _run_packed(self, values: Sequence[Any], forest: Forest) -> Any:
        if forest.num_tokens == 1 and forest.num_columns == 1:
            return self._run_dense(values, forest=forest, note="one token has nothing to share")
        if forest.num_tokens == 0:  # a batch of padding only; torch takes a size of 0 for a constant, so that no dimension runs over tokens
            return self._run_dense(values, forest=forest, note="there are no tokens")
        with LOCK:
            form = self.packed.form(values, forest)
        bucket = form.bucket(values, forest)
        account.record(self, values, forest=forest, variant=form)
        return bucket.call(*form.feed(values, forest))

    @staticmethod
    def _forest(variant: Variant, values: Sequence[Any], padding: Padding | None) -> Forest:
        assert variant.shared is not None, "a variant without refusal is shared"
        return make_forest(variant.shared.inputs, variant.shared.context, padding, values)

    def _sizes(self, variant: Variant, values: Sequence[Any], forest: Forest) -> dict[str, int]:
        assert variant.shared is not None, "a variant without refusal is shared"
        rows, columns = values[variant.shared.inputs.sizes.batch[0]].shape
        sizes = {"T": forest.num_tokens, "B": int(rows), "L": int(columns)}
        for node in placeholders(variant.shared.graph.graph):
            given = input_of(node)
            if given.source is Source.SIZE:
                sizes[str(self._size_name(variant.shared.inputs, variant.shared.inputs.fakes[int(given.key)]))] = int(
                    values[int(given.key)]
                )
            elif given.source is Source.FOREST:
                shape = symbolic_shape(str(given.key))[0]
                if any(isinstance(name, str) and name not in sizes for name in shape):
                    real = self._forest_tensor(forest, str(given.key), variant, values).shape
                    sizes.update((name, int(size)) for name, size in zip(shape, real, strict=True) if isinstance(name, str))
        return sizes

    def _bucket(self, variant: Variant, values: Sequence[Any], forest: Forest) -> Bucket:
        sizes = self._sizes(variant, values, forest)
        found = _accepting(variant.buckets, sizes, variant.trained)
        if found is not None:
            return found
        with LOCK:
            found = _accepting(variant.buckets, sizes, variant.trained)
            if found is not None:
                return found
            if len(variant.buckets) >= MAX_BUCKETS:
                raise RuntimeError(
                    f"the inner compiler specialised this graph to {MAX_BUCKETS} ranges of sizes already; sizes now are {sizes}"
                )
            assert variant.shared is not None, "a variant without refusal is shared"
            inputs = [self._spec(variant, node, values, forest) for node in placeholders(variant.shared.graph.graph)]
            made = compile_bucket(variant.shared.graph, inputs, sizes, self.options.inner, variant.trained)
            variant.buckets.append(made)
            return made

    def _spec(self, variant: Variant, node: torch.fx.Node, values: Sequence[Any], forest: Forest) -> Any:
        given = input_of(node)
        assert variant.shared is not None, "a variant without refusal is shared"
        if given.source is Source.ARGUMENT:
            value, fake = values[int(given.key)], variant.shared.inputs.fakes[int(given.key)]
            if isinstance(value, torch.Tensor) and any(isinstance(s, torch.SymInt) for s in fake.shape):
                return TensorSpec(tuple(self._size_name(variant.shared.inputs, s) for s in fake.shape), value.dtype, value.device)
            return value
        if given.source is Source.FOREST:
            tensor = self._forest_tensor(forest, str(given.key), variant, values)
            return TensorSpec(symbolic_shape(str(given.key))[0], tensor.dtype, tensor.device)
        if given.source is Source.HIDES:
            return TensorSpec((1,), torch.int64, torch.device("cpu"))
        if given.source is Source.SIZE:
            return self._size_name(variant.shared.inputs, variant.shared.inputs.fakes[int(given.key)])
        return {Source.TOKENS: "T", Source.ROWS: "B", Source.COLUMNS: "L"}[given.source]

    def _size_name(self, inputs: GraphInputs, size: Any) -> int | str:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expr: sympy.Expr = size.node.expr
        if expr == inputs.symbols.batch:
            return "B"
        return "L" if expr == inputs.symbols.columns else str(expr)

    @staticmethod
    def _device(variant: Variant, values: Sequence[Any]) -> torch.device:
        assert variant.shared is not None, "a variant without refusal is shared"
        device: torch.device = values[variant.shared.inputs.sizes.batch[0]].device
        return device

    def _forest_tensor(self, forest: Forest, name: str, variant: Variant, values: Sequence[Any]) -> torch.Tensor:
        return forest.tensor(name, self._device(variant, values))

    def _feed(self, variant: Variant, values: Sequence[Any], forest: Forest) -> list[Any]:
        assert variant.shared is not None, "a variant without refusal is shared"
        sizes = {Source.TOKENS: forest.num_tokens, Source.ROWS: forest.num_rows, Source.COLUMNS: forest.num_columns}
        fed: list[Any] = []
        wanted = [input_of(node) for node in placeholders(variant.shared.graph.graph)]
        names = [str(given.key) for given in wanted if given.source is Source.FOREST]
        forest.tensors(names, self._device(variant, values))  # what is missing travels in one copy
        for given in wanted:
            if given.source is Source.ARGUMENT:
                value = values[int(given.key)]
                symbolic = isinstance(value, torch.Tensor) and any(
                    isinstance(s, torch.SymInt) for s in variant.shared.inputs.fakes[int(given.key)].shape
                )
                fed.append(value.contiguous() if symbolic else value)
            elif given.source is Source.FOREST:
                fed.append(self._forest_tensor(forest, str(given.key), variant, values))
            elif given.source is Source.HIDES:
                fed.append(hides(values[int(given.key)], forest))
            elif given.source is Source.SIZE:
                fed.append(values[int(given.key)])
            else:
                fed.append(sizes[given.source])
        return fed

    # -- the dense graph ------------------------------------------------------------------------------------------------------

    def _keys_note(self, variant: Variant) -> str:
        """What rows had to agree in besides the token ids, if anything."""
        numbers = variant.shared.context.keys if variant.shared is not None else []
        names = [regions.input_name(placeholders(self.module.graph)[number]) for number in numbers]
        return f"; rows have to agree in {', '.join(names)}" if len(names) > 1 else ""

    def _run_dense(self, values: Sequence[Any], **said: Any) -> Any:
        if self.options.count_padding is not None:
            raise InvalidOption(
                f"option count_padding is set, but nothing is shared: {said.get('refused') or said.get('note') or 'no tokens'}"
            )
        bucket = self._dense_bucket(values)
        account.record(self, values, **said)
        return bucket.call(*self._dense_feed(values))

    def _dense_bucket(self, values: Sequence[Any]) -> Bucket:
        sizes, trained = self._dense_sizes(values), trained_in(values)
        found = _accepting(self.dense_buckets, sizes, trained)
        if found is not None:
            return found
        with LOCK:
            found = _accepting(self.dense_buckets, sizes, trained)
            if found is not None:
                return found
            if sum(bucket.trained == trained for bucket in self.dense_buckets) >= MAX_BUCKETS:
                raise RuntimeError(
                    f"the inner compiler specialised the dense graph to {MAX_BUCKETS} ranges of sizes already; sizes now are {sizes}"
                )
            # The first sizes get a form of their own, the faster one, as torch does; not where batches have shared: sizes change there.
            before = [*(bucket.trained == trained for bucket in self.dense_buckets), *(bool(v.buckets) for v in self.variants)]
            exact, inputs = bool(sizes) and not any(before), list[Any]()
            for node, value in zip(placeholders(self.dense.graph), values, strict=True):
                example = example_of(node)
                if isinstance(example, torch.Tensor) and any(map(is_symbolic, example.shape)):
                    shape = tuple(value.shape) if exact else tuple(size_name(s) for s in example.shape)
                    inputs.append(TensorSpec(shape, value.dtype, value.device, value.requires_grad))
                elif isinstance(example, torch.SymInt) and is_symbolic(example):
                    inputs.append(int(value) if exact else str(example.node.expr))
                else:
                    inputs.append(value)
            made = compile_bucket(self.dense, inputs, {} if exact else sizes, self.options.inner, trained)
            made = dataclasses.replace(made, exact=sizes, guards=[]) if exact else made  # what was asked of these sizes is known
            self.dense_buckets.append(made)
            return made

    def _dense_sizes(self, values: Sequence[Any]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for node, value in zip(placeholders(self.dense.graph), values, strict=True):
            example = example_of(node)
            if isinstance(example, torch.SymInt) and is_symbolic(example):
                sizes[str(example.node.expr)] = int(value)
            elif isinstance(example, torch.Tensor):
                for size, real in zip(example.shape, value.shape, strict=True):
                    if is_symbolic(size):
                        sizes[str(size_name(size))] = int(real)
        return sizes

    def _dense_feed(self, values: Sequence[Any]) -> list[Any]:
        fed = []
        for node, value in zip(placeholders(self.dense.graph), values, strict=True):
            example = example_of(node)
            symbolic = isinstance(example, torch.Tensor) and any(map(is_symbolic, example.shape))
            fed.append(value.contiguous() if symbolic else value)
        return fed
