"""The ops below: checked as torch checks ops, replayed bit for bit, and their memory measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.layout import Forest
from sp_compile.ops import token_kl as _token_kl  # noqa: F401  (registers the op)
from sp_compile.training import next_tokens, token_logprobs
from tests.determinism.replay import differing
from tests.training.rows import Recorder, make, normal

ops = torch.ops.sp_compile
CLASSES = 23
HEAD: dict[str, Any] = {"scale": 0.9, "softcap": 3.0, "temperature": 0.8}
CHUNKS: dict[str, Any] = {"chunk_tokens": 16, "chunk_classes": 5}
ROWS = make([[*range(30), *[b] * (3 * b % 11)] for b in range(12)])
INDEX = ROWS.forest.tensor("index", "cpu")
TARGETS = next_tokens(ROWS.ids % CLASSES, ROWS.keep)

Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def case(name: str, dtype: torch.dtype) -> Case:
    tokens = ROWS.forest.num_tokens
    hidden, weight, bias = (normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate([(tokens, 8), (CLASSES, 8), (CLASSES,)]))
    logits = normal(tokens, CLASSES, seed=3, dtype=dtype)
    logprobs = HEAD | CHUNKS | {"ignore_index": -100, "with_entropy": name != "logprobs"}
    if name in ("kl", "dense kl"):
        other = {f"reference_{key}": value for key, value in HEAD.items()}
        if name == "dense kl":
            one, two = (normal(2, 3, size, seed=size, dtype=dtype) for size in (8, CLASSES))
            return ops.token_kl.default, (None, one, weight, bias, two, None, None), HEAD | other | CHUNKS
        return ops.token_kl.default, (INDEX, hidden, weight, bias, logits, None, None), HEAD | other | CHUNKS
    if name == "dense":
        dense = normal(*TARGETS.shape, 8, seed=4, dtype=dtype)
        return ops.token_logprobs.default, (dense, None, TARGETS, weight, bias), logprobs
    values = (logits, INDEX, TARGETS, None, None) if name == "logits" else (hidden, INDEX, TARGETS, weight, bias)
    return ops.token_logprobs.default, values, logprobs


NAMES = ("logprobs", "entropy", "logits", "dense", "kl", "dense kl")


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(*case(name, torch.float32))


@pytest.mark.parametrize("name", NAMES)
def test_replay(name: str) -> None:
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            op, args, options = case(name, dtype)
            leaves = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
            assert differing(lambda op=op, args=args, options=options: list(op(*args, **options)), leaves) == []  # type: ignore[misc]
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


def test_wrong_inputs_are_refused() -> None:
    op, (values, index, targets, weight, bias), options = case("logprobs", torch.float64)
    for changed in (
        (values, index, targets[:, :-1], weight, bias),
        (values, index, targets.to(torch.int32), weight, bias),
        (values, index, targets, weight[:, :-1], bias),
        (values, index, targets, weight, bias[:-1]),
        (values, index, targets, None, bias),
        (values, index + values.shape[0], targets, weight, bias),
        (values, None, targets, weight, bias),
    ):
        with pytest.raises(InvalidInput):
            op(*changed, **options)
    with pytest.raises(IndexError, match="out of bounds"):
        op(values, index, targets.masked_fill(targets >= 0, CLASSES), weight, bias, **options)
    op, (index, hidden, weight, bias, logits, *_), options = case("kl", torch.float64)
    for changed in (
        (index, hidden, weight, bias, logits[:-1], None, None),
        (index, hidden, weight, bias, logits[:, 1:], None, None),
        (index, hidden, weight, bias, logits.float(), None, None),
        (index.to(torch.int32), hidden, weight, bias, logits, None, None),
    ):
        with pytest.raises(InvalidInput):
            op(*changed, **options)


def measured(vocabulary: int, rows: int, prompt: int, completion: int, width: int, entropy: bool) -> tuple[int, int, int]:
    """`(largest tensor made in forward and backward, row positions, physical tokens)`; targets of the completions only."""
    forest = Forest.from_rows([[*range(prompt), *range(1000 + completion * b, 1000 + completion * (b + 1))] for b in range(rows)])
    tokens, columns = forest.num_tokens, prompt + completion
    hidden = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(1)).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows, columns), generator=torch.Generator().manual_seed(2))
    targets[:, -1] = -100
    with Recorder() as seen:
        found = token_logprobs(hidden, targets, forest, weight=weight, entropy=entropy)
        (found[0].sum() + found[1].sum() if isinstance(found, tuple) else found.sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return seen.largest, rows * columns, tokens


@pytest.mark.parametrize("entropy", [False, True])
def test_memory_does_not_grow_with_tokens_times_vocabulary(entropy: bool) -> None:
    vocabulary, width = 5000, 16
    largest, positions, tokens = measured(vocabulary, rows=64, prompt=60, completion=4, width=width, entropy=entropy)
    assert (positions, tokens) == (4096, 316)
    assert largest <= max(1 << 18, vocabulary * width), "one block, or the weight's gradient"
    assert 4 * largest < tokens * vocabulary < positions * vocabulary


@pytest.mark.slow
def test_memory_at_150_000_classes_and_64k_row_positions() -> None:
    vocabulary, width = 150_000, 64
    largest, positions, tokens = measured(vocabulary, rows=64, prompt=992, completion=32, width=width, entropy=True)
    assert positions == 65536
    assert tokens == 992 + 64 * 32
    assert largest <= vocabulary * width, "the weight's gradient"
    assert 40 * largest < tokens * vocabulary


def test_the_recorder_sees_dense_logits() -> None:
    hidden, weight = torch.randn(300, 8), torch.randn(400, 8).requires_grad_()
    with Recorder() as seen:
        torch.nn.functional.cross_entropy(hidden @ weight.T, torch.zeros(300, dtype=torch.int64)).backward()
    assert seen.largest == 300 * 400
