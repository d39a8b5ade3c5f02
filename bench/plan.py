"""Host planning of a large batch: the forest from token ids, the arrays and tensors a graph asks for, and what one call does.

`forest and arrays` is what a collator would do. `of a call` is `batch.make_forest` as a compiled Qwen3 with attention mask and labels
calls it, which finds out besides which padding may be dropped. The model is compiled for a tiny batch and its planner is then given the
large one, with other tokens in every call. A batch that was seen before (by another model, or in another epoch) is recognised by its
content.

    python -m bench.plan                         # 64 rows of 16,384 tokens, writes bench/results/plan.json
    python -m bench.plan --rows 16 --columns 4096
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from bench.cpu_step import LossOnly, Sizes, build_model
from bench.report import load_average, write
from sp_compile import region
from sp_compile.backend import shared_prefix
from sp_compile.batch import make_forest
from sp_compile.layout.chains import attention_passes
from sp_compile.layout.forest import Forest

RESULT = Path(__file__).parent / "results" / "plan.json"
GOAL_MS = 10.0


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows in groups of `group`, whose first part, `shared` of the columns, is a prompt, or with several `turns` a deep tree."""

    name: str
    group: int
    shared: float
    turns: int = 1
    ragged: bool = False


CASES = (
    Case("nothing shared", 1, 0.0),
    Case("stars of 8, half shared", 8, 0.5),
    Case("stars of 16, 7/8 shared", 16, 0.875),
    Case("one star of 64, 7/8 shared", 64, 0.875),
    Case("equal rows", 64, 1.0),
    Case("trees of 16, 5 turns", 16, 0.9, turns=5),
    Case("stars of 8, half shared, right padding", 8, 0.5, ragged=True),
)


def call_planner() -> Callable[..., Forest]:
    """What a compiled Qwen3 does with `input_ids`, `attention_mask` and `labels` before its graph runs."""
    small = {"input_ids": torch.arange(24).repeat(4, 1), "attention_mask": torch.ones(4, 24, dtype=torch.int64)}
    small["input_ids"][:, 9:] += torch.arange(4)[:, None]
    small["attention_mask"][1:, 20:] = 0
    small["labels"] = small["input_ids"].masked_fill(small["attention_mask"] == 0, -100)
    model = build_model(Sizes(layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, vocabulary=64))
    compiled = torch.compile(LossOnly(model), backend=shared_prefix, options={"inner": "eager", "strict": True})
    with mock.patch.object(region, "make_forest", wraps=make_forest) as planned:
        compiled(**small)
    inputs, context, padding, values = planned.call_args.args
    names = {number: name for number, value in enumerate(values) for name, given in small.items() if value is given}
    if len(names) != len(small):
        raise RuntimeError(f"of {sorted(small)} the graph takes {sorted(names.values())} only")

    def plan(batch: dict[str, Tensor], fresh: bool = True) -> Forest:
        sizes = dict(zip((4, 24), batch["input_ids"].shape, strict=True))
        given = [sizes.get(v, v) if isinstance(v, int) else batch[names[n]] if n in names else v for n, v in enumerate(values)]
        if fresh:
            batch["input_ids"][:, -1] += 1
        return make_forest(inputs, context, padding, given)

    return plan


def build_batch(case: Case, rows: int, columns: int) -> dict[str, Tensor]:
    """Ids, mask and labels, [rows, columns] int64."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1 << 16, (rows, columns), generator=generator)
    for turn in range(case.turns):
        # Every turn but the first is shared by half as many rows as the one before it.
        size = max(1, min(case.group, rows) >> turn)
        start, stop = (int(case.shared * columns * (turn + k) / case.turns) for k in (0, 1))
        for first in range(0, rows, size):
            ids[first : first + size, start:stop] = ids[first, start:stop].clone()
    lengths = torch.full((rows, 1), columns)
    if case.ragged:
        lengths = torch.randint(int(columns * (case.shared + 1) / 2), columns + 1, (rows, 1), generator=generator)
    keep = torch.arange(columns) < lengths
    ids = ids.masked_fill(~keep, 0)
    return {"input_ids": ids, "attention_mask": keep.long(), "labels": ids.masked_fill(~keep, -100)}


def milliseconds(call: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Wall clock, and processor time, which a busy machine disturbs less."""
    call()
    wall, cpu = [], []
    for _ in range(repeats):
        started = time.perf_counter(), time.process_time()
        call()
        wall.append(1e3 * (time.perf_counter() - started[0]))
        cpu.append(1e3 * (time.process_time() - started[1]))
    return {"wall_median_ms": median(wall), "wall_min_ms": min(wall), "cpu_median_ms": median(cpu), "cpu_min_ms": min(cpu)}


def arrays(forest: Forest) -> None:
    """Every per-token array, the index of rows, and the attention passes."""
    _ = forest.end, forest.index
    attention_passes(forest)


TENSORS = ("row", "column", "end", "index", "attention_passes")
"""What the graph of a Qwen3 takes."""


def run_case(case: Case, planner: Callable[..., Forest], rows: int, columns: int, repeats: int) -> dict[str, Any]:
    batch = build_batch(case, rows, columns)
    ids, keep = batch["input_ids"], batch["attention_mask"] != 0 if case.ragged else None
    forest = Forest.from_tokens(ids, keep=keep)
    if planner(batch) != forest:
        raise RuntimeError(f"{case.name}: a call plans another forest than its ids and mask have")
    timed = {
        "forest": milliseconds(lambda: Forest.from_tokens(ids, keep=keep), repeats),
        "forest and arrays": milliseconds(lambda: arrays(Forest.from_tokens(ids, keep=keep)), repeats),
        "of a call": milliseconds(lambda: planner(batch), repeats),
        "of a call, and tensors": milliseconds(lambda: planner(batch).tensors(TENSORS, "cpu"), repeats),
        "of a batch seen before": milliseconds(lambda: planner(batch, fresh=False).tensors(TENSORS, "cpu"), repeats),
    }
    return dataclasses.asdict(case) | {
        "rows": rows,
        "columns": columns,
        "logical_tokens": forest.logical_tokens,
        "physical_tokens": forest.num_tokens,
        "nodes": forest.num_nodes,
        "I": forest.sharing,
        "times": timed,
        "goal_ms": GOAL_MS,
        "load_average": load_average(),
    }


def table(results: list[dict[str, Any]]) -> Table:
    names = list(results[0]["times"])
    shown = Table(title="Host planning in ms: median of wall clock (least processor time)", title_justify="left")
    for heading in ("batch", "tokens", "physical", "nodes", "I", *names):
        shown.add_column(heading, justify="left" if heading == "batch" else "right")
    for one in results:
        times = [f"{one['times'][name]['wall_median_ms']:.2f} ({one['times'][name]['cpu_min_ms']:.2f})" for name in names]
        counts = f"{one['logical_tokens']:,}", f"{one['physical_tokens']:,}", str(one["nodes"]), f"{one['I']:.2f}"
        shown.add_row(one["name"], *counts, *times)
    return shown


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Host planning of a large batch.")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--columns", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULT, help="where the results go (default: %(default)s)")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    cases = track(CASES, description="planning", console=console)
    planner = call_planner()
    results = [run_case(case, planner, options.rows, options.columns, options.repeats) for case in cases]
    console.print(table(results))
    write(options.out, {"cases": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
