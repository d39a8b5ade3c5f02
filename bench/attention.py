"""Attention of a forest on one GPU: the implementations of the lowering table against dense attention of full rows and FlexAttention.

bf16, 32 query heads, 8 key/value heads, head dims 128 and 64. Effective TFLOP/s count visible pairs only: 4 * pairs * head dim * 32
forward, 2.5 times that backward. Errors are relative Frobenius errors against float64, of the first 4 heads, whose gradients depend on no
other head; those of dense rows are of the same library on full rows, a shared token's gradient being the sum over its rows. An entry is
green if its errors are at most twice its library's dense ones and, where equal bits are promised, repeated runs beside a busy stream give
them. What is not green is reported without a speed-up. "calls only" leaves out merging and adding: its results are wrong, its time is a
bound.

    python -m bench.attention                 # writes bench/results/attention.json
    python -m bench.attention --out FILE --cases "one token" --dims 64 --impls fa4_blocks dense_fa4
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.attention_cases import CASES, HEADS, KV_HEADS, Problem
from bench.attention_impls import CANDIDATES, Candidate, Ready
from bench.report import write
from sp_compile.kernels.attention import fa4
from sp_compile.layout.forest import Forest
from sp_compile.ops.numerics import relative_error

RESULT = Path(__file__).parent / "results" / "attention.json"
NAMES = ("o", "dq", "dk", "dv")
REPLAYS = 3
WARMUP, REPEAT = 10, 60  # milliseconds


def milliseconds(call: Callable[[], Any], slow: bool) -> float:
    if slow:
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - started)
    import triton.testing

    return float(triton.testing.do_bench(call, warmup=WARMUP, rep=REPEAT, return_mode="median"))


def plan_times(problem: Problem) -> dict[str, float]:
    """Milliseconds from a forest to tensors on the device, the better of two runs, by the tensors that belong together."""
    found: dict[str, float] = {}
    for _ in range(2):
        forest = Forest.from_rows(problem.rows)
        forest.tensor("end", "cpu")
        for names in (("mask_shape", "mask_blocks"), ("flash_calls", "flash_plan")):
            torch.cuda.synchronize()
            started = time.perf_counter()
            forest.tensors(names, "cuda")
            torch.cuda.synchronize()
            passed = 1e3 * (time.perf_counter() - started)
            found[" ".join(names)] = min(passed, found.get(" ".join(names), passed))
    return found


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in zip(one, two, strict=True))


def repeats(ready: Ready) -> bool:
    """Whether repeated runs give the same bits while another stream keeps the GPU busy."""
    other, work = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    first: list[Tensor] = []
    for turn in range(REPLAYS):
        with torch.cuda.stream(other):
            for _ in range(5 + 9 * turn):
                torch.mm(work[: 512 + 700 * turn], work)
        found = ready.results()
        first = first or found
        if not same(first, found):
            return False
    return True


def measure(candidate: Candidate, problem: Problem, exact: list[Tensor]) -> dict[str, Any]:
    """Errors, replays, times and memory of one implementation."""
    started = time.perf_counter()
    with candidate.mode():
        small = candidate.make(problem.heads(1)).results()
        found: dict[str, Any] = {"errors": {n: relative_error(x, y) for n, x, y in zip(NAMES, small, exact, strict=True)}}
        del small
        ready = candidate.make(problem)
        found["first_run_s"] = time.perf_counter() - started
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = ready.forward()
        ready.backward(made)
        torch.cuda.synchronize()
        found["peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        found["forward_ms"] = milliseconds(ready.forward, candidate.slow)
        found["backward_ms"] = milliseconds(lambda: ready.backward(made), candidate.slow)
        if not candidate.slow and candidate.like is not None:
            found["repeats"] = repeats(ready)
    found["forward_tflops"] = problem.flops / found["forward_ms"] / 1e9
    found["backward_tflops"] = 2.5 * problem.flops / found["backward_ms"] / 1e9
    found["seconds"] = time.perf_counter() - started
    return found


def judge(candidate: Candidate, entries: dict[str, dict[str, Any]], exact: list[Tensor]) -> str:
    """ "green", or what is wrong. Gradients that are zero in exact arithmetic have no relative error and are not judged."""
    if candidate.like is None:
        return "baseline"
    wrong, dense = entries[candidate.name]["errors"], entries.get(candidate.like, {}).get("errors")
    if dense is None:
        return f"not judged, {candidate.like} did not run"
    judged = [n for n, x in zip(NAMES, exact, strict=True) if x.norm() > 1e-6 * exact[0].norm()]
    far = [n for n in judged if not wrong[n] <= 2 * dense[n]]
    if far:
        return f"RED: errors of {', '.join(far)}"
    return "RED: bits differ" if candidate.replays and entries[candidate.name].get("repeats") is False else "green"


def run_case(name: str, dim: int, candidates: list[Candidate]) -> dict[str, Any]:
    started = time.perf_counter()
    problem = Problem.make(CASES[name](), dim)
    exact = problem.heads(1).exact()
    entries: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    candidates = [candidate for candidate in candidates if candidate.least <= problem.forest.num_tokens]
    for candidate in candidates:
        try:
            entries[candidate.name] = measure(candidate, problem, exact)
        except Exception as error:  # a baseline that refuses a case must not end the run
            failed[candidate.name] = f"{type(error).__name__}: {error}"[:300]
            traceback.print_exc()
        torch.cuda.empty_cache()
    for candidate in candidates:
        if candidate.name in entries:
            entries[candidate.name]["gate"] = judge(candidate, entries, exact)
    forest = problem.forest
    return {
        "name": name, "dim": dim, "T": forest.num_tokens, "N": forest.logical_tokens, "I": forest.sharing, "pairs": problem.pairs,
        "calls": forest.tensor("flash_calls", "cuda").shape[0] - 1, "plan_ms": plan_times(problem), "entries": entries, "failed": failed,
        "seconds": time.perf_counter() - started,
    }  # fmt: skip


def show(console: Console, case: dict[str, Any]) -> None:
    title = f"{case['name']}: D = {case['dim']}, T = {case['T']}, I = {case['I']:.2f}, {case['seconds']:.0f} s"
    table = Table(title=title)
    for head in ("", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "MiB", "repeats", "times best dense", "gate"):
        table.add_column(head, justify="left" if not head else "right")
    total = {name: entry["forward_ms"] + entry["backward_ms"] for name, entry in case["entries"].items()}
    dense = min((ms for name, ms in total.items() if name.startswith("dense_")), default=None)
    for name, entry in case["entries"].items():
        figures = [f"{entry[f'{d}_{u}']:.{p}f}" for d in ("forward", "backward") for u, p in (("ms", 3), ("tflops", 0))]
        ratio = f"{dense / total[name]:.2f}" if dense and entry["gate"] == "green" else "-"
        table.add_row(name, *figures, f"{entry['peak_mib']:.0f}", str(entry.get("repeats", "-")), ratio, entry["gate"])
    console.print(table)
    for name, entry in case["entries"].items():
        console.print(f"  {name}: " + ", ".join(f"{n} {value:.2e}" for n, value in entry["errors"].items()))
    for name, text in case["failed"].items():
        console.print(f"  {name} FAILED: {text}", markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--dims", type=int, nargs="*", default=[128, 64])
    parser.add_argument("--impls", nargs="*", choices=[c.name for c in CANDIDATES], default=[c.name for c in CANDIDATES])
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.attention: expected a CUDA GPU, found none", file=sys.stderr)
        return 2
    console = Console(width=150)
    properties = torch.cuda.get_device_properties(0)
    gpu = {"name": properties.name, "processors": properties.multi_processor_count, "cuda": torch.version.cuda}
    packages = {name: importlib.metadata.version(name) for name in ("triton", "nvidia-cudnn-cu13") if _installed(name)}
    cases: list[dict[str, Any]] = []
    for dim in chosen.dims:
        for name in chosen.cases:
            cases.append(run_case(name, dim, [c for c in CANDIDATES if c.name in chosen.impls]))
            show(console, cases[-1])
            head = {"gpu": gpu, "packages": packages | {fa4.PACKAGE: fa4.version()}, "heads": [HEADS, KV_HEADS], "dtype": "bfloat16"}
            write(chosen.out, head | {"cases": cases})
    red = [entry for case in cases for entry in case["entries"].values() if entry["gate"].startswith("RED")]
    return int(bool(red))


def _installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())
