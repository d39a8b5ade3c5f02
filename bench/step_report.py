"""Where the time of a step on a GPU goes, and how `bench.step` shows it."""

from __future__ import annotations

import collections
import json
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

KINDS = (
    ("attention", r"flash|fmha|sdpa|attention|flex_att|_mha"),
    ("products", r"gemm|nvjet|cutlass|cublas|xmma|gemv|splitk|grouped|dot_kernel"),
    ("fused", r"^triton_"),
    ("rows", r"index|gather|scatter|sort|radix|cub::|thrust|scan|unique|topk"),
    ("copies", r"^mem(cpy|set)"),
)
SYNCHRONISING = re.compile(r"cuda(Stream|Device|Event)Synchronize")


def kind_of(kernel: str) -> str:
    """The first kind whose pattern is found in a kernel's name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel, re.IGNORECASE)), "other")


def where_time_goes(step: Callable[[], Any], clear: Callable[[], None]) -> dict[str, Any]:
    """Kernel time by kind, the longest kernels, and what made the host wait, of one step each."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    clear()
    kinds: dict[str, float] = collections.Counter()
    kernels: dict[str, list[float]] = collections.defaultdict(list)
    waits, copies = -1, 0  # the last wait is ours
    for event in recorded.profiler.kineto_results.events():
        name = event.name()
        if event.device_type() == DeviceType.CUDA and event.duration_ns() and not event.is_user_annotation():
            kinds[kind_of(name)] += event.duration_ns() / 1e6
            kernels[name].append(event.duration_ns() / 1e6)
            copies += name.startswith("Memcpy DtoH")
        elif SYNCHRONISING.fullmatch(name):
            waits += 1
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:25]
    return {
        "kernel_ms": dict(sorted(kinds.items())),
        "kernels_ms": sum(kinds.values()),
        "launches": sum(map(len, kernels.values())),
        "host_waits": waits,
        "copies_to_host": copies,
        "synchronisations": synchronisations(step, clear),
        "longest": [{"name": name[:160], "ms": sum(times), "calls": len(times)} for name, times in longest],
    }


def synchronisations(step: Callable[[], Any], clear: Callable[[], None]) -> dict[str, int]:
    """How often each line of Python made the host wait for the device, as torch's own check reports it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    clear()
    found = (one for one in caught if "called a synchronizing" in str(one.message))
    return dict(collections.Counter(f"{'/'.join(one.filename.split('/')[-3:])}:{one.lineno}" for one in found))


def gpu(device: str) -> dict[str, Any] | None:
    """What the GPU is; None on a CPU."""
    if device != "cuda":
        return None
    found = torch.cuda.get_device_properties(0)
    return {
        "name": found.name, "processors": found.multi_processor_count, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "python": sys.version.split()[0],
    }  # fmt: skip


def merge(paths: Sequence[Path], out: Path) -> None:
    """One file of the cases of several, with the head of the first and every command.

    Raises:
        ValueError: they come from other hardware, versions or settings.
    """
    first, *others = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    for other in others:
        differing = sorted(key for key in first if key not in ("cases", "command", "date") and first[key] != other.get(key))
        if differing:
            raise ValueError(f"merge: expected outputs of one machine and one setting, got other {', '.join(differing)}")
        first["cases"] += other["cases"]
        first["command"] += f"; {other['command']}"
    out.write_text(json.dumps(first, indent=2) + "\n", encoding="utf-8")


def speedup(case: dict[str, Any], name: str) -> float | None:
    """Against the faster of the dense ones; None where a gate is red."""
    dense = [case["steps"][one]["median_ms"] for one in ("dense", "dense_static") if one in case["steps"]]
    if not dense or name not in case["steps"]:
        return None
    return float(min(dense) / case["steps"][name]["median_ms"])


def show(console: Console, case: dict[str, Any]) -> None:
    """One case as a table, and what was wrong."""
    console.print(
        f"\n{case['model']}, {case['layers']} layers, {case['parameters'] / 1e6:.0f} M parameters; {case['name']}: N = {case['N']}, "
        f"T = {case['T']}, I = {case['I']:.2f}; plan {case['plan_ms']:.1f} ms",
        highlight=False,
    )
    table = Table()
    heads = (
        "",
        "step ms",
        "times faster",
        "of I",
        "tokens/s",
        "physical/s",
        "peak GiB",
        "compile s",
        "waits",
        "launches",
        "kernels ms",
        "by kind",
    )
    for head in heads:
        table.add_column(head, justify="left" if head in ("", "by kind") else "right")
    for name in case["gate"] | case["compile_s"]:
        entry, compiled = case["steps"].get(name), f"{case['compile_s'].get(name, 0):.0f}"
        if entry is None:
            table.add_row(name, "-", "-", "-", "-", "-", "-", compiled)
            continue
        ratio = speedup(case, name)
        device = [f"{entry[key]:.0f}" if key in entry else "" for key in ("host_waits", "launches", "kernels_ms")]
        kinds = ", ".join(f"{kind} {ms:.1f}" for kind, ms in entry.get("kernel_ms", {}).items())
        table.add_row(
            name,
            f"{entry['median_ms']:.1f}",
            f"{ratio:.2f}" if ratio else "-",
            f"{ratio / case['I']:.2f}" if ratio else "-",
            f"{entry['logical_tokens_per_s']:,.0f}",
            f"{entry['physical_tokens_per_s']:,.0f}",
            f"{entry['peak_bytes'] / 2**30:.1f}" if "peak_bytes" in entry else "",
            compiled,
            *device,
            kinds,
        )
    console.print(table)
    for name, errors in case["errors"].items():
        said = case["gate"].get(name)
        console.print(
            f"  {name}: gate {'RED' if said else 'green'}; errors: loss {errors['loss']:.1e}, gradients {errors['gradients']:.2e}, "
            f"worst parameter {errors['worst']:.2e}"
        )
    for name, said in case["gate"].items():
        for line in said[:4]:
            console.print(f"  {name}: {line}", markup=False)
        if len(said) > 4:
            console.print(f"  {name}: and {len(said) - 4} more", markup=False)
    for name, entry in case["steps"].items():
        if entry.get("synchronisations"):
            console.print(f"  {name} waits at {entry['synchronisations']}", markup=False)
