"""Bytes and time per layer of context parallelism, on paper: what each scheme sends for C ranks, up to 1024.

Counts rows with the plans that a run would use, then multiplies by widths. Schemes for attention: `gather` (keys and values of all ranks,
queries and results converted: what `ops/over_ranks.py` does) and `heads` (all-to-all of q, k, v and results, Ulysses). For recurrent
layers: `states` (halo and states along the tree), `tokens` (all-to-all of all tokens by heads), `zigzag` (the layer lies in zigzag and has
to be converted in and out). Every number is for the rank that has most; `balance` is attention's mean work over the largest.

    python -m bench.cp_model                 # a table, and bench/results/cp_model.json
    python -m bench.cp_model --tokens 131072
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.report import write
from sp_compile.layout.forest import Forest
from sp_compile.layout.rank_plans import LAYOUTS, RankPlan
from sp_compile.layout.routes import route_between
from sp_compile.layout.shards import padded_work

RESULT = Path(__file__).parent / "results" / "cp_model.json"
RANKS = (2, 4, 8, 16, 64, 256, 1024)


@dataclasses.dataclass(frozen=True)
class Model:
    """Widths of a hybrid layer stack; bytes per element of activations (bf16) and of states (float32)."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    mamba_heads: int = 64
    mamba_dim: int = 64
    mamba_state: int = 128
    groups: int = 8
    width: int = 4
    element: int = 2
    state: int = 4

    @property
    def query_row(self) -> int:
        """Bytes of one token's queries, and of its results."""
        return self.heads * self.head_dim * self.element

    @property
    def key_row(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.kv_heads * self.head_dim * self.element

    @property
    def mamba_row(self) -> int:
        """Bytes of one token's x, B and C behind the convolution."""
        return (self.mamba_heads * self.mamba_dim + 2 * self.groups * self.mamba_state) * self.element

    @property
    def state_row(self) -> int:
        """Bytes of one state and its decays."""
        return (self.mamba_heads * self.mamba_dim * self.mamba_state + self.mamba_heads) * self.state


@dataclasses.dataclass(frozen=True)
class Machine:
    """Bytes a rank sends per second at large messages, seconds before the first byte, attention's FLOP per second."""

    bandwidth: float = 250 * 2**30
    latency: float = 43e-6
    flops: float = 550e12


def star(tokens: int, rows: int = 16) -> Forest:
    """One prompt of half the tokens, and `rows` completions."""
    prompt, tail = tokens // 2, tokens // (2 * rows)
    return _forest([prompt] + [tail] * rows, [-1] + [0] * rows)


def forest(tokens: int, stars: int = 64, rows: int = 8) -> Forest:
    """Many stars side by side."""
    share = tokens // stars
    lengths, parents = [], []
    for _ in range(stars):
        root = len(lengths)
        lengths += [share // 2] + [share // (2 * rows)] * rows
        parents += [-1] + [root] * rows
    return _forest(lengths, parents)


def tree(tokens: int, depth: int = 9) -> Forest:
    """A binary tree of nodes of one length."""
    nodes = 2**depth - 1
    parents = [-1] * nodes
    order: list[int] = []

    def walk(level: int, parent: int) -> None:
        number = len(order)
        order.append(number)
        parents[number] = parent
        for _ in range(2 if level + 1 < depth else 0):
            walk(level + 1, number)

    walk(0, -1)
    return _forest([tokens // nodes] * nodes, parents)


def _forest(lengths: list[int], parents: list[int]) -> Forest:
    sizes = np.array(lengths)
    leaves = sorted(set(range(len(lengths))) - set(parents))
    return Forest(np.cumsum(sizes) - sizes, sizes, np.array(parents), np.array(leaves))


CASES = {"one sequence": lambda n: _forest([n], [-1]), "star of 16": star, "64 stars of 8": forest, "tree of depth 9": tree}


def layer(pack: Forest, ranks: int, model: Model) -> dict[str, Any]:
    """Forward bytes that the busiest of some ranks sends per layer, by scheme, and the balance of each layout; backward sends as many.

    Of more than 8 ranks five are looked at: the first two, the last two and one between.
    """
    sample = [0, 1, ranks // 2, ranks - 2, ranks - 1] if ranks > 8 else list(range(ranks))
    layouts = {kind: make(pack, ranks) for kind, make in LAYOUTS.items()}
    plans = [RankPlan(pack, layouts["contiguous"], layouts["balanced"], rank) for rank in sample]
    size = plans[0].size
    others = (ranks - 1) / ranks
    crossing = {"balanced": max(plan.into.crossing for plan in plans)}
    crossing["zigzag"] = max(route_between(layouts["contiguous"], layouts["zigzag"], rank).crossing for rank in sample)
    sent_states = max(_others(plan.states[0].send_sizes, plan.rank) for plan in plans)
    sent_halo = max(_others(plan.halo(model.width)[0].send_sizes, plan.rank) for plan in plans)
    work = padded_work(pack, plans[0].sequence.padded)
    loads = {kind: shards.loads(work) for kind, shards in layouts.items()}
    return {
        "tokens per rank": size,
        "balance": {kind: round(float(load.mean() / load.max()), 4) for kind, load in loads.items()},
        "pairs": {kind: int(load.max()) for kind, load in loads.items()},
        "bytes": {
            "attention gather": crossing["balanced"] * 2 * model.query_row + size * (ranks - 1) * model.key_row,
            "attention heads": int(size * others * (2 * model.query_row + model.key_row)),
            "recurrent states": sent_states * model.state_row + sent_halo * model.mamba_row,
            "recurrent tokens": int(size * others * (model.mamba_row + model.mamba_heads * model.mamba_dim * model.element)),
            "recurrent zigzag": crossing["zigzag"] * (model.mamba_row + model.mamba_heads * model.mamba_dim * model.element),
        },
    }


def _others(sizes: tuple[int, ...], rank: int) -> int:
    return sum(sizes) - sizes[rank]


def seconds(found: dict[str, Any], model: Model, machine: Machine) -> dict[str, float]:
    """Forward time of what is sent, and of attention's pairs by layout; nothing overlaps."""
    sent = {name: machine.latency + value / machine.bandwidth for name, value in found["bytes"].items()}
    work = {f"pairs {kind}": 4 * pairs * model.heads * model.head_dim / machine.flops for kind, pairs in found["pairs"].items()}
    return {name: round(value, 9) for name, value in (sent | work).items()}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--ranks", type=int, nargs="*", default=list(RANKS))
    parser.add_argument("--out", type=Path, default=RESULT)
    chosen = parser.parse_args(arguments)
    model, machine, results = Model(), Machine(), []
    columns = ("attention gather", "attention heads", "recurrent states", "recurrent tokens", "recurrent zigzag")
    table = Table(
        "pack", "C", "balance: contiguous", "zigzag", "balanced", *columns, title=f"MiB sent per rank and layer, {chosen.tokens} tokens"
    )
    for name, make in CASES.items():
        pack = make(chosen.tokens)
        for ranks in chosen.ranks:
            found = layer(pack, ranks, model)
            results.append({"pack": name, "ranks": ranks, **found, "seconds": seconds(found, model, machine)})
            balance = (f"{found['balance'][kind]:.3f}" for kind in ("contiguous", "zigzag", "balanced"))
            table.add_row(name, str(ranks), *balance, *(f"{found['bytes'][column] / 2**20:.2f}" for column in columns))
    Console(width=160).print(table)
    write(chosen.out, {"model": dataclasses.asdict(model), "machine": dataclasses.asdict(machine), "layers": results})


if __name__ == "__main__":
    main(sys.argv[1:])
