"""A whole training step of decoders of about a billion parameters: compiled dense against compiled shared, and against baselines.

Forward, loss and backward in bf16, parameters too; no optimizer and no activation checkpointing. In one process, with one set of
parameters, on the same rows:

    dense           torch.compile(model), Inductor, causal attention without a mask by cuDNN or else flash kernels, sizes dynamic
    dense_static    the same, compiled anew for the sizes of every case
    shared          torch.compile(model, backend="shared_prefix"), which gets the rows and finds the prefixes itself, in every step
    flex_tree, gathered, prefix_grouper
                    packed by hand, see `bench/models/objectives.py`; packing and masks are made before the step and not counted

An implementation is timed only if its gate is green: loss and all gradients, against float32 dense rows, have at most 1.25 times the
error of `dense` (2 times for baselines, and for each single parameter), the packed graph ran (as `last_run()` says; at I below 1.1 the
dense one has to), and experts are counted exactly. A step is the wall clock from an idle device to an idle device; implementations
alternate, batches change from step to step.

    python -m bench.step                                     # all models and cases, writes bench/results/step.json
    python -m bench.step --models llama --cases 1 2 --impls dense shared --layers 2 --out FILE
    python -m bench.step --device cpu --tiny                 # whether it works, in a minute
    python -m bench.step --models qwen3 --lock FILE --out A       # several at once: they compile together and measure in turn
    python -m bench.step --merge A B                         # their outputs as one
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import sp_compile
from bench import step_report
from bench.models import decoders, objectives
from bench.models.objectives import IGNORED
from bench.report import write
from bench.step_gates import BASELINE_GATE, GATE, Errors, wrong_counts, wrong_run
from sp_compile.backend import shared_prefix
from sp_compile.layout import flash_calls as _flash_calls  # noqa: F401  (registers what attention on a GPU reads)
from sp_compile.layout.forest import Forest

RESULT = Path(__file__).parent / "results" / "step.json"
IMPLEMENTATIONS = ("dense", "dense_static", "shared", *objectives.BASELINES)
BATCHES = 6  # more than the forests that are remembered: every step plans anew


@dataclasses.dataclass(frozen=True)
class Case:
    """`groups` prompts of P tokens, `rows` rows each with R tokens of their own."""

    name: str
    prompt: int
    rows: int
    completion: int
    groups: int = 1

    def shrunk(self, by: int) -> Case:
        return dataclasses.replace(self, prompt=self.prompt // by, completion=max(1, self.completion // by))

    def batch(self, vocabulary: int, seed: int, device: str) -> dict[str, Tensor]:
        """input_ids, labels int64 [B, L]; advantages [B] for the policy loss."""
        generator = torch.Generator().manual_seed(seed)
        count, columns = self.groups * self.rows, self.prompt + self.completion
        ids = torch.randint(3, vocabulary, (count, columns), generator=generator)
        heads = torch.randint(3, vocabulary, (self.groups, 1, self.prompt), generator=generator)
        ids[:, : self.prompt] = heads.expand(-1, self.rows, -1).flatten(0, 1)
        given = {"input_ids": ids, "labels": ids.clone(), "advantages": torch.randn(count, generator=generator)}
        return {name: value.to(device) for name, value in given.items()}


CASES = (
    Case("4 rows, nothing shared", prompt=0, rows=4, completion=2048),
    Case("star P=1536 G=8 R=1152", prompt=1536, rows=8, completion=1152),
    Case("star P=4096 G=8 R=384", prompt=4096, rows=8, completion=384),
    Case("4 stars P=1024 G=8 R=128", prompt=1024, rows=8, completion=128, groups=4),
    Case("star P=8192 G=8 R=768", prompt=8192, rows=8, completion=768),
)
FIRST = Case("compiles", prompt=1024, rows=8, completion=128)  # everything is compiled on a batch of its own


@dataclasses.dataclass
class Implementation:
    """One way to take the step. `prepare` turns a batch of rows into its inputs; `owner` holds the parameters it differentiates."""

    name: str
    owner: nn.Module
    call: Callable[..., dict[str, Tensor]]
    prepare: Callable[[dict[str, Tensor]], dict[str, Any]]

    def step(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Forward and backward. Gradients stay in `owner`; the caller clears them."""
        out = self.call(**inputs)
        out["loss"].backward()
        return {name: value.detach() for name, value in out.items()}

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.owner.named_parameters() if p.grad is not None}

    def clear(self) -> None:
        self.owner.zero_grad(set_to_none=True)


class Bench:
    """One model with all its implementations."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options, self.device = name, options, options.device
        self.model = self.build("sdpa" if options.attention == "sdpa" else objectives.register(options.attention))
        self.made: dict[str, Implementation] = {}
        self.compile_s: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self.dense_errors: Errors | None = None  # on the batch at hand

    def build(self, attention: str, **more: Any) -> nn.Module:
        given = {"layers": self.options.layers, "small": self.options.tiny, "device": self.device}
        return decoders.build(self.name, attention=attention, **given, **more).to(getattr(torch, self.options.dtype))

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.vocab_size)

    def sized(self, case: Case) -> Case:
        return case.shrunk(32) if self.options.tiny else case

    def compile(self, console: Console) -> None:
        """Makes the implementations and takes two steps with each, the second one timed off the first."""
        batch = self.sized(FIRST).batch(self.vocabulary, BATCHES, self.device)
        for name in self.options.impls:
            with self.excused(name, console):
                one = self.packed(name) if name in objectives.BASELINES else self.dense(name)
                prepared = one.prepare(batch)
                first, second = (timed(one, prepared, self.device) for _ in range(2))
                self.made[name], self.compile_s[name] = one, (first - second) / 1e3
                console.print(f"{self.name}: {name} compiled in {self.compile_s[name]:.0f} s", highlight=False)
                one.clear()
            if self.device == "cuda":
                torch.cuda.empty_cache()

    @contextlib.contextmanager
    def excused(self, name: str, console: Console) -> Iterator[None]:
        """What one implementation cannot do does not end the others."""
        try:
            yield
        except Exception as error:
            console.print(traceback.format_exc(limit=-4), markup=False)
            self.failed[name] = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]

    def dense(self, name: str) -> Implementation:
        rows = objectives.Rows(self.model, self.options.loss)
        inner = self.options.inner
        if name == "shared":
            given: dict[str, Any] = {"backend": shared_prefix, "options": {"inner": inner}}
        else:
            given = {"backend": inner, "dynamic": name == "dense"}
        return Implementation(name, self.model, torch.compile(rows, **given), lambda batch: batch)

    def packed(self, name: str) -> Implementation:
        model = self.build(objectives.register(name))
        for (_, one), (_, other) in zip(model.named_parameters(), self.model.named_parameters(), strict=True):
            one.data = other.data
        describe = objectives.BASELINES[name][1]

        def prepare(batch: dict[str, Tensor]) -> dict[str, Any]:
            forest, inputs = objectives.packed_inputs(batch)
            return inputs | describe(forest, batch["input_ids"].device)

        compiled = torch.compile(objectives.Packed(model, self.options.loss), backend=self.options.inner, dynamic=True)
        return Implementation(name, model, compiled, prepare)


def reference(bench: Bench, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the same parameters in float32, eager, row by row; mixtures of experts and all."""
    wide = bench.build(objectives.register("causal"), experts="eager").float()
    wide.load_state_dict(bench.model.state_dict())
    rows = objectives.Rows(wide, bench.options.loss)
    total, counted = torch.zeros((), device=bench.device), int((batch["labels"][:, 1:] != IGNORED).sum())
    for number in range(len(batch["input_ids"])):
        row = {name: value[number : number + 1] for name, value in batch.items()}
        part = rows(**row)["loss"] * (int((row["labels"][:, 1:] != IGNORED).sum()) / counted)
        part.backward()
        total += part.detach()
    return total, {name: p.grad for name, p in wide.named_parameters() if p.grad is not None}


@contextlib.contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Holds a file's lock, so that of several processes one measures at a time."""
    if path is None:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def best_attention() -> Iterator[None]:
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(one: Implementation, inputs: dict[str, Any], device: str) -> float:
    """Milliseconds of a step."""
    one.clear()
    settle(device)
    started = time.perf_counter()
    one.step(inputs)
    settle(device)
    return 1e3 * (time.perf_counter() - started)


def judged(bench: Bench, name: str, prepared: dict[str, Any], exact: tuple[Tensor, dict[str, Tensor]], found: dict[str, Any]) -> list[str]:
    """Why an implementation must not be timed on a batch. `found` gets its errors and what the shared run said."""
    one = bench.made[name]
    one.clear()
    out = one.step(prepared)
    errors = Errors.of((out["loss"], one.gradients()), exact)
    one.clear()
    if name == "dense":
        bench.dense_errors = errors
    found["errors"][name] = {"loss": errors.loss, "gradients": errors.gradients, "worst": max(errors.each.values())}
    said = wrong_counts(out)
    if name == "shared":
        run = sp_compile.last_run()
        said += wrong_run(run, found["T"], found["I"])
        found |= {"kernels": dict(run.kernels), "compiles": run.compiles}
    if bench.dense_errors is None:
        return [*said, "there is no dense run to be judged by"]
    return said + errors.beyond(bench.dense_errors, BASELINE_GATE if name in objectives.BASELINES else GATE)


def measure(bench: Bench, case: Case, console: Console) -> dict[str, Any]:
    """Everything about one case; implementations that fail or are wrong have a reason instead of times."""
    device = bench.device
    batches = [case.batch(bench.vocabulary, seed, device) for seed in range(BATCHES)]
    forest = Forest.from_tokens(batches[0]["input_ids"].cpu())
    found: dict[str, Any] = {
        "model": bench.name, "name": case.name, "rows": len(batches[0]["input_ids"]), "columns": case.prompt + case.completion,
        "N": forest.logical_tokens, "T": forest.num_tokens, "I": forest.sharing,
        "layers": bench.model.config.num_hidden_layers, "parameters": sum(p.numel() for p in bench.model.parameters()),
        "compile_s": bench.compile_s, "gate": {}, "errors": {}, "steps": {}, "plan_ms": plan_milliseconds(batches, device),
    }  # fmt: skip
    exact = reference(bench, batches[0])
    inputs: dict[str, list[dict[str, Any]]] = {}
    bench.dense_errors = None
    bench.failed = {name: why for name, why in bench.failed.items() if name not in bench.made}
    for name in bench.made:
        with bench.excused(name, console):
            inputs[name] = [bench.made[name].prepare(batch) for batch in batches]
            found["gate"][name] = judged(bench, name, inputs[name][0], exact, found)
        bench.made[name].clear()
    found["gate"] |= {name: [why] for name, why in bench.failed.items()}
    del exact
    green = [name for name, said in found["gate"].items() if not said]
    if device == "cuda":
        torch.cuda.empty_cache()
    times: dict[str, list[float]] = {name: [] for name in green}
    for repeat in range(bench.options.repeats + 1):
        for name in green if repeat % 2 else reversed(green):
            milliseconds = timed(bench.made[name], inputs[name][repeat % BATCHES], device)
            if repeat:  # the first one warms up
                times[name].append(milliseconds)
    for name in green:
        found["steps"][name] = described(bench.made[name], inputs[name], times[name], found, device)
    return found


def described(one: Implementation, inputs: list[dict[str, Any]], times: list[float], case: dict[str, Any], device: str) -> dict[str, Any]:
    """Times of one implementation, memory, and where a step on a batch not seen lately goes."""
    seconds = median(times) / 1e3
    entry: dict[str, Any] = {
        "median_ms": 1e3 * seconds, "min_ms": min(times), "all_ms": times,
        "logical_tokens_per_s": case["N"] / seconds, "physical_tokens_per_s": case["T"] / seconds,
    }  # fmt: skip
    if device != "cuda":
        return entry
    one.clear()
    settle(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    one.step(inputs[0])
    settle(device)
    entry["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    one.clear()
    try:
        return entry | step_report.where_time_goes(lambda: one.step(inputs[1]), one.clear)
    except Exception as error:  # a profiler that fails takes no times away
        return entry | {"profile": f"failed: {error}"}


def plan_milliseconds(batches: list[dict[str, Tensor]], device: str) -> float:
    """Median time on the host to find a batch's forest and describe it to the device; the copy of the ids is left out."""
    times = []
    for batch in batches:
        ids = batch["input_ids"].cpu()
        settle(device)
        started = time.perf_counter()
        forest = Forest.from_tokens(ids)
        forest.tensors(("row", "column", "end", "count", "index", "flash_calls", "flash_plan"), device)
        times.append(1e3 * (time.perf_counter() - started))
    return median(times)


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(decoders.CONFIGS), default=list(decoders.CONFIGS))
    parser.add_argument("--cases", type=int, nargs="*", default=[0, 1, 2], help=f"of {len(CASES)} (default: %(default)s)")
    parser.add_argument("--impls", nargs="*", choices=IMPLEMENTATIONS, default=["dense", "shared", "flex_tree", "gathered"])
    parser.add_argument("--loss", choices=("labels", "policy"), default="labels")
    parser.add_argument("--attention", choices=("causal", "sdpa"), default="causal", help="of rows: without a mask, or transformers' own")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--inner", choices=("inductor", "aot_eager", "eager"), help="compiler (default: inductor, with --tiny eager)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="(default: bfloat16, with --tiny float32)")
    parser.add_argument("--tiny", action="store_true", help="small models and short rows")
    parser.add_argument("--lock", type=Path, help="a file that processes measuring on one GPU have in common")
    parser.add_argument("--merge", type=Path, nargs="*", help="outputs to put together; nothing is measured")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(given)
    options.inner = options.inner or ("eager" if options.tiny else "inductor")
    options.dtype = options.dtype or ("float32" if options.tiny else "bfloat16")
    options.impls = ["dense", *(name for name in options.impls if name != "dense")]  # the others are judged by it
    return options


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    if options.merge:
        step_report.merge(options.merge, options.out)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("bench.step: expected a CUDA GPU, found none (--device cpu --tiny runs without)", file=sys.stderr)
        return 2
    console = Console(width=150)
    cases: list[dict[str, Any]] = []
    with best_attention():
        for name in options.models:
            torch._dynamo.reset()
            bench = Bench(name, options)
            bench.compile(console)
            with locked(options.lock):
                for number in options.cases:
                    cases.append(measure(bench, bench.sized(CASES[number]), console))
                    step_report.show(console, cases[-1])
                    kept = {name: getattr(options, name) for name in ("loss", "attention", "dtype", "inner", "repeats")}
                    write(options.out, {"gpu": step_report.gpu(options.device), **kept, "cases": cases})
    return int(any(said for case in cases for said in case["gate"].values()))


if __name__ == "__main__":
    sys.exit(main())
