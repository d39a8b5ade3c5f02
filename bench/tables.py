"""The tables of README.md, made from the committed results: run it after a benchmark.

python -m bench.tables           # writes them into README.md
python -m bench.tables --check   # exit code 1 if README.md holds others
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- bench.tables: begin -->", "<!-- bench.tables: end -->"


def load(name: str) -> dict[str, Any]:
    """A committed result file."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def source(result: dict[str, Any]) -> str:
    """One line: command, date, hardware and versions."""
    hardware, versions = result["hardware"], result["versions"]
    return (
        f"`{result['command']}`, {result['date'][:10]}, {hardware['processor']}, {hardware['cores']} cores, "
        f"torch {versions['torch']}, transformers {versions['transformers']}."
    )


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def step_table(result: dict[str, Any]) -> str:
    sizes = result["sizes"]
    lines = []
    for case in result["cases"]:
        dense, shared = case["dense"], case["shared"]
        times, peaks = (f"{dense['wall_median_s']:.2f}", f"{shared['wall_median_s']:.2f}"), (dense["peak_bytes"], shared["peak_bytes"])
        lines.append(
            [case["name"], f"{case['I']:.2f}", *times, f"{case['speedup']['wall_median']:.2f}", *(f"{peak / 2**20:.0f}" for peak in peaks)]
        )
    text = (
        f"A training step, compiled dense against compiled shared, {result['threads']} thread(s); rows of {sizes['columns']} tokens, "
        f"{sizes['layers']} layers of width {sizes['hidden']}; at I = 1 the dense graph runs. {source(result)}"
    )
    head = ("rows", "I", "dense, s", "shared, s", "times faster", "peak dense, MiB", "peak shared, MiB")
    return f"{text}\n\n{table(head, lines)}"


def plan_table(result: dict[str, Any]) -> str:
    lines = []
    for case in result["cases"]:
        names = ("forest", "of a call", "of a call, and tensors", "of a batch seen before")
        times = [f"{case['times'][name]['wall_median_ms']:.1f} ({case['times'][name]['cpu_min_ms']:.1f})" for name in names]
        lines.append([case["name"], f"{case['I']:.2f}", f"{case['nodes']}", *times])
    first = result["cases"][0]
    text = (
        f"Host planning of {first['rows']} rows of {first['columns']:,} tokens in ms, one core: median of wall clock (least processor "
        f"time), at a load average of {first['load_average'][0]}. {source(result)}"
    )
    head = ("batch", "I", "nodes", "forest", "all of a call", "and its tensors", "seen before")
    return f"{text}\n\n{table(head, lines)}"


def attention_table(result: dict[str, Any]) -> str:
    """Only cases whose errors and replays passed their gates have times."""
    lines = []
    for case in result["cases"]:
        right = case["errors_within_twice_dense"] and case["deterministic_replays_equal"]
        names = ("composed", "composed_deterministic", "blocked", "dense_flash", "dense_cudnn")
        times = [case["times"].get(name) for name in names]
        shown = [f"{t['forward_ms']:.1f} / {t['backward_ms']:.1f}" if right and t else "-" for t in times]
        lines.append([case["name"], f"{case['I']:.2f}", *shown])
    hardware, versions = result["hardware"], result["versions"]
    text = (
        f"Attention on a GPU, {result['dtype']}, {result['heads'][0]} query and {result['heads'][1]} key heads, forward / backward in ms; "
        f"dense is causal attention of all rows. `{result['command']}`, {result['date'][:10]}, {gpu_name(result)}, "
        f"torch {versions['torch']}, {hardware['cores']} cores."
    )
    head = ("forest", "I", "composed", "composed, deterministic", "portable", "dense, flash", "dense, cuDNN")
    return f"{text}\n\n{table(head, lines)}"


def gpu_name(result: dict[str, Any]) -> str:
    """What the GPU calls itself."""
    return str(result["gpu"]["name"])


def render() -> str:
    """What stands between the two marks in README.md, marks included."""
    parts = [step_table(load("cpu_step.json")), plan_table(load("plan.json")), attention_table(load("attention.json"))]
    return "\n".join([BEGIN, "\n\n".join(parts), END])


def placed(text: str) -> str:
    """README's text with the tables of now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + render() + after


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The tables of README.md, from bench/results.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if they are others")
    options = parser.parse_args(arguments)
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = placed(old)
    if not options.check:
        readme.write_text(new, encoding="utf-8")
    return int(options.check and old != new)


if __name__ == "__main__":
    sys.exit(main())
