"""States and halos of hybrid models: a wrong parent is noticed, chunk borders of the dense grid, and graphs that lengths don't change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from sp_compile.layout import Forest
from tests.capture.recording import GRAPHS, recording
from tests.e2e import compare, hybrids
from tests.e2e.scenarios import Batch, Row, masked, random_tokens, right_padded
from tests.e2e.test_hybrids import read

pytest.importorskip("transformers")

Fault = Callable[[Forest, str, Tensor], Tensor]


def _heads(forest: Forest) -> np.ndarray:
    """First tokens of the nodes that branch off another."""
    return forest.node_start[forest.parent >= 0]


def state_not_forked(forest: Forest, name: str, value: Tensor) -> Tensor:
    """Every node starts from an empty state; convolutions keep their halo."""
    if name.startswith("chunks"):
        value[torch.isin(value[:, 1], torch.from_numpy(_heads(forest))), 0] = -1
    return value


def state_of_a_sibling(forest: Forest, name: str, value: Tensor) -> Tensor:
    """A branch starts from the state with which the node in front of it ends."""
    if name.startswith("chunks"):
        chunks = torch.isin(value[:, 1], torch.from_numpy(_heads(forest))).nonzero()[:, 0]
        value[chunks, 0] = chunks - 1
    return value


def no_halo(forest: Forest, name: str, value: Tensor) -> Tensor:
    if name == "prev":
        value[torch.from_numpy(_heads(forest))] = -1
    return value


def halo_of_a_sibling(forest: Forest, name: str, value: Tensor) -> Tensor:
    """The inputs in front of a branch are those that lie in front of it in the pack."""
    if name == "prev":
        heads = torch.from_numpy(_heads(forest))
        value[heads] = heads - 1
    return value


def siblings_exchanged(forest: Forest, name: str, value: Tensor) -> Tensor:
    return value[[1, 0, *range(2, len(value))]] if name == "index" else value


FAULTS = (state_not_forked, state_of_a_sibling, no_halo, halo_of_a_sibling, siblings_exchanged)


def _batch(rows: Sequence[Row]) -> Batch:
    ids, mask, labels = right_padded(rows)
    return masked("rows", ids, mask, labels=labels)


def _tree() -> list[Row]:
    """Two branches of three tokens each behind a prompt of five, the first of which branches again."""
    generator = torch.Generator().manual_seed(1)
    prompt, turn = random_tokens(generator, 5), random_tokens(generator, 3)
    return [(prompt + turn, random_tokens(generator, 4)) for _ in range(2)] + [(prompt, random_tokens(generator, 6))]


@pytest.mark.parametrize("family", ["mamba2", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_planted_faults_are_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrids.make(family)
    torch._dynamo.reset()
    call = compare.compiled(model, "eager")
    batch = read(_batch(_tree()), family)
    compare.check(call, model, batch)
    tensors = Forest.tensors
    for fault in FAULTS:

        def wrong(self: Forest, names: Sequence[str], device: torch.device | str, fault: Fault = fault) -> tuple[Tensor, ...]:
            found = tensors(self, names, device)
            return tuple(fault(self, name, value.clone()) for name, value in zip(names, found, strict=True))

        monkeypatch.setattr(Forest, "tensors", wrong)
        with pytest.raises(AssertionError):
            compare.check(call, model, batch)
        monkeypatch.undo()
    compare.check(call, model, batch)


@pytest.mark.parametrize("family", ["mamba2", pytest.param("kimi", marks=pytest.mark.slow)])
def test_lengths_around_the_borders_of_the_dense_grid(family: str) -> None:
    """Chunks of eight, placed as in the dense run: a fork before, at and behind a border; one compilation."""
    model = hybrids.make(family)
    torch._dynamo.reset()
    call = compare.compiled(model, "eager", kernels=("chunked_replay",))
    generator = torch.Generator().manual_seed(2)
    for length in (1, 7, 8, 9, 15, 16, 17):
        prompt = random_tokens(generator, length)
        account = compare.check(call, model, read(_batch([(prompt, random_tokens(generator, n)) for n in (1, 7, 8, 9)]), family))
        assert account.compiles == 1
        assert any(text.startswith("chunked_replay") for text in account.kernels.values())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_5", "kimi", "minimax", "lfm2"])
def test_lengths_around_the_borders_of_chunks(family: str) -> None:
    """Prompts and completions around 64 and 128 tokens, the lengths of one and two chunks."""
    model = hybrids.make(family, max_position_embeddings=512)
    torch._dynamo.reset()
    call = compare.compiled(model, "eager")
    generator = torch.Generator().manual_seed(3)
    for length in (63, 64, 65, 127, 128, 129):
        prompt = random_tokens(generator, length)
        account = compare.check(call, model, read(_batch([(prompt, random_tokens(generator, n)) for n in (1, 63, 65, length)]), family))
        assert account.compiles == 1


@pytest.mark.parametrize("family", ["mamba2", *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3_5", "minimax"))])
def test_the_captured_graph_does_not_grow_with_the_length(family: str) -> None:
    model = hybrids.make(family).eval()
    sizes = []
    for length in (9, 150):
        torch._dynamo.reset()
        GRAPHS.clear()
        with torch.no_grad():
            torch.compile(model, backend=recording, dynamic=True)(input_ids=torch.ones((2, length), dtype=torch.long))
        sizes.append([len(graph.graph.nodes) for graph in GRAPHS])
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) == 1
