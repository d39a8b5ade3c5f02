"""What `bench/attention.py` runs: entries of the lowering table, and dense and FlexAttention baselines, each with one pair of functions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.attention_cases import Dense, Problem
from sp_compile.kernels.attention import composed, fa4
from sp_compile.layout.mask_blocks import BLOCK
from sp_compile.lowering.attention import TABLE

OPTIONS: dict[str, Any] = {"window": None, "chunk": None, "softcap": None}


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    before, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill


@dataclasses.dataclass
class Ready:
    """One implementation on one problem.

    Attributes:
        forward: makes what `backward` takes.
        backward: the gradients.
        results: o, dq, dk, dv of a forward and a backward, [1, H, T, D].
        tensors: what was planned for it, by name in the forest's registry.
    """

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]
    results: Callable[[], list[Tensor]]
    tensors: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An implementation by name.

    Attributes:
        make: from a problem to what runs on it.
        strict: runs under deterministic algorithms.
        like: the dense baseline of the same library, whose errors bound its own; None for a baseline.
        replays: equal bits are promised.
        slow: timed by one run.
        least: tokens from which on it runs.
    """

    name: str
    make: Callable[[Problem], Ready]
    strict: bool = False
    like: str | None = None
    replays: bool = False
    slow: bool = False
    least: int = 0

    @contextlib.contextmanager
    def mode(self) -> Iterator[None]:
        calls_only = self.name.endswith("calls only")
        nothing = {"merge_rows": lambda *values: values[1], "add_rows": lambda *values: None}
        with deterministic(self.strict), mock.patch.multiple(composed, **nothing) if calls_only else contextlib.nullcontext():
            yield


def from_table(name: str) -> Callable[[Problem], Ready]:
    """An entry of the lowering table, through its ops."""
    item = next(item for item in TABLE if item.name == name)
    backward_op = getattr(torch.ops.sp_compile, item.op._schema.name.split("::")[1] + "_backward")

    def make(problem: Problem) -> Ready:
        names = item.forest_names(OPTIONS)
        tensors = [torch.zeros(1, dtype=torch.int64) if n == "padding_hides" else problem.forest.tensor(n, "cuda") for n in names]
        given = (*problem.given(), *tensors)

        def forward() -> tuple[Tensor, Tensor]:
            out, lse = item.op(*given, scale=problem.scale, **OPTIONS)
            return out, lse

        def backward(made: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = backward_op(problem.grad, *given, *made, scale=problem.scale, **OPTIONS, bias_grad=False)
            return found[:3]

        def results() -> list[Tensor]:
            made = forward()
            return [made[0], *backward(made)]

        return Ready(forward, backward, results, names)

    return make


def dense_sdpa(backend: SDPBackend) -> Callable[[Problem], Ready]:
    """torch's scaled dot product attention of full rows."""

    def make(problem: Problem) -> Ready:
        dense = Dense(problem)
        q, k, v = (x.transpose(1, 2).requires_grad_() for x in (dense.q, dense.k, dense.v))
        grad = dense.grad.transpose(1, 2)

        def forward() -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=problem.scale, enable_gqa=True)

        def backward(out: Tensor) -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

        def results() -> list[Tensor]:
            out = forward()
            return dense.packed(tuple(x.transpose(1, 2) for x in (out.detach(), *backward(out))))

        return Ready(forward, backward, results)

    return make


def dense_fa4(problem: Problem) -> Ready:
    """flash-attn-4's causal attention of full rows."""
    dense, known = Dense(problem), fa4.functions()

    def forward() -> tuple[Tensor, Tensor]:
        out, lse, *_ = known["forward"](dense.q, dense.k, dense.v, softmax_scale=problem.scale, causal=True, return_lse=True)
        return out, lse

    def backward(made: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        out, lse = made
        found: tuple[Tensor, ...] = known["backward"](
            dense.q, dense.k, dense.v, out, dense.grad, lse, softmax_scale=problem.scale, causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return found

    def results() -> list[Tensor]:
        made = forward()
        return dense.packed((made[0], *backward(made)))

    return Ready(forward, backward, results)


_compiled: dict[str, Any] = {}


def flex(problem: Problem) -> Ready:
    """FlexAttention with a tree mask, compiled, on the packed tokens."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._functorch.config.donated_buffer = False  # backward runs again and again
    call = _compiled.setdefault("flex", torch.compile(flex_attention, dynamic=True))
    end = problem.forest.tensor("end", "cuda")
    tokens = problem.forest.num_tokens

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    mask = create_block_mask(allowed, None, None, tokens, tokens, device="cuda", BLOCK_SIZE=BLOCK)
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))

    def forward() -> Tensor:
        out: Tensor = call(q, k, v, block_mask=mask, scale=problem.scale, enable_gqa=True)
        return out

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), problem.grad, retain_graph=True)

    def results() -> list[Tensor]:
        out = forward()
        return [out.detach(), *backward(out)]

    return Ready(forward, backward, results)


CANDIDATES = (
    Candidate("dense_cudnn", dense_sdpa(SDPBackend.CUDNN_ATTENTION)),
    Candidate("dense_flash", dense_sdpa(SDPBackend.FLASH_ATTENTION)),
    Candidate("dense_fa4", dense_fa4),
    Candidate("dense_fa4, deterministic", dense_fa4, strict=True, replays=True),
    Candidate("flex", flex, like="dense_flash", least=BLOCK),
    Candidate("fa4_blocks", from_table("fa4_blocks"), like="dense_fa4"),
    Candidate("fa4_ordered, deterministic", from_table("fa4_ordered"), strict=True, like="dense_fa4", replays=True),
    Candidate("fa4_mixed", from_table("fa4_mixed"), like="dense_fa4"),
    Candidate("fa4_mixed, deterministic", from_table("fa4_mixed"), strict=True, like="dense_fa4", replays=True),
    Candidate("fa4_chains", from_table("fa4_chains"), like="dense_fa4"),
    Candidate("fa4_chains, deterministic", from_table("fa4_chains"), strict=True, like="dense_fa4", replays=True),
    Candidate("fa4_chains, deterministic, calls only", from_table("fa4_chains"), strict=True),
    Candidate("chains_cuda", from_table("chains_cuda"), like="dense_flash"),
    Candidate("chains_cuda, deterministic", from_table("chains_cuda"), strict=True, like="dense_flash", replays=True),
    Candidate("triton", from_table("triton"), like="dense_flash", replays=True),
    Candidate("blocked", from_table("blocked"), like="dense_flash", replays=True, slow=True),
)
