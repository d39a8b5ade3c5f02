"""Attention of a forest on one GPU: the composed flash calls against the blocked ones and against dense attention of full rows.

bf16, 32 query heads, 8 key/value heads, head dim 128. Effective TFLOP/s count visible pairs only: 4 * pairs * 128 * 32 forward, 2.5 times
that backward. Errors are relative Frobenius errors against float64, of the first 8 heads, whose gradients depend on no other head; that of
dense rows is of the flash kernel on full rows, a shared token's gradient being the sum over its rows. A case whose errors exceed twice the
dense ones, or whose deterministic replay differs, is reported without speed-ups.

    python -m bench.attention                 # writes bench/results/attention.json
    python -m bench.attention --out FILE --cases 0 3
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.report import write
from sp_compile.kernels.attention import blocked, chains_cuda
from sp_compile.layout.forest import Forest
from sp_compile.ops.attention import Mask
from sp_compile.ops.numerics import relative_error

RESULT = Path(__file__).parent / "results" / "attention.json"
HEADS, KV_HEADS, DIM = 32, 8, 128
CHECKED = 2  # key/value heads whose errors are measured
REPLAYS = 4
NAMES = ("o", "dq", "dk", "dv")

Rows = list[list[int]]


def star(prompt: int, rows: int, completion: int, first: int = 0) -> Rows:
    """Rows of one prompt and completions of their own."""
    head = list(range(first, first + prompt))
    return [head + list(range(first + prompt + r * completion, first + prompt + (r + 1) * completion)) for r in range(rows)]


def stars(count: int, prompt: int, rows: int, completion: int) -> Rows:
    tokens = prompt + rows * completion
    return [row for s in range(count) for row in star(prompt, rows, completion, s * tokens)]


def tree(depth: int, tokens: int, seed: int = 0) -> Rows:
    """Rows of an agent's tree: 2 to 4 children a node, nodes of differing length, about `tokens` physical tokens."""
    generator = random.Random(seed)
    nodes = sum(3**level for level in range(depth))
    rows: Rows = []
    fresh = iter(range(10**9))

    def grow(path: list[int], level: int) -> None:
        path = path + [next(fresh) for _ in range(generator.randint(tokens // nodes // 2, 3 * tokens // nodes // 2))]
        if level == depth - 1:
            rows.append(path)
            return
        for _ in range(generator.choice((2, 3, 4))):
            grow(path, level + 1)

    grow([], 0)
    return rows


CASES: tuple[tuple[str, Callable[[], Rows]], ...] = (
    ("star P=8192 G=8 R=1024", lambda: star(8192, 8, 1024)),
    ("star P=4096 G=16 R=1024", lambda: star(4096, 16, 1024)),
    ("star P=2048 G=16 R=4096", lambda: star(2048, 16, 4096)),
    ("tree, depth 6, 2 to 4 children", lambda: tree(6, 64_000)),
    ("64 stars P=512 G=8 R=256", lambda: stars(64, 512, 8, 256)),
)


@dataclasses.dataclass
class Problem:
    """A forest and its values; q, k, v and the gradient of the output are token-major [1, H, T, D]."""

    forest: Forest
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    scale: float = DIM**-0.5

    @staticmethod
    def make(rows: Rows) -> Problem:
        forest = Forest.from_rows(rows)
        generator = torch.Generator("cuda").manual_seed(0)
        values = [
            torch.randn((1, forest.num_tokens, heads, DIM), generator=generator, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
            for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        ]
        return Problem(forest, *values)

    @property
    def pairs(self) -> int:
        """Visible pairs: each token sees the columns of its row up to its own."""
        return int((self.forest.column + 1).sum())

    def mask(self) -> Mask:
        end, column = self.forest.tensors(("end", "column"), "cuda")
        return Mask(end, column, None, None, None, None, None, None)

    def heads(self, kv: int) -> Problem:
        groups = HEADS // KV_HEADS
        q, grad = (x[:, : kv * groups] for x in (self.q, self.grad))
        return dataclasses.replace(self, q=q, k=self.k[:, :kv], v=self.v[:, :kv], grad=grad)


def composed_forward(given: Problem) -> tuple[Tensor, Tensor]:
    calls, plan = given.forest.tensors(("flash_calls", "flash_plan"), "cuda")
    return chains_cuda.forward(given.q, given.k, given.v, None, calls, plan, given.scale)


def composed_backward(given: Problem, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    calls, plan = given.forest.tensors(("flash_calls", "flash_plan"), "cuda")
    return chains_cuda.backward(given.grad, given.q, given.k, given.v, None, calls, plan, out, lse, given.scale)[:3]


def blocked_both(given: Problem, dtype: torch.dtype) -> list[Tensor]:
    q, k, v, grad = (x.to(dtype) for x in (given.q, given.k, given.v, given.grad))
    out, lse = blocked.forward(q, k, v, given.mask(), None, given.scale)
    return [out, *blocked.backward(grad, q, k, v, given.mask(), None, out, lse, given.scale, False)[:3]]


class Dense:
    """Full rows, padded at their end to the longest, token-major. The gradient of a shared token is split evenly over its rows."""

    def __init__(self, given: Problem) -> None:
        self.index, count = given.forest.tensors(("index", "count"), "cuda")
        self.real, self.scale, self.tokens = self.index >= 0, given.scale, given.forest.num_tokens
        share = (given.grad[0].transpose(0, 1) / count[:, None, None]).to(torch.bfloat16)
        rows = [x[0].transpose(0, 1)[self.index.clamp(min=0)].transpose(1, 2) for x in (given.q, given.k, given.v)]
        self.q, self.k, self.v = (x.requires_grad_() for x in rows)
        self.grad = (share[self.index.clamp(min=0)] * self.real[..., None, None]).transpose(1, 2)

    def forward(self) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            self.q, self.k, self.v, is_causal=True, scale=self.scale, enable_gqa=self.q.shape[1] != self.k.shape[1]
        )

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.grad, retain_graph=True)

    def results(self) -> list[Tensor]:
        """o of each token's last row, and the gradients summed over rows in float64, [1, H, T, D]."""
        out = self.forward()
        where = self.index[self.real]
        found = []
        for number, value in enumerate((out.detach(), *self.backward(out))):
            flat = value.transpose(1, 2)[self.real].double()
            total = flat.new_zeros((self.tokens, *flat.shape[1:]))
            total.index_copy_(0, where, flat) if number == 0 else total.index_add_(0, where, flat)
            found.append(total.transpose(0, 1)[None])
        return found


def milliseconds(call: Callable[[], Any], warmup: int = 20, repeat: int = 120) -> float:
    import triton.testing

    return float(triton.testing.do_bench(call, warmup=warmup, rep=repeat, return_mode="median"))


def once(call: Callable[[], Any]) -> float:
    """For what takes long: one timed run after one other, in milliseconds."""
    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started)


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    before, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = fill


def replay(given: Problem) -> bool:
    """Whether repeated runs give the same bits while another stream keeps the GPU busy."""
    other, work = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    first: list[Tensor] = []
    for turn in range(REPLAYS):
        with torch.cuda.stream(other):
            for _ in range(5 + 9 * turn):
                torch.mm(work[: 512 + 700 * turn], work)
        out, lse = composed_forward(given)
        found = [out, lse, *composed_backward(given, out, lse)]
        first = first or found
        if not all(torch.equal(one.view(torch.uint8), two.view(torch.uint8)) for one, two in zip(first, found, strict=True)):
            return False
    return True


def errors(given: Problem) -> dict[str, dict[str, float]]:
    small = given.heads(CHECKED)
    want = blocked_both(small, torch.float64)
    with deterministic(True):
        out, lse = composed_forward(small)
        composed = [out, *composed_backward(small, out, lse)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        dense = Dense(small).results()
    found = {"composed": composed, "dense_flash": dense}
    return {name: {n: relative_error(x, y) for n, x, y in zip(NAMES, got, want, strict=True)} for name, got in found.items()}


def times(given: Problem) -> dict[str, dict[str, float]]:
    """Milliseconds of forward and backward of each implementation."""
    return composed_times(given) | blocked_times(given) | dense_times(given)


def composed_times(given: Problem) -> dict[str, dict[str, float]]:
    out, lse = composed_forward(given)
    found = {}
    nothing = {"merge_rows": lambda *values: values[1], "add_rows": lambda *values: None}
    for name, strict, patched in (
        ("composed", False, {}),
        ("composed_deterministic", True, {}),
        ("calls_only_deterministic", True, nothing),
    ):
        with deterministic(strict), mock.patch.multiple(chains_cuda, **patched) if patched else contextlib.nullcontext():
            forward = milliseconds(lambda: composed_forward(given))
            found[name] = {"forward_ms": forward, "backward_ms": milliseconds(lambda: composed_backward(given, out, lse))}
    return found


def blocked_times(given: Problem) -> dict[str, dict[str, float]]:
    q, k, v, mask, scale = given.q, given.k, given.v, given.mask(), given.scale
    out, lse = composed_forward(given)
    forward = once(lambda: blocked.forward(q, k, v, mask, None, scale))
    backward = once(lambda: blocked.backward(given.grad, q, k, v, mask, None, out, lse, scale, False))
    return {"blocked": {"forward_ms": forward, "backward_ms": backward}}


def dense_times(given: Problem) -> dict[str, dict[str, float]]:
    """A backend that refuses the case has no entry."""
    dense = Dense(given)
    found = {}
    for name, backend in (("dense_flash", SDPBackend.FLASH_ATTENTION), ("dense_cudnn", SDPBackend.CUDNN_ATTENTION)):
        with contextlib.suppress(RuntimeError), sdpa_kernel(backend):
            result = dense.forward()
            forward = milliseconds(dense.forward)
            found[name] = {"forward_ms": forward, "backward_ms": milliseconds(lambda made=result: dense.backward(made))}
    return found


def measure(name: str, rows: Rows) -> dict[str, Any]:
    started = time.perf_counter()
    given = Problem.make(rows)
    planned = time.perf_counter()
    given.forest.tensors(("flash_calls", "flash_plan", "end", "column"), "cuda")
    plan_ms = 1e3 * (time.perf_counter() - planned)
    wrong = errors(given)
    torch.cuda.empty_cache()
    with deterministic(True):
        equal = replay(given)
    with deterministic(False):
        control = not replay(given)
    close = all(wrong["composed"][n] <= 2 * wrong["dense_flash"][n] for n in NAMES)
    found = times(given)
    flops = 4 * given.pairs * DIM * HEADS
    for entry in found.values():
        entry["forward_tflops"] = flops / entry["forward_ms"] / 1e9
        entry["backward_tflops"] = 2.5 * flops / entry["backward_ms"] / 1e9
    torch.cuda.empty_cache()
    return {
        "name": name, "T": given.forest.num_tokens, "N": given.forest.logical_tokens, "I": given.forest.sharing, "pairs": given.pairs,
        "calls": given.forest.tensor("flash_calls", "cuda").shape[0] - 1, "plan_ms": plan_ms, "errors": wrong,
        "errors_within_twice_dense": close, "deterministic_replays_equal": equal, "differs_without": control, "times": found,
        "seconds": time.perf_counter() - started,
    }  # fmt: skip


def show(console: Console, case: dict[str, Any]) -> None:
    green = case["errors_within_twice_dense"] and case["deterministic_replays_equal"]
    table = Table(title=f"{case['name']}: T = {case['T']}, I = {case['I']:.2f}, gate {'green' if green else 'RED'}")
    for head in ("", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "times dense flash"):
        table.add_column(head, justify="left" if not head else "right")
    dense = case["times"].get("dense_flash")
    for name, entry in case["times"].items():
        ratio = (dense["forward_ms"] + dense["backward_ms"]) / (entry["forward_ms"] + entry["backward_ms"]) if dense and green else None
        figures = [f"{entry[f'{d}_{u}']:.{p}f}" for d in ("forward", "backward") for u, p in (("ms", 2), ("tflops", 0))]
        table.add_row(name, *figures, f"{ratio:.2f}" if ratio else "-")
    console.print(table)
    for name, wrong in case["errors"].items():
        console.print(f"  {name}: " + ", ".join(f"{n} {value:.2e}" for n, value in wrong.items()))
    console.print(f"  replays equal: {case['deterministic_replays_equal']}; differ without: {case['differs_without']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)))
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.attention: expected a CUDA GPU, found none", file=sys.stderr)
        return 2
    console = Console(width=120)
    properties = torch.cuda.get_device_properties(0)
    cases = []
    for number in chosen.cases:
        cases.append(measure(CASES[number][0], CASES[number][1]()))
        show(console, cases[-1])
        gpu = {"name": properties.name, "processors": properties.multi_processor_count, "cuda": torch.version.cuda}
        write(chosen.out, {"gpu": gpu, "heads": [HEADS, KV_HEADS, DIM], "dtype": "bfloat16", "cases": cases})
    return int(not all(case["errors_within_twice_dense"] and case["deterministic_replays_equal"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
