"""One training step of a small Qwen3 on a CPU: compiled dense against compiled shared.

Every case is one batch of B rows and L columns whose rows repeat prompts. Both models are compiled by Inductor from the same
parameters. A case is timed only after its loss and every gradient agree and `last_run()` says that the packed graph ran; the two
steps then alternate, and medians are reported. Peak memory is that of all tensors allocated during one step, parameters left out.
A step returns the loss alone; one case returns the logits too, which then have to exist in rows.

    python -m bench.cpu_step                  # all cases, writes bench/results/cpu_step.json
    python -m bench.cpu_step --cases 0 2      # some of them
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

import sp_compile
from bench.report import load_average, write
from sp_compile.layout.forest import Forest

RESULT = Path(__file__).parent / "results" / "cpu_step.json"
LOSS_TOLERANCE = 1e-5  # float32, relative
GRADIENT_TOLERANCE = 1e-4  # float32, whole model, relative L2 norm of a parameter's gradient
ZERO_GRADIENT = 1e-4  # of the largest gradient's norm: what is smaller is measured against this, rounding is all there is to it


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The model and the length of the rows."""

    layers: int = 2
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    vocabulary: int = 4096
    columns: int = 512


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch: `groups` prompts with `completions` rows each, all of one length, so that the sharing ratio is close to `sharing`.

    With `ragged`, completions end at different columns and the model gets an attention mask. With `logits`, the compiled model returns
    them beside the loss.
    """

    name: str
    sharing: float
    groups: int = 1
    completions: int = 8
    ragged: bool = False
    logits: bool = False
    goal: float | None = None

    @property
    def form(self) -> tuple[Any, ...]:
        """Cases of one form run in the same compiled graphs."""
        return self.groups * self.completions, self.ragged, self.logits


CASES = (
    Case("8 rows, nothing shared", 1.0, goal=0.98),
    Case("1 group of 8", 2.0, goal=1.6),
    Case("1 group of 8", 4.0, goal=3.2),
    Case("1 group of 8, logits returned", 4.0, logits=True),
    Case("1 group of 4", 2.0, completions=4, goal=1.0),
    Case("4 groups of 4", 2.0, groups=4, completions=4, goal=1.6),
    Case("2 groups of 8, ragged", 3.0, groups=2, ragged=True, goal=2.4),
)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of every timed step: wall clock, and processor time of all threads."""

    wall: list[float]
    cpu: list[float]


def build_model(sizes: Sizes) -> Qwen3ForCausalLM:
    """Wide initialisation makes attention sharp, so that a wrong position shows in the gate."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        initializer_range=0.1,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config).train()


class Shape(Protocol):
    """What a batch needs to know of its sizes."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def columns(self) -> int: ...


def build_batch(case: Case, sizes: Shape) -> dict[str, Tensor]:
    """Random rows. With G rows a group, G L = I (P + G (L - P)) gives the length P of the prompt."""
    generator = torch.Generator().manual_seed(1)
    count, columns = case.completions, sizes.columns
    prompt = round(count * columns * (1 - 1 / case.sharing) / (count - 1))
    ids = torch.randint(0, sizes.vocabulary, (case.groups * count, columns), generator=generator)
    heads = torch.randint(0, sizes.vocabulary, (case.groups, 1, prompt), generator=generator)
    ids[:, :prompt] = heads.expand(-1, count, -1).flatten(0, 1)
    labels = ids.clone()
    if not case.ragged:
        return {"input_ids": ids, "labels": labels}
    lengths = torch.randint(prompt + (columns - prompt) // 2, columns + 1, (len(ids), 1), generator=generator)
    mask = torch.arange(columns) < lengths
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": labels.masked_fill(~mask, -100)}


class LossOnly(nn.Module):
    """The model's loss: logits that nobody asks for need not exist."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        return {"loss": self.model(**batch).loss}


@dataclasses.dataclass
class Run:
    """A model and its compiled form."""

    model: nn.Module
    compiled: Callable[..., Any]

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        """Forward with labels, and backward. Gradients stay in `model`; the caller clears them."""
        loss: Tensor = self.compiled(**batch)["loss"]
        loss.backward()
        return loss.detach()


def make_runs(case: Case, build: Callable[[], nn.Module]) -> tuple[Run, Run]:
    """Dense and shared, from the same parameters; nothing compiled before is kept."""
    torch._dynamo.reset()
    first = build()
    models = first, copy.deepcopy(first)
    dense, shared = (
        Run(model, torch.compile(model if case.logits else LossOnly(model), backend=backend))
        for model, backend in zip(models, ("inductor", "shared_prefix"), strict=True)
    )
    return dense, shared


def gate(case: Case, losses: tuple[Tensor, Tensor], dense: nn.Module, shared: nn.Module, run: Any) -> str | None:
    """None, or why the shared step must not be timed: a wrong number, or a dense run in disguise."""
    if run.refused:
        return f"refused: {run.refused[0]}"
    if run.shared != (case.sharing > 1):
        return f"expected shared = {case.sharing > 1}, last_run() says {run.shared}"
    if not abs(losses[1] - losses[0]) <= LOSS_TOLERANCE * abs(losses[0]):
        return f"loss {losses[1].item()} is not {losses[0].item()}"
    wanted, found = ({n: p.grad.double() for n, p in m.named_parameters() if p.grad is not None} for m in (dense, shared))
    if wanted.keys() != found.keys():
        return f"gradients of {sorted(wanted.keys() ^ found.keys())} exist in one run only"
    largest = max(float(g.norm()) for g in wanted.values())
    for name, want in wanted.items():
        error = float((found[name] - want).norm()) / max(float(want.norm()), ZERO_GRADIENT * largest)
        if not error <= GRADIENT_TOLERANCE:
            return f"gradient of {name} is off by {error:.1e}"
    return None


def alternate(runs: tuple[Run, ...], batch: dict[str, Tensor], repeats: int, tick: Callable[[], None]) -> list[Times]:
    """Times the steps one after the other, in the other order every second time, so that drift of the machine meets both."""
    times = [Times([], []) for _ in runs]
    for repeat in range(repeats):
        pairs = list(zip(runs, times, strict=True))
        for run, measured in pairs if repeat % 2 == 0 else reversed(pairs):
            run.model.zero_grad(set_to_none=True)
            wall, cpu = time.perf_counter(), time.process_time()
            run.step(batch)
            measured.wall.append(time.perf_counter() - wall)
            measured.cpu.append(time.process_time() - cpu)
        tick()
    return times


def peak_memory(run: Run, batch: dict[str, Tensor]) -> int:
    """Bytes of tensors alive at once during a step, over those alive before it; gradients included."""
    run.model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run.step(batch)
    now = peak = 0
    # Only the raw events have every allocation; those of `recorded.events()` are summed by op.
    raw = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(raw, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def planning_seconds(batch: dict[str, Tensor]) -> float:
    """Median time to find the forest of the batch, which every call pays, shared or not."""
    seconds = []
    keys, mask = [batch["input_ids"]], batch.get("attention_mask")
    for _ in range(20):
        start = time.perf_counter()
        Forest.from_tokens(*keys, keep=None if mask is None else mask != 0)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def run_case(case: Case, sizes: Shape, runs: tuple[Run, Run], repeats: int, tick: Callable[[], None]) -> dict[str, Any]:
    """Everything about one case; without times where the gate is red."""
    batch = build_batch(case, sizes)
    for one in runs:
        one.model.zero_grad(set_to_none=True)
    losses = runs[0].step(batch), runs[1].step(batch)
    run = sp_compile.last_run()
    found: dict[str, Any] = dataclasses.asdict(case) | {
        "rows": len(batch["input_ids"]),
        "columns": sizes.columns,
        "logical_tokens": run.logical_tokens,
        "physical_tokens": run.physical_tokens,
        "I": run.sharing,
        "kernels": dict(run.kernels),
        "gate": gate(case, losses, runs[0].model, runs[1].model, run),
    }
    if found["gate"] is not None:
        return found
    load = load_average()
    alternate(runs, batch, 2, lambda: None)
    times = alternate(runs, batch, repeats, tick)
    for name, measured in zip(("dense", "shared"), times, strict=True):
        found[name] = {
            "wall_median_s": median(measured.wall),
            "wall_min_s": min(measured.wall),
            "cpu_median_s": median(measured.cpu),
            "cpu_min_s": min(measured.cpu),
        }
    found["speedup"] = {key.removesuffix("_s"): found["dense"][key] / found["shared"][key] for key in found["dense"]}
    for name, one in zip(("dense", "shared"), runs, strict=True):
        found[name]["peak_bytes"] = peak_memory(one, batch)
    found["planning_s"] = planning_seconds(batch)
    found["load_average_before"], found["load_average_after"] = load, load_average()
    return found


def table(results: list[dict[str, Any]]) -> Table:
    shown = Table(title="Training step, compiled dense against compiled shared", title_justify="left")
    for heading in ("batch", "I", "tokens", "dense", "shared", "speed-up", "CPU time", "goal", "peak dense", "peak shared", "planning"):
        shown.add_column(heading, justify="left" if heading == "batch" else "right")
    for one in results:
        head = (one["name"], f"{one['I']:.2f}", f"{one['logical_tokens']} / {one['physical_tokens']}")
        if one["gate"] is not None:
            shown.add_row(*head, f"[red]{one['gate']}")
            continue
        dense, shared = one["dense"], one["shared"]
        shown.add_row(
            *head,
            f"{1e3 * dense['wall_median_s']:.0f} ms",
            f"{1e3 * shared['wall_median_s']:.0f} ms",
            f"{one['speedup']['wall_median']:.2f}",
            f"{one['speedup']['cpu_median']:.2f}",
            "" if one["goal"] is None else f"{one['goal']:.2f}",
            f"{dense['peak_bytes'] / 2**20:.0f} MiB",
            f"{shared['peak_bytes'] / 2**20:.0f} MiB",
            f"{1e3 * one['planning_s']:.2f} ms",
        )
    return shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A training step on a CPU, compiled dense against compiled shared.")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="numbers of cases (default: all)")
    parser.add_argument("--repeats", type=int, default=15, help="timed steps of each kind (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULT, help="where the results go (default: %(default)s)")
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    options = parser.parse_args(arguments)
    sizes = Sizes(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Sizes)})
    console = Console(width=None if sys.stdout.isatty() else 160)
    results: list[dict[str, Any]] = []
    runs: tuple[Run, Run] | None = None
    form: tuple[Any, ...] | None = None
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as progress:
        for number in options.cases:
            case = CASES[number]
            work = progress.add_task(f"{case.name}, I = {case.sharing:g}", total=options.repeats)
            if runs is None or form != case.form:
                runs, form = make_runs(case, functools.partial(build_model, sizes)), case.form
            results.append(run_case(case, sizes, runs, options.repeats, lambda work=work: progress.advance(work)))  # type: ignore[misc]
            write(options.out, {"sizes": dataclasses.asdict(sizes), "threads": torch.get_num_threads(), "cases": results})
    console.print(table(results))
    return 0 if all(one["gate"] is None for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
