"""What runs when a captured graph is called inside of `share`: the graph on packed inputs, or an error; there is no dense run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from sp_compile.analysis.packed_inputs import read_window
from sp_compile.blocks import find_block_tables
from sp_compile.capture.graphs import example_of, is_module_state, is_symbolic, placeholders, token_dims
from sp_compile.errors import CannotShare, StaleForest
from sp_compile.inner import LOCK, Bucket, TensorSpec, compile_bucket, trained_in
from sp_compile.layout.forest import Forest
from sp_compile.layout.tensors import device_of, symbolic_shape
from sp_compile.passes.runner import PassRecord
from sp_compile.passes.stage import Context, Input, Source, input_of

if TYPE_CHECKING:
    from sp_compile.backend import Shared

Ties = tuple[tuple[int, int], ...]
"""(input number, dimension) of everything that runs over the tokens."""

Windows = tuple[tuple[int, "int | None"], ...]
"""Of each (query, key) mask among the inputs: (input number, window or None)."""


class PackedGraph:
    """A graph rewritten for packed inputs, and its compiled forms."""

    def __init__(self, shared: Shared, inner: str, most: int) -> None:
        self.shared, self.inner, self.most = shared, inner, most
        self.buckets: list[Bucket] = []
        self.given = [input_of(node) for node in placeholders(shared.graph.graph)]
        self.checks = find_block_tables(shared.context, shared.graph)

    refusal = None

    @property
    def context(self) -> Context:
        return self.shared.context

    @property
    def records(self) -> list[PassRecord]:
        return self.shared.records

    def bucket(self, values: Sequence[Any], forest: Forest) -> Bucket:
        """The compiled form for these inputs, made on first use."""
        sizes, trained = self._sizes(values, forest), trained_in(values)
        found = self._accepting(sizes, trained)
        if found is not None:
            return found
        with LOCK:
            found = self._accepting(sizes, trained)  # another thread may have made it
            if found is not None:
                return found
            if len(self.buckets) >= self.most:
                raise RuntimeError(f"the inner compiler specialised this graph to {self.most} ranges of sizes already; sizes are {sizes}")
            specs = [self._spec(given, values, forest) for given in self.given]
            made = compile_bucket(self.shared.graph, specs, sizes, self.inner, trained)
            self.buckets.append(made)
            return made

    def _accepting(self, sizes: dict[str, int], trained: tuple[bool, ...]) -> Bucket | None:
        return next((bucket for bucket in self.buckets if bucket.accepts(sizes, trained)), None)

    def feed(self, values: Sequence[Any], forest: Forest) -> list[Any]:
        return [self._value(given, values, forest) for given in self.given]

    def _sizes(self, values: Sequence[Any], forest: Forest) -> dict[str, int]:
        sizes = {"T": forest.num_tokens, "B": forest.num_rows, "L": forest.num_columns}
        for given in self.given:
            if given.source is Source.FOREST:
                shape = symbolic_shape(str(given.key))[0]
                if any(isinstance(name, str) and name not in sizes for name in shape):
                    named = zip(shape, forest.tensor(str(given.key), self._device(values)).shape, strict=True)
                    sizes |= {name: int(real) for name, real in named if isinstance(name, str)}
            elif given.source in (Source.ARGUMENT, Source.SIZE):
                fake, value = self.shared.inputs.fakes[int(given.key)], values[int(given.key)]
                pairs = zip(fake.shape, value.shape, strict=True) if isinstance(fake, torch.Tensor) else [(fake, value)]
                sizes |= {str(self._name(size)): int(real) for size, real in pairs if isinstance(size, torch.SymInt)}
        return sizes

    def _name(self, size: Any) -> int | str:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expr = size.node.expr
        return "T" if expr == self.shared.inputs.symbols.columns else str(expr)

    def _spec(self, given: Input, values: Sequence[Any], forest: Forest) -> Any:
        if given.source is Source.ARGUMENT:
            value, fake = values[int(given.key)], self.shared.inputs.fakes[int(given.key)]
            if _has_symbols(fake):
                return TensorSpec(tuple(self._name(s) for s in fake.shape), value.dtype, value.device, value.requires_grad)
            return value
        if given.source is Source.FOREST:
            shape, dtype = symbolic_shape(str(given.key))
            return TensorSpec(shape, dtype, device_of(str(given.key), self._device(values)))
        if given.source is Source.HIDES:
            return TensorSpec((1,), torch.int64, torch.device("cpu"))
        if given.source is Source.SIZE:
            return self._name(self.shared.inputs.fakes[int(given.key)])
        return {Source.TOKENS: "T", Source.ROWS: "B", Source.COLUMNS: "L"}[given.source]

    def _value(self, given: Input, values: Sequence[Any], forest: Forest) -> Any:
        if given.source is Source.ARGUMENT:
            value = values[int(given.key)]
            return value.contiguous() if _has_symbols(self.shared.inputs.fakes[int(given.key)]) else value
        if given.source is Source.FOREST:
            return forest.tensor(str(given.key), self._device(values))
        if given.source is Source.HIDES:
            return torch.ones(1, dtype=torch.int64)  # not known without waiting for the device
        if given.source is Source.SIZE:
            return values[int(given.key)]
        return {Source.TOKENS: forest.num_tokens, Source.ROWS: forest.num_rows, Source.COLUMNS: forest.num_columns}[given.source]

    def _device(self, values: Sequence[Any]) -> torch.device:
        number = next(n for n, fake in enumerate(self.shared.inputs.fakes) if _has_symbols(fake))
        device: torch.device = values[number].device
        return device


def _by_input(ties: Ties) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number, dim in ties:
        found.setdefault(number, []).append(dim)
    return found


def _has_symbols(fake: Any) -> bool:
    return isinstance(fake, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in fake.shape)


class PackedGraphs:
    """The packed forms of one captured graph, one for each set of dimensions that run over the tokens, and windows of masks passed in."""

    def __init__(self, module: torch.fx.GraphModule, rewrite: Callable[[Sequence[Any], int], Shared], inner: str, most: int) -> None:
        self.rewrite, self.inner, self.most = rewrite, inner, most
        self.forms: dict[tuple[Ties, Windows], PackedGraph | CannotShare] = {}
        nodes = self.nodes = placeholders(module.graph)
        self.own = [n for n, node in enumerate(nodes) if isinstance(example_of(node), torch.Tensor) and not is_module_state(node)]
        self.symbolic = {(n, d) for n in self.own for d, size in enumerate(example_of(nodes[n]).shape) if is_symbolic(size)}

    def tensors(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """The inputs that are no module state."""
        return [values[number] for number in self.own]

    def form(self, values: Sequence[Any], forest: Forest) -> PackedGraph:
        """The form for these inputs; rewritten on first use.

        Raises:
            CannotShare: something was not proved; a packed call has no dense form to fall back to.
            StaleForest: no input has the forest's number of tokens.
        """
        ties = tuple((n, d) for n in self.own for d in token_dims(values[n].shape, forest.num_tokens))
        if not ties:
            shapes = ", ".join(str(list(values[n].shape)) for n in self.own) or "none"
            raise StaleForest(f"share: the forest has {forest.num_tokens} tokens, which no input of the compiled region has: {shapes}")
        ties = tuple(tie for tie in ties if tie in self.symbolic)
        pairs = [n for n, dims in _by_input(ties).items() if len(dims) == 2 and not values[n].requires_grad]
        key = ties, tuple((n, read_window(self.nodes[n].name, values[n])) for n in pairs)
        if key not in self.forms:
            try:
                self.forms[key] = PackedGraph(self.rewrite(values, forest.num_tokens), self.inner, self.most)
            except CannotShare as refused:
                self.forms[key] = refused
        found = self.forms[key]
        if isinstance(found, CannotShare):
            raise found
        for check in found.checks:
            why = check.why_not(values)
            if why is not None:
                raise why
        return found
