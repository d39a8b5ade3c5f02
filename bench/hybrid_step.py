"""One training step of two small hybrids on a CPU, compiled dense against compiled shared: one with Mamba-2, one with gated delta rules.

Layers are laid out as in Nemotron-H (Mamba-2, attention and feed-forward) and in Qwen3.5 (three gated delta rules, then attention), with
about 30 million parameters. Batches, gate and times are those of `bench.cpu_step`: a case whose loss or gradients disagree is not timed.

    python -m bench.hybrid_step                 # all cases, writes bench/results/hybrid_step.json
    python -m bench.hybrid_step --cases 0 2     # some of them
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from bench.cpu_step import Case, Run, make_runs, run_case, table
from bench.report import write

RESULT = Path(__file__).parent / "results" / "hybrid_step.json"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The models and the length of the rows."""

    hidden: int = 768
    vocabulary: int = 8192
    columns: int = 256


def nemotron_h(sizes: Sizes) -> nn.Module:
    """Mamba-2 with heads of 64 and states of 64, chunks of 64; feed-forward and attention between."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    kinds = ["mamba", "mlp", "mamba", "attention", "mlp"]
    torch.manual_seed(0)
    config = NemotronHConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=3 * sizes.hidden, num_hidden_layers=len(kinds),
        layers_block_type=kinds, num_attention_heads=8, num_key_value_heads=4, head_dim=sizes.hidden // 8,
        mamba_num_heads=sizes.hidden // 32, mamba_head_dim=64, ssm_state_size=64, n_groups=4, expand=2, chunk_size=64,
        initializer_range=0.05, use_cache=False,
    )  # fmt: skip
    return NemotronHForCausalLM(config).train()  # type: ignore[no-any-return]


def qwen3_5(sizes: Sizes) -> nn.Module:
    """Gated delta rules with heads of 64 in three layers of four."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    kinds = ["linear_attention"] * 3 + ["full_attention"]
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=3 * sizes.hidden // 2, num_hidden_layers=len(kinds),
        layer_types=kinds, num_attention_heads=8, num_key_value_heads=4, head_dim=sizes.hidden // 8, linear_num_key_heads=4,
        linear_num_value_heads=sizes.hidden // 64, linear_key_head_dim=64, linear_value_head_dim=64, linear_conv_kernel_dim=4,
        initializer_range=0.05, use_cache=False,
    )  # fmt: skip
    return Qwen3_5ForCausalLM(config).train()  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[Sizes], nn.Module]] = {"Nemotron-H": nemotron_h, "Qwen3.5": qwen3_5}
CASES = tuple((name, Case(f"{name}, 1 group of 8", sharing, goal=0.75 * sharing)) for name in MODELS for sharing in (2.0, 4.0))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A training step of hybrid models on a CPU, compiled dense against compiled shared.")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="numbers of cases (default: all)")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each kind (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULT, help="where the results go (default: %(default)s)")
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    options = parser.parse_args(arguments)
    sizes = Sizes(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Sizes)})
    console = Console(width=None if sys.stdout.isatty() else 160)
    results: list[dict[str, Any]] = []
    runs: tuple[Run, Run] | None = None
    model = None
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as progress:
        for number in options.cases:
            name, case = CASES[number]
            work = progress.add_task(f"{case.name}, I = {case.sharing:g}", total=options.repeats)
            if runs is None or name != model:
                runs, model = make_runs(case, functools.partial(MODELS[name], sizes)), name
            parameters = sum(p.numel() for p in runs[0].model.parameters())
            step = functools.partial(progress.advance, work)
            results.append({"parameters": parameters} | run_case(case, sizes, runs, options.repeats, step))
            write(options.out, {"sizes": dataclasses.asdict(sizes), "threads": torch.get_num_threads(), "cases": results})
    console.print(table(results))
    return 0 if all(one["gate"] is None for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
