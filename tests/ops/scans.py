"""Checks that every recurrent op must pass, for any op that is described as a `Case`.

The oracle of an op is a function `dense(inputs, tokens, start)` that runs the recurrence over one full row, token by token, from the
formulas of the op's docstring. It shares nothing with the package: no forest, no chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sp_compile.layout import Forest
from sp_compile.lowering import registry
from sp_compile.lowering.registry import Implementation
from sp_compile.ops.numerics import relative_error
from sp_compile.ops.recurrent import TOLERANCE
from tests.determinism.replay import same_bits

Inputs = Sequence[Any]


@dataclass(frozen=True)
class Case:
    """A recurrent op under test.

    Attributes:
        op: the overload.
        make: `(prev, end, **changes) -> inputs`, with the keywords states, final, dtype and seed.
        dense: `(inputs, tokens, start) -> (out [n, ...], states [n, ...] or None)`; `start` is an external state or None.
        options: the op's keyword arguments.
        initial: position of the external states among the inputs.
    """

    op: torch._ops.OpOverload
    make: Callable[..., Inputs]
    dense: Callable[[Inputs, list[int], int | None], tuple[Tensor, Tensor | None]]
    options: dict[str, Any] = field(default_factory=dict)
    initial: int = 9

    @property
    def stateful(self) -> bool:
        """Whether the op has a second result."""
        return len(self.op._schema.returns) == 2

    def item(self, name: str) -> Implementation:
        """The implementation of that name."""
        return next(item for item in registry.implementations(self.op) if item.name == name)

    def inputs(self, tree: Forest, *, states: int = 0, final: bool = False, dtype: torch.dtype = torch.float64, **changes: Any) -> Inputs:
        """Inputs on a forest; with external states, root r continues state r % states."""
        prev = tree.tensor("prev", "cpu").clone()
        roots = (prev < 0).nonzero()[:, 0]
        if states:
            prev[roots] = -1 - torch.arange(len(roots)) % states
        last = torch.from_numpy(tree.node_start + tree.node_len - 1)
        asked: dict[str, Any] = {"final": last if final else None} if self.stateful else {}
        return self.make(prev, tree.tensor("end", "cpu"), states=states, dtype=dtype, **asked, **changes)

    def run(self, tree: Forest, inputs: Inputs, name: str | None = None, **options: Any) -> tuple[Tensor, ...]:
        """Results of the op's own body, or of an implementation, with the forest tensors it wants."""
        options = self.options | options
        if name is None:
            made = self.op(*inputs, **options)
        else:
            item = self.item(name)
            bound = registry.bind(self.op, inputs, options)
            forest = {key: forest_tensor(tree, key, bound["prev"]) for key in item.forest_names(bound)}
            args, kwargs = registry.call(item, self.op, bound, forest)
            made = item.op(*args, **kwargs)
        return made if isinstance(made, tuple) else (made,)


def forest_tensor(tree: Forest, name: str, prev: Tensor) -> Tensor:
    """A forest tensor, made to continue the external states that `prev` continues."""
    plan = tree.tensor(name, "cpu").clone()
    if name.startswith("chunks"):
        for chunk in plan:
            if chunk[0] < 0:
                first = int(chunk[1:][chunk[1:] != -1][0])
                chunk[0] = prev[first if first >= 0 else -2 - first]
    return plan


def leaves(inputs: Inputs) -> list[Tensor]:
    return [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]


def cast(inputs: Inputs, dtype: torch.dtype, initial: int) -> list[Any]:
    """Floating-point inputs as leaves of another dtype; external states in its accumulation dtype, halos are inputs like others."""
    made: list[Any] = []
    for place, value in enumerate(inputs):
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            made.append(value)
            continue
        kind = torch.float32 if place == initial and dtype != torch.float64 else dtype
        made.append(value.detach().to(kind).requires_grad_(value.requires_grad))
    return made


def errors(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[float]:
    return [relative_error(one, other) for one, other in zip(got, want, strict=True)]


def check_against_rows(case: Case, tree: Forest, inputs: Inputs) -> None:
    """Results and all gradients of the op's body against the recurrence over the full rows, in float64."""
    results = case.run(tree, inputs)
    prev, index = next(value for value in inputs if isinstance(value, Tensor) and value.dtype == torch.int64), tree.tensor("index", "cpu")
    final = inputs[-1] if case.stateful and isinstance(inputs[-1], Tensor) else None
    generator = torch.Generator().manual_seed(1)
    got, want = results[0].new_zeros(()), results[0].new_zeros(())
    asked = {} if final is None else {int(token): place for place, token in enumerate(final.tolist())}
    for row in index:
        tokens = row[row >= 0].tolist()
        if not tokens:
            continue
        start = -1 - int(prev[tokens[0]]) if inputs[case.initial] is not None else None
        out, states = case.dense(inputs, tokens, start)
        shared = results[0][0, tokens]
        assert relative_error(shared, out) < TOLERANCE[torch.float64]
        weight = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        got, want = got + (shared * weight).sum(), want + (out * weight).sum()
        for at, token in enumerate(tokens):
            if token in asked:
                assert states is not None
                place = asked.pop(token)
                assert relative_error(results[1][place], states[at]) < TOLERANCE[torch.float64]
                weight = torch.randn(states[at].shape, generator=generator, dtype=torch.float64)
                got, want = got + (results[1][place] * weight).sum(), want + (states[at] * weight).sum()
    assert not asked
    some = leaves(inputs)
    found = torch.autograd.grad(got, some)
    expected = torch.autograd.grad(want, some, allow_unused=True, materialize_grads=True)
    assert max(errors(found, expected)) < TOLERANCE[torch.float64]


def check_against_body(case: Case, tree: Forest, name: str, inputs: Inputs, dtype: torch.dtype, **options: Any) -> None:
    """Results and all gradients of an implementation on inputs of a dtype against the op's body in float64 on the same values."""
    rounded = cast(inputs, dtype, case.initial)
    exact = cast(rounded, torch.float64, case.initial)
    got, want = case.run(tree, rounded, name, **options), case.run(tree, exact, **options)
    assert [value.dtype for value in got][1:] == [torch.float64 if dtype == torch.float64 else torch.float32] * (len(got) - 1)
    assert all(value.is_contiguous() for value in got)
    assert max(errors(got, want)) < TOLERANCE[dtype]
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype) for value in got]
    found = torch.autograd.grad(got, leaves(rounded), weights)
    expected = torch.autograd.grad(want, leaves(exact), [weight.double() for weight in weights])
    assert max(errors(found, expected)) < TOLERANCE[dtype], errors(found, expected)


def longer(case: Case, name: str, prefix: int, more: int, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
    """The results of `prefix` tokens keep their bits when the row goes on, in the same node and behind a fork."""
    row = list(range(prefix))
    trees = [
        Forest.from_rows([row]),
        Forest.from_rows([[*row, *range(1000, 1000 + more)]]),
        Forest.from_rows([[*row, *range(1000, 1000 + more)], [*row, 7], row]),
    ]
    long = case.inputs(trees[2], dtype=dtype, **changes)
    tokens = trees[2].num_tokens
    results = []
    for tree in trees:
        part = [
            value.detach()[:, : tree.num_tokens]
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, tokens)
            else value.detach()
            if isinstance(value, Tensor) and value.dtype != torch.int64
            else value
            for value in long
        ]
        mine = case.inputs(tree, dtype=dtype, **changes)
        part = [own if isinstance(own, Tensor) and own.dtype == torch.int64 else value for own, value in zip(mine, part, strict=True)]
        results.append(case.run(tree, part, name)[0][:, :prefix])
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])


def siblings(case: Case, name: str, tree: Forest, first: int, stop: int, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
    """An edit of the leaf tokens [first, stop) moves no bit of results or token gradients outside of the paths through them."""
    inputs = case.inputs(tree, dtype=dtype, **changes)
    per_token = [place for place, value in enumerate(inputs) if isinstance(value, Tensor) and value.shape[:2] == (1, tree.num_tokens)]
    edited = list(inputs)
    for place in per_token:
        value = inputs[place].detach().clone()
        value[:, first:stop] += 1
        edited[place] = value.requires_grad_()
    prev = tree.tensor("prev", "cpu").tolist()
    touched = set(range(first, stop))
    at = prev[first]
    while at >= 0:
        touched.add(at)
        at = prev[at]
    outside = [token for token in range(tree.num_tokens) if token not in touched]
    before_edit = [token for token in range(tree.num_tokens) if not first <= token < stop]
    assert outside
    results = [case.run(tree, values, name)[0] for values in (inputs, edited)]
    assert same_bits(results[0][:, before_edit], results[1][:, before_edit])
    assert not torch.equal(results[0], results[1])
    weight = torch.linspace(-1, 1, results[0].numel()).view(results[0].shape).to(results[0].dtype)
    grads = [
        torch.autograd.grad(out, [values[place] for place in per_token], weight)
        for out, values in zip(results, (inputs, edited), strict=True)
    ]
    for one, other in zip(*grads, strict=True):
        assert same_bits(one[:, outside], other[:, outside])
        assert not torch.equal(one, other)


def flat_equal(case: Case, name: str, tree: Forest, flat: Forest, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """An implementation gives the tokens of a forest the bits that it gives the same rows without sharing."""
    inputs = [value.detach() if isinstance(value, Tensor) else value for value in case.inputs(tree, dtype=dtype)]
    index, place = tree.tensor("index", "cpu"), flat.tensor("index", "cpu")
    assert flat.num_tokens == flat.logical_tokens > tree.num_tokens
    source = torch.empty(flat.num_tokens, dtype=torch.int64)
    source[place[place >= 0]] = index[place >= 0]
    unshared = case.inputs(flat, dtype=dtype)
    rows = [
        value[:, source]
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, tree.num_tokens)
        else own
        if isinstance(value, Tensor) and value.dtype == torch.int64
        else value
        for value, own in zip(inputs, unshared, strict=True)
    ]
    shared, alone = case.run(tree, inputs, name, **options)[0], case.run(flat, rows, name, **options)[0]
    assert same_bits(shared[:, source], alone)


def poisoned(case: Case, name: str, tree: Forest, inputs: Inputs) -> None:
    """Memory that is never written holds NaN under deterministic algorithms: results and gradients must be the same with and without."""
    found: list[list[Tensor]] = []
    for strict in (False, True):
        torch.use_deterministic_algorithms(strict)
        try:
            out = case.run(tree, inputs, name)
            found.append([*out, *torch.autograd.grad(out, leaves(inputs), [torch.ones_like(value) for value in out])])
        finally:
            torch.use_deterministic_algorithms(False)
    assert all(bool(value.isfinite().all()) for value in found[1])
    assert all(same_bits(one, other) for one, other in zip(*found, strict=True))


def unshared(rows: Sequence[Sequence[int]]) -> Forest:
    """The forest of rows none of which share."""
    return Forest.from_groups([[] for _ in rows], rows, list(range(len(rows))))


LENGTHS = (63, 64, 65, 127, 128, 129)


def fork(prompt: int, branches: Sequence[int]) -> list[list[int]]:
    """Rows of one prompt and completions of these lengths."""
    return [[*range(prompt), *range(1000 * (b + 1), 1000 * (b + 1) + length)] for b, length in enumerate(branches)]


def short_nodes() -> list[list[int]]:
    """Four levels of nodes of one and two tokens behind a prompt of two."""
    return [[0, 1, a, 10 + b, 10 + b, 20 + c, 30 + d, 40] for a in range(2) for b in range(2) for c in range(2) for d in range(2)]
