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


def step_table(result: dict[str, Any], what: str = "") -> str:
    """Of `bench.cpu_step`, or of `bench.hybrid_step` with a text that says what its models are."""
    sizes = result["sizes"]
    what = what or f"{sizes['layers']} layers of width {sizes['hidden']}; at I = 1 the dense graph runs"
    lines = []
    for case in result["cases"]:
        dense, shared = case["dense"], case["shared"]
        times, peaks = (f"{dense['wall_median_s']:.2f}", f"{shared['wall_median_s']:.2f}"), (dense["peak_bytes"], shared["peak_bytes"])
        lines.append(
            [case["name"], f"{case['I']:.2f}", *times, f"{case['speedup']['wall_median']:.2f}", *(f"{peak / 2**20:.0f}" for peak in peaks)]
        )
    text = (
        f"A training step, compiled dense against compiled shared, {result['threads']} thread(s); rows of {sizes['columns']} tokens, "
        f"{what}. {source(result)}"
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


def attention_table(result: dict[str, Any], later: dict[str, Any]) -> str:
    """Only entries whose errors and replays passed their gates have times; a ratio is to the fastest dense one.

    `later` is another run, of which the kernels that the first one has not are shown.
    """
    lines = []
    own = ("fa4_ordered, deterministic", "triton")
    names = ("fa4_blocks", own[0], "fa4_mixed, deterministic", own[1], "chains_cuda, deterministic", "flex", "dense_cudnn", "dense_fa4")
    more = {(case["name"], case["dim"]): case["entries"] for case in later["cases"]}
    for case in result["cases"]:
        if case["T"] == 1 or case["dim"] != 128:  # launches only; the file has head dim 64 too
            continue
        given = case["entries"] | {name: entry for name, entry in more[case["name"], case["dim"]].items() if name in own}
        entries = {name: entry for name, entry in given.items() if entry["gate"] in ("green", "baseline")}
        total = {name: entry["forward_ms"] + entry["backward_ms"] for name, entry in entries.items()}
        dense = min((ms for name, ms in total.items() if name.startswith("dense_")), default=None)
        shown = [f"{e['forward_ms']:.1f} / {e['backward_ms']:.1f}" if (e := entries.get(name)) else "-" for name in names]
        best = [min((total[name] for name in names[span] if name in total), default=None) for span in (slice(0, 2), slice(1, 4))]
        ratios = [f"{dense / ms:.2f}" if dense and ms else "-" for ms in best]
        lines.append([case["name"], f"{case['I']:.2f}", *shown, *ratios])
    versions, packages = result["versions"], result["packages"]
    text = (
        f"Attention on a GPU, {result['dtype']}, {result['heads'][0]} query and {result['heads'][1]} key heads of 128, forward / backward "
        f"in ms; dense is causal attention of all rows, and ratios are those of the fastest to the fastest dense one, of all and of the "
        f"reproducible ones. `{result['command'].split(' --')[0]}`, {result['date'][:10]}, {gpu_name(result)}, "
        f"torch {versions['torch']}, flash-attn-4 {packages['flash-attn-4']}; the columns of ordered sums and of Triton are of another "
        f"run, {later['date'][:10]}, beside other programs that were compiling."
    )
    head = ("forest", "I", "FA4 blocks", "FA4, ordered sums, det.", "FA4, composed, det.", "Triton, det.", "torch's flash, det.",
            "FlexAttention", "dense, cuDNN", "dense, FA4", "times faster", "det.")  # fmt: skip
    return f"{text}\n\n{table(head, lines)}"


def gpu_step_table(result: dict[str, Any]) -> str:
    """Only steps whose gates were green have times; ratios are to the faster dense one."""
    lines = []
    for case in result["cases"]:
        steps = case["steps"]
        dense = [steps[name]["median_ms"] for name in ("dense", "dense_static") if name in steps]
        names = ("shared", "flex_tree", "gathered")
        times = [f"{steps[name]['median_ms']:.0f}" if name in steps else "-" for name in names]
        ratio = min(dense) / steps["shared"]["median_ms"] if dense and "shared" in steps else None
        figures = [f"{ratio:.2f}", f"{ratio / case['I']:.2f}"] if ratio else ["-", "-"]
        peaks = [f"{steps[name]['peak_bytes'] / 2**30:.1f}" if name in steps else "-" for name in ("dense", "shared")]
        named = f"{case['model']}, {case['layers']} layers, {case['parameters'] / 1e9:.2f} B: {case['name']}"
        lines.append([named, f"{case['I']:.2f}", f"{min(dense):.0f}" if dense else "-", *times, *figures, *peaks])
    versions = result["versions"]
    text = (
        f"A training step on a GPU in ms, {result['dtype']}, compiled by Inductor; dense with cuDNN or flash attention. "
        f"`{result['command']}`, {result['date'][:10]}, {gpu_name(result)}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}."
    )
    packings = ("FlexAttention tree", "gathered keys")
    head = ("model and rows", "I", "dense", "shared", *packings, "times faster", "of I", "peak dense, GiB", "shared")
    return f"{text}\n\n{table(head, lines)}"


def gpu_name(result: dict[str, Any]) -> str:
    """What the GPU calls itself."""
    return str(result["gpu"]["name"])


def render() -> str:
    """What stands between the two marks in README.md, marks included."""
    hybrids = load("hybrid_step.json")
    millions = "/".join(sorted({f"{case['parameters'] / 1e6:.0f}" for case in hybrids["cases"]}))
    models = f"hybrids of width {hybrids['sizes']['hidden']} and {millions} million parameters (Mamba-2; gated delta rules)"
    parts = [
        step_table(load("cpu_step.json")),
        step_table(hybrids, models),
        plan_table(load("plan.json")),
        attention_table(load("attention.json"), load("attention_ordered.json")),
    ]
    if (RESULTS / "step.json").exists():
        parts.append(gpu_step_table(load("step.json")))
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
